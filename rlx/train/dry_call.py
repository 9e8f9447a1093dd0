"""Trial of a user's own loss and advantage on a few tokens, before a run starts."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from rlx.algorithms import advantages, losses
from rlx.algorithms.algorithm import Algorithm
from rlx.base import UserError, place
from rlx.cli.user_code import where

SEGMENTS = np.array([[1, 1, 1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 1, 2, 2, 2]], np.int32)
LOGPROBS = ("behaviour_logprobs", "proximal_logprobs", "reference_logprobs")


def check(algorithm: Algorithm, trainer: str = "jax") -> None:
    """Compute a user's own advantage and loss, with its gradient, as a train step does, on the CPU.

    UserError gives file and line of a failure, a wrong shape or type, or non-finite numbers. The
    arrays are those of `trainer`, jax or torch.
    """
    if algorithm.advantage_function:
        function = algorithm.advantage_function
        with _of_user(f"algorithm.advantage={algorithm.advantage}", function) as what:
            _check_advantage(what, algorithm, function, trainer)
    if algorithm.loss_function:
        with _of_user(f"algorithm.loss={algorithm.loss}", algorithm.loss_function) as what:
            _check_loss(what, algorithm, algorithm.loss_function, trainer)


def _check_advantage(what: str, algorithm: Algorithm, function: Callable, trainer: str) -> None:
    rng, mask = np.random.default_rng(0), (SEGMENTS > 0).ravel()
    flat: Any = {name: -rng.exponential(0.5, 16).astype(np.float32) * mask for name in LOGPROBS}
    ids = np.where(SEGMENTS > 0, SEGMENTS - 1 + [[0], [2]], 4).ravel().astype(np.int32)
    flat |= {"loss_mask": mask, "sequence_ids": ids, "turn_ids": 0 * ids}
    flat |= {"rewards": np.array([0, 1, 1, 1], np.float32), "group_ids": np.array([0, 0, 1, 1])}
    flat |= {"valid": np.ones(4, bool), "truncated": ids[:4] > 3, "agent_ids": 0 * ids[:4]}
    bad = int(np.sum(~np.isfinite(np.asarray(_advantages(trainer, flat, algorithm)))))
    if bad:
        words = f"the advantage of {bad} of {mask.sum()} tokens is not finite"
        raise UserError(f"{what}: {words} {place(function)}")


def _check_loss(what: str, algorithm: Algorithm, function: Callable, trainer: str) -> None:
    rng, mask = np.random.default_rng(0), SEGMENTS > 0
    rows: Any = {
        name: -rng.exponential(0.5, mask.shape).astype(np.float32) * mask
        for name in (*LOGPROBS, "target", "entropy", "advantages")
    }
    rows |= {"loss_mask": mask, "loss_weights": mask.astype(np.float32), "segment_ids": SEGMENTS}
    rows |= {"versions": 0 * SEGMENTS, "target_version": np.array(1.5)}
    stats, gradients = _loss(trainer, rows, algorithm)
    bad = int(stats["n_nonfinite_tokens"])
    wrong = [f"the loss of {bad} of {mask.sum()} tokens"] * (bad > 0)
    wrong += ["the gradient"] * (not all(np.isfinite(g).all() for g in gradients))
    wrong += [f"the statistic {name!r}" for name, x in stats.items() if not np.isfinite(x)]
    if wrong:
        raise UserError(f"{what}: {wrong[0]} is not finite {place(function)}")


def _advantages(trainer: str, flat: dict[str, Any], algorithm: Algorithm) -> Any:
    if trainer == "torch":
        return advantages.advantages(_tensors(flat), algorithm)["advantages"]
    import jax

    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        return jax.jit(advantages.advantages, static_argnums=1)(flat, algorithm)["advantages"]


def _loss(trainer: str, rows: dict[str, Any], algorithm: Algorithm) -> tuple[Any, Any]:
    """Return the loss's statistics, and its gradients by target and entropy."""
    if trainer == "torch":
        rows = _tensors(rows)
        target, entropy = inputs = [rows[name].requires_grad_() for name in ("target", "entropy")]
        loss, stats = losses.policy_loss(target, entropy, rows, algorithm)
        loss.backward()
        gradients = [x.grad.numpy() for x in inputs if x.grad is not None]
        return {name: x.numpy() for name, x in stats.items()}, gradients
    import jax

    run = jax.value_and_grad(losses.policy_loss, argnums=(0, 1), has_aux=True)
    args = rows["target"], rows["entropy"], rows, algorithm
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        (_, stats), gradients = jax.device_get(jax.jit(run, static_argnums=3)(*args))
    return stats, gradients


def _tensors(arrays: dict[str, Any]) -> dict[str, Any]:
    import torch

    return {name: torch.from_numpy(np.asarray(x)) for name, x in arrays.items()}


@contextmanager
def _of_user(what: str, function: Callable) -> Iterator[str]:
    """Raise a failure as a UserError in one line, with the user's file and line."""
    try:
        yield what
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"{what}: {where(error, function)}") from error
