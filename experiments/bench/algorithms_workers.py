"""The two sides of the algorithm benchmark, each a process that makes a step on request.

`python -m experiments.bench.algorithms_workers '{"side": "jax", ...}'` writes one JSON line when it
is ready. For each line that it reads it writes one: the seconds of one call.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable

import numpy as np

from rlx.algorithms import losses, presets, supervised
from rlx.algorithms.advantages import advantages, next_trained
from rlx.algorithms.algorithm import Algorithm
from rlx.algorithms.array_ops import ops_of
from rlx.base import Group, Trajectory
from rlx.config import default
from rlx.system.process_settings import keep_freed_memory
from rlx.train import packing

Arrays = dict[str, np.ndarray]
Step = Callable[[], float]


def resolved(preset: str) -> Algorithm:
    """Return a preset as a run has it, with completions of at most 256 tokens."""
    config = default()
    config.algorithm.preset = preset
    return presets.resolve(config.algorithm, 256)


def make_lengths(prompts: int, samples: int, tokens: int, seed: int = 0) -> np.ndarray:
    """Return [S, 2] prompt and completion tokens, `tokens` in all.

    Completions are log-normal (σ 0.7). Prompts are log-normal (σ 0.4), shared by the samples of a
    group, and a third of the tokens.
    """
    rng = np.random.default_rng(seed)
    prompt = np.repeat(rng.lognormal(0.0, 0.4, prompts), samples)
    prompt = np.maximum(prompt / prompt.sum() * tokens / 3, 1).astype(int)
    completion = rng.lognormal(0.0, 0.7, prompts * samples)
    completion = completion / completion.sum() * (tokens - prompt.sum())
    ends = completion.cumsum().round().astype(int)  # rounded together, so that the sum is exact
    return np.stack([prompt, np.maximum(np.diff(ends, prepend=0), 1)], 1)


def make_groups(lengths: np.ndarray, samples: int, seed: int = 0) -> list[Group]:
    """Return groups with random behaviour logprobs and rewards; token ids are all alike."""
    rng = np.random.default_rng(seed)
    groups = []
    for start in range(0, len(lengths), samples):
        members = []
        for index, (prompt, completion) in enumerate(lengths[start : start + samples]):
            mask = np.arange(prompt + completion) >= prompt
            members.append(
                Trajectory(
                    tokens=np.zeros(len(mask), np.int32),
                    loss_mask=mask,
                    behaviour_logprobs=-rng.exponential(1.0, len(mask)).astype(np.float32) * mask,
                    versions=np.where(mask, rng.integers(3, 6, len(mask)), -1).astype(np.int32),
                    reward=float(rng.random() < 0.4),
                    stop_reason="length" if rng.random() < 0.1 else "stop",
                    trajectory_id=f"{start // samples}.{index}",
                )
            )
        groups.append(Group(start // samples, tuple(members)))
    return groups


def make_inputs(
    groups: list[Group], width: int, algorithm: Algorithm, seed: int = 0
) -> tuple[Arrays, Arrays]:
    """Return the algorithm's inputs in a train step: the flat batch, and all of its rows.

    Args:
      groups: of one batch.
      width: tokens per row.
      algorithm: selects the optional arrays.

    Returns:
      flat: the input of `advantages`.
      rows: [B, width] arrays as `packing.microbatches` makes them, and `target`, `entropy` float32
      and the scalar `target_version`.
    """
    rng = np.random.default_rng(seed)
    batch = packing.flatten(groups)
    ids = np.arange(batch.num_sequences)
    pairs = batch.row_mates(ids) if algorithm.data == "pairs" else ids
    slots = packing.fullest_rows(np.bincount(pairs, batch.sizes).astype(np.int64), width)[pairs]
    plan = packing.PackPlan(slots, ((int(slots.max()) + 1, width),))
    (rows,) = packing.microbatches(batch, ids, plan)
    flat = batch.arrays()
    mask, behaviour = flat["loss_mask"], flat["behaviour_logprobs"]

    def near(spread: float) -> np.ndarray:
        noise = rng.normal(0.0, spread, mask.shape)
        return np.where(mask, behaviour + noise, 0.0).astype(np.float32)

    if algorithm.proximal == "recompute":
        flat["proximal_logprobs"] = near(0.05)
    if algorithm.needs_anchor:
        flat["reference_logprobs"] = near(0.3)
    if algorithm.critic:
        flat["values"] = np.where(mask, rng.random(mask.shape), 0.0).astype(np.float32)
        flat["bootstrap_values"] = rng.random(flat["valid"].shape).astype(np.float32)
    padded = np.append(near(0.07), np.float32(0.0))
    rows["target"] = padded[rows["flat_index"]]
    rows["entropy"] = rng.exponential(1.0, rows["target"].shape).astype(np.float32)
    rows["target_version"] = np.float32(6.5)
    return flat, rows


def parts(algorithm: Algorithm) -> tuple[Callable, Callable]:
    """Return the parts of the computation, for JAX's arrays and torch's tensors.

    Returns:
      (flat, rows) → the loss's batch and its denominator, without gradient;
      (target, batch, denominator) → the divided loss and its stats.
    """

    def weigh(flat, rows):
        ops = ops_of(flat["loss_mask"])
        mask, ids = flat["loss_mask"], flat["sequence_ids"]
        if algorithm.loss == "bradley_terry":
            mask = mask & ~next_trained(mask, ids)[1]
        weights, denominator = losses.loss_weights(mask, ids, flat["group_ids"], algorithm)
        if algorithm.second_moment:
            log_weight = flat["behaviour_logprobs"] - flat["proximal_logprobs"]
            kept = losses.within_second_moment(log_weight, mask, algorithm.second_moment)
            weights = ops.lib.where(kept, weights, 0.0)
        per_token = {"advantages": advantages(flat, algorithm)["advantages"]}
        for name in ("proximal_logprobs", "reference_logprobs"):
            if name in flat:
                per_token[name] = flat[name]
        per_token["loss_weights"] = weights
        gathered = {k: ops.take(x, rows["flat_index"], 0.0) for k, x in per_token.items()}
        kept = rows["loss_mask"] & (gathered["loss_weights"] > 0)
        return {**rows, **gathered, "loss_mask": kept}, denominator

    def loss(target, batch, denominator):
        if algorithm.loss == "nll":
            total, stats = supervised.nll_loss(target, batch["entropy"], batch)
        elif algorithm.data == "pairs":
            total, stats = supervised.pair_loss(target, batch, algorithm)
        else:
            total, stats = losses.policy_loss(target, batch["entropy"], batch, algorithm)
        return total / denominator, stats

    return weigh, loss


def jax_gradient(algorithm: Algorithm) -> Callable:
    """Return (flat, rows) → loss, stats and the gradient of rows["target"], in JAX."""
    import jax

    weigh, loss = parts(algorithm)

    def gradient(flat, rows):
        batch, denominator = weigh(flat, rows)
        differentiate = jax.value_and_grad(loss, has_aux=True)
        (value, stats), grad = differentiate(rows["target"], batch, denominator)
        return value, stats, grad

    return gradient


def torch_gradient(algorithm: Algorithm, compiled: str = "") -> Callable:
    """Return the same in torch; `compiled` is the backend of torch.compile, empty for eager.

    Two parts are compiled: everything without gradient, and the loss with its gradient.
    """
    import torch

    weigh, loss = parts(algorithm)
    weigh = torch.no_grad()(weigh)
    if compiled:
        weigh, loss = (
            torch.compile(f, fullgraph=True, backend=compiled, dynamic=False) for f in (weigh, loss)
        )

    def gradient(flat, rows):
        batch, denominator = weigh(flat, rows)
        target = rows["target"].detach().requires_grad_()
        value, stats = loss(target, batch, denominator)
        (grad,) = torch.autograd.grad(value, target)
        return value.detach(), stats, grad

    return gradient


def torch_inputs(arrays: Arrays) -> dict:
    """Return tensors with integers as int64, so that no call converts them."""
    import torch

    tensors = {name: torch.from_numpy(np.asarray(x)) for name, x in arrays.items()}
    return {k: x.long() if x.dtype == torch.int32 else x for k, x in tensors.items()}


def jax_side(algorithm: Algorithm, flat: Arrays, rows: Arrays, options: dict) -> Step:
    """Return the JAX side: one jitted program."""
    import jax

    del options
    program = jax.jit(jax_gradient(algorithm))
    flat, rows = jax.device_put((flat, rows))
    return lambda: float(jax.block_until_ready(program(flat, rows))[0])


def torch_side(algorithm: Algorithm, flat: Arrays, rows: Arrays, options: dict) -> Step:
    """Return the torch side, eager or compiled by inductor."""
    import torch

    torch.set_num_threads(options["threads"])
    program = torch_gradient(algorithm, "inductor" if options["side"] == "compiled" else "")
    flat, rows = torch_inputs(flat), torch_inputs(rows)
    return lambda: float(program(flat, rows)[0])


def main() -> None:
    """Serve steps over stdin and stdout."""
    options = json.loads(sys.argv[1])
    keep_freed_memory()  # for both sides, because it helps torch too
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keeps output of libraries out of the protocol
    algorithm = resolved(options["preset"])
    samples = 2 if algorithm.data == "pairs" else options["samples"]
    prompts = options["prompts"] * options["samples"] // samples
    lengths = make_lengths(prompts, samples, options["tokens"])
    flat, rows = make_inputs(make_groups(lengths, samples), options["width"], algorithm)
    before, start = _resident(), time.perf_counter()
    step = (jax_side if options["side"] == "jax" else torch_side)(algorithm, flat, rows, options)
    for _ in range(3):
        step()
    facts = {"warm_seconds": time.perf_counter() - start, "rows": list(rows["target"].shape)}
    print(json.dumps(facts), file=out, flush=True)
    for _ in sys.stdin:
        wall, cpu = time.perf_counter(), time.process_time()
        check = step()
        took = {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
        peak = _resident() - before
        print(json.dumps({**took, "check": check, "peak_bytes": peak}), file=out, flush=True)


def _resident() -> int:
    """Return the peak resident size so far, bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
