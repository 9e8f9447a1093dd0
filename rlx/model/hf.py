"""Conversion of HF directories and tensors to (ModelConfig, params) and back.

`params.table` drives both directions; a round trip is exact. On a mesh each device's part is read
separately, with at most BUCKET bytes on the host at a time.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlx.model import directory
from rlx.model import params as parameters
from rlx.model.buckets import export
from rlx.model.directory import check as check
from rlx.model.directory import load_config as load_config
from rlx.model.directory import resolve as resolve
from rlx.model.model_config import ModelConfig
from rlx.model.params import Params, Row
from rlx.model.tensors import BUCKET, LazyTensors, write_directory
from rlx.model.tensors import INDEX as INDEX
from rlx.model.tensors import WEIGHTS as WEIGHTS
from rlx.model.tensors import open_tensors as open_tensors

_WIDEST = 4  # bytes a number
_fill = jax.jit(jax.lax.dynamic_update_slice_in_dim, static_argnums=3, donate_argnums=0)

Slices = tuple[slice, ...]  # one for each axis, of step 1; start and stop may be None


def load(
    path: str | Path, dtype: Any = jnp.float32, shardings: Params | None = None
) -> tuple[ModelConfig, Params]:
    """Return the model of an HF directory, its parameters as JAX arrays of `dtype`.

    UserError names a file or tensor that is missing, extra or mis-shaped. Without `shardings`, all
    parameters go to the default device.
    """
    config = load_config(path)
    with open_tensors(path) as tensors:
        return config, from_hf(tensors, config, dtype, shardings)


def from_hf(
    tensors: Mapping[str, np.ndarray],  # HF name → array; read one at a time, so it may be lazy
    config: ModelConfig,
    dtype: Any = None,  # of the parameters; None keeps each tensor's own
    shardings: Params | None = None,  # with memory of their own; None: the default device
    bucket: int = BUCKET,  # with shardings, bytes of parameters on the host at a time
) -> Params:
    """Return the parameters made of tensors with HF's names; UserError if they do not fit."""
    rows = parameters.table(config)
    directory.check_names(tensors, config, rows)
    leaves = {}
    for row in rows:
        read = partial(_read, tensors, row, dtype)
        if shardings is None:
            leaves[row.path] = jnp.asarray(read((slice(None),) * len(row.shape)))
        else:
            leaves[row.path] = _placed(read, row.shape, parameters.leaf(shardings, row), bucket)
    return parameters.build(leaves)


def to_hf(params: Params, config: ModelConfig, dtype: Any = None) -> dict[str, np.ndarray]:
    """Return tensors with HF's names and layouts, on the host, in `dtype` or each in its own."""
    return export(params, parameters.table(config), dtype).arrays()


def save(
    path: str | Path,
    config: ModelConfig,
    params: Params,
    dtype: Any = None,
    source: str | Path | None = None,
    chat_template: str = "",
) -> None:
    """Write an HF directory of parameters; see `write_directory`."""
    write_directory(
        path, config, export(params, parameters.table(config), dtype), source, chat_template
    )


def _read(tensors: Mapping[str, Any], row: Row, dtype: Any, index: Slices) -> np.ndarray:
    """Return a slice of a parameter, copied from HF's tensors into the pytree's layout."""
    inner = index[row.depth :]
    hf_index = inner[::-1] if row.transposed else inner
    stack = [range(n)[some] for n, some in zip(row.shape, index[: row.depth], strict=False)]
    out: Any = None
    for position, place in enumerate(product(*stack)):
        part = _part(tensors, row.hf.format(*place), hf_index, row)
        part = part.T if row.transposed else part
        if out is None:
            out = np.empty((math.prod(map(len, stack)), *part.shape), dtype or part.dtype)
        out[position] = part
    return out.reshape(*map(len, stack), *out.shape[1:])


def _part(tensors: Mapping[str, Any], name: str, index: Slices, row: Row) -> np.ndarray:
    """Return a slice of one of HF's tensors after checking its shape."""
    if isinstance(tensors, LazyTensors):
        parameters.check_shape(name, tensors.shape(name), row)
        return tensors.part(name, _in_whole(index, row))
    tensor = np.asarray(tensors[name])
    parameters.check_shape(name, tensor.shape, row)
    return tensor[_in_whole(index, row)]


def _in_whole(index: Slices, row: Row) -> Slices:
    """Return the slice of HF's tensor that holds a slice of a parameter in HF's layout."""
    if not row.joined_size:
        return index
    start, stop, _ = index[0].indices(row.shape[-1])
    return (slice(row.begin + start, row.begin + stop), *index[1:])


def _placed(
    read: Callable[[Slices], np.ndarray],
    shape: tuple[int, ...],
    sharding: jax.sharding.Sharding,
    bucket: int,
) -> jax.Array:
    """Return an array whose slices are read separately for each device of this host."""
    owners = defaultdict(list)
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        bounds = (part.indices(size)[:2] for part, size in zip(index or (), shape, strict=True))
        owners[tuple(bounds)].append(device)
    shards = [
        shard
        for bounds, devices in owners.items()
        for shard in _on_devices(read, bounds, devices, bucket)
    ]
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def _on_devices(
    read: Callable[[Slices], np.ndarray],
    bounds: tuple[tuple[int, int], ...],
    devices: list[jax.Device],
    bucket: int,
) -> list[jax.Array]:
    """Return a slice on each device, read along its first axis at most `bucket` bytes at a time."""
    (start, stop), *rest = bounds
    inner = tuple(slice(*each) for each in rest)
    row_bytes = math.prod(stop - start for start, stop in rest) * _WIDEST
    size = min(max(1, bucket // row_bytes), stop - start)
    wholes: list[jax.Array] = []
    for first in range(start, stop, size):
        part = read((slice(first, min(first + size, stop)), *inner))
        if size < stop - start and not wholes:
            shape = (stop - start, *part.shape[1:])
            wholes = [jnp.zeros(shape, part.dtype, device=device) for device in devices]
        # No alias: the update donates trained parameters.
        parts = [jax.device_put(part, device, may_alias=False) for device in devices]
        if wholes:
            parts = [_fill(w, p, first - start, 0) for w, p in zip(wholes, parts, strict=True)]
        wholes = jax.block_until_ready(parts)
    return wholes
