"""Which attention a model is loaded with, and in which dtype the kernels of CUDA are asked."""

import importlib.util

import torch
from torch.nn.attention import varlen
from torch.nn.functional import scaled_dot_product_attention

from rlx_torch import attention


def test_kernels_of_half_precision_are_for_half_precision_alone():
    assert attention.kernel("cuda", "float32") == "rlx_segments"
    assert attention.kernel("cuda", "bfloat16") != "rlx_segments"
    assert attention.kernel("cpu", "bfloat16") == "rlx_segments"


def test_pytorch_before_2_13_takes_fused_attention_of_segments(monkeypatch):
    """Its varlen kernel has no argument for grouped heads; calling it would be a TypeError."""

    def varlen_attn(query, key, value, *places, scale=None, window_size=(-1, -1)):
        raise AssertionError

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if "flash" in name else name)
    assert attention.kernel("cuda", "bfloat16") == "rlx_varlen"
    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    assert attention.kernel("cuda", "bfloat16") == "rlx_segments"


def test_the_kernel_is_given_one_dtype_and_heads_after_tokens(monkeypatch):
    asked = {}

    def varlen_attn(query, key, value, *places, **options):
        asked.update(dtypes={query.dtype, key.dtype, value.dtype}, shape=key.shape, **options)
        return query

    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    query, key = torch.ones(1, 4, 6, 8), torch.ones(1, 2, 6, 8)  # in float32, as RoPE leaves them
    ends = torch.tensor([0, 2, 6], dtype=torch.int32)
    out, _ = attention.varlen(
        torch.nn.Identity(), query, key, key.bfloat16(), None, cu_seq_lens_q=ends, max_length_q=4
    )
    assert asked["dtypes"] == {torch.bfloat16}
    assert (asked["shape"], asked["window_size"]) == ((6, 2, 8), (-1, 0))
    assert out.shape == (1, 6, 4, 8)


def test_one_call_for_several_segments_is_one_for_each():
    sizes = [300, 290, 200, 200, 40, 33, 33, 1]
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, sum(sizes), 8, requires_grad=True) for heads in (4, 2, 2)
    )
    blocks = attention.blocks_of(sizes, "cpu")
    assert [block.shape for block in blocks] == [(2, 300), (2, 200), (4, 40)]
    assert [block.places is None for block in blocks] == [False, True, False]
    found, _ = attention.segments(torch.nn.Identity(), query, key, value, None, blocks=blocks)
    parts = zip(*(x.split(sizes, 2) for x in (query, key, value)), strict=True)
    alone = [scaled_dot_product_attention(*part, is_causal=True, enable_gqa=True) for part in parts]
    wanted, cotangent = torch.cat(alone, 2).transpose(1, 2), torch.randn_like(found)
    torch.testing.assert_close(found, wanted)
    got, want = (torch.autograd.grad(x, (query, key, value), cotangent) for x in (found, wanted))
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_products_in_half_precision_are_nearer_to_float32_than_the_fused_kernel():
    """Queries and keys are in float32, as RoPE leaves them under autocast."""
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(1, heads, 96 + 70, 32, requires_grad=True) for heads in (6, 2, 2)
    )
    half, blocks = value.detach().bfloat16().requires_grad_(), attention.blocks_of([96, 70], "cpu")
    cotangent = torch.randn(1, 96 + 70, 6, 32).bfloat16()

    def of(value):
        out, _ = attention.segments(torch.nn.Identity(), query, key, value, None, blocks=blocks)
        return out, torch.autograd.grad(out, (query, key, value), cotangent.to(out.dtype))

    wanted, gradients = of(half.detach().float().requires_grad_())
    with torch.autocast("cpu", torch.bfloat16):
        found, own = of(half)
        cuts = [x[:, :, :96] for x in (query, key, half)]
        fused = scaled_dot_product_attention(*cuts, is_causal=True, enable_gqa=True)
    assert found.dtype == torch.bfloat16
    fused = fused.transpose(1, 2)
    ours, theirs = ((x[:, :96] - wanted[:, :96]).abs().mean() for x in (found, fused))
    assert ours < theirs
    for one, other in zip(own, gradients, strict=True):
        assert (one.float() - other.float()).norm() < 1e-2 * other.float().norm()
