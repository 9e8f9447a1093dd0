"""The planner counts tokens that samples share as the trainer's trees do, and weights by relays."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from rlx.base import Group, Trajectory
from rlx.config import default
from rlx.doctor.gpu_cards import CARDS, CPU
from rlx.model import params
from rlx.model.model_config import ModelConfig
from rlx.plan import speeds
from rlx.plan.speeds import Calibration, TrainerSpeed
from rlx.run.plan_run import PlanRequest, turns_of
from rlx.train import packing, prefix_trees

SMALL = ModelConfig("Qwen2ForCausalLM", 276, 4, 128, 384, 4, 2, 32)


def batch(prompt, answers, groups, seed=0):
    """Groups whose answers differ from their first token on."""
    rng, found = np.random.default_rng(seed), []
    for g in range(groups):
        begin = [g, *rng.integers(0, 276, prompt - 1)]
        own = []
        for i, size in enumerate(answers):
            tokens = np.array([*begin, i, *rng.integers(0, 276, size - 1)], np.int32)
            zeros = np.zeros(len(tokens), np.float32)
            trained = np.arange(len(tokens)) >= prompt
            versions = np.where(trained, 0, -1).astype(np.int32)
            own.append(Trajectory(tokens, trained, zeros, versions, 0.0, "stop", f"{g}.{i}"))
        found.append(Group(g, tuple(own)))
    return found


@pytest.mark.parametrize(
    ("prompt", "answers"), [(60, (40, 20, 30, 70)), (200, (10, 20, 10, 15)), (10, (90, 80, 70, 60))]
)
def test_shared_tokens_are_those_of_the_trainers_trees(prompt, answers):
    groups = batch(prompt, answers, 3)
    flat = packing.flatten(groups)
    ids, budget = np.arange(len(flat.sizes)), 4096
    cost = params.attention_cost(SMALL, "cpu")
    plain = packing.plan(flat.sizes, budget, (512,), attention_cost=cost)
    trees = prefix_trees.plan(flat, ids, budget, (512,), attention_cost=cost, tree_cost=0.0)
    speed = TrainerSpeed(
        SMALL, CPU, 1, Calibration(), samples=len(answers), shared_tokens=float(prompt)
    )  # fmt: skip
    work = speed._work(flat.sizes.astype(float))
    if prompt == 10:
        assert work == 1.0, "auto does not take trees"
        return
    assert trees.cost(cost) < prefix_trees.GAIN * plain.cost(cost)
    tokens = trees.sizes.sum() / flat.sizes.sum()
    assert work == pytest.approx(tokens, rel=0.4), "and attention over the tree"


def test_weights_pass_through_servers_in_about_the_time_of_one():
    speed = TrainerSpeed(SMALL, CARDS["h100"], 8, Calibration())
    one, hop = speed.publish_seconds(1), speeds._HOP_BYTES / CARDS["h100"].network
    assert one == pytest.approx(params.count(SMALL) * 2 / CARDS["h100"].network)
    assert speed.publish_seconds(8) == pytest.approx(one + 7 * hop), "a chain"
    tree = dataclasses.replace(speed, fanout=2).publish_seconds
    assert (tree(2), tree(6)) == pytest.approx((2 * one, 2 * one + hop)), "2 and 4 servers below"
    assert tree(7) == pytest.approx(2 * one + 2 * hop)
    alone = dataclasses.replace(speed, fanout=0).publish_seconds
    assert (alone(0), alone(8)) == pytest.approx((one, 8 * one))


def test_an_update_costs_its_products_and_all_weights():
    """An H20 has a seventh of an H100's FLOP/s at more bandwidth, so it is nearer to its peak."""
    lengths, shares = np.full(64, 1000.0), []
    for name in ("h100", "h20"):
        c, card = Calibration(update=0.5), CARDS[name]
        speed = TrainerSpeed(SMALL, card, 8, c, updates=4)
        fixed = 4 * (0.5 + c.weights * params.count(SMALL) / 1e9 * 5 / 4)
        products = 5 * params.forward_flops(SMALL, lengths) / (8 * card.flops)
        shares.append(products / (speed.seconds(lengths) - fixed))
    assert shares[0] == pytest.approx(Calibration().mfu)
    assert shares[0] + 0.2 < shares[1] < Calibration().products


def test_sharing_makes_a_batch_as_fast_as_its_tokens_are_few():
    c = dataclasses.replace(Calibration(), weights=0.0, update=0.0)
    plain = TrainerSpeed(SMALL, CPU, 1, c, samples=8)
    lengths = np.full(64, 110.0)
    apart = plain.seconds(lengths)
    shared, most = (
        dataclasses.replace(plain, shared_tokens=n).seconds(lengths) for n in (100.0, 500.0)
    )
    # 100 + 8 · 10 tokens in place of 8 · 110, and attention over 180 in place of 110.
    assert 180 / 880 < shared / apart < 1.2 * 180 / 880
    assert most == pytest.approx(apart / 8)


@pytest.mark.parametrize(
    ("card", "changed", "shared"),
    [
        (CPU, {}, 30.0),
        (CARDS["h100"], {}, 30.0),
        (CPU, {"train.share_prefixes": "off"}, 0.0),
        (CPU, {"train.mesh": "context:2"}, 0.0),
    ],
)
def test_prompts_are_shared_where_the_trainer_has_trees(card, changed, shared):
    config = default()
    config.model.path, config.data.max_prompt_tokens = "rlx:arithmetic", 60
    config.sampling.max_new_tokens = 128
    asked = PlanRequest(config, SimpleNamespace(), card, 2, None)
    assert asked.workload(changed).shared_tokens == shared


def test_a_run_has_measured_what_it_shares():
    config = default()
    config.model.path, config.data.max_prompt_tokens = "rlx:arithmetic", 60
    config.sampling.max_new_tokens, config.sampling.n_samples = 128, 8
    records = {n: {"n_shared_tokens": 128 * 35, "n_seqs": 128} for n in range(4)}
    run = SimpleNamespace(metrics=records, batches=SimpleNamespace(groups={}))
    asked = PlanRequest(config, SimpleNamespace(), CPU, 2, run)
    assert asked.workload({}).shared_tokens == pytest.approx(40.0), "seven of eight share 40"


def test_steps_after_the_last_admission_are_not_measured():
    """The servers of a run of eight steps work for the first four, with max_staleness 4."""
    config, records = default(), {}
    config.rollout.max_staleness = 4
    for step in range(1, 9):
        phases = {"train": 9.0, "wait": 1.0}
        busy = {"server_busy_seconds": 8.0 * (step <= 4)}
        records[step] = {"step": step, "step_seconds": 10.0, "seconds": phases, **busy}
    for total, expected in ((8, 8.0), (100, 0.0)):  # the second one still runs
        config.total_steps = total
        request = PlanRequest(config, SimpleNamespace(), CPU, 2, SimpleNamespace(metrics=records))
        assert request.measured["generate"] == pytest.approx(expected, abs=0.5), total


def test_steps_that_compile_are_not_measured():
    """A batch with a new shape stops a trainer for seconds, at any step."""
    config, records = default(), {}
    config.total_steps = 100
    for step in range(1, 21):
        seconds = 6.0 if step == 17 else 0.25 + 0.5 * (step % 2)
        records[step] = {"step": step, "step_seconds": seconds, "seconds": {"wait": 0.25}}
    request = PlanRequest(config, SimpleNamespace(), CPU, 2, SimpleNamespace(metrics=records))
    assert request.measured["step"] == pytest.approx(0.5, abs=0.05)


def test_steps_that_wait_are_measured():
    """Batches come in waves where servers are slow: one step waits, the next two do not."""
    config, records = default(), {}
    config.total_steps = 100
    for step in range(1, 32):
        wait = 17.0 * (step % 3 == 0)
        records[step] = {"step": step, "step_seconds": 1.0 + wait, "seconds": {"wait": wait}}
    request = PlanRequest(config, SimpleNamespace(), CPU, 2, SimpleNamespace(metrics=records))
    assert request.measured["step"] == pytest.approx(1 + 17 / 3, abs=0.5)


def test_turns_are_read_from_the_masks_of_sampled_tokens():
    one, three, none = (
        np.array(list(map(int, mask)), bool) for mask in ("0011", "0110001101", "00")
    )
    prompts, answers, turns, observed = turns_of([one, three, none])
    assert (prompts, answers) == ([2.0, 1.0, 2.0], [2.0, 5.0, 0.0])
    assert turns == 1 + 2 / 3
    assert observed == (3 + 1) / 2
