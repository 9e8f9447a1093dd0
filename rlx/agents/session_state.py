"""States of an outside application's session and its allowed transitions. Pure.

open ─▶ answers, rewards … ─▶ end ─▶ rewards … ─▶ take
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rlx.agents.dialects import ApiError

_STATUS = {  # by reason
    "ended": 410, "taken": 410, "open": 409, "early": 409, "bound": 409, "unknown": 404,
    "full": 429, "completion": 400, "short": 400, "nameless": 400,
}  # fmt: skip


class Denied(ApiError):
    """A request that a session's state does not allow; `wait` as in ApiError."""

    def __init__(self, reason: str, message: str, wait: float = 0.0):
        super().__init__(_STATUS[reason], message, code=f"session_{reason}", wait=wait)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class SessionState:
    id: str
    opened: float  # opened, touched: seconds since 1970 of its start and its last change
    touched: float
    key: str  # digest of its API key
    task: str  # id of its group's task
    slot: int  # id of a training group, −1 for none
    completions: tuple[str, ...] = ()  # distinct ids of its answers, in order
    reward: float | Mapping[str, float] | None = None  # of the session, or by completion id
    ended: str = ""  # application | refresh | idle | restart; "" while open
    taken: str = ""  # trained | exported | dropped; "" until then
    why: str = ""  # the reason why it could not be trained on

    @property
    def stage(self) -> str:
        """Return open, ended or taken."""
        return "taken" if self.taken else "ended" if self.ended else "open"

    def require_open(self) -> None:
        """Raise Denied if the session has ended."""
        if self.ended:
            remedy = "POST /v1/session/refresh begins the next one under the same key"
            raise Denied("ended", f"the session has ended (by {self.ended}); {remedy}")

    def add_answer(self, completion: str) -> "SessionState":
        """Return the state with one more answer, or raise Denied."""
        self.require_open()
        if completion in self.completions:  # another choice of the same answer
            return self
        return replace(self, completions=(*self.completions, completion))

    def add_reward(self, value: float | Mapping[str, float]) -> "SessionState":
        """Return the state with a reward; raise Denied if it is too early or too late."""
        if self.taken:
            raise Denied("taken", f"the session was {self.taken} already; send rewards earlier")
        if not self.completions:
            raise Denied("early", "this session has no answer yet; ask the model first")
        if not isinstance(value, Mapping):
            return replace(self, reward=value)
        if unknown := set(value) - set(self.completions):
            name = min(unknown)
            raise Denied("completion", f"no completion {name!r} in this session; use its ids")
        before = self.reward if isinstance(self.reward, Mapping) else {}
        return replace(self, reward={**before, **value})

    def end(self, by: str) -> "SessionState":
        """Return the ended state, or raise Denied."""
        self.require_open()
        return replace(self, ended=by)

    def take(self, how: str, why: str) -> "SessionState":
        """Return the state after its data was used; raise Denied if it is open or was taken."""
        if not self.ended:
            raise Denied("open", f"session {self.id} has not ended; end it first")
        exported = how == "exported" and self.why  # it could not be trained on
        if self.taken not in ("", how) and not exported:
            raise Denied("taken", f"session {self.id} was {self.taken} already")
        return replace(self, taken=how, why=why)

    def drop(self, why: str) -> "SessionState":
        """Return the state of an ended session whose group is not trained on after all."""
        return replace(self, taken="dropped", why=why)
