"""The fleet as the rollout side sees it: one `generate`, one `score`, whatever becomes of single
servers.

    generate ─▶ least loaded live server ─▶ pieces of n samples ─▶ all stopped: done
         ▲            (a session's own)            │
         └── each unfinished sample, prompt + its tokens so far ◀── lost, failed or aborted

Everything here runs on one event loop.
"""

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlx.base import UserError
from rlx.fleet import tls as transport
from rlx.fleet import wire
from rlx.fleet.addresses import FILE, read_addresses
from rlx.fleet.balancer import Roster
from rlx.fleet.member import Busy, Delivery, Failed, Limits, Lost, Member, Refused
from rlx.fleet.publish import Weights, stage, sweep
from rlx.fleet.requests import Sampling, ScoreRequest
from rlx.fleet.sample import Completion, Job, Sample, finished, split
from rlx.fleet.tls import Tls

__all__ = ["Completion", "Fleet", "Limits", "PublishReport", "ServerStatus"]

TELL_SECONDS, TELL_AGAIN_SECONDS = 1.0, 10.0  # of waiting for servers at the start
MAX_ATTEMPTS = 8  # in a row that bring a sample no new token, or a sequence no scores


@dataclass(frozen=True)
class PublishReport:
    """Who has the version now, how each got it, how long until all had it.

    Attributes:
      acks: addresses of the servers that took it.
      deliveries: how, in the order of `acks`.
      num_bytes: of the whole file, written once.
      seconds: from the arrays to the last acknowledgement.
    """

    acks: tuple[str, ...]
    deliveries: tuple[Delivery, ...]
    num_bytes: int
    seconds: float

    @property
    def sent_bytes(self) -> int:
        """That went over the wire, to all servers; none by path."""
        return sum(delivery.sent_bytes for delivery in self.deliveries)

    @property
    def stall_seconds(self) -> float:
        """The longest that one of them decoded no token."""
        return max((delivery.paused_ns for delivery in self.deliveries), default=0) / 1e9


@dataclass(frozen=True)
class ServerStatus:
    """One server: what the client knows and, while it is live, what it last said."""

    address: str
    live: bool
    load: int  # samples and scores of ours on it
    reason: str  # why it is not live
    version: int
    running: int
    queued: int
    slots: int
    tokens_generated: int
    paused: bool


class Fleet:
    """Rollout servers behind one `generate`, one `score` and one `publish`.

    Args:
      addresses: host:port of each server; they may still be starting, die and come back. @PATH is a
        file of them that is read again and again: a server that is added to it gets the weights of
        now and then requests, one that is taken out of it finishes those it has.
      token: bearer token of the servers.
      tls: how to know the servers, and what to show them; None: plain, as on loopback.
      limits: deadlines.
      publish_dir: where weights given as tensors are written once for all servers.
      kv_on_update: one of KV_POLICIES; None: as each server was started.
      on_message: takes one line for the user when a server is lost or none is alive.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        token: str | None = None,
        tls: Tls | None = None,
        limits: Limits | None = None,
        publish_dir: str = "/dev/shm",
        kv_on_update: str | None = None,
        on_message: Callable[[str], None] | None = None,
    ):
        self._limits = limits or Limits()
        self._publish_dir = publish_dir
        self._say = on_message or (lambda text: None)
        self._roster = Roster(self._limits.outage, self._say)
        self._weights: Weights | None = None
        self._publishing = asyncio.Lock()
        self._tasks: set[asyncio.Task] = set()
        self._given, self._connected = tuple(addresses), False

        def member(address: str) -> Member:
            return Member(
                address,
                limits=self._limits,
                wanted=lambda: self._weights,
                changed=self._roster.changed,
                say=self._say,
                token=token,
                tls=tls,
                kv=wire.KV_NUMBERS[kv_on_update],
            )

        self._member = member
        self._members = self._roster.members
        self._members += [member(address) for address in read_addresses(addresses)]
        if not self._members:
            raise UserError("the fleet has no server; give addresses as host:port")

    @property
    def live(self) -> frozenset[str]:
        """Addresses of the servers that get requests."""
        return frozenset(member.address for member in self._members if member.live)

    async def connect(self) -> None:
        """Returns when every server is live, or some are and the time is up.

        Raises:
          UserError: none answered in time, one refuses our token, or a host's name is unknown.
        """
        await asyncio.gather(*(transport.require_name(m.address) for m in self._members))
        sweep(self._publish_dir)
        for member in self._members:
            self._begin(self._keep(member))
        waiting = asyncio.create_task(self._tell_who_is_missing())
        try:
            async with asyncio.timeout(self._limits.connect):
                await self._roster.complete()
        except TimeoutError:
            missing = self._roster.reasons()
            if not any(member.live for member in self._members):
                raise UserError(
                    f"no rollout server answered within {self._limits.connect:g} s: "
                    f"{missing}; start them (python -m rlx.serve) or check the addresses"
                ) from None
            self._say(f"going on without {missing}")
        finally:
            waiting.cancel()
        self._connected = True
        if any(text.startswith(FILE) for text in self._given):
            self._begin(self._follow())

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start what goes on until it ends or the fleet is closed."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _keep(self, member: Member) -> None:
        """Keep `member` joined while it is one of ours; its last requests end before it goes."""
        running = asyncio.ensure_future(member.run())
        try:
            while member in self._members or member.load:
                if running.done():
                    if self._connected:  # else `connect` raises it
                        self._say(f"going on without {member.address}: {member.fatal}")
                    return
                await asyncio.wait([running], timeout=self._limits.probe_every)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def _follow(self) -> None:
        """Let servers join and leave as the files of addresses say."""
        known, before, told = tuple(m.address for m in self._members), None, ""
        while True:
            await asyncio.sleep(self._limits.probe_every)
            found = None
            try:
                found = await asyncio.to_thread(read_addresses, self._given)
                if found == before and found != known:  # read alike twice: not half written
                    await self._change(found)
                    known, told = found, ""
            except UserError as error:
                if str(error) != told:
                    told = str(error)
                    self._say(f"the servers stay as they are: {told}")
            before = found

    async def _change(self, addresses: Sequence[str]) -> None:
        """Begin to join those of `addresses` that are new, and to let go of those not there."""
        have = {member.address for member in self._members}
        new = [self._member(address) for address in addresses if address not in have]
        await asyncio.gather(*(transport.require_name(m.address) for m in new))
        for member in [m for m in self._members if m.address not in addresses]:
            self._members.remove(member)
            self._say(f"rollout server {member.address} is taken out; it finishes what it has")
        for member in new:
            self._members.append(member)
            self._begin(self._keep(member))
            self._say(f"rollout server {member.address} is added; it is given the weights of now")
        self._roster.changed()

    async def _tell_who_is_missing(self) -> None:
        """Says, while `connect` waits, for whom and for how long."""
        end, pause = time.monotonic() + self._limits.connect, TELL_SECONDS
        while True:
            await asyncio.sleep(pause)
            left, pause = end - time.monotonic(), TELL_AGAIN_SECONDS
            self._say(f"waiting up to {left:.0f} s for rollout servers: {self._roster.reasons()}")

    async def generate(
        self,
        prompt_tokens: Any,
        sampling: Sampling,
        n: int,
        *,
        session: str | None = None,
        priority: int = 0,
        watch: Callable[[int, np.ndarray, np.ndarray], None] | None = None,
    ) -> list[Completion]:
        """Draws `n` completions of one prompt.

        Args:
          prompt_tokens: [T] integers, T ≥ 1.
          sampling: with no seed, one is drawn here, so that a continued completion stays itself.
          n: ≥ 1; sample i is a function of (seed, i) and the weights.
          session: calls with the same one go to the same server while it lives.
          priority: higher first, where the engine has priorities.
          watch: called with a sample's index, tokens and logprobs whenever it has new ones.

        Raises:
          ValueError: the request cannot be served; the message says why.
          Unavailable: no server was alive for `limits.outage` seconds.
          Failed: the last of several attempts failed.
        """
        if sampling.seed is None:
            sampling = replace(sampling, seed=random.getrandbits(31))
        prompt = np.asarray(prompt_tokens, np.int32)
        samples = [Sample(index) for index in range(n)]
        await self._finish(Job(prompt, sampling, session, priority, watch), samples)
        return [sample.completion() for sample in samples]

    async def score(self, tokens: Any, first: int, *, temperature: float = 1.0) -> np.ndarray:
        """Log-probabilities of a sequence's tokens under the weights of now.

        All are of one version; which one, while a publish is under way, is left open.

        Args:
          tokens: [T] integers, T ≥ 2.
          first: in [1, T − 1], the first token to score.
          temperature: in [0.01, 100]; of log softmax(logits / temperature).

        Returns:
          [T] float32, nats; 0 before `first`.

        Raises:
          ValueError, UserError, Failed: as `generate`.
        """
        request = ScoreRequest(np.asarray(tokens, np.int32), first, temperature)
        member, full, attempts, busy = None, None, 0, 0
        while True:
            member = await self._roster.pick(None, member, full)
            try:
                scores = await member.score(request)
                return np.concatenate([np.zeros(first, np.float32), scores.logprobs])
            except Busy:
                member, full, busy = None, member, busy + 1
                await _wait(busy)
            except (Lost, Failed) as error:
                attempts += 1
                await _back_off(attempts, "a score", error)

    async def probe(
        self, prompts: Sequence[Any], sampling: Sampling, *, priority: int = 0
    ) -> dict[str, list[Completion]]:
        """Draws one completion of every prompt from every live server.

        Returns:
          address → completions, in the prompts' order; at least one server. One that is lost
          meanwhile is left out.

        Raises:
          UserError, ValueError, Failed: as `generate`.
        """
        if sampling.seed is None:
            sampling = replace(sampling, seed=random.getrandbits(31))
        jobs = [Job(np.asarray(p, np.int32), sampling, None, priority) for p in prompts]
        while True:
            live = await self._roster.alive()
            found = await asyncio.gather(*(self._answers(member, jobs) for member in live))
            if any(found):
                return {m.address: a for m, a in zip(live, found, strict=True) if a}

    async def publish(self, version: int, source: Any, method: str = "path") -> PublishReport:
        """Gives every live server `version`; a server that does not take it is out until it does.

        Args:
          version: stamped on the tokens of these weights.
          source: HF name → array, or the path of a safetensors file or HF directory (which must
            stay there until the next publish: a returning server gets it before anything else);
            or an Adapter.
          method: `path` for servers that see this file system, else `stream`; `delta`: as
            `stream`, but a server that has the version before gets only what changed. For that,
            both versions must be given as arrays, and each server keeps one file in memory.
            `adapter`: of an Adapter, which servers add to the model they were started with.

        Raises:
          UserError: no server took it (the message has the first reason), or none was alive.
        """
        async with self._publishing:
            start = time.monotonic()
            staging = asyncio.create_task(
                asyncio.to_thread(
                    stage, version, source, method, self._publish_dir, self._widespread()
                )
            )
            try:
                weights = await asyncio.shield(staging)
            except asyncio.CancelledError:  # the thread goes on, and its file must not stay
                staging.add_done_callback(_close_result)
                raise
            previous, self._weights = self._weights, weights
            try:
                acks = await self._deliver(weights)
            except BaseException:
                self._weights = previous
                weights.close()
                raise
            if previous:
                previous.close()
            took = tuple(m for m in self._members if m.address in acks and m.delivery)
            return PublishReport(
                acks=tuple(m.address for m in took),
                deliveries=tuple(m.delivery for m in took if m.delivery),
                num_bytes=weights.num_bytes,
                seconds=time.monotonic() - start,
            )

    @property
    def context(self) -> int:
        """The longest sequence that a server takes; 0: none has said."""
        return max((m.status.max_model_len for m in self._members if m.status), default=0)

    async def status(self) -> list[ServerStatus]:
        """The servers as of now; a live one is asked."""
        await self._probe_all()
        return [
            ServerStatus(
                address=m.address,
                live=m.live,
                load=m.load,
                reason="" if m.live else m.reason,
                version=m.status.version,
                running=m.status.running,
                queued=m.status.queued,
                slots=m.status.slots,
                tokens_generated=m.status.tokens_generated,
                paused=m.status.paused,
            )
            for m in self._members
        ]

    async def drain_spans(self) -> dict[str, list[tuple[str, int, int]]]:
        """address → (name, start_ns, end_ns) since the last drain, on our own CLOCK_MONOTONIC."""
        await self._probe_all()
        return {member.address: member.drain_spans() for member in self._members}

    async def close(self) -> None:
        """Lets go of the servers (which stay) and removes the weights file."""
        self._roster.close()
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._roster.changed()
        if self._weights:
            self._weights.close()
            self._weights = None

    async def _finish(self, job: Job, samples: list[Sample]) -> None:
        """Drives `samples` until each has a stop reason."""
        member, full, idle, busy = None, None, 0, 0
        while True:
            context = member.status.max_model_len if member else 0
            todo = [s for s in samples if not finished(s, job, context)]
            if not todo:
                return
            parts = split(todo)
            if len(parts) > 1:
                await _together([self._finish(job, part) for part in parts])
                return
            before = sum(s.length for s in todo)
            member = await self._roster.pick(job.session, member, full)
            try:
                await self._attempt(member, job, todo)
                error: Exception = Failed(f"{member.address} keeps aborting the request")
            except Busy:  # not a failed attempt: how long it may take is the caller's to say
                member, full, busy = None, member, busy + 1
                await _wait(busy)
                continue
            except (Lost, Failed) as caught:
                error = caught
            idle = 0 if sum(s.length for s in todo) > before else idle + 1
            if idle:
                await _back_off(idle, "a token", error)

    async def _answers(self, member: Member, jobs: list[Job]) -> list[Completion] | None:
        """One completion of each job by this very server; None when it is lost."""
        samples = [Sample(0) for _ in jobs]
        try:
            await _together(
                [self._stay(member, job, s) for job, s in zip(jobs, samples, strict=True)]
            )
        except Lost:
            return None
        return [sample.completion() for sample in samples]

    async def _stay(self, member: Member, job: Job, sample: Sample) -> None:
        """Finishes `sample` on one server, in as many calls as its updates abort."""
        attempts = busy = 0
        while attempts < MAX_ATTEMPTS:
            try:
                await self._attempt(member, job, [sample])
                attempts += 1
            except Busy:
                busy += 1
                await _wait(busy)
            if finished(sample, job, member.status.max_model_len):
                return
        raise Failed(f"{member.address} keeps aborting the request")

    async def _attempt(self, member: Member, job: Job, samples: list[Sample]) -> None:
        """One call; what came before an error stays in the samples."""
        request = job.request(samples)
        stream = member.generate(request)
        try:
            async for pieces in stream:
                for piece in pieces:
                    k = piece[0] - request.first_index
                    if not 0 <= k < len(samples):
                        raise Failed(
                            f"{member.address} sent sample {piece[0]}, which nobody asked for"
                        )
                    samples[k].add(piece)
                    if job.watch and len(piece[1]):
                        job.watch(piece[0], piece[1], piece[2])
        finally:
            await stream.aclose()

    async def _deliver(self, weights: Weights) -> tuple[str, ...]:
        """Every live server takes `weights` or is out; returns who took them, at least one."""
        while True:
            live = await self._roster.alive(lambda: self._raise_refused(weights))
            results = await asyncio.gather(*(m.update() for m in live), return_exceptions=True)
            for result in results:
                if isinstance(result, BaseException) and not isinstance(result, Lost | Refused):
                    raise result
            self._roster.raise_foreign()
            acks = tuple(m.address for m in self._members if m.live and m.has(weights))
            if not acks:
                self._raise_refused(weights)
                continue
            for member, result in zip(live, results, strict=True):
                if isinstance(result, Refused):
                    member.fail(f"did not take version {weights.version}: {result}")
            return acks

    def _widespread(self) -> Weights | None:
        """The weights of now, if any server could take a delta to them."""
        weights = self._weights
        return weights if weights and any(m.has(weights) for m in self._members) else None

    def _raise_refused(self, weights: Weights) -> None:
        for member in self._members:
            if member.refusal[0] is weights:
                reason = member.refusal[1]
                raise UserError(
                    f"{member.address} did not take version {weights.version}: {reason}"
                )

    async def _probe_all(self) -> None:
        live = [member for member in self._members if member.live]
        await asyncio.gather(*(m.probe() for m in live), return_exceptions=True)
        self._roster.raise_foreign()


async def _back_off(attempts: int, what: str, error: Exception) -> None:
    """Waits after `attempts` in a row without `what`; raises Failed after the last one."""
    if attempts >= MAX_ATTEMPTS:
        raise Failed(f"gave up after {attempts} attempts without {what}: {error}") from error
    await _wait(attempts)


async def _wait(times: int) -> None:
    """Waits, the longer the more often that was in vain."""
    await asyncio.sleep(random.uniform(0.5, 1.0) * min(0.05 * 2 ** min(times, 6), 2.0))


async def _together(coroutines: list) -> None:
    """Runs them concurrently; the first error cancels the others and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            for coroutine in coroutines:
                group.create_task(coroutine)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


def _close_result(staging: asyncio.Task) -> None:
    if not staging.cancelled() and not staging.exception():
        staging.result().close()
