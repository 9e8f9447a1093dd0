"""Attention over packed sequences in transformers' models: each token sees its segment alone.

All rows of a microbatch are one sequence, [1, N] without padding, and `cu_seq_lens_q` says where
its segments begin, as transformers' own FlashAttention takes them. Nothing here has a mask.
"""

import importlib.util

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

# The first that is installed and knows the device; `segments` is always there. The others compute
# in half precision alone.
KERNELS = {
    "flash_attention_3": ("cuda", "flash_attn_interface"),
    "flash_attention_2": ("cuda", "flash_attn"),
    "rlx_varlen": ("cuda", "torch.nn.attention.varlen"),
    "rlx_segments": ("", "torch"),
}


def kernel(device: str, compute_dtype: str) -> str:
    """Return the name of the attention that a model on this kind of device is loaded with."""
    for name, (where, module) in KERNELS.items():
        fits = not where or (where == device and compute_dtype != "float32")
        if fits and importlib.util.find_spec(module):
            return name
    raise AssertionError("rlx_segments needs nothing")


def segments(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    sizes: list[int],
    **_,
) -> tuple[Tensor, None]:
    """Attend within each segment by one call of torch's fused causal attention.

    Args:
      query: [1, heads, N, H]; key and value may have fewer heads.
      sizes: tokens of each segment, N in all.

    Returns:
      [1, N, heads, H].
    """
    parts = zip(*(x.split(sizes, 2) for x in (query, key, value)), strict=True)
    grouped = query.shape[1] != key.shape[1]
    out = [
        scaled_dot_product_attention(*part, is_causal=True, scale=scaling, enable_gqa=grouped)
        for part in parts
    ]
    return torch.cat(out, 2).transpose(1, 2), None


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
    **_,
) -> tuple[Tensor, None]:
    """Attend within each segment by torch's varlen kernel; CUDA, half precision."""
    from torch.nn.attention.varlen import varlen_attn

    # Under autocast RoPE leaves queries and keys in float32; values are as products give them.
    rows = (x[0].transpose(0, 1).to(value.dtype) for x in (query, key, value))
    ends, longest = (cu_seq_lens_q,) * 2, (max_length_q,) * 2
    grouped = query.shape[1] != key.shape[1]
    out = varlen_attn(
        *rows, *ends, *longest, scale=scaling, window_size=(-1, 0), enable_gqa=grouped
    )
    assert isinstance(out, Tensor)
    return out[None], None


AttentionInterface.register("rlx_segments", segments)
AttentionInterface.register("rlx_varlen", varlen)
