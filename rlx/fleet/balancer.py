"""Which servers there are, which are alive, and which one a call goes to.

Everything here runs on one event loop.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable

from rlx.base import Unavailable
from rlx.fleet.member import Member

MAX_SESSIONS = 1 << 16  # remembered; the longest unused is forgotten


class Roster:
    """The members of a fleet.

    Args:
      outage: seconds that a call waits while none is alive.
      say: takes one line for the user.

    Attributes:
      members: who is asked; servers may join and leave.
    """

    def __init__(self, outage: float, say: Callable[[str], None]):
        self.members: list[Member] = []
        self._outage, self._say = outage, say
        self._sessions: OrderedDict[str, Member] = OrderedDict()
        self._news = asyncio.Event()
        self._told = self._closed = False
        self._turn = 0

    async def complete(self) -> None:
        """Returns when every member is live; raises Unavailable when one can never be."""
        while not all(member.live for member in self.members):
            self.raise_fatal()
            await self._news.wait()

    async def pick(
        self, session: str | None, last: Member | None, full: Member | None = None
    ) -> Member:
        """The session's or request's own server while it lives, else the least loaded one.

        Args:
          full: not this one where there is another.
        """
        live = await self.alive()
        chosen = self._sessions.get(session) if session is not None else last
        if chosen not in live:
            self._turn += 1
            order = live[self._turn % len(live) :] + live[: self._turn % len(live)]
            order = [member for member in order if member is not full] or order
            chosen = min(order, key=lambda member: member.load / max(1, member.status.slots))
        if session is not None:
            self._sessions[session] = chosen
            self._sessions.move_to_end(session)
            if len(self._sessions) > MAX_SESSIONS:
                self._sessions.popitem(last=False)
        return chosen

    async def alive(self, check: Callable[[], None] = lambda: None) -> list[Member]:
        """The live servers, of which there is at least one; waits for it up to `outage`.

        Args:
          check: raises when waiting is in vain.
        """
        self.raise_foreign()
        try:
            async with asyncio.timeout(self._outage):
                while not (live := [member for member in self.members if member.live]):
                    if self._closed:
                        raise RuntimeError("the fleet is closed")
                    self.raise_fatal()
                    check()
                    self._tell_outage()
                    await self._news.wait()
        except TimeoutError:
            raise Unavailable(
                f"no rollout server alive for {self._outage:g} s: {self.reasons()}; "
                "look at the servers' logs and start them again"
            ) from None
        self._told = False
        return live

    def reasons(self) -> str:
        """Why those that are not live are not."""
        if not self.members:
            return "there is no address of one"
        return "; ".join(f"{m.address} ({m.reason})" for m in self.members if not m.live)

    def raise_fatal(self) -> None:
        """Raises why a member can never be live, if one cannot."""
        for member in self.members:
            if member.fatal:
                raise Unavailable(str(member.fatal))

    def raise_foreign(self) -> None:
        """Raises what is known of somebody else who publishes to our servers."""
        for member in self.members:
            if member.foreign:
                raise member.foreign

    def changed(self) -> None:
        """Has everybody who waits look again."""
        news, self._news = self._news, asyncio.Event()
        news.set()

    def close(self) -> None:
        """Nobody is waited for any more."""
        self._closed = True
        self.changed()

    def _tell_outage(self) -> None:
        if not self._told:
            self._told = True
            wait = f"waiting up to {self._outage:g} s"
            self._say(f"no rollout server alive, {wait}: {self.reasons()}")
