"""Attention over packed sequences in transformers' models: each token sees its segment alone.

All rows of a microbatch are one sequence, [1, N] without padding, and `cu_seq_lens_q` says where
its segments begin, as transformers' own FlashAttention takes them. Nothing here has a mask.
"""

import importlib.util
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from rlx.base import UserError

BLOCK = 512  # queries whose scores exist at one time, where torch has no fused attention

# The first that is installed and knows the device; `segments` is always there. The others compute
# in half precision alone.
KERNELS = {
    "flash_attention_3": ("cuda", "flash_attn_interface"),
    "flash_attention_2": ("cuda", "flash_attn"),
    "rlx_varlen": ("cuda", "torch.nn.attention.varlen"),
    "rlx_segments": ("", "torch"),
}


# Query and key pairs that take as long as a call; a segment may be padded by so many.
CALL_PAIRS = 1 << 14


def kernel(device: str, compute_dtype: str, model_type: str = "") -> str:
    """Return the name of the attention that a model on this kind of device is loaded with."""
    for name, (where, module) in KERNELS.items():
        fits = not where or (where == device and compute_dtype != "float32")
        fits = fits and not (model_type == "gpt_oss" and name.startswith("flash"))  # has sinks
        if fits and importlib.util.find_spec(module):
            return name
    raise AssertionError("rlx_segments needs nothing")


class Blocks(NamedTuple):
    """Segments of N tokens, by which one call attends to several at once.

    Attributes:
      indices: of each block of S segments the places of their tokens, [S, L] int64; a segment
        shorter than L ends with its first token again, which later tokens alone would see.
      back: of each token its place in the blocks one after the other, [N] int64.
    """

    indices: tuple[Tensor, ...]
    back: Tensor

    @classmethod
    def of(cls, sizes: Sequence[int], device: str) -> "Blocks":
        """Return the blocks of segments of these sizes, longest first."""
        starts = np.cumsum([0, *sizes])
        parts: list[list[int]] = []
        for i, size in enumerate(sizes):
            if not parts or sizes[parts[-1][0]] ** 2 - size**2 > CALL_PAIRS:
                parts.append([])
            parts[-1].append(i)
        indices, back, end = [], np.empty(starts[-1], np.int64), 0
        for part in parts:
            length = sizes[part[0]]
            places = np.arange(length) + starts[part][:, None]
            for row, i in enumerate(part):
                places[row, sizes[i] :] = starts[i]
                back[starts[i] : starts[i + 1]] = end + row * length + np.arange(sizes[i])
            indices.append(torch.from_numpy(places).to(device))
            end += places.size
        return cls(tuple(indices), torch.from_numpy(back).to(device))


@torch.compiler.disable  # else one program for each number of blocks
def segments(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    blocks: Blocks | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_,
) -> tuple[Tensor, None]:
    """Attend within each segment by torch's fused causal attention, a call for each block.

    Args:
      query: [1, heads, N, H]; key and value may have fewer heads.
      sliding_window: keys that a query sees, its own included. softcap: bound of scores, by tanh.
      s_aux: sinks, [heads]: a score of each head that no value belongs to.

    Returns:
      [1, N, heads, H].

    Raises:
      UserError: the model does not hand on what it is called with.
    """
    if blocks is None:
        raise UserError(
            f"{type(module).__name__} does not tell attention where packed sequences begin, so "
            "trainer=torch cannot train its model; use another model"
        )
    rows = [x[0].transpose(0, 1) for x in (query, key, value)]  # [N, heads, H]
    groups, out = query.shape[1] // key.shape[1], []
    for index in blocks.indices:
        q, k, v = (x[index].transpose(1, 2) for x in rows)  # [S, heads, L, H]
        window = sliding_window or q.shape[2]
        if q.shape[2] > window or softcap or s_aux is not None:
            wide = (x.repeat_interleave(groups, 1) for x in (k, v))
            scale = scaling or 1 / math.sqrt(query.shape[-1])
            found = _unfused(q, *wide, scale, window, softcap or 0.0, s_aux)
        else:
            found = scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scaling, enable_gqa=groups > 1
            )
        out.append(found.transpose(1, 2).flatten(0, 1))
    return torch.cat(out)[blocks.back][None], None


def _unfused(
    query: Tensor, key: Tensor, value: Tensor, scale: float, window: int, softcap: float,
    sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """Attend causally within segments, whose scores are computed again for the gradient."""

    def block(first: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        scores = (q @ k.transpose(-1, -2)).float() * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        behind = torch.arange(q.shape[2], device=q.device)[:, None] + first
        behind = behind - torch.arange(k.shape[2], device=q.device)
        scores = scores.masked_fill((behind < 0) | (behind >= window), -torch.inf)
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
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    sliding_window: int | None = None,
    **more,
) -> tuple[Tensor, None]:
    """Attend within each segment by torch's varlen kernel; CUDA, half precision."""
    if more.get("softcap") or more.get("s_aux") is not None:
        return segments(
            module, query, key, value, attention_mask, scaling, sliding_window=sliding_window,
            **more,
        )  # fmt: skip
    from torch.nn.attention.varlen import varlen_attn

    # Under autocast RoPE leaves queries and keys in float32; values are as products give them.
    rows = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))
    ends, longest = (cu_seq_lens_q,) * 2, (max_length_q,) * 2
    grouped = query.shape[1] != key.shape[1]
    window = ((sliding_window or 0) - 1, 0)
    out = varlen_attn(*rows, *ends, *longest, scale=scaling, window_size=window, enable_gqa=grouped)
    assert isinstance(out, Tensor)
    return out[None], None


AttentionInterface.register("rlx_segments", segments)
AttentionInterface.register("rlx_varlen", varlen)
