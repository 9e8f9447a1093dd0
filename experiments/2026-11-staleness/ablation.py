"""Runs, table and plot: which objective and which reduction learn from stale data?

    python -m experiments.2026-11-staleness.ablation run OUT --cores=0 [--seeds=…] [--lags=…]
    python -m experiments.2026-11-staleness.ablation table OUT   # curve.png, evaluations/, kl.json

`run` resumes after a stop. Several may share OUT; each takes runs that no other has taken.
"""

import argparse
import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from experiments import sweep

HERE = Path(__file__).parent
STEPS = 64
COMMON = (
    f"--config.total_steps={STEPS}",
    "--config.train.minibatches=4",
    "--config.rollout.max_concurrent_rollouts=64",
    "--config.eval.every_steps=8",
    "--config.checkpoint.every_seconds=0",
    "--config.observe.writers=()",
    "--config.gate.enabled=False",
)
# forced: every batch has exactly this age. bound: none is older, as in an ordinary run.
LAGS = (("forced", 32), ("forced", 8), ("bound", 32), ("bound", 8))
# Coupled is PPO's clip about the behaviour policy; M2PO drops the tokens that are farthest off
# policy and clips nothing. Group advantages are those of GRPO in all three.
OBJECTIVES = {
    "decoupled": ["--config.algorithm.preset=grpo"],
    "coupled": ["--config.algorithm.preset=grpo", "--config.algorithm.decoupled=False"],
    "m2po": ["--config.algorithm.preset=m2po_areal"],
}
REDUCTIONS = ("token_mean", "sequence_mean_token_mean")
VARIANTS = {
    f"{how}-{eta}-{objective}-{reduction}": [
        *COMMON,
        f"--config.rollout.force_staleness={how == 'forced'}",
        f"--config.rollout.max_staleness={eta}",
        f"--config.algorithm.reduction={reduction}",
        *flags,
    ]
    for how, eta in LAGS
    for objective, flags in OBJECTIVES.items()
    for reduction in REDUCTIONS
}


# The reductions of the first sweep, which differed by accident: 100 batches, evaluated every 10.
EARLIER = {
    "decoupled": "sequence_mean_token_mean",
    "coupled": "sequence_mean_token_mean",
    "m2po": "token_mean",
}
COLORS = {"decoupled": "tab:blue", "coupled": "tab:orange", "m2po": "tab:green"}
LINES = {"token_mean": ("-", "o"), "sequence_mean_token_mean": ("--", "s")}


@dataclass(frozen=True)
class Run:
    """Held-out accuracy and KL(behaviour ‖ proximal) of a finished run, by step."""

    seed: str
    accuracy: dict[int, float]
    kl: dict[int, float]
    lags: set[int]
    settled: float

    @property
    def final(self) -> float:
        return self.accuracy[STEPS]


def finished(out: Path) -> dict[str, list[Run]]:
    """Return the finished runs of each variant."""
    found: dict[str, list[Run]] = {}
    for name in VARIANTS:
        eta = int(name.split("-")[1])
        for over in sorted((out / name).glob("seed-*/seconds.json")):
            steps = sweep.records(over.parent / "metrics.jsonl")
            evals = sweep.records(over.parent / "eval.jsonl")
            kl = {r["step"]: r["lag_kl"] for r in steps}
            late = [r for r in steps if r["step"] > eta]
            if kl and max(kl) == STEPS:
                found.setdefault(name, []).append(
                    Run(
                        seed=over.parent.name.removeprefix("seed-"),
                        accuracy={r["step"]: r["greedy_acc"] for r in evals},
                        kl=kl,
                        lags={r[f"staleness_{end}"] for r in late for end in ("min", "max")},
                        settled=statistics.median(r["lag_kl"] for r in late),
                    )
                )
    return found


def spread(values: list[float]) -> str:
    """Return mean and standard deviation as text."""
    deviation = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.3f}{deviation}"


def table(runs: Mapping[str, list[Run]]) -> None:
    """Print one row for each lag, objective and reduction, over seeds."""
    marks = (16, 32, 48, 64)
    heads = "".join(f" at step {mark} |" for mark in marks)
    print(f"| lag | objective | reduction | seeds |{heads} worst end | KL | lag seen |")
    print("|---" * (7 + len(marks)) + "|")
    for name, some in runs.items():
        how, eta, objective, reduction = name.split("-")
        cells = "".join(f" {spread([r.accuracy[mark] for r in some])} |" for mark in marks)
        lags = set.union(*(r.lags for r in some))
        print(
            f"| {how} {eta} | {objective} | {reduction} | {len(some)} |{cells} "
            f"{min(r.final for r in some):.3f} | {spread([r.settled for r in some])} "
            f"| {min(lags)}–{max(lags)} |"
        )


def plot(runs: Mapping[str, list[Run]], picture: Path) -> None:
    """Draw accuracy by step at the largest lag, and final accuracy by lag and by KL."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (course, by_lag, by_kl) = plt.subplots(1, 3, figsize=(13, 3.8), sharey=True)

    def points(axis, objective: str, reduction: str, x: list[float], y: list[float]) -> None:
        color, (_, marker) = COLORS[objective], LINES[reduction]
        face = color if reduction == "token_mean" else "none"
        axis.plot(x, y, color=color, marker=marker, mfc=face, ls="none", alpha=0.7)

    def beside(eta: str, objective: str, reduction: str) -> float:
        index = 2 * list(OBJECTIVES).index(objective) + REDUCTIONS.index(reduction)
        return ("0", "2", "8", "32").index(eta) + 0.12 * (index - 2.5)

    for path in sorted((HERE / "earlier").glob("*.jsonl")):
        objective, eta, _ = path.stem.split("-")
        reduction = EARLIER[objective]
        at_60 = next(r["greedy_acc"] for r in sweep.records(path) if r["step"] == 60)
        points(by_lag, objective, reduction, [beside(eta, objective, reduction)], [at_60])
    for name, some in runs.items():
        how, eta, objective, reduction = name.split("-")
        (line, _), color = LINES[reduction], COLORS[objective]
        label = f"{objective}, {reduction.split('_')[0]} mean"
        final = [r.final for r in some]
        points(by_kl, objective, reduction, [r.settled for r in some], final)
        if how != "forced":
            continue
        points(by_lag, objective, reduction, [beside(eta, objective, reduction)] * len(some), final)
        if eta != "32":
            continue
        for run in some:
            course.plot(*zip(*run.accuracy.items(), strict=True), color=color, ls=line, lw=0.6)
        means = {s: statistics.mean(r.accuracy[s] for r in some) for s in some[0].accuracy}
        course.plot(*zip(*means.items(), strict=True), color=color, ls=line, lw=2, label=label)
    course.set(title="every batch 32 versions old", xlabel="train batches", ylim=(0, 1.02))
    course.set_ylabel("held-out greedy accuracy")
    course.legend(frameon=False, fontsize=7, loc="lower left")
    by_lag.set(title=f"after 60 or {STEPS} batches, by lag", xlabel="versions")
    by_lag.set_xticks(range(4), ("0", "2", "8", "32"))
    by_kl.set(title=f"after {STEPS} batches, by distance", xscale="log")
    by_kl.set_xlabel("median KL(behaviour ‖ proximal), nats a token")
    for axis in (course, by_lag, by_kl):
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(picture, dpi=130)


def keep(runs: Mapping[str, list[Run]]) -> None:
    """Write the KL of each run's batches to kl.json."""
    rounded = {
        f"{name}-{run.seed}": [float(f"{x:.4g}") for x in run.kl.values()]
        for name, some in runs.items()
        for run in some
    }
    lines = (f"{json.dumps(name)}: {json.dumps(kl)}" for name, kl in rounded.items())
    (HERE / "kl.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main() -> None:
    """Run the command `run` or `table`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("run", "table"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--cores", default="0,1")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--lags", default="forced-32,forced-8,bound-32,bound-8")
    parser.add_argument("--picture", type=Path, default=HERE / "curve.png")
    a = parser.parse_args()
    if a.what == "run":
        cores, seeds = ([int(x) for x in text.split(",")] for text in (a.cores, a.seeds))
        for lag in a.lags.split(","):
            some = {name: v for name, v in VARIANTS.items() if name.startswith(f"{lag}-")}
            sweep.run(a.out, "configs/arithmetic.py", some, seeds, cores)
    else:
        runs = finished(a.out)
        table(runs)
        plot(runs, a.picture)
        keep(runs)
        sweep.keep(a.out, VARIANTS, HERE / "evaluations")


if __name__ == "__main__":
    main()
