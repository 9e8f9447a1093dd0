"""One optimizer update in torch, as `rlx.train.steps` does it."""

from collections.abc import Mapping
from typing import Any

import torch

from rlx.algorithms import losses
from rlx.algorithms.algorithm import Algorithm
from rlx_torch.model import logprobs


def make_optimizer(model: torch.nn.Module, options: Any) -> torch.optim.Optimizer:
    """Return AdamW with the numbers of `options`; matrices decay, norms and biases do not.

    Args:
      options: has the keys of `config.optimizer` as attributes; the rate stays what it is at first.
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
) -> dict[str, float]:
    """Make one update by a minibatch of one microbatch: forward, backward, optimizer.

    Args:
      batch: what `logprobs` and `policy_loss` read.
      denominator: of the minibatch; the summed loss is divided by it.
      clip_norm: largest global gradient norm; 0 is no limit.

    Returns:
      The statistics of `policy_loss`, as numbers, and grad_norm before clipping. A gradient norm
      that is not finite leaves the parameters as they were.
    """
    optimizer.zero_grad(set_to_none=True)
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
