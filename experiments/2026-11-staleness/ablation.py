"""Does the decoupled objective make stale data safe? The runs, the table and the plot.

    python -m experiments.2026-11-staleness.ablation run OUT --cores=2,3 [--seeds=0,1,2]
    python -m experiments.2026-11-staleness.ablation table OUT   # and curve.png, evaluations/

`run` goes on where it stopped. Two of them may share OUT if their seeds differ.
"""

import argparse
import statistics
from pathlib import Path

from experiments import sweep

HERE = Path(__file__).parent
STALENESS = (0, 2, 8, 32)
STEPS = 100
COMMON = (
    f"--config.total_steps={STEPS}",
    "--config.train.minibatches=4",
    "--config.rollout.force_staleness=True",
    "--config.rollout.max_concurrent_rollouts=64",
    "--config.eval.every_steps=10",
    "--config.checkpoint.every_seconds=0",
    "--config.observe.tensorboard=False",
    "--config.gate.enabled=False",
)
# All are GRPO. Coupled is PPO's clip about the behaviour policy; M2PO drops the tokens that are
# farthest off policy and clips nothing; it is asked only where data are old.
OBJECTIVES = {
    "decoupled": ["--config.algorithm.decoupled=True"],
    "coupled": ["--config.algorithm.decoupled=False"],
    "m2po": ["--config.algorithm.preset=m2po"],
}
VARIANTS = {
    f"{name}-{eta}": [*COMMON, f"--config.rollout.max_staleness={eta}", *flags]
    for name, flags in OBJECTIVES.items()
    for eta in STALENESS
    if name != "m2po" or eta >= 8
}


def curves(out: Path, name: str) -> list[list[tuple[int, float]]]:
    """(step, held-out accuracy) of each seed's run."""
    runs = [sweep.records(path / "eval.jsonl") for path in sorted((out / name).glob("seed-*"))]
    return [[(r["step"], r["greedy_acc"]) for r in run] for run in runs if run]


def spread(values: list[float]) -> str:
    """Mean and standard deviation as text."""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.3f} ± {deviation:.3f}"


def table(out: Path) -> None:
    """One row for each bound and objective, over seeds."""
    print(
        "| lag | objective | seeds | at step 10 | at step 30 | best | final | worst final "
        "| clipped | behaviour KL | lag seen |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for eta in STALENESS:
        for name in OBJECTIVES:
            runs = curves(out, f"{name}-{eta}")
            if not runs:
                continue
            steps = [
                record
                for path in sorted((out / f"{name}-{eta}").glob("seed-*"))
                for record in sweep.records(path / "metrics.jsonl")
            ]
            early, later = ([dict(run).get(s, float("nan")) for run in runs] for s in (10, 30))
            final = [run[-1][1] for run in runs]
            clipped = statistics.mean(record["actor_clip_ratio"] for record in steps)
            far = statistics.median(record["behaviour_kl"] for record in steps)
            settled = [r for r in steps if r["step"] > eta]
            lags = {(r["staleness_min"], r["staleness_max"]) for r in settled}
            seen = ", ".join(f"{low}" if low == high else f"{low}–{high}" for low, high in lags)
            print(
                f"| {eta} | {name} | {len(runs)} | {spread(early)} | {spread(later)} "
                f"| {spread([max(acc for _, acc in run) for run in runs])} | {spread(final)} "
                f"| {min(final):.3f} | {100 * clipped:.1f} % | {far:.4f} | {seen} |"
            )


def plot(out: Path, picture: Path) -> None:
    """A panel for each bound: every seed thin, the mean thick."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(STALENESS), figsize=(12, 3.2), sharey=True)
    for axis, eta in zip(axes, STALENESS, strict=True):
        colors = ("tab:blue", "tab:orange", "tab:green")
        for name, color in zip(OBJECTIVES, colors, strict=True):
            runs = curves(out, f"{name}-{eta}")
            for run in runs:
                axis.plot(*zip(*run, strict=True), color=color, lw=0.7, alpha=0.5)
            if runs:
                steps = [step for step, _ in runs[0]]
                means = [statistics.mean(dict(r).get(s, float("nan")) for r in runs) for s in steps]
                axis.plot(steps, means, color=color, lw=2, label=name)
        axis.set(title=f"every batch {eta} versions old", xlabel="train batches", ylim=(0, 1.02))
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("held-out greedy accuracy")
    handles, labels = axes[-1].get_legend_handles_labels()
    axes[0].legend(handles, labels, frameon=False, loc="lower right")
    figure.tight_layout()
    figure.savefig(picture, dpi=130)


def main() -> None:
    """`run` or `table`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("run", "table"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--cores", default="0,1")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--picture", type=Path, default=HERE / "curve.png")
    a = parser.parse_args()
    if a.what == "run":
        cores, seeds = ([int(x) for x in text.split(",")] for text in (a.cores, a.seeds))
        sweep.run(a.out, "configs/arithmetic.py", VARIANTS, seeds, cores)
    else:
        table(a.out)
        plot(a.out, a.picture)
        sweep.keep(a.out, VARIANTS, HERE / "evaluations")


if __name__ == "__main__":
    main()
