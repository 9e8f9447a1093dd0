"""A train state in JAX of the tensors that the trainer in PyTorch has written.

Their names and layouts stand in rlx_torch/jax_checkpoint.py; who reads them is an argument here.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
import optax

from rlx.base import UserError
from rlx.model import hf, peft
from rlx.model.lora_config import PREFIX, LoraConfig
from rlx.model.model_config import ModelConfig
from rlx.model.params import Params
from rlx.train import state_files
from rlx.train.optimizer_options import MOMENTS
from rlx.train.steps import TrainState


class _Part(Mapping[str, np.ndarray]):
    """The tensors called PREFIX…SUFFIX, by what stands between."""

    def __init__(self, tensors: Mapping[str, Any], prefix: str, suffix: str = ""):
        self._tensors, self._prefix, self._suffix = tensors, prefix, suffix
        named = (n for n in tensors if n.startswith(prefix) and n.endswith(suffix))
        self._names = [name.removeprefix(prefix).removesuffix(suffix) for name in named]

    def __getitem__(self, name: str) -> np.ndarray:
        return self._tensors[f"{self._prefix}{name}{self._suffix}"]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def state_of(
    tensors: Mapping[str, Any], abstract: TrainState, model: ModelConfig, lora: LoraConfig | None
) -> TrainState:
    """Return a state, where `abstract` has it, of tensors (of adapters) that are read singly.

    Raises:
      UserError: the tensors are of another model, algorithm or optimizer.
    """
    valued = dataclasses.replace(model, value_head=True)
    for name in ("critic", "reference"):
        there = getattr(abstract, name) is not None
        if there != any(key.startswith(f"{name}.") for key in tensors):
            found = f"the checkpoint has {'no' if there else 'a'} {name}, unlike this run"
            raise UserError(f"{found}; use the algorithm that it was made with")
    reference, critic = abstract.reference, abstract.critic
    return _learned(tensors, "policy", abstract, model, lora).replace(
        **{n: _number(tensors[n], getattr(abstract, n)) for n in ("step", "kl_coefficient")},
        reference=reference and _params(_Part(tensors, "reference."), reference, model, lora),
        critic=critic and _learned(tensors, "critic", critic, valued),
    )


def _learned(tensors: Mapping[str, Any], name: str, abstract: Any, *of: Any) -> Any:
    """Return parameters, moments and counters of one network."""
    moments = _Part(tensors, f"{name}.moments.")
    made: dict[str, Any] = {}
    for ours, theirs in MOMENTS.items():
        part, like = _Part(moments, "", f".{theirs}"), optax.tree.get(abstract.opt_state, ours)
        if bool(part) != (like is not None):
            text = f"the checkpoint has {len(part)} moments {theirs!r} of {name}, unlike "
            raise UserError(f"{text}optimizer.name; use the optimizer that it was made with")
        if part:
            made[ours] = _params(part, like, *of)
    updates = tensors[f"{name}.updates"]
    counted = jax.tree_util.tree_map_with_path(
        lambda path, leaf: _number(updates, leaf) if "count" in str(path[-1]) else leaf,
        abstract.opt_state,
    )
    return abstract.replace(
        params=_params(_Part(tensors, f"{name}.model."), abstract.params, *of),
        opt_state=optax.tree.set(counted, **made),
        updates=_number(updates, abstract.updates),
    )


def _params(part: Any, like: Params, model: ModelConfig, lora: Any = None) -> Params:
    """Return a pytree of parameters, or of moments, with memory of its own."""
    if lora:
        named = {PREFIX + name.replace(".default", ""): part[name] for name in part}
        return jax.tree.map(_number, peft.from_peft(named, model, lora), like)
    dtype = jax.tree.leaves(like)[0].dtype
    return hf.from_hf(part, model, dtype, jax.tree.map(state_files.sharding_of, like))


def _number(value: Any, like: Any) -> jax.Array:
    array = np.asarray(value, like.dtype)
    place = state_files.sharding_of(like)
    return jax.make_array_from_callback(array.shape, place, lambda index: array[index])
