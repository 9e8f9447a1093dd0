"""Tenants, one for each API key: sessions, models, samplers, results, and checkpoints on disk."""

import json
import re
import secrets
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rlx.agents.dialects import ApiError
from rlx.base import UserError
from rlx.system.atomic_directory import atomic_directory
from rlx.tinker.jax_lora import LoraState

KINDS = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
UNNAMED = "unnamed"  # kind of a sampler's weights that end with their session
_PATH = re.compile(rf"tinker://([\w-]+:train:\d+)/({'|'.join([*KINDS, UNNAMED])})/(\w[\w.-]*)")
_SILENCE = 1800.0  # seconds without a heartbeat that end a session
_KEPT = 200  # fetched results
_RECORD = "record.json"


@dataclass
class InOrder:
    """Numbered requests of a model, which arrive in any order and run in order from 0. Pure."""

    next: int = 0
    waiting: dict[int, Any] = field(default_factory=dict)

    def add(self, number: int, request: Any) -> list[Any]:
        """Return the requests that can run now, in order; a number that came before is ignored."""
        if number >= self.next:
            self.waiting.setdefault(number, request)
        ready = []
        while self.next in self.waiting:
            ready.append(self.waiting.pop(self.next))
            self.next += 1
        return ready


@dataclass(eq=False)
class TrainedModel:
    """A client's model with the id SESSION:train:N."""

    id: str
    record: dict[str, Any]  # describes it to clients, also in its checkpoints
    state: LoraState | None = None  # until its first request has run
    order: InOrder = field(default_factory=InOrder)

    def trained(self) -> LoraState:
        """Return its adapters; UserError if they could not be made."""
        if self.state is None:
            raise UserError(f"{self.id} could not be created; its first request says why")
        return self.state


class Tenant:
    """Everything of one API key; names of other tenants are unknown here (404).

    `models`, `samplers` and `futures` have names that begin with their session's. A sampler is the
    path of a checkpoint, or None for the base.
    """

    def __init__(self, root: Path):
        self._root, self._heard = root, dict[str, float]()  # session → last heartbeat
        self.models: dict[str, TrainedModel] = {}
        self.samplers: dict[str, str | None] = {}
        self.futures: dict[str, Future] = {}
        self._fetched = deque[str]()
        self._remove_unnamed("*")  # of a server that was killed

    def open(self) -> str:
        """Return a new session; end those of clients that have gone."""
        name, now = secrets.token_hex(8), time.monotonic()
        for session in [s for s, last in self._heard.items() if now - last > _SILENCE]:
            self.end(session)
        self._heard[name] = now
        return name

    def beat(self, session: Any) -> str:
        """Note that a session is alive; ApiError (410) unless it is open."""
        if session not in self._heard:
            raise ApiError(410, f"session {session!r:.80} has ended; make a new ServiceClient")
        self._heard[session] = time.monotonic()
        return session

    def end(self, session: str) -> None:
        """Forget what a session has, but for its checkpoints with names."""
        self._heard.pop(session, None)
        for part in (self.models, self.samplers, self.futures):
            for name in [name for name in part if name.startswith(f"{session}:")]:
                del part[name]  # type: ignore[attr-defined]
        self._remove_unnamed(session)

    def _remove_unnamed(self, session: str) -> None:
        for weights in self._root.glob(f"{session}:*/{UNNAMED}"):
            shutil.rmtree(weights, ignore_errors=True)

    def find(self, what: str, name: Any) -> Any:
        """Return one of `models`, `samplers` or `futures`; ApiError (404) if there is none."""
        if name not in getattr(self, what):
            raise ApiError(404, f"there is no {name!r:.80} among your {what}; create it first")
        return getattr(self, what)[name]

    def fetched(self, name: str) -> None:
        """Note that a client has a result; forget those but the latest, as one may be lost."""
        self._fetched.append(name)
        if len(self._fetched) > _KEPT:
            self.futures.pop(self._fetched.popleft(), None)

    def save(
        self, path: str, record: dict[str, Any], write: Callable[[Path], None], overwrite: bool
    ) -> dict[str, Any]:
        """Write the checkpoint tinker://RUN/KIND/NAME; UserError if that is taken or malformed."""
        where = self._root / path.removeprefix("tinker://")
        if not _PATH.fullmatch(path) or (where.exists() and not overwrite):
            raise UserError(f"{path} is taken or malformed; choose another name, or overwrite it")
        with atomic_directory(where) as fresh:
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

    def listed(self, run: str) -> Iterator[dict[str, Any]]:
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
