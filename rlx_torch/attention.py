"""Attention within the segments of packed sequences, for transformers' models.

All rows of a microbatch are one sequence, [1, N] without padding. Its segments begin at
`cu_seq_lens_q`, as in transformers' own FlashAttention.
"""

import importlib.util
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import varlen as torch_varlen
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from rlx.base import UserError

BLOCK = 512  # queries whose scores exist at one time, where torch has no fused attention.
MASK_BLOCK = 128  # tokens of a block that FlexAttention computes or skips
# Longest segment, tokens, for which a CPU uses `_Products` in half precision. Torch's fused
# attention has a slow backward pass there: for 96 tokens it took 3.3 times as long.
SHORT = 512

# `kernel` takes the first one that is installed and supports the device. All except the last
# compute in half precision only.
KERNELS = {
    "flash_attention_3": ("cuda", "flash_attn_interface"),
    "flash_attention_2": ("cuda", "flash_attn"),
    "rlx_varlen": ("cuda", "torch.nn.attention.varlen"),
    "rlx_segments": ("", "torch"),
}

_NO_FLASH = ("gpt_oss", "gemma3")  # sinks; images whose tokens see later ones

# Query and key pairs that take as long as a call: the most padding of a segment in a block.
CALL_PAIRS = 1 << 14


def kernel(device: str, compute_dtype: str, model_type: str = "") -> str:
    """Return the name of the attention for loading a model on this kind of device."""
    for name, (where, _) in KERNELS.items():
        fits = not where or (where == device and compute_dtype != "float32")
        fits = fits and not (model_type in _NO_FLASH and name.startswith("flash"))
        if fits and installed(name):
            return name
    raise AssertionError("rlx_segments needs nothing")


def installed(name: str) -> bool:
    """Return whether a kernel is here, and takes the arguments that models need."""
    if name == "rlx_varlen":  # before PyTorch 2.13 it has no grouped heads
        return "enable_gqa" in inspect.signature(torch_varlen.varlen_attn).parameters
    return importlib.util.find_spec(KERNELS[name][1]) is not None


class Block(NamedTuple):
    """Consecutive segments that one call computes."""

    tokens: int  # number of all tokens
    shape: tuple[int, int]  # S segments of at most L tokens
    # [S · L] int64, indices of tokens, None if all have L; a shorter segment repeats its first.
    places: Tensor | None
    back: Tensor | None  # [tokens] int64, each token's index in the block; None if all have L


Blocks = tuple[Block, ...]  # of the segments of N tokens, longest first


def blocks_of(sizes: Sequence[int], device: str) -> Blocks:
    """Return the blocks of segments of these sizes, longest first."""
    parts: list[list[int]] = []
    for size in sizes:
        if not parts or parts[-1][0] ** 2 - size**2 > CALL_PAIRS:
            parts.append([])
        parts[-1].append(size)
    return tuple(_block(part, device) for part in parts)


@dataclass(frozen=True, eq=False)
class Trees:
    """Trees of N tokens, depth first, end to end; the arrays are [N] int64 on the device."""

    sizes: tuple[int, ...]
    ends: Tensor  # where in N the subtree of each token ends
    positions: Tensor
    last: Tensor | None = None  # the last token that each one sees in its line; None: itself
    block_masks: dict[int | None, BlockMask] = field(default_factory=dict)

    @classmethod
    def of(
        cls, ends: np.ndarray, positions: np.ndarray, device: str, last: np.ndarray | None = None
    ) -> "Trees":
        """Return the trees of tokens whose roots have position 0."""
        roots = np.flatnonzero(positions == 0)
        ends = np.maximum(ends, np.arange(len(ends)) + 1)  # padding sees itself
        sizes = tuple(np.diff(roots, append=len(ends)).tolist())

        def moved(x: np.ndarray) -> Tensor:
            return torch.from_numpy(x.astype(np.int64)).to(device)

        return cls(sizes, moved(ends), moved(positions), None if last is None else moved(last))

    def masks(self, window: int | None) -> Iterator[Tensor]:
        """Yield for each tree which of its S tokens see which, [S, S] bool."""
        start = 0
        for size in self.sizes:
            span = slice(start, start + size)
            at = torch.arange(size, device=self.ends.device)[:, None]
            last = at if self.last is None else self.last[span, None] - start
            mask = (last >= at.T) & (at < self.ends[span] - start)
            if window:
                behind = self.positions[span, None] - self.positions[span]
                mask &= behind < window
            yield mask
            start += size

    def block_mask(self, window: int | None) -> BlockMask:
        """Return FlexAttention's mask of all N tokens, which is made once for each window."""
        if window not in self.block_masks:
            self.block_masks[window] = self._block_mask(window)
        return self.block_masks[window]

    def _block_mask(self, window: int | None) -> BlockMask:
        ends, positions, size = self.ends, self.positions, MASK_BLOCK

        def sees(_, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            mask = (query >= key) & (query < ends[key])
            return mask & (positions[query] - positions[key] < window) if window else mask

        padding = (0, -len(ends) % size)
        blocks = nn.functional.pad(ends, padding).view(-1, size)
        at = torch.arange(len(blocks), device=ends.device)[:, None]
        some = (at >= at.T) & (blocks.amax(1) > at * size)
        every = (at > at.T) & (blocks.amin(1) >= (at + 1) * size)
        if window:
            places = nn.functional.pad(positions, padding).view(-1, size)
            first, last = places.amin(1), places.amax(1)
            some &= first[:, None] - last < window
            every &= last[:, None] - first < window

        def listed(mask: Tensor) -> tuple[Tensor, Tensor]:
            order = mask.int().argsort(dim=1, descending=True, stable=True)
            return mask.sum(1, dtype=torch.int32)[None, None], order.int()[None, None]

        return BlockMask.from_kv_blocks(
            *listed(some & ~every), *listed(every), size, sees, (len(ends), len(ends))
        )


def _block(sizes: list[int], device: str) -> Block:
    """Return the block of segments of these sizes, longest first."""
    shape, starts = (len(sizes), sizes[0]), np.cumsum([0, *sizes])
    if sizes[-1] == sizes[0]:
        return Block(int(starts[-1]), shape, None, None)
    places, within = np.arange(sizes[0]) + starts[:-1, None], np.arange(sizes[0])
    mask = within < np.array(sizes)[:, None]
    places = np.where(mask, places, starts[:-1, None]).ravel()
    back = torch.from_numpy(np.flatnonzero(mask)).to(device)
    return Block(int(starts[-1]), shape, torch.from_numpy(places).to(device), back)


@cache
def _compiled_flex_attention() -> Callable[..., Any]:
    return torch.compile(flex_attention, dynamic=True)


@torch.compiler.disable(recursive=False)
def over_trees(
    query: Tensor, key: Tensor, value: Tensor, trees: Trees, window: int | None, scale: float | None
) -> Tensor:
    """Attend by FlexAttention, without pairs of blocks that see nothing of each other.

    Args and result are as of `segments`.
    """
    mixed = _compiled_flex_attention()(
        query, key, value, block_mask=trees.block_mask(window), scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip
    return mixed.transpose(1, 2)


def tree_error(heads: int, kv_heads: int, width: int, device: str, dtype: torch.dtype) -> float:
    """Return how far `over_trees` is from attention by masks, forward and backward.

    The larger of ‖x − masks‖ / ‖masks‖ of the output and of the gradients of query, key and value.
    """
    runs, leaves = ((0, 200), (150, 280), (50, 100)), (np.arange(230), np.arange(180, 230))
    positions = np.concatenate([*(np.arange(*run) for run in runs), *leaves])
    ends = np.repeat([380, 330, 200, 330, 380, 660, 610, 660], [50, 100, 50, 130, 50, 180, 50, 50])
    trees, chance = Trees.of(ends, positions, device), torch.Generator(device).manual_seed(0)
    rows = [torch.randn(1, n, len(ends), width, generator=chance, device=device, dtype=dtype,
                        requires_grad=True) for n in (heads, kv_heads, kv_heads)]  # fmt: skip
    ways = (
        over_trees(*rows, trees, None, None),
        segments(nn.Identity(), *rows, None, blocks=trees)[0],
    )
    pull = torch.randn(ways[0].shape, generator=chance, device=device, dtype=dtype)
    both = [(out, *torch.autograd.grad(out, rows, pull)) for out in ways]
    apart = [(a.float() - b.float()).norm() / b.float().norm() for a, b in zip(*both, strict=True)]
    return float(max(apart))


@torch.compiler.disable  # else one program for each number of blocks
def segments(
    module: nn.Module,
    query: Tensor,  # [1, heads, N, H]; key and value may have fewer heads
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    blocks: Blocks | Trees | None = None,
    sliding_window: int | None = None,  # keys that a query sees, its own included
    softcap: float | None = None,  # bound of scores, by tanh
    s_aux: Tensor | None = None,  # sinks, [heads]: a score of each head that no value belongs to
    **_,
) -> tuple[Tensor, None]:
    """Attend within each segment by torch's fused attention, a call for each block or tree.

    Returns [1, N, heads, H]. UserError if the model does not pass its arguments to attention.
    """
    if blocks is None:
        raise UserError(
            f"{type(module).__name__} does not pass the starts of packed sequences to attention, "
            "so trainer=torch cannot train its model; use another model"
        )
    rows = [x[0].transpose(0, 1) for x in (query, key, value)]  # [N, heads, H]
    groups, out = query.shape[1] // key.shape[1], []
    scale = scaling or 1 / math.sqrt(query.shape[-1])
    if isinstance(blocks, Trees):
        cuts = [x.split(blocks.sizes) for x in rows]
        for mask, *parts in zip(blocks.masks(sliding_window), *cuts, strict=True):
            q, k, v = (x.transpose(0, 1)[None] for x in parts)
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
            if softcap or s_aux is not None:
                mixed = _unfused(q, k, v, scale, len(mask), softcap or 0.0, s_aux, mask)
                out.append(mixed[0].transpose(0, 1))
                continue
            for queries, rows_seen in zip(q.split(BLOCK, 2), mask.split(BLOCK), strict=True):
                some = rows_seen.any(0).nonzero()[:, 0]  # keys that a query of the block sees
                keys, values = k.index_select(2, some), v.index_select(2, some)
                mixed = scaled_dot_product_attention(
                    queries, keys, values, attn_mask=rows_seen[:, some], scale=scaling
                )
                out.append(mixed[0].transpose(0, 1))
        return torch.cat(out)[None], None
    cuts = [block.tokens for block in blocks]
    for block, *parts in zip(blocks, *(x.split(cuts) for x in rows), strict=True):
        if block.places is not None:
            parts = [x.index_select(0, block.places) for x in parts]
        q, k, v = (x.unflatten(0, block.shape).transpose(1, 2) for x in parts)  # [S, heads, L, H]
        window = sliding_window or q.shape[2]
        if q.shape[2] > window or softcap or s_aux is not None:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
            mixed = _unfused(q, k, v, scale, window, softcap or 0.0, s_aux)
        elif v.device.type == "cpu" and v.dtype != torch.float32 and v.shape[2] <= SHORT:
            mixed = _Products.apply(q, k, v, scale)
        else:
            mixed = scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scaling, enable_gqa=groups > 1
            )
        mixed = mixed.transpose(1, 2).flatten(0, 1)
        out.append(mixed if block.back is None else mixed.index_select(0, block.back))
    return torch.cat(out)[None], None


class _Products(torch.autograd.Function):
    """Causal attention of q [S, heads, L, H] by products in v's precision, scores in float32."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        shape = len(q), k.shape[1], -1, q.shape[3]  # the queries of a key's heads are rows
        with torch.autocast("cpu", enabled=False):
            rows = (q * scale).reshape(shape)
            scores = (rows.float() @ k.float().transpose(-1, -2)).unflatten(2, (-1, q.shape[2]))
            later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
            weights = scores.masked_fill_(later, -torch.inf).softmax(-1).flatten(2, 3).to(v.dtype)
            mixed = weights @ v
        ctx.save_for_backward(rows.to(v.dtype), k.to(v.dtype), v, weights, mixed)
        ctx.scale, ctx.dtype = scale, q.dtype
        return mixed.view(q.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple:
        rows, k, v, weights, mixed = ctx.saved_tensors
        grad, shape = gradient.reshape(mixed.shape), gradient.shape
        pull = (grad @ v.transpose(-1, -2)).sub_((grad * mixed).sum(-1, keepdim=True))
        pull = pull.mul_(weights)
        to_q = (pull @ k).to(ctx.dtype).mul_(ctx.scale).view(shape)
        to_k, to_v = pull.transpose(-1, -2) @ rows, weights.transpose(-1, -2) @ grad
        return to_q, to_k.to(ctx.dtype), to_v, None


def _unfused(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int, softcap: float,
    sinks: Tensor | None, mask: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attend causally, or by a mask [L, L], recomputing scores in the backward pass."""

    def block(first: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        scores = (q @ k.transpose(-1, -2)).float() * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        behind = torch.arange(q.shape[2], device=q.device)[:, None] + first
        behind = behind - torch.arange(k.shape[2], device=q.device)
        scores = scores.masked_fill((behind < 0) | (behind >= window), -torch.inf)
        if mask is not None:
            # The queries are `first` after the first key, which is 0 where a window is so long.
            scores = scores.masked_fill(~mask[first : first + q.shape[2]], -torch.inf)
        if sinks is not None:
            column = sinks.float()[None, :, None, None].expand(len(q), -1, q.shape[2], -1)
            scores = torch.cat([scores, column], -1)
        return torch.softmax(scores, -1)[..., : k.shape[2]].to(v.dtype) @ v

    out = []
    for start in range(0, query.shape[2], BLOCK):
        stop, low = min(start + BLOCK, query.shape[2]), max(0, start - window + 1)
        parts = query[:, :, start:stop], key[:, :, low:stop], value[:, :, low:stop]
        out.append(checkpoint(block, start - low, *parts, sinks, use_reentrant=False))
    return torch.cat(out, 2)


def varlen(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    sliding_window: int | None = None,
    blocks: Blocks | Trees | None = None,
    **more,
) -> tuple[Tensor, None]:
    """Attend within each segment by torch's varlen kernel, or over trees; CUDA, half precision."""
    later = isinstance(blocks, Trees) and blocks.last is not None
    if later or more.get("softcap") or more.get("s_aux") is not None:
        return segments(
            module, query, key, value, attention_mask, scaling, sliding_window=sliding_window,
            blocks=blocks, **more,
        )  # fmt: skip
    # Under autocast RoPE leaves queries and keys in float32, values in half precision.
    query, key = query.to(value.dtype), key.to(value.dtype)
    if isinstance(blocks, Trees):
        return over_trees(query, key, value, blocks, sliding_window, scaling), None
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    grouped = query.shape[1] != key.shape[1]
    window = ((sliding_window or 0) - 1, 0)
    out = torch_varlen.varlen_attn(
        q, k, v, cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q, scale=scaling,
        window_size=window, enable_gqa=grouped,
    )  # fmt: skip
    assert isinstance(out, Tensor)
    return out[None], None


AttentionInterface.register("rlx_segments", segments)
AttentionInterface.register("rlx_varlen", varlen)
