"""Train on the sessions of outside applications.

    executor ── run(group 17) ─▶ slot 17 ◀── a new session joins the oldest free slot, or gets 429
                                   │ its sessions have ended, with rewards
                                   ▼
                                 group 17, all tokens sampled since slot 17 was admitted

Admission control admits slots, so its bound on staleness holds for sessions. A resumed run keeps
sessions in their slots; after a kill it repeats the lost steps with the same sessions.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np

from rlx.agents import trajectories
from rlx.agents.agent_options import AgentOptions
from rlx.agents.online import OnlineOptions, OnlineSessions
from rlx.agents.session_state import Denied, SessionState
from rlx.agents.workflow import gateway_class
from rlx.base import Group, Trajectory, Unavailable, UserError
from rlx.fleet import tls
from rlx.fleet.client import Fleet
from rlx.fleet.requests import Sampling
from rlx.rollout.images import ImagePrompts
from rlx.rollout.workflows import Generator, Task, Workflow


@dataclass(frozen=True)
class RunContext:
    """A run's directory of sessions, its versions and its limits."""

    directory: Path  # of the database
    first_group: int  # the run's next; a kill lost later slots, whose open sessions are ended
    version: Callable[[], int]  # returns the servers' newest version
    needed: Callable[[], int]  # returns the oldest version whose tokens a restart may still need
    max_tokens: int  # limit of a row's length; 0 for none
    say: Callable[[str], None]  # prints a line


@dataclass(eq=False)
class _Slot:
    group_id: int
    version: int
    full: asyncio.Future[list[str]]
    sessions: list[str] = field(default_factory=list)
    task: str = ""


@dataclass(eq=False)
class OnlineWorkflow:
    """Returns groups of finished sessions; UserError if its gateway needs TLS and has none."""

    options: OnlineOptions  # of the sessions
    agents: AgentOptions  # discount, export and delay of rewards
    listen: Any  # host, port, tls_cert and tls_key of the gateway
    tokenizer: Any
    sampling: Sampling
    n: int  # sessions of one task that make a group
    held_out: Workflow  # workflow for held-out questions
    images: ImagePrompts | None = None  # of the model; None: it takes none
    context: RunContext = field(init=False)  # set before the first `run`
    name: ClassVar[str] = "online"

    def __post_init__(self) -> None:
        self._tls = tls.server_tls(self.listen.tls_cert, self.listen.tls_key, "")
        if not tls.is_loopback(self.listen.host) and not self._tls:
            problem = f"online.host={self.listen.host} listens beyond this machine"
            remedy = "give online.tls_cert and online.tls_key, or listen at 127.0.0.1"
            raise UserError(f"{problem}; {remedy}")
        self._gateway_class = gateway_class()
        self._gateway: Any = None  # set once it listens
        self._starting = asyncio.Lock()
        self._slots: dict[int, _Slot] = {}
        self._admitted = time.monotonic()  # when the newest slot began, seconds

    async def run(self, fleet: Generator, task: Task) -> Group:
        """Return a group of finished sessions, or of a held-out row."""
        if task.sampling is not None:
            return await self.held_out.run(fleet, task)
        online = await self._sessions_for(fleet)
        full = asyncio.get_running_loop().create_future()
        self._admitted = time.monotonic()
        slot = self._slots[task.group_id] = _Slot(task.group_id, task.version, full)
        # Sessions from before a restart, or from a failed attempt at this group.
        before = [s for s in online.states.values() if s.slot == task.group_id and not s.why]
        slot.sessions = [s.id for s in before if s.taken in ("", "trained")][: self.n]
        slot.task = before[0].task if slot.sessions else ""
        try:
            self._settle(0.0)
            names = await full
        finally:
            self._slots.pop(task.group_id, None)
        results: list[Trajectory] = []
        for number, name in enumerate(names):
            state, interactions = online.states[name], online.sessions[name].interactions
            assert state.reward is not None
            results += trajectories.of_run(
                interactions, state.reward, f"{task.group_id}.{number}", agent=self.name,
                turn_discount=self.agents.turn_discount, export=self.agents.export,
                seconds=state.touched - state.opened,
            )  # fmt: skip
            online.take(name, "trained")
        # After a kill, repeated steps use tokens of versions that do not exist yet.
        now = self.context.version()
        trained = (replace(t, versions=np.minimum(t.versions, now)) for t in results)
        return Group(task.group_id, tuple(trained), task.row)

    def drop(self, group_id: int, why: str) -> None:
        """Keep a group's sessions for export, because the group is not trained on."""
        if self._gateway:
            self._gateway.online.drop(group_id, why)

    async def aclose(self) -> None:
        """Stop the gateway; the sessions stay in the database."""
        gateway, self._gateway = self._gateway, None
        if gateway:
            await gateway.stop()

    async def _sessions_for(self, fleet: Generator) -> OnlineSessions:
        """Return the sessions of a gateway in front of `fleet`, started on the first call."""
        async with self._starting:
            if self._gateway is None:
                where, args = self.listen, (self.context.directory, self.options, self.sampling)
                try:
                    online = OnlineSessions(*args, temperature_fixed=True)
                    gateway = self._gateway_class(
                        cast(Fleet, fleet), self.tokenizer, host=where.host, port=where.port,
                        tls=self._tls, online=online, images=self.images,
                    )  # fmt: skip
                    await gateway.start()
                except UserError as error:
                    raise Unavailable(str(error)) from error
                self._gateway = gateway
                online.admit, online.changed = self._admit, self._settle
                online.deletable = partial(self._is_deletable, online)
                for state in list(online.states.values()):
                    if not state.ended and state.slot >= self.context.first_group:
                        online.end(state.id, "restart")
                by = f"; certificate: {self._tls.cert}" if self._tls else ""
                self.context.say(f"sessions at {gateway.base_url()}{by}")
            return self._gateway.online

    def _is_deletable(self, online: OnlineSessions, state: SessionState) -> bool:
        if state.why:  # rewarded but not trained on: kept until exported
            return state.reward is None or state.taken == "exported"
        return _oldest(online, state.id) < self.context.needed()

    def _admit(self, task: str) -> int:
        """Return the slot for a session of `task`, or raise Denied."""
        if self.n > 1 and not task:
            problem = f"sampling.n_samples={self.n} sessions of one task_id make a group"
            raise Denied("nameless", f"{problem}; give task_id")
        for slot in sorted(self._slots.values(), key=lambda s: (s.task != task, s.group_id)):
            if len(slot.sessions) < self.n and (not slot.sessions or slot.task == task):
                slot.task = task
                return slot.group_id
        wait = time.monotonic() - self._admitted  # as long again as there has been no slot
        raise Denied("full", "training admits no more sessions now; try again", wait)

    def _settle(self, now: float) -> None:
        """Complete slots whose sessions have all ended; drop sessions that cannot be trained on."""
        if self._gateway is None:
            return
        online = self._gateway.online
        for state in [s for s in online.states.values() if not s.taken and s.slot in self._slots]:
            if state.id not in (ids := self._slots[state.slot].sessions):
                ids.append(state.id)
        for slot in list(self._slots.values()):
            ready = []
            for name in list(slot.sessions):
                state = online.states[name]
                why = self._unusable(online, state, slot.version) if state.ended else ""
                late = now - state.touched < self.agents.reward_seconds
                if why == _NO_REWARD and state.completions and late:
                    continue
                if why:
                    slot.sessions.remove(name)
                    online.take(name, state.taken or "dropped", why)
                elif state.ended:
                    ready.append(state)
            last = max((state.touched for state in ready), default=now)
            over = len(ready) == len(slot.sessions) and now - last > self.options.idle_seconds
            if over and len(ready) == 1 < self.n:  # else it would keep its slot for ever
                online.take(slot.sessions.pop(), ready[0].taken or "dropped", _SINGLE)
            elif over or len(ready) == self.n:
                del self._slots[slot.group_id]
                if not slot.full.done():  # not cancelled
                    slot.full.set_result([state.id for state in ready])

    def _unusable(self, online: OnlineSessions, state: SessionState, version: int) -> str:
        """Return the reason why an ended session cannot be trained on, or ""."""
        interactions = online.sessions[state.id].interactions
        if not interactions or state.reward is None:
            return _NO_REWARD if interactions else "it has no answer"
        if _oldest(online, state.id) < version:
            return "its tokens are older than its slot"
        longest = max(len(i.prompt_tokens) + len(i.completion.tokens) for i in interactions)
        if 0 < self.context.max_tokens < longest:
            return f"{longest} tokens exceed a training row of {self.context.max_tokens}"
        return ""


_NO_REWARD, _SINGLE = "it has no reward", "no other session of its task came"


def _oldest(online: OnlineSessions, name: str) -> int:
    """Return the oldest version of a session's tokens, 0 without any."""
    versions = [i.completion.versions for i in online.sessions[name].interactions]
    return min((int(v.min()) for v in versions if len(v)), default=0)
