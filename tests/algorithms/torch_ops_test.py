"""Every algorithm in torch and in JAX on the same packed batch: equal numbers and gradients."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import torch

from experiments.bench import algorithms_workers as workers
from rlx.algorithms import advantages, kl, losses, presets, supervised
from rlx.algorithms.algorithm import CHOICES, REDUCTIONS
from rlx.base import Group, Trajectory, UserError

BOUND = 1e-5
GRPO = workers.resolved("grpo")


def _variants():
    """What the presets leave out, each on top of GRPO."""
    yield from ({"proximal": how} for how in ("behaviour", "loglinear"))
    yield from ({"peers": peers, "advantage_mean": "group"} for peers in ("agent", "turn"))
    yield from ({"reduction": how} for how in REDUCTIONS)
    for action in ("mask", "truncate"):
        for aggregate in ("mean", "sum", "max"):
            yield {
                "weight_level": "sequence", "weight_action": action, "weight_upper": 1.1,
                "weight_aggregate": aggregate,
            }  # fmt: skip
    for statistic in ("k1", "k2", "k3"):
        yield {"weight_statistic": statistic, "weight_upper": 0.01}
    yield {"weight_action": "truncate", "weight_upper": 1.01, "weight_lower": 0.98}
    yield {"dual_clip": 1.05, "clip_high": 0.01}
    yield {"overlong_buffer": 12.0, "overlong_limit": 24, "reward_scale": 2.0, "reward_bias": -0.5}
    for estimator in ("k1", "k2", "k3"):
        for where in ("reward", "loss"):
            yield {"kl_placement": where, "kl_estimator": estimator, "kl_coefficient": 0.1}
    yield {"entropy_coefficient": 0.1}
    yield {"ratio_level": "sequence_token", "clip_low": 0.01, "clip_high": 0.01}
    yield {"loss": "dppo", "divergence": "kl", "clip_low": 0.001, "clip_high": 0.001}
    yield {"ratio_level": "sequence", "clip_low": 0.01, "clip_high": 0.01}
    yield {"critic": True, "gamma": 0.99, "lam": 0.9, "bootstrap_truncated": False}
    yield {"reward_mean": "batch", "reward_std": "batch", "leave_one_out": True}


VARIANTS = {
    ",".join(f"{k}={v}" for k, v in fields.items()): dataclasses.replace(GRPO, **fields)
    for fields in _variants()
}
ROWS = {name: workers.resolved(name) for name in presets.PRESETS} | VARIANTS


def make_groups(seed: int, pairs: bool) -> list[Group]:
    """Ragged groups: partial ones, observation tokens, several turns and agents, empty masks."""
    rng = np.random.default_rng(seed)
    groups = []
    for group in range(9):
        count = 2 if pairs else int(rng.integers(1, 6))
        members = []
        for sample in range(count):
            size = int(rng.integers(3, 33))
            mask = rng.random(size) < 0.7
            if rng.random() < 0.1:
                mask[:] = False
            mask[0] = False
            members.append(
                Trajectory(
                    tokens=np.zeros(size, np.int32),
                    loss_mask=mask,
                    behaviour_logprobs=(-rng.exponential(1.0, size) * mask).astype(np.float32),
                    versions=np.where(mask, rng.integers(3, 8, size), -1).astype(np.int32),
                    reward=float(rng.normal()),
                    stop_reason="length" if rng.random() < 0.3 else "stop",
                    trajectory_id=f"{group}.{sample}",
                    turn_ids=np.sort(rng.integers(0, 3, size)).astype(np.int32),
                    agent=str(rng.integers(2)),
                )
            )
        groups.append(Group(group, tuple(members)))
    return groups


@functools.cache
def make_inputs(algorithm, seed=0):
    groups = make_groups(seed, algorithm.data == "pairs")
    return workers.make_inputs(groups, 96, algorithm, seed)


def close(got, want, name, least=1e-3):
    """Within BOUND of the largest entry: sums and differences of float32 in another order.

    What is a sum of terms of either sign gives the size of its terms as `least`.
    """
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape
    apart = np.abs(got - want).max(initial=0.0)
    assert apart <= BOUND * max(np.abs(want).max(initial=0.0), least), f"{name}: {apart:.1e} apart"


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", [n for n, row in ROWS.items() if row.data == "rollouts"])
def test_advantages_are_those_of_jax(name):
    flat, _ = make_inputs(ROWS[name])
    want = advantages.advantages(jax.tree.map(jax.numpy.asarray, flat), ROWS[name])
    got = advantages.advantages(workers.torch_inputs(flat), ROWS[name])
    assert set(got) == set(want)
    for key in want:
        close(got[key], want[key], key)


@pytest.mark.parametrize("name", ROWS)
def test_loss_stats_and_gradient_are_those_of_jax(name):
    algorithm = ROWS[name]
    flat, rows = make_inputs(algorithm, seed=1)
    want = workers.jax_gradient(algorithm)(*jax.device_put((flat, rows)))
    got = workers.torch_gradient(algorithm)(workers.torch_inputs(flat), workers.torch_inputs(rows))
    close(got[0], want[0], "loss", least=0.01)
    assert set(got[1]) == set(want[1])
    tokens = float(want[1]["n_valid_tokens"])
    for key in want[1]:
        close(got[1][key], want[1][key], key, least=0.01 * tokens)
    close(got[2], want[2], "gradient")
    assert np.abs(want[2]).max() > 0


@pytest.mark.parametrize(
    "name", ["ppo", "grpo", "gspo", "reinforce_pp", "m2po", "m2po_areal", "ipo"]
)
def test_an_algorithm_is_one_graph_for_torch_compile(name):
    """Traced as for inductor, which raises at a graph break; without a compiler's minutes."""
    algorithm = workers.resolved(name)
    flat, rows = (workers.torch_inputs(x) for x in make_inputs(algorithm, seed=2))
    got = workers.torch_gradient(algorithm, "eager")(flat, rows)
    want = workers.torch_gradient(algorithm)(flat, rows)
    for one, two in ((got[0], want[0]), (got[2], want[2])):
        torch.testing.assert_close(one, two, rtol=BOUND, atol=1e-7)


def test_the_entropy_bonus_has_the_gradient_of_jax():
    algorithm = dataclasses.replace(GRPO, entropy_coefficient=0.1)
    _, rows = make_inputs(algorithm)
    batch = {**rows, "advantages": rows["entropy"] - 1, "loss_weights": rows["loss_mask"] * 0.5}
    want = jax.grad(
        lambda h: losses.policy_loss(rows["target"], h, batch, algorithm)[0]
    )(rows["entropy"])  # fmt: skip
    tensors = workers.torch_inputs(batch)
    entropy = tensors["entropy"].requires_grad_()
    losses.policy_loss(tensors["target"], entropy, tensors, algorithm)[0].backward()
    close(entropy.grad, want, "gradient")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 200.0])
@pytest.mark.parametrize("name", ["grpo", "gspo", "sapo", "rloo", "distill_mixed"])
def test_tokens_with_a_ratio_that_is_not_finite_are_left_out_as_in_jax(name, bad):
    algorithm = workers.resolved(name)
    flat, rows = make_inputs(algorithm)
    where = np.argwhere(rows["loss_mask"])[::7]
    target = rows["target"].copy()
    target[tuple(where.T)] = bad
    rows = {**rows, "target": target}
    want = workers.jax_gradient(algorithm)(*jax.device_put((flat, rows)))
    got = workers.torch_gradient(algorithm)(workers.torch_inputs(flat), workers.torch_inputs(rows))
    assert float(want[1]["n_nonfinite_tokens"]) == len(where)
    assert float(got[1]["n_nonfinite_tokens"]) == len(where)
    close(got[0], want[0], "loss", least=0.01)
    close(got[2], want[2], "gradient")


@pytest.mark.parametrize("value_clip", [0.0, 0.5])
def test_value_loss_is_that_of_jax(value_clip):
    algorithm = dataclasses.replace(workers.resolved("ppo"), value_clip=value_clip)
    rng = np.random.default_rng(0)
    values = rng.normal(size=(4, 32)).astype(np.float32)
    batch = {"loss_mask": rng.random((4, 32)) < 0.7}
    batch |= {k: rng.normal(size=(4, 32)).astype(np.float32) for k in ("values", "returns")}
    (want, stats), grad = jax.value_and_grad(losses.value_loss, has_aux=True)(
        values, batch, algorithm
    )
    tensor = torch.from_numpy(values).requires_grad_()
    got, torch_stats = losses.value_loss(tensor, workers.torch_inputs(batch), algorithm)
    got.backward()
    close(got.detach(), want, "loss")
    close(tensor.grad, grad, "gradient")
    for key in stats:
        close(torch_stats[key], stats[key], key)


@pytest.mark.parametrize("observed", [0.0, 0.011, 0.4, np.nan, np.inf])
def test_the_coefficient_of_kl_adapts_as_in_jax(observed):
    given = (0.2, observed, 512.0)
    want = kl.adapt(*map(jax.numpy.float32, given), target=0.01, horizon=10_000)
    got = kl.adapt(*map(torch.tensor, given), target=0.01, horizon=10_000)
    close(got, want, "coefficient")


WHERE = {
    "kl_estimator": {"kl_placement": "loss", "kl_coefficient": 0.1},
    "weight_aggregate": {"weight_level": "sequence"},
    "divergence": {"loss": "dppo"},
}


@pytest.mark.parametrize("field", sorted({*CHOICES} - {"kl_anchor"}))  # the config's own
def test_a_choice_that_the_code_lacks_is_an_error(field):
    base = dataclasses.replace(GRPO, **WHERE.get(field, {}))
    flat, rows = (workers.torch_inputs(x) for x in make_inputs(base))
    algorithm = dataclasses.replace(base, **{field: "nonesuch"})
    with pytest.raises(UserError, match=rf"algorithm\..*{field}.* 'nonesuch'"):
        workers.torch_gradient(algorithm)(flat, rows)


def test_a_loss_on_pairs_that_the_code_lacks_is_an_error():
    algorithm = workers.resolved("dpo")
    _, rows = (workers.torch_inputs(x) for x in make_inputs(algorithm))
    rows |= {"loss_weights": rows["loss_mask"].float(), "reference_logprobs": rows["entropy"]}
    with pytest.raises(UserError, match=r"unknown algorithm\.loss 'nonesuch'"):
        supervised.pair_loss(rows["target"], rows, dataclasses.replace(GRPO, loss="nonesuch"))


@pytest.mark.parametrize("where", ["reward", "loss"])
def test_kl_without_a_reference_says_what_to_do(where):
    algorithm = dataclasses.replace(GRPO, kl_placement=where, kl_coefficient=0.1)
    flat, rows = (workers.torch_inputs(x) for x in make_inputs(GRPO))
    with pytest.raises(UserError, match="needs reference_logprobs"):
        workers.torch_gradient(algorithm)(flat, rows)
