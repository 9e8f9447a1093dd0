"""A transformers model on packed rows: log-probabilities, entropies and values of each token.

A microbatch's rows [B, T] become one sequence without padding for the model, and what it says of
each token goes back to the token's place. Shapes: N tokens that are not padding, D the width.
"""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.liger import apply_liger_kernel
from transformers.utils import logging

from rlx.train.packing import segment_sizes
from rlx_torch.attention import Blocks, kernel

Batch = Mapping[str, Any]
LAYOUT = ("longest", "blocks", "cu_seq_lens", "places")


class Valued(nn.Module):
    """A model with a value head of zeros in place of its logits: a critic or a reward model.

    Its parameters have the names that rlx's own models with a value head have in HF directories.
    """

    def __init__(self, model: Any):
        super().__init__()
        self.config = model.config
        self.model = model.base_model
        width = model.get_output_embeddings().in_features
        self.score = nn.Linear(width, 1, bias=False)
        nn.init.zeros_(self.score.weight)

    @property
    def base_model(self) -> nn.Module:
        """The decoder without its head."""
        return self.model

    @property
    def tp_plan(self) -> dict[str, str]:
        """How transformers would cut the model over devices, by names of modules."""
        return {f"model.{name}": style for name, style in self.model.tp_plan.items()}


def load(path: str | Path, device: str, compute_dtype: str, remat: bool = False) -> Any:
    """Return the causal language model of an HF directory, its parameters float32 on `device`.

    Args:
      compute_dtype: of its products, by autocast.
      remat: keep only what enters each layer and compute the rest again for the gradient.
    """
    logging.disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation=kernel(device, compute_dtype),
        device_map=device,
    )  # fmt: skip
    ready(model, remat)
    return model


def ready(model: Any, remat: bool) -> None:
    """Set a model to be trained: `remat` as `load` has it; Liger's kernels where installed."""
    if torch.cuda.is_available() and find_spec("liger_kernel"):
        kernels = {"rope": True, "rms_norm": True, "swiglu": True}
        losses = {"cross_entropy": False, "fused_linear_cross_entropy": False}  # there are none
        apply_liger_kernel(model, kernels | losses)
    if remat:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    # Train mode, which remat asks for, and no dropout, which the fleet has none of either.
    for module in model.train().modules():
        for name in ("p", "attention_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)


def empty(path: str | Path, kernel: str = "rlx_segments") -> Any:
    """Return the model of an HF directory with whatever its parameters' memory holds."""
    return AutoModelForCausalLM.from_config(
        AutoConfig.from_pretrained(path), dtype=torch.float32, attn_implementation=kernel
    )


def put(arrays: Mapping[str, np.ndarray], device: str) -> dict[str, Any]:
    """Return a packed microbatch on the device, with its LAYOUT: where its segments are."""
    sizes = segment_sizes(arrays["segment_ids"])
    sizes, used = sizes[sizes > 0], np.flatnonzero(arrays["segment_ids"])
    if not len(used):  # rows of padding alone: two tokens, which no loss looks at
        sizes, used = np.array([2], np.int32), np.arange(2)
    parts = np.split(used, np.cumsum(sizes)[:-1])
    order = np.argsort(-sizes, kind="stable")  # neighbours are alike: one call attends to several
    sizes, used = sizes[order], np.concatenate([parts[i] for i in order])
    ends = torch.from_numpy(np.append(0, np.cumsum(sizes)).astype(np.int32))
    return {
        **{name: torch.from_numpy(x).to(device) for name, x in arrays.items()},
        "longest": int(sizes.max()),
        "blocks": Blocks.of(sizes.tolist(), device),
        "cu_seq_lens": ends.to(device),
        "places": torch.from_numpy(used).to(device),
    }


def hidden(model: Any, batch: Batch) -> Tensor:
    """Return what the decoder's last norm gives for each token that is not padding, [N, D]."""
    places, ends, longest = batch["places"], batch["cu_seq_lens"], batch["longest"]
    tokens, positions = (batch[k].reshape(-1)[places][None] for k in ("tokens", "positions"))
    return model.base_model(
        input_ids=tokens, position_ids=positions, use_cache=False, blocks=batch["blocks"],
        cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=longest, max_length_k=longest,
    ).last_hidden_state[0]  # fmt: skip


def logprobs(
    model: Any, batch: Batch, *, temperature: float, chunk: int, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Return each token's log-probability given its segment's earlier ones, and the entropy there.

    Args:
      batch: of `put`. temperature: > 0. chunk: tokens whose logits exist at one time.
      entropy_gradient: whether entropies are differentiated too.

    Returns:
      Two [B, T] float32 as `rlx.model.decoder.logprobs` gives: 0 at first tokens and padding.
    """
    states, head = hidden(model, batch), model.get_output_embeddings()
    tokens = batch["tokens"].reshape(-1)[batch["places"]].long()
    cap = getattr(model.config, "final_logit_softcapping", None)

    def scores(states: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = head(states).float()
        if cap:
            logits = cap * torch.tanh(logits / cap)
        logprobs = torch.log_softmax(logits if temperature == 1 else logits / temperature, -1)
        picked = logprobs.gather(-1, targets[:, None])[:, 0]
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropy = -(logprobs.exp() * logprobs).sum(-1)
        return picked, entropy

    parts = [*zip(states[:-1].split(chunk), tokens[1:].split(chunk), strict=True)]
    if len(parts) == 1:  # its logits would be there again at once
        found = [scores(*parts[0])]
    else:
        found = [checkpoint(scores, *part, use_reentrant=False) for part in parts]
    first = batch["cu_seq_lens"][:-1].long()
    return tuple(
        _back(nn.functional.pad(x, (1, 0)).index_fill(0, first, 0.0), batch)
        for x in (torch.cat(part) for part in zip(*found, strict=True))
    )  # type: ignore[return-value]


def values(model: Valued, batch: Batch) -> Tensor:
    """Return the value head's number after each token, [B, T] float32, 0 at padding."""
    states = hidden(model, batch)
    with torch.autocast(states.device.type, enabled=False):
        return _back((states.float() @ model.score.weight.float().T)[:, 0], batch)


def before(after_BT: Tensor, segment_ids: Tensor) -> Tensor:
    """Return V of the state in which each token was chosen, from V after each token; [B, T]."""
    moved = nn.functional.pad(after_BT[:, :-1], (1, 0))
    same = nn.functional.pad(segment_ids[:, 1:] == segment_ids[:, :-1], (1, 0))
    return torch.where(same & (segment_ids > 0), moved, 0.0)


def _back(x_N: Tensor, batch: Batch) -> Tensor:
    """Return x at the places of its tokens, [B, T], 0 at padding."""
    places, row = batch["places"], batch["tokens"].shape[1]
    out = x_N.new_zeros(batch["tokens"].shape, dtype=torch.float32)
    return out.index_put((places // row, places % row), x_N.float())  # no view, for FSDP's hooks
