"""Choice of the server for a call: the session's own, or the least loaded live one.

Everything here runs on one event loop.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable

from rlx.base import Unavailable
from rlx.fleet.member import Member
from rlx.fleet.silence import silent_seconds

_LEAST = 12  # × `hang` is the least time to a token: the server may compile
MAX_SESSIONS = 1 << 16  # then the least recently used is forgotten


class Balancer:
    """Picks one server of a fleet for each call, which waits `outage` seconds while none is alive.

    A server that does not answer Status for `hang` seconds counts as hung. `say` reports a line to
    the user.
    """

    def __init__(self, outage: float, hang: float, say: Callable[[str], None]):
        self.members: list[Member] = []  # the client adds and removes them
        # (address, instance) of servers that may get calls; None: all.
        self.admitted: frozenset[tuple[str, str]] | None = None
        self._outage, self._hang, self._say = outage, hang, say
        self._sessions: OrderedDict[str, Member] = OrderedDict()
        self._news = asyncio.Event()
        self._outage_reported = self._closed = False
        self._turn = 0

    async def complete(self) -> None:
        """Wait until a member and all given addresses are live; Unavailable if one can never be."""
        while not (
            any(member.live for member in self.members)
            and all(member.live or member.joined for member in self.members)
        ):
            self.raise_fatal()
            await self._news.wait()

    async def pick(
        self, session: str | None, last: Member | None, avoid: Member | None = None
    ) -> Member:
        """Return the session's or request's last server if it is live, else the least loaded one.

        `avoid` is used only if there is no other. Raises as `alive`.
        """
        live = await self.alive(only_admitted=True)
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

    def forget(self, session: str | None, member: Member) -> None:
        """Unbind `session` from `member`, which failed a call."""
        if session is not None and self._sessions.get(session) is member:
            del self._sessions[session]

    def silent(self, member: Member) -> float:
        """Return for how long `member` has sent no token although others did; 0.0: not too long."""
        others = [other.waits for other in self.members if other is not member]
        least = _LEAST * self._hang
        return silent_seconds(member.waits, others, time.monotonic(), least)

    async def alive(
        self, check: Callable[[], None] = lambda: None, only_admitted: bool = False
    ) -> list[Member]:
        """Return the live servers, all or `only_admitted`; wait `outage` seconds for the first.

        `check` is called before each wait, and raises if waiting is useless. Unavailable if no
        server became live in time or ever can, or after `close`; UserError if another publishes.
        """
        self.raise_foreign()
        try:
            async with asyncio.timeout(self._outage):
                while not (live := [m for m in self.members if self._serves(m, only_admitted)]):
                    if self._closed:
                        raise Unavailable("the run that owns the rollout servers has ended")
                    self.raise_fatal()
                    check()
                    if not self._outage_reported:
                        self._outage_reported = True
                        wait = f"waiting up to {self._outage:g} s"
                        self._say(f"no rollout server alive, {wait}: {self.reasons()}")
                    await self._news.wait()
        except TimeoutError:
            raise Unavailable(
                f"no rollout server alive for {self._outage:g} s: {self.reasons()}; "
                "look at the servers' logs and start them again"
            ) from None
        self._outage_reported = False
        return live

    def reasons(self) -> str:
        """Return `address (reason); …` of the servers that get no calls."""
        if not self.members:
            return "no address is known"
        pairs = [(m, "not checked" if m.live else m.reason) for m in self.members
                 if not self._serves(m, only_admitted=True)]  # fmt: skip
        return "; ".join(f"{m.address} ({why})" for m, why in pairs)

    def raise_fatal(self) -> None:
        """Raise Unavailable if a member that was given as an address can never be live."""
        for member in self.members:
            if member.fatal and not member.joined:
                raise Unavailable(str(member.fatal))

    def raise_foreign(self) -> None:
        """Raise UserError if another client publishes to one of our servers."""
        for member in self.members:
            if member.foreign:
                raise member.foreign

    def _serves(self, member: Member, only_admitted: bool) -> bool:
        if not only_admitted or self.admitted is None:
            return member.live
        return member.live and (member.address, member.status.instance) in self.admitted

    def changed(self) -> None:
        """Wake every waiting call to check the members again."""
        news, self._news = self._news, asyncio.Event()
        news.set()

    def close(self) -> None:
        """End every wait with Unavailable."""
        self._closed = True
        self.changed()
