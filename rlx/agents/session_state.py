"""What happens to a session of an outside application: (state, event) → state. Pure.

    open ─▶ answer, reward … ─▶ end ─▶ reward … ─▶ take

The database keeps each state, so those after a restart are those before it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

_NONE: Mapping[str, Any] = {}


class Denied(Exception):
    """An event that does not fit the state.

    Attributes:
      reason: ended | taken | open | early | completion | unknown, of the states here; bound |
        short, of keys; full | nameless, of places.
      wait: seconds after which it may be otherwise; 0: nobody knows.
    """

    def __init__(self, reason: str, message: str, wait: float = 0.0):
        super().__init__(message)
        self.reason, self.wait = reason, wait


class SessionEvent(NamedTuple):
    """Something that happens to a session.

    Attributes:
      event: open    data: key, a digest of its API key; task; slot of a run's group, −1 for none
             answer  completion, the id of the answer
             reward  value, of the session, or of completions by their ids
             end     by: application | refresh | idle | restart
             take    how: trained | exported | dropped; why
      session: its id. time: seconds since 1970.
    """

    event: str
    session: str
    time: float
    data: Mapping[str, Any] = _NONE


@dataclass(frozen=True, slots=True)
class SessionState:
    """The state of a session.

    Attributes:
      id, key, task, slot: as in the event `open`.
      opened, touched: when it began, and when something last happened.
      completions: ids of its answers, in order, without repetition.
      reward: of the whole, or by completion id; None: not told.
      ended: by whom; "" while it is open. taken, why: how and why; "" until then.
    """

    id: str
    opened: float
    touched: float
    key: str
    task: str
    slot: int
    completions: tuple[str, ...] = ()
    reward: float | Mapping[str, float] | None = None
    ended: str = ""
    taken: str = ""
    why: str = ""

    @property
    def stage(self) -> str:
        """Return open, ended or taken."""
        return "taken" if self.taken else "ended" if self.ended else "open"


def advance(state: SessionState | None, event: SessionEvent) -> SessionState:
    """Return the state after an event; None is the state before `open`.

    Raises:
      Denied: the event does not fit.
    """
    if state is None and event.event == "open":
        return SessionState(event.session, event.time, event.time, **event.data)
    if state is None:
        raise Denied("unknown", f"there is no session {event.session[:40]!r}")
    return replace(_STEPS[event.event](state, event.data), touched=event.time)


def require_open(state: SessionState) -> None:
    """Raise Denied where a session has ended."""
    if state.ended:
        raise Denied(
            "ended", f"the session has ended (by {state.ended}); POST /v1/session/refresh begins "
            "the next one under the same key",
        )  # fmt: skip


def _open(state: SessionState, data: Mapping[str, Any]) -> SessionState:
    raise Denied("open", f"session {state.id} has begun already")


def _answer(state: SessionState, data: Mapping[str, Any]) -> SessionState:
    require_open(state)
    if data["completion"] in state.completions:  # another choice of the same answer
        return state
    return replace(state, completions=(*state.completions, data["completion"]))


def _reward(state: SessionState, data: Mapping[str, Any]) -> SessionState:
    value, before = data["value"], state.reward
    if state.taken:
        raise Denied("taken", f"the session was {state.taken}; its reward comes too late")
    if not state.completions:
        raise Denied("early", "nothing was generated in this session yet; ask the model first")
    if not isinstance(value, Mapping):
        return replace(state, reward=value)
    if unknown := set(value) - set(state.completions):
        raise Denied("completion", f"no completion {min(unknown)!r} in this session; use its ids")
    return replace(state, reward={**(before if isinstance(before, Mapping) else {}), **value})


def _end(state: SessionState, data: Mapping[str, Any]) -> SessionState:
    require_open(state)
    return replace(state, ended=data["by"])


def _take(state: SessionState, data: Mapping[str, Any]) -> SessionState:
    if not state.ended:
        raise Denied("open", f"session {state.id} has not ended; end it first")
    exported = data["how"] == "exported" and state.why  # it could not be trained on
    if state.taken not in ("", data["how"]) and not exported:
        raise Denied("taken", f"session {state.id} was {state.taken} already")
    return replace(state, taken=data["how"], why=data["why"])


_STEPS: Mapping[str, Callable[[SessionState, Mapping[str, Any]], SessionState]] = {
    "open": _open, "answer": _answer, "reward": _reward, "end": _end, "take": _take,
}  # fmt: skip
