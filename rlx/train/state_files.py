"""The train state in a checkpoint, by orbax: every host writes and reads its own shards.

    CHECKPOINT/state/ocdbt.process_I/       the shards of host I, as they are: numbers hardly shrink
    CHECKPOINT/state/{manifest.ocdbt, …}    what there is and where, by host 0 when all have written

A state may be restored to other shardings than it was saved with, on fewer or more hosts.
"""

import asyncio
import math
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from rlx.base import UserError

BUCKET = 1 << 30  # bytes that are read at a time


def begin(path: Path, state: Any) -> Future[None]:
    """Begin to write a pytree of arrays into a checkpoint's directory.

    What they hold now is written: they may be given up when this returns.

    Returns:
      what ends when all is there, or raises what kept it from that; to be asked in any thread.
    """
    import orbax.checkpoint as ocp  # takes a second
    from etils import epath

    place, leaves = _place(path), _named_leaves(state)
    place.mkdir(parents=True, exist_ok=True)
    handler = ocp.PyTreeCheckpointHandler(use_compression=False)
    arguments = ocp.args.PyTreeSave(leaves)
    with ThreadPoolExecutor(1) as fresh:  # the caller's thread may run an event loop
        parts = fresh.submit(asyncio.run, handler.async_save(epath.Path(place), args=arguments))
        writing = parts.result() or []

    def finish() -> None:
        for part in writing:
            part.result()
        handler.finalize(epath.Path(place))

    thread = ThreadPoolExecutor(1, "checkpoint")
    done = thread.submit(finish)
    thread.shutdown(wait=False)
    return done


def read(path: Path, abstract: Any) -> Any:
    """Read the state of a checkpoint.

    Args:
      abstract: pytree of arrays or `jax.ShapeDtypeStruct` (with a sharding where the restored array
        should have one) of the state's structure.

    Raises:
      UserError: its state has other parameters or shapes than `abstract`.
    """
    return _read(path, abstract, whole=True)


def read_part(path: Path, abstract: Any) -> Any:
    """Read some of a checkpoint's state, say `{"params": shapes}`, and nothing else of it.

    Raises:
      UserError: the state has no such leaf, or one of another shape.
    """
    return _read(path, abstract, whole=False)


def dtype_of(path: Path, name: str) -> Any:
    """Return the dtype of one leaf of a checkpoint's state, say of `"params.embed"`.

    Raises:
      UserError: the state has no such leaf.
    """
    stored = _stored(_reader(), path)
    if name not in stored:
        raise UserError(f"checkpoint {path} has no {name}; it is not one of a train state")
    return stored[name].dtype


def _named_leaves(tree: Any) -> dict[str, Any]:
    """Return leaves by path: orbax sees one flat dict, whatever containers the optimizer uses."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _reader() -> Any:
    import orbax.checkpoint as ocp

    return ocp.PyTreeCheckpointHandler()


def _place(path: Path) -> Path:
    return Path(path).absolute() / "state"


def _stored(reader: Any, path: Path) -> dict[str, Any]:
    """Return shape and dtype of each leaf that a checkpoint's state has, by name."""
    from etils import epath

    return reader.metadata(epath.Path(_place(path))).tree


def _read(path: Path, abstract: Any, *, whole: bool) -> Any:
    """Read the leaves of `abstract` to where it has them; `whole`: there must be no others."""
    import orbax.checkpoint as ocp
    from etils import epath

    wanted, reader = _named_leaves(abstract), _reader()
    stored = _stored(reader, path)
    if not whole:
        stored = {name: stored[name] for name in wanted if name in stored}
    _require_same(path, stored, wanted)
    leaves: dict[str, Any] = {}
    for names in _buckets(wanted):
        part = {name: wanted[name] for name in names}
        places = {
            name: ocp.ArrayRestoreArgs(sharding=_sharding(leaf), dtype=leaf.dtype)
            for name, leaf in part.items()
        }
        arguments = ocp.args.PyTreeRestore(item=part, restore_args=places, partial_restore=True)
        leaves |= reader.restore(epath.Path(_place(path)), args=arguments)
        jax.block_until_ready(leaves)
    structure = jax.tree_util.tree_structure(abstract)
    return jax.tree_util.tree_unflatten(structure, [leaves[name] for name in wanted])


def _buckets(wanted: dict[str, Any]) -> Iterator[list[str]]:
    """Yield the names of leaves of which this host reads at most BUCKET bytes together, or one."""
    names: list[str] = []
    total = 0
    for name, leaf in wanted.items():
        sharding = _sharding(leaf)
        shard = math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        size = shard * len(sharding.addressable_devices)
        if names and total + size > BUCKET:
            yield names
            names, total = [], 0
        names.append(name)
        total += size
    yield names


def _sharding(leaf: Any) -> jax.sharding.Sharding:
    """Return the leaf's own sharding, or the first device's."""
    own = getattr(leaf, "sharding", None)
    return own or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])


def _require_same(path: Path, stored: Any, wanted: dict[str, jax.ShapeDtypeStruct]) -> None:
    def described(leaves):
        return {n: f"{leaf.dtype}{list(leaf.shape)}" for n, leaf in leaves.items()}

    have, want = described(stored), described(wanted)
    for name in [*want, *have]:
        if have.get(name) != want.get(name):
            raise UserError(
                f"checkpoint {path} has {name} as {have.get(name, 'nothing')}, this run "
                f"wants {want.get(name, 'nothing')}; use the model and optimizer it was made with, "
                "or another workdir"
            )
