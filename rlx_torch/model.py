"""A transformers model as rlx's decoder is used: packed rows in, log-probabilities out."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from rlx.model.model_config import ModelConfig

Batch = Mapping[str, torch.Tensor]


def load(path: str | Path, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """Load the causal language model of an HF directory, without dropout, with fused attention."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation="sdpa"
    )
    return model.eval()


def init(config: ModelConfig, seed: int = 0) -> torch.nn.Module:
    """Return a randomly initialised model of `config`, float32."""
    torch.manual_seed(seed)
    hf = config.to_hf()
    built = transformers.AutoConfig.for_model(hf.pop("model_type"), **hf)
    model = transformers.AutoModelForCausalLM.from_config(built, attn_implementation="sdpa")
    return model.eval()


def logprobs(
    model: torch.nn.Module,
    batch: Batch,
    *,
    temperature: float = 1.0,
    entropy_gradient: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each token's log-probability given its segment's earlier ones, and the entropy there.

    Rows of one segment each, padded on the right, need no mask beside the causal one, which is
    the fastest attention torch has; packed rows get a mask of their segments.

    Args:
      batch: tokens, positions, segment_ids, each [B, T] int64 (0 in segment_ids is padding).
      temperature: > 0.
      entropy_gradient: whether entropies are differentiated too, at the cost of their memory.

    Returns:
      Two [B, T] float32 as `rlx.model.decoder.logprobs`: 0 at first tokens and padding.
    """
    tokens, segments = batch["tokens"], batch["segment_ids"]
    arguments: dict[str, Any] = {"input_ids": tokens, "position_ids": batch["positions"]}
    if int(segments.max()) > 1:
        same = segments[:, None, :, None] == segments[:, None, None, :]
        arguments["attention_mask"] = same.tril()
    else:
        del arguments["position_ids"]  # transformers would look for packed rows in them
    logits = model(**arguments, use_cache=False).logits[:, :-1]
    logits = logits.float() if temperature == 1.0 else logits.float() / temperature
    normaliser = torch.logsumexp(logits, -1)
    picked = logits.gather(-1, tokens[:, 1:, None])[..., 0] - normaliser
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy = normaliser - (torch.softmax(logits, -1) * logits).sum(-1)
    mask = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)

    def shifted(x):
        return torch.nn.functional.pad(torch.where(mask, x, 0.0), (1, 0))

    return shifted(picked), shifted(entropy)
