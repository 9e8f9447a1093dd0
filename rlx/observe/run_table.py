"""Sum up runs in a table, from the files of each WORKDIR: settings, progress, results, state.

Nothing is changed. A damaged or half-written directory gives a row too.
"""

import math
import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlx.base import UserError, unknown
from rlx.cli.text import aligned, number
from rlx.observe.charts import mean
from rlx.observe.metrics import HELD_OUT, STARTS, TRAINED, present
from rlx.observe.run_report import flatten
from rlx.observe.rundir import finite, lookup
from rlx.system.jsonl import has_step, read_json, read_jsonl, read_last
from rlx.system.workdir_lock import holder

OUTPUT = "output.log"  # what a sweep's run printed
_MARKS = {STARTS, "metrics.jsonl", "console.log", OUTPUT}  # files that only a run's WORKDIR has
_CHANGED = 60  # characters of the changed keys


def find(places: Iterable[Path]) -> list[Path]:
    """Return the WORKDIRs among and under `places`; raise UserError for no directory."""
    paths = []
    for place in places:
        if not place.is_dir():
            raise UserError(f"{place} is not a directory; give a WORKDIR, or a directory of some")
        for path, names, files in os.walk(place):
            names[:] = sorted(name for name in names if name[0] != ".")
            if _MARKS.intersection(files):
                paths.append(Path(path))
                names.clear()
    return [*dict.fromkeys(paths)]


def summary(path: Path, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of a WORKDIR, as JSON types.

    `config` is the file with its argument, and `changed` has the keys that the command line gives.
    Without a file these are the keys that differ from `defaults`. `state` is running, finished,
    stopped, failed or unknown; `note` says why, and what is damaged.
    """
    state, note = _state(path)
    starts = [start for start in read_jsonl(path / STARTS) if "start" in start]
    newest = starts[-1] if starts else {}
    config = newest.get("config") or read_json(path / "config.json")
    config = config if isinstance(config, dict) else {}
    file, changed = _given_keys(str(lookup(newest, "environment.command") or ""))
    last = read_last(path / "metrics.jsonl")
    evals = [*filter(has_step, read_jsonl(path / "eval.jsonl"))]
    key, metric, scores = held_out(evals)
    best = (min if "loss" in key else max)(scores, default=(None, None), key=lambda pair: pair[0])
    damage = ["config.json is missing or damaged"] * (not read_json(path / "config.json"))
    if (done := last.get("step", 0)) < max([0, *(e["step"] for e in evals)]):
        damage += [f"metrics.jsonl is damaged: it ends at step {done}, eval.jsonl goes on"]
    times = [v for e in (last, *evals[-1:]) if (v := finite(e.get("elapsed_seconds")))]
    return {
        "run": str(path), "state": state, "config": file or lookup(config, "algorithm.preset"),
        "changed": changed if file else dict(set(flatten(config)) - set(flatten(defaults))),
        "seed": config.get("seed"), "step": done,
        "total": config.get("total_steps"), "metric": metric,
        "held_out": next((finite(e[key]) for e in reversed(evals) if key in e), None),
        "best": best[0], "best_step": best[1],
        "minutes": max(times) / 60 if times else None,
        "note": "; ".join(filter(None, (note, *damage))),
    }  # fmt: skip


def held_out(evals: Sequence[Mapping[str, Any]]) -> tuple[str, str, list[tuple[float, int]]]:
    """Return the key and the name of the held-out metric, "" without any; its values and steps."""
    key, metric = next(iter(present(HELD_OUT, evals).items()), ("", ""))
    scores = [(value, e["step"]) for e in evals if (value := finite(e.get(key))) is not None]
    return key, metric, scores


def score(path: Path, step: int) -> float:
    """Return a run's held-out value until a step, more is better; else its late reward or loss."""

    def until(name: str) -> list[dict[str, Any]]:
        return [r for r in read_jsonl(path / name) if has_step(r) and r["step"] <= step]

    latest = [e for e in until("eval.jsonl") if present(HELD_OUT, [e])][-1:]
    key = next(iter(present(HELD_OUT, latest)), "")
    if not (key and latest[0]["step"]):  # at 0 no setting has done anything yet
        latest = [r for r in until("metrics.jsonl") if r["step"] > 0.75 * step]
        key = next(iter(present(TRAINED, latest)), "")
    values = [finite(r.get(key)) for r in latest]
    diverged = not values or values[-1] is None  # NaN is null there
    return -math.inf if diverged else (mean(values) or 0.0) * (-1 if "loss" in key else 1)


def sorted_rows(rows: Sequence[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """Return rows by a field or a changed key, the largest number first; UserError for no key."""
    known = {name for row in rows for name in (*row, *row["changed"])} - {"changed"}
    if rows and key not in known:
        raise unknown("--sort", key, known)

    def place(row: dict[str, Any]) -> tuple[bool, float, str]:
        value = row["changed"].get(key, row.get(key))
        with suppress(TypeError, ValueError):  # a command line has numbers as text
            value = float(row["changed"].get(key, ""))
        return value is None, -(finite(value) or 0.0), str(value)

    return sorted(rows, key=place)


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the rows as lines of text, then the changed keys that all share, and all notes."""
    changes = [set(row["changed"].items()) for row in rows]
    common = set.intersection(*changes) if len(rows) > 1 else set()
    names = ("run", "state", "config", "changed", "seed", "step", "held-out", "best", "minutes")
    cells, notes = [names], [f"all: {_settings(common)}"] * bool(common)
    for row in rows:
        metric = "" if row["metric"] == "greedy" else row["metric"]
        settings = _settings(pair for pair in row["changed"].items() if pair not in common)
        short = settings if len(settings) <= _CHANGED else f"{settings[: _CHANGED - 1]}…"
        step = f"{row['step']}/{number(finite(row['total']))}"
        scores = f"{metric} {number(row['held_out'])}", f"{number(row['best'])} @{row['best_step']}"
        cells.append((row["run"], row["state"], str(row["config"] or "–"), short,
                      number(finite(row["seed"])), step, *(scores if row["metric"] else ("–", "–")),
                      f"{row['minutes']:.1f}" if row["minutes"] else "–"))  # fmt: skip
        notes += [f"{row['run']}: {row['note']}"] * bool(row["note"])
    return [*aligned(cells, 4), *notes]


def _settings(pairs: Iterable[tuple[str, str]]) -> str:
    return ", ".join(f"{key}={value}" for key, value in pairs)


def _state(path: Path) -> tuple[str, str]:
    """Return the state of a run, and why."""
    if lock := holder(path):
        pid, lives = lock
        return ("running", f"process {pid}") if lives else ("stopped", f"process {pid} was killed")
    *_, last = {}, *read_jsonl(path / STARTS)  # after the lock, which a run drops later
    ended = str(last.get("ended", "")) in ("finished", "stopped", "failed")
    return (last["ended"], str(last.get("error", ""))) if ended else ("unknown", "no end recorded")


def _given_keys(command: str) -> tuple[str, dict[str, str]]:
    """Return the config's file and the keys that a command line gives; the seed is left out."""
    try:
        words = shlex.split(re.sub(r"--config\s+", "--config=", command))
    except ValueError:
        return "", {}
    flags = dict(word.split("=", 1) for word in words if re.match(r"--config[.\w]*=", word))
    name, _, argument = flags.pop("--config", "").removeprefix("rlx:").partition(":")
    changed = {key.removeprefix("--config."): value for key, value in flags.items()}
    changed.pop("seed", None)
    return f"{Path(name).stem}:{argument}".rstrip(":"), changed
