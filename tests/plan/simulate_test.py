"""The simulated run: its seconds are arithmetic where that is easy, and its bounds are a run's."""

import dataclasses
import time

import numpy as np
import pytest

from rlx.doctor.gpu_cards import CARDS
from rlx.model.model_config import ModelConfig
from rlx.plan.simulate import Lengths, Setup, _thinned, simulate
from rlx.plan.speeds import Calibration, ServerSpeed, TrainerSpeed
from rlx.rollout.staleness import Limits

MODEL = ModelConfig("Qwen2ForCausalLM", 152064, 28, 3584, 18944, 28, 4, 128)
CARD = CARDS["h100"]
FREE = Calibration(sequence=0.0, update=0.0)


def make(eta=0, servers=2, prompts=8, n=4, lengths=(1000.0,), slots=64, training=0.0, **more):
    class Fixed(TrainerSpeed):
        def seconds(self, lengths):
            return training

        def publish_seconds(self, servers):
            return 0.0

    server = ServerSpeed(MODEL, CARD, 1, FREE)
    trainer = Fixed(MODEL, CARD, 8, FREE)
    found = Setup(
        Limits(prompts, eta, 1 << 30), n, servers, slots, server, trainer, Lengths(lengths), 100.0
    )
    return dataclasses.replace(found, **more)


def test_a_synchronous_step_is_generation_then_training():
    setup = make(training=7.0)
    decode = setup.server.decode_seconds(16, 16 * 600)  # 8 × 4 answers on two servers
    expected = 1000 * decode + 4 * setup.server.prefill_seconds(100) + 7.0
    expected += setup.server.load_seconds()
    found = simulate(setup)
    assert found.step_seconds == pytest.approx(expected, rel=1e-3)
    assert found.lags == {0: pytest.approx(1.0)}
    assert found.trainer_idle == pytest.approx(1 - 7 / expected, rel=1e-3)
    assert found.tokens == 8 * 4 * 1100
    generated = [end - begun for name, _, begun, end in found.spans if name == "server 0"]
    assert generated[2] == pytest.approx(expected - 7, rel=1e-3)


def test_the_latency_of_a_publish_delays_prompts_and_no_training():
    steps = [simulate(make(training=7.0, latency=seconds)).step_seconds for seconds in (0, 3)]
    assert steps[1] - steps[0] == pytest.approx(3, rel=1e-3)
    found = simulate(make(eta=2, training=500.0, latency=3.0))
    assert (found.step_seconds, found.publish_seconds) == (pytest.approx(500, rel=1e-6), 3.0)


def test_with_a_slow_trainer_a_step_is_its_training():
    found = simulate(make(eta=2, training=500.0))
    assert found.step_seconds == pytest.approx(500, rel=1e-6)
    assert found.trainer_idle == pytest.approx(0, abs=1e-6)
    assert found.servers_idle > 0.5
    assert max(found.lags) == 2


def test_more_slots_than_answers_change_nothing_and_fewer_make_turns():
    full, more, half = (simulate(make(slots=s)).step_seconds for s in (16, 64, 8))
    assert full == pytest.approx(more)
    assert half > 1.3 * full


@pytest.mark.parametrize("eta", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("training", [0.1, 20.0])
def test_no_group_is_older_than_the_bound(eta, training):
    spread = tuple(np.geomspace(50, 5000, 64))
    found = simulate(make(eta=eta, lengths=spread, training=training))
    assert sum(found.lags.values()) == pytest.approx(1)
    assert 0 <= min(found.lags) <= max(found.lags) <= eta
    assert 0 <= found.trainer_idle <= 1
    assert 0 <= found.servers_idle <= 1


def test_staleness_hides_the_tail():
    spread = tuple(np.geomspace(100, 10_000, 64))
    synchronous, asynchronous = (
        simulate(make(eta=e, lengths=spread, training=20.0)) for e in (0, 4)
    )
    assert asynchronous.step_seconds < 0.8 * synchronous.step_seconds


def test_a_cache_that_is_too_small_takes_sequences_off():
    small = make(lengths=(4000.0,), slots=1024)
    tight = dataclasses.replace(
        small.server, memory=(small.server.weights + 10_000 * small.server.kv_bytes) / CARD.memory
    )
    assert tight.kv_tokens == pytest.approx(10_000)
    found = simulate(dataclasses.replace(small, server=tight))
    assert found.preempted > 0
    assert found.running <= 10_000 / 100
    assert found.step_seconds > 2 * simulate(small).step_seconds


def test_the_same_seed_gives_the_same_prediction():
    setup = make(eta=2, lengths=tuple(np.geomspace(50, 5000, 64)), training=5.0)
    assert simulate(setup) == simulate(setup)
    assert simulate(setup) != simulate(dataclasses.replace(setup, seed=1))


def test_idle_experts_are_not_read_by_one_sequence_but_by_many():
    experts = ModelConfig("Qwen3MoeForCausalLM", 151936, 48, 2048, 6144, 32, 4, 128,
                          num_experts=128, experts_per_token=8, expert_dim=768)  # fmt: skip
    server = ServerSpeed(experts, CARD, 1, FREE)
    one, many = (server.decode_seconds(n, 0) - FREE.step for n in (1, 200))
    whole = server.weights / (CARD.bandwidth * FREE.bandwidth)
    assert one < 0.2 * whole
    assert many == pytest.approx(whole, rel=0.01)


@pytest.mark.slow
def test_ten_thousand_gpus_with_a_hundred_thousand_live_prompts_take_a_minute():
    begun = time.process_time()
    spread = tuple(np.geomspace(1000, 64_000, 256))  # a batch of 25,000 is live, and three more
    found = simulate(make(eta=3, servers=7_500, prompts=25_000, n=8, slots=1024, lengths=spread,
                          training=100.0), 2)  # fmt: skip
    assert max(found.lags) <= 3
    assert found.step_seconds > 100  # its training
    assert time.process_time() - begun < 180  # a third of it on an idle core


@pytest.mark.parametrize(
    ("eta", "prompts", "seconds", "idle"), [(3, 250, 522, 0.43), (7, 125, 234, 0.36)]
)
def test_a_hundredth_of_ten_thousand_gpus_has_the_seconds_of_the_docs(eta, prompts, seconds, idle):
    constants = Calibration()
    found = simulate(Setup(
        Limits(prompts, eta, 1 << 30), 8, 75, 1024, ServerSpeed(MODEL, CARD, 1, constants),
        TrainerSpeed(MODEL, CARD, 25, constants), Lengths(tuple(np.geomspace(1000, 64_000, 256))),
        100.0,
    ), 40)  # fmt: skip
    assert found.step_seconds == pytest.approx(seconds, rel=0.03)
    assert found.trainer_idle == pytest.approx(idle, abs=0.02)


def test_turns_prefill_what_they_add_and_everything_after_an_update():
    """Two turns of a synchronous step: the cache of the first one serves the second one."""
    setup = make(training=7.0, turns=2, observed=300.0, tool_seconds=20.0)
    first, second = (setup.server.decode_seconds(16, 16 * n) for n in (100 + 250, 900 + 250))
    expected = 500 * (first + second) + 7.0 + 20.0 + setup.server.load_seconds()
    expected += setup.server.prefill_seconds(4 * 100 + 16 * 300)
    found = simulate(setup)
    assert found.step_seconds == pytest.approx(expected, rel=1e-3)
    assert found.tokens == 8 * 4 * 1400
    busy = expected - 7 - 20 - setup.server.load_seconds()
    assert found.servers_idle == pytest.approx(1 - busy / expected, rel=5e-2)
    frequent = make(eta=8, turns=8, observed=300.0, tool_seconds=400.0, training=5.0)

    class Forgets(ServerSpeed):
        def prefill_seconds(self, tokens):
            computed.append(tokens)
            return super().prefill_seconds(tokens)

    computed = []
    server = Forgets(MODEL, CARD, 1, FREE)
    simulate(dataclasses.replace(frequent, server=server))
    assert 300.0 in computed, "of the same version"
    assert 100.0 + 125.0 + 300.0 in computed, "after an update"


def test_tools_leave_a_servers_slots_to_others():
    few = {"eta": 4, "slots": 8, "tool_seconds": 60.0}
    whole, turns = (simulate(make(**few, turns=n), 40).step_seconds for n in (1, 4))
    assert turns == pytest.approx(whole, rel=0.1), "the slots decide, and tools do not hold them"


def test_a_share_of_many_turns_is_as_fast_as_the_whole(monkeypatch):
    setup = make(eta=2, servers=8, prompts=64, lengths=tuple(np.geomspace(100, 4000, 64)), turns=3,
                 observed=100.0, tool_seconds=5.0, training=3.0)  # fmt: skip
    whole = simulate(setup, 20)
    monkeypatch.setattr("rlx.plan.simulate._TURNS", 100)
    share = simulate(setup, 20)
    assert share.step_seconds == pytest.approx(whole.step_seconds, rel=0.1)
    assert share.tokens == pytest.approx(whole.tokens, rel=0.1)
    assert _thinned(setup).servers < setup.servers
