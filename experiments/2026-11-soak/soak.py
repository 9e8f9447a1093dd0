"""A long run of tiny steps whose servers are killed: does memory or anything else grow?

    python experiments/2026-11-soak/soak.py run OUT --steps=2000
    python experiments/2026-11-soak/soak.py plot OUT

`run` starts a training process (`train`) with two local servers. An agent answers every second
prompt through the gateway. Every `--sample` steps a line is added to OUT/samples.jsonl, and every
`--kill` steps server 1 is killed with SIGKILL. Server 0 is never killed.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import psutil

HERE = Path(__file__).parent
WARM_UP = 400  # steps before the slopes, while programs compile and caches and pools fill


def config_of(out: Path, steps: int):
    """Return the config: two prompts of two samples per step, at most eight tokens each."""
    from rlx.config import default

    c = default()
    c.total_steps = steps
    c.model.path = "rlx:arithmetic"
    c.data.kind = "jsonl"
    c.data.train = str(out / "rows.jsonl")
    c.data.max_prompt_tokens = 24
    c.reward.name = "arithmetic"
    c.sampling.n_samples = 2
    c.sampling.max_new_tokens = 8
    c.rollout.batch_prompts = 2
    c.rollout.max_concurrent_rollouts = 8
    c.rollout.max_failure_rate = 1.0
    c.train.max_tokens_per_microbatch = 192
    c.train.row_buckets = (192,)
    c.fleet.num_servers = 2
    c.fleet.slots = 8
    c.fleet.max_restarts = 1000
    c.fleet.publish_dir = str(shared(out))
    c.checkpoint.every_steps = 200
    c.gate.every_steps = 100
    return c


def shared(out: Path) -> Path:
    """Return the directory of published weights."""
    return Path("/dev/shm") / f"soak-{out.name}"


class Mixed:
    """The run's workflow, with an agent in its place for every second prompt."""

    def __init__(self, plain, agent):
        self.plain, self.agent = plain, agent

    def __getattr__(self, name):
        return getattr(self.plain, name)

    async def run(self, fleet, task):
        """Return the group of the task's row."""
        return await (self.plain, self.agent)[task.group_id % 2].run(fleet, task)

    async def aclose(self):
        """End the agent's processes and gateway."""
        await self.agent.aclose()


def train(out: Path, steps: int) -> int:
    """Train as rlx.main does, with the mixed workflow."""
    from transformers import AutoTokenizer

    from rlx.agents.workflow import AgentWorkflow
    from rlx.run import loop
    from rlx.run.room_options import RunOptions

    prepare = loop.prepare

    def with_agent(config):
        inputs = prepare(config)
        tokenizer = AutoTokenizer.from_pretrained(inputs.model_dir)
        agent = AgentWorkflow(
            f"{HERE / 'agent.py'}:Adds", tokenizer, RunOptions.of(config).sampling,
            config.sampling.n_samples,
        )  # fmt: skip
        inputs.workflow = Mixed(inputs.workflow, agent)
        return inputs

    loop.prepare = with_agent
    return int(not loop.run(config_of(out, steps), out / "run").complete)


def run(out: Path, steps: int, sample_every: int, kill_every: int) -> int:
    """Train in another process, sample its memory, and kill a server now and then."""
    out.mkdir(parents=True)
    shared(out).mkdir()
    rows = [{"question": f"{a}a+{b}b=?", "answer": str(a + b)} for a in range(9) for b in range(9)]
    (out / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, __file__, "train", str(out), f"--steps={steps}"]
    with open(out / "train.log", "w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    trainer, seen, killed = psutil.Process(process.pid), 0, 0
    try:
        while process.poll() is None:
            time.sleep(0.1)
            step = last_step(out)
            if step // sample_every > seen:
                seen = step // sample_every
                line = {"step": step, "time": time.time(), **sample(trainer, out)}
                with open(out / "samples.jsonl", "a") as file:
                    file.write(json.dumps(line) + "\n")
            if step // kill_every > killed and (victim := server(trainer, 1)):
                killed = step // kill_every
                victim.send_signal(signal.SIGKILL)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(60)
        left = sorted(p.name for p in shared(out).rglob("*") if p.is_file())
        if not left:
            shutil.rmtree(shared(out))
        print(f"exit {process.returncode}, {killed} kills, left in {shared(out)}: {left}")
    return process.returncode


def last_step(out: Path) -> int:
    """Return the last recorded step; 0 before the first."""
    path = out / "run" / "metrics.jsonl"
    if not path.exists():
        return 0
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - 20_000))
        lines = [line for line in file.read().split(b"\n")[1:-1] if line]
    return json.loads(lines[-1])["step"] if lines else 0


def server(trainer: psutil.Process, index: int) -> psutil.Process | None:
    """Return local server `index` of the run; None while it is not running."""
    for child in trainer.children():
        try:
            if f"--seed={index}" in child.cmdline():
                return child
        except psutil.Error:
            continue
    return None


def sample(trainer: psutil.Process, out: Path) -> dict:
    """Return the memory of each process, and the bytes in shared memory."""
    everyone = {"trainer": trainer, "server 0": server(trainer, 0), "server 1": server(trainer, 1)}
    named = {p.pid for p in everyone.values() if p}
    for child in trainer.children(recursive=True):
        if child.pid not in named:
            everyone[f"worker {len(everyone) - 3}"] = child
    found: dict = {}
    for name, process in everyone.items():
        try:
            if process:
                found[name] = {
                    "rss": process.memory_info().rss,
                    "descriptors": process.num_fds(),
                    "threads": process.num_threads(),
                    "age": time.time() - process.create_time(),
                }
        except psutil.Error:
            continue
    files = [p for p in shared(out).rglob("*") if p.is_file()]
    found["shared memory"] = {"bytes": sum(p.stat().st_size for p in files), "files": len(files)}
    return found


def slope(points: list[tuple[float, float]]) -> float:
    """Return the least-squares slope per 1,000 steps, after the warm-up."""
    late = [(x, y) for x, y in points if x >= WARM_UP]
    if len(late) < 3:
        return float("nan")
    return 1000 * statistics.linear_regression(*zip(*late, strict=True)).slope


def plot(out: Path) -> int:
    """Print the slopes and draw the samples."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    samples = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    records = [
        json.loads(line) for line in (out / "run" / "metrics.jsonl").read_text().splitlines()
    ] if (out / "run").exists() else []  # fmt: skip
    if records:
        every = samples[1]["step"] - samples[0]["step"] if len(samples) > 1 else 100
        for line in samples:
            late = [
                r["step_seconds"]
                for r in records
                if line["step"] - every < r["step"] <= line["step"]
            ]
            line["step seconds"] = statistics.median(late)
        (HERE / "samples.jsonl").write_text("".join(json.dumps(line) + "\n" for line in samples))
    series: dict[str, list[list]] = {
        "MB resident": [],
        "descriptors": [],
        "threads": [],
        "MB in /dev/shm": [],
        "seconds a step (median)": [],
    }

    def add(title, name, values):
        points = [
            (line["step"], value)
            for line, value in zip(samples, values, strict=True)
            if value is not None
        ]
        series[title].append([name, points])
        print(f"{title:24} {name:10} first {points[0][1]:10.2f}  last {points[-1][1]:10.2f}  "
              f"per 1,000 steps {slope(points):+9.3f}")  # fmt: skip

    names = sorted(
        {n for line in samples for n in line if isinstance(line[n], dict)} - {"shared memory"}
    )
    for title, key, scale in (("MB resident", "rss", 1e6), ("descriptors", "descriptors", 1),
                              ("threads", "threads", 1)):  # fmt: skip
        for name in names:
            add(
                title, name, [line[name][key] / scale if name in line else None for line in samples]
            )
    add("MB in /dev/shm", "weights", [line["shared memory"]["bytes"] / 1e6 for line in samples])
    add("seconds a step (median)", "trainer", [line.get("step seconds") for line in samples])
    figure, axes = plt.subplots(len(series), 1, figsize=(8, 12), sharex=True)
    for axis, (title, lines) in zip(axes, series.items(), strict=True):
        for name, points in lines:
            axis.plot(*zip(*points, strict=True), ".-", label=name)
        axis.set_ylabel(title)
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7, ncol=3)
    axes[-1].set_xlabel("step; server 1 is killed every 200")
    figure.tight_layout()
    figure.savefig(HERE / "soak.png", dpi=110)
    return 0


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("run", "train", "plot"))
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--sample", type=int, default=100)
    parser.add_argument("--kill", type=int, default=200)
    args = parser.parse_args()
    out = args.out.absolute()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if args.what == "train":
        return train(out, args.steps)
    return plot(out) if args.what == "plot" else run(out, args.steps, args.sample, args.kill)


if __name__ == "__main__":
    sys.exit(main())
