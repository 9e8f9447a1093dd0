"""Write one page with the curves of several runs over one another.

Runs whose configs differ only in the seed are one line, their mean, in a band from the lowest to
the highest. A table has the keys that differ.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlx.base import UserError
from rlx.cli.text import number, visible
from rlx.observe.charts import Line, line_chart, mean, smooth
from rlx.observe.report_learning import ON_DATASET, ON_ROLLOUTS, OPTIMISATION, Chart
from rlx.observe.run_report import flatten, render
from rlx.observe.rundir import Run, finite, load, lookup
from rlx.system.jsonl import write_atomically

_COLORS = 12
_SPEED = (
    Chart("Time of a step", "seconds", (("step_seconds", "seconds", ""),)),
    Chart("Generated tokens", "a second", (("generated_tokens_per_second", "tokens", ""),)),
    Chart("Utilisation (MFU)", "as a share of the peak", (("mfu", "MFU", ""),)),
    Chart("Staleness", "mean of a batch, in versions", (("staleness_mean", "mean", ""),)),
)  # fmt: skip


def write_overlay(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write the page of the runs in `rows`, of `run_table.summary`; return its path."""
    with_step = [row for row in rows if row["step"]]
    runs = {row["run"]: load(row["run"], samples=False) for row in with_step}
    if not runs:
        raise UserError(f"none of {len(rows)} runs has a finished step; train first")
    configs = {name: dict(flatten(run.config)) for name, run in runs.items()}
    keys = dict.fromkeys(key for config in configs.values() for key in config if key != "seed")
    differ = [key for key in keys if len({c.get(key, "") for c in configs.values()}) > 1]
    settings, table = dict[str, list[Run]](), []
    for row in with_step:
        values = [configs[row["run"]].get(key, "–") for key in differ]
        name = ", ".join(f"{k}={v}" for k, v in zip(differ, values, strict=True)) or "all seeds"
        settings.setdefault(name, []).append(runs[row["run"]])
        color = [*settings].index(name) % _COLORS + 1
        done = str(row["seed"]), row["state"], f"{row['step']} of {row['total']}"
        scores = [number(finite(row[key])) for key in ("held_out", "best", "minutes")]
        table.append((color, [Path(row["run"]).name, *values, *done, *scores]))
    columns = ["run", *differ, "seed", "state", "step", "held-out", "best", "minutes"]
    finished = sum(row["state"] == "finished" for row in rows)
    state = {"finished": finished == len(rows), "state": f"{finished} of {len(rows)} finished"}
    facts = [f"{len(settings)} setting{'s' * (len(settings) != 1)}"]
    facts += [f"{len(rows) - len(with_step)} without a step"] * (len(rows) > len(with_step))
    text = render(
        name=path.stem, header={**state, "facts": facts}, on_dataset=True,
        runs={"columns": columns, "rows": sorted(table)}, speed=_charts(settings, _SPEED),
        learning=_charts(settings, (*ON_ROLLOUTS, *ON_DATASET)),
        optimisation=_charts(settings, OPTIMISATION),
    )  # fmt: skip
    write_atomically(path, visible(text).encode("utf-8", "replace"))
    return path


def _charts(settings: Mapping[str, Sequence[Run]], charts: Sequence[Chart]) -> list[dict[str, Any]]:
    """Return a chart of each metric that some run has, with a line for each setting."""
    plots: dict[str, Any] = {}
    for chart in charts:
        metrics = [(key, name, False) for key, name, _ in chart.trained]
        metrics += [(key, name, True) for key, name, _ in chart.held_out]
        for key, name, held_out in metrics:
            lines = [
                _line(setting, f"c{i % _COLORS + 1}", runs, key, held_out)
                for i, (setting, runs) in enumerate(settings.items())
            ]
            title = f"{chart.title}: {name}" if len(metrics) > 1 else chart.title
            title = name.capitalize() if chart in ON_ROLLOUTS else title
            plot = line_chart(title, key, lines, ([], []), low=chart.low, high=chart.high)
            plots.setdefault(key, plot)
    return [*filter(None, plots.values())]


def _line(setting: str, color: str, runs: Sequence[Run], key: str, held_out: bool) -> Line:
    """Return the line of a metric: of one run as it is, of several their mean and a band."""
    single, points = len(runs) == 1, dict[int, list[tuple[float, float | None]]]()
    for run in runs:
        records = run.evals if held_out else run.metrics
        values = [finite(lookup(record, key)) for record in records]
        values = values if held_out or single else smooth(values)
        for record, value in zip(records, values, strict=True):
            if value is not None:
                place = value, finite(record.get("elapsed_seconds"))
                points.setdefault(record["step"], []).append(place)
    steps = sorted(points)
    columns = [[*zip(*points[step], strict=True)] for step in steps]
    band = [min(values) for values, _ in columns], [max(values) for values, _ in columns]
    return Line(
        setting, [mean(values) for values, _ in columns], color,
        smooth=single and not held_out, dots=held_out, steps=steps,
        times=[mean(times) for _, times in columns], band=None if single else band,
    )  # fmt: skip
