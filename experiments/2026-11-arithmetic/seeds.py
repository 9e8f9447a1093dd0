"""Five seeds of configs/arithmetic.py, each on two cores: runs, table and curve.

    python experiments/2026-11-arithmetic/seeds.py run OUT --cores=0,1 --seeds=0,1,2,3,4
    python experiments/2026-11-arithmetic/seeds.py table OUT      # prints it, writes curve.png

Further flags go to the run: `--config.fleet.engine=vllm`.

`run` leaves each run's directory in OUT and skips seeds that are there already. Two processes with
different cores can share OUT. Seconds include imports, compilation and evaluations.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
SOLVED = 0.90


def run(out: Path, cores: list[int], seeds: list[int], flags: list[str]) -> None:
    """Run each seed with a user's command, pinned to `cores`."""
    for seed in seeds:
        workdir = out / f"seed-{seed}"
        if (workdir / "seconds.json").exists():
            continue
        start = time.monotonic()
        subprocess.run(
            [
                sys.executable, "-m", "rlx.main", "--config=configs/arithmetic.py",
                f"--workdir={workdir}", f"--config.seed={seed}", *flags,
            ],
            check=True,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )  # fmt: skip
        (workdir / "seconds.json").write_text(json.dumps(time.monotonic() - start))


def lines(path: Path) -> list[dict]:
    """Return the objects of a .jsonl file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def table(out: Path, picture: Path) -> None:
    """Print the table in markdown, and draw held-out accuracy and reward of every seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True)
    print("| seed | greedy before | greedy after | seconds to 0.90 | seconds in all | dropped |")
    print("|---|---|---|---|---|---|")
    for workdir in sorted(out.glob("seed-*")):
        scores, steps = lines(workdir / "eval.jsonl"), lines(workdir / "metrics.jsonl")
        seconds = json.loads((workdir / "seconds.json").read_text())
        solved = [s["elapsed_seconds"] for s in scores if s["greedy_acc"] >= SOLVED]
        first = f"{solved[0]:.0f}" if solved else "–"
        print(
            f"| {workdir.name.removeprefix('seed-')} | {scores[0]['greedy_acc']:.3f} "
            f"| {scores[-1]['greedy_acc']:.3f} | {first} | {seconds:.0f} "
            f"| {steps[-1]['dropped']} |"
        )
        times = [s["elapsed_seconds"] for s in scores]
        left.plot(times, [s["greedy_acc"] for s in scores], marker="o", ms=3, label=workdir.name)
        rewards = [s["task_reward"] for s in steps]
        smooth = [sum(rewards[max(0, i - 4) : i + 1]) / min(i + 1, 5) for i in range(len(rewards))]
        right.plot([s["elapsed_seconds"] for s in steps], smooth, lw=1.2)
    left.axhline(SOLVED, color="gray", lw=0.8, ls="--")
    left.set(title="Held-out greedy accuracy", xlabel="seconds on two cores", ylim=(0, 1.02))
    right.set(title="Reward of the batch (mean of 5 steps)", xlabel="seconds on two cores")
    left.legend(frameon=False, fontsize=8)
    for axis in (left, right):
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(picture, dpi=130)


def main() -> None:
    """Run the command `run` or `table`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("run", "table"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--cores", default="0,1")
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--picture", type=Path, default=HERE / "curve.png")
    a, flags = parser.parse_known_args()
    if a.what == "run":
        run(
            a.out, [int(c) for c in a.cores.split(",")], [int(s) for s in a.seeds.split(",")], flags
        )
    else:
        table(a.out, a.picture)


if __name__ == "__main__":
    main()
