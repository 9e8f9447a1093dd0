"""Part `attention`: compare training's attention with a plain one, forward and backward.

The plain one is softmax(q·kᵀ + mask)·v by einsum in float32 at full precision, on the same bfloat16
numbers (float32 on a CPU, which has no kernel). On a GPU the mask path is compared and timed too.
Rows of trees (`train.share_prefixes`) are compared as rows of segments are.
Errors are ‖x − plain‖ / ‖plain‖ of the output and of the gradients of q, k and v, over real tokens.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.gpu import measure
from rlx.model.attention import attention, attention_kind
from rlx.train.packing import segment_sizes
from rlx.train.prefix_trees import chains

LIMITS = {"bfloat16": 0.02, "float32": 1e-4}  # of errors: eight bits are 0.4 %, added up
Attend = Callable[..., jax.Array]  # (q, k, v, segment_ids, segment_sizes) → [B, T, N, H]
NAMES = ("output", "grad_q", "grad_k", "grad_v")


def plain(q, k, v, segment_ids, _=None, trees=False):
    """Return attention in float32 by a mask of [T, T], of segments or from the ends of trees."""
    with jax.default_matmul_precision("highest"):
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
        mask = jnp.tril(jnp.ones((q.shape[1], q.shape[1]), bool))
        if trees:
            mask = mask & (jnp.arange(q.shape[1])[:, None] < segment_ids[:, None, :])
        else:
            mask = mask & (segment_ids[:, :, None] == segment_ids[:, None, :])
        scores = jnp.einsum("bqnh,bknh->bnqk", q, k) * q.shape[-1] ** -0.5
        weights = jax.nn.softmax(jnp.where(mask[:, None], scores, -1e30), axis=-1)
        return jnp.einsum("bnqk,bknh->bqnh", weights, v)


def by_mask(q, k, v, segment_ids, _=None):
    """Return the trainer's attention without segment sizes, by a mask."""
    return attention(q, k, v, segment_ids)


def both_passes(attend: Attend) -> Callable[..., tuple[jax.Array, ...]]:
    """Return (cotangent, q, k, v, ids, sizes) → (output, grad_q, grad_k, grad_v)."""

    def function(cotangent, q, k, v, ids, sizes):
        out, pull = jax.vjp(lambda q, k, v: attend(q, k, v, ids, sizes), q, k, v)
        return (out, *pull(cotangent.astype(out.dtype)))

    return jax.jit(function)


def forked(rows: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return ends and positions of rows of two trees and padding; 5 answers begin with a prompt."""
    prompt, answer = length // 8, length // 16
    tree = prompt + 5 * answer
    firsts = [0, *range(prompt, tree, answer)]  # of the prompt, then of the answers
    sizes = np.diff([*firsts, tree])
    ends = np.repeat([tree, *firsts[2:], tree], sizes)
    positions = np.concatenate([np.arange(prompt), *[prompt + np.arange(answer)] * 5])
    beyond = np.zeros(length - 2 * tree, np.int64)
    both = ([ends, ends + tree, beyond], [positions, positions, beyond])
    return tuple(np.tile(np.concatenate(x), (rows, 1)).astype(np.int32) for x in both)


def inputs(
    rows: int, length: int, heads: int, kv_heads: int, width: int, dtype: Any, trees: Any = None
) -> tuple:
    """Return (cotangent, q, k, v, ids, sizes); the cotangent is 0 on padding.

    With `trees`, of `forked`, ids are ends and sizes those of chains.
    """
    ids = measure.segments(rows, length, padding=True)
    numbers = ids
    if trees:
        ids, positions = trees
        numbers = chains({"tree_positions": positions, "tree_counts": ids})
    rng = np.random.default_rng(0)

    def noise(heads):
        return jnp.asarray(rng.standard_normal((rows, length, heads, width)), dtype)

    cotangent = jnp.where(ids[:, :, None, None] > 0, noise(heads), 0)
    sizes = jnp.asarray(segment_sizes(numbers))
    return (cotangent, noise(heads), noise(kv_heads), noise(kv_heads), jnp.asarray(ids), sizes)


def of_trees(positions: np.ndarray) -> Attend:
    """Return the trainer's attention over the trees of `forked`, of these positions."""

    def attend(q, k, v, ends, sizes):
        return attention(q, k, v, ends, sizes, tree=(ends, jnp.asarray(positions)))

    return attend


def errors(attend: Attend, given: tuple, plain: Attend = plain) -> dict[str, float]:
    """Return the relative error of the output and of each gradient."""
    real = np.asarray(given[4])[:, :, None, None] > 0
    found = {}
    pairs = zip(NAMES, both_passes(attend)(*given), both_passes(plain)(*given), strict=True)
    for name, got, want in pairs:
        got, want = (np.where(real, np.asarray(x, np.float32), 0) for x in (got, want))
        found[name] = float(np.linalg.norm(got - want) / np.linalg.norm(want))
    return found


def run(o: dict[str, Any]) -> dict[str, Any]:
    """Return errors of each case, their limit, whether all are below it, and times on a GPU."""
    gpu = jax.default_backend() == "gpu"
    dtype = jnp.bfloat16 if gpu else jnp.float32
    limit, cases, timed = LIMITS[jnp.dtype(dtype).name], {}, {}
    ways = {"trained": attention, **({"mask": by_mask} if gpu else {})}
    for kv_heads in (o["heads"], o["heads"] // 6 or 1, 1):
        given = inputs(2, o["length"], o["heads"], kv_heads, o["width"], dtype)
        for way, attend in ways.items():
            cases[f"{way}, {o['heads']} heads, {kv_heads} kv heads"] = errors(attend, given)
        trees = forked(2, o["length"])
        given = inputs(2, o["length"], o["heads"], kv_heads, o["width"], dtype, trees)
        found = errors(of_trees(trees[1]), given, partial(plain, trees=True))
        cases[f"trees, {o['heads']} heads, {kv_heads} kv heads"] = found
    for length in (4096, 16_384, 32_768) if gpu else ():
        given = inputs(1, length, o["heads"], 2, o["width"], dtype)
        for way, attend in ways.items():
            timed[f"{way} at {length}"] = measure.seconds(both_passes(attend), *given)
        trees = forked(1, length)
        given = inputs(1, length, o["heads"], 2, o["width"], dtype, trees)
        attend = of_trees(trees[1])
        timed[f"trees at {length}"] = measure.seconds(both_passes(attend), *given)
    worst = max(max(case.values()) for case in cases.values())
    kind = attention_kind(dtype, o["width"])
    return {"kind": kind, "dtype": jnp.dtype(dtype).name, "limit": limit, "cases": cases,
            "equal": bool(worst < limit), "seconds": timed}  # fmt: skip


def lines(result: dict[str, Any]) -> list[str]:
    """Return the lines of the table."""
    worst = {name: max(case.values()) for name, case in result["cases"].items()}
    verdict = "equal" if result["equal"] else "DIFFERENT"
    head = f"{result['kind']}, {result['dtype']}: {verdict} (limit {result['limit']:g})"
    return [head, *(f"{error:.1e}  {name}" for name, error in worst.items()),
            *(f"{1e3 * t:8.2f} ms forward and backward: {name}" for name, t in
              result["seconds"].items())]  # fmt: skip
