"""Fixtures for workflows."""

import pytest

from rlx.rewards.reward_pool import RewardPool


@pytest.fixture(scope="module")
def pool():
    found = RewardPool("gsm8k", timeout=20.0)
    found.start()
    yield found
    found.close()
