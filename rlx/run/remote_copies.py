"""Copy a run's checkpoints and exports to an object store, and begin from the newest one there.

    COPY_TO/NAME_OF_WORKDIR/checkpoints/step_00000012/…
                            checkpoints/step_00000012.complete    written last, deleted first
                            exports/…, exports/….complete, and the run's records

A thread makes the store as the workdir is: after each checkpoint, and at the end. A store that
fails ends no run; what was not copied is copied later.
"""

import re
import shutil
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from rlx.base import UserError, install
from rlx.observe.metrics import RECORDS, STARTS
from rlx.observe.writers import BOARD_ID
from rlx.train import checkpoint

COMPLETE = ".complete"
_FILES = (*RECORDS, STARTS, BOARD_ID, "config.json", "environment.json", "skipped.jsonl")
_LONGEST_PAUSE = 300.0  # seconds to the next try; the first is 2, the others double
_LAST_TRIES = 3  # at the end of a run
_NAME = re.compile(r"(?:step_|epoch\d+epochstep\d+globalstep)(\d+)")  # of what is complete


class RemoteCopies:
    """A hook that keeps copies of one run; `fetch` comes before it, `close` after it."""

    def __init__(self, config: ConfigDict, workdir: Path, say: Callable[[str], None]):
        """Raise UserError for a place that fsspec does not know."""
        self._place, self._workdir, self._say = config.checkpoint.copy_to, workdir, say
        self._keep = {"checkpoints": config.checkpoint.keep, "exports": config.export.keep}
        self._auto = config.checkpoint.recover_mode == "auto"
        self._due, self._ending, self.failures = threading.Event(), False, 0
        self._thread = threading.Thread(target=self._run, name="copies", daemon=True)
        try:
            from fsspec.core import url_to_fs

            self._store, root = url_to_fs(self._place.rstrip("/"))
        except (ImportError, ValueError) as error:
            remedy = f"write s3://BUCKET/PREFIX, and install what it needs: {install('s3')}"
            what = f"cannot use checkpoint.copy_to={self._place}: {error}"
            raise UserError(f"{what}; {remedy}") from error
        self._root = f"{root}/{workdir.absolute().name}"

    def fetch(self) -> None:
        """Bring the newest whole checkpoint and the records into a new workdir; or UserError."""
        place = self._workdir / "checkpoints"
        if checkpoint.checkpoints(place):
            return
        try:
            names = [*self._complete("checkpoints")]
            for name in reversed(names) if self._auto else ():
                temporary = place / f".writing-{name}"  # an interrupted one goes at the next start
                shutil.rmtree(temporary, ignore_errors=True)
                source = f"{self._root}/checkpoints/{name}/"
                self._store.get(source, f"{temporary}/", recursive=True)
                if problem := checkpoint.verify(temporary):
                    self._say(f"skipping damaged copy {self._place}/{name}: {problem}")
                    continue
                for file in (file for file in _FILES if not (self._workdir / file).exists()):
                    with suppress(FileNotFoundError):
                        self._store.get_file(f"{self._root}/{file}", str(self._workdir / file))
                temporary.rename(place / name)
                self._say(f"{name} was fetched from {self._place}")
                return
        except Exception as error:
            what = f"cannot read checkpoint.copy_to={self._place}: {error}"
            raise UserError(f"{what}; correct it, or unset it to begin without copies") from error
        if names:
            why = "none of them is whole" if self._auto else "recover_mode=off resumes none"
            remedy = "give another checkpoint.copy_to or --workdir"
            raise UserError(f"{self._root} has checkpoints, and {why}; {remedy}")

    def on_begin(self, config: dict[str, Any], workdir: Path, step: int) -> None:
        self._thread.start()

    def on_checkpoint(self, step: int, directory: Path) -> None:
        self._due.set()

    def close(self) -> None:
        """Wait until all is copied, or cannot be; not in a hook, which a signal cuts off."""
        self._ending = True
        self._due.set()
        if self._thread.is_alive():
            self._say(f"copying what is new to {self._place}")
        while self._thread.is_alive():
            self._thread.join(0.2)  # so that a signal is seen

    def _run(self) -> None:
        tries = 0  # in a row that failed
        while True:
            self._due.wait(min(2.0**tries, _LONGEST_PAUSE) if tries else None)
            self._due.clear()
            last = self._ending
            try:
                self._copy()
                tries = 0
            except Exception as error:  # of the store, its library or the disk
                tries, self.failures = tries + 1, self.failures + 1
                if last or tries & (tries - 1) == 0:
                    what = f"cannot copy to {self._place}, failure {self.failures}: {error}"
                    self._say(f"{what}; the run goes on, and what is missing is copied later")
            if last and not 0 < tries < _LAST_TRIES:
                return

    def _copy(self) -> None:
        """Make the store as the workdir is now."""
        for kind, keep in self._keep.items():
            marks = self._complete(kind)
            for directory in (self._workdir / kind).glob("*"):
                try:
                    if _NAME.fullmatch(directory.name):
                        self._put(f"{self._root}/{kind}/{directory.name}", directory, marks)
                except FileNotFoundError:
                    if directory.exists():  # else it is deleted, because there are newer ones
                        raise
            for name in [*self._complete(kind)][:-keep] if keep else ():
                self._forget(f"{self._root}/{kind}/{name}")
        for file in _FILES:
            if (self._workdir / file).exists():
                self._store.put_file(str(self._workdir / file), f"{self._root}/{file}")

    def _put(self, target: str, directory: Path, marks: Mapping[str, str]) -> None:
        if marks.get(directory.name) == (mark := _mark(directory)):
            return
        self._forget(target)
        self._store.put(f"{directory}/", f"{target}/", recursive=True)
        if _mark(directory) == mark:
            self._store.pipe_file(f"{target}{COMPLETE}", mark.encode())

    def _complete(self, kind: str) -> dict[str, str]:
        """Return name → mark of what is complete in the store, by step."""
        self._store.invalidate_cache()
        place, copies = f"{self._root}/{kind}", []
        for path in self._store.ls(place, detail=False) if self._store.exists(place) else ():
            match = _NAME.fullmatch(path.removesuffix(COMPLETE).rpartition("/")[2])
            if match and path.endswith(COMPLETE):
                copies.append((int(match[1]), match[0], path))
        return {name: self._store.cat_file(path).decode() for _, name, path in sorted(copies)}

    def _forget(self, path: str) -> None:
        for each in (f"{path}{COMPLETE}", path):
            with suppress(FileNotFoundError):
                self._store.rm(each, recursive=True)


def _mark(directory: Path) -> str:
    """Return the content of a directory's marker: its manifest, or when it was written."""
    manifest = directory / "manifest.json"
    return manifest.read_text() if manifest.exists() else str(directory.stat().st_mtime_ns)
