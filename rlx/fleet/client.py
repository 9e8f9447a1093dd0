"""Client of a fleet of rollout servers: generate, score and publish while servers come and go.

    generate ─▶ least loaded live server ─▶ chunks of n samples ─▶ all stopped: done
         ▲           (or the session's)            │
         └── each unfinished sample, prompt + its tokens so far ◀── lost, failed or aborted

Everything here runs on one event loop.
"""

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np

from rlx.base import UserError, images_of
from rlx.fleet import cast, wire
from rlx.fleet.addresses import FILE, Joining, read_addresses, require_name
from rlx.fleet.balancer import Balancer
from rlx.fleet.member import Busy, Delivery, Failed, Lost, Member, Refused
from rlx.fleet.publish import Weights, stage, sweep
from rlx.fleet.relay import Route, hurry, routes
from rlx.fleet.requests import Chunk, Sampling, ScoreRequest, Timeouts
from rlx.fleet.sample import Completion, GenerateCall, PartialSample, split
from rlx.fleet.tls import Tls, read_files
from rlx.observe import traces
from rlx.system.host_port import bracketed, split_address
from rlx.system.threads import in_thread, run_all

SAY_SECONDS, SAY_AGAIN_SECONDS = 1.0, 10.0  # between lines while `connect` waits
_POLL_SECONDS = 0.05
MAX_ATTEMPTS = 8  # in a row without a new token of a sample, or scores of a sequence


@dataclass(frozen=True)
class PublishReport:
    """Result of a publish."""

    acks: tuple[str, ...]  # addresses of the servers that have the version
    deliveries: tuple[Delivery, ...]  # in the order of `acks`
    num_bytes: int  # size of the whole file
    seconds: float  # from the arrays to the last acknowledgement
    sums: tuple[int, ...] = ()  # of the weights, as of `Buckets.write`

    @property
    def sent_bytes(self) -> int:
        """Bytes that the trainer sent; 0 by path."""
        return sum(delivery.sent_bytes for delivery in self.deliveries)

    @property
    def stall_seconds(self) -> float:
        """Longest time that a server did not decode."""
        return max((delivery.paused_ns for delivery in self.deliveries), default=0) / 1e9


class Fleet:
    """Rollout servers behind one `generate`, one `score` and one `publish`."""

    def __init__(
        self,
        # host:port of each server; it may start later, die and return. @PATH is a file of addresses
        # that is read continually: a server added to it gets the current weights, then requests; a
        # server removed from it finishes its requests.
        addresses: Sequence[str],
        *,
        token: str | None = None,  # bearer token of the servers
        tls: Tls | None = None,  # their CA and our certificate; None: plain connections on loopback
        limits: Timeouts | None = None,
        publish_dir: str = "/dev/shm",  # for the weights file, written once for all servers
        kv_on_update: str | None = None,  # one of KV_POLICIES; None: each server's own default
        on_message: Callable[[str], None] | None = None,  # reports one line to the user
        # Ends a silent server of ours; see `Member`.
        restart: Callable[[str, float], None] = lambda address, seconds: None,
        # Directory of more servers, read continually; servers that cannot be reached, or that
        # refuse us, are reported and ignored.
        joining: Joining | None = None,
        sleep: int | None = None,  # level of sleep until `set_sleep`; None: they do not sleep
        image: Callable[[str], bytes] | None = None,  # returns the file of a prompt's image by name
    ):
        self._sleep, self._tls = sleep, tls
        self._limits = limits or Timeouts()
        self._publish_dir = publish_dir
        self.say = on_message or (lambda text: None)
        self._balancer = Balancer(self._limits.outage_seconds, self._limits.hang_seconds, self.say)
        self._weights: Weights | None = None
        self._sender = cast.Sender(self.say)
        self._masks_warned = False
        self.tokens = 0  # received by `generate` and `probe`
        self._publishing = asyncio.Lock()
        self._tasks: set[asyncio.Task] = set()
        self._given, self._connected = tuple(addresses), False
        self._joining, self._ignored = joining, set[str]()  # addresses

        def member(address: str, joined: bool = False) -> Member:
            certs = joining.tls if joining and joined else tls
            return Member(
                address, limits=self._limits, wanted=lambda: self._weights, token=token, tls=certs,
                changed=self._balancer.changed, silent=self._balancer.silent, say=self.say,
                joined=joined, restart=restart, kv=wire.KV_NUMBERS[kv_on_update], image=image,
                sleep=lambda: self._sleep, peer=self._peer,
            )  # fmt: skip

        self._member = member
        self._members = self._balancer.members
        self._members += [member(address) for address in read_addresses(addresses)]
        if not self._members and not joining:
            raise UserError("the fleet has no server; give addresses as host:port")

    @property
    def live(self) -> frozenset[str]:
        return frozenset(member.address for member in self._members if member.live)

    @property
    def instances(self) -> dict[str, str]:
        """Address → instance, a name of the server's process, of each live server."""
        return {member.address: member.status.instance for member in self._members if member.live}

    def states(self) -> dict[str, str]:
        """Return address → why a server is not live; "" for a live one."""
        return {m.address: "" if m.live else m.reason for m in self._members.copy()}

    def metrics_listeners(self) -> list[str]:
        """Return host:port of the Prometheus listener of each server that has reported one."""
        ports = [(m.address, m.status.metrics_port) for m in self._members.copy()]
        return sorted(bracketed(split_address(a)[0], port) for a, port in ports if port)

    async def admit(self, instances: Iterable[tuple[str, str]]) -> None:
        """Send `generate` and `score` calls only to these items of `instances`, now or later."""
        self._balancer.admitted = frozenset(instances)
        self._balancer.changed()

    async def connect(self) -> None:
        """Wait until every server is live, or the time is up and some are.

        Servers that join are not waited for, except the first one if there are no others. UserError
        if no server answered in time, one refuses our token, a host name is unknown, or a file of
        TLS is unusable.
        """
        await asyncio.gather(*(require_name(m.address) for m in self._members))
        if self._tls:  # a member would try them again until the time is up
            read_files(self._tls)
        sweep(self._publish_dir)
        for member in self._members:
            self._start(self._run_member(member))
        if self._joining:
            await self._replace(await in_thread(self._read_addresses))
        if self._joining or any(text.startswith(FILE) for text in self._given):
            self._start(self._follow_addresses())
        reports = asyncio.create_task(self._report_missing())
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
            self.say(f"continuing without {missing}")
        finally:
            reports.cancel()
        self._connected = True

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        """Start a task that `close` cancels if it still runs."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run_member(self, member: Member) -> None:
        """Run `member` while it is in the fleet or has requests."""
        running = asyncio.ensure_future(member.run())
        try:
            while member in self._members or member.load:
                if running.done():
                    if self._connected or member.joined:  # before that, `connect` raises it
                        why = member.fatal or running.exception()
                        self.say(f"continuing without {member.address}: {why}")
                    return
                await asyncio.wait([running], timeout=self._limits.probe_seconds)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def _follow_addresses(self) -> None:
        """Add and remove servers as files of addresses change and servers join."""
        before, message = None, ""
        while True:
            await asyncio.sleep(self._limits.probe_seconds)
            current = None
            try:
                current = await in_thread(self._read_addresses)
                if current == before:  # read twice: no file is half written
                    await self._replace(current)
                    message = ""
            except UserError as error:
                if str(error) != message:
                    message = str(error)
                    self.say(f"rollout servers are unchanged: {message}")
            before = current

    def _read_addresses(self) -> dict[str, bool]:
        """Return address → whether the server joined, for all given and announced addresses."""
        joined = dict.fromkeys(self._joining.look() if self._joining else (), True)
        return joined | dict.fromkeys(read_addresses(self._given), False)

    async def _replace(self, addresses: Mapping[str, bool]) -> None:
        """Add servers at new `addresses`; remove servers that are not in them."""
        have = {member.address for member in self._members}
        for member in [m for m in self._members if m.address not in addresses]:
            self._members.remove(member)
            self.say(f"rollout server {member.address} is removed; it finishes its requests")
        for address in [address for address in addresses if address not in have]:
            try:
                await require_name(address)
                member = self._member(address, addresses[address])
            except UserError as error:
                if address not in self._ignored:
                    self._ignored.add(address)
                    self.say(f"a rollout server is ignored: {error}")
                continue
            self._members.append(member)
            self._start(self._run_member(member))
            self.say(f"rollout server {member.address} is added; it gets the current weights")
        if have != {member.address for member in self._members}:
            self._balancer.changed()

    async def _report_missing(self) -> None:
        """Report from time to time which servers `connect` waits for, and how much longer."""
        end, pause = time.monotonic() + self._limits.connect_seconds, SAY_SECONDS
        while True:
            await asyncio.sleep(pause)
            left, pause = end - time.monotonic(), SAY_AGAIN_SECONDS
            self.say(f"waiting up to {left:.0f} s for rollout servers: {self._balancer.reasons()}")

    async def generate(
        self,
        prompt_tokens: Any,  # [T] integers, T ≥ 1; PromptTokens if there are images
        sampling: Sampling,  # a missing seed is drawn here, because continuing needs one
        n: int,  # ≥ 1; sample i is a function of (seed, i) and the weights
        *,
        session: str | None = None,  # its calls go to the same server while that is live
        priority: int = 0,  # higher is served first
        watch: Callable[[Chunk], None] | None = None,  # called with each chunk of new tokens
        samples: Sequence[PartialSample] = (),  # `n` to continue, which get the new chunks
    ) -> list[Completion]:
        """Sample `n` completions of one prompt.

        ValueError, which says why, if the request cannot be served. Unavailable if no server was
        alive for `limits.outage_seconds`; Failed if MAX_ATTEMPTS attempts in a row failed.
        """
        prompt = np.asarray(prompt_tokens, np.int32)
        samples = [*samples] or [PartialSample(index) for index in range(n)]
        images = images_of(prompt_tokens)
        call = GenerateCall(prompt, _seeded(sampling), session, priority, watch, images)
        await self._finish(call, samples)
        return self._completions(samples, sampling)

    def _completions(self, samples: list[PartialSample], sampling: Sampling) -> list[Completion]:
        """Return the finished samples; report once that a server has no masks."""
        completions = [sample.completion() for sample in samples]
        lack = sampling.return_masks and any(c.kept is None for c in completions)
        if lack and not self._masks_warned:
            self._masks_warned = True
            self.say(
                f"a rollout server reports no sampling masks, so losses use logprobs over all "
                f"tokens, which biases importance weights; {sampling.truncation}; update the "
                "server's rlx, or leave it out of config.sampling"
            )
        return completions

    async def score(
        self, tokens: Any, first: int, *, temperature: float = 1.0, values: bool = False,
        adapter: str = "",
    ) -> np.ndarray:  # fmt: skip
        """Return the log-probabilities of a sequence's tokens under the current weights.

        All scores belong to one version; during a publish that is the old or the new one. They are
        [T] float32, nats, 0 before `first`. Raises as `generate`, and ValueError for a model
        of the other kind.

        Args:
          tokens: [T] integers, T ≥ 2; PromptTokens if there are images.
          first: in [1, T − 1], the first token to score.
          temperature: τ in [0.01, 100] of log softmax(logits / τ).
          values: return a reward model's values after these tokens instead.
          adapter: as in Sampling.
        """
        ids, images = np.asarray(tokens, np.int32), images_of(tokens)
        request = ScoreRequest(ids, first, temperature, adapter, images)
        member, avoid, attempts, busy = None, None, 0, 0
        while True:
            member = await self._balancer.pick(None, member, avoid)
            try:
                with traces.span("score", server=member.address):
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
        """Sample one completion of every prompt from every live server; raise as `generate`.

        Returns address → completions in the prompts' order, for at least one server; servers lost
        meanwhile are missing.
        """
        sampling = _seeded(sampling)
        calls = [
            GenerateCall(np.asarray(p, np.int32), sampling, None, priority, images=images_of(p))
            for p in prompts
        ]
        while True:
            live = await self._balancer.alive()
            answers = await asyncio.gather(*(self._answers(member, calls) for member in live))
            if any(answers):
                return {m.address: a for m, a in zip(live, answers, strict=True) if a}

    async def set_sleep(self, level: int) -> None:
        """Let every server sleep, as Engine.pause does at this level, or wake at 0.

        A server that cannot is lost. When it returns, it first sleeps or wakes as it should.
        """
        self._sleep = level
        live = [member for member in self._members if member.live]
        await asyncio.gather(*(m.sleep_or_wake() for m in live), return_exceptions=True)

    async def publish(self, version: int, source: Any, method: str = "path") -> PublishReport:
        """Send `version` to every live server; a server that refuses gets no requests.

        Args:
          version: policy version; tokens of these weights carry it.
          source: HF name → array; or the path of a safetensors file or HF directory, which must
            stay until the next publish, for servers that return; or an Adapter.
          method: path | stream | delta | adapter | nccl | gloo, see `publish.stage`.

        Raises:
          UserError: every server refused it (the message has the first reason), or none is alive.
        """
        async with self._publishing:
            start = time.monotonic()
            old = self._weights
            base = old if old and any(m.has(old) for m in self._members) else None
            staging = asyncio.create_task(
                in_thread(stage, version, source, method, self._publish_dir, base)
            )
            try:
                weights = await asyncio.shield(staging)
            except asyncio.CancelledError:  # the thread continues; its file must be removed
                staging.add_done_callback(_close_result)
                raise
            previous, self._weights = self._weights, weights
            try:
                members = await self._deliver(weights)
            except BaseException:
                self._weights = previous
                weights.close()
                raise
            if previous:
                previous.close()
            return PublishReport(
                acks=tuple(m.address for m in members),
                deliveries=tuple(m.delivery for m in members if m.delivery),
                num_bytes=weights.num_bytes,
                seconds=time.monotonic() - start,
                sums=weights.sums,
            )

    @property
    def context(self) -> int:
        """Largest max_model_len of the servers, tokens; 0: unknown."""
        return max((m.status.max_model_len for m in self._members if m.status), default=0)

    async def status(self) -> tuple[Member, ...]:
        """Return the servers, live ones with a new `status`."""
        await self._probe_all()
        return tuple(self._members)

    async def drain_spans(self) -> dict[str, list[tuple[str, int, int]]]:
        """Return address → new spans (name, start_ns, end_ns) since the last call, on our clock."""
        await self._probe_all()
        return {member.address: member.drain_spans() for member in self._members}

    def drain_queue(self) -> int:
        """Return how many samples waited at live servers since the last call; −1: none is live."""
        queues = [member.drain_queue() for member in self._members.copy() if member.live]
        return sum(queues) if queues else -1

    async def close(self) -> None:
        """Disconnect from the servers, which keep running, and remove the weights file."""
        self._balancer.close()
        tasks = tuple(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._sender.end()
        self._balancer.changed()
        if self._weights:
            self._weights.close()
            self._weights = None

    async def _finish(
        self,
        call: GenerateCall,
        samples: list[PartialSample],
        only: Member | None = None,  # raise Lost if this one is lost
        avoid: Member | None = None,  # use it only if there is no other
    ) -> None:
        """Send requests until each of `samples` has a stop reason."""
        member, context, idle, busy = only, self.context, 0, 0
        while True:
            todo = [s for s in samples if not call.finished(s, context)]
            if not todo:
                return
            parts = split(todo)
            if len(parts) > 1:
                await run_all(*(self._finish(call, part, only, avoid) for part in parts))
                return
            before = sum(s.length for s in todo)
            if call.sampling.guide and before:
                raise Failed("a guided completion was cut off and cannot be continued; ask again")
            member = only or await self._balancer.pick(call.session, member, avoid)
            context = member.status.max_model_len
            try:
                await self._attempt(member, call, todo)
                error: Exception = Failed(f"{member.address} keeps aborting the request")
            except Busy:  # not a failed attempt: the caller decides how long to wait
                member, avoid, busy = only, member, busy + 1
                await _wait(busy)
                continue
            except (Lost, Failed) as caught:
                if only and isinstance(caught, Lost):
                    raise
                error = caught
                self._balancer.forget(call.session, member)
                member, avoid = only, member
            idle = 0 if sum(s.length for s in todo) > before else idle + 1
            if idle:
                await _back_off(idle, "a token", error)

    async def _answers(self, member: Member, calls: list[GenerateCall]) -> list[Completion] | None:
        """Return one completion of each call by this server; None if it is lost."""
        samples = [PartialSample(0) for _ in calls]
        try:
            pairs = zip(calls, samples, strict=True)
            await run_all(*(self._finish(c, [s], member) for c, s in pairs))
        except Lost:
            return None
        return self._completions(samples, calls[0].sampling)

    async def _attempt(
        self, member: Member, call: GenerateCall, samples: list[PartialSample]
    ) -> None:
        """Send one request; tokens received before an error stay in the samples."""
        request = call.request(samples)
        about = {"server": member.address, "samples": request.n, "prompt": len(call.prompt)}
        with traces.span("generate", **about):
            async with aclosing(member.generate(request)) as stream:
                async for chunks in stream:
                    for chunk in chunks:
                        k = chunk.index - request.first_index
                        if not 0 <= k < len(samples):
                            raise Failed(
                                f"{member.address} sent sample {chunk.index}, which was not "
                                "requested"
                            )
                        samples[k].add(chunk)
                        self.tokens += len(chunk.tokens)
                        if call.watch and len(chunk.tokens):
                            call.watch(chunk)

    async def _deliver(self, weights: Weights) -> list[Member]:
        """Publish to every live server, fail those that refuse; return the others, at least one."""
        while True:
            live = await self._balancer.alive(lambda: self._raise_refused(weights))
            results = await self._update(live, weights)
            for result in results:
                if isinstance(result, BaseException) and not isinstance(result, Lost | Refused):
                    raise result
            self._balancer.raise_foreign()
            members = [m for m in self._members if m.live and m.has(weights)]
            if not members:
                self._raise_refused(weights)
                continue
            for member, result in zip(live, results, strict=True):
                if isinstance(result, Refused):
                    member.fail(f"did not take version {weights.version}: {result}")
            return members

    async def _update(self, live: Sequence[Member], weights: Weights) -> list[Any]:
        """Publish to `live`, through each other where that works; return what each raised."""
        groups: dict[Any, list[tuple[Member, Any]]] = {}  # by the key of `Member.relays`
        for member in live:
            if relay := member.relays(weights):
                groups.setdefault(relay[0], []).append((member, relay[1]))
        route_by_member, hurries, fanout = dict[Member, Route](), [], self._limits.relay_fanout
        for pairs in groups.values():
            if 0 < fanout < len(pairs):
                servers, ca = [server for _, server in pairs], pairs[0][0].ca
                plan = routes(servers, fanout, weights.identity, ca)
                route_by_member |= zip((member for member, _ in pairs), plan, strict=True)
                hurries.append(asyncio.create_task(hurry(plan)))
        try:
            todo = [m for m in live if weights.method in cast.BACKENDS and not m.has(weights)]
            addresses = [m.address for m in todo]
            cast_to = self._sender.offers(weights.method, weights.path, addresses)
            async with cast_to as (casts, end_cast):
                offers = dict(zip(todo, casts, strict=bool(casts)))

                async def update(member: Member) -> None:
                    try:
                        await member.update(route_by_member.get(member), offers.get(member))
                    except Lost:
                        if member in offers:
                            await end_cast()
                        raise

                return await asyncio.gather(*map(update, live), return_exceptions=True)
        finally:
            for task in hurries:
                task.cancel()

    async def _peer(self, joiner: Member, weights: Weights) -> Member | None:
        """Return the server that can best send `weights` to `joiner`; wait if it just gets them."""
        reach, kept = joiner.reach(weights), weights.method == "delta" and self._limits.relay_fanout
        while reach and kept:
            near = [m for m in self._members if m.live and m.reach(weights) == reach]
            if have := [m for m in near if m.has(weights)]:
                return min(have, key=lambda m: (m.passing, m.load))
            if not (near and self._publishing.locked()):
                break
            await asyncio.sleep(_POLL_SECONDS)
        return None

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
    """A `Fleet` without servers, for a run that trains on a dataset."""

    async def connect(self) -> None:
        """Do nothing."""

    close = connect

    async def generate(self, *_: Any, **__: Any) -> NoReturn:
        """Raise RuntimeError."""
        raise RuntimeError("a run without rollout servers generates nothing")

    async def publish(self, version: int, source: Any, method: str = "path") -> PublishReport:
        """Return a report without servers."""
        return PublishReport(acks=(), deliveries=(), num_bytes=0, seconds=0.0)

    async def drain_spans(self) -> dict[str, list[tuple[str, int, int]]]:
        return {}


def _seeded(sampling: Sampling) -> Sampling:
    return sampling if sampling.seed is not None else replace(sampling, seed=random.getrandbits(31))


async def _back_off(attempts: int, what: str, error: Exception) -> None:
    """Wait after `attempts` failures in a row; raise Failed after MAX_ATTEMPTS."""
    if attempts >= MAX_ATTEMPTS:
        raise Failed(f"gave up after {attempts} attempts without {what}: {error}") from error
    await _wait(attempts)


async def _wait(times: int) -> None:
    """Wait a random time, at most 0.1 s after the first failure and 2 s after the sixth."""
    await asyncio.sleep(random.uniform(0.5, 1.0) * min(0.05 * 2 ** min(times, 6), 2.0))


def _close_result(staging: asyncio.Task) -> None:
    if not staging.cancelled() and not staging.exception():
        staging.result().close()
