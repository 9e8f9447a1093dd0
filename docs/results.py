"""Write docs/results.md from the records of the experiments: python docs/results.py

A series is one setting with its seeds. Its curve of held-out accuracy comes from `*-SEED.jsonl`,
`seed*.json` or `records.json`. tests/docs/results_test.py checks the committed page.
"""

import json
import re
from pathlib import Path

PAGE = Path(__file__).with_suffix(".md")
EXPERIMENTS = PAGE.parents[1] / "experiments"
HEAD = """# Results

Held-out accuracy before and after training, of every recorded run. A row is one setting, with the
smallest and the largest value of its seeds. *Best* is the highest evaluation of a run. Each
experiment's page has its question, its command, its machine, and the meaning of its settings'
names. `python docs/results.py` writes this page from the records in
[`experiments/`](../experiments). All runs used two CPU cores. Speed has
[a page of its own](../experiments/2026-11-benchmarks/README.md).
"""


def curves(experiment: Path) -> dict[str, list[list[float]]]:
    """Return series → the curve of accuracy of each seed."""
    found: dict[str, list[list[float]]] = {}
    for path in sorted(
        [*experiment.glob("seeds/*.jsonl"), *experiment.glob("evaluations/*.jsonl")]
    ):
        points = [json.loads(line)["greedy_acc"] for line in path.read_text().splitlines()]
        name = re.sub(r"-?\d+$", "", path.stem).replace("eval", "the command")
        found.setdefault(name, []).append(points)
    for path in sorted(experiment.glob("seed*.json")):
        record = json.loads(path.read_text())
        evals = record.get("evals") or [{"greedy_acc": a} for a in record["greedy_acc"].values()]
        found.setdefault("the command", []).append([e["greedy_acc"] for e in evals])
    if (records := experiment / "records.json").exists():
        runs = json.loads(records.read_text())
        base = runs.pop("base", {}).get("accuracy", [])[:1]
        for name, run in runs.items():
            values = run["accuracy"]
            points = list(values.values()) if isinstance(values, dict) else base + values[:1]
            found.setdefault(re.sub(r"[-/](seed-)?\d+$", "", name), []).append(points)
    return found


def span(values: list[float]) -> str:
    """Return the smallest and the largest value, to three digits."""
    low, high = min(values), max(values)
    return f"{low:.3f}" if round(low, 3) == round(high, 3) else f"{low:.3f} to {high:.3f}"


def page() -> str:
    """Return the text of the page."""
    parts = [HEAD]
    for experiment in sorted(EXPERIMENTS.glob("20*/")):
        if not (series := curves(experiment)):
            continue
        title = (experiment / "README.md").read_text().splitlines()[0].removeprefix("# ")
        rows = [
            f"| {name} | {len(runs)} | {span([run[0] for run in runs])} "
            f"| {span([run[-1] for run in runs])} | {span([max(run) for run in runs])} |"
            for name, runs in sorted(series.items())
        ]
        head = "| setting | seeds | before | after | best |\n|---|---|---|---|---|\n"
        link = f"[{experiment.name}](../experiments/{experiment.name}/README.md)"
        parts.append(f"## {title}\n\n{link}\n\n{head}" + "\n".join(rows) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
