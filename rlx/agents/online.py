"""Sessions that applications outside have, with keys of their own; a journal holds all of them.

What may happen to one is `session_state.py`; here are its key, its tokens and its place on disk.
An event is in the journal (the kernel's) before anybody is told of it, so no SIGKILL loses one; the
disk has it a second later, which a machine without power needs. All runs on the gateway's loop.
"""

import asyncio
import fcntl
import hashlib
import hmac
import json
import os
import secrets
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rlx.agents import session_state, trajectories
from rlx.agents.dialects import ApiError
from rlx.agents.session_state import Denied, SessionEvent, SessionState, require_open
from rlx.agents.sessions import Interaction, Session, TurnPlace
from rlx.base import UserError
from rlx.fleet.requests import Sampling
from rlx.fleet.sample import Completion
from rlx.rollout import control_tokens
from rlx.system import jsonl
from rlx.system.threads import in_thread

SWEEP_SECONDS = 1.0  # between two looks at idle sessions, and two syncs of the journal
ADMIN_VARIABLE = "RLX_ADMIN_KEY"
_ROOM = 4 << 20  # bytes that the journal may grow, beyond its double, before it is written anew
_KEYS = 100_000  # of sessions that are gone, remembered for a refresh
_SHORTEST = 16  # characters of a key that somebody else made
_SUM = b', "sum": '  # the end of a line of the journal is its checksum
_ARRAYS = {"tokens": np.int32, "logprobs": np.float32, "versions": np.int32}
_PLAIN = (
    "choice", "raw", "text", "parent", "tool_calls", "seconds", "place", "said", "memory", "retry",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class OnlineOptions:
    """How sessions of applications are admitted and end.

    Attributes:
      admin_key: makes and ends sessions.
      idle_seconds: without a request, after which a session ends.
      most: open sessions at one time.
    """

    admin_key: str
    idle_seconds: float = 3600.0
    most: int = 1024

    @classmethod
    def named(cls, flags: Any) -> "OnlineOptions | None":
        """Return those of `admin_key`, a file, or else $RLX_ADMIN_KEY; None where neither is given.

        Raises:
          UserError: it cannot be read or is too short; `idle_seconds` are none.
        """
        path = flags.admin_key
        try:
            key = Path(path).read_text() if path else os.environ.get(ADMIN_VARIABLE, "")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"admin key {path} cannot be read ({error}); give a file") from None
        if not (path or key):
            return None
        if len(key := key.strip()) < _SHORTEST:
            made = "`openssl rand -hex 24` makes one"
            raise UserError(f"the admin key has {len(key)} characters, wanted {_SHORTEST}; {made}")
        if not flags.idle_seconds > 0:
            raise UserError(f"idle_seconds={flags.idle_seconds:g} ends every session; raise it")
        return cls(key, flags.idle_seconds)


class _Key(NamedTuple):
    session: str  # the latest
    task: str
    revoked: bool = False


class OnlineSessions:
    """The sessions, by id and by key.

    Args:
      directory: of the journal, made private; of one process at a time.
      defaults: of the requests; a session's seed is a function of its id.
      temperature_fixed: see `chat.read`.
      clock: seconds, monotonic.

    Attributes:
      states: by id, in the order in which they began.
      live: what they asked and were answered, by id.
      admit: returns the slot of a new session of a task, −1 for none; may raise Denied.
      changed: called with the time when a session has begun, was rewarded or has ended, and at
        every sweep.
      covered: whether a session that was taken may be forgotten.

    Raises:
      UserError: the journal cannot be read or written, or another process has it.
    """

    def __init__(
        self,
        directory: Path,
        options: OnlineOptions,
        defaults: Sampling,
        *,
        temperature_fixed: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.options, self._defaults = options, defaults
        self._temperature_fixed = temperature_fixed
        self.states: dict[str, SessionState] = {}
        self.live: dict[str, Session] = {}
        self.admit: Callable[[str], int] = lambda task: -1
        self.changed: Callable[[float], None] = lambda now: None
        self.covered: Callable[[SessionState], bool] = lambda state: True
        self._keys: dict[str, _Key] = {}
        self._journal = directory / "journal.jsonl"
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._file = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UserError(f"no sessions in {directory}: {error}; name another") from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.close(os.open(self._journal, os.O_WRONLY | os.O_CREAT, 0o600))
            self._read()
        except BaseException as error:
            os.close(self._file)  # or the lock would outlive a start that failed
            if not isinstance(error, OSError):
                raise
            busy = "another process has it" if isinstance(error, BlockingIOError) else error
            raise UserError(f"no sessions in {directory}: {busy}; name another") from error
        # Seconds since 1970 as of the start, and since then of a clock that nobody sets.
        known = (state.touched for state in self.states.values())
        epoch = max(time.time(), *known, 0.0) - clock()
        self._clock = lambda: epoch + clock()
        for name, state in self.states.items():  # nobody could ask while nobody answered
            if not state.ended:
                self.states[name] = replace(state, touched=self._clock())
        self._compacted = 0  # bytes; the first sweep looks

    # Keys.

    def is_admin(self, key: str) -> bool:
        """Return whether `key` is the admin's, in a time that does not tell where it differs."""
        return hmac.compare_digest(_bytes(key), _bytes(self.options.admin_key))

    def knows(self, key: str) -> bool:
        """Return whether `key` is of a session, open or not."""
        return _digest(key) in self._keys

    def current(self, key: str) -> SessionState | None:
        """Return the latest session of a key, None for an unknown key.

        Raises:
          Denied: the key was withdrawn, or the session is gone.
        """
        known = self._keys.get(_digest(key))
        if known and known.revoked:
            raise Denied("revoked", "this API key was withdrawn by its admin; ask for another")
        if known and known.session not in self.states:
            raise Denied("ended", "the session of this key is gone; refresh begins the next one")
        return self.states[known.session] if known else None

    def find(self, key: str) -> Session | None:
        """Return the open session of a key, None for an unknown key; raise Denied if it ended."""
        state = self.current(key)
        if state:
            require_open(state)
        return self.live[state.id] if state else None

    # What happens.

    def open(self, task: str = "", key: str = "") -> tuple[SessionState, str]:
        """Begin a session; return it and its API key, `key` or a new one.

        Raises:
          Denied: the key is too short, or has a session; there is no place for one.
        """
        if key and len(key) < _SHORTEST:
            raise Denied("short", f"api_key needs {_SHORTEST} characters or more")
        key = key or "rlx-" + secrets.token_urlsafe(24)
        known = self._keys.get(_digest(key))
        before = self.states.get(known.session) if known else None
        if self.is_admin(key) or (before and not before.ended):
            raise Denied("bound", "this API key is in use; end its session first, or refresh it")
        if sum(not state.ended for state in self.states.values()) >= self.options.most:
            raise Denied("full", f"{self.options.most} sessions are open; try again")
        slot = self.admit(task)
        name, data = "session-" + secrets.token_hex(8), {"task": task, "slot": slot}
        return self._record("open", name, key=_digest(key), **data), key

    def refresh(self, key: str) -> SessionState | None:
        """End a key's session if it is open, and begin the next one; None for an unknown key.

        Raises:
          Denied: the key was withdrawn, or there is no place; the session before has ended then.
        """
        known = self._keys.get(_digest(key))
        if known is None:
            return None
        if known.revoked:
            self.current(key)  # says so
        with suppress(Denied):
            self.end(known.session, "refresh")
        return self.open(known.task, key)[0]

    def reward(self, name: str, value: float | Mapping[str, float]) -> SessionState:
        """Take a reward of a session, or of its completions."""
        return self._record("reward", name, value=value)

    def end(self, name: str, by: str) -> SessionState:
        """End a session and its requests; an admin's end withdraws the key."""
        state = self._record("end", name, by=by)
        for task in list(self.live[name].tasks):
            task.cancel()
        return state

    def withdraw(self, name: str) -> SessionState:
        """End a session that is open, and withdraw its key, unless it has begun a later one."""
        state = self.state(name)
        known = self._keys.get(state.key)
        if not state.ended or known is None or known.session != name or known.revoked:
            return self.end(name, "admin")
        revoked = known._replace(revoked=True)
        self._append({"event": "key", "key": state.key, **revoked._asdict()})
        self._keys[state.key] = revoked
        return state

    def take(self, name: str, how: str, why: str = "") -> None:
        """Record what became of an ended session."""
        self._record("take", name, how=how, why=why)

    def state(self, name: str) -> SessionState:
        """Return the state of a session; raise Denied where there is none."""
        if name not in self.states:
            raise Denied("unknown", f"there is no session {name[:40]!r}")
        return self.states[name]

    def sweep(self) -> None:
        """End what is idle, tell of the time, and write the journal anew if it has grown."""
        now = self._clock()
        for name, state in list(self.states.items()):
            if state.ended:
                continue
            if self.live[name].tasks:
                self.states[name] = replace(state, touched=now)
            elif now - state.touched > self.options.idle_seconds:
                self.end(name, "idle")
        self.changed(now)
        if self._journal.stat().st_size > 2 * self._compacted + _ROOM:
            self.compact()

    async def run(self) -> None:
        """Sweep and sync for ever."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            with suppress(ApiError, UserError, OSError):  # a full disk: there may be room later
                self.sweep()
                await in_thread(self._sync)

    def close(self) -> None:
        """Let another process have the journal."""
        self._sync()
        os.close(self._file)

    async def export(self, name: str, turn_discount: float, form: str) -> bytes:
        """Return an ended session as JSON: what it asked, what it got, and rows to train on."""
        state, made = self.state(name), self.live[name].interactions
        if not state.ended:
            raise Denied("open", f"session {name} has not ended; end it, or give wait=SECONDS")
        return await in_thread(_exported, state, made, turn_discount, form)

    # The journal.

    def compact(self) -> None:
        """Write the journal anew, without sessions that were taken and are covered."""
        for name, state in list(self.states.items()):
            if state.taken and self.covered(state):
                del self.states[name], self.live[name]
        gone = [key for key, known in self._keys.items() if known.session not in self.states]
        for key in gone[: max(0, len(gone) - _KEYS)]:
            del self._keys[key]
        jsonl.write_atomically(
            self._journal, b"".join(jsonl.encode(_summed(r)) for r in self._records())
        )
        self._journal.chmod(0o600)
        self._sync()
        self._compacted = self._journal.stat().st_size

    def _sync(self) -> None:
        with open(self._journal, "rb") as file:
            os.fsync(file.fileno())

    def _records(self) -> Iterator[Mapping[str, Any]]:
        for s in self.states.values():
            made = self.live[s.id].interactions
            found = [("open", {"key": s.key, "task": s.task, "slot": s.slot})]
            found += [("answer", _made(i, made[:k])) for k, i in enumerate(made)]
            found += [("reward", {"value": s.reward})] * (s.reward is not None)
            found += [("end", {"by": s.ended})] * bool(s.ended)
            found += [("take", {"how": s.taken, "why": s.why})] * bool(s.taken)
            for kind, data in found:
                time = s.opened if kind == "open" else s.touched
                yield SessionEvent(kind, s.id, time, data)._asdict()
        for key, known in self._keys.items():  # last, or an older session of a key would have it
            if known.revoked or known.session not in self.states:
                yield {"event": "key", "key": key, **known._asdict()}

    def _record(self, kind: str, name: str, **data: Any) -> SessionState:
        """Let an event happen: in the journal first, as it is answered for from then on."""
        event = SessionEvent(kind, name, self._clock(), data)
        state = session_state.advance(self.states.get(name), event)
        self._append(event._asdict())
        self._become(state, event)
        if kind in ("open", "reward", "end"):
            self.changed(event.time)
        return state

    def _append(self, record: Mapping[str, Any]) -> None:
        try:
            jsonl.append_jsonl(self._journal, _summed(record))
        except UserError as error:
            raise ApiError(503, f"the session cannot be kept: {error}", code="no_space") from error

    def _become(self, state: SessionState, event: SessionEvent) -> None:
        self.states[state.id] = state
        if event.event == "open":
            self._keys.pop(state.key, None)  # the latest ones are at the end
            self._keys[state.key] = _Key(state.id, state.task)
            self.live[state.id] = self._session(state.id)
        elif event.data.get("by") == "admin":
            self._keys[state.key] = _Key(state.id, state.task, revoked=True)

    def _session(self, name: str) -> Session:
        seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "big") >> 1
        session = Session(name, replace(self._defaults, seed=seed), self._temperature_fixed)

        def keep(i: Interaction) -> None:
            self._record("answer", name, **_made(i, session.interactions))

        session.on_keep = keep
        return session

    def _read(self) -> None:
        """Read the journal, without its last line where a kill has torn it.

        Raises:
          UserError: a line is not as it was written.
        """
        lines = self._journal.read_bytes().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):
            os.truncate(self._journal, sum(map(len, lines)) - len(lines.pop()))
        before = b""
        for number, line in enumerate(lines, 1):
            try:
                head, mark, rest = line.rpartition(_SUM)  # journals of before have none
                if mark and zlib.crc32(head + b"}\n") != int(rest[:-2]):
                    raise ValueError("its checksum is another")
                if line != before:
                    self._replay({k: v for k, v in json.loads(line).items() if k != "sum"})
            except (Denied, ValueError, TypeError, LookupError, AttributeError) as error:
                raise UserError(
                    f"{self._journal}:{number} is not as it was written ({error!r:.100}); restore "
                    "the file from a copy, or remove the line"
                ) from error
            before = line

    def _replay(self, record: dict[str, Any]) -> None:
        if record["event"] == "key":
            self._keys[record["key"]] = _Key(record["session"], record["task"], record["revoked"])
            return
        event = SessionEvent(**record)
        self._become(session_state.advance(self.states.get(event.session), event), event)
        if event.event == "answer":
            session = self.live[event.session]
            i = _interaction(event.data, session.interactions)
            if not i.choice:
                session.seed(i.prompt_tokens)  # counts how often it was asked
            keep, session.on_keep = session.on_keep, None
            session.keep(i)
            session.on_keep = keep


def shown(state: SessionState) -> dict[str, Any]:
    """Return a session as its admin sees it; no key is in it."""
    found = asdict(state) | {"state": state.stage}
    del found["key"]
    return found


def _exported(
    state: SessionState, made: Sequence[Interaction], turn_discount: float, form: str
) -> bytes:
    """Return what `OnlineSessions.export` does, row by row: `json` holds up other threads."""
    rows = trajectories.of_run(
        made, state.reward or 0.0, state.id, turn_discount=turn_discount, export=form
    ) if made else []  # fmt: skip
    completions = (
        {"id": i.completion_id, "choice": i.choice, "parent": i.parent, "after": i.after,
         "prompt": control_tokens.plain(i.prompt_text), "completion": i.text} for i in made
    )  # fmt: skip
    plain = ({f.name: getattr(row, f.name) for f in fields(row)} for row in rows)
    lists = (b",".join(map(jsonl.encode, each)) for each in (completions, plain))
    head = jsonl.encode(shown(state))[:-2]
    return head + b', "completions": [%b], "trajectories": [%b]}' % tuple(lists)


def _made(i: Interaction, before: Sequence[Interaction]) -> dict[str, Any]:
    """Return the data of an event `answer`; what the parent has is left out."""
    text, tokens = _before(i.parent, before)
    prompt = {"text": i.prompt_text[len(text) :], "tokens": i.prompt_tokens[len(tokens) :]}
    drawn = {name: getattr(i.completion, name) for name in (*_ARRAYS, "stop_reason")}
    plain = {"number": len(before), **{name: getattr(i, name) for name in _PLAIN}}
    return {"completion": i.completion_id, "plain": plain, "prompt": prompt, "drawn": drawn}


def _interaction(data: Mapping[str, Any], before: Sequence[Interaction]) -> Interaction:
    """Return the interaction that `_made` wrote."""
    plain, prompt, drawn = data["plain"], data["prompt"], data["drawn"]
    if (number := plain.pop("number", len(before))) != len(before):
        raise ValueError(f"answer {len(before)} of its session is missing before answer {number}")
    text, tokens = _before(plain["parent"], before)
    arrays = {name: np.array(drawn[name], kind) for name, kind in _ARRAYS.items()}
    if "place" not in plain:  # a journal of before: its conversations go by their text
        plain["memory"] = ""
    plain["place"] = TurnPlace(*plain.get("place", ()))
    return Interaction(
        data["completion"], prompt_text=text + prompt["text"],
        prompt_tokens=np.concatenate([tokens, np.array(prompt["tokens"], np.int32)]),
        completion=Completion(**arrays, stop_reason=drawn["stop_reason"]), **plain,
    )  # fmt: skip


def _before(parent: int | None, before: Sequence[Interaction]) -> tuple[str, np.ndarray]:
    """Return text and tokens of a parent, its answer included; of none where there is none."""
    if parent is None:
        return "", np.zeros(0, np.int32)
    i = before[parent]
    return i.whole, np.concatenate([i.prompt_tokens, i.completion.tokens])


def _summed(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line of the journal with its checksum."""
    return {**record, "sum": zlib.crc32(jsonl.encode(record))}


def _digest(key: str) -> str:
    """Return what an API key is known by: who reads the journal has no key."""
    return hashlib.blake2b(_bytes(key), digest_size=16).hexdigest()


def _bytes(key: str) -> bytes:
    return key.encode(errors="surrogateescape")  # as headers are decoded
