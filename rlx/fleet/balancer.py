"""Choice of the server that a call goes to: the least loaded live one, or a session's own.

Everything here runs on one event loop.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable

from rlx.base import Unavailable
from rlx.fleet.member import Member
from rlx.fleet.silence import silent_seconds

_LEAST = 12  # times the seconds to answer Status, that a server has for a token: it may compile
MAX_SESSIONS = 1 << 16  # remembered; the longest unused is forgotten


class Balancer:
    """The members of a fleet, of which one is picked for each call.

    Args:
      outage: seconds that a call waits while no server is alive.
      hang: seconds that a server has to answer Status.
      say: takes one line for the user.

    Attributes:
      members: servers to pick from; the client adds and removes them.
      admitted: (address, instance) of those that calls may go to; None: all.
    """

    def __init__(self, outage: float, hang: float, say: Callable[[str], None]):
        self.members: list[Member] = []
        self.admitted: frozenset[tuple[str, str]] | None = None
        self._outage, self._hang, self._say = outage, hang, say
        self._sessions: OrderedDict[str, Member] = OrderedDict()
        self._news = asyncio.Event()
        self._said = self._closed = False
        self._turn = 0

    async def complete(self) -> None:
        """Wait until some member is live, and all are but those that joined by themselves.

        Raises Unavailable when one of these others can never be.
        """
        while not (
            any(member.live for member in self.members)
            and all(member.live or member.joined for member in self.members)
        ):
            self.raise_fatal()
            await self._news.wait()

    async def pick(
        self, session: str | None, last: Member | None, avoid: Member | None = None
    ) -> Member:
        """Return the session's or request's own server while it lives, else the least loaded one.

        Args:
          session: name of the session, if the call has one. last: the request's own server.
          avoid: a server to take only where there is no other.

        Raises:
          Unavailable: as `alive`.
        """
        live = await self.alive(admitted=True)
        chosen = self._sessions.get(session) if session is not None else last
        if chosen not in live:
            self._turn += 1
            order = live[self._turn % len(live) :] + live[: self._turn % len(live)]
            chosen = min(order, key=lambda m: (
                m is avoid, m.status.paused, m.load / max(1, m.status.slots)
            ))  # fmt: skip
        if session is not None:
            self._sessions[session] = chosen
            self._sessions.move_to_end(session)
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)
        return chosen

    def leave(self, session: str | None, member: Member) -> None:
        """Forget that `member`, which failed a call of `session`, is the session's own."""
        if session is not None and self._sessions.get(session) is member:
            del self._sessions[session]

    def silent(self, member: Member) -> float:
        """Return for how long `member` has sent no token while others did; 0.0 while it may."""
        others = [other.waits for other in self.members if other is not member]
        least = _LEAST * self._hang
        return silent_seconds(member.waits, others, time.monotonic(), least)

    async def alive(
        self, check: Callable[[], None] = lambda: None, admitted: bool = False
    ) -> list[Member]:
        """Return the live servers; waits up to `outage` seconds until there is one.

        Args:
          check: called before each wait; raises when waiting is in vain.
          admitted: return those alone that calls may go to.

        Raises:
          Unavailable: none came to life in time, none ever can, or `close` was called.
          UserError: another client publishes to our servers.
        """
        self.raise_foreign()
        try:
            async with asyncio.timeout(self._outage):
                while not (live := [m for m in self.members if self._serves(m, admitted)]):
                    if self._closed:
                        raise Unavailable("the run that owns the rollout servers has ended")
                    self.raise_fatal()
                    check()
                    self._say_outage()
                    await self._news.wait()
        except TimeoutError:
            raise Unavailable(
                f"no rollout server alive for {self._outage:g} s: {self.reasons()}; "
                "look at the servers' logs and start them again"
            ) from None
        self._said = False
        return live

    def reasons(self) -> str:
        """Return `address (reason)` of every server that is not live, joined by '; '."""
        if not self.members:
            return "there is no address of one"
        found = [(m, "not checked" if m.live else m.reason) for m in self.members
                 if not self._serves(m, True)]  # fmt: skip
        return "; ".join(f"{m.address} ({why})" for m, why in found)

    def raise_fatal(self) -> None:
        """Raise Unavailable if some member can never be live that should, with its reason."""
        for member in self.members:
            if member.fatal and not member.joined:
                raise Unavailable(str(member.fatal))

    def raise_foreign(self) -> None:
        """Raise UserError if another client publishes to one of our servers."""
        for member in self.members:
            if member.foreign:
                raise member.foreign

    def _serves(self, member: Member, admitted: bool) -> bool:
        if not (member.live and admitted) or self.admitted is None:
            return member.live
        return (member.address, member.status.instance) in self.admitted

    def changed(self) -> None:
        """Wake every waiting call, to look at the members again."""
        news, self._news = self._news, asyncio.Event()
        news.set()

    def close(self) -> None:
        """End every wait with Unavailable."""
        self._closed = True
        self.changed()

    def _say_outage(self) -> None:
        if not self._said:
            self._said = True
            wait = f"waiting up to {self._outage:g} s"
            self._say(f"no rollout server alive, {wait}: {self.reasons()}")
