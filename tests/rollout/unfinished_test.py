"""Unfinished samples go on after kills: real servers, an in-memory journal, every kind of cut."""

import asyncio
import random
import time
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx.base import Group, Unavailable
from rlx.engines import service
from rlx.fleet.requests import Chunk, Sampling
from rlx.journal import history, records
from rlx.rollout import unfinished
from rlx.rollout.data import Cursor
from rlx.rollout.executor import Executor, group_seed
from rlx.rollout.staleness import Limits
from rlx.rollout.unfinished import Unfinished
from rlx.rollout.workflows import joined
from rlx.system.threads import LoopThread, run_all

SEED, ROWS = 5, [{"question": f"q{i}", "answer": str(i)} for i in range(60)]
PROMPT, N, SECONDS = [1, 2, 3], 3, 30.0
SEEDED = Sampling(seed=1)


class Notes:
    """A journal in memory."""

    def __init__(self):
        self.records = []

    def __call__(self, kind, fields, group=None):
        packed = records.pack(group) if group else b""
        number = len(self.records)
        self.records += records.scan(records.encode(number, kind, fields, packed))
        return number

    def after(self, host):
        at = history.position(host)
        found = history.recover(host, at, self.records[at[0] :])
        assert found.complete
        return found


def longest(group_id, sample, turn=0):
    """Most tokens of an answer, mostly few and sometimes many."""
    return random.Random(f"{group_id} {sample} {turn}").choice([4, 8, 20, 60, 200])


class Talk:
    """Samples of different lengths; each sees an observation before a further turn."""

    def __init__(self, turns=1, observe=lambda: 9, most=longest):
        self.turns, self.observe, self.most = turns, observe, most

    async def run(self, fleet, task):
        async def sample(i):
            found = []
            for turn in range(self.turns):
                seen = [self.observe()] if turn else PROMPT
                before = [token for said, made in found for token in (*said, *made.tokens)]
                most = self.most(task.group_id, i, turn)
                sampling = Sampling(seed=task.seed + i, max_new_tokens=most)
                found.append((seen, (await fleet.generate([*before, *seen], sampling, 1))[0]))
            return joined(found, float(i), f"{task.group_id}.{i}")

        return Group(task.group_id, tuple(await run_all(*map(sample, range(N)))), task.row)


@pytest.fixture
def quick(monkeypatch):
    """Tokens come, and are noted, in small pieces."""
    monkeypatch.setattr(service, "_HOLD_SECONDS", 0.002)
    monkeypatch.setattr(unfinished, "WRITE_SECONDS", 0.02)


class Life:
    """One process of a run: an executor, its fleet, and its servers' engines."""

    def __init__(self, tools, executor, fleet, engines):
        self.tools, self.executor, self.fleet, self.engines = tools, executor, fleet, engines

    def publish(self, version):
        self.executor.loop.run(self.fleet.publish(version, self.tools.weights(1.0 + version)))
        self.executor.set_version(version)

    def collect(self):
        batch = self.executor.collect(timeout=SECONDS)
        assert batch is not None, self.executor.counters()
        return batch

    @property
    def made(self):
        return sum(engine.generated for engine in self.engines)

    def note_all(self, stop=True):
        """Note all tokens that the servers have made, and stop them."""

        async def note():
            for engine in self.engines if stop else ():
                await engine.pause()
            await asyncio.sleep(0.05 * stop)  # for the step that has begun
            end = time.monotonic() + SECONDS
            while stop and self.fleet.tokens < self.made:
                assert time.monotonic() < end
                await asyncio.sleep(0.01)
            self.executor.unfinished.write()

        self.executor.loop.run(note())


@pytest.fixture
def live(tools, arithmetic, tmp_path, quick):
    """Starts a process of a run, which ends as if it was killed."""

    @contextmanager
    def start(notes, limits, servers=1, workflow=None, host=None, killed=True):
        loop, stack = LoopThread("executor"), AsyncExitStack()
        loop.start()
        engines = [arithmetic.ArithmeticEngine(step_seconds=0.004) for _ in range(servers)]
        patient = replace(tools.limits, hang_seconds=20.0)  # a loaded machine sends nothing twice
        found = tools.fleet(servers, tmp_path, engines, patient)
        fleet, *_ = loop.run(stack.enter_async_context(found))
        executor = Executor(
            workflow or Talk(), Cursor(ROWS, seed=3), limits, fleet, seed=SEED, note=notes,
            loop=loop, keep_tokens=True,
        )  # fmt: skip
        if host:
            found = notes.after(host)
            executor.restore(found.host, found.groups, samples=found.samples)
            order = found.host["step"] + executor.num_repeated
            notes("start", {"order": order, "whole": True, "rows": ""})
        try:
            yield Life(tools, executor, fleet, engines)
            end = len(notes.records)
        finally:
            executor.close()
            loop.run(stack.aclose())
            loop.close()
        if killed:
            del notes.records[end:]  # what a clean end adds

    return start


@pytest.mark.parametrize("eta", [0, 2])
@pytest.mark.parametrize("noted", [True, False])
def test_a_killed_run_trains_on_what_an_undisturbed_one_does(live, arithmetic, eta, noted):
    """Each prompt once, its tokens and so its lengths those of an undisturbed run."""
    notes, steps, draw = Notes(), 8, random.Random(eta)
    limits, host, trained = Limits(2, eta, 6, steps), None, {}
    made = continued = repeated = 0
    for servers, goal in ((1, 2), (2, 4), (1, 4), (3, steps)):
        with live(notes, limits, servers, host=host) as run:
            first = host["step"] if host else 0
            host = host or run.executor.state()
            for step in range(first, goal):
                run.publish(step)
                if step == goal - 2:  # a checkpoint with live prompts, older than the kill
                    time.sleep(0.05)
                    run.note_all(stop=False)
                    host = run.executor.state()
                batch = run.collect()
                assert all(step - group.oldest_version <= eta for group in batch)
                ids = [group.group_id for group in batch]
                assert [g.group_id for g in trained.setdefault(step, batch)] == ids
            if goal < steps:
                run.publish(goal)
                time.sleep(draw.uniform(0.05, 0.2))
            if noted:
                run.note_all()
            counters = run.executor.counters()
            made += run.made
        assert counters["dropped"] == counters["failed"] == 0
        continued += counters["continued_tokens"]
        repeated += counters["repeated_tokens"]
    groups = [group for batch in trained.values() for group in batch]
    assert sorted(group.group_id for group in groups) == list(range(2 * steps))
    for group in groups:
        seed = group_seed(SEED, group.group_id, 0)
        for i, t in enumerate(group.trajectories):
            most, own = longest(group.group_id, i), t.versions >= 0
            assert t.tokens[own].tolist() == arithmetic.completion(seed + i, 0, most)
            weights = 1.0 + t.versions[own]  # the version is that of the weights that drew it
            assert np.allclose(t.behaviour_logprobs[own], -weights / (1 + t.tokens[own]))
    trained_on = sum(int((t.versions >= 0).sum()) for g in groups for t in g.trajectories)
    assert continued > 0
    if noted:  # nothing that the journal has is made twice, and a synchronous run says what is
        assert made == trained_on + repeated
        assert (repeated > 0) == (eta == 0)
    assert made >= trained_on


@pytest.mark.parametrize("same", [True, False])
def test_turns_go_on_as_long_as_the_observations_are_the_same(live, same):
    notes, limits = Notes(), Limits(2, 1, 4, 4)
    with live(notes, limits, workflow=Talk(turns=3)) as run:
        run.publish(0)
        time.sleep(0.3)
        run.note_all()
        host, made = run.executor.state(), run.made
    kept = sum(s[-1].end for own in notes.after(host).samples.values() for s in own.values())
    assert kept > 0, "a checkpoint names the first records that it needs"
    observe = (lambda: 9) if same else (lambda: 8)
    with live(notes, limits, 2, Talk(3, observe), host) as run:
        trained = []
        for step in range(4):
            run.publish(step)
            trained += [t for group in run.collect() for t in group.trajectories]
        counters, made = run.executor.counters(), made + run.made
    assert counters["continued_tokens"] + counters["repeated_tokens"] == kept
    assert (counters["repeated_tokens"] == 0) == same
    used = sum(int((t.versions >= 0).sum()) for t in trained)
    assert made == used + counters["repeated_tokens"]
    assert counters["generated_tokens"] + counters["continued_tokens"] <= used


@pytest.mark.parametrize("changes", [{"max_staleness": 0}, {"total_steps": 3}, {"concurrency": 1}])
def test_smaller_limits_lose_no_prompt_and_wait_for_none(live, changes):
    notes, limits = Notes(), Limits(2, 2, 8, 8)
    slow = Talk(most=lambda group_id, *_: 4 if group_id < 4 else 400)
    with live(notes, limits, workflow=slow) as run:
        host = run.executor.state()
        run.publish(0)
        for step in range(2):
            run.collect()
            run.publish(step + 1)
        run.note_all()
    assert {4, 5} <= notes.after(host).samples.keys()  # admitted at version 0
    smaller = replace(limits, **changes)
    with live(notes, smaller, workflow=slow, host=host) as run:
        found = []
        for step in range(smaller.total_steps):
            run.publish(step)
            batch = run.collect()
            if step >= 2:
                assert all(step - g.oldest_version <= smaller.max_staleness for g in batch)
            found += [group.group_id for group in batch]
    assert len(set(found)) == len(found) == 2 * smaller.total_steps


def test_a_clean_end_notes_what_has_come(live, monkeypatch):
    monkeypatch.setattr(unfinished, "WRITE_SECONDS", 1000.0)
    notes, limits = Notes(), Limits(2, 1, 4, 4)
    endless = Talk(most=lambda *_: 400)
    with live(notes, limits, workflow=endless, killed=False) as run:
        host = run.executor.state()
        run.publish(0)
        while not run.fleet.tokens:
            time.sleep(0.01)
    assert notes.after(host).samples


def with_samples(executor, versions):
    """Restores an executor with a prompt of each version, whose sample has three tokens of it."""
    host = executor.state()
    host |= {"pending": [[g, 0] for g in range(len(versions))]}
    host |= {"admitted_at": [[g, 0] for g in range(len(versions))]}
    host["cursor"]["position"] = len(versions)
    known = np.arange(3, dtype=np.int32)
    columns = [(known, known * -0.5, known * 0 + version) for version in versions]
    names = ("tokens", "logprobs", "versions")
    samples = {
        g: {(7, 0): [history.Piece(dict(zip(names, own, strict=True)), None, 3)]}
        for g, own in enumerate(columns)
    }
    executor.restore(host, [], samples=samples)
    counts = executor.unfinished.counts()
    return counts["tokens"], counts["repeated_tokens"]


def test_tokens_of_weights_that_do_not_come_back_begin_again(live):
    """As after a batch that cannot be repeated, because its groups are lost."""
    with live(Notes(), Limits(2, 2, 4, 1)) as run:
        assert with_samples(run.executor, [2, 0]) == (3, 3)
        run.publish(0)
        assert [group.group_id for group in run.collect()] == [0, 1]
        assert run.executor.counters()["repeated_tokens"] == 6  # no call asked for the other's


@pytest.mark.parametrize(("limits", "fit"), [(Limits(2, 1, 4), True), (Limits(1, 1, 4), False)])
def test_samples_that_have_no_batch_within_the_bound_begin_again(live, limits, fit):
    with live(Notes(), limits) as run:
        assert with_samples(run.executor, [0, 0, 0]) == ((9, 0) if fit else (0, 9))


def test_without_tokens_in_the_journal_nothing_counts_as_continued(live):
    with live(Notes(), Limits(2, 2, 4, 1)) as run:
        run.executor._keep_tokens = False
        assert with_samples(run.executor, [0, 0]) == (0, 0)


class Outage(Talk):
    async def run(self, fleet, task):
        await super().run(fleet, task)
        raise Unavailable("no rollout server alive")


def test_an_outage_that_ends_the_run_keeps_the_samples(live):
    notes, limits = Notes(), Limits(2, 2, 4)
    with live(notes, limits, workflow=Outage()) as run:
        host = run.executor.state()
        run.publish(0)
        with pytest.raises(Unavailable):
            run.collect()
        run.executor.loop.run(asyncio.sleep(0.1))
        saved = run.executor.state()  # as of a run that ends in an error
    for each in (host, saved):
        found = notes.after(each)
        ended = [all(p[-1].stop_reason for p in own.values()) for own in found.samples.values()]
        assert any(ended)
        assert len(found.host["pending"]) == len(found.host["admitted_at"]) == 4
    kept = sum(p[-1].end for own in found.samples.values() for p in own.values())
    with live(notes, limits, host=saved) as run:
        counts = run.executor.unfinished.counts()
    assert (counts["tokens"], counts["repeated_tokens"]) == (kept, 0)


def test_a_continued_attempt_that_fails_is_repeated():
    made = Unfinished(Notes())
    for finished, group_id in ((True, 0), (False, 1)):
        attempt = made._live[group_id] = unfinished.Attempt(None, 0, {})
        attempt.continued = 5
        made.end(group_id, finished)
    assert (made.continued, made.repeated) == (5, 5)


class Made:
    """A fleet that shows what it is asked to continue, and makes three tokens of each sample."""

    def __init__(self, after=lambda: None):
        self.asked, self._after = [], after

    async def generate(self, prompt, sampling, n, *, samples):
        self.asked.append((sampling.seed, [s.length for s in samples], n))
        for sample in samples:
            for _ in range(3 if sample.stop_reason is None else 0):
                one = np.array([sample.length], np.int32)
                sample.add(Chunk(sample.index, one, one * -0.5, one * 0))
                self._after()
        return samples


def resumed(calls, again, sampling=SEEDED):
    """Return the lengths that a resumed attempt's calls begin with, its state, its requests."""

    async def main():
        notes, fleet = Notes(), Made()
        first = Unfinished(notes)
        for prompt, n in calls:
            attempt = first._live.get(0) or first.begin(0, fleet, 7)
            await attempt.generate(prompt, sampling, n)
        first.write()
        host = {"step": 0, "cursor": {"position": 1}, "pending": [[0, 0]]}
        found = history.recover(host, (0, -1), notes.records)
        second, fleet = Unfinished(notes), Made()
        second.restore(found.samples, {0}, ended=False)
        attempt = second.begin(0, fleet, 7)
        for prompt, n in again:
            await attempt.generate(prompt, sampling, n)
        second.end(0)
        return [lengths for _, lengths, _ in fleet.asked], second, fleet.asked

    return asyncio.run(main())


def test_a_call_is_known_by_its_arguments_and_equal_calls_by_their_order():
    calls = [([1], 2), ([1], 2), ([2], 1)]
    lengths, end, _ = resumed(calls, [([2], 1), ([1], 2), ([3], 1), ([1], 2), ([1], 2), ([1], 1)])
    assert lengths == [[3], [3, 3], [0], [3, 3], [0, 0], [0]]
    assert (end.continued, end.repeated) == (15, 0)
    _, end, _ = resumed(calls, [([2], 1)])
    assert (end.continued, end.repeated) == (3, 12)


def test_a_call_without_a_seed_gets_the_one_that_it_had():
    _, _, first = resumed([], [([1], 1), ([1], 1)], Sampling())
    lengths, _, second = resumed([([1], 1)], [([1], 1), ([1], 1)], Sampling())
    assert [seed for seed, *_ in first] == [seed for seed, *_ in second]
    assert first[0][0] != first[1][0]
    assert lengths == [[3], [0]]


@pytest.mark.parametrize("options", [{"guide": "{}"}, {"top_logprobs": 2}])
def test_what_no_server_can_continue_begins_again(options):
    lengths, *_ = resumed([([1], 1)], [([1], 1)], Sampling(seed=1, **options))
    assert lengths == [[0]]


def test_sampling_masks_come_back_with_the_tokens_that_have_them():
    notes, host = Notes(), {"step": 0, "cursor": {"position": 3}, "pending": [[0, 0], [1, 0]]}
    masked = Chunk(0, [7, 8], [-0.5, 0.0], [0, 0], None, kept_sizes=[2, 1], kept=b"abc")
    plain = Chunk(1, [9], [-1.0], [0], None)

    async def main():
        made = Unfinished(notes)
        attempt = made.begin(0, None, 0)
        attempt.new += [(5, 0, 0, masked), (5, 1, 0, plain)]
        made.write()
        attempt.new += [(5, 1, 1, replace(plain, tokens=[4]))]
        made.write()

    asyncio.run(main())
    found = history.recover(host, (0, -1), notes.records).samples[0]
    (first,), (early, late) = found[5, 0], found[5, 1]
    assert first.columns["kept_sizes"].tolist() == [2, 1]
    assert first.columns["kept"] == b"abc"
    assert early.columns["kept_sizes"].tolist() == [0]
    assert "kept" not in late.columns
    assert Chunk(0, **first.columns).tokens.tolist() == [7, 8]


@settings(deadline=None, max_examples=60)
@given(cut=st.integers(20, 100), lost=st.integers(0, 60), flip=st.integers(0, 10**6))
def test_a_cut_or_damaged_journal_leaves_the_beginnings_of_samples(cut, lost, flip):
    notes, host = Notes(), {"step": 0, "cursor": {"position": 3}, "pending": [[0, 0], [1, 0]]}

    async def main():
        made = Unfinished(notes)
        attempts = [made.begin(group_id, Made(made.write), group_id) for group_id in range(2)]
        for turn in range(4):
            for attempt in attempts:
                await attempt.generate([turn % 2], SEEDED, 2)

    asyncio.run(main())
    whole = history.recover(host, (0, -1), notes.records).samples
    assert sum(pieces[-1].end for own in whole.values() for pieces in own.values()) == 48
    data = [records.encode(r.number, r.kind, r.fields, r.packed) for r in notes.records]
    kept = b"".join(each for number, each in enumerate(data) if number != lost)
    damaged = bytearray(kept[: cut * len(kept) // 100])
    if flip % 2:
        damaged[flip % len(damaged)] ^= 1
    found = history.recover(host, (0, -1), records.scan(bytes(damaged))).samples
    for group_id, own in found.items():
        for key, pieces in own.items():
            tokens = [piece.columns["tokens"].tolist() for piece in pieces]
            assert tokens == [[n] for n in range(pieces[-1].end)]
            assert pieces[-1].end <= whole[group_id][key][-1].end == 3
