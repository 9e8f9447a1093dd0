"""Tenants, one for each API key: sessions, models, samplers, results, and checkpoints on disk."""

import asyncio
import json
import re
import secrets
import shutil
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rlx.agents.dialects import ApiError
from rlx.base import UserError
from rlx.system.atomic_directory import atomic_directory
from rlx.tinker.lora_trainer import LoraState

KINDS = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
UNNAMED = "unnamed"  # kind of a sampler's weights that end with their session
_PATH = re.compile(rf"tinker://([\w-]+:train:\d+)/({'|'.join([*KINDS, UNNAMED])})/(\w[\w.-]*)")
_SILENCE = 1800.0  # seconds without a heartbeat that end a session
_KEPT = 200  # fetched results
_RECORD = "record.json"


@dataclass(eq=False)
class TrainedModel:
    """A client's model with the id SESSION:train:N, whose numbered requests run in order from 0."""

    id: str
    record: dict[str, Any]  # describes it to clients, also in its checkpoints
    state: LoraState | None = None  # until its first request has run
    next: int = 0  # number of the request that runs now, or will
    _turn: asyncio.Condition = field(default_factory=asyncio.Condition)

    def trained(self) -> LoraState:
        """Return its adapters; UserError if they could not be made."""
        if self.state is None:
            raise UserError(f"{self.id} could not be created; its first request says why")
        return self.state

    async def run(self, number: int, work: Callable[["TrainedModel"], Any], on: Executor) -> Any:
        """Return the result of `work`, called after the requests with lower numbers."""
        async with self._turn:
            await self._turn.wait_for(lambda: number == self.next)
            try:
                # A session's end cancels the wait, not the work, which no other may overlap.
                call = asyncio.get_running_loop().run_in_executor(on, work, self)
                return await asyncio.shield(call) or {"model_id": self.id}
            finally:
                self.next += 1
                self._turn.notify_all()


class Tenant:
    """Everything of one API key, by names that begin with a session's; others are unknown (404).

    A sampler is the path of a checkpoint, or None for the base.
    """

    def __init__(self, root: Path):
        self._root, self._heard = root, dict[str, float]()  # session → last heartbeat
        self.models: dict[str, TrainedModel] = {}
        self.samplers: dict[str, str | None] = {}
        self.futures: dict[str, asyncio.Task] = {}
        self._fetched = deque[str]()
        self._remove_unnamed("*")  # of a server that was killed

    def open(self) -> str:
        """Return a new session."""
        name = secrets.token_hex(8)
        self._heard[name] = time.monotonic()
        return name

    def end_silent(self) -> None:
        """End the sessions of clients that have gone."""
        now = time.monotonic()
        for session in [s for s, last in self._heard.items() if now - last > _SILENCE]:
            self.end(session)

    def beat(self, session: Any) -> str:
        """Note that a session is alive; ApiError (410) unless it is open."""
        if session not in self._heard:
            raise ApiError(410, f"session {session!r:.80} has ended; make a new ServiceClient")
        self._heard[session] = time.monotonic()
        return session

    def end(self, session: str) -> None:
        """Forget all of an open session except its checkpoints with names."""
        if not self._heard.pop(session, None):  # of others' files a pattern could be part
            return
        parts: tuple[dict[str, Any], ...] = self.models, self.samplers, self.futures
        for part in parts:
            for name in [name for name in part if name.startswith(f"{session}:")]:
                if isinstance(item := part.pop(name), asyncio.Task):
                    item.cancel()
        self._remove_unnamed(session)

    def _remove_unnamed(self, session: str) -> None:
        for weights in self._root.glob(f"{session}:*/{UNNAMED}"):
            shutil.rmtree(weights, ignore_errors=True)

    def find(self, what: str, name: Any) -> Any:
        """Return one of `models`, `samplers` or `futures`; ApiError (404) if there is none."""
        if name not in getattr(self, what):
            raise ApiError(404, f"there is no {name!r:.80} among your {what}; create it first")
        return getattr(self, what)[name]

    def promise(self, name: str, work: Coroutine) -> None:
        """Begin what a client may fetch by `name`."""
        self.futures[name] = task = asyncio.create_task(work)
        # Else asyncio reports an error that no client fetched.
        task.add_done_callback(lambda task: task.cancelled() or task.exception())

    def note_fetched(self, name: str) -> None:
        """Note that a client fetched a result; keep the latest, because an answer may be lost."""
        self._fetched.append(name)
        if len(self._fetched) > _KEPT:
            self.futures.pop(self._fetched.popleft(), None)

    def save(
        self, path: str, record: dict[str, Any], write: Callable[[Path], None], overwrite: bool
    ) -> dict[str, Any]:
        """Write the checkpoint tinker://RUN/KIND/NAME; UserError if that is taken or malformed."""
        if not _PATH.fullmatch(path):
            raise UserError(f"{path} is malformed; name it with letters, digits, '_', '.' and '-'")
        with suppress(ApiError):  # there is none, or it has expired
            self.checkpoint(path)
            if not overwrite:
                raise UserError(f"{path} is taken; choose another name, or overwrite it")
        with atomic_directory(self._root / path.removeprefix("tinker://")) as fresh:
            write(fresh)
            (fresh / _RECORD).write_text(json.dumps(record | {"saved": time.time()}))
        return {"path": path}

    def checkpoint(self, path: Any) -> tuple[Path, dict[str, Any]]:
        """Return a checkpoint's directory and record; ApiError (404) if there is none now."""
        if isinstance(path, str) and _PATH.fullmatch(path):
            where = self._root / path.removeprefix("tinker://")
            if (where / _RECORD).exists():
                record = json.loads((where / _RECORD).read_text())
                if time.time() < (record["expires"] or float("inf")):
                    return where, record
                shutil.rmtree(where, ignore_errors=True)
        raise ApiError(404, f"there is no checkpoint {path!r:.200}; list_checkpoints names yours")

    def listed_checkpoints(self, run: str) -> Iterator[dict[str, Any]]:
        """Yield the checkpoints of a run, or of all for "*", as the API describes them."""
        for where in sorted(self._root.glob("*/*/*")):
            path = f"tinker://{where.relative_to(self._root)}"
            match = _PATH.fullmatch(path)
            if not match or match[2] == UNNAMED or run not in ("*", match[1]):
                continue
            with suppress(ApiError):  # it has expired
                record, files = self.checkpoint(path)[1], where.rglob("*")
                yield {
                    "checkpoint_id": f"{match[2]}/{match[3]}", "checkpoint_type": KINDS[match[2]],
                    "tinker_path": path, "time": utc(record["saved"]),
                    "size_bytes": sum(file.stat().st_size for file in files),
                    "expires_at": record["expires"] and utc(record["expires"]),
                    "user_metadata": record["checkpoint_metadata"],
                }  # fmt: skip


def utc(seconds: float) -> str:
    """Return seconds since 1970 as the API writes a time."""
    return datetime.fromtimestamp(seconds, UTC).isoformat()
