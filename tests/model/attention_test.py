"""Attention on CUDA: what is lowered for it, and cuDNN's packed layout by its documented rules."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.sharding import AbstractMesh, AxisType

from rlx.model import attention as module
from rlx.model import packed_attention as packed
from rlx.model import sharding
from rlx.model.attention import attention
from rlx.model.mesh import AXES
from rlx.train import packing, prefix_trees

LENGTHS = [[5, 3, 9], [20], [], [1, 1, 1, 1, 1, 1]]  # of the segments of four rows
TOKENS = 21


def segment_ids(lengths=LENGTHS, tokens=TOKENS):
    ids = np.zeros((len(lengths), tokens), np.int32)
    for row, sizes in zip(ids, lengths, strict=True):
        row[: sum(sizes)] = np.repeat(np.arange(len(sizes)) + 1, sizes)
    return ids


def inputs(heads, key_heads, width=8, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    shapes = [(len(LENGTHS), TOKENS, n, width) for n in (heads, key_heads, key_heads)]
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def by_documented_rules(
    q, k, v, *, q_seqlen, kv_seqlen, q_offsets, kv_offsets, scale, mask_type, sliding_window_length
):
    """Stand in for cuDNN: segments are where the offsets, in elements, say; the rest is not made.

    The offsets are those that the installed JAX would hand over.
    """
    assert mask_type is cudnn.MaskType.PADDING_CAUSAL
    table = cudnn._fix_seqlen_offsets(q_seqlen, kv_seqlen, q_offsets, kv_offsets, q, k)
    lengths, key_lengths, starts, key_starts = (np.asarray(part).ravel() for part in table)

    @jax.custom_vjp
    def run(q, k, v):
        return forward(q, k, v, jnp.full(q.shape, jnp.nan).ravel())

    def forward(q, k, v, out):
        groups, width = q.shape[2] // k.shape[2], q.shape[3]
        flat_k, flat_v = k.ravel(), v.ravel()
        for i, (length, key_length) in enumerate(zip(lengths, key_lengths, strict=True)):
            if length <= 0:
                continue
            assert length == key_length
            shape, key_shape = (length, *q.shape[2:]), (length, *k.shape[2:])
            rows = slice(starts[i], starts[i] + np.prod(shape))
            keys = slice(key_starts[i], key_starts[i] + np.prod(key_shape))
            queries = q.ravel()[rows].reshape(length, -1, groups, width)
            own = [x[keys].reshape(key_shape) for x in (flat_k, flat_v)]
            scores = jnp.einsum("qkgh,skh->kgqs", queries, own[0]) * scale
            seen = np.tril(np.ones((length, length), bool))
            seen &= ~np.tril(seen, -(sliding_window_length or length))
            scores = jnp.where(seen, scores, -jnp.inf)
            mixed = jnp.einsum("kgqs,skh->qkgh", jax.nn.softmax(scores), own[1])
            out = out.at[rows].set(mixed.ravel())
        return out.reshape(q.shape)

    def backward(kept, grad):
        grads = jax.vjp(lambda *x: forward(*x, jnp.zeros(q.size)), *kept)[1](grad)
        there = (segment_ids() > 0)[..., None, None]
        return tuple(jnp.where(there, g, jnp.nan) for g in grads)

    run.defvjp(lambda *x: (run(*x), x), backward)
    return run(q, k, v)


@pytest.mark.parametrize(
    ("heads", "key_heads", "window"), [(4, 4, 0), (4, 2, 4), (6, 1, 0), (4, 2, 21)]
)
def test_packed_segments_are_attended_to_as_in_blocks(monkeypatch, heads, key_heads, window):
    """With grouped heads too, which some versions of JAX count wrongly."""
    monkeypatch.setattr(cudnn, "dot_product_attention", by_documented_rules)
    ids = segment_ids()
    sizes, there = packing.segment_sizes(ids), (ids > 0)[..., None, None]
    weights = np.random.default_rng(1).normal(size=(*ids.shape, heads, 8))

    def loss(function, *qkv):
        mixed = function(*qkv)
        return jnp.sum(jnp.where(there, mixed, 0) * weights), mixed

    of_packed = partial(packed.packed_attention, segment_sizes=jnp.asarray(sizes), window=window)
    of_blocks = partial(attention, segment_ids=jnp.asarray(ids), window=window)
    results = []
    for function in (of_packed, of_blocks):
        run = jax.value_and_grad(partial(loss, function), argnums=(0, 1, 2), has_aux=True)
        (_, mixed), grads = run(*inputs(heads, key_heads))
        results.append((mixed, *grads))
    for ours, wanted in zip(*results, strict=True):
        np.testing.assert_allclose(
            np.where(there, ours, 0), np.where(there, wanted, 0), rtol=1e-5, atol=1e-5
        )
        assert not np.asarray(ours)[ids == 0].any(), "padding: the kernel writes nothing there"


def tree_kernel(way, q, k, v, call, causal, *more, is_training=False):
    """Stand in for JAX's primitives: what no segment holds is NaN, and gradients are not added.

    Segments are where the installed JAX says so to cuDNN, whose normalisers have one for each.
    """
    table = [part.ravel()[: call.query_sizes.size, None]
             for part in cudnn._fix_seqlen_offsets(*call, q, k)]  # fmt: skip
    at, total = jnp.arange(q.shape[1]), q.shape[0] * q.shape[1]
    places = []  # [segments, T], of queries and of keys
    for x, sizes, starts in ((q, table[0], table[2]), (k, table[1], table[3])):
        begin = starts // (x.shape[2] * x.shape[3])
        places.append(jnp.where(at < sizes, begin + at, total))
    rows, keys = places
    seen = (rows < total)[:, :, None] & (keys < total)[:, None]
    seen = (seen & ((at[:, None] >= at) | (not causal)))[:, None]

    def taken(x, places):
        flat = x.reshape(-1, *x.shape[2:])
        return flat.at[places].get(mode="fill", fill_value=0)

    def put(x, places, new):
        made = jnp.full((total, *x.shape[2:]), jnp.nan)
        return made.at[places].set(new, mode="drop").reshape(x.shape)

    def scores(q, k):
        k = jnp.repeat(k, q.shape[2] // k.shape[2], axis=2)
        return jnp.where(seen, jnp.einsum("sqnh,sknh->snqk", q, k) * q.shape[3] ** -0.5, -1e30)

    def mixed(weights, v):
        v = jnp.repeat(v, q.shape[2] // v.shape[2], axis=2)
        return jnp.einsum("snqk,sknh->sqnh", weights, v)

    own = [taken(q, rows), taken(k, keys), taken(v, keys)]
    found, back = jax.vjp(scores, *own[:2])
    there = (rows < total)[:, None]
    if way == "fwd":
        stats = jnp.where(there, jax.nn.logsumexp(found, axis=-1), jnp.nan)
        weights = jnp.where(seen, jnp.exp(found - stats[..., None]), 0)
        return put(q, rows, mixed(weights, own[2])), stats
    stats, out, pull = more[0], taken(more[1], rows), taken(more[2], rows)
    weights = jnp.where(seen, jnp.exp(found - stats[..., None]), 0)
    of_weights, of_values = jax.vjp(mixed, weights, own[2])[1](pull)
    along = jnp.sum(pull * out, axis=-1).transpose(0, 2, 1)[..., None]
    of_queries, of_keys = back(weights * (of_weights - along))
    return put(q, rows, of_queries), put(k, keys, of_keys), put(v, keys, of_values)


# Of each row of two: its trees, depth first; a node is its tokens and then its children.
FORKS = [
    [(6, (3,), (1,), (4,)), (2, (5,))],
    [(3, (2, (1,), (2, (2,), (3,))), (1,), (2, (1,), (1,))), (5,)],
]


def forked():
    """Ends, positions and counts of the rows of FORKS, [2, 24] each, with padding."""
    ends, positions = np.zeros((2, 24), np.int32), np.zeros((2, 24), np.int32)

    def put(row, at, depth, tokens, *children):
        stop = at + tokens
        for child in children:
            stop = put(row, stop, depth + tokens, *child)
        ends[row, at : at + tokens] = stop
        positions[row, at : at + tokens] = range(depth, depth + tokens)
        return stop

    for row, trees in enumerate(FORKS):
        at = 0
        for tree in trees:
            at = put(row, at, 0, *tree)
    return ends, positions


def by_paths(q, k, v, pull, ends):
    """Attention over trees in float64, and its gradients for q, k and v."""
    groups, at = q.shape[2] // k.shape[2], np.arange(q.shape[1])
    seen = ((at[:, None] >= at) & (at[:, None] < ends[:, None]))[:, None]
    q, k, v, pull = (np.moveaxis(np.asarray(x, np.float64), 2, 1) for x in (q, k, v, pull))
    k, v = (np.repeat(x, groups, axis=1) for x in (k, v))
    scores = np.where(seen, np.exp(q @ k.swapaxes(2, 3) / q.shape[3] ** 0.5), 0)
    weights = scores / np.maximum(scores.sum(3, keepdims=True), 1e-300)
    of_weights = pull @ v.swapaxes(2, 3)
    along = (of_weights * weights).sum(3, keepdims=True)
    of_scores = weights * (of_weights - along) / q.shape[3] ** 0.5
    of_keys, of_values = of_scores.swapaxes(2, 3) @ q, weights.swapaxes(2, 3) @ pull
    shape = (len(q), -1, groups, *q.shape[2:])
    grads = of_scores @ k, *(x.reshape(shape).sum(2) for x in (of_keys, of_values))
    return [np.moveaxis(x, 1, 2) for x in (weights @ v, *grads)]


@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (4, 2), (6, 1)])
def test_trees_are_attended_to_by_packed_segments(monkeypatch, heads, key_heads):
    """Calls of the kernel for chains and for each level of forks, merged, and their gradients."""
    monkeypatch.setattr(packed, "kernel", tree_kernel)
    ends, positions = forked()
    batch = {"tree_positions": positions, "tree_counts": (ends > 0).astype(np.int32)}
    sizes = jnp.asarray(packing.segment_sizes(prefix_trees.chains(batch)))
    rng, there = np.random.default_rng(1), (ends > 0)[..., None, None]
    qkv = [jnp.asarray(rng.normal(size=(2, 24, n, 8)), jnp.float32)
           for n in (heads, key_heads, key_heads)]  # fmt: skip
    pull = jnp.asarray(np.where(there, rng.normal(size=qkv[0].shape), 0), jnp.float32)
    attend = partial(packed.packed_attention, segment_sizes=sizes, positions=jnp.asarray(positions))
    out, back = jax.vjp(jax.jit(attend), *qkv)
    wanted = by_paths(*qkv, pull, ends)
    for ours, want in zip((out, *back(pull)), wanted, strict=True):
        np.testing.assert_allclose(np.where(there, ours, 0), np.where(there, want, 0), atol=1e-5)
        assert not np.asarray(ours)[~there[..., 0, 0]].any(), "padding"


def test_a_call_is_of_the_keys_of_one_level_of_forks():
    """The second row of FORKS has three levels; each key is in one segment of a call at most."""
    ends, positions = (x[1:] for x in forked())
    batch = {"tree_positions": positions, "tree_counts": (ends > 0).astype(np.int32)}
    sizes = jnp.asarray(packing.segment_sizes(prefix_trees.chains(batch)))
    seen, calls = jnp.zeros_like(sizes), []
    for _ in range(4):
        call, seen = packed.shared_call(sizes, jnp.asarray(positions), seen)
        columns = (call.key_starts, call.key_sizes, call.query_starts, call.query_sizes)
        rows = zip(*(np.asarray(x)[0, : sizes.shape[1]].tolist() for x in columns), strict=True)
        calls.append([row for row in rows if row[1] > 0])
    assert calls == [
        [(0, 3, 6, 12)],  # all later chains see the first three tokens
        [(3, 2, 6, 7), (14, 2, 17, 1)],
        [(6, 2, 10, 3)],
        [],
    ]


@pytest.mark.parametrize("causal", ["only chains", "all"])
def test_a_device_that_is_wrong_about_trees_is_found(monkeypatch, causal):
    def kernel(way, q, k, v, call, is_causal, *more, **options):
        return tree_kernel(way, q, k, v, call, is_causal or causal == "all", *more, **options)

    monkeypatch.setattr(packed, "kernel", kernel)
    monkeypatch.setattr(module, "attention_kind", lambda *_: "packed")
    error = module.tree_error(4, 2, 8, jnp.float32)
    assert (error < 1e-5) if causal == "only chains" else (error > 0.02)


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("of", ["segments", "trees"])
def test_blocks_are_the_attention_of_each_token_to_what_it_sees(monkeypatch, of, window):
    """Also where most pairs of blocks are skipped, and where a row ends within a block."""
    monkeypatch.setattr(module, "QUERY_BLOCK", 4)
    ids = np.concatenate([segment_ids(), np.zeros((4, 3), np.int32)], axis=1)[:2]
    ends, positions = forked()
    at = np.arange(24)
    seen = at[:, None] >= at
    if of == "segments":
        seen = seen & (ids[:, :, None] == ids[:, None]) & (ids > 0)[:, None]
        distance = at[:, None] - at
    else:
        ids, seen = (ends > 0).astype(np.int32), seen & (at[:, None] < ends[:, None])
        distance = positions[:, :, None] - positions[:, None]
    seen = seen & (distance < (window or 24))
    there, rng = (ids > 0)[..., None, None], np.random.default_rng(1)
    qkv = [jnp.asarray(rng.normal(size=(2, 24, n, 8)), jnp.float32) for n in (4, 2, 2)]
    weights = rng.normal(size=qkv[0].shape)

    def by_mask(q, k, v):
        k, v = (jnp.repeat(x, 2, axis=2) for x in (k, v))
        scores = jnp.einsum("bqnh,bknh->bnqk", q, k) * 8**-0.5
        scores = jnp.where(seen[:, None], scores, -1e30)
        return jnp.einsum("bnqk,bknh->bqnh", jax.nn.softmax(scores), v)

    tree = (jnp.asarray(ends), jnp.asarray(positions)) if of == "trees" else None
    in_blocks = partial(attention, segment_ids=jnp.asarray(ids), window=window, tree=tree)
    results = []
    for function in (in_blocks, by_mask):
        out, pull = jax.vjp(jax.jit(function), *qkv)
        results.append((out, *pull(jnp.where(there, weights, 0).astype(jnp.float32))))
    for ours, wanted in zip(*results, strict=True):
        np.testing.assert_allclose(
            np.where(there, ours, 0), np.where(there, wanted, 0), rtol=1e-5, atol=1e-5
        )


def test_segments_are_told_in_the_layout_that_jax_documents():
    lengths, starts = packed.segment_table(jnp.asarray(packing.segment_sizes(segment_ids())))
    assert lengths.shape == (4, 16)
    assert starts.shape == (4, 17)
    assert lengths[:, :4].tolist() == [[5, 3, 9, -1], [20, *[-1] * 3], [-1] * 4, [1] * 4]
    assert starts[:, :4].tolist() == [[0, 5, 8, -1], [0, *[-1] * 3], [-1] * 4, [0, 1, 2, 3]]
    assert starts[3, 4:].tolist() == [4, 5, *[-1] * 11]


def lowered(run, *args):
    return jax.jit(run).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def loss_of(layout, sizes, ids, **options):
    def loss(q, k, v):
        return jnp.sum(attention(q, k, v, ids, sizes, layout, **options).astype(jnp.float32))

    return jax.grad(loss, argnums=(0, 1, 2))


def test_on_hopper_packed_rows_are_attended_to_without_a_mask(hopper):
    tokens = 512
    ids = jnp.asarray(segment_ids([[300, 200], [512]], tokens))
    sizes = jnp.asarray(packing.segment_sizes(np.asarray(ids)))
    q, k = (jnp.ones((2, tokens, n, 64), jnp.bfloat16) for n in (4, 2))
    text = lowered(loss_of(sharding.ONE_DEVICE, sizes, ids), q, k, k)
    calls = re.findall(r"custom_call @(__cudnn\S+?)\(", text)
    assert calls == ["__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"]
    assert text.count("PADDING_CAUSAL") == 2
    assert re.findall(r"max_seg_per_batch\\22: (\d+)", text) == ["4", "4"]
    assert f"{tokens}x{tokens}" not in text


@pytest.mark.parametrize(
    ("options", "windows"),
    [({"window": 100}, ["100", "100"]), ({"window": 512}, ["0", "0"]), ({"softcap": 9.0}, [])],
)
def test_on_hopper_windows_are_the_kernels_and_a_softcap_is_for_blocks(hopper, options, windows):
    ids = jnp.asarray(segment_ids([[300, 200], [512]], 512))
    sizes = jnp.asarray(packing.segment_sizes(np.asarray(ids)))
    q = jnp.ones((2, 512, 4, 64), jnp.bfloat16)
    text = lowered(loss_of(sharding.ONE_DEVICE, sizes, ids, **options), q, q, q)
    assert re.findall(r"sliding_window_length\\22: (\d+)", text) == windows


@pytest.mark.parametrize(
    ("dtype", "capability", "sizes", "name"),
    [
        (jnp.float32, (9, 0), True, None),
        (jnp.bfloat16, (8, 0), True, "__cudnn$fmhaScaleBiasSoftmax"),
        (jnp.bfloat16, (9, 0), False, "__cudnn$fmhaScaleBiasSoftmax"),
        (jnp.bfloat16, (), True, None),
    ],
)
def test_elsewhere_there_is_a_mask_or_there_are_blocks(
    hopper, monkeypatch, dtype, capability, sizes, name
):
    monkeypatch.setattr(module, "cuda_capability", lambda: capability)
    ids = segment_ids([[30, 20]], 64)
    q = jnp.ones((1, 64, 2, 64), dtype)
    known = jnp.asarray(packing.segment_sizes(ids)) if sizes else None
    text = lowered(loss_of(sharding.ONE_DEVICE, known, jnp.asarray(ids)), q, q, q)
    calls = re.findall(r"custom_call @(__cudnn\S+?)\(", text)
    assert calls == ([name, f"{name}Backward"] if name else [])


@pytest.mark.parametrize(("key_heads", "local"), [(4, (2, 2)), (1, (2, 2))])
def test_on_a_mesh_each_device_has_its_own_rows_and_heads(hopper, key_heads, local):
    mesh = AbstractMesh((1, 2, 1, 1, 2), AXES, axis_types=(AxisType.Auto,) * 5)
    ids = jnp.asarray(segment_ids([[30, 20], [64], [10], [1, 2]], 64))
    sizes = jnp.asarray(packing.segment_sizes(np.asarray(ids)))
    q, k = (jnp.ones((4, 64, n, 64), jnp.bfloat16) for n in (4, key_heads))
    text = lowered(loss_of(sharding.Layout(mesh), sizes, ids), q, k, k)
    [call] = re.findall(r"custom_call @__cudnn\$fmhaSoftmax\(.*", text)
    rows, heads = 2, local
    wanted = [f"tensor<{rows}x64x{n}x64xbf16>" for n in (*heads, heads[1])]
    assert re.findall(r"tensor<\S+bf16>", call)[:3] == wanted
