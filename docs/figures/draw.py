"""Draw the pictures of index.md and staleness.md from the records of the experiments.

    python docs/figures/draw.py

They are SVG with a transparent background and grey text, for light and dark pages.
"""

import json
import re
import statistics
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
EXPERIMENTS = HERE.parents[1] / "experiments"
GREY = "#7d8590"
OBJECTIVES = {"decoupled": "#3b82f6", "coupled": "#f59e0b", "m2po": "#10b981"}
WORDS = {"decoupled": "decoupled clip", "coupled": "PPO's clip", "m2po": "M2PO"}
REDUCTIONS = {"token_mean": "-", "sequence_mean_token_mean": "--"}


def lines(path: Path) -> list[dict]:
    """Return the objects of a JSONL file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def new(columns: int = 1, width: float = 7.2, height: float = 3.1):
    """Return a figure and its axes, in the common style."""
    style = {
        "font.size": 10, "svg.fonttype": "none", "svg.hashsalt": "rlx", "text.color": GREY,
        "font.family": "sans-serif", "font.sans-serif": ["system-ui", "DejaVu Sans"],
        "axes.edgecolor": GREY, "axes.labelcolor": GREY, "xtick.color": GREY, "ytick.color": GREY,
        "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
        "axes.titlesize": 10.5, "grid.color": GREY, "grid.alpha": 0.18,
    }  # fmt: skip
    plt.rcParams.update(style)
    figure, axes = plt.subplots(1, columns, figsize=(width, height), sharey=columns > 1)
    for axis in [axes] if columns == 1 else axes:
        axis.grid(True)
        axis.set_axisbelow(True)
    return figure, axes


def save(figure, name: str) -> None:
    """Write a figure next to this file."""
    figure.tight_layout()
    figure.savefig(HERE / f"{name}.svg", transparent=True, metadata={"Date": None})
    plt.close(figure)


def learning() -> None:
    """Draw held-out accuracy by seconds, for five seeds of the first command."""
    figure, axis = new()
    for path in sorted((EXPERIMENTS / "2026-11-arithmetic/seeds").glob("eval-*.jsonl")):
        found = lines(path)
        axis.plot([r["elapsed_seconds"] for r in found], [r["greedy_acc"] for r in found],
                  color=OBJECTIVES["decoupled"], lw=1.6, alpha=0.75)  # fmt: skip
    axis.set(ylim=(0, 1.03), xlim=(0, None), xlabel="seconds from the command, two cores",
             ylabel="held-out accuracy")  # fmt: skip
    save(figure, "learning")


def asynchrony() -> None:
    """Draw steps per second and the trainer's waiting by max_staleness."""
    text = (EXPERIMENTS / "2026-11-benchmarks/README.md").read_text()
    rows = re.findall(
        r"^\| (\d) \| .*? \| ([\d.]+) \| [\d.]+ \| (\d+) % \| (\d+) % \|$", text, re.M
    )
    figure, axis = new()
    for place, (_, rate, waits, _) in enumerate(rows):
        axis.bar(place, float(rate), 0.6, color=OBJECTIVES["coupled" if not place else "decoupled"])
        axis.text(place, float(rate) + 0.03, f"{float(rate):.2f}", ha="center", va="bottom")
        axis.text(place, 0.08, f"trainer waits\n{waits} %", ha="center", color="white", fontsize=9)
    names = [f"{lag}\n(synchronous)" if lag == "0" else lag for lag, *_ in rows]
    axis.set_xticks(range(len(rows)), names)
    axis.set(ylim=(0, 1.85), xlabel="max_staleness, versions", ylabel="steps a second")
    axis.grid(False, axis="x")
    save(figure, "asynchrony")


def runs(how: str, objective: str, reduction: str) -> list[list[dict]]:
    """Return the evaluations of each seed of a variant of the staleness experiment."""
    files = (EXPERIMENTS / "2026-11-staleness/evaluations").glob(f"{how}-{objective}-{reduction}-*")
    return [lines(path) for path in sorted(files)]


def accuracy(axis, how: str, objective: str, reduction: str, label: str = "") -> None:
    """Draw each seed with a thin line and their mean with a thick one."""
    each = [[r["greedy_acc"] for r in found] for found in runs(how, objective, reduction)]
    steps = [r["step"] for r in runs(how, objective, reduction)[0]]
    look = {"color": OBJECTIVES[objective], "ls": REDUCTIONS[reduction]}
    for seed in each:
        axis.plot(steps, seed, lw=0.7, alpha=0.55, **look)
    axis.plot(
        steps, [statistics.mean(v) for v in zip(*each, strict=True)], lw=2.4, label=label, **look
    )


def staleness() -> None:
    """Draw token mean against sequence mean at 32 versions, for the first page."""
    figure, axis = new()
    accuracy(axis, "forced-32", "decoupled", "token_mean", "decoupled, token mean")
    accuracy(axis, "forced-32", "coupled", "token_mean", "PPO's clip, token mean")
    accuracy(axis, "forced-32", "decoupled", "sequence_mean_token_mean", "decoupled, sequence mean")
    axis.legend(loc="lower left", fontsize=9)
    axis.set(ylim=(0, 1.03), xlabel="train batches, each exactly 32 versions old",
             ylabel="held-out accuracy")  # fmt: skip
    save(figure, "staleness")


def objectives() -> None:
    """Draw every objective at 8 and at 32 versions, by reduction."""
    for name, reduction in zip(("token-mean", "sequence-mean"), REDUCTIONS, strict=True):
        figure, axes = new(2, 7.6, 2.9)
        for axis, lag in zip(axes, (8, 32), strict=True):
            for objective in OBJECTIVES:
                accuracy(axis, f"forced-{lag}", objective, reduction, WORDS[objective])
            axis.set(
                title=f"every batch {lag} versions old", ylim=(0, 1.03), xlabel="train batches"
            )
        axes[0].set_ylabel("held-out accuracy")
        axes[0].legend(loc="lower left" if "seq" in name else "lower right", fontsize=9)
        save(figure, name)


def distance() -> None:
    """Draw KL from behaviour to proximal policy by train batch, for all objectives."""
    kl = json.loads((EXPERIMENTS / "2026-11-staleness/kl.json").read_text())
    figure, axis = new()
    for objective in OBJECTIVES:
        for reduction, line in REDUCTIONS.items():
            seeds = [
                v for k, v in kl.items() if k.startswith(f"forced-32-{objective}-{reduction}-")
            ]
            smooth = [
                [statistics.median(s[max(0, i - 4) : i + 5]) for i in range(len(s))] for s in seeds
            ]
            mean = [statistics.median(v) for v in zip(*smooth, strict=True)]
            label = f"{WORDS[objective]}, {'token' if line == '-' else 'sequence'} mean"
            axis.plot(
                range(1, len(mean) + 1), mean, color=OBJECTIVES[objective], ls=line, label=label
            )
    axis.set_yscale("log")
    axis.set(ylim=(2e-4, 1), xlabel="train batches, each exactly 32 versions old",
             ylabel="KL, nats a token")  # fmt: skip
    axis.legend(fontsize=8, ncols=2, loc="lower right")
    save(figure, "distance")


def soak() -> None:
    """Draw seconds per step and memory over 2,000 steps in which servers are killed."""
    samples = [s for s in lines(EXPERIMENTS / "2026-11-soak/samples.jsonl") if s.get("step")]
    figure, axis = new()
    for name, color, words in (("trainer", OBJECTIVES["decoupled"], "trainer"),
                               ("server 0", OBJECTIVES["m2po"], "server that lives")):  # fmt: skip
        points = [(s["step"], s[name]["rss"] / 1e6) for s in samples if name in s]
        axis.plot(*zip(*points, strict=True), color=color, lw=2, label=words)
    for step in range(200, 2000, 200):
        label = "kill -9 of the other server" if step == 200 else None
        axis.axvline(step, color="#ef4444", lw=1, ls=":", label=label)
    axis.set(ylim=(0, 1250), xlabel="steps", ylabel="resident memory, MB")
    axis.legend(loc="center right", fontsize=9)
    save(figure, "soak")


if __name__ == "__main__":
    for draw in (learning, asynchrony, staleness, objectives, distance, soak):
        draw()
