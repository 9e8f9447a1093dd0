"""The staleness bound, exactly-once and progress, under hypothesis' worst orders."""

import dataclasses
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rlx.base import Group, Trajectory
from rlx.rollout import buffer as buffers
from rlx.rollout import staleness
from rlx.rollout.buffer import Buffer
from rlx.rollout.staleness import Limits, Staleness, StalenessViolation


def make_group(group_id, versions, prompt_length=1):
    """A group of one trajectory whose sampled tokens carry `versions`."""
    v = np.array([-1] * prompt_length + list(versions), np.int32)
    trajectory = Trajectory(
        tokens=np.zeros(len(v), np.int32),
        loss_mask=v >= 0,
        behaviour_logprobs=np.zeros(len(v), np.float32),
        versions=v,
        reward=0.0,
        stop_reason="stop",
        trajectory_id=f"{group_id}.0",
    )
    return Group(group_id, (trajectory,))


class Rollout(RuleBasedStateMachine):
    """A run with everything that can go wrong, against the bound, in any order."""

    @initialize(
        batch=st.integers(1, 4),
        eta=st.integers(0, 4),
        concurrency=st.integers(1, 24),
        total=st.none() | st.integers(1, 12),
    )
    def begin(self, batch, eta, concurrency, total):
        self.limits = Limits(batch, eta, concurrency, total)
        self.state, self.buffer = Staleness(), Buffer()
        self.live = {}  # group_id → version at admission
        self.retry = []
        self.next_id = 0
        self.trained, self.rejected, self.skipped = [], set(), set()
        self.most_held = 0  # by a checkpoint of a longer run
        self.saved, self.since, self.repeated = 0, [], []  # step of a checkpoint, batches after it

    def admit(self):
        group_id = self.retry.pop(0) if self.retry else self.next_id
        if group_id == self.next_id:
            self.next_id += 1
        self.state = staleness.admit(self.state, self.limits)
        self.buffer = buffers.admit(self.buffer, self.state.version)
        self.live[group_id] = self.state.version

    @rule(n=st.integers(1, 12))
    def admit_some(self, n):
        for _ in range(min(n, staleness.capacity(self.state, self.limits))):
            self.admit()

    def leave(self, data):
        group_id = data.draw(st.sampled_from(sorted(self.live)), "group")
        return group_id, self.live.pop(group_id)

    def finish(self, group_id, admitted, oldest):
        newest = max(oldest, self.state.version)
        group = make_group(group_id, [oldest, newest])
        self.buffer = buffers.finish(self.buffer, admitted, group)
        self.state = staleness.end(self.state, "accepted")

    @precondition(lambda self: self.live)
    @rule(data=st.data(), lazy=st.booleans())
    def accept(self, data, lazy):
        group_id, admitted = self.leave(data)
        oldest = admitted if lazy else data.draw(st.integers(admitted, self.state.version))
        self.finish(group_id, admitted, oldest)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fail(self, data):
        group_id, admitted = self.leave(data)
        self.buffer = buffers.withdraw(self.buffer, admitted)
        self.state = staleness.end(self.state, "failed")
        self.retry = sorted([*self.retry, group_id])

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def skip(self, data):
        group_id, admitted = self.leave(data)
        self.buffer = buffers.withdraw(self.buffer, admitted)
        self.state = staleness.end(self.state, "skipped")
        self.skipped.add(group_id)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def reject(self, data):
        group_id, admitted = self.leave(data)
        self.buffer = buffers.withdraw(self.buffer, admitted)
        self.state = staleness.end(self.state, "rejected")
        self.rejected.add(group_id)

    def ready(self):
        return bool(self.repeated) or buffers.ready(self.buffer, self.state.consumed, self.limits)

    @precondition(lambda self: self.ready())
    @rule()
    def train(self):
        step = self.state.consumed
        unconsumed = [g.group_id for g in buffers.groups(self.buffer)] + list(self.live)
        if self.repeated:
            batch = self.repeated.pop(0)
            unconsumed = [g.group_id for g in batch]
        else:
            self.buffer, batch = buffers.take(self.buffer, step, self.limits)
        self.since.append(batch)
        self.state = staleness.consume(self.state, self.limits)
        assert len(batch) == self.limits.batch_prompts
        for group in batch:
            assert step - group.oldest_version <= self.limits.max_staleness
        ids = [g.group_id for g in batch]
        assert ids == sorted(ids)
        assert not set(ids) & set(self.trained)
        if self.limits.max_staleness == 0:
            assert ids == sorted(unconsumed)
        self.trained += ids

    @precondition(lambda self: self.state.version < self.state.consumed)
    @rule(data=st.data())
    def publish(self, data):
        version = data.draw(st.integers(self.state.version + 1, self.state.consumed))
        self.state = staleness.publish(self.state, version)

    @rule(random=st.randoms(use_true_random=False), slow=st.integers(2, 9), steps=st.integers(1, 9))
    def run_with_stragglers(self, random, slow, steps):
        """The usual life: full admission, some groups much slower, the publish sometimes late."""
        for _ in range(steps):
            for _ in range(staleness.capacity(self.state, self.limits)):
                self.admit()
            for group_id in random.sample(sorted(self.live), len(self.live)):
                if group_id % slow and random.random() < 0.8:
                    admitted = self.live.pop(group_id)
                    self.finish(group_id, admitted, random.randint(admitted, self.state.version))
            if self.ready():
                self.train()
            if random.random() < 0.8:
                self.state = staleness.publish(self.state, self.state.consumed)

    @rule()
    def checkpoint(self):
        self.saved, self.since = self.state.consumed, []

    @rule()
    def kill(self):
        """Resume an earlier checkpoint: the batches since come first, as they were."""
        order = [*self.since, *self.repeated]
        known = {g.group_id: g for batch in order for g in batch}
        ids = [[g.group_id for g in batch] for batch in order]
        self.repeated = buffers.repeat_batches(known, ids, self.saved, self.limits)
        assert self.repeated == order
        self.trained = self.trained[: -sum(map(len, self.since)) or None]
        rest = buffers.groups(self.buffer)
        step = self.saved + len(order)
        self.buffer, left_over = buffers.restore(rest, step, self.limits)
        assert left_over == []
        self.state = staleness.resume(self.saved, len(known) + len(rest), self.limits)
        self.retry, self.live, self.since = sorted([*self.retry, *self.live]), {}, []

    @precondition(lambda self: not self.repeated)
    @rule()
    def resume(self):
        """Kill and restore: live prompts start again, finished ones are kept."""
        kept = buffers.groups(self.buffer)
        step = self.state.consumed
        self.buffer, left_over = buffers.restore(kept, step, self.limits)
        assert left_over == []
        self.state = staleness.resume(step, len(kept), self.limits)
        self.retry = sorted([*self.retry, *self.live])
        self.live = {}

    @precondition(lambda self: not self.repeated)
    @rule(eta=st.integers(0, 4), batch=st.integers(1, 4), more=st.none() | st.integers(0, 9))
    def resume_with_other_limits(self, eta, batch, more):
        """A checkpoint may be continued with a smaller η: what no longer fits is generated again.

        A new B starts a new count of batches; only the versions are carried on. More steps, or
        fewer, take what there is.
        """
        kept, step = buffers.groups(self.buffer), self.state.consumed
        self.limits = dataclasses.replace(
            self.limits,
            max_staleness=eta,
            batch_prompts=batch,
            total_steps=None if more is None else step + more,
        )
        self.buffer, left_over = buffers.restore(kept, step, self.limits)
        self.state = staleness.resume(step, self.buffer.num_finished, self.limits)
        self.retry = sorted([*self.retry, *self.live, *(g.group_id for g in left_over)])
        self.live = {}
        self.most_held = self.state.accepted
        self.saved, self.since = step, []

    @invariant()
    def nothing_is_lost(self):
        if not hasattr(self, "limits"):
            return
        finished = [g.group_id for g in buffers.groups(self.buffer)]
        everything = [*finished, *self.live, *self.retry, *self.trained, *self.rejected]
        everything += [*self.skipped, *(g.group_id for batch in self.repeated for g in batch)]
        assert sorted(everything) == list(range(self.next_id))
        assert sum(n for _, n in self.buffer.live) == self.state.running == len(self.live)
        assert self.buffer.num_finished == len(finished)

    @invariant()
    def nothing_is_generated_for_nobody(self):
        """While a run lasts, it holds no more groups than its batches will take."""
        if not hasattr(self, "limits") or self.limits.total_steps is None:
            return
        assert self.state.accepted + self.state.running <= max(
            self.limits.total_steps * self.limits.batch_prompts, self.most_held
        )

    @invariant()
    def there_is_room_for_what_is_due(self):
        """(I) of the module, computed the slow way."""
        if not hasattr(self, "limits"):
            return
        step, eta = self.state.consumed, self.limits.max_staleness
        due = [v + eta for v in self.live.values()]
        due += [g.oldest_version + eta for g in buffers.groups(self.buffer)]
        due += [g.oldest_version + eta for batch in self.repeated for g in batch]
        for j in range(step, max(due, default=step) + 1):
            room = (j - step + 1) * self.limits.batch_prompts
            assert sum(d <= j for d in due) <= room
        assert min(due, default=step) >= step

    def teardown(self):
        """Progress: from any state, honest servers and a publishing trainer always get on."""
        if not hasattr(self, "limits"):
            return
        for _ in range(3):
            total = self.limits.total_steps
            if total is not None and self.state.consumed >= total:
                assert staleness.capacity(self.state, self.limits) == 0
                return
            self.state = staleness.publish(self.state, self.state.consumed)
            for _ in range(100):
                if self.ready():
                    break
                while staleness.capacity(self.state, self.limits):
                    self.admit()
                for group_id in sorted(self.live, reverse=True):
                    admitted = self.live.pop(group_id)
                    self.finish(group_id, admitted, admitted)
            assert self.ready(), "deadlock"
            self.train()


Rollout.TestCase.settings = settings(
    max_examples=120,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
test_rollout = Rollout.TestCase


def fill(limits, n, versions=None):
    """A buffer with `n` finished groups; versions[i] defaults to 0."""
    buffer = Buffer()
    for i in range(n):
        version = versions[i] if versions else 0
        buffer = buffers.finish(buffers.admit(buffer, version), version, make_group(i, [version]))
    return buffer


def test_a_batch_waits_for_a_slow_group_only_when_it_is_due():
    limits = Limits(2, 1, 10)
    buffer = buffers.admit(Buffer(), 0)  # group 9 is slow: due in batch 1
    for i, version in enumerate([0, 0, 1, 1]):
        buffer = buffers.finish(buffers.admit(buffer, version), version, make_group(i, [version]))
    buffer, batch = buffers.take(buffer, 0, limits)
    assert [g.group_id for g in batch] == [0, 1]
    assert not buffers.ready(buffer, 1, limits)
    buffer = buffers.finish(buffer, 0, make_group(9, [0]))
    _, batch = buffers.take(buffer, 1, limits)
    assert [g.group_id for g in batch] == [2, 9]


def test_a_batch_waits_when_taking_it_would_leave_too_much_for_the_next():
    """Two young groups are ready, but three live ones are due by batch 3, which holds two."""
    limits = Limits(2, 2, 10)
    buffer = Buffer()
    for _ in range(3):
        buffer = buffers.admit(buffer, 1)
    for i in range(2):
        buffer = buffers.finish(buffers.admit(buffer, 1), 1, make_group(i, [2]))
    assert not buffers.ready(buffer, 2, limits)
    buffer = buffers.finish(buffer, 1, make_group(2, [1]))
    buffer, batch = buffers.take(buffer, 2, limits)
    assert [g.group_id for g in batch] == [0, 2]


def test_the_oldest_tokens_go_first():
    limits = Limits(2, 3, 10)
    _, batch = buffers.take(fill(limits, 4, [1, 0, 1, 0]), 1, limits)
    assert [g.group_id for g in batch] == [1, 3]


def test_a_group_without_sampled_tokens_is_not_stale():
    limits = Limits(1, 0, 10)
    buffer = buffers.finish(buffers.admit(Buffer(), 3), 3, make_group(0, []))
    _, batch = buffers.take(buffer, 3, limits)
    assert [g.group_id for g in batch] == [0]


def test_a_token_older_than_the_admission_is_a_bug():
    with pytest.raises(StalenessViolation, match="admitted at version 2"):
        buffers.finish(buffers.admit(Buffer(), 2), 2, make_group(0, [1]))


def test_overdue_groups_raise_instead_of_waiting_for_ever():
    limits = Limits(1, 1, 10)
    with pytest.raises(StalenessViolation, match="still unconsumed at step 2"):
        buffers.ready(buffers.admit(Buffer(), 0), 2, limits)


def test_tokens_of_the_future_raise():
    limits = Limits(1, 1, 10)
    buffer = buffers.finish(buffers.admit(Buffer(), 0), 0, make_group(0, [0, 2]))
    with pytest.raises(StalenessViolation, match="versions 0 to 2 in batch 1"):
        buffers.take(buffer, 1, limits)


def test_taking_too_early_raises():
    with pytest.raises(StalenessViolation, match="before it was ready"):
        buffers.take(fill(Limits(2, 1, 10), 1), 0, Limits(2, 1, 10))


def test_events_at_ten_thousand_live_prompts_do_not_scan_them():
    """60,000 events on 10,000 unconsumed groups; a scan per event would be 6·10⁸ steps."""
    limits = Limits(100, 99, 10_000)
    state, buffer = Staleness(), Buffer()
    group_of = [make_group(i, [0]) for i in range(10_000)]
    started = time.process_time()
    for _ in range(10_000):
        state = staleness.admit(state, limits)
        buffer = buffers.admit(buffer, state.version)
    for group in reversed(group_of):
        state = staleness.end(state, "accepted")
        buffer = buffers.finish(buffer, 0, group)
        buffers.ready(buffer, 0, limits)
    seen = []
    for step in range(100):
        buffer, batch = buffers.take(buffer, step, limits)
        state = staleness.consume(state, limits)
        seen += [g.group_id for g in batch]
    assert seen == list(range(10_000))
    assert time.process_time() - started < 20.0


def test_a_buffer_is_a_value_that_finishing_and_taking_do_not_change():
    limits = Limits(2, 2, 10)
    before = buffers.admit(fill(limits, 3, [0, 1, 1]), 1, 2)
    with_8, with_9 = (buffers.finish(before, 1, make_group(i, [1])) for i in (8, 9))
    assert [g.group_id for g in buffers.groups(with_8)] == [0, 1, 2, 8]
    assert [g.group_id for g in buffers.groups(with_9)] == [0, 1, 2, 9]
    rest, batch = buffers.take(with_9, 1, limits)
    assert [g.group_id for g in batch] == [0, 1]
    assert [g.group_id for g in buffers.groups(rest)] == [2, 9]
    assert [g.group_id for g in buffers.groups(with_9)] == [0, 1, 2, 9]
    assert [g.group_id for g in buffers.groups(before)] == [0, 1, 2]


def test_finishing_a_group_copies_none_of_the_others():
    """A tuple of them would take 40 kB for each group, and hours for 100,000."""
    buffer, group = fill(Limits(1, 4, 10), 5_000), make_group(9_999, [0])
    buffer = buffers.admit(buffer, 0)
    tracemalloc.start()
    kept = buffers.finish(buffer, 0, group)
    used = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert kept.num_finished == 5_001
    assert used < 4_000
