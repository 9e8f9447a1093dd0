"""Other people's implementations as witnesses: TRL's losses, rlax's estimators.

Optional: `pip install -e '.[witnesses]'`, and skipped without. TRL's loss functions are methods
that read a few attributes; they get an object with just those. Where the two differ, a test says
what rlx does and why.
"""

import collections
import dataclasses
import warnings
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlx.algorithms import advantages as adv
from rlx.algorithms import losses, supervised
from rlx.algorithms.presets import PRESETS

pytestmark = pytest.mark.witnesses

LONGEST = 20  # tokens of a rollout, and TRL's max_completion_length
SEEDS = range(4)


@pytest.fixture(scope="module")
def torch():
    return pytest.importorskip("torch")


@pytest.fixture(scope="module")
def trl(torch):
    """TRL's trainers. It warns of versions it does not know, and would import vLLM for nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        imports = pytest.importorskip("trl.import_utils")
        imports.is_vllm_available = lambda *_, **__: False
        from trl.trainer.dpo_trainer import DPOTrainer
        from trl.trainer.grpo_trainer import GRPOTrainer
        from trl.trainer.reward_trainer import RewardTrainer
        from trl.trainer.rloo_trainer import RLOOTrainer
    return SimpleNamespace(DPO=DPOTrainer, GRPO=GRPOTrainer, RLOO=RLOOTrainer, Reward=RewardTrainer)


@pytest.fixture(scope="module")
def rlax():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names that newer JAX deprecates
        return pytest.importorskip("rlax")


def bare(torch, **fields):
    """What the methods read of a trainer."""
    accelerator = SimpleNamespace(
        num_processes=1, device=torch.device("cpu"), gather=lambda x: x,
        gather_for_metrics=lambda x: x, reduce=lambda x, reduction: x,
    )  # fmt: skip
    return SimpleNamespace(
        accelerator=accelerator, model=SimpleNamespace(training=False), aux_loss_enabled=False,
        _metrics=collections.defaultdict(lambda: collections.defaultdict(list)),
        _total_train_tokens=0, **fields,
    )  # fmt: skip


def padded(torch, arrays):
    """[B, LONGEST] float64, one sequence a row."""
    return torch.tensor(np.stack([np.pad(x.astype(float), (0, LONGEST - len(x))) for x in arrays]))


def per_sequence(batch):
    """Advantages as TRL has them: one number a sequence."""
    return [dataclasses.replace(r, advantages=np.full(len(r.mask), r.advantages[0])) for r in batch]


plain_weights = jax.jit(losses.loss_weights, static_argnums=3)


@partial(jax.jit, static_argnums=1)
def differentiated(rows, algorithm):
    def loss(x):
        if algorithm.data == "pairs":
            return supervised.pair_loss(x, rows, algorithm)[0]
        return losses.policy_loss(x, rows["entropy"], rows, algorithm)[0]

    return jax.value_and_grad(loss)(rows["target"])


def ours(cases, batch, algorithm):
    """rlx's loss of one minibatch, and each rollout's gradient."""
    optional = ["reference_logprobs"]
    optional += ["proximal_logprobs"] if algorithm.data == "rollouts" else []
    unit = 2 if algorithm.data == "pairs" else 1
    rows, places = cases.packed(batch, *optional, unit=unit)
    groups = cases.per_sequence([r.group for r in batch], np.int32, 5000)
    rows["loss_weights"], denominator = plain_weights(
        rows["loss_mask"], rows["sequence_ids"], groups, algorithm
    )
    loss, slope = differentiated(rows, algorithm)
    return float(loss / denominator), [np.asarray(slope)[p] / denominator for p in places]


def agree(got, want):
    """Loss and gradients within 1e-6 of the largest gradient times the tokens, or of that alone."""
    (loss, slopes), (exact, gradient) = got, want
    scale = np.abs(gradient).max()
    for mine, theirs in zip(slopes, gradient, strict=True):
        np.testing.assert_allclose(mine, theirs[: len(mine)], rtol=0, atol=1e-6 * scale)
    np.testing.assert_allclose(loss, exact, rtol=1e-6, atol=1e-6 * scale * gradient.size)


def grpo(torch, trl, batch, algorithm, loss_type, *, weights=None, through=False):
    """TRL's loss and its gradient by the log-probabilities."""
    logps = padded(torch, [r.target for r in batch]).requires_grad_()
    entropy = padded(torch, [r.entropy for r in batch])
    mask = padded(torch, [r.mask for r in batch])
    trainer = bare(
        torch,
        _get_per_token_logps_and_entropies=lambda *_, **__: (logps, entropy, None),
        loss_type=loss_type,
        importance_sampling_level=algorithm.ratio_level,
        epsilon_low=algorithm.clip_low,
        epsilon_high=algorithm.clip_high,
        beta=algorithm.kl_coefficient if algorithm.kl_placement == "loss" else 0.0,
        max_completion_length=algorithm.constant_length,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=weights is not None,
        vllm_importance_sampling_correction=True,
        _entropy_bonus_enabled=False,
        args=SimpleNamespace(
            use_bias_correction_kl=through,
            delta=algorithm.dual_clip or None,
            sapo_temperature_pos=algorithm.sapo_positive,
            sapo_temperature_neg=algorithm.sapo_negative,
            steps_per_generation=1,
        ),
    )
    ids = torch.zeros(len(batch), 1, dtype=torch.long)
    inputs = {
        "prompt_ids": ids,
        "prompt_mask": ids,
        "completion_ids": torch.zeros(logps.shape, dtype=torch.long),
        "completion_mask": mask,
        "advantages": torch.tensor([r.advantages[0] for r in batch]),
        "old_per_token_logps": padded(torch, [r.proximal for r in batch]),
        "ref_per_token_logps": padded(torch, [r.reference for r in batch]),
        "num_items_in_batch": mask.sum(),
        "importance_sampling_ratio": weights,
    }
    loss = trl.GRPO._compute_loss(trainer, None, inputs)
    loss.backward()
    return loss.item(), logps.grad.numpy()


def variant(name, **fields):
    return dataclasses.replace(PRESETS[name], **{"decoupled": False, **fields})


KL = {"kl_placement": "loss", "kl_estimator": "k3", "kl_coefficient": 0.04}
TRL_LOSSES = {
    "grpo": (variant("grpo"), "grpo"),
    "dr_grpo": (variant("dr_grpo", constant_length=LONGEST), "dr_grpo"),
    "dapo": (variant("dapo"), "dapo"),
    "lite_ppo": (variant("lite_ppo"), "bnpo"),
    "gspo": (variant("gspo"), "grpo"),
    "gspo_wide": (variant("gspo", clip_low=0.1, clip_high=0.2), "grpo"),
    # Its default anchor is the behaviour policy; TRL's old policy is our proximal one.
    "sapo": (variant("sapo", proximal="recompute"), "sapo"),
}


@pytest.mark.parametrize("name", TRL_LOSSES)
def test_trl_computes_the_same_policy_loss(name, cases, torch, trl):
    algorithm, loss_type = TRL_LOSSES[name]
    for seed in SEEDS:
        batch = per_sequence(cases.random(seed, count=8, empty=False))
        agree(ours(cases, batch, algorithm), grpo(torch, trl, batch, algorithm, loss_type))


def test_trls_kl_is_ours_before_a_batchs_first_update(cases, torch, trl):
    """Later, and with old data, ours has the weight of who sampled the token, TRL's has none."""
    algorithm = variant("grpo", **KL)
    for seed in SEEDS:
        batch = per_sequence(cases.random(seed, count=8, empty=False))
        batch = [dataclasses.replace(r, proximal=r.target) for r in batch]
        agree(ours(cases, batch, algorithm), grpo(torch, trl, batch, algorithm, "grpo"))


def test_trls_bias_corrected_k3_has_the_gradient_of_our_k2(cases, torch, trl):
    """DeepSeek-V3.2's (2512.02556): the ratio times k3, differentiated through the ratio."""
    algorithm = variant("grpo", **{**KL, "kl_estimator": "k2"})
    for seed in SEEDS:
        batch = per_sequence(cases.random(seed, count=8, empty=False))
        _, theirs = grpo(torch, trl, batch, variant("grpo", **KL), "grpo", through=True)
        for mine, exact in zip(ours(cases, batch, algorithm)[1], theirs, strict=True):
            np.testing.assert_allclose(
                mine, exact[: len(mine)], rtol=0, atol=1e-6 * np.abs(theirs).max()
            )


@pytest.mark.parametrize("action", ["mask", "truncate"])
def test_trl_corrects_for_the_engine_with_the_same_weights(action, cases, torch, trl):
    """Its importance_sampling_ratio (token_mask, token_truncate) is our behaviour weight."""
    algorithm = variant("grpo", decoupled=True, weight_action=action, weight_upper=1.3)
    for seed in SEEDS:
        batch = per_sequence(cases.random(seed, count=8, empty=False))
        ratio = torch.exp(padded(torch, [r.proximal - r.behaviour for r in batch]))
        held = ratio.clamp(max=1.3) if action == "truncate" else ratio * (ratio <= 1.3)
        agree(
            ours(cases, batch, algorithm), grpo(torch, trl, batch, algorithm, "grpo", weights=held)
        )


def test_a_dual_clip_is_not_trls_two_sided_one(cases, torch, trl):
    """TRL's `delta` caps the ratio of positive advantages too, before the minimum is taken.

    Above 1 + ε the other branch is smaller for them anyway, so where δ > 1 + ε, as in both papers
    (1912.09729; INTELLECT-2, 2505.07291), the two are one.
    """
    for seed in SEEDS:
        batch = per_sequence(cases.random(seed, count=8, empty=False))
        above = variant("grpo", dual_clip=1.4)
        agree(ours(cases, batch, above), grpo(torch, trl, batch, above, "grpo"))
    below = variant("grpo", dual_clip=1.05)
    loss, exact = ours(cases, batch, below)[0], grpo(torch, trl, batch, below, "grpo")[0]
    assert abs(loss - exact) > 1e-4


def test_gspos_behaviour_weight_is_of_the_sequence(cases, torch, trl):
    """TRL weighs each token by its own; with one ratio a sequence rlx has one weight a sequence.

    Both are corrections beyond the paper, which is on-policy but for its minibatches. They agree
    where the tokens of a sequence have equal weights.
    """
    algorithm = variant("gspo", decoupled=True, clip_low=0.2, clip_high=0.3, weight_action="none")
    batch = per_sequence(cases.random(2, count=8, empty=False))

    def gap(batch):
        ratio = torch.exp(padded(torch, [r.proximal - r.behaviour for r in batch]))
        theirs = grpo(torch, trl, batch, algorithm, "grpo", weights=ratio)[0]
        return abs(ours(cases, batch, algorithm)[0] - theirs)

    level = [dataclasses.replace(r, behaviour=r.proximal - 0.3) for r in batch]
    assert gap(level) < 1e-6
    assert gap(batch) > 1e-3


def test_rloo_has_trls_gradient_but_not_its_value(cases, torch, trl):
    """At the sampled policy: TRL's surrogate is −A·ratio of the whole sequence, ours −A·log π.

    The paper's (2402.14740, eq. 2) is the gradient A·∇log π, which both have; the number itself
    says nothing of either. Away from it TRL clips the ratio of the sequence, as PPO does; rlx
    weighs each token, which is the only form that a long sequence survives.
    """
    algorithm = variant("rloo")
    for seed in SEEDS:
        batch = per_sequence(cases.random(seed, count=8, empty=False))
        logps = padded(torch, [r.target for r in batch]).requires_grad_()
        mask = padded(torch, [r.mask for r in batch])
        trainer = bare(
            torch,
            _get_per_token_logps_and_entropies=lambda *_, x=logps, **__: (x, x.detach(), None),
            epsilon_low=0.2,
            epsilon_high=0.2,
        )
        ids = torch.zeros(len(batch), 1, dtype=torch.long)
        inputs = {
            "prompt_ids": ids,
            "prompt_mask": ids,
            "completion_ids": torch.zeros(logps.shape, dtype=torch.long),
            "completion_mask": mask,
            "advantages": torch.tensor([r.advantages[0] for r in batch]),
            "old_logps": (logps.detach() * mask).sum(1),
        }
        loss = trl.RLOO._compute_loss(trainer, None, inputs)
        loss.backward()
        mine, slopes = ours(cases, batch, algorithm)
        agree((0.0, slopes), (0.0, logps.grad.numpy()))
        mean = np.mean([r.advantages[0] for r in batch])
        assert loss.item() == pytest.approx(-mean, abs=1e-9)
        assert abs(mine - loss.item()) > 1e-3


@pytest.mark.parametrize("name", ["dpo", "ipo"])
def test_trl_computes_the_same_preference_loss(name, cases, torch, trl):
    algorithm = PRESETS[name]
    for seed in SEEDS:
        batch = cases.pairs(seed)
        turned = [*batch[::2], *batch[1::2]]  # TRL: all that are chosen, then all rejected
        target = padded(torch, [r.target for r in turned])
        mask = padded(torch, [r.mask for r in turned])
        logps = (target * mask)[:, 1:].clone().requires_grad_()
        reference = (padded(torch, [r.reference for r in turned]) * mask).sum(1)
        zeros = torch.zeros_like(logps)
        output = SimpleNamespace(
            log_probs=logps, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool()
        )
        half = len(batch) // 2
        trainer = bare(
            torch, ld_alpha=None, precompute_ref_logps=True, f_divergence_type="reverse_kl",
            loss_types=[{"dpo": "sigmoid"}.get(name, name)], loss_weights=[1.0],
            beta=algorithm.pair_beta, label_smoothing=0.0, use_weighting=False,
        )  # fmt: skip
        inputs = {
            "input_ids": torch.zeros(mask.shape, dtype=torch.long),
            "attention_mask": torch.ones(mask.shape, dtype=torch.long),
            "completion_mask": mask.long(),
            "ref_chosen_logps": reference[:half],
            "ref_rejected_logps": reference[half:],
        }
        loss = trl.DPO._compute_loss(trainer, lambda output=output, **_: output, inputs, False)
        loss.backward()
        gradient = np.pad(logps.grad.numpy(), ((0, 0), (1, 0))) * mask.numpy()
        gradient = np.stack([gradient[:half], gradient[half:]], 1).reshape(gradient.shape)
        agree(ours(cases, batch, algorithm), (loss.item(), gradient))


def test_trl_computes_the_same_reward_model_loss(cases, torch, trl):
    for seed in SEEDS:
        batch = [
            dataclasses.replace(r, mask=np.arange(len(r.mask)) == r.trained()[-1])
            for r in cases.pairs(seed)
        ]
        scores = [r.target[r.trained()[0]] for r in [*batch[::2], *batch[1::2]]]
        output = SimpleNamespace(logits=torch.tensor(scores)[:, None].requires_grad_())
        trainer = bare(torch, args=SimpleNamespace(center_rewards_coefficient=None))
        loss = trl.Reward.compute_loss(trainer, lambda output=output, **_: output, {})
        loss.backward()
        gradient, half = np.zeros((len(batch), LONGEST)), len(batch) // 2
        for i, r in enumerate(batch):
            gradient[i, r.trained()[0]] = output.logits.grad[i // 2 + half * (i % 2), 0]
        agree(ours(cases, batch, PRESETS["reward_model"]), (loss.item(), gradient))


def test_rlax_estimates_the_same_advantages(cases, rlax):
    """On the trained tokens alone: rlax knows no observations, and takes V of the end as values."""
    algorithm = dataclasses.replace(PRESETS["ppo"], gamma=0.97, lam=0.9)
    estimate = jax.jit(adv.advantages, static_argnums=1)
    for seed in SEEDS:
        batch = cases.random(seed, count=8, empty=False)
        out = estimate(cases.flat(batch, "values", "bootstrap_values"), algorithm)
        for got, r in zip(cases.split(out["advantages"], batch), batch, strict=True):
            trained = r.trained()
            rewards = np.zeros(len(trained), np.float32)
            rewards[-1] = r.reward
            values = np.append(r.values[trained], r.bootstrap if r.truncated else 0.0)
            want = rlax.truncated_generalized_advantage_estimation(
                jnp.asarray(rewards), jnp.full(len(trained), 0.97), 0.9,
                jnp.asarray(values, jnp.float32),
            )  # fmt: skip
            np.testing.assert_allclose(got[trained], want, rtol=1e-5, atol=2e-6)


def test_rlax_computes_the_same_clipped_surrogate(cases, rlax):
    algorithm = variant("lite_ppo")
    for seed in SEEDS:
        batch = cases.random(seed, count=8, empty=False)
        target, proximal, advantages = (
            jnp.asarray(np.concatenate([getattr(r, n)[r.mask] for r in batch]), jnp.float32)
            for n in ("target", "proximal", "advantages")
        )
        surrogate = jax.value_and_grad(
            lambda x, p=proximal, a=advantages: rlax.clipped_surrogate_pg_loss(
                jnp.exp(x - p), a, 0.2
            )
        )
        loss, gradient = surrogate(target)
        mine, slopes = ours(cases, batch, algorithm)
        np.testing.assert_allclose(mine, loss, rtol=1e-5, atol=1e-6)
        slopes = np.concatenate([s[r.mask] for s, r in zip(slopes, batch, strict=True)])
        np.testing.assert_allclose(slopes, gradient, rtol=1e-5, atol=1e-7)
