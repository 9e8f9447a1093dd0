"""Compare train steps that compute shared prompts once with plain packing, on a CPU.

    python -m experiments.bench.prefix_trees [--cases=2048+128,agent-64+512] [--steps=5] \
        [--model=tiny] [--groups=1]

One GRPO update of groups of 8 samples, each prompt + answer tokens. In an agent's case the answer
is 8 turns, half of them a tool's tokens, and sample n leaves the first one after n turns. `plain`
has train.share_prefixes=off and `auto` the default. Both are in one process and step in turns. Each
pair of neighbouring steps gives a ratio of seconds; its quartiles are printed. `ideal` is the ratio
of tokens: those of all samples over those that differ. `ideal_flops` is lower, because each answer
still attends to its prompt. Row lengths and microbatches fit both sides, so that neither has
padding.
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

SAMPLES = TURNS = 8
CASES = [f"{kind}{p}+{a}" for kind in ("", "agent-") for p in (64, 512, 2048) for a in (128, 512)]


def alike(prompt: int, answer: int, count: int, vocab: int, turn: int = 0) -> list[Group]:
    """Return groups of samples with one prompt each; with a `turn`, of its tokens, an agent's."""
    groups = make_groups(np.tile([prompt, answer], (count * SAMPLES, 1)), vocab, SAMPLES)
    for group in groups:
        first = group.trajectories[0].tokens
        for n, t in enumerate(group.trajectories):
            shared = prompt + n * turn
            t.tokens[:shared] = first[:shared]
            if turn:
                t.loss_mask[prompt:] = np.arange(answer) % turn >= turn // 2
    return groups


def measure(case: str, steps: int, name: str, count: int) -> dict:
    """Return one row of the table."""
    agent, sizes = case.startswith("agent-"), case.removeprefix("agent-").split("+")
    model, (prompt, answer) = MODELS[name], map(int, sizes)
    turn = agent * answer // TURNS
    whole, tree = prompt + answer, prompt + SAMPLES * answer - sum(range(SAMPLES)) * turn
    groups = alike(prompt, answer, count, model.vocab_size, turn)
    params = jax.jit(lambda key: parameters.init(model, key))(jax.random.key(0))
    sides, flops, taken = {}, {}, {"plain": [], "auto": []}
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
            sides[side], flops[side] = (trainer, state), metrics["model_flops"]
    seconds = {side: found[1:] for side, found in taken.items()}
    ideal = SAMPLES * whole / tree
    speedup = median_spread(
        [a / b for a, b in zip(seconds["plain"], seconds["auto"], strict=True)]
    )  # fmt: skip
    return {
        "case": case,
        "model": name,
        "tokens": metrics["n_tokens"],
        "shared_tokens": metrics["n_shared_tokens"],  # of auto, the last side
        "plain_seconds": median_spread(seconds["plain"]),
        "auto_seconds": median_spread(seconds["auto"]),
        "speedup": speedup,
        "ideal": round(ideal, 2),
        "ideal_flops": round(flops["plain"] / flops["auto"], 2),
    }


def main() -> None:
    """Print a JSON line for each case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--model", default="tiny", choices=MODELS)
    parser.add_argument("--groups", type=int, default=1)
    a = parser.parse_args()
    for case in a.cases.split(","):
        print(json.dumps(measure(case, a.steps, a.model, a.groups)), flush=True)


if __name__ == "__main__":
    main()
