"""Detection of a server that answers Status and generates nothing.

A prompt may take minutes to its first token. So a server counts as silent if it sends no token for
FACTOR times the longest wait of any server, while others send some.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

FACTOR = 10  # × the longest wait for a token of any server


@dataclass(frozen=True, slots=True)
class TokenWaits:
    """Immutable state of one server's waits for tokens, in seconds of the caller's clock."""

    calls: int = 0  # in flight
    since: float = 0.0  # when the current wait began, if there are calls
    last: float = -math.inf  # when the last token came
    longest: float = 0.0  # wait that ended with a token

    def began(self, now: float) -> "TokenWaits":
        """Return the state after a call has begun."""
        return replace(self, calls=self.calls + 1, since=self.since if self.calls else now)

    def ended(self) -> "TokenWaits":
        """Return the state after a call has ended or failed."""
        return replace(self, calls=self.calls - 1)

    def token(self, now: float) -> "TokenWaits":
        """Return the state after tokens or scores have come."""
        return replace(self, since=now, last=now, longest=max(self.longest, now - self.since))

    def updated(self, now: float) -> "TokenWaits":
        """Return the state after a weight update, during which a server decodes nothing."""
        return replace(self, since=now)


def silent_seconds(
    server: TokenWaits, others: Iterable[TokenWaits], now: float, least: float
) -> float:
    """Return how long a server's next token is overdue, or 0.0; each has `least` seconds."""
    working = [other for other in others if other.last > server.since]
    if not server.calls or not working:
        return 0.0
    late = now - server.since
    limit = least + FACTOR * max(each.longest for each in (server, *working))
    return late if late > limit else 0.0
