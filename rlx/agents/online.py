"""Sessions of outside applications, by API key, in an SQLite database.

Each change is committed before its request is answered, so a SIGKILL loses nothing. The write-ahead
log is synced every second, so a power cut loses at most one. Runs on the gateway's event loop.
"""

import asyncio
import hashlib
import hmac
import json
import os
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rlx.agents import trajectories
from rlx.agents.dialects import ApiError
from rlx.agents.session_state import Denied, SessionState
from rlx.agents.sessions import Interaction, Session, TurnPlace
from rlx.base import UserError, explained, seed_of
from rlx.fleet.requests import Sampling
from rlx.fleet.sample import Completion
from rlx.rollout import control_tokens
from rlx.system import jsonl
from rlx.system.threads import in_thread

SWEEP_SECONDS = 1.0  # interval of ending idle sessions and of syncing the log
ADMIN_VARIABLE = "RLX_ADMIN_KEY"
FILE = "sessions.sqlite3"
_FORGET_ROWS = 2000  # rows written between two deletions of unneeded sessions
_KEYS = 100_000  # newest keys, kept even after their sessions are deleted
_SHORTEST = 16  # fewest characters of a given key
_SCHEMA = """
PRAGMA locking_mode = EXCLUSIVE;  -- one process only; without shared memory, for network disks
PRAGMA journal_mode = WAL;
PRAGMA synchronous = NORMAL;
PRAGMA foreign_keys = ON;
CREATE TABLE IF NOT EXISTS sessions (id TEXT PRIMARY KEY, state BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS answers (
    session TEXT NOT NULL REFERENCES sessions ON DELETE CASCADE, answer BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS answers_by_session ON answers (session);
CREATE TABLE IF NOT EXISTS keys (digest TEXT PRIMARY KEY, session TEXT NOT NULL, task TEXT NOT NULL)
"""
_SAVE = "INSERT INTO sessions VALUES (?, ?) ON CONFLICT (id) DO UPDATE SET state = excluded.state"
_FORGET = """
DELETE FROM keys WHERE rowid <= (SELECT max(rowid) FROM keys) - ?
    AND session NOT IN (SELECT id FROM sessions)
"""
_ARRAYS = {
    "tokens": np.int32, "logprobs": np.float32, "versions": np.int32, "kept_sizes": np.int32,
    "kept": np.uint8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class OnlineOptions:
    """Admission and end of applications' sessions."""

    admin_key: str  # API key that opens, lists and exports sessions
    idle_seconds: float = 3600.0  # seconds without a request that end a session
    most: int = 1024  # limit of open sessions

    @classmethod
    def from_flags(cls, flags: Any) -> "OnlineOptions | None":
        """Return options with the key of `admin_key` or $RLX_ADMIN_KEY, or None; or UserError."""
        path = flags.admin_key
        with explained(f"cannot read the admin key in {path}", "give a text file"):
            key = Path(path).read_text("utf-8-sig") if path else os.environ.get(ADMIN_VARIABLE, "")
        if not (path or key):
            return None
        if len(key := key.strip()) < _SHORTEST:
            problem = f"the admin key has {len(key)} characters, fewer than {_SHORTEST}"
            raise UserError(f"{problem}; create one with `openssl rand -hex 24`")
        if not flags.idle_seconds > 0:
            raise UserError(f"idle_seconds={flags.idle_seconds:g} ends every session; raise it")
        return cls(key, flags.idle_seconds)


class OnlineSessions:
    """All sessions, by id and by key; UserError if their database is damaged or cannot be used."""

    def __init__(
        self,
        directory: Path,  # private directory of the database, locked by this process
        options: OnlineOptions,
        defaults: Sampling,  # sampling of requests, except for the seed, a hash of the session's id
        *,
        temperature_fixed: bool = False,  # see `chat.read`
        clock: Callable[[], float] = time.monotonic,  # seconds, monotonic
    ):
        self.options, self._defaults = options, defaults
        self._temperature_fixed = temperature_fixed
        self.states: dict[str, SessionState] = {}  # by id, in order of opening
        self.sessions: dict[str, Session] = {}  # their requests and answers, by id
        # Returns the slot of a new session of a task, −1 for none; may raise Denied.
        self.admit: Callable[[str], int] = lambda task: -1
        # Gets the time after each opening, reward and end, and at every sweep.
        self.changed: Callable[[float], None] = lambda now: None
        # Whether a taken session may be deleted.
        self.deletable: Callable[[SessionState], bool] = lambda state: True
        self._path = directory / FILE
        with ExitStack() as stack:  # releases the lock if the start fails
            try:
                directory.mkdir(parents=True, exist_ok=True, mode=0o700)
                self._path.touch(0o600)
                self._db = stack.enter_context(closing(sqlite3.connect(self._path, timeout=0.0)))
                self._read()
            except (OSError, sqlite3.OperationalError) as error:
                locked = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY
                why = "another process has it" if locked else error
                problem = f"cannot use {self._path}: {why}"
                raise UserError(f"{problem}; give another directory") from error
            except (sqlite3.DatabaseError, ValueError, TypeError, LookupError) as error:
                problem = f"{self._path} is damaged ({error!r:.100})"
                raise UserError(f"{problem}; restore a backup, or move it away") from error
            stack.pop_all()
        # Seconds since 1970, monotonic even if the system clock is set back.
        epoch = max(time.time(), *(state.touched for state in self.states.values()), 0.0) - clock()
        self._clock = lambda: epoch + clock()
        for name, state in self.states.items():  # downtime counts neither as idle nor as late
            if not state.ended or (state.reward is None and not state.taken):
                self.states[name] = replace(state, touched=self._clock())
        self._forget_at = _FORGET_ROWS

    def is_admin(self, key: str) -> bool:
        """Return whether `key` is the admin's, in constant time."""
        return hmac.compare_digest(_bytes(key), _bytes(self.options.admin_key))

    def known(self, key: str) -> tuple[str, str] | None:
        """Return (session id, task as JSON) of a key's latest session, None for an unknown key."""
        query = "SELECT session, task FROM keys WHERE digest = ?"
        return self._db.execute(query, (_digest(key),)).fetchone()

    def current(self, key: str) -> SessionState | None:
        """Return a key's latest session, None for an unknown key; raise Denied if deleted."""
        name, _ = self.known(key) or ("", "")
        if name and name not in self.states:
            raise Denied("ended", "the session of this key was deleted; refresh opens the next one")
        return self.states.get(name)

    def find(self, key: str) -> Session | None:
        """Return a key's open session, None for an unknown key; raise Denied if it ended."""
        if (state := self.current(key)) is None:
            return None
        state.require_open()
        return self.sessions[state.id]

    def open(self, task: str = "", key: str = "") -> tuple[SessionState, str]:
        """Open a session; return it and its API key, `key` or a new one; or raise Denied."""
        if key and len(key) < _SHORTEST:
            raise Denied("short", f"api_key needs {_SHORTEST} characters or more")
        key = key or "rlx-" + secrets.token_urlsafe(24)
        latest = self.known(key)
        before = self.states.get(latest[0]) if latest else None
        if self.is_admin(key) or (before and not before.ended):
            raise Denied("bound", "this API key is in use; end its session first, or refresh it")
        if sum(not state.ended for state in self.states.values()) >= self.options.most:
            raise Denied("full", f"{self.options.most} sessions are open; try again")
        slot, now = self.admit(task), self._clock()
        name = "session-" + secrets.token_hex(8)
        state = self._save(SessionState(name, now, now, _digest(key), task, slot))
        self.sessions[name] = self._session(name)
        self.changed(now)
        return state, key

    def refresh(self, key: str) -> SessionState | None:
        """End a key's session if open, and open the next one or raise Denied; None: unknown key."""
        if (latest := self.known(key)) is None:
            return None
        name, task = latest
        with suppress(Denied):
            self.end(name, "refresh")
        return self.open(json.loads(task), key)[0]

    def reward(self, name: str, value: float | Mapping[str, float]) -> SessionState:
        """Set the reward of a session or of its completions."""
        state = self._save(self.state(name).add_reward(value))
        self.changed(state.touched)
        return state

    def end(self, name: str, by: str) -> SessionState:
        """End a session and cancel its requests."""
        state = self._save(self.state(name).end(by))
        self.changed(state.touched)
        for task in list(self.sessions[name].tasks):
            task.cancel()
        return state

    def take(self, name: str, how: str, why: str = "") -> None:
        """Record how an ended session was used: trained, exported or dropped."""
        self._save(self.state(name).take(how, why))

    def drop(self, slot: int, why: str) -> None:
        """Record why the sessions of a slot are not trained on; those with a reason stay so."""
        for state in [s for s in self.states.values() if s.slot == slot and s.ended and not s.why]:
            if state.taken in ("", "trained"):
                self._save(state.drop(why))

    def state(self, name: str) -> SessionState:
        """Return the state of a session, or raise Denied."""
        if name not in self.states:
            raise Denied("unknown", f"unknown session {name[:40]!r}")
        return self.states[name]

    def sweep(self) -> None:
        """End idle sessions, call `changed`, and delete old sessions after many writes."""
        now = self._clock()
        for name, state in list(self.states.items()):
            if state.ended:
                continue
            if self.sessions[name].tasks:
                self.states[name] = replace(state, touched=now)
            elif now - state.touched > self.options.idle_seconds:
                self.end(name, "idle")
        self.changed(now)
        if self._db.total_changes >= self._forget_at:
            self.forget()
            self._forget_at = self._db.total_changes + _FORGET_ROWS

    async def run(self) -> None:
        """Sweep and sync until cancelled."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            with suppress(ApiError, sqlite3.Error, OSError):  # retry later: the disk may be full
                self.sweep()
                await in_thread(self._sync)

    def close(self) -> None:
        """Close and unlock the database."""
        self._db.close()

    async def export(self, name: str) -> bytes:
        """Return an ended session as JSON: state, completions, and trajectories to train on."""
        state = self.state(name)
        if not state.ended:
            raise Denied("open", f"session {name} has not ended; end it first")
        return await in_thread(_export, state, self.sessions[name].interactions)

    def forget(self) -> None:
        """Delete the sessions that were taken and are `deletable`."""
        names = [name for name, s in self.states.items() if s.taken and self.deletable(s)]
        with self._db:
            self._db.executemany("DELETE FROM sessions WHERE id = ?", [(n,) for n in names])
            self._db.execute(_FORGET, (_KEYS,))
        for name in names:
            del self.states[name], self.sessions[name]

    def _sync(self) -> None:
        with open(f"{self._path}-wal", "rb") as file:
            os.fsync(file.fileno())

    def _save(self, state: SessionState, answer: Mapping[str, Any] | None = None) -> SessionState:
        """Write a state and its newest answer to the database; return the state."""
        state = replace(state, touched=self._clock())
        try:
            with self._db:
                self._db.execute(_SAVE, (state.id, jsonl.encode(asdict(state))))
                if answer:
                    row = (state.id, jsonl.encode(answer))
                    self._db.execute("INSERT INTO answers VALUES (?, ?)", row)
                if state.id not in self.states:
                    entry = (state.key, state.id, json.dumps(state.task))
                    self._db.execute("INSERT OR REPLACE INTO keys VALUES (?, ?, ?)", entry)
        except sqlite3.Error as error:
            message = f"cannot write the session: {error}; free disk space"
            raise ApiError(503, message, code="no_space") from error
        self.states[state.id] = state
        return state

    def _keep(self, session: Session, i: Interaction) -> None:
        state = self.state(session.key).add_answer(i.completion_id)
        self._save(state, _to_json(i, session.interactions))

    def _session(self, name: str, answers: Iterable[bytes] = ()) -> Session:
        """Return a session with its stored answers; its seed is a hash of its id."""
        defaults = replace(self._defaults, seed=seed_of(name.encode()))
        session = Session(name, defaults, self._temperature_fixed)
        for answer in answers:
            i = _from_json(json.loads(answer), session.interactions)
            if not i.choice:
                session.seed(i.prompt_tokens)  # counts the prompt
            session.keep(i)
        session.on_keep = partial(self._keep, session)
        return session

    def _read(self) -> None:
        """Lock the database, create its tables, and read all sessions."""
        self._db.executescript(_SCHEMA)
        (result,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
        if result != "ok":
            raise ValueError(result)
        query = "SELECT answer FROM answers WHERE session = ? ORDER BY rowid"
        for (text,) in self._db.execute("SELECT state FROM sessions ORDER BY rowid"):
            data = json.loads(text)
            state = SessionState(**{**data, "completions": tuple(data["completions"])})
            answers = self._db.execute(query, (state.id,))
            self.states[state.id] = state
            self.sessions[state.id] = self._session(state.id, (answer for (answer,) in answers))


def public_view(state: SessionState) -> dict[str, Any]:
    """Return a session's state as JSON types, without the digest of its key."""
    view = asdict(state) | {"state": state.stage}
    del view["key"]
    return view


def _export(state: SessionState, interactions: Sequence[Interaction]) -> bytes:
    # Encodes row by row: one long call of `json` would block other threads.
    rows = trajectories.of_run(interactions, state.reward or 0.0, state.id) if interactions else []
    completions = (
        {"id": i.completion_id, "choice": i.choice, "parent": i.parent, "after": i.after,
         "prompt": control_tokens.plain(i.prompt_text), "completion": i.text} for i in interactions
    )  # fmt: skip
    plain = ({f.name: getattr(row, f.name) for f in fields(row)} for row in rows)
    lists = (b",".join(map(jsonl.encode, each)) for each in (completions, plain))
    head = jsonl.encode(public_view(state))[:-2]
    return head + b', "completions": [%b], "trajectories": [%b]}' % tuple(lists)


def _to_json(i: Interaction, before: Sequence[Interaction]) -> dict[str, Any]:
    """Return an interaction without its parent's text and tokens."""
    text, tokens = _prefix(i.parent, before)
    return asdict(i) | {
        "prompt_text": i.prompt_text[len(text) :],
        "prompt_tokens": i.prompt_tokens[len(tokens) :],
        "completion": {name: getattr(i.completion, name) for name in (*_ARRAYS, "stop_reason")},
    }


def _from_json(data: Mapping[str, Any], before: Sequence[Interaction]) -> Interaction:
    text, tokens = _prefix(data["parent"], before)
    raw = data["completion"]
    arrays = {k: np.array(raw[k], kind) for k, kind in _ARRAYS.items() if raw[k] is not None}
    values = {
        "prompt_text": text + data["prompt_text"],
        "prompt_tokens": np.concatenate([tokens, np.array(data["prompt_tokens"], np.int32)]),
        "completion": Completion(**{**raw, **arrays}),
        "place": TurnPlace(*data["place"]),
        "images": tuple(data.get("images", ())),
    }
    return Interaction(**{**data, **values})


def _prefix(parent: int | None, before: Sequence[Interaction]) -> tuple[str, np.ndarray]:
    """Return text and tokens of a parent including its answer, both empty without a parent."""
    if parent is None:
        return "", np.zeros(0, np.int32)
    i = before[parent]
    return i.full_text, np.concatenate([i.prompt_tokens, i.completion.tokens])


def _digest(key: str) -> str:
    return hashlib.blake2b(_bytes(key), digest_size=16).hexdigest()


def _bytes(key: str) -> bytes:
    return key.encode(errors="surrogateescape")  # as headers are decoded
