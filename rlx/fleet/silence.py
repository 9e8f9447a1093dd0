"""Decision that a server which answers generates nothing: a state and an event give a state.

A prompt may take minutes to its first token. So other servers show how long a token takes: one
that sends none for many times as long, while others send some, is broken.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

FACTOR = 10  # times the longest wait for a token that any server has shown


@dataclass(frozen=True, slots=True)
class TokenWaits:
    """Times of one server's tokens, in seconds of the clock that its events come with.

    Attributes:
      calls: in flight.
      since: the wait for its next token began; it goes on while there are calls.
      last: its last token.
      longest: wait that ended with a token.
    """

    calls: int = 0
    since: float = 0.0
    last: float = -math.inf
    longest: float = 0.0

    def began(self, now: float) -> "TokenWaits":
        """Return the state after one more call has begun."""
        return replace(self, calls=self.calls + 1, since=self.since if self.calls else now)

    def ended(self) -> "TokenWaits":
        """Return the state after a call has ended, however it did."""
        return replace(self, calls=self.calls - 1)

    def token(self, now: float) -> "TokenWaits":
        """Return the state after some tokens or scores have come."""
        return replace(self, since=now, last=now, longest=max(self.longest, now - self.since))

    def updated(self, now: float) -> "TokenWaits":
        """Return the state after an update, in which the server decodes nothing."""
        return replace(self, since=now)


def silent_seconds(
    own: TokenWaits, others: Iterable[TokenWaits], now: float, least: float
) -> float:
    """Return for how long a server has sent no token that was due; 0.0 where none was.

    Args:
      least: seconds that any server has, as to compile.
    """
    working = [other for other in others if other.last > own.since]
    if not own.calls or not working:
        return 0.0
    late = now - own.since
    limit = least + FACTOR * max(each.longest for each in (own, *working))
    return late if late > limit else 0.0
