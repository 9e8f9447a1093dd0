"""The baseline of the train-step benchmark: transformers' model on one padded batch, eager."""

from collections.abc import Mapping
from typing import Any

import torch
import transformers

from rlx.algorithms import losses
from rlx.algorithms.algorithm import Algorithm
from rlx.model.model_config import ModelConfig

Batch = Mapping[str, torch.Tensor]


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

    Rows of one segment, padded on the right, need only the causal mask, which is torch's fastest
    attention. Packed rows get a mask of their segments.

    Args:
      batch: tokens, positions, segment_ids, each [B, T] int64 (0 in segment_ids is padding).
      temperature: > 0.
      entropy_gradient: whether to differentiate entropies too, which costs their memory.

    Returns:
      Two [B, T] float32 as `rlx.model.decoder.logprobs`: 0 at first tokens and padding.
    """
    tokens, segments = batch["tokens"], batch["segment_ids"]
    arguments: dict[str, Any] = {"input_ids": tokens, "position_ids": batch["positions"]}
    if int(segments.max()) > 1:
        same = segments[:, None, :, None] == segments[:, None, None, :]
        arguments["attention_mask"] = same.tril()
    else:
        del arguments["position_ids"]  # otherwise transformers searches them for packed rows
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


def make_optimizer(model: torch.nn.Module, options: Any) -> torch.optim.Optimizer:
    """Return AdamW with the values of `options`; matrices decay, norms and biases do not.

    Args:
      options: has the keys of `config.optimizer` as attributes; the learning rate is constant.
    """
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": options.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    betas = (options.b1, options.b2)
    # fused: one pass over memory a parameter, torch's fastest on CPU and GPU
    return torch.optim.AdamW(
        groups, lr=options.learning_rate, betas=betas, eps=options.eps, fused=True
    )


def train_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Mapping[str, torch.Tensor],
    denominator: float,
    algorithm: Algorithm,
    *,
    temperature: float = 1.0,
    clip_norm: float = 0.0,
    half: bool = False,
) -> dict[str, float]:
    """Make one update by a minibatch of one microbatch: forward, backward, optimizer.

    Args:
      batch: what `logprobs` and `policy_loss` read.
      denominator: of the minibatch; the summed loss is divided by it.
      clip_norm: largest global gradient norm; 0 is no limit.
      half: whether products are in bfloat16, by autocast.

    Returns:
      The statistics of `policy_loss`, as numbers, and grad_norm before clipping. A gradient norm
      that is not finite leaves the parameters as they were.
    """
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast(batch["tokens"].device.type, torch.bfloat16, enabled=half):
        target, entropy = logprobs(
            model, batch, temperature=temperature,
            entropy_gradient=algorithm.entropy_coefficient > 0 or bool(algorithm.loss_function),
        )  # fmt: skip
    loss, stats = losses.policy_loss(target, entropy, batch, algorithm)
    (loss / denominator).backward()
    limit = clip_norm or float("inf")
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
    if torch.isfinite(norm):
        optimizer.step()
    return {name: float(value) for name, value in stats.items()} | {"grad_norm": float(norm)}
