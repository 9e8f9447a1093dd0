"""Measure the share of real tokens in packed rows, and whether anything compiles after warm-up.

    python -m experiments.bench.packing [ROWS.jsonl] [--batches=40] [--warmup=10]

Lengths are log-normal fits to GSM8K's 7,473 training rows, counted as Qwen's tokenizer splits them,
or the rows of a jsonl file with `question` and `answer`. Uneven lengths are made up. Part one plans
batches with the trainer's own packing for several budgets and model shapes. Part two runs the real
update on a small model and counts XLA compilations.
Targets: at least 95 % real tokens, no compilation after warm-up.
"""

import argparse
import json
import re
from pathlib import Path

import numpy as np

from experiments.bench import workload
from rlx.base import Group, Trajectory

QUESTION, ANSWER = (3.94, 0.36), (4.64, 0.43)  # μ, σ of log tokens
LONGEST = 1024  # tokens of a question or an answer
TEMPLATE_TOKENS = 30  # system prompt and chat markers
PROMPTS, SAMPLES = 64, 8
UPDATE_PROMPTS, UPDATE_BUDGET = 16, 4096  # part two computes on a CPU
BUDGETS = (4096, 8192, 16384, 32768)
TOKEN = re.compile(r"\d| ?[A-Za-z]+|[^\sA-Za-z\d]+|\n")
# Attention has the same share as in the 1.5B model, so packing is alike.
TINY = {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 512,
    "num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 1, "num_key_value_heads": 1,
    "head_dim": 8, "intermediate_size": 2816, "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}  # fmt: skip
QWEN_1_5B = {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 151_936,
    "num_hidden_layers": 28, "hidden_size": 1536, "num_attention_heads": 12,
    "num_key_value_heads": 2, "intermediate_size": 8960, "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
}  # fmt: skip


class Lengths:
    """Draw (prompt, completion) token counts, from the fits or from rows of a file."""

    def __init__(self, path: str | None):
        self.rows = None
        if path:
            rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
            self.rows = np.array(
                [[len(TOKEN.findall(row[key])) for key in ("question", "answer")] for row in rows]
            )

    def group(self, rng) -> tuple[int, np.ndarray]:
        """Return one prompt's length and its completions' lengths, tokens."""
        if self.rows is not None:
            prompt = self.rows[rng.integers(len(self.rows)), 0]
            answers = self.rows[rng.integers(len(self.rows), size=SAMPLES), 1]
        else:
            prompt = round(rng.lognormal(*QUESTION))
            answers = rng.lognormal(*ANSWER, SAMPLES).round().astype(int)
        return TEMPLATE_TOKENS + int(prompt), np.clip(answers, 1, LONGEST)


def make_batch(lengths: Lengths, rng, prompts: int = PROMPTS) -> list[Group]:
    """Return a train batch with random tokens of drawn lengths."""
    groups = []
    for group_id in range(prompts):
        prompt, answers = lengths.group(rng)
        trajectories = tuple(
            trajectory(rng, prompt, int(n), f"{group_id}.{i}") for i, n in enumerate(answers)
        )
        groups.append(Group(group_id, trajectories))
    return groups


def trajectory(rng, prompt: int, new: int, trajectory_id: str) -> Trajectory:
    """Return one trajectory of `prompt` + `new` random tokens."""
    mask = np.arange(prompt + new) >= prompt
    return Trajectory(
        tokens=rng.integers(0, 512, prompt + new).astype(np.int32),
        loss_mask=mask,
        behaviour_logprobs=np.where(mask, -6.0, 0.0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        reward=float(rng.integers(0, 2)),
        stop_reason="stop",
        trajectory_id=trajectory_id,
    )


def shares(lengths: Lengths, batches: int) -> list[dict]:
    """Print real tokens over computed tokens, by budget and model shape."""
    from rlx.config import default
    from rlx.model.model_config import ModelConfig
    from rlx.model.params import attention_cost
    from rlx.train import packing

    buckets = default().train.row_buckets
    rows = []
    for name, shape in (("3.7M", workload.CONFIG), ("1.5B", QWEN_1_5B)):
        cost = attention_cost(ModelConfig.from_hf(shape))
        for budget in BUDGETS:
            rng = np.random.default_rng(0)
            real = padded = 0
            shapes = set()
            for _ in range(batches):
                flat = packing.flatten(make_batch(lengths, rng))
                plan = packing.plan(flat.sizes, budget, buckets, attention_cost=cost)
                real, padded = real + flat.num_tokens, padded + plan.padded_tokens
                shapes |= {*plan.shapes}
            rows.append(
                {"model": name, "budget": budget, "real": real / padded, "shapes": len(shapes)}
            )
    return rows


def uneven(batches: int) -> list[dict]:
    """Compare mixed row lengths with one row length, for uneven answers and the 1.5B shape.

    Cost is the time of a token over its time without attention, as the planner counts it.
    """
    from rlx.config import default
    from rlx.model.model_config import ModelConfig
    from rlx.model.params import attention_cost
    from rlx.train import packing

    cost, buckets = attention_cost(ModelConfig.from_hf(QWEN_1_5B)), default().train.row_buckets
    draws = {
        "511 of 650, one of 30,000": lambda rng: np.append(rng.lognormal(6.5, 0.6, 511), 30_000),
        "512 of 2,000, long tail": lambda rng: rng.lognormal(7.6, 0.9, 512),
    }
    out = []
    for name, draw in draws.items():
        for shards in (1, 8):
            for allowed in (buckets[-1:], buckets):
                rng, shapes = np.random.default_rng(0), set()
                tokens = padded = total = 0.0
                for _ in range(batches):
                    sizes = draw(rng).clip(50, 31_000).astype(int)
                    plan = packing.plan(
                        sizes, buckets[-1], allowed, attention_cost=cost, shards=shards
                    )
                    tokens, padded = tokens + sizes.sum(), padded + plan.padded_tokens
                    total, shapes = total + plan.cost(cost), shapes | {*plan.shapes}
                out.append({
                    "lengths": name, "shards": shards,
                    "rows": "own" if allowed is buckets else "one",
                    "real": tokens / padded, "cost": total / tokens, "shapes": len(shapes),
                })  # fmt: skip
    return out


def compilations(
    lengths: Lengths, batches: int, warmup: int, buckets: tuple[int, ...]
) -> tuple[int, int, int]:
    """Count XLA compilations of the update: in warm-up, later, and when all batches repeat.

    Args:
      buckets: the row lengths to choose from; () for those of the default config.
    """
    import jax

    from rlx.config import default
    from rlx.model import params
    from rlx.model.model_config import ModelConfig
    from rlx.train.train_options import TrainOptions
    from rlx.train.update import JaxUpdate

    total = 0
    marks = []

    def listen(event: str, seconds: float, **_):
        nonlocal total
        total += event == "/jax/core/compile/backend_compile_duration"

    jax.monitoring.register_event_duration_secs_listener(listen)
    config = default()
    config.train.max_tokens_per_microbatch = UPDATE_BUDGET
    config.train.row_buckets = buckets or config.train.row_buckets
    model = ModelConfig.from_hf(TINY)
    update = JaxUpdate(model, TrainOptions.of(config))
    state = update.init(params.init(model, jax.random.key(0), "float32"))
    for _ in range(2):
        rng = np.random.default_rng(1)
        for step in range(batches):
            state, metrics = update.update(state, make_batch(lengths, rng, UPDATE_PROMPTS))
            float(metrics["actor_loss"])  # waits, as the loop does one step later
            if step in (warmup - 1, batches - 1):
                marks.append(total)
    return marks[0], marks[1] - marks[0], marks[3] - marks[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="?", help="jsonl with question and answer; default: the fit")
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--buckets", default="", help="row lengths of the update, e.g. 1024")
    args = parser.parse_args()
    lengths = Lengths(args.rows)
    print(f"{PROMPTS} prompts x {SAMPLES} samples, lengths from {args.rows or 'the GSM8K fit'}")
    print("| model | tokens a microbatch | real tokens | shapes |\n|---|---|---|---|")
    for row in shares(lengths, args.batches):
        print(f"| {row['model']} | {row['budget']} | {row['real']:.1%} | {row['shapes']} |")
    print("| tokens of answers | row shards | row length | real tokens | cost | shapes |")
    print("|---|---|---|---|---|---|")
    for row in uneven(args.batches):
        share, cost = f"{row['real']:.1%}", f"{row['cost']:.2f}"
        cells = (row["lengths"], row["shards"], row["rows"], share, cost, row["shapes"])
        print(f"| {' | '.join(map(str, cells))} |")
    warm, late, again = compilations(
        lengths, args.batches, args.warmup, tuple(int(n) for n in args.buckets.split(",") if n)
    )
    print(
        f"compilations: {warm} in the first {args.warmup} updates, {late} in the next "
        f"{args.batches - args.warmup} (shapes not met before), {again} in {args.batches} more of "
        "the same shapes"
    )


if __name__ == "__main__":
    main()
