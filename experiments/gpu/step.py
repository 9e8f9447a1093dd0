"""Part `step_*`: one train step of 1.5B (GRPO, AdamW, bfloat16 with float32 parameters).

Only useful FLOPs count, forward and backward. Products have 6 per weight and token; the embedding
is looked up, the head is a product. Attention has 12 · heads · head width per layer, for each pair
of query and visible key of a segment. Recomputation by remat and padding do not count.

    utilisation = useful FLOPs / seconds / peak FLOP/s

Each part of the step is also timed separately, with remat's recomputation. Its roofline is
max(FLOPs / peak FLOP/s, least bytes / memory's bytes/s). `other` is the rest of the step: norms,
RoPE, embedding, loss, copies.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench.train_step_workers import MODELS, qwen2
from experiments.gpu import measure
from rlx.config import default
from rlx.doctor import memory
from rlx.doctor.machine import Devices
from rlx.model import decoder, remat
from rlx.model import params as parameters
from rlx.model.attention import attention
from rlx.model.cross_entropy import target_logprobs
from rlx.model.model_config import ModelConfig
from rlx.train.packing import segment_sizes
from rlx.train.train_options import TrainOptions
from rlx.train.update import JaxUpdate

TINY = qwen2(512, 2, 64, 4, 2, 160)


class Work(NamedTuple):
    """Useful FLOPs of a part of a step, and the least bytes that it must move."""

    flops: float
    bytes: float


def work(model: ModelConfig, ids: np.ndarray) -> dict[str, Work]:
    """Return the work of each part of a step on rows of segment ids [B, T]; 0 is padding."""
    sizes = np.concatenate([np.bincount(row)[1:] for row in ids]).astype(float)
    tokens, pairs = sizes.sum(), (sizes * (sizes + 1) / 2).sum()
    layers, wide, heads = model.num_layers, model.model_dim, model.num_heads * model.head_dim
    keys = model.num_kv_heads * model.head_dim

    def products(*shapes: tuple[int, int]) -> Work:
        """Return the work of x @ w and its two gradients in all layers, [tokens, D] and [D, F]."""
        flops = sum(6 * tokens * d * f for d, f in shapes)
        moved = sum(6 * tokens * (d + f) + 8 * d * f for d, f in shapes)  # float32 gradients of w
        return Work(layers * flops, layers * moved)

    return {
        "projections": products((wide, heads + 2 * keys), (heads, wide)),
        "mlp": products((wide, 2 * model.mlp_dim), (model.mlp_dim, wide)),
        # q, k, v and the output; in the backward pass these, and gradients as large
        "attention": Work(12 * layers * heads * pairs, 12 * layers * tokens * (heads + keys)),
        # float32 logits, written and read in both passes
        "head": Work(6 * tokens * wide * model.vocab_size, 16 * tokens * model.vocab_size),
        # read: gradient twice (once for its norm), parameter, two moments; written: the last three
        "optimizer": Work(0, 32 * parameters.count(model)),
    }


def make_config(o: dict[str, Any]):
    """Return a config whose minibatch is one microbatch of these rows."""
    c = default()
    c.model.compute_dtype, c.model.remat = "bfloat16", o["remat"]
    c.model.logprob_chunk = o["chunk"]
    c.data.max_prompt_tokens, c.sampling.max_new_tokens = o["length"] // 8, o["length"] * 7 // 8
    c.train.max_tokens_per_microbatch = o["rows"] * o["length"]
    c.train.row_buckets = (o["length"],)
    c.rollout.batch_prompts, c.sampling.n_samples = 1, o["rows"]
    c.algorithm.reward_mean = "batch"  # which a single sample can have
    return c


def sizes_of(config: Any, model: ModelConfig) -> memory.RunSizes:
    """Return the inputs of the memory estimate of a train step, without servers."""
    return memory.RunSizes(
        model, TrainOptions.of(config), config.data.max_prompt_tokens,
        config.sampling.max_new_tokens, config.rollout.batch_prompts, config.sampling.n_samples,
        has_fleet=False, engine="jax", num_servers=0, slots=1, max_model_len=1, decode_steps=1,
        publish="path", publish_dir="", publish_dtype="bfloat16", keep=1,
    )  # fmt: skip


def make_batch(model: ModelConfig, ids: np.ndarray) -> dict[str, Any]:
    """Return a microbatch of random tokens, in the form of `objective.gather`."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, model.vocab_size, ids.shape).astype(np.int32)
    first = np.diff(ids, axis=1, prepend=0) != 0
    starts = np.maximum.accumulate(np.where(first, np.arange(ids.shape[1]), 0), axis=1)
    positions = (np.arange(ids.shape[1]) - starts).astype(np.int32)
    behaviour = np.full(ids.shape, -np.log(model.vocab_size), np.float32)
    return {
        "tokens": tokens, "positions": positions, "segment_ids": ids,
        "segment_sizes": segment_sizes(ids), "versions": np.zeros_like(ids),
        "loss_mask": ~first, "behaviour_logprobs": behaviour, "proximal_logprobs": behaviour,
        "advantages": rng.standard_normal(ids.shape).astype(np.float32),
        "loss_weights": (~first).astype(np.float32),
        "target_version": np.float32(0), "kl_coefficient": np.float32(0),
    }  # fmt: skip


def parts_seconds(
    model: ModelConfig, state: Any, ids: np.ndarray, o: dict[str, Any]
) -> dict[str, float]:
    """Return the seconds of each part of a step, timed separately, times the layers."""
    rows, length = ids.shape
    layer = jax.tree.map(lambda leaf: leaf[0], state.params["layers"])
    x = jax.random.normal(jax.random.key(0), (rows, length, model.model_dim), jnp.bfloat16)
    heads = (rows, length, -1, model.head_dim)
    sizes = jnp.asarray(segment_sizes(ids))

    def projections(layer, x):
        q, k, v = (decoder.linear(layer, name, x) for name in ("q", "k", "v"))
        return decoder.linear(layer, "o", q), k, v

    q, k, v = (decoder.linear(layer, name, x).reshape(heads) for name in ("q", "k", "v"))
    functions: dict[str, tuple[Any, tuple, int]] = {
        "projections": (projections, (layer, x), model.num_layers),
        "mlp": (lambda own, x: decoder.mlp(own, model, x), (layer, x), model.num_layers),
        "attention": (lambda *qkv: attention(*qkv, ids, sizes), (q, k, v), model.num_layers),
    }
    found = {}
    kept = remat.KEPT.get(o["remat"], ("qkv", "gate", "attention"))  # none: everything
    for name, (function, arguments, times) in functions.items():
        found[name] = times * _both(function, *arguments)
        if {"projections": "qkv", "mlp": "gate"}.get(name, name) not in kept:
            found[name] += times * measure.seconds(jax.jit(function), *arguments)
    flat, targets = x.reshape(-1, model.model_dim), jnp.ones(rows * length, jnp.int32)
    weights = decoder.head(state.params, model)
    found["head"] = _both(
        lambda x, w: target_logprobs(x, w, targets, chunk=o["chunk"]), flat, weights
    )
    return found


def _both(function: Any, *arguments: Any) -> float:
    """Return the seconds of a forward and backward pass."""

    def passes(*arguments):
        out, pull = jax.vjp(function, *arguments)
        return pull(jax.tree.map(jnp.ones_like, out))

    return measure.seconds(jax.jit(passes), *arguments)


def run(o: dict[str, Any]) -> dict[str, Any]:
    """Return seconds, utilisation, parts and memory of the step."""
    model = TINY if o["tiny"] else MODELS["1.5b"]
    config, device = make_config(o), measure.device()
    trainer = JaxUpdate(model, TrainOptions.of(config))
    ids = measure.segments(o["rows"], o["length"])
    key = jax.random.key(0)
    state = jax.jit(lambda key: trainer.first_state(parameters.init(model, key)))(key)
    arguments = (None, jax.device_put(make_batch(model, ids)), jnp.float32(1), jnp.bool_(False))
    step = jax.jit(trainer.learner.step, donate_argnums=0)
    compiled = step.lower(state, *arguments).compile()
    m = compiled.memory_analysis()

    def run_steps(count: int) -> None:
        nonlocal state
        for _ in range(count):
            state, stats = compiled(state, *arguments)
        jax.block_until_ready((state, stats))

    run_steps(2)
    taken = measure.seconds(lambda: run_steps(3), calls=1) / 3
    stats = jax.devices()[0].memory_stats() or {}
    pieces = memory.trainer(sizes_of(config, model), Devices(device["platform"]))
    update = jax.jit(trainer.learner.apply, donate_argnums=0)
    grads = jax.tree.map(jnp.zeros_like, state.params)
    seconds = parts_seconds(model, state, ids, o)

    def run_update() -> None:
        nonlocal state
        state, _ = update(state, grads, jnp.float32(1), jnp.bool_(False))
        jax.block_until_ready(state)

    seconds["optimizer"] = measure.seconds(run_update, calls=1)
    needed = work(model, ids)
    useful = sum(part.flops for part in needed.values())
    parts = {}
    for name, part in needed.items():
        least = max(part.flops / device["flops"], part.bytes / device["bytes_per_second"])
        parts[name] = {"seconds": seconds[name], "share": seconds[name] / taken,
                       "flops": part.flops, "roofline_seconds": least}  # fmt: skip
    rest = taken - sum(seconds.values())
    parts["other"] = {"seconds": rest, "share": rest / taken, "flops": 0, "roofline_seconds": 0}
    return {
        "model": "tiny" if o["tiny"] else "1.5b",
        "rows": o["rows"], "length": o["length"], "remat": o["remat"], "chunk": o["chunk"],
        "seconds": taken,
        "tokens_per_second": ids.size / taken,
        "useful_flops": useful,
        "utilisation": useful / taken / device["flops"],
        "parts": parts,
        "memory": {
            "estimate": sum(pieces.values()), "pieces": pieces,
            "planned": m.argument_size_in_bytes + m.temp_size_in_bytes
            + m.output_size_in_bytes - m.alias_size_in_bytes,
            "peak": stats.get("peak_bytes_in_use"),  # None on a CPU
        },
    }  # fmt: skip


def lines(result: dict[str, Any]) -> list[str]:
    """Return the lines of the table."""
    m = result["memory"]
    peak = f"{m['peak'] / 1e9:.1f}" if m["peak"] else "unknown"
    found = [
        f"{result['model']}, {result['rows']} × {result['length']} tokens, remat "
        f"{result['remat']}: utilisation {100 * result['utilisation']:.1f} %, "
        f"{result['tokens_per_second']:.0f} tokens/s, {1e3 * result['seconds']:.1f} ms a step",
        f"memory, GB: estimate {m['estimate'] / 1e9:.1f}, XLA's plan {m['planned'] / 1e9:.1f}, "
        f"peak {peak}",
        f"{'':12}{'ms':>10}{'of step':>10}{'roofline':>10}{'TFLOP/s':>10}",
    ]
    for name, part in result["parts"].items():
        rate = part["flops"] / part["seconds"] / 1e12 if part["flops"] else 0
        found.append(
            f"{name:12}{1e3 * part['seconds']:10.2f}{100 * part['share']:9.1f}%"
            f"{1e3 * part['roofline_seconds']:10.2f}{rate:10.1f}"
        )
    return found
