"""Optimizers by name, in PyTorch, and a step with moments in the host's memory."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from rlx.train.train_options import OPTIMIZERS, OptimizerOptions


class Lion(torch.optim.Optimizer):
    """Lion (arXiv 2302.06675): steps by the sign of a mean of gradient and moment.

    p ← p − lr · (sign(b1·m + (1 − b1)·g) + decay·p)        m ← b2·m + (1 − b2)·g
    """

    def __init__(self, groups: Any, lr: float, betas: tuple[float, float]):
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        for group in self.param_groups:
            (b1, b2), rate = group["betas"], group["lr"]
            for p in (p for p in group["params"] if p.grad is not None):
                moment = self.state[p]["exp_avg"]
                towards = (moment * b1).add_(p.grad, alpha=1 - b1).sign_()
                p.mul_(1 - rate * group["weight_decay"]).add_(towards, alpha=-rate)
                moment.mul_(b2).add_(p.grad, alpha=1 - b2)
                self.state[p]["step"] += 1


_MADE: dict[str, Callable[[Any, OptimizerOptions], torch.optim.Optimizer]] = {
    # fused: one pass over memory a parameter, torch's fastest on CPU and GPU
    "adamw": lambda groups, c: torch.optim.AdamW(
        groups, lr=0.0, betas=(c.b1, c.b2), eps=c.eps, fused=True
    ),
    "lion": lambda groups, c: Lion(groups, lr=0.0, betas=(c.b1, c.b2)),
    "sgd": lambda groups, c: torch.optim.SGD(groups, lr=0.0),
}


def make_optimizer(
    parameters: Iterable[nn.Parameter], options: OptimizerOptions, offloaded: bool = False
) -> torch.optim.Optimizer:
    """Return the optimizer of parameters, with learning rate 0; only matrices decay.

    The moments of an `offloaded` one are in the host's memory, for `step_offloaded`.
    """
    trained = list(parameters)
    alike: dict[Any, list[nn.Parameter]] = {}  # parameters of one call of the optimizer
    for p in trained:
        alike.setdefault((p.ndim > 1, getattr(p, "device_mesh", None)), []).append(p)
    groups = [
        {"params": same, "weight_decay": options.weight_decay if matrices else 0.0}
        for (matrices, _), same in alike.items()
    ]
    optimizer = _MADE[options.name](groups, options)
    names = ("exp_avg", "exp_avg_sq")[: OPTIMIZERS[options.name]]
    for p in trained if names else ():  # now, so that a checkpoint before the first step has them
        state: dict[str, Tensor] = {"step": torch.zeros((), device=p.device)}
        state |= {name: torch.zeros_like(p) for name in names}
        if offloaded:
            state = {name: x.cpu().pin_memory() for name, x in state.items()}
        optimizer.state[p] = state
    return optimizer


def step_offloaded(optimizer: torch.optim.Optimizer) -> None:
    """Step one parameter at a time, moving its moments from and to the host's memory."""
    wholes = [group["params"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["params"] = []
    for group, params in zip(optimizer.param_groups, wholes, strict=True):
        for p in params:
            host, group["params"] = optimizer.state[p], [p]
            on_device = {name: x.to(p.device, non_blocking=True) for name, x in host.items()}
            optimizer.state[p] = on_device
            optimizer.step()
            for name, x in on_device.items():
                host[name].copy_(x, non_blocking=True)
            optimizer.state[p] = host
        group["params"] = []
    for group, params in zip(optimizer.param_groups, wholes, strict=True):
        group["params"] = params
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # before a checkpoint reads the host's memory
