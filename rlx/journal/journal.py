"""A run's journal on disk: files of records, appended by a thread of its own and flushed.

any thread   append(kind, …) ─▶ number     writer thread   encode ─▶ write ─▶ fsync within 1 s

WORKDIR/journal/00000000000000000000.records, …    named after the number of the first record
"""

import os
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from rlx.base import DiskFull, Group, UserError
from rlx.journal import records
from rlx.journal.records import Record
from rlx.system.atomic_directory import flush, is_full

FLUSH_SECONDS = 0.9  # from the first unflushed byte to its fsync
_FILES = 16  # files of a full journal
_MOST = 64 << 20  # bytes of a file
_SUFFIX = ".records"


class Place(NamedTuple):
    """Where a record is."""

    path: Path
    begin: int
    end: int

    def read(self) -> Record:
        """Return the record; UserError if it is damaged or gone."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self.begin)
                return next(records.scan(file.read(self.end - self.begin)))
        except (OSError, StopIteration):
            what = f"{self.path} is damaged at byte {self.begin}; give other steps"
            raise UserError(what) from None


class Journal:
    """Appends records to files of a directory, `keep` bytes at most; with 0 it does nothing."""

    def __init__(self, directory: Path, number: int, keep: int):
        self._directory, self._next, self._keep = directory, number, keep  # number of the next one
        self._most = min(keep // _FILES, _MOST)
        self._error: Exception | None = None
        self._lock, self._queue = threading.Lock(), SimpleQueue[Any]()
        self._handle, self._size = -1, 0  # of the newest file
        self._due: float | None = None  # time of the next fsync
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        if keep:
            self._thread.start()

    def append(self, kind: str, fields: Mapping[str, Any], group: Group | None = None) -> int:
        """Note an event, from any thread and without waiting; return its number, −1 if off."""
        if not self._keep:
            return -1
        with self._lock:
            number, self._next = self._next, self._next + 1
            self._queue.put((number, kind, fields, group))
            return number

    def check(self) -> None:
        """Raise UserError if a record could not be written."""
        if self._error is None:
            return
        full = is_full(self._error)
        kind, how = (DiskFull, "free some space") if full else (UserError, "correct it")
        remedy = f"{how}, or set journal.keep=0 to run without a journal"
        raise kind(f"cannot write {self._directory}: {self._error}; {remedy}") from self._error

    def close(self) -> None:
        """Write and flush what was appended, and end the thread."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join()

    def _run(self) -> None:
        item: Any = ()
        while item is not None:
            left = None if self._due is None else max(0.0, self._due - time.monotonic())
            try:
                item = self._queue.get(timeout=left)
            except Empty:
                item = ()
            try:
                if item and self._error is None:
                    self._write(*item)
                if item is None or (self._due and self._due <= time.monotonic()):
                    self._flush()
            except Exception as error:  # `check` raises it; what follows is not written
                self._error = error
        if self._handle >= 0:
            os.close(self._handle)

    def _write(
        self, number: int, kind: str, fields: Mapping[str, Any], group: Group | None
    ) -> None:
        data = records.encode(number, kind, fields, records.pack(group) if group else b"")
        if self._handle < 0 or self._size > self._most:
            self._begin(number)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(self._handle, view) :]
        except OSError:
            os.ftruncate(self._handle, self._size)
            raise
        self._size += len(data)
        self._due = self._due or time.monotonic() + FLUSH_SECONDS

    def _flush(self) -> None:
        self._due = None
        if self._handle >= 0:
            os.fsync(self._handle)

    def _begin(self, number: int) -> None:
        """Begin the file of record `number`, and delete the oldest files above the bound."""
        self._flush()
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / f"{number:020d}{_SUFFIX}"
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        if self._handle >= 0:  # not before the next one is open, or the thread would close it twice
            os.close(self._handle)
        self._handle, self._size = handle, os.fstat(handle).st_size
        flush([self._directory])
        left = self._keep - self._most
        for old in reversed(_files(self._directory)[:-1]):
            left -= old.stat().st_size
            if left < 0:
                old.unlink()


def read(directory: Path, first: int = 0) -> Iterator[tuple[Record, Place]]:
    """Yield the records of a journal from number `first` on, up to the first damage."""
    for path, entries, _ in _intact(directory, first):
        for record in entries:
            if record.number >= first:
                yield record, Place(path, record.begin, record.end)


def cut(directory: Path, first: int = 0) -> tuple[int, int]:
    """Remove what follows the first damage; return bytes removed, and the next record's number."""
    removed, number, intact = 0, first, set()
    for path, entries, damaged in _intact(directory, first):
        intact.add(path)
        number = entries[-1].number + 1 if entries else int(path.stem)
        if damaged:
            os.truncate(path, path.stat().st_size - damaged)
            removed = damaged
    for path in _files(directory, first):
        if path not in intact:
            removed += path.stat().st_size
            path.rename(path.with_suffix(".damaged"))  # which no reader takes
    return removed, max(number, first)


def _intact(directory: Path, first: int) -> Iterator[tuple[Path, list[Record], int]]:
    """Yield each file, its records and its damaged bytes, up to the first damage or gap."""
    due: int | None = None  # number of the next record
    for path in _files(directory, first):
        data, due = path.read_bytes(), int(path.stem) if due is None else due
        entries = list(records.scan(data))
        # A start that could not use the records before it may leave a gap.
        if entries and due != entries[0].number and entries[0].fields.get("whole", True):
            return
        damaged = len(data) - (entries[-1].end if entries else 0)
        yield path, entries, damaged
        if damaged:
            return
        due = entries[-1].number + 1 if entries else due


def _files(directory: Path, first: int = 0) -> list[Path]:
    """Return the files with records from number `first` on, oldest first."""
    paths = sorted(directory.glob(f"*{_SUFFIX}"))
    return paths[sum(int(path.stem) <= first for path in paths[1:]) :]
