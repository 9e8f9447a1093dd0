"""Part `attention` for trainer=torch: compare each installed kernel with plain attention.

Forward and backward of packed segments with grouped heads, in bfloat16 on a GPU and float32 on a
CPU. The plain one is torch's attention of each segment in float32.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from experiments.gpu.torch_step import DEVICE, segment_lengths
from rlx_torch import attention

LIMITS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
NAMES = ("output", "grad_q", "grad_k", "grad_v")


def plain(query: Tensor, key: Tensor, value: Tensor, sizes: list[int]) -> Tensor:
    """Return attention in each segment, in float32, [1, N, heads, H]."""
    parts = zip(*(x.float().split(sizes, 2) for x in (query, key, value)), strict=True)
    found = [scaled_dot_product_attention(*p, is_causal=True, enable_gqa=True) for p in parts]
    return torch.cat(found, 2).transpose(1, 2)


def by_kernel(name: str, query: Tensor, key: Tensor, value: Tensor, sizes: list[int]) -> Tensor:
    """Return the output of the trainer's kernel of that name, [1, N, heads, H]."""
    module: Any = torch.nn.Identity()
    module.is_causal, module.config = True, SimpleNamespace(_attn_implementation=name)
    ends = torch.tensor(np.cumsum([0, *sizes]), dtype=torch.int32, device=DEVICE)
    function: Any = ALL_ATTENTION_FUNCTIONS[name]
    return function(
        module, query, key, value, None, scaling=query.shape[-1] ** -0.5, dropout=0.0,
        blocks=attention.blocks_of(sizes, DEVICE), cu_seq_lens_q=ends, cu_seq_lens_k=ends,
        max_length_q=max(sizes), max_length_k=max(sizes),
    )[0]  # fmt: skip


def errors(attend: Any, shape: tuple[int, int, int], sizes: list[int], dtype: Any) -> dict:
    """Return the relative error of the output and of each gradient; shape: heads, kv heads, H."""
    heads, kv_heads, width = shape
    torch.manual_seed(0)
    inputs = [
        torch.randn(1, n, sum(sizes), width, device=DEVICE).to(dtype).requires_grad_()
        for n in (heads, kv_heads, kv_heads)
    ]
    found, wanted = attend(*inputs, sizes), plain(*inputs, sizes)
    cotangent = torch.randn_like(wanted)
    got = [found, *torch.autograd.grad(found, inputs, cotangent.to(found.dtype))]
    want = [wanted, *torch.autograd.grad(wanted, inputs, cotangent)]
    pairs = zip(NAMES, got, want, strict=True)
    return {name: float((a.float() - b).norm() / b.float().norm()) for name, a, b in pairs}


def run(o: dict[str, Any]) -> dict[str, Any]:
    """Return errors by kernel and number of key heads, their limit, and whether all are below."""
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float32
    sizes, cases = segment_lengths(2, o["length"]), {}
    fitting = [
        name for name, (where, _) in attention.KERNELS.items()
        if where in ("", DEVICE) and attention.installed(name)
    ]  # fmt: skip
    for name in fitting:
        for kv_heads in (o["heads"], o["heads"] // 6 or 1, 1):
            shape = o["heads"], kv_heads, o["width"]
            attend = lambda *given, name=name: by_kernel(name, *given)  # noqa: E731
            case = f"{name}, {o['heads']} heads, {kv_heads} kv heads"
            cases[case] = errors(attend, shape, sizes, dtype)
    worst = max(max(case.values()) for case in cases.values())
    chosen = attention.kernel(DEVICE, str(dtype).removeprefix("torch."))
    return {"kind": chosen, "dtype": str(dtype), "limit": LIMITS[dtype], "cases": cases,
            "equal": worst < LIMITS[dtype]}  # fmt: skip


def lines(result: dict[str, Any]) -> list[str]:
    """Return the lines of the table."""
    verdict = "equal" if result["equal"] else "DIFFERENT"
    head = f"{result['kind']}, {result['dtype']}: {verdict} (limit {result['limit']:g})"
    worst = {name: max(case.values()) for name, case in result["cases"].items()}
    return [head, *(f"{error:.1e}  {name}" for name, error in worst.items())]
