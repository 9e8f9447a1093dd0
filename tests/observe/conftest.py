"""A run's WORKDIR as the loop would leave it, made up: for tests and for looking at pages."""

import json
import random
from pathlib import Path

import pytest

from rlx.observe.metrics import MetricsWriter
from rlx.observe.timeline import Timeline

PROMPT = (
    "<|im_start|>system\nThink step by step, then give the result in \\boxed{}.<|im_end|>\n"
    "<|im_start|>user\nWhat is 37 + 58 - 12?<|im_end|>\n<|im_start|>assistant\n"
)
ATTACK = "<script>document.title='stolen'</script><img src=x onerror=alert(1)> & \x07\u202e"


@pytest.fixture
def make_run():
    """The function `make_run(workdir, steps=40, ...) -> workdir`."""
    return synthesize


def synthesize(workdir, steps=40, total_steps=None, seed=0, attack=False) -> Path:
    """Writes metrics, evaluations, transcripts, timeline and config of a plausible run."""
    workdir, draw = Path(workdir), random.Random(seed)
    workdir.mkdir(parents=True, exist_ok=True)
    config = _config(total_steps or steps)
    (workdir / "config.json").write_text(json.dumps(config))
    timeline = Timeline(clock=lambda: 0)
    clock = 31_000.0
    start = clock
    writer = MetricsWriter(workdir)
    writer.write("eval.jsonl", _evaluation(0, 0.0, draw, steps))
    for step in range(1, steps + 1):
        record = _record(step, steps, draw)
        _spans(timeline, clock, record, step, draw)
        clock += record["step_seconds"]
        record["elapsed_seconds"] = clock - start
        writer.write("metrics.jsonl", record)
        writer.write_rollouts(step, _rollouts(step, steps, draw, attack))
        if step % 10 == 0:
            writer.write("eval.jsonl", _evaluation(step, clock - start, draw, steps))
    timeline.save(workdir / "timeline.json")
    return workdir


def _progress(step, steps):
    return 1 - 2.718 ** (-3.2 * step / max(steps, 1))


def _record(step, steps, draw):
    learned = _progress(step, steps)
    reward = min(1.0, max(0.0, 0.42 + 0.5 * learned + draw.gauss(0, 0.045)))
    seconds = {
        "wait": abs(draw.gauss(0.22, 0.12)),
        "pack": abs(draw.gauss(0.015, 0.003)),
        "train": abs(draw.gauss(0.62, 0.05)),
        "publish": abs(draw.gauss(0.035, 0.01)),
        "log": 0.004,
    }
    mean_len = 62 - 14 * learned + draw.gauss(0, 2)
    tokens = int(64 * mean_len)
    zero = int(tokens * draw.uniform(0.25, 0.45))
    one = int((tokens - zero) * draw.uniform(0.6, 0.85))
    histogram = {0: zero, 1: one, 2: tokens - zero - one}
    histogram = {lag: count for lag, count in histogram.items() if lag < step}
    total = sum(seconds.values()) + 0.006
    if step == 1:
        total += 9.0  # starting, compiling
    failed, rejected = step // 23, step // 9
    return {
        "step": step,
        "epoch": step * 8 // 400,
        "global_step": step,
        "version": step,
        "task_reward": reward,
        "kl_reward": 0.0,
        "final_reward": reward,
        "advantage": draw.gauss(0, 0.01),
        "importance_weight": 1.0 + draw.gauss(0, 0.002),
        "actor_clip_ratio": abs(draw.gauss(0.012, 0.005)),
        "actor_loss": draw.gauss(-0.005, 0.01),
        "ppo_approx_kl": abs(draw.gauss(2e-4, 1e-4)),
        "entropy": 0.62 - 0.38 * learned + draw.gauss(0, 0.012),
        "grad_norm": float("nan") if step == 17 else abs(draw.gauss(0.7, 0.15)),
        "behaviour_weight": 1.0 + draw.gauss(0, 0.01),
        "behaviour_kl": abs(draw.gauss(2e-3, 8e-4)),
        "avg_seq_len": mean_len,
        "avg_prompt_len": 38.0 + draw.gauss(0, 1),
        "n_seqs": 64,
        "n_tokens": tokens + 64 * 38,
        "n_valid_tokens": tokens,
        "no_eos_ratio": max(0.0, 0.08 - 0.07 * learned + draw.gauss(0, 0.01)),
        "pad_ratio": 0.04,
        "staleness_min": 0,
        "staleness_mean": sum(k * v for k, v in histogram.items()) / max(1, tokens),
        "staleness_max": max(histogram, default=0),
        "staleness_histogram": histogram,
        "tokens_per_version": {max(0, step - 1 - lag): n for lag, n in histogram.items()},
        "seconds": seconds,
        "step_seconds": total,
        "generated_tokens_per_second": tokens / total * draw.uniform(0.95, 1.1),
        "consumed_tokens_per_second": tokens / total,
        "tokens_per_second_per_device": (tokens + 64 * 38) / total,
        "mfu": 0.3 + draw.gauss(0, 0.01),
        "admitted": step * 8 + 24 + rejected + failed,
        "accepted": step * 8 + 8,
        "rejected": rejected,
        "failed": failed,
        "dropped": 0,
        "learning_rate": 1e-4,
    }


def _evaluation(step, elapsed, draw, steps):
    accuracy = min(1.0, 0.46 + 0.49 * _progress(step, steps) + draw.gauss(0, 0.008))
    return {"step": step, "version": step, "greedy_acc": accuracy, "num_questions": 200,
            "mean_tokens": 48.0, "seconds": 1.8, "elapsed_seconds": elapsed}  # fmt: skip


def _rollouts(step, steps, draw, attack):
    for index in range(4):
        right = draw.random() < 0.4 + 0.55 * _progress(step, steps)
        answer = 83 if right else draw.choice([73, 85, 95, 107])
        completion = (
            f"First, 37 + 58 = 95. Then subtract 12 from 95: 95 - 12 = {answer}. "
            + "Checking once more, 83 + 12 = 95 and 95 - 58 = 37. " * draw.choice([0, 0, 1, 3])
            + f"The result is \\boxed{{{answer}}}."
        )
        if attack:
            completion += ATTACK
        count = max(1, len(completion) // 3)
        cut = draw.randrange(count)
        old, new = max(0, step - 2), step - 1
        yield {"step": step, "group_id": step * 8 + index, "trajectory_id": f"{step * 8 + index}.0",
               "prompt": PROMPT, "completion": completion, "reward": float(right),
               "stop_reason": "stop" if draw.random() < 0.95 else "length",
               "answer": "83", "versions": [old] * cut + [new] * (count - cut)}  # fmt: skip


def _spans(timeline, clock, record, step, draw):
    """The spans of one step that starts at `clock` seconds."""

    def add(process, track, name, start, seconds, **args):
        timeline.add(
            process,
            track,
            name,
            round(start * 1e6) * 1000,
            round((start + seconds) * 1e6) * 1000,
            **args,
        )

    at = clock
    for phase in ("wait", "pack", "train", "publish", "log"):
        add("trainer", "main", phase, at, record["seconds"][phase], step=step)
        if phase == "publish":
            add("publish", "main", "publish", at, record["seconds"][phase] * 1.6, version=step)
        at += record["seconds"][phase]
    add("trainer", "main", "step", clock, record["step_seconds"], step=step)
    for server in ("server 0", "server 1"):
        now = clock
        while now < at - 0.06:
            length = draw.uniform(0.02, 0.05)
            add(server, "engine", draw.choice(["prefill", *["decode"] * 5]), now, length)
            now += length + draw.choice([0.0, 0.0, 0.004])
        add(server, "engine", "load", at - 0.03, 0.02, version=step)
    for index in range(6):
        add("rewards", "main", "reward", clock + draw.random() * record["step_seconds"],
            draw.uniform(0.003, 0.06), group=step * 8 + index)  # fmt: skip
    if step % 10 == 0:
        add("evaluation", "main", "evaluate", clock, record["step_seconds"] * 1.6, version=step)


def _config(total_steps):
    from rlx.config import default

    config = default()
    config.total_steps = total_steps
    config.model.path = "rlx/assets/arithmetic"
    config.data.kind = "arithmetic"
    config.reward.name = "math"
    config.optimizer.learning_rate = 1e-4
    config.sampling.max_new_tokens = 128
    config.eval.every_steps = 10
    return config.to_dict()
