"""Checkpoints: everything a run needs to resume, written to a fresh directory and renamed.

    DIRECTORY/step_00000012/
      state/                     parameters, optimizer, step (orbax, sharded)
      host.json                  state of the host program
      manifest.json              size and blake2b of every other file; written last

A directory named step_* is complete, because it is renamed when it is. The next save removes the
remains of a killed one.
"""

import hashlib
import json
import logging
import re
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rlx.base import DiskFull, UserError
from rlx.system.atomic_directory import exchange, flush, is_full

_NAME = re.compile(r"step_(\d{8,})")
_TEMPORARY = ".writing-"
_REPLACED = f"{_TEMPORARY}replaced-"
_SPACE_MARGIN = 1 << 20  # bytes for metadata and the host's files


class Restored(NamedTuple):
    """The content of a checkpoint."""

    state: Any
    host: dict


def save(directory: str | Path, step: int, state: Any, host: dict, *rest: Any, **more: Any) -> Path:
    """Write a checkpoint of a pytree of JAX's arrays, of any dtype and sharding; see `begin`."""
    import jax

    from rlx.train import state_files

    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree_util.tree_leaves(state))
    begin_state = partial(state_files.begin, state=state)
    return begin(directory, step, begin_state, size, host, *rest, **more)()


def begin(
    directory: str | Path,  # where checkpoints live; made if missing
    step: int,  # train batches done; a checkpoint of the same step is replaced
    begin_state: Callable[[Path], Future[None]],  # begins to write the state, as `Update.save`
    size: int,  # bytes of the state
    host: dict,  # JSON-able; the dataset's cursor, staleness counters, seeds, config
    keep: int = 2,  # how many checkpoints to keep, ≥ 1
    beside: int = 0,  # bytes that must also be free, for files written after the checkpoint
) -> Callable[[], Path]:
    """Begin to write a checkpoint of the present state; return a function that finishes it.

    Call that before the next save, in any thread; it returns the checkpoint's directory. Both raise
    DiskFull if there is no space. Nothing is left behind then, and older checkpoints stay.
    """
    directory = Path(directory).absolute()
    directory.mkdir(parents=True, exist_ok=True)
    _remove_temporary(directory)
    if shutil.disk_usage(directory).free < (needed := size + beside + _SPACE_MARGIN):
        raise _no_space(directory, needed)
    temporary = directory / f"{_TEMPORARY}{step:08d}"
    final = directory / f"step_{step:08d}"
    with _whole_or_nothing(temporary, size):
        temporary.mkdir()
        (temporary / "host.json").write_text(json.dumps(host, ensure_ascii=False, indent=1))
        state = begin_state(temporary)

    def finish() -> Path:
        with _whole_or_nothing(temporary, size):
            state.result()
            (temporary / "manifest.json").write_text(json.dumps(_manifest(temporary), indent=1))
            flush([*temporary.rglob("*"), temporary])
            _rename(temporary, final)
        paths = [path for path in checkpoints(directory) if step_of(path) <= step]
        for old in paths[: -max(keep, 1)]:  # later ones are damaged or were abandoned
            shutil.rmtree(old)
        return final

    return finish


@contextmanager
def _whole_or_nothing(temporary: Path, size: int) -> Iterator[None]:
    """Remove a checkpoint that could not be written; raise DiskFull if the disk is full."""
    try:
        yield
    except Exception as error:
        _remove_failed(temporary)
        if is_full(error) and not isinstance(error, DiskFull):  # which names another process
            raise _no_space(temporary.parent, size) from error
        raise


def checkpoints(directory: str | Path) -> list[Path]:
    """Return the complete checkpoints of a directory, oldest first."""
    directory = Path(directory)
    if not directory.is_dir():
        return []
    paths = [path for path in directory.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(paths, key=step_of)


def step_of(checkpoint: Path) -> int:
    """Return the train step in a checkpoint's name; ValueError where there is none."""
    match = _NAME.fullmatch(checkpoint.name)
    if match is None:
        raise ValueError(f"{checkpoint} is not named step_<number>")
    return int(match[1])


def restore_latest(
    directory: str | Path,
    read_state: Callable[[Path], Any],  # of a checkpoint, as `Update.restore`
    say: Callable[[str], None] | None = None,  # reports one that is skipped; None: a warning
) -> Restored | None:
    """Read the newest checkpoint that matches its manifest; None where there are no checkpoints.

    UserError if every checkpoint is damaged, or the state has other shapes.
    """
    _remove_temporary(Path(directory))
    if not (path := _newest_whole(directory, say)):
        return None
    for later in checkpoints(directory):
        if step_of(later) > step_of(path):  # damaged: it is none of those that a save keeps
            set_aside(later)
    return Restored(read_state(path), read_host(path))


def set_aside(damaged: Path) -> Path:
    """Rename a checkpoint to damaged-NAME, in place of an older one of its step; return that."""
    aside = damaged.with_name(f"damaged-{damaged.name}")
    shutil.rmtree(aside, ignore_errors=True)
    return damaged.rename(aside)


def _newest_whole(directory: str | Path, say: Callable[[str], None] | None = None) -> Path | None:
    paths = checkpoints(directory)
    say = say or logging.getLogger(__name__).warning
    for path in reversed(paths):
        problem = verify(path)
        if problem is None:
            return path
        say(f"skipping damaged checkpoint {path}: {problem}")
    if paths:
        raise UserError(
            f"none of the {len(paths)} checkpoints in {directory} is whole; move them away or set "
            "checkpoint.recover_mode=off to begin anew"
        )
    return None


def is_one(path: Path) -> bool:
    """Return whether a path is a checkpoint, whole or not."""
    return bool(_NAME.fullmatch(path.absolute().name)) and (path / "host.json").exists()


def find(source: str | Path) -> Path | None:
    """Return `source` if it is a checkpoint, else the newest whole one in it, or None.

    It may be a directory of them, or a run's with `checkpoints` in it. UserError if the checkpoint,
    or every one there, is damaged.
    """
    source = Path(source)
    if is_one(source):
        if problem := verify(source):
            raise UserError(f"checkpoint {source} is not whole: {problem}; take another")
        return source
    return _newest_whole(source) or _newest_whole(source / "checkpoints")


def read_host(path: Path) -> dict:
    """Return only the host's part of a checkpoint, without touching a device."""
    return json.loads((Path(path) / "host.json").read_text())


def verify(path: Path) -> str | None:
    """Return the first difference between a checkpoint's files and its manifest, or None."""
    path = Path(path)
    try:
        manifest = json.loads((path / "manifest.json").read_text())
    except (OSError, ValueError, RecursionError) as error:
        return f"manifest.json: {error}"
    if not isinstance(manifest, dict):
        return "manifest.json: no JSON object"
    actual = _manifest(path)
    for name in sorted(set(manifest) | set(actual)):
        if name not in actual:
            return f"{name} is missing"
        if actual[name] != manifest.get(name):
            return f"{name} has changed since it was written"
    return None


def _manifest(path: Path) -> dict[str, list]:
    """Return [bytes, blake2b] of every file below `path`, except the manifest."""

    def described(file: Path) -> list:
        with open(file, "rb") as opened:
            return [file.stat().st_size, hashlib.file_digest(opened, "blake2b").hexdigest()]

    files = sorted(f for f in path.rglob("*") if f.is_file() and f != path / "manifest.json")
    with ThreadPoolExecutor() as pool:
        entries = pool.map(described, files)
        return dict(zip((str(f.relative_to(path)) for f in files), entries, strict=True))


def _rename(temporary: Path, final: Path) -> None:
    """Rename a new checkpoint, and first one of the same step that it replaces."""
    if final.exists() and exchange(temporary, final):
        _remove(temporary)
    elif final.exists():
        replaced = final.with_name(f"{_REPLACED}{final.name}")
        final.rename(replaced)
        temporary.rename(final)
        _remove(replaced)
    else:
        temporary.rename(final)
    flush([final.parent])


def _remove_temporary(directory: Path) -> None:
    """Undo a replacement killed between its two renames; remove other remains of killed saves."""
    for path in directory.glob(f"{_TEMPORARY}*"):
        final = directory / path.name.removeprefix(_REPLACED)
        if path.name.startswith(_REPLACED) and not final.exists():
            path.rename(final)
        else:
            _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _remove_failed(temporary: Path, patience: float = 10.0) -> None:
    """Remove the files of a failed save, whose other writers may continue for a while."""
    # tensorstore's threads recreate files: a directory is gone when it is gone twice in a row.
    deadline, absences = time.monotonic() + patience, 0
    while absences < 2 and time.monotonic() < deadline:
        absences = 0 if temporary.exists() else absences + 1
        shutil.rmtree(temporary, ignore_errors=True)
        time.sleep(0.1)


def _no_space(directory: Path, needed: int) -> DiskFull:
    return DiskFull(
        f"no disk space for a checkpoint in {directory}: it needs about {needed / 1e6:.0f} MB, "
        f"{shutil.disk_usage(directory).free / 1e6:.0f} MB are free; free some, or point --workdir "
        "at another disk"
    )
