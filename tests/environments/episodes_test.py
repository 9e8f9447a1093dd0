"""Addresses of environments: a number that cannot be is one line before the run begins."""

import pytest

from rlx.base import UserError
from rlx.environments import episodes
from rlx.rollout import data

DEFAULTS = {"size": 0, "seed": 0, "turns": 10}


@pytest.mark.parametrize(("key", "value"), [("turns", "abc"), ("size", "-1"), ("turns", "1.5")])
def test_numbers_of_an_address_are_numbers(key, value):
    with pytest.raises(UserError, match=f"a:game.* has {key}=.*; give a number from 0"):
        episodes.address("a:", f"game?{key}={value}", DEFAULTS)
    assert episodes.address("a:", "game?turns=3", DEFAULTS) == ("game", {**DEFAULTS, "turns": 3})


@pytest.mark.parametrize("size", ["-1", "0", "abc", "2.5"])
def test_rows_of_tasks_have_an_end(size):
    """Without one a run would read rows for hours."""
    with pytest.raises(UserError, match=f"has size='?{size}'?; give a number of rows, from 1"):
        data.load(f"reasoning_gym:chain_sum?size={size}")
