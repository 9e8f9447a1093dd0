"""WORKDIR/report.html: what a run did, on one page that needs nothing else.

`write_report` reads the run's files, `page` is the pure function from them to HTML. The page
makes no request, runs one script that is allowed by its hash, and escapes everything it shows.
"""

import base64
import hashlib
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from rlx.cli.text import duration, number, visible
from rlx.observe import report_learning
from rlx.observe import samples as transcripts
from rlx.observe.charts import (
    Line,
    bar_chart,
    grid,
    line_chart,
    percent,
    share_bar,
    stacked_bars,
)
from rlx.observe.jsonl import write_atomically
from rlx.observe.report_timeline import busy_shares, color_of, overview
from rlx.observe.rundir import Run, finite, load

_SKIPPED = 20  # rows named
_WIDE, _HALF = (1096, 320), (532, 220)
# A small chart: title, what it says, lines of (metric, name, color), least y that must show.
_SMALL = (
    ("Entropy", "nats a token; falls as the policy commits", 0, (("entropy", "entropy", "c1"),)),
    ("Gradient norm", "before clipping", 0, (("grad_norm", "norm", "c4"),)),
    ("Policy loss", "the objective being minimised", None, (("actor_loss", "loss", "c2"),)),
    ("Off-policy drift", "KL of behaviour and of the update, nats", 0,
     (("behaviour_kl", "behaviour", "c5"), ("ppo_approx_kl", "update", "c6"))),
    ("Importance weights", "mean ratio; 1 is on-policy", None,
     (("behaviour_weight", "behaviour", "c5"), ("importance_weight", "importance", "c6"))),
    ("Clipped tokens", "share of trained tokens at the clip", 0,
     (("actor_clip_ratio", "clipped", "c2"),)),
    ("Completion length", "mean trained tokens a trajectory", 0,
     (("avg_seq_len", "tokens", "c3"),)),
    ("Cut completions", "share that hit the token limit", 0, (("no_eos_ratio", "cut", "c5"),)),
    ("Chosen and rejected", "their scores, or β·log(π/π_ref)", None,
     (("pair_chosen", "chosen", "c3"), ("pair_rejected", "rejected", "c8"))),
    ("Distance to the anchor", "KL to the reference or the teacher, nats a token", 0,
     (("reference_kl", "KL", "c8"),)),
    ("Learning rate", "after the schedule", 0, (("learning_rate", "rate", "c7"),)),
)  # fmt: skip


def write_report(workdir: str | os.PathLike) -> Path:
    """Writes WORKDIR/report.html from what the run left there so far, and returns its path.

    Raises:
      UserError: when WORKDIR is no run's directory or cannot be written.
    """
    run = load(workdir)
    path = Path(workdir) / "report.html"
    write_atomically(path, visible(page(run)).encode("utf-8", "replace"))
    return path


def page(run: Run) -> str:
    """The whole page."""
    here = resources.files("rlx.observe")
    style = (here / "report.css").read_text(encoding="utf-8")
    script = (here / "report.js").read_text(encoding="utf-8")
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{allowed}'"
    parts = [
        ("learning", "Learning", report_learning.charts(run)),
        ("optimisation", "Optimisation", _optimisation(run)),
        (
            "asynchrony",
            "Time" if report_learning.on_dataset(run) else "Asynchrony",
            _asynchrony(run),
        ),
        ("timeline", "Timeline", _timeline(run)),
        ("samples", "Samples", _samples(run)),
        ("setup", "Setup", _setup(run)),
    ]
    parts = [part for part in parts if part[2]]
    links = "".join(f'<a href="#{key}">{title}</a>' for key, title, _ in parts)
    sections = "".join(
        f'<section id="{key}"><h2>{title}</h2>{body}</section>' for key, title, body in parts
    )
    name = escape(run.path.name)
    return f"""<!doctype html>
<html lang="en" data-axis="step">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{name} · rlx</title>
<style>{style}</style>
</head>
<body>
<nav><div><b>rlx</b>{links}<span class="fill"></span>{_SWITCHES}</div></nav>
<main>{_header(run, name)}{_tiles(run)}{sections}</main>
<footer>Written by rlx from {escape(run.path.name)}/ · open timeline.json in
ui.perfetto.dev for every span · metrics.jsonl has every number</footer>
<div id="tip" hidden></div>
<script>{script}</script>
</body>
</html>
"""


_SWITCHES = (
    '<span class="switch" data-for="axis"><button data-to="step">steps</button>'
    '<button data-to="time">wall time</button></span>'
    '<span class="switch" data-for="theme"><button data-to="light" aria-label="light">☀</button>'
    '<button data-to="dark" aria-label="dark">☾</button></span>'
)


def _header(run: Run, name: str) -> str:
    total, done = finite(run.setting("total_steps")), _last(run, "step") or 0
    finished = total is not None and done >= total
    state = f"{done:g} of {total:g} steps" if total else f"{done:g} steps"
    if finished:
        state = "finished"
    facts = [
        str(run.setting("algorithm.preset", "")).upper().replace("_", " "),
        Path(str(run.setting("model.path", ""))).name,
        *_source_facts(run),
        _fact(run, "{} × {} server", "fleet.num_servers", "fleet.engine")
        if run.setting("fleet.num_servers") or run.setting("fleet.addresses")
        else "no servers",
        _fact(run, "seed {}", "seed"),
        time.strftime("%-d %B %Y, %H:%M", time.localtime(run.ended_at)) if run.ended_at else "",
    ]
    items = "".join(f"<li>{escape(fact)}</li>" for fact in facts if fact)
    return (
        f'<header><h1>{name}<span class="state {"done" if finished else "part"}">{state}</span>'
        f'</h1><ul class="facts">{items}</ul></header>'
    )


def _source_facts(run: Run) -> list[str]:
    """Where the batches come from."""
    if report_learning.on_dataset(run):
        return [_fact(run, "{} rows a batch", "rollout.batch_prompts")]
    return [
        _fact(run, "reward {}", "reward.name"),
        _fact(run, "{} prompts × {} samples", "rollout.batch_prompts", "sampling.n_samples"),
        _fact(run, "max staleness {}", "rollout.max_staleness"),
    ]


def _fact(run: Run, form: str, *keys: str) -> str:
    """`form` with the config's values of `keys`; empty when one is not set."""
    values = [run.setting(key) for key in keys]
    return "" if None in values or "" in values else form.format(*values)


def _tiles(run: Run) -> str:
    """The numbers a reader looks for first: (title, value, note) each, where known."""
    return (
        '<div class="tiles">'
        + "".join(
            f'<div class="card tile {kind}"><h3>{title}</h3><b>{escape(value)}</b>'
            f"<p>{escape(note)}</p></div>"
            for kind, title, value, note in (*report_learning.tiles(run), *_cost_tiles(run))
        )
        + "</div>"
    )


def _cost_tiles(run: Run) -> Iterator[tuple[str, str, str, str]]:
    elapsed = _last(run, "elapsed_seconds")
    if elapsed:
        typical = sorted(v for v in run.series("step_seconds") if v is not None)
        note = f"{duration(typical[len(typical) // 2])} a step" if typical else ""
        yield "", "Wall time", duration(elapsed), note
    tokens = sum(v or 0 for v in run.series("n_valid_tokens"))
    if tokens and elapsed:
        yield "", "Tokens trained", number(tokens), f"{number(tokens / elapsed)} a second"
    seconds = _phase_totals(run)
    if seconds:
        waiting = seconds.get("wait", 0) / sum(seconds.values())
        yield "", "Trainer waiting", percent(waiting), "of its time"
    lags = [v for v in run.series("staleness_max") if v is not None]
    if lags:
        note = _fact(run, "at most; limit {}", "rollout.max_staleness") or "at most"
        yield "", "Staleness", number(max(lags)), note
    dropped = _last(run, "dropped")
    if dropped is not None:
        yield "bad" if dropped else "", "Dropped", number(dropped), "trajectories"


def _optimisation(run: Run) -> str:
    charts = [
        line_chart(
            title,
            about,
            [Line(name, run.series(key), color, smooth=True) for key, name, color in rows],
            *run.axes(),
            span=(least, None),
        )
        for title, about, least, rows in _SMALL
    ]
    return grid("three", charts)


def _asynchrony(run: Run) -> str:
    totals = _phase_totals(run)
    whole = sum(totals.values())
    sides = ""
    if whole:
        parts = [(name, color_of(name), value / whole) for name, value in totals.items()]
        sides = share_bar("trainer", parts, "it waits when no batch is ready")
    sides += busy_shares(run.spans)
    if sides:
        sides = (
            '<figure class="card"><figcaption><h3>Where the time went</h3>'
            f"<p>shares of the whole run</p></figcaption>{sides}</figure>"
        )
    return sides + grid("two", [*_lag_charts(run), *_speed_charts(run, list(totals))])


def _lag_charts(run: Run) -> list[str]:
    lines = [
        Line("max", run.series("staleness_max"), "c8"),
        Line("mean", run.series("staleness_mean"), "c1", smooth=True),
    ]
    return [
        bar_chart(
            "Staleness of trained tokens",
            "versions between sampling and training, over all steps",
            _histogram(run),
            size=_HALF,
        ),
        line_chart(
            "Staleness by step",
            "versions; the limit is never passed",
            lines,
            *run.axes(),
            size=_HALF,
            span=(0, 1),
        ),
    ]


def _speed_charts(run: Run, phases: Sequence[str]) -> list[str]:
    steps, times = run.axes()
    layers: list[tuple[str, str, list[float]]] = [(n, color_of(n), []) for n in phases]
    for named in map(_phases, run.metrics):
        for name, _, values in layers:
            rest = sum(v for n, v in named.items() if n not in phases) if name == "other" else 0.0
            values.append(named.get(name, 0.0) + rest)
    speed = [
        Line("generated", run.series("generated_tokens_per_second"), "c3", smooth=True),
        Line("trained", run.series("consumed_tokens_per_second"), "c1", smooth=True),
    ]
    counts = [
        Line(name, run.series(name), color)
        for name, color in (("rejected", "c2"), ("failed", "c5"), ("skipped", "c8"))
    ]
    charts = [
        stacked_bars("Time of a step", "the trainer's phases", layers, steps, size=_HALF),
        line_chart("Tokens a second", "trained on, and generated by the fleet", speed,
                   steps, times, size=_HALF, span=(0, None)),
        line_chart("Publishing", "milliseconds the trainer stalls, until all have it, to load it",
                   _publishing(run), steps, times, size=_HALF, span=(0, None), robust=True,
                   form=lambda v: f"{number(v)} ms"),
    ]  # fmt: skip
    if any(v for line in counts for v in line.values):
        about = "rejected, failed and skipped so far; all give their place back"
        charts.append(line_chart("Groups", about, counts, steps, times, size=_HALF, span=(0, 1)))
    return charts


def _publishing(run: Run) -> list[Line]:
    """What each published version cost: the trainer's stall, the delivery, a server's load."""
    elapsed = {record["step"]: finite(record.get("elapsed_seconds")) for record in run.metrics}
    stall = [None if v is None else v * 1000 for v in run.series("seconds.publish")]
    lines = [Line("stall", stall, "c2", smooth=True)]
    for name, process, color in (("delivery", "publish", "c4"), ("load", "server", "c3")):
        costs: dict[int, list[float]] = {}
        for span in run.spans:
            if not span.process.startswith(process):
                continue
            if (version := finite(span.args.get("version"))) is not None:
                costs.setdefault(int(version), []).append((span.end - span.start) / 1000)
        versions = sorted(costs)
        values = [sum(costs[v]) / len(costs[v]) for v in versions]
        times = [elapsed.get(version) for version in versions]
        lines.append(Line(name, values, color, smooth=True, steps=versions, times=times))
    return lines


def _timeline(run: Run) -> str:
    recent = sorted(v for v in run.series("step_seconds") if v) or [1.0]
    body = overview(run.spans, seconds=min(60.0, 5 * recent[len(recent) // 2]))
    if not body:
        return ""
    switch = _switch("window", (("last", "End of the run"), ("first", "Start of the run")))
    return (
        f'<figure class="card" data-window="last"><figcaption><h3>What ran when</h3>'
        f"<p>a few steps; seconds since the first span</p>{switch}</figcaption>{body}</figure>"
    )


def _samples(run: Run) -> str:
    if not run.samples:
        return ""
    views = _switch("view", transcripts.VIEWS)
    sampled = any(transcripts.trained_versions(sample) for sample in run.samples)
    key = "".join(
        f'<i class="lag lag{lag}">{lag}{"+" if lag == 5 else ""}</i>'
        for lag in range(_top_lag(run) + 1)
    )
    shading = (
        f'<span class="key">version lag of each token {key}</span>'
        f"{_switch('shade', (('on', 'Shaded'), ('off', 'Plain')))}"
    )
    return (
        f'<div class="samples" data-view="best" data-shade="on" data-prompts="off">'
        f'<div class="bar-row">{views}'
        f"{shading if sampled else ''}"
        f'{_switch("prompts", (("off", "Completions"), ("on", "With prompts")))}</div>'
        f"{transcripts.cards(run.samples)}</div>"
    )  # fmt: skip


def _setup(run: Run) -> str:
    tables = []
    if run.config:
        rows = flatten(run.config)
        standard = _standard_config()
        changed = [(key, value) for key, value in rows if standard and standard.get(key) != value]
        tables.append(
            '<figure class="card"><figcaption><h3>Configuration</h3>'
            f"<p>{len(changed)} of {len(rows)} keys differ from the defaults</p></figcaption>"
            f"{_table(changed or rows)}"
            f"<details><summary>All keys</summary>{_table(rows)}</details></figure>"
        )
    if run.environment:
        tables.append(
            '<figure class="card"><figcaption><h3>Environment</h3><p>where the run ran</p>'
            f"</figcaption>{_table(flatten(run.environment))}</figure>"
        )
    return grid("two", [*tables, *_skipped(run)])


def _skipped(run: Run) -> list[str]:
    """The rows that no attempt got through, with why."""
    if not run.skipped:
        return []
    rows = [
        (
            f"{record.get('which')} row {record.get('row')}, {record.get('attempts')} attempts",
            "\n".join(str(record.get(key, "")) for key in ("text", "error", "message")),
        )
        for record in run.skipped[-_SKIPPED:]
    ]
    return [
        '<figure class="card"><figcaption><h3>Skipped rows</h3>'
        f"<p>{len(run.skipped)} rows failed in every attempt; skipped.jsonl names all</p>"
        f"</figcaption>{_table(rows)}</figure>"
    ]


def flatten(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """(dotted key, value as text) of every leaf that is set, in order."""
    rows = []
    for key, value in tree.items():
        if isinstance(value, Mapping):
            rows += flatten(value, f"{prefix}{key}.")
        elif value is not None:
            items = value if isinstance(value, list | tuple) else [value]
            rows.append((f"{prefix}{key}", ", ".join(str(item) for item in items)))
    return rows


def _standard_config() -> dict[str, str]:
    from rlx.config import default  # ml_collections takes a moment to import

    return dict(flatten(default().to_dict()))


def _table(rows: Sequence[tuple[str, str]]) -> str:
    body = "".join(
        f"<tr><th>{escape(key)}</th><td>{escape(value) if value else '<i>empty</i>'}</td></tr>"
        for key, value in rows
    )
    return f"<table>{body}</table>"


def _switch(name: str, choices: Sequence[tuple[str, str]]) -> str:
    buttons = "".join(f'<button data-to="{key}">{title}</button>' for key, title in choices)
    return f'<span class="switch" data-for="{name}">{buttons}</span>'


def _last(run: Run, key: str) -> float | None:
    return next((v for v in reversed(run.series(key)) if v is not None), None)


def _phase_totals(run: Run) -> dict[str, float]:
    """Seconds of each phase over the run, longest first; those below 1 % are one, `other`."""
    totals: dict[str, float] = {}
    for record in run.metrics:
        for name, value in _phases(record).items():
            totals[name] = totals.get(name, 0.0) + value
    whole = sum(totals.values())
    other = totals.pop("other", 0.0)
    ranked = sorted(totals.items(), key=lambda item: -item[1])
    large = dict([(name, value) for name, value in ranked if value > 0.01 * whole][:6])
    other += sum(totals.values()) - sum(large.values())
    return large | {"other": other} if other > 1e-6 * whole else large


def _phases(record: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of each phase of a step; what step_seconds holds besides them is `other`."""
    seconds = record.get("seconds")
    named = {
        str(name): max(0.0, finite(value) or 0.0)
        for name, value in (seconds.items() if isinstance(seconds, Mapping) else ())
    }
    rest = (finite(record.get("step_seconds")) or 0.0) - sum(named.values())
    if named and rest > 0:
        named["other"] = named.get("other", 0.0) + rest
    return named


def _histogram(run: Run) -> list[tuple[str, float, str]]:
    counts: Counter[int] = Counter()
    for record in run.metrics:
        histogram = record.get("staleness_histogram")
        for lag, tokens in histogram.items() if isinstance(histogram, Mapping) else ():
            if str(lag).isdigit():
                counts[int(lag)] += int(finite(tokens) or 0)
    whole = sum(counts.values())
    if not whole:
        return []
    lags = range(max(counts) + 1)
    return [
        (f"lag {lag}", counts[lag] / whole, f"lag {lag}\n{counts[lag]:,} tokens") for lag in lags
    ]


def _top_lag(run: Run) -> int:
    return int(min(5, max((v for v in run.series("staleness_max") if v is not None), default=0)))
