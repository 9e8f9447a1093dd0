r"""Does a real model of 135M parameters learn word problems on two cores? Runs, table and curve.

    python experiments/2026-11-word-problems/runs.py run OUT [--seeds=0,1,2] [--stages=grpo,lora] \
        [--config.fleet.engine=vllm]
    python experiments/2026-11-word-problems/runs.py table OUT      # and curve.png, seeds/

`run` makes what is missing: the base model's answers, and for each seed SFT and what follows it.
It can be stopped at any time: the same command goes on from the last checkpoint.
"""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import fmean

from experiments.sweep import records

HERE = Path(__file__).parent
QUESTIONS = 1000  # held out, 200 of each level: the standard error is 0.015
STAGES = {
    "grpo": [],
    "lora": ["--config.lora.rank=16", "--config.lora.alpha=32.0",
             "--config.optimizer.learning_rate=1e-4", "--config.fleet.publish=adapter"],
}  # fmt: skip


def run(out: Path, seeds: list[int], stages: list[str], flags: list[str]) -> None:
    """Make every run that is not over."""
    _evaluate(out / "base", "rlx:smollm2", flags)
    for seed in seeds:
        sft = out / "sft" / f"seed-{seed}"
        # It has no servers, and none are to be chosen.
        own = [flag for flag in flags if not flag.startswith("--config.fleet.")]
        _train(sft, "word_problems_sft", [f"--config.seed={seed}", *own])
        for name in stages:
            begin = [f"--config.seed={seed}", f"--config.model.path={sft / 'hf'}"]
            _train(out / name / f"seed-{seed}", "word_problems", [*begin, *STAGES[name], *flags])
            _evaluate(
                out / name / f"seed-{seed}" / "after", str(out / name / f"seed-{seed}/hf"), flags
            )


def _evaluate(out: Path, model: str, flags: list[str]) -> None:
    """Greedy answers of a model to the held-out questions; those that are there are kept."""
    _call("rlx.evaluate", "word_problems", [
        f"--models={model}", "--datasets=word_problems", f"--limit={QUESTIONS}", "--n_samples=0",
        f"--output={out}", *flags,
    ])  # fmt: skip


def _train(workdir: Path, config: str, flags: list[str]) -> None:
    """A run from its last checkpoint, unless it is over."""
    if not (workdir / "over").exists():
        _call("rlx.main", config, [f"--workdir={workdir}", *flags])
        (workdir / "over").touch()


def _call(module: str, config: str, flags: list[str]) -> None:
    """A command as a user has it; it ends this one where it fails or is stopped."""
    command = [sys.executable, "-m", module, f"--config=configs/{config}.py", *flags]
    print(" ".join(command), flush=True)
    if status := subprocess.run(command).returncode:
        sys.exit(status)


def answers(out: Path) -> list[dict]:
    """The graded greedy answers of an evaluation."""
    return [row for path in sorted(out.glob("*/word_problems.jsonl")) for row in records(path)]


def curve(workdir: Path) -> list[tuple[int, float]]:
    """(step, held-out greedy accuracy) of a run so far."""
    return [(row["step"], row["greedy_acc"]) for row in records(workdir / "eval.jsonl")]


def table(out: Path) -> None:
    """A row for each run: accuracy of all and of each level before, and after so many steps."""
    print("| run | accuracy | " + " | ".join(f"level {level}" for level in range(1, 6)) + " |")
    print("|---|---|---|---|---|---|---|")
    for place in [out / "base", *sorted(out.glob("*/seed-*/after"))]:
        rows = answers(place)
        groups = [rows, *([row for row in rows if row["index"] % 5 == level] for level in range(5))]
        shares = " | ".join(f"{fmean(row['reward'] for row in group):.3f}" for group in groups)
        print(f"| {place.relative_to(out)} ({len(rows)} questions) | {shares} |")
    kept = HERE / "seeds"
    kept.mkdir(exist_ok=True)
    for name in STAGES:
        for workdir in sorted((out / name).glob("seed-*")):
            print(f"{name} {workdir.name}: {json.dumps(curve(workdir))}")
            if (workdir / "eval.jsonl").exists():
                seed = workdir.name.removeprefix("seed-")
                shutil.copyfile(workdir / "eval.jsonl", kept / f"{name}-{seed}.jsonl")


def plot(picture: Path) -> None:
    """Accuracy against steps of each kept run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(6, 4))
    for path in sorted((HERE / "seeds").glob("*.jsonl")):
        points = [(row["step"], row["greedy_acc"]) for row in records(path)]
        axis.plot(*zip(*points, strict=True), marker="o", label=path.stem)
    axis.set(xlabel="batches of 64 answers", ylabel="held-out greedy accuracy", ylim=(0, 1))
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False)
    figure.savefig(picture, dpi=150, bbox_inches="tight")


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["run", "table"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--stages", default="grpo,lora")
    arguments, flags = parser.parse_known_args()
    if arguments.what == "run":
        seeds = [int(seed) for seed in arguments.seeds.split(",")]
        run(arguments.out, seeds, arguments.stages.split(","), flags)
    else:
        table(arguments.out)
        plot(HERE / "curve.png")


if __name__ == "__main__":
    main()
