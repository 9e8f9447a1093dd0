"""The train state in a checkpoint, by orbax: every host writes and reads its own shards.

    CHECKPOINT/state/ocdbt.process_I/       the shards of host I, uncompressed
    CHECKPOINT/state/host_I.written         host I = 1, 2, … has written them
    CHECKPOINT/state/{manifest.ocdbt, …}    index, by host 0 when all have written

The conductor reports a host that cannot write to host 0. A state may be restored to other
shardings than it was saved with, on fewer or more hosts.
"""

import asyncio
import errno
import logging
import math
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

import jax

from rlx.base import DiskFull, UserError
from rlx.model.tensors import BUCKET
from rlx.system.atomic_directory import flush, is_full
from rlx.train.batch_update import require_same

POLL_SECONDS = 0.05  # how often host 0 checks that the others have written


def begin(path: Path, state: Any) -> Future[None]:
    """Begin to write a pytree of arrays, which may be donated then, into a checkpoint's directory.

    The future ends when this host has written its shards, and on host 0 when all have. UserError if
    this host does not see host 0's directory.
    """
    import orbax.checkpoint as ocp  # takes a second

    logging.getLogger("absl").addFilter(_shows_no_stack)  # rlx reports orbax's errors in a line
    place = _place(path)
    if not place.parent.is_dir():
        raise UserError(
            f"{path} exists on host 0, not on host {jax.process_index()}; give a --workdir on "
            "storage that all hosts share"
        )
    handler = ocp.PyTreeCheckpointHandler(use_compression=False)
    arguments = ocp.args.PyTreeSave(_named_leaves(state))
    with _disk_full_by_name(path), ThreadPoolExecutor(1) as fresh:  # the caller may run a loop
        place.mkdir(exist_ok=True)
        parts = fresh.submit(asyncio.run, handler.async_save(place, args=arguments)).result() or []

    def finish() -> None:
        with _disk_full_by_name(path):
            for part in parts:
                part.result()
            if index := jax.process_index():  # flush the shards before host 0 may count on them
                flush(Path(place).glob(f"*process_{index}/**/*"))
                Path(place, f"host_{index}.written").touch()
        if not jax.process_index():
            _wait_for_others(Path(place))
            handler.finalize(place)

    thread = ThreadPoolExecutor(1, "checkpoint")
    done = thread.submit(finish)
    thread.shutdown(wait=False)
    return done


def _shows_no_stack(record: logging.LogRecord) -> bool:
    return not (record.exc_info and "orbax" in record.pathname)


@contextmanager
def _disk_full_by_name(path: Path) -> Iterator[None]:
    """Raise DiskFull on hosts other than 0, which get only an error's class and message."""
    try:
        yield
    except Exception as error:
        if jax.process_index() and is_full(error):
            raise DiskFull(f"no disk space for its part of {path}") from error
        raise


def _wait_for_others(place: Path) -> None:
    """Wait until all other hosts have written; FileNotFoundError if the save is abandoned."""
    for index in range(1, jax.process_count()):
        marker = place / f"host_{index}.written"
        while not marker.exists():
            if not place.is_dir():  # host 0 removed it because another host could not write
                raise FileNotFoundError(errno.ENOENT, "the save was abandoned", str(place))
            time.sleep(POLL_SECONDS)
        marker.unlink()


def read(
    path: Path,
    abstract: Any,  # pytree of arrays or `jax.ShapeDtypeStruct`, with shardings or for one device
) -> Any:
    """Read the state of a checkpoint; UserError if its parameters or shapes are not these."""
    import orbax.checkpoint as ocp

    targets, reader = _named_leaves(abstract), ocp.PyTreeCheckpointHandler()
    require_same(path, *map(_shapes_text, (reader.metadata(_place(path)).tree, targets)))
    leaves: dict[str, Any] = {}
    for part in _buckets(targets):
        places = {
            name: ocp.ArrayRestoreArgs(sharding=sharding_of(leaf), dtype=leaf.dtype)
            for name, leaf in part.items()
        }
        arguments = ocp.args.PyTreeRestore(item=part, restore_args=places, partial_restore=True)
        leaves |= jax.block_until_ready(reader.restore(_place(path), args=arguments))
    return jax.tree.unflatten(jax.tree.structure(abstract), [leaves[name] for name in targets])


def _named_leaves(tree: Any) -> dict[str, Any]:
    """Return leaves by path, for orbax in one flat dict whatever the optimizer's containers."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _shapes_text(leaves: Mapping[str, Any]) -> dict[str, str]:
    return {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in leaves.items()}


def _place(path: Path) -> Any:
    from etils import epath  # orbax's paths

    return epath.Path(Path(path).absolute() / "state")


def _buckets(targets: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield leaves in parts, of which this host reads at most BUCKET bytes and a leaf each."""

    def size(leaf: Any) -> int:
        sharding = sharding_of(leaf)
        shard = math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        return shard * len(sharding.addressable_devices)

    ends = accumulate(size(leaf) for leaf in targets.values())
    for _, pairs in groupby(zip(targets, ends, strict=True), lambda pair: pair[1] // BUCKET):
        yield {name: targets[name] for name, _ in pairs}


def sharding_of(leaf: Any) -> jax.sharding.Sharding:
    """Return the leaf's own sharding, or the first device's."""
    sharding = getattr(leaf, "sharding", None)
    return sharding or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
