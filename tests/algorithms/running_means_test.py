"""Running means: of each agent by itself, in the order of the groups, as the paper has them."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlx.algorithms.advantages import advantages, running_baselines
from rlx.algorithms.presets import PRESETS
from rlx.base import Group, Trajectory
from rlx.train import packing


def row(reward, agent="", name="0.0", **fields):
    one = np.array([False, True])
    return Trajectory(
        np.zeros(2, np.int32), one, -one.astype(np.float32), np.where(one, 0, -1).astype(np.int32),
        reward, "stop", name, agent=agent, **fields,
    )  # fmt: skip


plays = st.lists(st.tuples(st.sampled_from("ab"), st.integers(-8, 8)), max_size=30)


@given(plays, st.sampled_from([0.0, 0.5, 0.95]), st.integers(1, 5))
def test_batches_are_one_sequence_of_each_agents_rewards(played, decay, size):
    groups = [Group(i, (row(r / 4, a, f"{i}.0"),)) for i, (a, r) in enumerate(played)]
    means, taken = {}, []
    for start in range(0, len(groups), size):
        means, batch = running_baselines(means, groups[start : start + size], decay)
        taken += [t.baseline for g in batch for t in g.trajectories]
    for agent in "ab":
        rewards = [r / 4 for a, r in played if a == agent]
        own = [b for (a, _), b in zip(played, taken, strict=True) if a == agent]
        wanted = [
            sum((1 - decay) * decay ** (n - i) * r for i, r in enumerate(rewards[: n + 1]))
            for n in range(len(rewards))
        ]
        assert own == pytest.approx(wanted, abs=1e-12)
        assert means.get(agent, 0.0) == pytest.approx(wanted[-1] if wanted else 0.0, abs=1e-12)


def test_rows_of_one_run_count_once_and_lose_the_same():
    rows = (row(1.0, name="0.0"), row(3.0, name="0.0.1"), row(4.0, name="0.1"))
    means, (group,) = running_baselines({"": 2.0}, [Group(0, rows)], 0.5)
    assert [t.baseline for t in group.trajectories] == [2.0, 2.0, 3.0]
    assert means == {"": 3.0}
    assert [t.reward for t in group.trajectories] == [1.0, 3.0, 4.0]


def test_a_baseline_is_taken_off_the_trained_rewards_and_not_off_the_reported_one():
    one = row(1.0, baseline=0.25)
    two = dataclasses.replace(
        row(0.0, name="0.1", baseline=0.5), turn_ids=np.zeros(2, np.int32), turn_rewards=(2.0,)
    )
    flat = packing.flatten([Group(0, (one, two))])
    assert flat.sequences["rewards"][:2].tolist() == [1.0, 2.0]
    assert flat.sequences["baselines"][:2].tolist() == [0.25, 0.5]
    out = advantages({k: jnp.asarray(v) for k, v in flat.arrays().items()}, PRESETS["rae"])
    first = [flat.starts[0] + 1, flat.starts[1] + 1]
    np.testing.assert_allclose(out["advantages"][np.array(first)], [0.75, 1.5])
    np.testing.assert_allclose(out["shaped_rewards"][:2], [1.0, 2.0])
