"""Compare train steps that compute shared prompts once with plain packing, on a CPU.

    python -m experiments.bench.prefix_trees [--cases=2048+128,512+128,64+512] [--steps=5] \
        [--model=tiny] [--groups=1]

One GRPO update of groups of 8 samples, each prompt + answer tokens. `plain` has
train.share_prefixes=off and `auto` the default. Both are in one process and step in turns. Each
pair of neighbouring steps gives a ratio of seconds; its quartiles are printed. `ideal` is the ratio
of tokens: 8 · (prompt + answer) over prompt + 8 · answer. Row lengths and microbatches fit
both sides, so that neither has padding.
Targets: at least 0.9 of the ideal at 2048+128, and at least 0.98 of plain packing everywhere.
"""

import argparse
import json
import time

import jax
import numpy as np

from experiments.bench.process import median_spread
from experiments.bench.train_step_workers import MODELS, make_config, make_groups
from rlx.base import Group
from rlx.model import params as parameters
from rlx.train.train_options import TrainOptions
from rlx.train.update import JaxUpdate

SAMPLES = 8


def shared_prompts(prompt: int, answer: int, count: int, vocab: int) -> list[Group]:
    """Return groups of samples with one prompt each."""
    groups = make_groups(np.tile([prompt, answer], (count * SAMPLES, 1)), vocab, SAMPLES)
    for group in groups:
        for t in group.trajectories[1:]:
            t.tokens[:prompt] = group.trajectories[0].tokens[:prompt]
    return groups


def measure(prompt: int, answer: int, steps: int, name: str, count: int) -> dict:
    """Return one row of the table."""
    model, whole, tree = MODELS[name], prompt + answer, prompt + SAMPLES * answer
    groups = shared_prompts(prompt, answer, count, model.vocab_size)
    params = jax.jit(lambda key: parameters.init(model, key))(jax.random.key(0))
    sides, taken = {}, {"plain": [], "auto": []}
    for side in taken:
        config = make_config({
            "budget": tree, "row_buckets": sorted({whole, 2 * whole, tree}),
            "compute_dtype": "float32", "remat": "none", "chunk": 0,
        })  # fmt: skip
        config.train.share_prefixes = side.replace("plain", "off")
        trainer = JaxUpdate(model, TrainOptions.of(config))
        sides[side] = trainer, trainer.init(params)
    for _ in range(steps + 1):  # the first one compiles
        for side, (trainer, state) in sides.items():
            begun = time.perf_counter()
            state, metrics = trainer.update(state, groups)
            jax.block_until_ready(state.updates)
            taken[side].append(time.perf_counter() - begun)
            sides[side] = trainer, state
    seconds = {side: found[1:] for side, found in taken.items()}
    ideal = SAMPLES * whole / tree
    speedup = median_spread(
        [a / b for a, b in zip(seconds["plain"], seconds["auto"], strict=True)]
    )  # fmt: skip
    return {
        "case": f"{prompt}+{answer}",
        "model": name,
        "tokens": metrics["n_tokens"],
        "shared_tokens": metrics["n_shared_tokens"],  # of auto, the last side
        "plain_seconds": median_spread(seconds["plain"]),
        "auto_seconds": median_spread(seconds["auto"]),
        "speedup": speedup,
        "ideal": round(ideal, 2),
    }


def main() -> None:
    """Print a JSON line for each case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default="2048+128,512+128,64+512")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--model", default="tiny", choices=MODELS)
    parser.add_argument("--groups", type=int, default=1)
    a = parser.parse_args()
    for case in a.cases.split(","):
        prompt, answer = map(int, case.split("+"))
        print(json.dumps(measure(prompt, answer, a.steps, a.model, a.groups)), flush=True)


if __name__ == "__main__":
    main()
