"""Sessions of applications outside as a run's rollouts: what they end with is trained on.

    executor ── run(group 17) ─▶ slot 17 ◀── a session takes a place in the oldest slot, or gets 429
                                   │ its sessions ended, with rewards
                                   ▼
                                 group 17, every token of versions since slot 17 was admitted

A slot is what admission control lets in, so its bound holds for sessions as for prompts. After a
restart of the run a session goes on in the slot that it had. A run that goes on from before a kill
comes by the same slots again and trains on the sessions that it has for them.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np

from rlx.agents import trajectories
from rlx.agents.online import OnlineOptions, OnlineSessions
from rlx.agents.session_state import Denied, SessionState
from rlx.agents.workflow import AgentOptions, gateway_class
from rlx.base import Group, Trajectory, Unavailable, UserError
from rlx.fleet import tls
from rlx.fleet.client import Fleet
from rlx.fleet.requests import Sampling
from rlx.rollout.workflows import Generator, Task, Workflow


@dataclass(frozen=True)
class RunPlace:
    """Where a run keeps its sessions, and what it can train on.

    Attributes:
      directory: of the database.
      dealt: groups that the run has begun before: sessions in the places of others are of a time
        that a kill took with it.
      version: returns the newest version that the servers have.
      needed: returns the oldest version whose tokens a restart may still ask for.
      max_tokens: of a row; 0: any number.
      say: takes a line for the terminal.
    """

    directory: Path
    dealt: int
    version: Callable[[], int]
    needed: Callable[[], int]
    max_tokens: int
    say: Callable[[str], None]


@dataclass(eq=False)
class _Slot:
    group_id: int
    version: int
    full: asyncio.Future[list[str]]
    sessions: list[str] = field(default_factory=list)
    task: str = ""


class OnlineWorkflow:
    """Waits for sessions in place of asking anything by itself.

    Args:
      options: of the sessions. agents: how rewards become returns, and how late they may come.
      listen: host, port, tls_cert and tls_key of the gateway.
      tokenizer, sampling, n: of the run; n: sessions a group, of one task where n > 1.
      judge: answers held-out questions.

    Raises:
      UserError: others than this machine could connect, without TLS.
    """

    name = "online"
    place: RunPlace  # set before the first group is asked for

    def __init__(
        self,
        options: OnlineOptions,
        agents: AgentOptions,
        listen: Any,
        tokenizer: Any,
        sampling: Sampling,
        n: int,
        judge: Workflow,
    ):
        self._tls = tls.server_tls(listen.tls_cert, listen.tls_key, "")
        if not tls.is_loopback(listen.host) and not self._tls:
            raise UserError(
                f"online.host={listen.host} listens beyond this machine; give online.tls_cert and "
                "online.tls_key, or listen at 127.0.0.1"
            )
        self._options, self._agents, self._listen = options, agents, listen
        self._tokenizer, self._sampling, self._n = tokenizer, sampling, n
        self._judge, self._gateway_class = judge, gateway_class()
        self._gateway: Any = None  # with sessions, once it listens
        self._starting = asyncio.Lock()
        self._slots: dict[int, _Slot] = {}
        self._admitted: deque[float] = deque(
            maxlen=_RECENT
        )  # when slots began, of the loop's clock

    async def run(self, fleet: Generator, task: Task) -> Group:
        """Return the group of the next sessions, or a held-out row's."""
        if task.sampling is not None:
            return await self._judge.run(fleet, task)
        online = await self._at(fleet)
        full = asyncio.get_running_loop().create_future()
        self._admitted.append(asyncio.get_running_loop().time())
        slot = self._slots[task.group_id] = _Slot(task.group_id, task.version, full)
        # Of before a restart, or of an attempt that failed after they had been taken.
        before = [s for s in online.states.values() if s.slot == task.group_id and not s.why]
        slot.sessions = [s.id for s in before if s.taken in ("", "trained")][: self._n]
        slot.task = before[0].task if slot.sessions else ""
        try:
            self._settle(0.0)
            names = await full
        finally:
            self._slots.pop(task.group_id, None)
        found: list[Trajectory] = []
        for number, name in enumerate(names):
            state, made = online.states[name], online.live[name].interactions
            assert state.reward is not None
            found += trajectories.of_run(
                made, state.reward, f"{task.group_id}.{number}", agent=self.name,
                turn_discount=self._agents.turn_discount, export=self._agents.export,
                seconds=state.touched - state.opened,
            )  # fmt: skip
            online.take(name, "trained")
        # A kill lost the steps that made later versions; they are repeated with the same sessions.
        now = self.place.version()
        trained = (replace(t, versions=np.minimum(t.versions, now)) for t in found)
        return Group(task.group_id, tuple(trained), task.row)

    async def aclose(self) -> None:
        """End the gateway; the sessions stay in the database."""
        gateway, self._gateway = self._gateway, None
        if gateway:
            await gateway.stop()

    async def _at(self, fleet: Generator) -> OnlineSessions:
        """Return the sessions, with a gateway in front of `fleet` that listens."""
        async with self._starting:
            if self._gateway is None:
                where = self._listen
                try:
                    online = OnlineSessions(
                        self.place.directory, self._options, self._sampling, temperature_fixed=True
                    )
                    gateway = self._gateway_class(
                        cast(Fleet, fleet), self._tokenizer, host=where.host, port=where.port,
                        tls=self._tls, online=online,
                    )  # fmt: skip
                    await gateway.start()
                except UserError as error:
                    raise Unavailable(str(error)) from error
                self._gateway = gateway
                online.admit, online.changed = self._admit, self._settle
                online.covered = partial(self._covered, online)
                for state in list(online.states.values()):
                    if not state.ended and state.slot >= self.place.dealt:
                        online.end(state.id, "restart")  # its place may be long in coming
                by = f"; certificate: {self._tls.cert}" if self._tls else ""
                self.place.say(f"sessions at {gateway.base_url()}{by}")
            return self._gateway.online

    def _covered(self, online: OnlineSessions, state: SessionState) -> bool:
        """Return whether nothing asks for a session that was taken any more."""
        if state.why:  # what users said and nobody could train on is kept until it is exported
            return state.reward is None or state.taken == "exported"
        return _oldest(online, state.id) < self.place.needed()

    def _admit(self, task: str) -> int:
        """Return the slot for a session of `task`; raise Denied where there is none."""
        if self._n > 1 and not task:
            what = f"sampling.n_samples={self._n} sessions of one task_id make a group"
            raise Denied("nameless", f"{what}; give task_id")
        slots = sorted(self._slots.values(), key=lambda slot: (slot.task != task, slot.group_id))
        for slot in slots:
            if len(slot.sessions) < self._n and (not slot.sessions or slot.task == task):
                slot.task = task
                return slot.group_id
        wait = expected_wait(self._admitted, asyncio.get_running_loop().time())
        what = "as many sessions are under way as training allows; try again"
        raise Denied("full", what, wait)

    def _settle(self, now: float) -> None:
        """Give the slots whose sessions have all ended to their groups; let go of unfit ones."""
        if self._gateway is None:
            return
        online = self._gateway.online
        for state in [s for s in online.states.values() if not s.taken and s.slot in self._slots]:
            if state.id not in (own := self._slots[state.slot].sessions):
                own.append(state.id)
        for slot in list(self._slots.values()):
            ready = []
            for name in list(slot.sessions):
                state = online.states[name]
                why = self._unfit(online, state, slot.version) if state.ended else ""
                late = now - state.touched < self._agents.reward_seconds
                if why == _NO_REWARD and state.completions and late:
                    continue
                if why:
                    slot.sessions.remove(name)
                    online.take(name, state.taken or "dropped", why)
                elif state.ended:
                    ready.append(state)
            last = max((state.touched for state in ready), default=now)
            alone = len(ready) == len(slot.sessions) > 1  # and no other session of the task comes
            if len(ready) == self._n or (alone and now - last > self._options.idle_seconds):
                del self._slots[slot.group_id]
                if not slot.full.done():  # cancelled in this turn of the loop: nobody waits
                    slot.full.set_result([state.id for state in ready])

    def _unfit(self, online: OnlineSessions, state: SessionState, version: int) -> str:
        """Return why an ended session cannot be trained on; "" where it can."""
        made = online.live[state.id].interactions
        if not made or state.reward is None:
            return _NO_REWARD if made else "nothing was asked"
        if _oldest(online, state.id) < version:
            return "it began before its place in training"
        longest = max(len(i.prompt_tokens) + len(i.completion.tokens) for i in made)
        if 0 < self.place.max_tokens < longest:
            return f"{longest} tokens are more than a row of training has"
        return ""


_NO_REWARD = "no reward was told"
_AT_ONCE_SECONDS = 0.1  # slots that begin closer together were let in by one step
_RECENT = 64  # slots, whose rate is that of the next


def expected_wait(admitted: Sequence[float], now: float) -> float:
    """Return in how many seconds the next slot is to be expected; 0 where nothing is known.

    Training's steps let slots in, several at once: the mean time between two of those moments,
    less what has passed since the last. Once that is over, the wait so far is expected again.

    Args:
      admitted: when slots began, seconds, ascending. now: of the same clock.
    """
    moments = [b for a, b in pairwise((-math.inf, *admitted)) if b - a > _AT_ONCE_SECONDS]
    if len(moments) < 2:
        return 0.0
    mean, since = (moments[-1] - moments[0]) / (len(moments) - 1), now - admitted[-1]
    return mean - since if since < mean else since


def _oldest(online: OnlineSessions, name: str) -> int:
    """Return the oldest version of a session's tokens; 0 without any."""
    found = [i.completion.versions for i in online.live[name].interactions]
    return min((int(v.min()) for v in found if len(v)), default=0)
