"""Train the recorded batches of a run again with other objectives, and write records.json.

    python -m experiments.2026-12-replay-ablation.ablation OUT [--seeds=0,1]

Finished parts are skipped, so a stopped command goes on.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from rlx.system.jsonl import read_jsonl

HERE = Path(__file__).parent
STEPS, MIDDLE = 32, 16  # MIDDLE: a checkpoint, after which one step is compared on equal weights
RUN = (
    f"--config.total_steps={STEPS}", "--config.rollout.max_staleness=8",
    "--config.rollout.max_concurrent_rollouts=64", "--config.train.minibatches=4",
    "--config.algorithm.reduction=token_mean", f"--config.checkpoint.every_steps={MIDDLE}",
    "--config.eval.every_steps=8", "--config.gate.enabled=False", "--config.observe.writers=()",
)  # fmt: skip
VARIANTS = {
    "as recorded": (),
    "coupled": ("--config.algorithm.decoupled=False",),
    "clip at 0.02": ("--config.algorithm.clip_low=0.02", "--config.algorithm.clip_high=0.02"),
    "no deviation": ("--config.algorithm.reward_std=none",),
}
NUMBERS = ("grad_norm", "actor_clip_ratio", "ppo_approx_kl", "behaviour_kl", "entropy")


def call(module: str, *flags: str, log: Path) -> None:
    """Run a command of rlx; its output goes to `log`."""
    with log.open("a") as file:
        command = [sys.executable, "-m", module, *flags]
        subprocess.run(command, stdout=file, stderr=file, check=True)


def accuracy(model: Path, out: Path) -> float:
    """Return the greedy accuracy of an HF directory on the 200 held-out questions."""
    if not (out / "results.json").exists():
        flags = ["--config=configs/arithmetic.py", f"--models={model}", "--datasets=arithmetic"]
        call("rlx.evaluate", *flags, "--n_samples=0", f"--output={out}", log=Path(f"{out}.log"))
    return json.loads((out / "results.json").read_text())[0]["greedy_acc"]


def replayed(run: Path, out: Path, *flags: str) -> list[dict]:
    """Return the metrics of a replay."""
    if not (out / "hf").exists():
        call("rlx.replay", str(run), f"--out={out}", *flags, log=Path(f"{out}.log"))
    return list(read_jsonl(out / "metrics.jsonl"))


def measured(out: Path, seed: int) -> dict[str, dict]:
    """Return the numbers of every variant of one seed."""
    run = out / f"run-{seed}"
    out.mkdir(parents=True, exist_ok=True)
    flags = ["--config=configs/arithmetic.py", f"--workdir={run}", f"--config.seed={seed}", *RUN]
    call("rlx.main", *flags, log=out / f"run-{seed}.log")
    found = {
        "run": {"accuracy": {r["step"]: r["greedy_acc"] for r in read_jsonl(run / "eval.jsonl")}}
    }
    for name, settings in VARIANTS.items():
        place = out / f"{name.replace(' ', '-')}-{seed}"
        one = (f"--from={MIDDLE + 1}", f"--until={MIDDLE + 1}")
        (step,) = replayed(run, Path(f"{place}-step"), *one, *settings)
        steps = replayed(run, place, *settings)
        found[name] = {
            "accuracy": [accuracy(place / "hf", Path(f"{place}-evaluation"))],
            "one step": {key: step[key] for key in NUMBERS},
            "all steps": {key: statistics.mean(s[key] for s in steps) for key in NUMBERS},
            "last steps": {key: statistics.mean(s[key] for s in steps[-8:]) for key in NUMBERS},
        }
    return found


def main() -> None:
    """Measure and write records.json."""
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("out", type=Path)
    p.add_argument("--seeds", default="0,1")
    a = p.parse_args()
    records = {"base": {"accuracy": [0.345]}}
    for seed in map(int, a.seeds.split(",")):
        records |= {f"{name}-{seed}": found for name, found in measured(a.out, seed).items()}
    (HERE / "records.json").write_text(json.dumps(records, indent=1) + "\n")


if __name__ == "__main__":
    main()
