"""Agents as a workflow: n runs of an agent for a row become a group of trajectories.

    row ─▶ session × n ─▶ worker (other processes) ── HTTP ──▶ Gateway ─▶ fleet
                               │ reward                            │ what it was answered
                               ▼                                   ▼
                               └────────────▶ trajectories ◀───────┘

Training and evaluation use it alike, as a `rlx.rollout.workflows.Workflow`.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from rlx.agents import loading, returns, trajectories
from rlx.agents.agent_options import DEFAULTS, AgentOptions
from rlx.agents.sessions import Session
from rlx.base import Group, RewardParts, Trajectory, UserError, packages_of, place, seed_of
from rlx.fleet.requests import Sampling
from rlx.observe import traces
from rlx.rollout.images import ImagePrompts
from rlx.rollout.workflows import Generator, Task, conversation
from rlx.system.threads import run_all
from rlx.workers.worker_pool import Evicted, WorkerError, WorkerKind, WorkerPool

if TYPE_CHECKING:
    from rlx.agents.api_gateway import Gateway
    from rlx.fleet.client import Fleet

NO_COMPLETION = "it asked for no completion; does it use the base_url that `run` is given?"
_MOVES = 3  # processes that a run may lose because of other runs before it fails
_ROW_CHARACTERS = 200
_REPORT_SECONDS = 5.0  # a loop is blocked before its process reports where


class AgentError(RuntimeError):
    """An agent failed; the message has its reason, and its traceback if it raised."""


@dataclass(frozen=True, eq=False)
class _Front:
    """The gateway in front of one fleet, and the processes of the agents that ask it."""

    fleet: Generator
    gateway: "Gateway"
    workers: WorkerPool


class AgentWorkflow:
    """Runs an agent class (docs/agents.md); UserError if it is none, or without the extra."""

    def __init__(
        self,
        # The class, or its name as `loading.load_class` takes it. It is imported again in the
        # processes that run it, so a class of a notebook must move to a file.
        agent: str | type,
        tokenizer: Any,  # of transformers, with the model's chat template
        # Of training, for what requests leave out. `max_new_tokens` is also their limit, and
        # another temperature is refused, because the losses count on it.
        sampling: Sampling,
        n: int,  # runs per group
        *,
        kwargs: Mapping[str, Any] | None = None,  # of the class's constructor, JSON values
        images: ImagePrompts | None = None,  # of the model; None: it takes none
        options: AgentOptions = DEFAULTS,
    ):
        cls = loading.load_class(agent) if isinstance(agent, str) else agent
        if loading.kind(cls) != "agent":
            raise UserError(f"{cls.__name__} is a workflow of rlx, not an agent; use it as it is")
        self.agent, run = cls.__name__, getattr(cls, "run", None)
        self.name = f"{self.agent} {place(run)}".rstrip()
        self._gateway_class = gateway_class()
        self._tokenizer, self._sampling, self._n = tokenizer, sampling, n
        self._options, self._images = options, images
        name = agent if isinstance(agent, str) else name_of(cls)
        loading.instance(cls, kwargs)  # here rather than in every process, if it cannot be made
        self._kind = worker_kind(name, kwargs or {}, options)
        self._front: _Front | None = None
        self._starting = asyncio.Lock()

    async def run(self, fleet: Generator, task: Task) -> Group:
        """Return the group of the task's row: the trajectories of all runs, or raise AgentError."""
        # An attempt wraps the fleet.
        front = await self._front_of(getattr(fleet, "fleet", fleet))
        data = with_messages(task.row, self._options.question_key, self._options.system_prompt)
        defaults = task.sampling or self._sampling
        runs = []
        for i in range(task.n or self._n):
            seed = seed_of(f"{task.seed} run {i}".encode())
            session = partial(
                front.gateway.sessions.open, replace(defaults, seed=seed),
                temperature_fixed=task.sampling is None, priority=task.priority, fleet=fleet,
            )  # fmt: skip
            runs.append(self._run_once(front, data, f"{task.group_id}.{i}", session))
        return Group(task.group_id, tuple(t for run in await run_all(*runs) for t in run), task.row)

    async def aclose(self) -> None:
        """End the processes and the gateway; called on the loop that `run` was on."""
        front, self._front = self._front, None
        if front:
            await front.workers.close()
            await front.gateway.stop()

    async def _front_of(self, fleet: Generator) -> "_Front":
        """Return the gateway in front of `fleet`, with workers that are ready."""
        async with self._starting:
            if self._front is None or self._front.fleet is not fleet:
                await self.aclose()
                o, args = self._options, (cast("Fleet", fleet), self._tokenizer)
                gateway = self._gateway_class(*args, host=o.host, tls=o.tls, images=self._images)
                workers = WorkerPool(self._kind, o.workers, single_job=o.process_per_run)
                self._front = _Front(fleet, gateway, workers)
                try:
                    await gateway.start()
                    await workers.start()
                except BaseException:  # the attempt that waits may time out; the next starts again
                    await self.aclose()
                    raise
            return self._front

    async def _run_once(
        self, front: "_Front", data: Mapping[str, Any], run_id: str,
        new_session: Callable[[], Session],
    ) -> list[Trajectory]:  # fmt: skip
        """Return one run's trajectories; start it again where another run cost it its process."""
        for _ in range(_MOVES):
            session = new_session()
            try:
                url = front.gateway.base_url(session)
                began = time.monotonic()
                with traces.span("agent", agent=self.agent, run=run_id):
                    session.trace = traces.here()
                    value = await run_agent(front.workers, data, url, session.key)
                if value is None and session.interactions:
                    with suppress(TimeoutError):
                        wait = session.rewarded.wait()
                        await asyncio.wait_for(wait, self._options.reward_seconds)
                    value = session.reward
                ids = {i.completion_id for i in session.interactions}
                if not ids:
                    raise AgentError(NO_COMPLETION)
                if wrong := returns.mistake(value, ids):
                    raise AgentError(wrong)
                return trajectories.of_run(
                    session.interactions, value, run_id, agent=self.agent,
                    turn_discount=self._options.turn_discount, seconds=time.monotonic() - began,
                    # An evaluation counts each completion once.
                    export=self._options.export if session.temperature_fixed else "tree",
                )  # fmt: skip
            except Evicted:
                continue
            except (AgentError, WorkerError) as error:
                raise self._failure(error, data) from error
            finally:
                front.gateway.sessions.end(session)
        raise self._failure(AgentError(f"its process was killed {_MOVES} times"), data)

    def _failure(self, error: Exception, data: Mapping[str, Any]) -> AgentError:
        row = str({k: v for k, v in data.items() if k not in ("answer", "messages")})
        return AgentError(f"agent {self.agent} failed on row {row[:_ROW_CHARACTERS]}: {error}")


def worker_kind(name: str, kwargs: Mapping[str, Any], options: AgentOptions) -> WorkerKind:
    """Return the kind of process that runs the agent class `name`, made with `kwargs`."""
    report = min(_REPORT_SECONDS, options.block_seconds / 2)
    first = {"class": name, "kwargs": dict(kwargs), "report": report, "no_proxy": options.host}
    rest = options.limits, options.start, options.block_seconds
    return WorkerKind("rlx.agents.worker", first, *rest)


async def run_agent(
    workers: WorkerPool, data: Mapping[str, Any], base_url: str, api_key: str,
    seconds: float | None = None,
) -> Any:  # fmt: skip
    """Return what a new agent's `run` on `data` does: float, RewardParts or float by completion.

    Cancelling this cancels the agent. After `seconds` it fails, at the line where it waits.
    Raises AgentError if the agent raised, WorkerError if its process died, Evicted if another run
    ended that, UserError if `data` cannot be sent.
    """
    try:
        text = json.dumps(data)
    except (TypeError, ValueError) as error:
        problem = f"a row cannot be given to an agent, {error}"
        raise UserError(f"{problem}; rows are JSON: {str(data)[:120]}") from None
    async with workers.worker() as worker:
        await worker.ready()
        job = {"data": text, "base_url": base_url, "api_key": api_key, "seconds": seconds}
        message = await worker.run_job(job)
    if "value" in message:
        parts = message.get("parts")
        return RewardParts(message["value"], parts) if parts else message["value"]
    raise AgentError(f"{message.get('error')}\n{message.get('traceback')}".rstrip())


def with_messages(row: Mapping[str, Any], key: str, system: str) -> dict[str, Any]:
    """Return a row as agents get it: its `messages`, or `system` and its question."""
    if key not in row or ("messages" in row and key != "messages"):
        return dict(row)
    return {**row, "messages": conversation(row[key], system)}


def name_of(cls: type) -> str:
    """Return the name by which other processes load a class; UserError for one in no file."""
    module = sys.modules.get(cls.__module__)
    file = getattr(module, "__file__", None)
    if module is None or getattr(module, cls.__qualname__, None) is not cls:
        raise UserError(f"{cls.__qualname__} is not at the top of a module; move it there")
    if cls.__module__ != "__main__" and not cls.__module__.startswith("file_"):
        return f"{cls.__module__}:{cls.__qualname__}"
    if not file or not file.endswith(".py"):
        problem = f"{cls.__qualname__} is in no file, and agents run in processes of their own"
        raise UserError(f"{problem}; put it into one")
    return f"{os.path.abspath(file)}:{cls.__qualname__}"


def gateway_class() -> "type[Gateway]":
    """Return the class; raise UserError without the extra."""
    with packages_of("agents", "agents need packages"):
        from rlx.agents.api_gateway import Gateway
    return Gateway
