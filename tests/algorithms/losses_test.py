"""The policy loss against float64 oracles, values and gradients, and what must hold identically."""

import dataclasses
import math
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx.algorithms import advantages, losses, supervised, surrogates
from rlx.algorithms.algorithm import CHOICES, REDUCTIONS
from rlx.algorithms.jax_ops import OPS
from rlx.algorithms.presets import PRESETS
from rlx.algorithms.signatures import LossInputs
from rlx.base import UserError

GRPO = PRESETS["grpo"]
SEEDS = st.integers(0, 2**32 - 1)
OPTIONAL = ("proximal_logprobs", "reference_logprobs")
few = settings(derandomize=True, deadline=None, max_examples=8)


def variant(**fields):
    return dataclasses.replace(GRPO, **fields)


def of_one(log_ratio, advantage):
    """What a loss reads of tokens that differ in these alone."""
    zeros = jnp.zeros_like(log_ratio)
    return LossInputs(
        target=log_ratio, proximal=zeros, behaviour=zeros, log_ratio=log_ratio,
        advantage=jnp.asarray(advantage, jnp.float32), entropy=zeros, mask=zeros == 0,
        segment_ids=zeros, ops=OPS,
    )  # fmt: skip


# The loss does not know the reduction, nor the weights anything else: each compiles less often.
plain_loss = jax.jit(losses.policy_loss, static_argnums=3)
controlled = partial(surrogates.control_weights, ops=OPS)
plain_weights = jax.jit(losses.loss_weights, static_argnums=3)


def loss_weights(rows, group_ids, algorithm):
    reduction = variant(reduction=algorithm.reduction, constant_length=algorithm.constant_length)
    return plain_weights(rows["loss_mask"], rows["sequence_ids"], group_ids, reduction)


@partial(jax.jit, static_argnums=2)
def differentiated(rows, denominator, algorithm):
    def loss(target, entropy):
        total, stats = losses.policy_loss(target, entropy, rows, algorithm)
        return total / denominator, stats

    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(rows["target"], rows["entropy"])


def loss_and_gradients(rows, group_ids, algorithm):
    """The whole minibatch in one: (loss, stats), and gradients by target and entropy."""
    weights, denominator = loss_weights(rows, group_ids, algorithm)
    algorithm = dataclasses.replace(algorithm, reduction="token_mean", constant_length=0)
    return differentiated({"loss_weights": weights, **rows}, denominator, algorithm)


def run(cases, batch, algorithm, *optional, order=None, **extra):
    rows, places = cases.packed(batch, *optional, order=order)
    group_ids = cases.per_sequence([r.group for r in batch], np.int32, 5000)
    (loss, stats), (by_target, by_entropy) = loss_and_gradients(rows | extra, group_ids, algorithm)
    for gradient in (by_target, by_entropy):
        assert not np.any(np.asarray(gradient)[~rows["loss_mask"]]), "gradient off the mask"
    parts = [[np.asarray(g)[p] for p in places] for g in (by_target, by_entropy)]
    return float(loss), {k: float(v) for k, v in stats.items()}, *parts


def agree(cases, oracles, batch, algorithm, **extra):
    """Loss and gradients are the oracle's to 1e-6: of Σ|terms|, and of the largest entry."""
    loss, _, by_target, by_entropy = run(cases, batch, algorithm, *OPTIONAL, **extra)
    want = oracles.loss_and_gradient(batch, algorithm, float(extra.get("target_version", 0.0)))
    np.testing.assert_allclose(loss, want[0], rtol=0, atol=1e-6 * max(want[3], 1e-30))
    for got, exact in ((by_target, want[1]), (by_entropy, want[2])):
        got, exact = np.concatenate(got), np.concatenate(exact)
        np.testing.assert_allclose(got, exact, rtol=0, atol=1e-6 * np.abs(exact).max())


VARIANTS = {
    "grpo": GRPO,
    "ppo": variant(decoupled=False, proximal="behaviour"),
    "recomputed": variant(decoupled=False, proximal="recompute"),
    "loglinear": variant(proximal="loglinear"),
    "higher": variant(clip_low=0.1, clip_high=0.28, reduction="token_mean"),
    "dual": variant(clip_high=9.0, dual_clip=1.2),
    "entropy": variant(entropy_coefficient=0.1, reduction="constant", constant_length=20),
    **{f"kl_{k}": variant(kl_placement="loss", kl_estimator=k, kl_coefficient=0.3)
       for k in ("k1", "k2", "k3")},
    "uncontrolled": variant(weight_action="none"),
    "masked": variant(weight_upper=1.5, weight_lower=0.6),
    "truncated": variant(weight_action="truncate", weight_upper=1.5, weight_lower=0.6),
    "masked_k1": variant(weight_statistic="k1", weight_upper=0.3),
    "masked_k2": variant(weight_statistic="k2", weight_upper=0.1),
    "masked_k3": variant(weight_statistic="k3", weight_upper=0.1),
    **{f"sequence_{how}_{action}": variant(
        weight_level="sequence", weight_aggregate=how, weight_action=action,
        weight_upper={"mean": 1.1, "sum": 1.5, "max": 2.0}[how])
       for how in ("mean", "sum", "max") for action in ("mask", "truncate")},
    "sequence_k3": variant(weight_level="sequence", weight_statistic="k3", weight_upper=0.15),
    "geometric_mask": variant(sequence_lower=0.95, sequence_upper=1.05),
    "masked_and_capped": variant(sequence_lower=0.9, sequence_upper=1.1, weight_action="truncate",
                                 weight_upper=1.2),
    "icepop": variant(weight_lower=0.7, weight_upper=1.4, veto=0.5),
    "opsm": variant(off_policy_limit=0.02, loss="reinforce"),
    # One ratio a sequence, yet advantages that differ from token to token.
    "gspo": PRESETS["gspo"],
    "gspo_truncated": variant(ratio_level="sequence", clip_low=0.1, clip_high=0.3,
                              weight_action="truncate", weight_upper=1.1),
    "sapo": PRESETS["sapo"],
    "sapo_sequence": variant(loss="sapo", ratio_level="sequence", sapo_positive=3.0),
    "gspo_token": variant(ratio_level="sequence_token", clip_low=0.1, clip_high=0.3),
    "cispo": PRESETS["cispo"],
    "cispo_decoupled": variant(loss="cispo", clip_low=0.3, clip_high=0.4),
    "gmpo": PRESETS["gmpo"],
    "gmpo_narrow": variant(loss="gmpo", clip_low=0.1, clip_high=0.1, decoupled=False),
    "dppo": PRESETS["dppo"],
    "dppo_tv": variant(loss="dppo", clip_low=0.02, clip_high=0.05, weight_action="truncate"),
    "dppo_kl": variant(loss="dppo", divergence="kl", clip_low=0.01, clip_high=0.005),
    "reinforce": PRESETS["rloo"],
    "reinforce_masked": variant(loss="reinforce", weight_upper=1.2, entropy_coefficient=0.1),
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_value_and_gradient_match_the_oracle(name, cases, oracles):
    extra = {"target_version": np.float32(6.25)} if name == "loglinear" else {}

    @few
    @given(SEEDS)
    def check(seed):
        agree(cases, oracles, cases.random(seed), VARIANTS[name], **extra)

    check()


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_every_reduction_matches_the_oracle(reduction, cases, oracles):
    algorithm = variant(reduction=reduction, constant_length=20)

    @few
    @given(SEEDS)
    def check(seed):
        batch = cases.random(seed)
        rows, places = cases.packed(batch)
        ids = cases.per_sequence([r.group for r in batch], np.int32, 5000)
        weights, denominator = loss_weights(rows, ids, algorithm)
        got = np.concatenate([np.asarray(weights)[p] for p in places]) / float(denominator)
        want = np.concatenate(oracles.token_weights(batch, algorithm))
        np.testing.assert_allclose(got, want, rtol=1e-6)
        agree(cases, oracles, batch, algorithm)

    check()


@pytest.mark.parametrize(
    "name",
    ["grpo", "kl_k3", "sequence_sum_truncate", "entropy", "dual", "sapo", "gspo_truncated"],
)
def test_the_oracles_own_gradient_is_that_of_finite_differences(name, cases, oracles):
    algorithm, batch = VARIANTS[name], cases.random(5, count=3, empty=False)
    exact = oracles.loss_and_gradient(batch, algorithm)[1]
    for i, rollout in enumerate(batch):
        for t in rollout.trained()[:4]:
            values = []
            for step in (1e-6, -1e-6):
                moved = np.array(rollout.target)
                moved[t] += step
                nudged = list(batch)
                nudged[i] = dataclasses.replace(rollout, target=moved)
                values.append(oracles.loss_and_gradient(nudged, algorithm, at=batch)[0])
            slope = (values[0] - values[1]) / 2e-6
            np.testing.assert_allclose(exact[i][t], slope, rtol=1e-5, atol=1e-8)


@few
@given(SEEDS)
def test_decoupled_is_ppo_when_proximal_is_behaviour(cases, seed):
    batch = [dataclasses.replace(r, proximal=r.behaviour) for r in cases.random(seed)]
    decoupled = run(cases, batch, GRPO, "proximal_logprobs")
    ppo = run(cases, batch, VARIANTS["ppo"], "proximal_logprobs")
    assert decoupled[0] == ppo[0]
    for a, b in zip(decoupled[2], ppo[2], strict=True):
        np.testing.assert_array_equal(a, b)


def same(cases, batch, one, other, exactly=False):
    """Two algorithms have one loss and one gradient on a batch."""
    one, other = (run(cases, batch, a, "proximal_logprobs") for a in (one, other))
    far = {"rtol": 0, "atol": 0} if exactly else {"rtol": 2e-5, "atol": 1e-7}
    np.testing.assert_allclose(one[0], other[0], **far)
    np.testing.assert_allclose(np.concatenate(one[2]), np.concatenate(other[2]), **far)


@few
@given(SEEDS)
def test_cispo_is_reinforce_at_ratio_one_and_reinforce_with_a_truncated_weight(cases, seed):
    batch = cases.random(seed)
    cispo = variant(loss="cispo", decoupled=False, proximal="behaviour", clip_low=1.0, clip_high=1)
    plain = variant(loss="reinforce", decoupled=False)
    fresh = [dataclasses.replace(r, behaviour=r.target) for r in batch]
    same(cases, fresh, cispo, plain, exactly=True)
    truncated = variant(loss="reinforce", weight_action="truncate", weight_upper=2.0)
    same(cases, batch, cispo, truncated)


@few
@given(SEEDS)
def test_gmpo_without_a_clip_is_gspo_without_one(cases, seed):
    """Value as well as gradient, at every ratio; w is 1, for GSPO has one for the sequence."""
    batch = cases.random(seed)
    plain = {"decoupled": False, "proximal": "recompute", "clip_low": 1.0, "clip_high": math.inf}
    gspo = variant(ratio_level="sequence", **plain)
    same(cases, batch, variant(loss="gmpo", **plain), gspo)


@few
@given(SEEDS)
def test_dppo_whose_region_is_everything_is_reinforce_with_a_truncated_weight(cases, seed):
    batch = cases.random(seed)
    fields = {"weight_action": "truncate", "weight_upper": 1.5}
    wide = variant(loss="dppo", clip_low=1.0, clip_high=1.0, **fields)
    same(cases, batch, wide, variant(loss="reinforce", **fields), exactly=True)


@pytest.mark.parametrize("divergence", ["tv", "kl"])
def test_dppo_drops_what_has_left_its_region_in_the_direction_of_its_advantage(divergence):
    """Behaviour ½ throughout. At ¾ and ¼ TV is ¼ and the binary KL ½·log(4/3) = 0.144."""
    algorithm = variant(loss="dppo", divergence=divergence, clip_low=0.14, clip_high=0.14)
    target = jnp.log(jnp.array([0.75, 0.75, 0.25, 0.25, 0.55]))
    inputs = dataclasses.replace(
        of_one(target, [1.0, -1.0, 1.0, -1.0, 1.0]), behaviour=jnp.log(jnp.full(5, 0.5))
    )
    loss, said = surrogates.divergence_surrogate(inputs, algorithm)
    np.testing.assert_array_equal(said["actor_clip_ratio"], [True, False, False, True, False])
    np.testing.assert_array_equal(loss == 0, [True, False, False, True, False])
    wider = dataclasses.replace(algorithm, clip_low=0.26, clip_high=0.26)
    assert not surrogates.divergence_surrogate(inputs, wider)[1]["actor_clip_ratio"].any()
    far = surrogates.divergence(target, inputs.behaviour, algorithm, jnp)
    want = {"tv": 0.25, "kl": 0.5 * math.log(4 / 3)}[divergence]
    np.testing.assert_allclose(far[:4], want, rtol=1e-5)


@few
@given(SEEDS)
def test_gspo_token_is_gspo_where_a_sequence_has_one_advantage(cases, seed):
    batch = [
        dataclasses.replace(r, advantages=np.full(len(r.mask), r.advantages[0]))
        for r in cases.random(seed)
    ]
    gspo = variant(ratio_level="sequence", clip_low=0.1, clip_high=0.3)
    same(cases, batch, gspo, dataclasses.replace(gspo, ratio_level="sequence_token"))


@few
@given(SEEDS)
def test_gspo_is_grpo_for_completions_of_one_token(cases, seed):
    """A mean over one token is that token: the two differ in nothing but the clip they use."""
    batch = cases.random(seed)
    batch = [
        dataclasses.replace(
            r, mask=np.arange(len(r.mask)) == (r.trained() if any(r.mask) else [0])[0]
        )
        for r in batch
    ]
    clip = {"clip_low": 0.2, "clip_high": 0.3}
    grpo = run(cases, batch, variant(**clip), *OPTIONAL)
    gspo = run(cases, batch, variant(**clip, ratio_level="sequence"), *OPTIONAL)
    assert grpo[:2] == gspo[:2]
    np.testing.assert_array_equal(np.concatenate(grpo[2]), np.concatenate(gspo[2]))


@few
@given(SEEDS)
def test_a_sequences_ratio_is_the_geometric_mean(cases, seed):
    """Nudging tokens against each other leaves their product, and so the loss, where it was."""
    batch = cases.random(seed, count=4, empty=False)
    turned = []
    for r in batch:
        target = np.array(r.target)
        target[r.trained()] = r.target[r.trained()][::-1]
        proximal = np.array(r.proximal)
        proximal[r.trained()] += (r.target - target)[r.trained()].mean()
        turned.append(dataclasses.replace(r, target=target, proximal=proximal))
    algorithm = variant(ratio_level="sequence", decoupled=False, clip_low=1.0, clip_high=9.0)
    a, b = (run(cases, x, algorithm, *OPTIONAL)[0] for x in (batch, turned))
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("advantage", [2.0, -3.0])
def test_sapos_gate_is_the_plain_surrogate_at_ratio_one_and_flat_far_off(advantage):
    gate = jax.grad(lambda x: surrogates.soft_surrogate(of_one(x, advantage), PRESETS["sapo"])[0])
    np.testing.assert_allclose(gate(0.0), -advantage, rtol=1e-6)
    assert abs(float(gate(3.0))) < 1e-3 * abs(advantage)
    assert abs(float(gate(-9.0))) < 1e-3 * abs(advantage)
    by_ratio = float(gate(0.5)) / math.exp(0.5)
    assert abs(by_ratio) < abs(advantage)


def test_sapo_is_gentler_with_what_is_to_be_encouraged():
    """τ of negative advantages is the larger one: their gradient dies sooner."""
    slope = jax.grad(lambda x, a: surrogates.soft_surrogate(of_one(x, a), PRESETS["sapo"])[0])
    up, down = (abs(float(slope(1.0, a))) for a in (1.0, -1.0))
    assert down < up


def test_m2po_drops_the_farthest_tokens_until_the_rest_is_near():
    """Squares 1, 4, 9, 16 of weights of either sign; means 1, 2.5, 4.67, 7.5."""
    far = jnp.array([3.0, -1.0, 4.0, -2.0, 0.5])
    used = jnp.array([True, True, True, True, False])
    for limit, kept in (
        (7.6, [1, 1, 1, 1]),
        (7.4, [1, 1, 0, 1]),
        (2.5, [0, 1, 0, 0]),
        (1.0, [0] * 4),
    ):
        out = losses.within_second_moment(far, used, limit)
        np.testing.assert_array_equal(out, [*map(bool, kept), False], err_msg=str(limit))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_m2po_drops_what_is_not_finite_first(bad):
    out = losses.within_second_moment(jnp.array([0.1, bad, 0.2]), jnp.ones(3, bool), 1.0)
    np.testing.assert_array_equal(out, [True, False, True])


@few
@given(SEEDS)
def test_m2po_keeps_as_many_as_go(cases, oracles, seed):
    batch = cases.random(seed)
    mask = cases.join([r.mask for r in batch], bool)
    far = cases.join([r.behaviour - r.proximal for r in batch])
    got = jax.jit(losses.within_second_moment)(far, mask, 0.1)
    want = oracles.within_second_moment(batch, 0.1)
    np.testing.assert_array_equal(got, cases.join(want, bool))


@few
@given(SEEDS)
def test_an_absent_proximal_is_the_target_without_gradient(cases, oracles, seed):
    """One minibatch: u is 1 everywhere, yet the gradient is that of −w·u·A, not 0."""
    batch = [dataclasses.replace(r, proximal=r.target) for r in cases.random(seed)]
    absent = run(cases, batch, GRPO)
    given_ = run(cases, batch, GRPO, "proximal_logprobs")
    assert absent[0] == given_[0]
    np.testing.assert_array_equal(np.concatenate(absent[2]), np.concatenate(given_[2]))
    exact = np.concatenate(oracles.loss_and_gradient(batch, GRPO)[1])
    np.testing.assert_allclose(np.concatenate(absent[2]), exact, rtol=2e-6, atol=1e-8)


@few
@given(SEEDS, SEEDS)
def test_how_sequences_are_packed_does_not_matter(cases, seed, other):
    batch = cases.random(seed)
    order = np.random.default_rng(other).permutation(len(batch))
    for name in ("sequence_mean_mask", "kl_k3", "gspo_truncated"):
        straight = run(cases, batch, VARIANTS[name], *OPTIONAL)
        moved = run(cases, batch, VARIANTS[name], *OPTIONAL, order=order)
        np.testing.assert_allclose(moved[0], straight[0], rtol=1e-5, atol=1e-6)
        for a, b in zip(moved[2], straight[2], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_microbatches_sum_to_the_whole(reduction, cases):
    algorithm = variant(reduction=reduction, constant_length=20)

    @few
    @given(SEEDS)
    def check(seed):
        rows, _ = cases.packed(cases.random(seed, count=12), "proximal_logprobs")
        ids = np.arange(cases.sequences) // 3
        rows["loss_weights"], _ = loss_weights(rows, ids, algorithm)
        whole, stats = plain_loss(rows["target"], rows["entropy"], rows, GRPO)
        parts = [{k: v[i : i + 2] for k, v in rows.items()} for i in range(0, 8, 2)]
        sums = [plain_loss(p["target"], p["entropy"], p, GRPO) for p in parts]
        np.testing.assert_allclose(sum(s for s, _ in sums), whole, rtol=1e-5, atol=1e-5)
        for name, value in stats.items():
            total = sum(float(s[name]) for _, s in sums)
            np.testing.assert_allclose(total, value, rtol=1e-5, atol=1e-5, err_msg=name)

    check()


@pytest.mark.parametrize(
    ("level", "how", "expected"),
    [("token", "mean", [1, 3, 1]), ("sequence", "mean", [3, 3, 3]), ("sequence", "sum", [3, 3, 3]),
     ("sequence", "max", [3 * math.exp(-4), 3, 3 * math.exp(-4)])],
)  # fmt: skip
def test_a_truncated_weight_is_never_above_its_bound(level, how, expected):
    """One token of e⁴ among ones; the sequence's ratio is e⁴, or e^(4/3) by its geometric mean."""
    algorithm = variant(
        weight_action="truncate", weight_level=level, weight_aggregate=how, weight_upper=3.0
    )
    log_weight, segments = jnp.array([[0.0, 4.0, 0.0]]), jnp.ones((1, 3), int)
    weight, in_bounds = controlled(log_weight, segments > 0, segments, algorithm)
    np.testing.assert_allclose(weight, [expected], rtol=1e-6)
    assert bool(in_bounds.all()) is False
    small, in_bounds = controlled(log_weight / 8, segments > 0, segments, algorithm)
    ratios = {"mean": [math.exp(1 / 6)] * 3, "sum": [math.exp(0.5)] * 3}
    own = [1, math.exp(0.5), 1]
    want = own if level == "token" else ratios.get(how, own)
    np.testing.assert_allclose(small, [want], rtol=1e-6)
    assert bool(in_bounds.all())


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_gradient_of_kl_has_one_mean_at_every_lag(estimator, decoupled):
    """All outcomes of one draw, weighed by the behaviour policy, in place of many samples.

    k2's mean gradient is that of KL(target ‖ reference), k3's that of KL(reference ‖ target),
    k1's is 0; an old behaviour policy moves none of them.
    """
    keys = jax.random.split(jax.random.key(7), 4)
    logits, proximal, behaviour, reference = (jax.random.normal(key, (6,)) for key in keys)
    proximal, behaviour, reference = map(
        jax.nn.log_softmax, (logits + 0.1 * proximal, behaviour, reference)
    )
    algorithm = variant(
        kl_placement="loss", kl_estimator=estimator, kl_coefficient=1.0, decoupled=decoupled,
        proximal="recompute" if decoupled else "behaviour", weight_action="none",
    )  # fmt: skip

    def loss(logits, behaviour, proximal):
        rows = {
            "loss_mask": jnp.ones((6, 1), bool),
            "segment_ids": jnp.ones((6, 1), int),
            "advantages": jnp.zeros((6, 1)),
            "behaviour_logprobs": behaviour[:, None],
            "proximal_logprobs": proximal[:, None],
            "reference_logprobs": reference[:, None],
            "loss_weights": jnp.exp(behaviour)[:, None],  # each as often as it is drawn
        }
        target = jax.nn.log_softmax(logits)[:, None]
        return losses.policy_loss(target, jnp.zeros((6, 1)), rows, algorithm)[0]

    def exact(logits):
        p = jax.nn.log_softmax(logits)
        one, other = (p, reference) if estimator == "k2" else (reference, p)
        return (estimator != "k1") * jnp.sum(jnp.exp(one) * (one - other))

    on_policy = jax.nn.log_softmax(logits)
    old = jax.grad(loss)(logits, behaviour, proximal)
    fresh = jax.grad(loss)(logits, on_policy, on_policy)
    np.testing.assert_allclose(old, fresh, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(old, jax.grad(exact)(logits), rtol=1e-4, atol=1e-6)


def test_k2_with_its_weight_is_the_unbiased_estimate_through_the_ratio():
    """2512.02556 differentiates u·k3, ratio and all: token by token that is k2's gradient here."""
    behaviour, reference = jnp.array([-1.0, -2.0, -0.5]), jnp.array([-0.7, -2.5, -0.1])

    def through(target):
        u, delta = jnp.exp(target - behaviour), target - reference
        return jnp.sum(u * (jnp.expm1(-delta) + delta))

    def weighed(target):
        u, delta = jnp.exp(jax.lax.stop_gradient(target) - behaviour), target - reference
        return jnp.sum(u * 0.5 * delta**2)

    target = jnp.array([-1.2, -1.5, -0.6])
    np.testing.assert_allclose(jax.grad(through)(target), jax.grad(weighed)(target), rtol=1e-5)


def test_turning_control_off_keeps_the_correction_on(cases):
    """Without w this would be plain PPO around the proximal policy, biased by staleness."""
    batch = cases.random(1, empty=False)
    off = run(cases, batch, VARIANTS["uncontrolled"], "proximal_logprobs")[0]
    wide = run(cases, batch, variant(weight_upper=math.inf), "proximal_logprobs")[0]
    plain = run(cases, batch, VARIANTS["recomputed"], "proximal_logprobs")[0]
    assert off == wide
    assert abs(off - plain) > 1e-3


@pytest.mark.parametrize("field", ["target", "proximal", "behaviour"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, -200.0, 200.0])
def test_non_finite_ratios_are_counted_and_excluded(field, bad, cases, oracles):
    """−200 nats is finite, but e^200 is not: its gradient would be 0 · inf."""
    batch = cases.random(9, count=4, empty=False)
    values = np.array(getattr(batch[1], field))
    spot = batch[1].trained()[0]
    values[spot] = bad
    batch[1] = dataclasses.replace(batch[1], **{field: values})
    loss, stats, by_target, _ = run(cases, batch, GRPO, "proximal_logprobs")
    want, exact, _, _ = oracles.loss_and_gradient(batch, GRPO)
    # A ratio that underflows to 0 is finite; one that overflows is not.
    r = batch[1]
    ok = oracles.finite(r.target, r.proximal) & oracles.finite(r.proximal, r.behaviour)
    excluded = int(not ok[spot])
    assert excluded or abs(bad) == 200.0
    assert stats["n_nonfinite_tokens"] == excluded
    assert stats["n_valid_tokens"] == sum(len(r.trained()) for r in batch) - excluded
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    np.testing.assert_allclose(
        np.concatenate(by_target), np.concatenate(exact), rtol=2e-6, atol=1e-8
    )
    assert all(np.isfinite(v) for v in stats.values())


def test_what_lies_off_the_mask_never_matters(cases):
    batch = cases.random(4, count=6, empty=False)
    rows, _ = cases.packed(batch, *OPTIONAL)
    poisoned = dict(rows)
    for name in ("target", "entropy", "behaviour_logprobs", "advantages", *OPTIONAL):
        poisoned[name] = np.where(rows["loss_mask"], rows[name], np.nan)
    ids = cases.per_sequence([r.group for r in batch], np.int32, 5000)
    for name in ("kl_k3", "sequence_max_truncate", "dual"):
        clean = loss_and_gradients(rows, ids, VARIANTS[name])
        dirty = loss_and_gradients(poisoned, ids, VARIANTS[name])
        chex.assert_trees_all_equal(clean, dirty)


@pytest.mark.parametrize(
    ("target_version", "versions", "expected"),
    [
        (6.0, [6, 4, 2], [-2.0, -1.0, -1.0]),  # first minibatch: stale tokens' anchor is the target
        (6.5, [6, 4, 2], [-2.0, -1.2, -10 / 9]),  # half-way to version 7
    ],
)
def test_loglinear_by_hand(target_version, versions, expected):
    """Behaviour −2, target −1: α = (6 − v)/(target_version − v)."""
    batch = {
        "behaviour_logprobs": jnp.full(3, -2.0),
        "versions": jnp.array(versions),
        "target_version": target_version,
    }
    out = losses.proximal_logprobs(-jnp.ones(3), batch, VARIANTS["loglinear"])
    np.testing.assert_allclose(out, expected, rtol=1e-6)


def test_loglinear_anchors_carry_no_gradient():
    batch = {"behaviour_logprobs": jnp.zeros(2), "versions": jnp.zeros(2, int),
             "target_version": 1.5}  # fmt: skip
    slope = jax.grad(lambda x: losses.proximal_logprobs(x, batch, VARIANTS["loglinear"]).sum())(
        -jnp.ones(2)
    )
    np.testing.assert_array_equal(slope, 0.0)


@pytest.mark.parametrize("action", ["none", "mask", "truncate"])
def test_the_behaviour_weight_carries_no_gradient(action):
    algorithm = variant(weight_action=action, weight_upper=1.5)
    segments, used = jnp.ones((1, 3), int), jnp.ones((1, 3), bool)
    slope = jax.grad(lambda x: controlled(x, used, segments, algorithm)[0].sum())(
        jnp.array([[-1.0, 0.1, 2.0]])
    )
    np.testing.assert_array_equal(slope, 0.0)


def test_dual_clip_bounds_only_negative_advantages():
    algorithm = variant(dual_clip=3.0)
    log_ratio = jnp.log(jnp.array([10.0, 10.0, 2.0]))
    loss, said = surrogates.clipped_surrogate(of_one(log_ratio, [-1.0, 1.0, -1.0]), algorithm)
    np.testing.assert_allclose(loss, [3.0, -1.2, 2.0], rtol=1e-6)
    np.testing.assert_array_equal(said["actor_clip_ratio"], [True, True, False])


def test_statistics_are_means_over_trained_tokens(cases):
    batch = cases.random(6, count=5, empty=False)
    algorithm = variant(weight_action="truncate", weight_upper=1.2)
    known = ("proximal_logprobs", "reference_logprobs")
    loss, stats, _, _ = run(cases, batch, algorithm, *known)
    denominator = 5.0
    metrics = losses.summarise(stats, denominator)

    def mean(f):
        return np.mean(np.concatenate([f(r)[r.mask] for r in batch]))

    u = [np.exp(r.target - r.proximal) for r in batch]
    held = [
        -np.clip(x, 0.8, 1.2) * r.advantages > -x * r.advantages
        for x, r in zip(u, batch, strict=True)
    ]
    expected = {
        "n_valid_tokens": sum(r.mask.sum() for r in batch),
        "n_nonfinite_tokens": 0,
        "actor_loss": loss,
        "kl_loss": 0,
        "entropy_loss": 0,
        "actor_clip_ratio": np.mean(
            np.concatenate([h[r.mask] for h, r in zip(held, batch, strict=True)])
        ),
        "importance_weight": mean(lambda r: np.exp(r.target - r.proximal)),
        "ppo_approx_kl": mean(lambda r: r.proximal - r.target),
        "behaviour_weight": mean(lambda r: np.minimum(np.exp(r.proximal - r.behaviour), 1.2)),
        "behaviour_weight_out_of_bounds": mean(lambda r: np.exp(r.proximal - r.behaviour) > 1.2),
        "behaviour_kl": mean(
            lambda r: np.exp(r.proximal - r.behaviour) - 1 - (r.proximal - r.behaviour)
        ),
        "reference_kl": mean(
            lambda r: np.exp(r.reference - r.target) - 1 - (r.reference - r.target)
        ),
        "entropy": mean(lambda r: r.entropy),
        "advantage": mean(lambda r: r.advantages),
    }
    assert set(metrics) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


# Where a choice is looked at, other than GRPO as it is.
WHERE = {
    "kl_estimator": {"kl_placement": "loss"},
    "kl_anchor": {"kl_placement": "loss"},
    "weight_aggregate": {"weight_level": "sequence"},
    "divergence": {"loss": "dppo"},
}


@pytest.mark.parametrize("field", CHOICES)
def test_a_choice_that_the_code_lacks_is_an_error(field, cases):
    """A name that is in CHOICES alone must not train what stands last in the code."""
    algorithm = variant(**WHERE.get(field, {}), **{field: "nonesuch"})
    batch = cases.random(0, count=3, empty=False)

    def train():
        assert algorithm.needs_reference is not None
        advantages.advantages(jax.tree.map(jnp.asarray, cases.flat(batch)), algorithm)
        run(cases, batch, algorithm, *OPTIONAL)

    with pytest.raises(UserError, match=rf"algorithm\..*{field}.* 'nonesuch'"):
        train()


def test_a_loss_on_pairs_that_the_code_lacks_is_an_error(cases):
    rows, _ = cases.packed(cases.pairs(0), *OPTIONAL, unit=2)
    rows["loss_weights"] = rows["loss_mask"].astype(np.float32)
    with pytest.raises(UserError, match=r"unknown algorithm\.loss 'nonesuch'"):
        supervised.pair_loss(rows["target"], rows, variant(loss="nonesuch"))


def test_an_empty_minibatch_divides_by_one(cases):
    batch = [dataclasses.replace(r, mask=np.zeros_like(r.mask)) for r in cases.random(0, count=3)]
    for reduction in REDUCTIONS:
        loss, stats, _, _ = run(cases, batch, variant(reduction=reduction, constant_length=9))
        assert loss == 0
        assert losses.summarise(stats, 0.0)["entropy"] == 0


def test_a_missing_reference_is_an_error(cases):
    with pytest.raises(UserError, match="reference_logprobs"):
        run(cases, cases.random(0), VARIANTS["kl_k3"])


def test_it_compiles_once_for_one_shape(cases):
    traced = jax.jit(chex.assert_max_traces(losses.policy_loss, n=1), static_argnums=3)
    for seed in range(3):
        rows, _ = cases.packed(cases.random(seed))
        rows["loss_weights"] = rows["loss_mask"].astype(np.float32)
        traced(rows["target"], rows["entropy"], rows, GRPO)


@pytest.mark.parametrize("name", ["geometric_mask", "masked_and_capped", "icepop", "opsm"])
def test_a_mask_of_sequences_takes_some_out_and_keeps_some(name, cases):
    """Else the oracle would agree with a mask that never acts."""
    algorithm = VARIANTS[name]
    off = dataclasses.replace(
        algorithm, sequence_lower=0.0, sequence_upper=np.inf, veto=0.0, off_policy_limit=0.0
    )
    counts = np.zeros(3)
    for seed in range(5):
        batch = cases.random(seed)
        out = [run(cases, batch, a)[1]["behaviour_weight_out_of_bounds"] for a in (off, algorithm)]
        counts += [*out, sum(len(r.trained()) for r in batch)]
    assert counts[0] < counts[1] < counts[2]
