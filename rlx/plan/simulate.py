"""A run under a virtual clock: admission by the run's own state machines, servers and a trainer.

`rlx.rollout.staleness` and `rlx.rollout.buffer` decide what is admitted and trained, as in a run.
Only seconds are computed, by `speeds`, and lengths are drawn.
"""

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from statistics import NormalDist, fmean
from typing import Any, NamedTuple

import numpy as np

from rlx.base import UserError
from rlx.plan.speeds import ServerSpeed, TrainerSpeed
from rlx.rollout import buffer as buffers
from rlx.rollout import concurrency, staleness
from rlx.rollout.concurrency import Observation
from rlx.rollout.staleness import Limits, Staleness

_POINTS = 1000
_TURNS = 8192  # of a batch that are simulated; each takes some 50 µs
_WIDEST = 1.0  # standard deviation of logarithms; answers of AReaL's published log have 0.77
_LEAST_CUT = 1e-3  # share cut where none is known to be: a log-normal tail always meets the limit


def _root(rising: Callable[[float], float], low: float, high: float) -> float:
    """Return where a function that rises between two points is 0."""
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if rising(middle) > 0 else (middle, high)
    return low


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution by its quantiles, ascending and evenly spaced."""

    quantiles: tuple[float, ...]

    @classmethod
    def fit(cls, mean: float, limit: int, cut: float) -> "Lengths":
        """Return a log-normal one of this mean, tokens, a share `cut` at `limit`; or UserError.

        Where that needs a spread above `_WIDEST`, the answers at the limit are a part of their own.
        """
        if not cut < 1:
            raise UserError(f"a share of {cut:g} of answers at the limit is not below 1; give less")
        normal, cut = NormalDist(), max(cut, _LEAST_CUT)
        shares = (np.arange(_POINTS) + 0.5) / _POINTS
        body = np.array([normal.inv_cdf(min(n / (1 - cut), 1 - 1e-9)) for n in shares])
        scores, last = np.array([*map(normal.inv_cdf, shares)]), normal.inv_cdf(1 - cut)

        def cut_by_spread(sigma: float) -> np.ndarray:
            return np.minimum(limit * np.exp(sigma * (scores - last)), limit)

        def cut_apart(center: float) -> np.ndarray:
            return np.where(
                shares > 1 - cut, limit, np.minimum(np.exp(center + _WIDEST * body), limit)
            )

        least, most = limit * cut, float(cut_by_spread(1e-6).mean())
        if not least + 1 < mean < most:
            raise UserError(
                f"no answers of {mean:g} tokens on average have {cut:.1%} at the limit of {limit}; "
                f"give a mean between {least + 1:.0f} and {most:.0f}, or another share"
            )
        if cut_by_spread(_WIDEST).mean() <= mean:
            lengths = cut_by_spread(
                _root(lambda sigma: mean - cut_by_spread(sigma).mean(), 0, _WIDEST)
            )
        else:
            lengths = cut_apart(_root(lambda at: cut_apart(at).mean() - mean, -1, math.log(limit)))
        return cls(tuple(map(float, np.maximum(lengths, 1.0))))

    @classmethod
    def measured(cls, lengths: Iterable[float]) -> "Lengths":
        """Return the distribution of lengths that were seen, at least one."""
        return cls(tuple(sorted(float(n) for n in lengths)))

    @property
    def mean(self) -> float:
        """Mean, tokens."""
        return fmean(self.quantiles)

    def draw(self, source: random.Random) -> float:
        """Return one length, tokens."""
        return self.quantiles[int(source.random() * len(self.quantiles))]


@dataclass(frozen=True)
class Setup:
    """A run to simulate."""

    limits: Limits
    samples: int  # answers of a prompt, which one server makes
    servers: int
    slots: int  # most sequences that a server decodes together
    server: ServerSpeed
    training: TrainerSpeed
    lengths: Lengths
    prompt_tokens: float  # of every prompt
    tool_seconds: float = 0.0  # an answer's time outside the model, in equal parts after its turns
    turns: int = 1  # in which an answer is made, in equal parts
    observed: float = 0.0  # tokens that each turn but the first adds to the prompt
    shared: bool = False  # whether the trainer runs on the servers' GPUs, so that these wait for it
    recompute: bool = False  # whether a server computes its KV caches again after an update
    latency: float = 0.0  # of a publish, for which the trainer does not wait
    seed: int = 0
    copies: int = 1  # of it that train together

    @property
    def given(self) -> float:
        """Tokens of a trajectory that were not sampled."""
        return self.prompt_tokens + (self.turns - 1) * self.observed

    @property
    def publish_seconds(self) -> float:
        """Seconds from a finished update to the last server's confirmation."""
        return self.training.publish_seconds(self.servers * self.copies) + self.latency


@dataclass(frozen=True, slots=True)
class Prediction:
    """Means over the steps after warm-up."""

    step_seconds: float  # from one batch to the next
    trainer_idle: float  # share of step_seconds
    servers_idle: float  # share of step_seconds
    tokens: float  # prompt and answer tokens of a batch
    # Versions between a group's oldest token and its batch → share of groups.
    lags: dict[int, float]
    preempted: float  # sequences a step that lost their KV cache when memory was full
    running: float  # sequences that a server decodes together, mean over busy time
    publish_seconds: float  # from a finished update to the last server's confirmation
    # (process, name, start, end) in seconds, for a timeline.
    spans: list[tuple[str, str, float, float]]


@dataclass(slots=True, eq=False)
class _Group:
    """A prompt under way, with what `buffer` reads of a group."""

    group_id: int
    admitted: int  # version
    left: int  # answers
    oldest_version: int
    lengths: list[float] = field(default_factory=list)
    trajectories: tuple[()] = ()


class _Turn(NamedTuple):
    """A turn of an answer, or what is left of it."""

    left: float  # tokens to make
    context: float  # tokens before them
    group: _Group
    part: float  # tokens of a whole turn
    further: int  # turns after it
    kept: float = 0.0  # first tokens of the context that are in the server's cache
    version: int = 0  # whose keys and values these are


class _Engine:
    """One server. Between two events all its sequences advance at the same speed."""

    def __init__(self, setup: Setup):
        self._setup, self._server = setup, setup.server
        self.now = self.busy = self.sequence_seconds = 0.0
        self.preempted = self.version = 0
        self._made = 0.0  # tokens of a sequence that had run all the time
        self._offset = 0.0  # Σ context − tokens made, of the running sequences
        self._debt = 0.0  # seconds of prefill and pauses before decoding goes on
        self._step = 1.0  # seconds of a decode step until the next event
        self._running: list[tuple[float, int, float, _Turn]] = []  # ends at, number, before
        self._number = 0
        self.waiting: deque[_Turn] = deque()
        self.queued = 0  # fewest sequences that waited since the last step

    @property
    def load(self) -> int:
        return len(self._running) + len(self.waiting)

    def advance(self, now: float) -> None:
        elapsed = now - self.now
        self.now = now
        paid = min(elapsed, self._debt)
        self._debt -= paid
        if self._running:
            self._made += (elapsed - paid) / self._step
            self.busy += elapsed
            self.sequence_seconds += elapsed * len(self._running)

    def stop(self, seconds: float, recompute: bool) -> None:
        """Pause decoding; `recompute`: then compute the caches again."""
        self._debt += seconds
        if recompute:
            self._debt += self._server.prefill_seconds(self._context)

    @property
    def _context(self) -> float:
        return self._offset + len(self._running) * self._made

    def finished(self) -> list[_Turn]:
        """Remove the turns that have ended, and return them."""
        turns, running, tokens = [], self._running, self._made + 1e-6
        while running and running[0][0] <= tokens:
            _, _, before, turn = heapq.heappop(running)
            self._offset -= before
            turns.append(turn)
        return turns

    def fill(self) -> float:
        """Start waiting sequences while there is room; return the time of the next event."""
        room, slots, running = self._server.kv_tokens, self._setup.slots, self._running
        while running and self._context > room:
            self._preempt()
        prefilled: _Group | None = None
        while self.waiting and len(running) < slots:
            turn = self.waiting[0]
            if running and self._context + turn.context > 0.95 * room:
                break
            self.waiting.popleft()
            fresh = turn.context == self._setup.prompt_tokens
            if not (fresh and prefilled is turn.group):  # a group's prompt is computed once
                kept = turn.kept * (turn.version == self.version)  # as vLLM's cache is keyed
                self._debt += self._server.prefill_seconds(turn.context - kept)
            prefilled = turn.group
            turn.group.oldest_version = min(turn.group.oldest_version, self.version)
            self._number += 1
            before = turn.context - self._made
            self._offset += before
            heapq.heappush(running, (self._made + turn.left, self._number, before, turn))
        self.queued = min(self.queued, len(self.waiting))
        if not running:
            return math.inf
        count, context = len(running), self._context
        tokens = min(max(running[0][0] - self._made, 0.0), max((room - context) / count, 1.0))
        self._step = self._server.decode_seconds(count, context + count * tokens / 2)
        return self.now + self._debt + tokens * self._step

    def _preempt(self) -> None:
        """Stop the newest sequence, as vLLM does; it continues when there is room."""
        index = max(range(len(self._running)), key=lambda i: self._running[i][1])
        end, _, before, turn = self._running.pop(index)
        heapq.heapify(self._running)
        self._offset -= before
        self.preempted += 1
        left, context = end - self._made, before + self._made
        self.waiting.appendleft(turn._replace(left=left, context=context, kept=0.0))


class _Run:
    """State of the simulation, and one method for each kind of event."""

    def __init__(self, setup: Setup):
        self.setup, self.limits = setup, setup.limits
        self.random = random.Random(setup.seed)
        self.engines = [_Engine(setup) for _ in range(setup.servers)]
        self.state, self.buffer = Staleness(), buffers.Buffer()
        self.events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.order = self.groups = 0
        self.planned = [math.inf] * setup.servers  # time of each engine's next event; inf: idle
        self.busy_since = [0.0] * setup.servers  # time since which each engine works
        self.loads = [(0, i) for i in range(setup.servers)]
        self.now, self.training = 0.0, False
        self.batches: list[tuple[float, float, list[_Group]]] = []  # start, seconds, groups
        self.spans: list[tuple[str, str, float, float]] = []

    def counts(self) -> np.ndarray:
        """Return busy seconds of all servers, those of their sequences, and preemptions."""
        return np.sum([(e.busy, e.sequence_seconds, e.preempted) for e in self.engines], axis=0)

    def at(self, time: float, what: Callable[..., None], *args: Any) -> None:
        self.order += 1
        heapq.heappush(self.events, (time, self.order, what, args))

    def run(self, steps: int) -> None:
        self.admit()
        while len(self.batches) < steps and self.events:
            self.now, _, what, args = heapq.heappop(self.events)
            what(*args)

    def admit(self) -> None:
        changed = set()
        count = staleness.capacity(self.state, self.limits)
        self.state = staleness.admit(self.state, self.limits, count)
        self.buffer = buffers.admit(self.buffer, self.state.version, count)
        for _ in range(count):
            index = self.least_loaded()
            group = _Group(self.groups, self.state.version, self.setup.samples, 1 << 60)
            self.groups += 1
            for _ in range(self.setup.samples):
                length = self.setup.lengths.draw(self.random)
                group.lengths.append(length)
                part, further = length / self.setup.turns, self.setup.turns - 1
                turn = _Turn(part, self.setup.prompt_tokens, group, part, further)
                self.engines[index].waiting.append(turn)
            heapq.heappush(self.loads, (self.engines[index].load, index))
            changed.add(index)
        for index in changed:
            self.engines[index].advance(self.now)
            self.schedule(index)

    def least_loaded(self) -> int:
        while True:
            load, index = heapq.heappop(self.loads)
            if load == self.engines[index].load:
                return index

    def schedule(self, index: int) -> None:
        """Plan the engine's next event, and note where it begins or ends to work."""
        before, after = self.planned[index], self.engines[index].fill()
        self.planned[index], idle = after, math.inf
        if before == idle > after:
            self.busy_since[index] = self.now
        elif before < idle == after:
            self.spans.append((f"server {index}", "generate", self.busy_since[index], self.now))
        if after < idle:
            self.at(after, self.decoded, index, after)

    def close_spans(self) -> None:
        for index, planned in enumerate(self.planned):
            if planned < math.inf:
                self.spans.append((f"server {index}", "generate", self.busy_since[index], self.now))

    def decoded(self, index: int, planned: float) -> None:
        if planned != self.planned[index]:
            return  # something happened in between, and a later event stands for this one
        engine = self.engines[index]
        engine.advance(self.now)
        answered = self.now + self.setup.tool_seconds / self.setup.turns
        for turn in engine.finished():
            if turn.further:
                self.at(answered, self.go_on, index, turn._replace(version=engine.version))
                continue
            turn.group.left -= 1
            if not turn.group.left:
                self.at(answered, self.accepted, turn.group)
        heapq.heappush(self.loads, (engine.load, index))
        self.schedule(index)

    def go_on(self, index: int, turn: _Turn) -> None:
        """Ask the same server for the next turn, whose prompt has a further observation."""
        engine, kept = self.engines[index], turn.context + turn.left
        engine.advance(self.now)
        engine.waiting.append(turn._replace(
            left=turn.part, context=kept + self.setup.observed, kept=kept, further=turn.further - 1
        ))  # fmt: skip
        heapq.heappush(self.loads, (engine.load, index))
        self.schedule(index)

    def accepted(self, group: _Group) -> None:
        self.buffer = buffers.finish(self.buffer, group.admitted, group)  # type: ignore[arg-type]
        self.state = staleness.end(self.state, "accepted")
        self.train()
        self.admit()

    def train(self) -> None:
        step = self.state.consumed
        if self.training or not buffers.ready(self.buffer, step, self.limits):
            return
        self.tune()
        self.buffer, batch = buffers.take(self.buffer, step, self.limits)
        self.state = staleness.consume(self.state, self.limits)
        groups: list[_Group] = batch  # type: ignore[assignment]
        lengths = np.array([n + self.setup.given for g in groups for n in g.lengths])
        seconds = self.setup.training.seconds(np.tile(lengths, self.setup.copies))
        self.batches.append((self.now, seconds, groups))
        self.training = True
        self.spans.append(("trainer", f"train {step + 1}", self.now, self.now + seconds))
        if self.setup.shared:
            self.pause(seconds)
        trained, published = self.now + seconds, self.now + seconds + self.setup.publish_seconds
        self.spans.append(("trainer", "publish", trained, published))
        self.at(published - self.setup.latency, self.rested)
        self.at(published, self.published, self.state.consumed)

    def tune(self) -> None:
        """Change the limits as a run's loop does after each step."""
        start, seconds, _ = self.batches[-1] if self.batches else (0.0, 0.0, [])
        waited = 1 - seconds / max(self.now - start, 1e-9)
        observation = Observation(waited, sum(e.queued for e in self.engines), self.state.running)
        self.limits = concurrency.follow(self.limits, observation)
        for engine in self.engines:
            engine.queued = len(engine.waiting)

    def pause(self, seconds: float, recompute: bool = False) -> None:
        for index, engine in enumerate(self.engines):
            engine.advance(self.now)
            engine.stop(seconds, recompute)
            self.schedule(index)

    def rested(self) -> None:
        self.training = False
        self.train()

    def published(self, version: int) -> None:
        self.state = staleness.publish(self.state, version)
        for engine in self.engines:
            engine.version = self.state.version
        self.pause(self.setup.server.load_seconds(), self.setup.recompute)
        self.admit()


def simulate(setup: Setup, steps: int = 0) -> Prediction:
    """Return the prediction for a run, of `steps` batches after warm-up."""
    setup = _thinned(setup)
    eta = int(setup.limits.max_staleness)
    warm, steps = eta + 2, steps or 6 + eta // 2  # 0: six, and more with a large bound
    run = _Run(setup)
    run.run(warm)
    start = run.now
    before = run.counts()
    run.run(warm + steps)
    seconds = max(run.now - start, 1e-9)
    busy, decoded, preempted = run.counts() - before
    run.close_spans()
    batches = list(enumerate(run.batches))[warm:]
    lags, tokens = dict[int, float](), 0.0
    for step, (_, _, groups) in batches:
        for group in groups:
            lag = step - group.oldest_version
            lags[lag] = lags.get(lag, 0.0) + 1 / (len(batches) * len(groups))
            tokens += sum(group.lengths) + setup.samples * setup.given
    # The last batch was only taken: its training is outside the time that was measured.
    trained = sum(seconds for _, seconds, _ in run.batches[warm - 1 : -1])
    return Prediction(
        step_seconds=seconds / steps,
        trainer_idle=max(0.0, 1 - trained / seconds),
        servers_idle=max(0.0, 1 - busy / seconds / setup.servers),
        tokens=setup.copies * tokens / steps,
        lags=dict(sorted(lags.items())),
        preempted=setup.copies * preempted / steps,
        running=decoded / max(busy, 1e-9),
        publish_seconds=setup.publish_seconds,
        spans=run.spans,
    )


def _thinned(setup: Setup) -> Setup:
    """Return a share of a run of many turns, with as many prompts for each server."""
    limits, servers = setup.limits, setup.servers
    turns = limits.batch_prompts * setup.samples * setup.turns
    most = math.gcd(limits.batch_prompts, servers) if setup.turns > 1 else 1
    shares = [n for n in range(1, most + 1) if most % n == 0]
    n = next((n for n in shares if turns / n <= _TURNS), shares[-1])
    less = replace(limits, batch_prompts=limits.batch_prompts // n,
                   concurrency=max(1, limits.concurrency // n))  # fmt: skip
    return replace(setup, limits=less, servers=servers // n, copies=n)
