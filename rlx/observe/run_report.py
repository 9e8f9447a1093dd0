"""Write WORKDIR/report.html, one page that shows what a run did.

The template report.html has a script that draws the charts with uPlot. The page makes no request,
runs one script that is allowed by its hash, and escapes everything it shows.
"""

import base64
import hashlib
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

from rlx.base import UserError, leaves
from rlx.cli.text import duration, number, visible
from rlx.observe import report_learning, report_samples, report_speed
from rlx.observe.charts import percent, shares
from rlx.observe.rundir import Run, finite, gaps, load
from rlx.system.image_store import ImageStore, thumbnail
from rlx.system.jsonl import has_step, write_atomically

_SKIPPED = 20  # rows named
_PARTS = ("tiles", "on_dataset", "learning", "optimisation", "busy", "lags", "speed", "planned",
          "timeline", "samples", "config", "changes", "environment", "skipped", "runs")  # fmt: skip


def write_report(workdir: str | os.PathLike, defaults: Mapping[str, Any] | None = None) -> Path:
    """Write WORKDIR/report.html, with keys unlike `defaults`; return its path, or UserError."""
    run = load(workdir)
    path = Path(workdir) / "report.html"
    write_atomically(path, visible(page(run, defaults)).encode("utf-8", "replace"))
    return path


def render(**values: Any) -> str:
    """Return the page of the template's values; those left out are empty."""
    import jinja2  # takes a moment to import

    here = resources.files("rlx.observe")
    names = "uplot/uPlot.min.css", "report.css", "uplot/uPlot.iife.min.js", "report.js"
    files = [(here / name).read_text(encoding="utf-8") for name in names]
    style, script = "\n".join(files[:2]), "\n".join(files[2:])
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    template = environment.from_string((here / "report.html").read_text(encoding="utf-8"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assets = {"style": style, "script": script, "script_hash": digest}
    return template.render(dict.fromkeys(_PARTS, ()) | assets | values)


def page(run: Run, defaults: Mapping[str, Any] | None = None) -> str:
    """Return the whole page of a run."""
    steps = sorted(v for v in run.series("step_seconds") if v) or [1.0]
    phases = report_speed.phase_totals(run)  # longest first
    trainer = shares(phases, sum(phases.values()), report_speed.color_of)
    busy = {"trainer": trainer} | report_speed.busy_shares(run.spans)
    return render(
        name=run.path.name, header=_header(run),
        tiles=[*report_learning.tiles(run), *_cost_tiles(run)],
        on_dataset=report_learning.on_dataset(run), learning=report_learning.learning(run),
        optimisation=report_learning.optimisation(run),
        busy={name: parts for name, parts in busy.items() if parts},
        lags=report_speed.lag_shares(run), speed=report_speed.speed(run),
        planned=report_speed.planned_and_measured(run),
        timeline=report_speed.overview(run.spans, min(60.0, 5 * steps[len(steps) // 2])),
        samples=report_samples.cards(run.samples, partial(_image, run.path)) if run.samples else {},
        views=report_samples.VIEWS,
        config=_config(run, defaults), changes=_changes(run), environment=flatten(run.environment),
        skipped=_failed_rows(run), num_skipped=len(run.skipped),
    )  # fmt: skip


def _image(workdir: Path, name: str) -> str:
    """Return an image of a run as a data URI; "" if it is missing, or Pillow is."""
    with suppress(UserError, ValueError):
        return thumbnail(ImageStore(workdir / "images").get(Path(name).name))
    return ""


def flatten(tree: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (dotted key, value as text) of every leaf that is set, in order."""
    pairs = [(key, value) for key, value in leaves(tree) if value is not None]
    several = [(key, v if isinstance(v, list | tuple) else [v]) for key, v in pairs]
    return [(key, ", ".join(map(str, items))) for key, items in several]


def _header(run: Run) -> dict[str, Any]:
    total, done = run.total, _last(run, "step") or 0
    finished = total is not None and done >= total
    progress = f"{done:g} of {total:g} steps" if total else f"{done:g} steps"
    rows = [_facts(replace(run, config=start["config"])) for start in run.starts]
    facts = [" → ".join(dict.fromkeys(filter(None, fact))) for fact in zip(*rows, strict=True)]
    if holes := gaps(run.metrics, int(max([done, *(e["step"] for e in run.evals)]))):
        facts.append(f"no record of {holes}")
    by_start = {record.get("start"): record.get("continued_tokens") or 0 for record in run.metrics}
    if tokens := sum(by_start.values()):
        facts.append(f"{number(tokens)} tokens continued after restarts")
    if run.ended_at:
        facts.append(time.strftime("%-d %B %Y, %H:%M", time.localtime(run.ended_at)))
    state = "finished" if finished else progress
    return {"finished": finished, "state": state, "facts": list(filter(None, facts))}


def _facts(run: Run) -> list[str]:
    """Return the header's facts of one start; "" for a setting that is missing."""
    elsewhere = run.setting("fleet.addresses") or run.setting("fleet.join")
    terms = " + ".join(f"{weight:g}·{name}" for name, weight in run.setting("reward.terms", ()))
    if report_learning.on_dataset(run):
        source = [_fact(run, "{} rows a batch", "rollout.batch_prompts")]
    else:
        source = [
            f"reward {terms}" if terms else _fact(run, "reward {}", "reward.name"),
            _fact(run, "{} prompts × {} samples", "rollout.batch_prompts", "sampling.n_samples"),
            _fact(run, "max staleness {}", "rollout.max_staleness"),
        ]
    servers = "no servers"
    if elsewhere:  # whose number and engine no key has
        count = len({s.process for s in run.spans if s.process.startswith("server ")})
        servers = f"{count or ''} server{'s' * (count != 1)}".strip()
    elif run.setting("fleet.num_servers"):
        servers = _fact(run, "{} × {} server", "fleet.num_servers", "fleet.engine")
    return [
        str(run.setting("algorithm.preset", "")).upper().replace("_", " "),
        Path(str(run.setting("model.path", ""))).name,
        *source,
        servers,
        _fact(run, "seed {}", "seed"),
    ]


def _fact(run: Run, form: str, *keys: str) -> str:
    """Return `form` with the config's values of `keys`; "" when one is not set."""
    values = [run.setting(key) for key in keys]
    return "" if None in values or "" in values else form.format(*values)


def _cost_tiles(run: Run) -> Iterator[tuple[str, str, str, str]]:
    """Yield (color, title, value, note) of time, tokens, speed, waiting, staleness and losses."""
    if elapsed := _last(run, "elapsed_seconds"):
        typical = sorted(v for v in run.series("step_seconds") if v is not None)
        note = f"{duration(typical[len(typical) // 2])} a step" if typical else ""
        yield "", "Wall time", duration(elapsed), note
    tokens = sum(v or 0 for v in run.series("n_valid_tokens"))
    if tokens and elapsed:
        yield "", "Tokens trained", number(tokens), f"{number(tokens / elapsed)} a second"
    if shared := sum(v or 0 for v in run.series("n_shared_tokens")):
        total = sum(v or 0 for v in run.series("n_tokens"))
        yield "", "Shared tokens", percent(shared / total), "computed for another sample"
    if used := sorted(v for v in run.series("mfu") if v is not None):
        yield "", "MFU", percent(used[len(used) // 2]), "of the peak, while it computes"
    if phases := report_speed.phase_totals(run):
        waiting = phases.get("wait", 0) / sum(phases.values())
        yield "", "Trainer waiting", percent(waiting), "of its time"
    if lags := [v for v in run.series("staleness_max") if v is not None]:
        note = _fact(run, "at most; limit {}", "rollout.max_staleness") or "at most"
        yield "", "Staleness", number(max(lags)), note
    if (dropped := _last(run, "dropped")) is not None:
        yield "bad" if dropped else "", "Dropped", number(dropped), "prompts"


def _config(run: Run, defaults: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the config's keys, and those that differ from the defaults; empty without one."""
    rows, standard = flatten(run.config), dict(flatten(defaults or {}))
    changed = [(key, value) for key, value in rows if standard.get(key) != value]
    return {"rows": rows, "changed": changed} if rows else {}


def _changes(run: Run) -> list[tuple[int, float | None, str]]:
    """Return step, seconds and text of each change of settings."""
    starts = [start for start in run.starts if start.get("changed") and has_step(start)]
    times = {record["step"]: finite(record.get("elapsed_seconds")) for record in run.metrics}
    return [(s["step"], times.get(s["step"]), "\n".join(map(str, s["changed"]))) for s in starts]


def _failed_rows(run: Run) -> list[tuple[str, str]]:
    """Return the last rows that failed in every attempt, and why."""
    head, text = "{which} {set} row {row}, {attempts} attempts", "{text}\n{error}\n{message}"
    rows = [defaultdict(str, record) for record in run.skipped[-_SKIPPED:]]
    return [(head.format_map(row).replace("  ", " "), text.format_map(row)) for row in rows]


def _last(run: Run, key: str) -> float | None:
    return next((v for v in reversed(run.series(key)) if v is not None), None)
