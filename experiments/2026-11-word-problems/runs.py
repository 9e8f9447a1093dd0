r"""Runs, table and curve: does a model of 135M parameters learn word problems on two cores?

    python experiments/2026-11-word-problems/runs.py run OUT [--seeds=0,1,2] [--stages=sft,grpo] \
        [--config.fleet.engine=vllm]
    python experiments/2026-11-word-problems/runs.py table OUT      # and curve.png, records.json

`run` makes the missing parts: the base model's answers, and for each seed the stages and the
answers after them. After a stop the same command resumes from the last checkpoint.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean

from experiments.sweep import records

HERE = Path(__file__).parent
RECORDS = HERE / "records.json"
SET = "word_problems=configs/data/word_problems.py:rows"
QUESTIONS = 1000  # held out, 200 of each level: the standard error is 0.015
LORA = [
    "--config.lora.rank=64",
    "--config.lora.alpha=128.0",
    "--config.optimizer.learning_rate=1e-3",
]
STAGES = {  # name → config, and flags; grpo begins with sft's weights
    "sft": ("word_problems_sft", []),
    "lora": ("word_problems_sft", LORA),
    "grpo": ("word_problems", []),
}


def run(out: Path, seeds: list[int], stages: list[str], flags: list[str]) -> None:
    """Make every run and every evaluation that is not finished."""
    _evaluate(out / "base", "rlx:smollm2", flags)
    for seed in seeds:
        for name in stages:
            config, own = STAGES[name]
            place = out / name / f"seed-{seed}"
            if name == "grpo":
                begin = out / "sft" / f"seed-{seed}" / "hf"
                own = [f"--config.model.path={begin}", *flags]
            _train(place, config, [f"--config.seed={seed}", *own])
            _evaluate(place / "after", str(place / "hf"), flags)


def _evaluate(out: Path, model: str, flags: list[str]) -> None:
    """Write a model's greedy answers to the held-out questions; existing ones are kept."""
    _call("rlx.evaluate", "word_problems", [
        f"--models={model}", f"--datasets={SET}", f"--limit={QUESTIONS}", "--n_samples=0",
        f"--output={out}", *flags,
    ])  # fmt: skip


def _train(workdir: Path, config: str, flags: list[str]) -> None:
    """Start or resume a run, unless it is finished."""
    if not (workdir / "over").exists():
        _call("rlx.main", config, [f"--workdir={workdir}", *flags])
        (workdir / "over").touch()


def _call(module: str, config: str, flags: list[str]) -> None:
    """Run a user's command; exit if it fails or is stopped."""
    command = [sys.executable, "-m", module, f"--config=configs/{config}.py", *flags]
    print(" ".join(command), flush=True)
    if status := subprocess.run(command).returncode:
        sys.exit(status)


def answers(out: Path) -> list[dict]:
    """Return the graded greedy answers of an evaluation."""
    return [row for path in sorted(out.glob("*/word_problems.jsonl")) for row in records(path)]


def table(out: Path) -> None:
    """Print each model's share of right answers, in total and by level, and store it."""
    print("| run | accuracy | " + " | ".join(f"level {level}" for level in range(1, 6)) + " |")
    print("|---|---|---|---|---|---|---|")
    kept = json.loads(RECORDS.read_text())  # also of runs that OUT has not
    for place in [out / "base", *sorted(out.glob("*/seed-*/after"))]:
        rows = answers(place)
        groups = [rows, *([row for row in rows if row["index"] % 5 == level] for level in range(5))]
        name = str(place.relative_to(out)).removesuffix("/after")
        kept[name] = {"accuracy": [round(fmean(row["reward"] for row in g), 4) for g in groups]}
        shares = " | ".join(f"{share:.3f}" for share in kept[name]["accuracy"])
        print(f"| {name} ({len(rows)} questions) | {shares} |")
        if (metrics := place.parent / "metrics.jsonl").exists() and place.name == "after":
            steps = [step for step in records(metrics) if "sft_loss" in step]
            kept[name] |= {
                "minutes": [round(step["elapsed_seconds"] / 60, 2) for step in steps],
                "loss": [round(step["sft_loss"], 4) for step in steps],
            }
    RECORDS.write_text(json.dumps(kept))


def plot(picture: Path) -> None:
    """Draw SFT's loss by minutes, and each level's accuracy before and after, for all seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    kept = json.loads(RECORDS.read_text())
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6))
    runs = {name: run for name, run in kept.items() if name.startswith("sft/")}
    for name, run in runs.items():
        label = name.removeprefix("sft/").replace("-", " ")
        (line,) = left.plot(run["minutes"], _smooth(run["loss"]), label=label)
        right.plot(range(6), run["accuracy"], "o", color=line.get_color(), label=label)
    right.plot(range(6), kept["base"]["accuracy"], "x", color="black", label="before")
    left.set(xlabel="minutes on two cores", ylabel="loss, nats a token", yscale="log")
    right.set(ylabel="held-out accuracy", ylim=(-0.03, 1))
    right.set_xticks(range(6), ["all", *(f"level {level}" for level in range(1, 6))])
    for axis in (left, right):
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(picture, dpi=150, bbox_inches="tight")


def _smooth(values: list[float], width: int = 10) -> list[float]:
    """Return means over windows of up to `width` values that end at each value."""
    return [fmean(values[max(0, i + 1 - width) : i + 1]) for i in range(len(values))]


def main() -> None:
    """Parse and run the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["run", "table"])
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--stages", default="sft")
    arguments, flags = parser.parse_known_args()
    if arguments.what == "run":
        seeds = [int(seed) for seed in arguments.seeds.split(",")]
        run(arguments.out, seeds, arguments.stages.split(","), flags)
    else:
        table(arguments.out)
        plot(HERE / "curve.png")


if __name__ == "__main__":
    main()
