"""The number of live prompts by waiting times: its bounds, its rest, and what it costs."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx.doctor.gpu_cards import CARDS
from rlx.model.model_config import ModelConfig
from rlx.plan import simulate
from rlx.plan.simulate import Lengths, Setup
from rlx.plan.speeds import Calibration, ServerSpeed, TrainerSpeed
from rlx.rollout import concurrency
from rlx.rollout.concurrency import Observation, follow, tunable_limits
from rlx.rollout.staleness import Limits

MODEL = ModelConfig("Qwen2ForCausalLM", 152064, 28, 3584, 18944, 28, 4, 128)
CARD = CARDS["h100"]

seen = st.builds(
    Observation, st.floats(0, 1), st.integers(-1, 5000) | st.just(0), st.integers(0, 500)
)
auto = st.builds(
    lambda batch, eta, samples: tunable_limits(Limits(batch, eta, 0), samples),
    st.integers(1, 64), st.integers(0, 8), st.integers(1, 16),
)  # fmt: skip


@given(auto, st.lists(seen, max_size=60))
def test_whatever_is_seen_it_stays_within_the_bound_of_staleness(limits, observations):
    most = (limits.max_staleness + 1) * limits.batch_prompts
    assert limits.concurrency == most, "it begins at what is admitted"
    for observation in observations:
        before, limits = limits, follow(limits, observation)
        assert 1 <= limits.concurrency <= most
        assert dataclasses.replace(limits, concurrency=0) == dataclasses.replace(
            before, concurrency=0
        )


@given(seen)
def test_a_fixed_number_and_an_unknown_queue_change_nothing(observation):
    fixed = Limits(8, 2, 5)
    assert follow(fixed, observation) == fixed == concurrency.resumed_limits(fixed, 5)
    limits = dataclasses.replace(tunable_limits(Limits(8, 2, 0), 4), concurrency=7)
    assert follow(limits, dataclasses.replace(observation, queued=-1)) == limits


def test_it_lowers_once_until_the_change_has_taken_effect():
    limits = tunable_limits(Limits(16, 3, 0), 8)  # 64
    lower = follow(limits, Observation(0.5, 400, 64))
    assert lower.concurrency == 56
    assert follow(lower, Observation(0.5, 340, 60)) == lower, "60 still run: none was admitted"
    assert follow(lower, Observation(0.5, 340, 56)).concurrency == 49


def test_a_trainer_that_never_waits_raises_nothing():
    limits = dataclasses.replace(tunable_limits(Limits(16, 3, 0), 8), concurrency=20)
    assert follow(limits, Observation(0.01, 0, 20)) == limits
    assert follow(limits, Observation(0.03, 0, 20)).concurrency == 22
    assert follow(limits, Observation(0.03, 1, 20)) == limits, "servers have no free slot"


@given(auto, st.integers(1, 10**4), st.data())
def test_it_comes_to_rest_where_slots_are_full_and_little_waits(limits, slots, data):
    """In a plant with a fixed number of slots, from any start, without a cycle."""
    most = limits.concurrency
    limits = concurrency.resumed_limits(limits, data.draw(st.integers(1, most)))
    for _ in range(400):
        queue = max(0, limits.samples * limits.concurrency - slots)
        before, limits = limits, follow(limits, Observation(1.0, queue, limits.concurrency))
        if before == limits:
            break
    assert before == limits, "it still moves"
    own, samples = limits.concurrency, limits.samples
    assert own * samples > slots or own == most, "slots stay empty, and the trainer waits"
    assert own * samples - slots <= samples * max(1, own // 4)


@given(auto, st.lists(seen, max_size=40), st.integers(0, 40))
def test_it_continues_from_a_saved_number(limits, observations, cut):
    whole = part = limits
    for observation in observations:
        whole = follow(whole, observation)
    for observation in observations[:cut]:
        part = follow(part, observation)
    part = concurrency.resumed_limits(limits, part.concurrency)
    for observation in observations[cut:]:
        part = follow(part, observation)
    assert part == whole


def test_a_lower_max_staleness_bounds_a_saved_number():
    assert concurrency.resumed_limits(tunable_limits(Limits(4, 1, 0), 2), 100).concurrency == 8


# In the planner's simulation: the run's own admission and buffer, servers and a trainer.


class Fixed(TrainerSpeed):
    """A trainer that takes `updates` seconds for a batch."""

    def seconds(self, lengths):
        return float(self.updates)

    def publish_seconds(self, servers):
        return 0.0


def plant(eta, training, servers=2, slots=32, kv=0, prompts=8, n=8, longest=4000):
    """A run of long and uneven answers; `kv`: tokens that a server's cache holds, 0: many."""
    server = ServerSpeed(MODEL, CARD, 1, Calibration())
    if kv:
        share = (server.weights + kv * server.kv_bytes) / CARD.memory
        server = dataclasses.replace(server, memory=share)
    lengths = Lengths(tuple(np.geomspace(50, longest, 128)))
    trainer = Fixed(MODEL, CARD, 1, Calibration(), updates=training)
    limits = tunable_limits(Limits(prompts, eta, 0), n)
    return Setup(limits, n, servers, slots, server, trainer, lengths, 100.0)


def steps(setup, warm=16, count=16):
    """(seconds a step after warm-up, the run)."""
    run = simulate._Run(setup)
    run.run(warm)
    begun = run.now
    run.run(warm + count)
    return (run.now - begun) / count, run


def fixed(setup, number):
    return dataclasses.replace(
        setup, limits=dataclasses.replace(setup.limits, concurrency=number, samples=0)
    )


@settings(max_examples=25, deadline=None)
@given(
    st.integers(0, 4), st.integers(1, 60), st.integers(1, 3), st.integers(1, 64), st.integers(1, 6)
)
def test_no_run_exceeds_its_staleness_and_none_stands_still(eta, training, servers, slots, n):
    setup = plant(eta, training, servers, slots, prompts=4, n=n, longest=400)
    limits = setup.limits
    seconds, run = steps(setup, 4, 6)  # admitting too many raises StalenessViolation
    assert math.isfinite(seconds)
    assert len(run.batches) == 10
    for step, (_, _, groups) in enumerate(run.batches):
        assert all(step - group.oldest_version <= eta for group in groups)
    assert 1 <= run.limits.concurrency <= limits.concurrency
    again = steps(setup, 4, 6)
    assert (again[0], again[1].limits) == (seconds, run.limits), "the same run, the same numbers"


@pytest.mark.parametrize(
    ("eta", "training", "kv"),
    [(0, 10, 0), (1, 10, 0), (4, 10, 0), (4, 300, 0), (4, 1, 30_000), (8, 1, 12_000)],
)
def test_it_is_as_fast_as_the_best_fixed_number(eta, training, kv):
    setup = plant(eta, training, kv=kv)
    most = setup.limits.concurrency
    numbers = sorted({n for n in (1, 2, 4, 6, 8, 12, 16, 24, 40) if n <= most} | {most})
    best = min(steps(fixed(setup, number))[0] for number in numbers)
    worst = steps(fixed(setup, 1))[0]
    own, run = steps(setup)
    assert best / own >= 0.97, (best, own, run.limits)
    if training < 300:
        assert worst > 1.5 * own, "a plant in which the number does not matter shows nothing"


def test_a_standing_queue_is_cut_and_costs_no_time():
    """Few slots for many prompts: most of what is admitted only waits."""
    setup = plant(8, 1, slots=8)
    most = setup.limits.concurrency
    all_live, _ = steps(fixed(setup, most), 40)
    own, run = steps(setup, 40)
    assert own == pytest.approx(all_live, rel=0.03)
    assert run.limits.concurrency <= most // 3


def test_a_run_resumed_with_too_few_finds_the_speed_again():
    setup = plant(4, 10)
    few = dataclasses.replace(setup, limits=concurrency.resumed_limits(setup.limits, 1))
    assert steps(few, 40)[0] == pytest.approx(steps(setup, 40)[0], rel=0.03)
    assert steps(few, 40)[1].limits.concurrency > 8
