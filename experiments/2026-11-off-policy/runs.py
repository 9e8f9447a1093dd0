"""Runs, table and picture: what does asynchrony gain with a real model on two cores, at what cost?

    python -m experiments.2026-11-off-policy.runs run OUT --seeds=0,1 [--only=decoupled-0,…]
    python -m experiments.2026-11-off-policy.runs table OUT    # and records.json, curve.png

`run` makes the initial weights, then each run that neither OUT nor records.json has. It resumes
after a stop, also on another machine. `table` adds OUT's runs to records.json.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from experiments import sweep

HERE = Path(__file__).parent
RECORDS = HERE / "records.json"
STEPS, EVERY, WANTED = 12, 4, 0.6
LAST = 4  # batches at the end, over which means and medians are taken
COMMON = (
    f"--config.total_steps={STEPS}",
    f"--config.data.dataset={HERE / 'problems.py'}:questions",
    "--config.rollout.batch_prompts=6",
    "--config.sampling.max_new_tokens=128",
    "--config.optimizer.learning_rate=5e-5",
    "--config.train.row_buckets=(256,)",
    "--config.algorithm.reduction=token_mean",  # the default of cispo and dppo
    "--config.fleet.engine=vllm",
    f"--config.eval.every_steps={EVERY}",
    "--config.checkpoint.every_seconds=0",
    "--config.observe.writers=()",
    "--config.gate.enabled=False",
)
OBJECTIVES = {
    "decoupled": ["--config.algorithm.preset=grpo"],
    "coupled": ["--config.algorithm.preset=grpo", "--config.algorithm.decoupled=False"],
    "cispo": ["--config.algorithm.preset=cispo"],
    "dppo": ["--config.algorithm.preset=dppo"],
}
# With one update per batch and no lag every ratio is 1 up to rounding: the four are equal.
VARIANTS = {
    f"{name}-{lag}": [*COMMON, f"--config.rollout.max_staleness={lag}", *flags]
    for lag in (0, 2, 8)
    for name, flags in OBJECTIVES.items()
    if lag or name == "decoupled"
}
COLORS = {"decoupled": "tab:blue", "coupled": "tab:orange", "cispo": "tab:green", "dppo": "tab:red"}
LINES = {0: ":", 2: "--", 8: "-"}


BEGIN = (  # SFT on solutions in which a calculator computes four equations of ten
    f"--config.data.dataset={HERE / 'problems.py'}:solutions",
    "--config.model.path=rlx:smollm2",
    "--config.total_steps=120",
    "--config.optimizer.learning_rate=5e-4",
    "--config.data.max_prompt_tokens=200",  # the longest has 188, and is answered in at most 43
    "--config.sampling.max_new_tokens=56",
    "--config.train.row_buckets=(256,)",
)


def begin(out: Path) -> Path:
    """Return the directory of the initial weights; make it if missing."""
    place = out / "begin"
    if not (place / "over").exists():
        config = "--config=configs/word_problems_tools_sft.py"
        command = [sys.executable, "-m", "rlx.main", config, f"--workdir={place}", *BEGIN]
        subprocess.run(command, check=True)
        (place / "over").touch()
    return place / "hf"


def run(out: Path, seeds: list[int], names: list[str]) -> None:
    """Make the missing runs; the outer loop is over seeds."""
    weights, known = begin(out), stored()
    for seed in seeds:
        missing = [name for name in names if f"{name}-{seed}" not in known]
        variants = {name: [*VARIANTS[name], f"--config.model.path={weights}"] for name in missing}
        sweep.run(out, "configs/word_problems_tools.py", variants, [seed], [0, 1])


def stored() -> dict[str, dict[str, Any]]:
    """Return the runs of records.json by variant and seed."""
    return json.loads(RECORDS.read_text()) if RECORDS.exists() else {}


def collect(out: Path) -> dict[str, dict[str, Any]]:
    """Add OUT's finished runs to records.json, and return all."""
    kept = stored()
    for name in VARIANTS:
        for over in sorted((out / name).glob("seed-*/seconds.json")):
            steps = sweep.records(over.parent / "metrics.jsonl")
            evals = sweep.records(over.parent / "eval.jsonl")
            if [record["step"] for record in evals][-1:] != [STEPS]:
                continue  # it failed
            columns = {
                "minutes": [s["elapsed_seconds"] / 60 for s in steps],
                "reward": [s["task_reward"] for s in steps],
                "kl": [s["lag_kl"] for s in steps],
                "lag": [s["staleness_mean"] for s in steps],
            }
            kept[f"{name}-{over.parent.name.removeprefix('seed-')}"] = {
                "accuracy": {record["step"]: record["greedy_acc"] for record in evals},
                **{key: [float(f"{x:.4g}") for x in column] for key, column in columns.items()},
            }
    lines = (f"{json.dumps(name)}: {json.dumps(kept[name])}" for name in sorted(kept))
    RECORDS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    return stored()


def course(record: dict[str, Any]) -> list[tuple[float, float]]:
    """Return (minutes, held-out accuracy) of a run's evaluations, from minute 0."""
    minutes = [0.0, *record["minutes"]]
    return [(minutes[int(step)], right) for step, right in record["accuracy"].items()]


def minutes_to(record: dict[str, Any], wanted: float) -> float | None:
    """Return the minutes until accuracy reached `wanted`, interpolated; None if it never did."""
    for (before, low), (after, high) in itertools.pairwise(course(record)):
        if low < wanted <= high:
            return before + (after - before) * (wanted - low) / (high - low)
    return None


def table(records: dict[str, dict[str, Any]]) -> None:
    """Print a row for each run."""
    marks = [str(step) for step in range(0, STEPS + 1, EVERY)]
    print("| objective | bound | seed | " + " | ".join(f"at {mark}" for mark in marks) + " | "
          "last rewards | lag | KL | s a batch | minutes | to 0.6 |")  # fmt: skip
    print("|---" * (9 + len(marks)) + "|")
    for name in sorted(records, key=lambda name: (name.split("-")[1:], name)):
        record, (objective, lag, seed) = records[name], name.split("-")
        seconds = [60 * (b - a) for a, b in itertools.pairwise(record["minutes"])]
        when = minutes_to(record, WANTED)
        print(
            f"| {objective} | {lag} | {seed} | "
            + " | ".join(f"{record['accuracy'][mark]:.3f}" for mark in marks)
            + f" | {statistics.fmean(record['reward'][-LAST:]):.3f}"
            f" | {statistics.fmean(record['lag'][-LAST:]):.1f}"
            f" | {statistics.median(record['kl'][-LAST:]):.2g} | {statistics.median(seconds):.0f}"
            f" | {record['minutes'][-1]:.1f} | {f'{when:.1f}' if when else 'never'} |"
        )


def plot(records: dict[str, dict[str, Any]], picture: Path) -> None:
    """Draw accuracy and rewards by minutes, and final accuracy by distance."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (accuracy, reward, distance) = plt.subplots(1, 3, figsize=(13, 3.8))
    for name, record in sorted(records.items()):
        objective, lag, seed = name.split("-")
        look = {"color": COLORS[objective] if int(lag) else "black", "ls": LINES[int(lag)]}
        label = f"{objective}, {lag}" if int(lag) else "any, 0"
        label = label if seed == "0" else None
        accuracy.plot(*zip(*course(record), strict=True), marker=".", label=label, **look)
        means = [statistics.fmean(record["reward"][max(0, i - 3) : i + 1]) for i in range(STEPS)]
        reward.plot(record["minutes"], means, **look)
        kl = statistics.median(record["kl"][-LAST:])
        marker = {0: "x", 2: "o", 8: "s"}[int(lag)]
        distance.plot(kl, course(record)[-1][1], marker, color=look["color"], label=label)
    accuracy.axhline(WANTED, color="gray", lw=0.6)
    accuracy.set(xlabel="minutes on two cores", ylabel="held-out accuracy, greedy")
    reward.set(xlabel="minutes on two cores", ylabel="reward of training's answers, mean of 4")
    distance.set(xlabel="KL(behaviour ‖ proximal), nats a token, last 4 batches", xscale="log")
    distance.set(ylabel=f"held-out accuracy after {STEPS} batches")
    for axis in (accuracy, reward, distance):
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    small = {"frameon": False, "fontsize": 7, "title": "objective, bound", "title_fontsize": 7}
    accuracy.legend(handlelength=4, **small)
    distance.legend(loc="lower left", **small)
    figure.tight_layout()
    figure.savefig(picture, dpi=130)


def main() -> None:
    """Run the command `run` or `table`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("run", "table"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--only", default=",".join(VARIANTS))
    a = parser.parse_args()
    if unknown := set(a.only.split(",")) - set(VARIANTS):
        parser.error(f"--only has {', '.join(sorted(unknown))}; it takes {', '.join(VARIANTS)}")
    if a.what == "run":
        run(a.out, [int(seed) for seed in a.seeds.split(",")], a.only.split(","))
    else:
        records = collect(a.out)
        table(records)
        plot(records, HERE / "curve.png")


if __name__ == "__main__":
    main()
