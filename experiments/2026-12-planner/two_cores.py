"""Predict runs of one task from one of them, and compare with their measured seconds.

    python experiments/2026-12-planner/two_cores.py DIRECTORY --run   # 13 minutes on two cores
    python experiments/2026-12-planner/two_cores.py DIRECTORY         # compares runs that are there

`--run=3.7M` runs the benchmarks' random model of 3.7M parameters instead of the embedded task, and
`--run=135M` SmolLM2 on word problems, 4 prompts × 4 samples a step.

The run with one server and max_staleness 2 gives lengths and speeds. The others are predicted. The
plan knows no stops of runs that compile, so make all runs once before, in another directory.
"""

import dataclasses
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from experiments.bench import workload
from rlx.plan import search
from rlx.run.plan_run import PlanRequest

GRID = [(servers, eta) for servers in (1, 2) for eta in (2, 0, 4, 1)]
FLAGS = [
    "--config.eval.num_questions=0",
    "--config.gate.enabled=False", "--config.observe.writers=()",
    "--config.fleet.threads=1",  # the planner counts cores of one's own
]  # fmt: skip
TASKS = {  # model → the path of the benchmark's workload, and flags; "": the embedded task
    "": (None, ["--config=configs/arithmetic.py", "--config.total_steps=128"]),
    "3.7M": ("", ["--config.total_steps=24"]),
    "135M": (
        "rlx:smollm2",
        [
            "--config.total_steps=12", "--config.rollout.batch_prompts=4",
            "--config.sampling.n_samples=4", "--config.data.max_prompt_tokens=128",
            "--config.train.row_buckets=(192,)",
        ],
    ),
}  # fmt: skip


def workdir(root: Path, servers: int, eta: int) -> Path:
    """Return the directory of one run."""
    return root / f"s{servers}-eta{eta}"


def run(root: Path, task: str) -> None:
    """Make all runs, one after the other; the first one only to compile."""
    model, flags = TASKS[task]
    if model is not None:
        config = f"experiments/bench/workload.py:{workload.make(root, model)}"
        flags = [f"--config={config}", *flags]
    for servers, eta in ((1, -1), *GRID):
        command = [
            sys.executable, "-m", "rlx.main", *flags, *FLAGS,
            f"--config.rollout.max_staleness={abs(eta)}", f"--config.fleet.num_servers={servers}",
            f"--workdir={workdir(root, servers, eta)}",
        ]  # fmt: skip
        subprocess.run(command, check=True)


def measured(asked: PlanRequest) -> dict[str, float]:
    """Return seconds of a step's phases, and the mean staleness of trained tokens."""
    records = [record for _, record in sorted(asked.run.metrics.items())]
    lags = [record["staleness_mean"] for record in records[len(records) // 2 :]]
    return asked.measured | {"staleness": sum(lags) / len(lags)}


def main() -> None:
    """Print a table of Markdown."""
    root, values = Path(sys.argv[1]), SimpleNamespace(gpu="", gpus="", allocation="")
    for flag in (a for a in sys.argv if a.startswith("--run")):
        run(root, flag.removeprefix("--run").removeprefix("="))
    first = PlanRequest.of(None, values, workdir(root, *GRID[0]))
    work = first.workload({})
    work = search.refit(work, first.recorded_allocation(work), measured(first))
    head = (
        "servers", "max_staleness", "s a step", "planned", "error", "own speeds", "error",
        "trainer idle", "planned", "servers idle", "planned", "staleness", "planned",
    )  # fmt: skip
    rows = [head, ("---",) * len(head)]
    for servers, eta in sorted(GRID):
        if not (workdir(root, servers, eta) / "metrics.jsonl").exists():
            continue
        asked = PlanRequest.of(None, values, workdir(root, servers, eta))
        found, there = measured(asked), asked.workload({})
        there = search.refit(there, asked.recorded_allocation(there), found)
        again = search.plan(there, asked.recorded_allocation(there)).prediction.step_seconds
        changed = {"fleet.num_servers": servers, "rollout.max_staleness": eta}
        own = dataclasses.replace(first.workload(changed), measured=work.measured)
        plan = search.plan(own, first.recorded_allocation(own)).prediction
        step = found["step"]
        rows.append((
            str(servers), str(eta), f"{step:.2f}", f"{plan.step_seconds:.2f}",
            f"{plan.step_seconds / step - 1:+.0%}", f"{again:.2f}", f"{again / step - 1:+.0%}",
            f"{1 - found['train'] / step:.0%}", f"{plan.trainer_idle:.0%}",
            f"{1 - found['generate'] / step:.0%}", f"{plan.servers_idle:.0%}",
            f"{found['staleness']:.2f}", f"{sum(k * v for k, v in plan.lags.items()):.2f}",
        ))  # fmt: skip
    for row in rows:
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
