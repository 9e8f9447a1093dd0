"""State of a session of an outside application, and what may happen to it. Pure.

open ─▶ answers, rewards … ─▶ end ─▶ rewards … ─▶ take
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace


class Denied(Exception):
    """Refusal of what does not fit the state.

    Attributes:
      reason: ended | taken | open | early | completion | unknown, of the states here; bound |
        short, of keys; full | nameless, of places.
      wait: seconds after which it may be otherwise; 0: nobody knows.
    """

    def __init__(self, reason: str, message: str, wait: float = 0.0):
        super().__init__(message)
        self.reason, self.wait = reason, wait


@dataclass(frozen=True, slots=True)
class SessionState:
    """The state of a session.

    Attributes:
      id: of the session. key: a digest of its API key. task: of its group.
      opened, touched: seconds since 1970 when it began, and when something last happened.
      slot: of a run's group, −1 for none.
      completions: ids of its answers, in order, without repetition.
      reward: of the whole, or by completion id; None: there is none yet.
      ended: application | refresh | idle | restart; "" while it is open.
      taken: trained | exported | dropped; "" until then. why: it could not be trained on.
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

    def require_open(self) -> None:
        """Raise Denied where the session has ended."""
        if self.ended:
            raise Denied(
                "ended", f"the session has ended (by {self.ended}); POST /v1/session/refresh "
                "begins the next one under the same key",
            )  # fmt: skip

    def add_answer(self, completion: str) -> "SessionState":
        """Return the state after a choice of an answer; raise Denied where it has ended."""
        self.require_open()
        if completion in self.completions:  # another choice of the same answer
            return self
        return replace(self, completions=(*self.completions, completion))

    def add_reward(self, value: float | Mapping[str, float]) -> "SessionState":
        """Return the state after a reward; raise Denied where it comes too early or too late."""
        if self.taken:
            raise Denied("taken", f"the session was {self.taken}; its reward comes too late")
        if not self.completions:
            raise Denied("early", "nothing was generated in this session yet; ask the model first")
        if not isinstance(value, Mapping):
            return replace(self, reward=value)
        if unknown := set(value) - set(self.completions):
            named = min(unknown)
            raise Denied("completion", f"no completion {named!r} in this session; use its ids")
        before = self.reward if isinstance(self.reward, Mapping) else {}
        return replace(self, reward={**before, **value})

    def end(self, by: str) -> "SessionState":
        """Return the state after its end; raise Denied where it has ended before."""
        self.require_open()
        return replace(self, ended=by)

    def take(self, how: str, why: str) -> "SessionState":
        """Return the state once its data was used; raise Denied where it is open or was taken."""
        if not self.ended:
            raise Denied("open", f"session {self.id} has not ended; end it first")
        exported = how == "exported" and self.why  # it could not be trained on
        if self.taken not in ("", how) and not exported:
            raise Denied("taken", f"session {self.id} was {self.taken} already")
        return replace(self, taken=how, why=why)
