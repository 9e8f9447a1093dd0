"""Client of all rollout servers: generate, score and publish while servers come and go.

    generate ─▶ least loaded live server ─▶ chunks of n samples ─▶ all stopped: done
         ▲            (a session's own)            │
         └── each unfinished sample, prompt + its tokens so far ◀── lost, failed or aborted

Everything here runs on one event loop.
"""

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np

from rlx.base import UserError
from rlx.fleet import wire
from rlx.fleet.addresses import FILE, read_addresses, require_name
from rlx.fleet.balancer import Balancer
from rlx.fleet.joining import Joining
from rlx.fleet.member import Busy, Delivery, Failed, Lost, Member, Refused
from rlx.fleet.publish import Weights, stage, sweep
from rlx.fleet.requests import Chunk, Sampling, ScoreRequest
from rlx.fleet.sample import Completion, GenerateCall, PartialSample, split
from rlx.fleet.timeouts import Timeouts
from rlx.fleet.tls import Tls
from rlx.system.threads import in_thread

__all__ = ["Completion", "Fleet", "NoFleet", "PublishReport", "Timeouts"]

SAY_SECONDS, SAY_AGAIN_SECONDS = 1.0, 10.0  # between lines while `connect` waits
MAX_ATTEMPTS = 8  # in a row that bring a sample no new token, or a sequence no scores


@dataclass(frozen=True)
class PublishReport:
    """Result of a publish.

    Attributes:
      acks: addresses of the servers that took the version.
      deliveries: how each got it, in the order of `acks`.
      num_bytes: size of the whole file, written once.
      seconds: from the arrays to the last acknowledgement.
    """

    acks: tuple[str, ...]
    deliveries: tuple[Delivery, ...]
    num_bytes: int
    seconds: float

    @property
    def sent_bytes(self) -> int:
        """Bytes sent to all servers together; 0 by path."""
        return sum(delivery.sent_bytes for delivery in self.deliveries)

    @property
    def stall_seconds(self) -> float:
        """Longest time in which some server decoded no token."""
        return max((delivery.paused_ns for delivery in self.deliveries), default=0) / 1e9


class Fleet:
    """Rollout servers behind one `generate`, one `score` and one `publish`.

    Args:
      addresses: host:port of each server; they may still be starting, die and come back. @PATH is a
        file of them that is read again and again: a server added to it gets the current weights
        and then requests, a server taken out of it finishes those it has.
      token: bearer token of the servers.
      tls: the servers' CA and our certificate; None: plain, as on loopback.
      limits: deadlines.
      publish_dir: directory of the weights file that is written once for all servers.
      kv_on_update: one of KV_POLICIES; None: as each server was started.
      on_message: takes one line for the user when a server is lost or none is alive.
      restart: ends a server of ours that is silent; see `Member`.
      joining: where further servers are found, now and later, as in a file of addresses; there may
        be none yet. One that cannot be reached, or refuses us, is left out and named.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        *,
        token: str | None = None,
        tls: Tls | None = None,
        limits: Timeouts | None = None,
        publish_dir: str = "/dev/shm",
        kv_on_update: str | None = None,
        on_message: Callable[[str], None] | None = None,
        restart: Callable[[str, float], None] = lambda address, seconds: None,
        joining: Joining | None = None,
    ):
        self._limits = limits or Timeouts()
        self._publish_dir = publish_dir
        self._say = on_message or (lambda text: None)
        self._balancer = Balancer(self._limits.outage_seconds, self._limits.hang_seconds, self._say)
        self._weights: Weights | None = None
        self.tokens = 0
        self._publishing = asyncio.Lock()
        self._tasks: set[asyncio.Task] = set()
        self._given, self._connected = tuple(addresses), False
        self._joining, self._left_out = joining, set[str]()

        def member(address: str, joined: bool = False) -> Member:
            return Member(
                address,
                limits=self._limits,
                wanted=lambda: self._weights,
                changed=self._balancer.changed,
                say=self._say,
                token=token,
                tls=joining.tls if joining and joined else tls,
                joined=joined,
                silent=self._balancer.silent,
                restart=restart,
                kv=wire.KV_NUMBERS[kv_on_update],
            )

        self._member = member
        self._members = self._balancer.members
        self._members += [member(address) for address in read_addresses(addresses)]
        if not self._members and not joining:
            raise UserError("the fleet has no server; give addresses as host:port")

    def say(self, text: str) -> None:
        """Report a line to whoever runs the fleet."""
        self._say(text)

    @property
    def live(self) -> frozenset[str]:
        """Addresses of the servers that get requests."""
        return frozenset(member.address for member in self._members if member.live)

    @property
    def lives(self) -> dict[str, str]:
        """Address → what tells apart the processes that served there, of each live server."""
        return {member.address: member.status.instance for member in self._members if member.live}

    async def admit(self, lives: Iterable[tuple[str, str]]) -> None:
        """Let `generate` and `score` ask those servers alone; items of `lives`, of now or later."""
        self._balancer.admitted = frozenset(lives)
        self._balancer.changed()

    async def connect(self) -> None:
        """Return when every server is live, or some are and the time is up.

        Of those that join, it waits for none but the first one, where there are no others.

        Raises:
          UserError: no server answered in time, one refuses our token, or a host name is unknown.
        """
        await asyncio.gather(*(require_name(m.address) for m in self._members))
        sweep(self._publish_dir)
        for member in self._members:
            self._begin(self._keep(member))
        if self._joining:
            await self._change(await in_thread(self._look))
            self._begin(self._follow())
        waiting = asyncio.create_task(self._say_who_is_missing())
        try:
            async with asyncio.timeout(self._limits.connect_seconds):
                await self._balancer.complete()
        except TimeoutError:
            missing = self._balancer.reasons()
            if not any(member.live for member in self._members):
                raise UserError(
                    f"no rollout server answered within {self._limits.connect_seconds:g} s: "
                    f"{missing}; start them (python -m rlx.serve) or check the addresses"
                ) from None
            self._say(f"going on without {missing}")
        finally:
            waiting.cancel()
        self._connected = True
        if not self._joining and any(text.startswith(FILE) for text in self._given):
            self._begin(self._follow())

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task that `close` cancels if it still runs."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _keep(self, member: Member) -> None:
        """Run `member` while it is in the fleet, and until its last requests have ended."""
        running = asyncio.ensure_future(member.run())
        try:
            while member in self._members or member.load:
                if running.done():
                    if self._connected or member.joined:  # before that, `connect` raises it
                        self._say(f"going on without {member.address}: {member.fatal}")
                    return
                await asyncio.wait([running], timeout=self._limits.probe_seconds)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def _follow(self) -> None:
        """Add and remove servers as the files of addresses change, and as servers join."""
        before, said = None, ""
        while True:
            await asyncio.sleep(self._limits.probe_seconds)
            found = None
            try:
                found = await in_thread(self._look)
                if found == before:  # twice the same: not half written
                    await self._change(found)
                    said = ""
            except UserError as error:
                if str(error) != said:
                    said = str(error)
                    self._say(f"the servers stay as they are: {said}")
            before = found

    def _look(self) -> dict[str, bool]:
        """Return the addresses of now, and whether each one's server has joined by itself."""
        joined = dict.fromkeys(self._joining.look() if self._joining else (), True)
        return joined | dict.fromkeys(read_addresses(self._given), False)

    async def _change(self, addresses: Mapping[str, bool]) -> None:
        """Begin to connect to new `addresses`, and to let go of servers that are not in them."""
        have = {member.address for member in self._members}
        for member in [m for m in self._members if m.address not in addresses]:
            self._members.remove(member)
            self._say(f"rollout server {member.address} is taken out; it finishes what it has")
        for address in [address for address in addresses if address not in have]:
            try:
                await require_name(address)
                member = self._member(address, addresses[address])
            except UserError as error:
                if address not in self._left_out:
                    self._left_out.add(address)
                    self._say(f"a rollout server is left out: {error}")
                continue
            self._members.append(member)
            self._begin(self._keep(member))
            self._say(f"rollout server {member.address} is added; it is given the weights of now")
        if have != {member.address for member in self._members}:
            self._balancer.changed()

    async def _say_who_is_missing(self) -> None:
        """Say from time to time which servers `connect` waits for, and how much longer."""
        end, pause = time.monotonic() + self._limits.connect_seconds, SAY_SECONDS
        while True:
            await asyncio.sleep(pause)
            left, pause = end - time.monotonic(), SAY_AGAIN_SECONDS
            self._say(f"waiting up to {left:.0f} s for rollout servers: {self._balancer.reasons()}")

    async def generate(
        self,
        prompt_tokens: Any,
        sampling: Sampling,
        n: int,
        *,
        session: str | None = None,
        priority: int = 0,
        watch: Callable[[Chunk], None] | None = None,
    ) -> list[Completion]:
        """Draw `n` completions of one prompt.

        Args:
          prompt_tokens: [T] integers, T ≥ 1.
          sampling: without a seed, one is drawn here, so that a completion can be continued.
          n: ≥ 1; sample i is a function of (seed, i) and the weights.
          session: calls with the same one go to the same server while it lives.
          priority: higher first, where the engine has priorities.
          watch: called with the new tokens of a sample whenever it has some.

        Raises:
          ValueError: the request cannot be served; the message says why.
          Unavailable: no server was alive for `limits.outage_seconds`.
          Failed: the last of several attempts failed.
        """
        if sampling.seed is None:
            sampling = replace(sampling, seed=random.getrandbits(31))
        prompt = np.asarray(prompt_tokens, np.int32)
        samples = [PartialSample(index) for index in range(n)]
        await self._finish(GenerateCall(prompt, sampling, session, priority, watch), samples)
        return [sample.completion() for sample in samples]

    async def score(
        self, tokens: Any, first: int, *, temperature: float = 1.0, values: bool = False
    ) -> np.ndarray:
        """Return the log-probabilities of a sequence's tokens under the current weights.

        All are of one version: the old or the new one while a publish is under way.

        Args:
          tokens: [T] integers, T ≥ 2.
          first: in [1, T − 1], the first token to score.
          temperature: in [0.01, 100]; of log softmax(logits / temperature).
          values: of reward models; their numbers after these tokens in place of logprobs.

        Returns:
          [T] float32, nats; 0 before `first`.

        Raises:
          ValueError: the server's model is one of the other kind, or as `generate`.
          UserError, Failed: as `generate`.
        """
        request = ScoreRequest(np.asarray(tokens, np.int32), first, temperature)
        member, avoid, attempts, busy = None, None, 0, 0
        while True:
            member = await self._balancer.pick(None, member, avoid)
            try:
                scores = await member.score(request)
                if scores.values != values:
                    kind = "a reward model" if values else "a language model"
                    raise ValueError(
                        f"{member.address} does not serve {kind} (with the JAX engine)"
                    )
                return np.concatenate([np.zeros(first, np.float32), scores.logprobs])
            except Busy:
                member, avoid, busy = None, member, busy + 1
                await _wait(busy)
            except (Lost, Failed) as error:
                member, avoid, attempts = None, member, attempts + 1
                await _back_off(attempts, "a score", error)

    async def probe(
        self, prompts: Sequence[Any], sampling: Sampling, *, priority: int = 0
    ) -> dict[str, list[Completion]]:
        """Draw one completion of every prompt from every live server.

        Returns:
          address → completions, in the prompts' order, of at least one server; a server that is
          lost meanwhile is left out.

        Raises:
          UserError, ValueError, Failed: as `generate`.
        """
        if sampling.seed is None:
            sampling = replace(sampling, seed=random.getrandbits(31))
        calls = [GenerateCall(np.asarray(p, np.int32), sampling, None, priority) for p in prompts]
        while True:
            live = await self._balancer.alive()
            found = await asyncio.gather(*(self._answers(member, calls) for member in live))
            if any(found):
                return {m.address: a for m, a in zip(live, found, strict=True) if a}

    async def publish(self, version: int, source: Any, method: str = "path") -> PublishReport:
        """Give every live server `version`; a server that does not take it is out until it does.

        Args:
          version: policy version, stamped on the tokens of these weights.
          source: HF name → array; or the path of a safetensors file or HF directory, which must
            stay there until the next publish, for a server that comes back; or an Adapter.
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
                in_thread(stage, version, source, method, self._publish_dir, self._widespread())
            )
            try:
                weights = await asyncio.shield(staging)
            except asyncio.CancelledError:  # the thread goes on; its file must not stay
                staging.add_done_callback(_close_result)
                raise
            previous, self._weights = self._weights, weights
            try:
                took = await self._deliver(weights)
            except BaseException:
                self._weights = previous
                weights.close()
                raise
            if previous:
                previous.close()
            return PublishReport(
                acks=tuple(m.address for m in took),
                deliveries=tuple(m.delivery for m in took if m.delivery),
                num_bytes=weights.num_bytes,
                seconds=time.monotonic() - start,
            )

    @property
    def context(self) -> int:
        """Longest sequence that some server takes, tokens; 0: unknown."""
        return max((m.status.max_model_len for m in self._members if m.status), default=0)

    async def status(self) -> tuple[Member, ...]:
        """Return the servers; the `status` of a live one was asked for just now."""
        await self._probe_all()
        return tuple(self._members)

    async def drain_spans(self) -> dict[str, list[tuple[str, int, int]]]:
        """Return address → spans (name, start_ns, end_ns) since the last drain, on our clock."""
        await self._probe_all()
        return {member.address: member.drain_spans() for member in self._members}

    async def close(self) -> None:
        """Disconnect from the servers, which go on running, and remove the weights file."""
        self._balancer.close()
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._balancer.changed()
        if self._weights:
            self._weights.close()
            self._weights = None

    async def _finish(
        self,
        call: GenerateCall,
        samples: list[PartialSample],
        only: Member | None = None,
        avoid: Member | None = None,
    ) -> None:
        """Send requests until each of `samples` has a stop reason.

        Args:
          only: ask no other server, and raise Lost when it is.
          avoid: a server that failed them; asked where there is no other.
        """
        member, context, idle, busy = only, 0, 0, 0
        while True:
            todo = [s for s in samples if not call.finished(s, context)]
            if not todo:
                return
            parts = split(todo)
            if len(parts) > 1:
                await _together([self._finish(call, part, only, avoid) for part in parts])
                return
            before = sum(s.length for s in todo)
            if call.sampling.guide and before:
                raise Failed("a guided completion was cut off and cannot go on; ask again")
            member = only or await self._balancer.pick(call.session, member, avoid)
            context = member.status.max_model_len
            try:
                await self._attempt(member, call, todo)
                error: Exception = Failed(f"{member.address} keeps aborting the request")
            except Busy:  # no failed attempt: the caller decides how long that may last
                member, avoid, busy = only, member, busy + 1
                await _wait(busy)
                continue
            except (Lost, Failed) as caught:
                if only and isinstance(caught, Lost):
                    raise
                error = caught
                self._balancer.leave(call.session, member)
                member, avoid = only, member
            idle = 0 if sum(s.length for s in todo) > before else idle + 1
            if idle:
                await _back_off(idle, "a token", error)

    async def _answers(self, member: Member, calls: list[GenerateCall]) -> list[Completion] | None:
        """Return one completion of each call by this very server; None when it is lost."""
        samples = [PartialSample(0) for _ in calls]
        try:
            await _together(
                [self._finish(c, [s], member) for c, s in zip(calls, samples, strict=True)]
            )
        except Lost:
            return None
        return [sample.completion() for sample in samples]

    async def _attempt(
        self, member: Member, call: GenerateCall, samples: list[PartialSample]
    ) -> None:
        """Send one request; tokens that came before an error stay in the samples."""
        request = call.request(samples)
        stream = member.generate(request)
        try:
            async for chunks in stream:
                for chunk in chunks:
                    k = chunk.index - request.first_index
                    if not 0 <= k < len(samples):
                        raise Failed(
                            f"{member.address} sent sample {chunk.index}, which nobody asked for"
                        )
                    samples[k].add(chunk)
                    self.tokens += len(chunk.tokens)
                    if call.watch and len(chunk.tokens):
                        call.watch(chunk)
        finally:
            await stream.aclose()

    async def _deliver(self, weights: Weights) -> list[Member]:
        """Publish to every live server, take out those that refuse; return the takers, ≥ 1."""
        while True:
            live = await self._balancer.alive(lambda: self._raise_refused(weights))
            results = await asyncio.gather(*(m.update() for m in live), return_exceptions=True)
            for result in results:
                if isinstance(result, BaseException) and not isinstance(result, Lost | Refused):
                    raise result
            self._balancer.raise_foreign()
            took = [m for m in self._members if m.live and m.has(weights)]
            if not took:
                self._raise_refused(weights)
                continue
            for member, result in zip(live, results, strict=True):
                if isinstance(result, Refused):
                    member.fail(f"did not take version {weights.version}: {result}")
            return took

    def _widespread(self) -> Weights | None:
        """Return the current weights, the base of a delta, if some server still has them."""
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
        self._balancer.raise_foreign()


class NoFleet:
    """A `Fleet` without servers, for a run that trains on a dataset and generates nothing."""

    async def connect(self) -> None:
        """Do nothing."""

    async def generate(self, *_: Any, **__: Any) -> NoReturn:
        """Raise RuntimeError: the caller must not generate in a run without servers."""
        raise RuntimeError("a run without rollout servers generates nothing")

    async def publish(self, version: int, source: Any, method: str = "path") -> PublishReport:
        """Return a report without servers."""
        return PublishReport(acks=(), deliveries=(), num_bytes=0, seconds=0.0)

    async def drain_spans(self) -> dict[str, list[tuple[str, int, int]]]:
        """Return no spans."""
        return {}

    async def close(self) -> None:
        """Do nothing."""


async def _back_off(attempts: int, what: str, error: Exception) -> None:
    """Wait after `attempts` in a row without `what`; raise Failed after MAX_ATTEMPTS."""
    if attempts >= MAX_ATTEMPTS:
        raise Failed(f"gave up after {attempts} attempts without {what}: {error}") from error
    await _wait(attempts)


async def _wait(times: int) -> None:
    """Wait at random, up to 0.1 s after the first time and up to 2 s after the sixth."""
    await asyncio.sleep(random.uniform(0.5, 1.0) * min(0.05 * 2 ** min(times, 6), 2.0))


async def _together(coroutines: list) -> None:
    """Run `coroutines` concurrently; the first error cancels the others and is raised bare."""
    try:
        async with asyncio.TaskGroup() as group:
            for coroutine in coroutines:
                group.create_task(coroutine)
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


def _close_result(staging: asyncio.Task) -> None:
    if not staging.cancelled() and not staging.exception():
        staging.result().close()
