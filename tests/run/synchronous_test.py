"""max_staleness=0 is synchronous training: bit for bit the plain loop, through real servers.

Were the bound off by one, a group would be sampled by older weights and the parameters differ;
the last test shows that they do for max_staleness=1.
"""

import asyncio
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from rlx import config as config_lib
from rlx.fleet.client import Fleet
from rlx.fleet.requests import Sampling
from rlx.launch.local import LocalServers
from rlx.model import hf
from rlx.rewards.reward_pool import RewardPool
from rlx.rollout.data import Cursor
from rlx.rollout.executor import Executor, group_seed
from rlx.rollout.staleness import Limits
from rlx.rollout.workflows import RLVR, Prompts, Task
from rlx.train.train_options import TrainOptions
from rlx.train.update import JaxUpdate

STEPS, PROMPTS, SAMPLES, SEED = 3, 3, 4, 11
ROWS = [{"question": f"{i} + {2 * i} =", "answer": str(3 * i)} for i in range(8)]
SECONDS = 120.0


@pytest.fixture(scope="module")
def config():
    c = config_lib.default()
    c.total_steps = STEPS
    c.sampling.max_new_tokens = 12
    c.optimizer.learning_rate = 1e-2
    c.train.max_tokens_per_microbatch = 512
    c.train.row_buckets = (64,)
    return c


@pytest.fixture(scope="module")
def servers(tiny_model_dir, tmp_path_factory):
    """Two servers; each loop begins by giving those it uses the first weights again."""
    workdir = tmp_path_factory.mktemp("servers")
    options = {"slots": 8, "max_model_len": 64, "decode_steps": 4}
    with LocalServers(tiny_model_dir, workdir=workdir, num_servers=2, **options) as servers:
        servers.wait()
        yield servers


@pytest.fixture(scope="module")
def trainer(tiny_model_dir, config):
    """(model config, weights, update)"""
    model_config, weights = hf.load(tiny_model_dir, "float32")
    return model_config, weights, JaxUpdate(model_config, TrainOptions.of(config))


@pytest.fixture(scope="module")
def workflow(tiny_model_dir, config):
    from transformers import AutoTokenizer

    folder = str(Path(__file__).parents[1] / "rewards")
    sys.path.insert(0, folder)  # the workers find reward_functions.py there
    pool = RewardPool("reward_functions:digits", timeout=60.0)
    pool.start()
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    yield RLVR(Prompts(tokenizer), Sampling(max_new_tokens=12), pool, SAMPLES)
    pool.close()
    sys.path.remove(folder)


def plain_loop(servers, trainer, workflow):
    """Generate a batch, group after group, on one server; update; load the weights; repeat."""
    model_config, weights, update = trainer
    state = update.init(weights)

    async def main(state):
        fleet = Fleet(servers.wait()[:1], token=servers.token, publish_dir=servers.directory)
        await fleet.connect()
        await fleet.publish(0, hf.to_hf(weights, model_config, "float32"))
        cursor, rewards = Cursor(ROWS, SEED), []
        for step in range(STEPS):
            groups = []
            for group_id, row in [cursor.next() for _ in range(PROMPTS)]:
                seed = group_seed(SEED, group_id, 0)
                groups.append(await workflow.run(fleet, Task(row, group_id, seed)))
            rewards.append([t.reward for g in groups for t in g.trajectories])
            state, _ = update.update(state, groups)
            await fleet.publish(step + 1, hf.to_hf(state.params, model_config, "float32"))
        await fleet.close()
        return state, rewards

    return asyncio.run(main(state))


def asynchronous_loop(servers, trainer, workflow, max_staleness):
    """The same steps through the executor."""
    model_config, weights, update = trainer
    state, rewards = update.init(weights), []
    fleet = servers.fleet()
    executor = Executor(
        workflow, Cursor(ROWS, SEED), Limits(PROMPTS, max_staleness, 64), fleet, seed=SEED
    )
    executor.start()
    try:
        executor.loop.run(fleet.connect())
        executor.loop.run(fleet.publish(0, hf.to_hf(weights, model_config, "float32")))
        executor.set_version(0)
        for step in range(STEPS):
            groups = executor.collect(timeout=SECONDS)
            assert groups is not None
            assert max(step - g.oldest_version for g in groups) <= max_staleness
            rewards.append([t.reward for g in groups for t in g.trajectories])
            state, _ = update.update(state, groups)
            tensors = hf.to_hf(state.params, model_config, "float32")
            executor.loop.run(fleet.publish(step + 1, tensors))
            executor.set_version(step + 1)
        executor.loop.run(fleet.close())
        return state, rewards
    finally:
        executor.close()


def leaves(state):
    return {jax.tree_util.keystr(k): np.asarray(v) for k, v in jax.tree.leaves_with_path(state)}


@pytest.fixture(scope="module")
def plain(servers, trainer, workflow):
    return plain_loop(servers, trainer, workflow)


def test_zero_staleness_equals_the_plain_loop_bit_for_bit(servers, trainer, workflow, plain):
    state, rewards = asynchronous_loop(servers, trainer, workflow, max_staleness=0)
    expected_state, expected_rewards = plain
    assert rewards == expected_rewards
    assert len({r for batch in rewards for r in batch}) > 2  # there was something to learn
    found, expected = leaves(state), leaves(expected_state)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name, strict=True)
    changed = jax.tree.map(np.array_equal, state.params, trainer[1])
    assert not any(jax.tree.leaves(changed))


def test_one_version_of_staleness_does_not(servers, trainer, workflow, plain):
    state, _ = asynchronous_loop(servers, trainer, workflow, max_staleness=1)
    same = jax.tree.map(np.array_equal, state.params, plain[0].params)
    assert not all(jax.tree.leaves(same))
