"""Continuous batching as host state: no sample is lost, doubled, or left in a slot."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rlx.engines.jax.slots import BUDGET, LENGTH, MINIMUM, LiveRequest, Slots, sample_key, uniforms
from rlx.fleet.requests import Request, Sampling

STOP, STEPS, MAX_LEN = 7, 4, 24


def live_of(n=1, prompt=(1, 2, 3), priority=0, prefix_len=0, first_index=0, **sampling):
    prompt = np.asarray(prompt, np.int32)
    sampling = Sampling(**{"max_new_tokens": 10} | sampling)
    request = Request("r", prompt, sampling, n, first_index, prefix_len, priority)
    return LiveRequest(request, 0, (STOP,))


def test_uniforms_are_uniform_and_a_function_of_key_and_position():
    keys = np.array([sample_key(0, i) for i in range(500)])
    draws = uniforms(keys, np.zeros(500, int), 64)
    assert draws.dtype == np.float32
    assert draws.min() >= 0
    assert draws.max() < 1
    counts = np.histogram(draws, 32, (0, 1))[0]
    expected = draws.size / 32
    assert ((counts - expected) ** 2 / expected).sum() < 70  # χ², 31 degrees of freedom: p < 1e-4
    # Neither neighbouring positions nor neighbouring samples are correlated.
    for a, b in ((draws[:, :-1], draws[:, 1:]), (draws[:-1], draws[1:])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.03
    np.testing.assert_array_equal(uniforms(keys, np.full(500, 10), 8), draws[:, 10:18])
    assert len({int(sample_key(s, i)) for s in range(30) for i in range(30)}) == 900


def test_a_group_is_prefilled_once_and_late_samples_copy_a_sibling():
    slots = Slots(4, STEPS, MAX_LEN)
    slots.add(live_of(n=6))
    starts = slots.admit(load=3)
    assert [(s.slot, s.sample.index, s.source) for s in starts] == [
        (0, 0, None), (1, 1, None), (2, 2, None), (3, 3, None),
    ]  # fmt: skip
    tokens = np.full((4, STEPS), STOP)
    slots.accept(tokens, np.zeros((4, STEPS)), np.array([1, 4, 1, 4]) * [1, 0, 1, 0], 3)
    assert [(s.slot, s.sample.index, s.source) for s in slots.admit(3)] == [(0, 4, 1), (2, 5, 1)]


def test_a_late_sample_does_not_copy_a_cache_of_older_weights():
    slots = Slots(2, STEPS, MAX_LEN)
    slots.add(live_of(n=3))
    slots.admit(load=0)
    slots.accept(np.full((2, STEPS), STOP), np.zeros((2, STEPS)), np.array([1, 0]), 0)
    assert [s.source for s in slots.admit(load=1)] == [None]


def test_chunks_carry_tokens_versions_and_reasons():
    slots = Slots(3, STEPS, MAX_LEN)
    slots.add(live_of(n=3, max_new_tokens=6, first_index=5))
    slots.admit(0)
    tokens = np.array([[1, STOP, 0, 0], [1, 2, 3, 4], [1, 2, 3, 4]])
    logprobs = -np.arange(12, dtype=np.float32).reshape(3, 4)
    chunks = [c for _, c in slots.accept(tokens, logprobs, np.array([2, 4, 4]), 9)]
    assert [(c.index, c.tokens, c.versions, c.stop_reason) for c in chunks] == [
        (5, [1, STOP], [9, 9], "stop"),
        (6, [1, 2, 3, 4], [9] * 4, None),
        (7, [1, 2, 3, 4], [9] * 4, None),
    ]
    assert chunks[1].logprobs == [-4.0, -5.0, -6.0, -7.0]
    inputs = slots.inputs()
    assert inputs.numbers[1].tolist() == [4, 6, 2, 0, 0, 0]  # last token, cached, budget
    chunks = [c for _, c in slots.accept(tokens, logprobs, np.array([0, 2, 2]), 10)]
    assert [c.stop_reason for c in chunks] == ["length", "length"]
    assert slots.running == 0


def test_minimum_counts_down_and_prefix_counts():
    slots = Slots(1, STEPS, MAX_LEN)
    slots.add(live_of(prompt=[1] * 6, prefix_len=2, min_new_tokens=7, max_new_tokens=9))
    slots.admit(0)
    assert slots.inputs().numbers[0, [LENGTH, BUDGET, MINIMUM]].tolist() == [5, 7, 5]
    slots.accept(np.ones((1, 4), int), np.zeros((1, 4)), np.array([4]), 0)
    assert slots.inputs().numbers[0, [LENGTH, BUDGET, MINIMUM]].tolist() == [9, 3, 1]
    key = np.array([sample_key(0, 0)])
    np.testing.assert_array_equal(slots.inputs().uniforms, uniforms(key, np.array([6]), 4))


def test_room_in_the_context_bounds_the_budget():
    slots = Slots(1, STEPS, MAX_LEN)
    slots.add(live_of(prompt=[1] * 20, max_new_tokens=100))
    slots.admit(0)
    assert slots.inputs().numbers[0, BUDGET] == MAX_LEN - 20


def test_moving_into_fewer_slots_takes_everything_along():
    slots = Slots(8, STEPS, MAX_LEN)
    slots.add(live_of(n=8, temperature=0.5))
    slots.admit(0)
    slots.accept(np.full((8, STEPS), STOP), np.zeros((8, STEPS)), np.array([1, 0] * 4), 0)
    for slot, sample in enumerate(slots.samples):
        if sample:
            allowed = partial(np.array, [slot], np.uint8)
            sample.guide = SimpleNamespace(allowed=allowed)
    before = slots.inputs()
    assert before.numbers[:, BUDGET].tolist() == [0, 1] * 4  # with a guide, one token a call
    assert before.allowed[:, 0].tolist() == [255, 1, 255, 3, 255, 5, 255, 7]
    assert slots.moves(2) == []  # four samples do not fit
    assert slots.used == 8
    assert slots.moves(4) == [(5, 0), (7, 2)]
    after = slots.inputs()
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(new[[0, 1, 2, 3]], old[[5, 1, 7, 3]])
    assert slots.used == 4
    assert not after.numbers[4:, BUDGET].any()


def test_higher_priority_then_earlier_comes_first():
    slots = Slots(1, STEPS, MAX_LEN)
    lives = [live_of(priority=p) for p in (0, 1, 0, 1)]
    order = []
    for live in lives:
        slots.add(live)
    for _ in lives:
        (start,) = slots.admit(0)
        order.append(lives.index(start.sample.live))
        slots.accept(np.full((1, STEPS), STOP), np.zeros((1, STEPS)), np.array([1]), 0)
    assert order == [1, 3, 0, 2]


class Batching(RuleBasedStateMachine):
    """Random requests, endings, cancellations and moves."""

    def __init__(self):
        super().__init__()
        self.slots = Slots(6, STEPS, MAX_LEN)
        self.lives, self.lengths, self.ended, self.cancelled = [], {}, set(), set()

    @rule(n=st.integers(1, 9), length=st.integers(1, 23), priority=st.integers(-1, 1))
    def add(self, n, length, priority):
        live = live_of(n=n, prompt=[1] * length, priority=priority)
        self.lives.append(live)
        self.slots.add(live)

    @rule()
    def admit(self):
        for start in self.slots.admit(0):
            key = (id(start.sample.live), start.sample.index)
            assert key not in self.lengths
            self.lengths[key] = 0
            if start.source is not None:
                source = self.slots.samples[start.source]
                assert source is not None
                assert source.live is start.sample.live
        assert self.slots.running == 6 or not self.slots.queued

    @rule(data=st.data())
    def decode(self, data):
        budgets = np.minimum(self.slots.inputs().numbers[:, BUDGET], STEPS)
        counts = np.array([data.draw(st.integers(1, int(b))) if b else 0 for b in budgets])
        tokens = np.ones((6, STEPS), int)
        for slot, (count, budget) in enumerate(zip(counts, budgets, strict=True)):
            if 0 < count < budget:  # a call ends early only for a stop token
                tokens[slot, count - 1] = STOP
        running = {(id(s.live), s.index) for s in self.slots.samples if s}
        out = self.slots.accept(tokens, np.zeros((6, STEPS)), counts, 0)
        assert {(id(live), chunk.index) for live, chunk in out} == running
        for live, chunk in out:
            key = (id(live), chunk.index)
            assert key not in self.ended
            self.lengths[key] += len(chunk.tokens)
            if chunk.stop_reason:
                self.ended.add(key)
            limit = min(10, MAX_LEN - live.request.prompt_tokens.size)
            assert self.lengths[key] <= limit
            assert (self.lengths[key] == limit) <= bool(chunk.stop_reason)

    @precondition(lambda self: self.lives)
    @rule(data=st.data())
    def cancel(self, data):
        live = data.draw(st.sampled_from(self.lives))
        self.slots.cancel(live)
        self.cancelled.add(id(live))

    @rule(bucket=st.integers(1, 6))
    def move(self, bucket):
        running = self.slots.running
        for source, target in self.slots.moves(bucket):
            assert source >= bucket > target
        assert self.slots.running == running
        assert self.slots.used <= max(bucket, running) or running > bucket

    @invariant()
    def slots_agree_with_their_numbers(self):
        busy = self.slots.inputs().numbers[:, BUDGET] > 0
        assert busy.tolist() == [sample is not None for sample in self.slots.samples]
        assert not self.cancelled & {id(s.live) for s in self.slots.samples if s}

    def teardown(self):
        for _ in range(500):
            self.slots.admit(0)
            counts = np.minimum(self.slots.inputs().numbers[:, BUDGET], STEPS)
            for live, chunk in self.slots.accept(
                np.ones((6, STEPS), int), np.zeros((6, STEPS)), counts, 0
            ):
                if chunk.stop_reason:
                    self.ended.add((id(live), chunk.index))
        for live in self.lives:
            if id(live) not in self.cancelled:
                assert {(id(live), i) for i in range(live.request.n)} <= self.ended


TestBatching = Batching.TestCase
TestBatching.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


@pytest.mark.parametrize("steps", [1, 3, 8])
def test_draws_do_not_depend_on_the_size_of_a_call(steps):
    keys = np.array([sample_key(1, 0)])
    whole = uniforms(keys, np.array([0]), 24)
    parts = [uniforms(keys, np.array([at]), steps) for at in range(0, 24, steps)]
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole)
