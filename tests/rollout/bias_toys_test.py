"""The toys of experiments/2026-12-bias: the cause makes each bias, and rlx's rules have none."""

import importlib.util
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "experiments/2026-12-bias/toys.py"
LONG = "share of long answers in training"


@pytest.fixture(scope="module")
def toys():
    spec = importlib.util.spec_from_file_location("toys", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_admission_trains_on_as_many_long_answers_as_there_are_prompts_for_them(toys):
    with_it, without = (toys.discard(side(), 0) for side in (toys.Discarding, toys.Admitting))
    assert with_it[LONG] < 0.15
    assert without[LONG] == pytest.approx(0.5, abs=0.02)
    assert without["answers dropped"] == 0


def test_failed_answers_that_leave_their_group_raise_its_reward(toys):
    reward = "reported reward (0.4 is right)"
    assert toys.survivors(0.0, 0, groups=4000)[reward] == pytest.approx(0.4, abs=0.01)
    assert toys.survivors(0.6, 0, groups=4000)[reward] > 0.6


def test_weights_over_the_drawn_tokens_have_mean_one(toys):
    name = "its deviation between tokens"
    assert toys.truncated(True, 0)[name] < 1e-12
    assert toys.truncated(False, 0)[name] > 0.01
