"""Compare `rollout.max_concurrent_rollouts=auto` with fixed numbers, simulated and on this machine.

    python experiments/2026-12-planner/concurrency.py                       # simulated, a minute
    python experiments/2026-12-planner/concurrency.py DIRECTORY short|long  # runs

The runs of a workload are made side by side. So each has the same share of a machine whose speed
drifts. A rate counts the second half of a run's steps.
"""

import dataclasses
import json
import statistics
import subprocess
import sys
from pathlib import Path

from rlx.doctor.gpu_cards import CARDS
from rlx.model.model_config import ModelConfig
from rlx.plan import simulate
from rlx.plan.simulate import Lengths, Setup
from rlx.plan.speeds import Calibration, ServerSpeed, TrainerSpeed
from rlx.rollout.concurrency import tunable_limits
from rlx.rollout.staleness import Limits

MODEL = ModelConfig("Qwen2ForCausalLM", 152064, 28, 3584, 18944, 28, 4, 128)
CARD = CARDS["h100"]
PROMPTS, SAMPLES, WARM, STEPS = 32, 8, 16, 16
PLANTS = {  # name → (max_staleness, slots, tokens of a server's caches or 0, the trainer's GPUs)
    "synchronous": (0, 64, 0, 8),
    "servers are slow": (4, 64, 0, 8),
    "the trainer is slow": (4, 64, 0, 1),
    "memory is short": (4, 256, 60_000, 8),
    "few slots": (4, 8, 0, 8),
}
COMMON = [
    "--config=configs/arithmetic.py", "--config.total_steps=20", "--config.eval.num_questions=0",
    "--config.gate.enabled=False", "--config.observe.writers=()",
    "--config.optimizer.learning_rate=0.0",  # lengths stay as they are
    "--config.reward.timeout_seconds=120",  # the machine is full
]  # fmt: skip
# The embedded task as it is; and nearly random answers, geometric lengths up to 448, and 16 slots.
WORKLOADS = {
    "short": ((16, 48), []),
    "long": ((4, 24), [
        "--config.rollout.batch_prompts=8", "--config.sampling.max_new_tokens=448",
        "--config.sampling.temperature=5.0", "--config.train.row_buckets=(512,)",
        "--config.train.max_tokens_per_microbatch=2048", "--config.fleet.slots=16",
    ]),
}  # fmt: skip


def simulated() -> None:
    """Print a table of simulated seconds a step."""
    numbers = (4, 8, 16, 24, 32, 64, 160)
    print("| run |", " | ".join(map(str, numbers)), "| auto | best ÷ auto | comes to rest at |")
    print("| --- " * (len(numbers) + 4) + "|")
    lengths = Lengths.fit(3000, 16_384, 0.05)
    for name, (eta, slots, cache, gpus) in PLANTS.items():
        server = ServerSpeed(MODEL, CARD, 1, Calibration())
        if cache:
            share = (server.weights + cache * server.kv_bytes) / CARD.memory
            server = dataclasses.replace(server, memory=share)
        trainer = TrainerSpeed(MODEL, CARD, gpus, Calibration())
        auto = tunable_limits(Limits(PROMPTS, eta, 0), SAMPLES)
        setup = Setup(auto, SAMPLES, 4, slots, server, trainer, lengths, 200.0)
        found = {}
        for number in (*numbers, 0):
            limits = Limits(PROMPTS, eta, number) if number else auto
            run = simulate._Run(dataclasses.replace(setup, limits=limits))
            run.run(WARM)
            begun = run.now
            run.run(WARM + STEPS)
            found[number] = (run.now - begun) / STEPS
        own = found.pop(0)
        seconds = " | ".join(f"{found[number]:.0f}" for number in numbers)
        best = min(found.values())
        print(f"| {name} | {seconds} | {own:.0f} | {best / own:.3f} | {run.limits.concurrency} |")


def measured(root: Path, name: str) -> None:
    """Make the runs of a workload unless they are there; print a table of their rates."""
    numbers, flags = WORKLOADS[name]
    places = {number: root / f"{name}-{number}" for number in (*map(str, numbers), "auto")}
    runs = [
        subprocess.Popen([
            sys.executable, "-m", "rlx.main", *COMMON, *flags, f"--workdir={place}",
            f"--config.rollout.max_concurrent_rollouts={number}",
        ])
        for number, place in places.items() if not place.exists()
    ]  # fmt: skip
    for run in runs:
        run.wait()
    print("| live prompts | steps/s, mean | steps/s, median | trainer waits | staleness |")
    print("| --- | --- | --- | --- | --- |")
    for number, place in places.items():
        steps = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
        steps = steps[len(steps) // 2 :]
        seconds = [step["step_seconds"] for step in steps]
        waits = sum(step["seconds"].get("wait", 0.0) for step in steps) / sum(seconds)
        lag = statistics.mean(step["staleness_mean"] for step in steps)
        seen = [step.get("max_concurrent_rollouts", number) for step in steps]
        live = f"auto: {min(seen)} to {max(seen)}" if number == "auto" else number
        mean, median = 1 / statistics.mean(seconds), 1 / statistics.median(seconds)
        print(f"| {live} | {mean:.3f} | {median:.3f} | {waits:.0%} | {lag:.2f} |")


if __name__ == "__main__":
    if sys.argv[1:]:
        measured(Path(sys.argv[1]), sys.argv[2])
    else:
        simulated()
