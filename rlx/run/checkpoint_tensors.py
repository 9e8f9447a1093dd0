"""Read the policy of any checkpoint, one tensor at a time under HF names, without JAX."""

import json
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rlx.base import UserError
from rlx.model import lora_config
from rlx.model import params as parameters
from rlx.model.lora_config import PREFIX, LoraConfig
from rlx.model.model_config import ModelConfig
from rlx.model.tensors import Buckets

_POLICY_PREFIX = "policy.model."  # of the policy's tensors in a checkpoint of trainer=torch
# transformers' name of a layer's experts, [experts, out, in], and the parts that HF's files have.
_EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


class _Stored(NamedTuple):
    """A tensor in a checkpoint: its shape, and what reads it."""

    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


def _stored_tensors(path: Path, rows: tuple[parameters.Row, ...]) -> dict[str, _Stored]:
    return _of_jax(path, rows) if (path / "state").is_dir() else _of_torch(path)


def _of_jax(path: Path, rows: tuple[parameters.Row, ...]) -> dict[str, _Stored]:
    # params.layers.q[i], [in, out] is model.layers.i.self_attn.q_proj.weight, [out, in].
    import tensorstore

    base = f"file://{path.absolute()}/state/"
    tree = json.loads((path / "state" / "_METADATA").read_text())["tree_metadata"].values()
    leaves = {leaf["key_metadata"][0]["key"] for leaf in tree}
    parts: dict[str, list[Any]] = {}
    for row in rows:
        leaf = "params." + ".".join(row.path)
        if leaf not in leaves:
            continue
        place = {"driver": "ocdbt", "base": base, "path": f"{leaf}/"}
        array = tensorstore.open({"driver": "zarr", "kvstore": place}, read=True).result()
        for at, name in zip(row.places, row.names, strict=True):
            part = array[at] if at else array
            parts.setdefault(name, []).append(part.T if row.transposed else part)
    # An HF tensor may concatenate several of ours.
    tensors = {k: tensorstore.concat(x, axis=0) if x[1:] else x[0] for k, x in parts.items()}

    def read(name: str) -> np.ndarray:
        return np.asarray(tensors[name].read().result(), order="C")

    return {k: _Stored(tuple(x.shape), partial(read, k)) for k, x in tensors.items()}


def _of_torch(path: Path) -> dict[str, _Stored]:
    from rlx_torch.torch_checkpoint import TorchCheckpoint

    checkpoint, stored = TorchCheckpoint(path), {}
    tensor = lru_cache(1)(checkpoint.__getitem__)  # for the experts of a layer

    def expert(key: str, *at: Any) -> np.ndarray:
        return tensor(key)[at]

    for key in filter(lambda key: key.startswith(_POLICY_PREFIX), checkpoint):
        name = key.removeprefix(_POLICY_PREFIX)
        if ".default." in name:  # an adapter, as PEFT names it
            name = PREFIX + name.replace(".default", "")
        shape, (stem, _, last) = checkpoint.shape(key), name.rpartition(".")
        stored[name] = _Stored(shape, partial(checkpoint.__getitem__, key))
        for n, part in enumerate(parts := _EXPERTS.get(last, ())):
            size = shape[1] // len(parts)
            for i in range(shape[0]):
                read = partial(expert, key, i, slice(n * size, (n + 1) * size))
                stored[f"{stem}.{i}.{part}.weight"] = _Stored((size, shape[2]), read)
    return stored


def policy_of(path: Path, model: ModelConfig, dtype: str = "") -> Buckets:
    """Return a checkpoint's policy by HF names, in `dtype` or its own; UserError if unfit."""
    rows = parameters.table(model)
    tensors, shapes = _stored_tensors(path, rows), dict[str, tuple[int, ...]]()
    for row in rows:
        for name in row.names:
            shapes[name] = tensors[name].shape if name in tensors else ()
            if shapes[name] != row.hf_shape:
                raise UserError(
                    f"checkpoint {path} has {name} as {list(shapes[name]) or 'nothing'}, the model "
                    f"wants {list(row.hf_shape)}; give the checkpoint's model"
                )
    kind = np.dtype(dtype or tensors[next(iter(shapes))].read().dtype)
    specs = {name: np.broadcast_to(np.zeros((), kind), shape) for name, shape in shapes.items()}
    return Buckets(specs, ({name: tensors[name].read().astype(kind)} for name in shapes))


def adapters_of(path: Path, model: ModelConfig, lora: LoraConfig) -> dict[str, np.ndarray]:
    """Return a checkpoint's adapters under PEFT names."""
    tensors = _stored_tensors(path, lora_config.table(model, lora))
    return {name: tensor.read() for name, tensor in tensors.items() if name.startswith(PREFIX)}
