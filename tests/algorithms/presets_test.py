"""The preset table, overrides, and the errors that explain what cannot work."""

import math

import pytest

from rlx import config as rlx_config
from rlx.algorithms.algorithm import CHOICES, FIELDS
from rlx.algorithms.presets import ACTS, PRESETS, resolve
from rlx.base import UserError


def overrides(**values):
    c = rlx_config.default().algorithm
    for name, value in values.items():
        c[name] = value
    return c


def test_grpo_is_the_papers():
    a = PRESETS["grpo"]
    assert (a.reward_mean, a.reward_std, a.leave_one_out) == ("group", "group", False)
    assert (a.clip_low, a.clip_high, a.reduction) == (0.2, 0.2, "sequence_mean_token_mean")
    # Standardising advantages over the batch once more would undo the group's scale.
    assert (a.advantage_mean, a.advantage_std) == ("none", "none")


# What sets each apart, by its paper; whatever a row does not name here is "none", 0 or False.
PAPERS = {
    "ppo": {"critic": True, "lam": 0.95, "reduction": "token_mean"},
    "grpo": {"reward_mean": "group", "reward_std": "group",
             "reduction": "sequence_mean_token_mean"},
    "dr_grpo": {"reward_mean": "group", "reduction": "constant"},
    "dapo": {"reward_mean": "group", "reward_std": "group", "clip_high": 0.28,
             "drop_equal_rewards": True, "overlong_buffer": 0.2, "reduction": "token_mean"},
    "rloo": {"reward_mean": "group", "leave_one_out": True, "loss": "reinforce",
             "reduction": "sequence_mean_token_sum"},
    "reinforce_pp": {"advantage_mean": "batch", "advantage_std": "batch",
                     "kl_placement": "reward", "kl_estimator": "k1", "kl_coefficient": 1e-3,
                     "reduction": "token_mean"},
    "reinforce_pp_baseline": {"reward_mean": "group", "advantage_mean": "batch",
                              "advantage_std": "batch", "kl_placement": "loss",
                              "kl_estimator": "k2", "kl_coefficient": 1e-3,
                              "reduction": "token_mean"},
    "rae": {"running_mean": 0.95, "loss": "reinforce", "reduction": "sequence_mean_token_sum"},
    "gspo": {"reward_mean": "group", "reward_std": "group", "ratio_level": "sequence",
             "clip_low": 3e-4, "clip_high": 4e-4, "reduction": "sequence_mean_token_mean"},
    "sapo": {"reward_mean": "group", "reward_std": "group", "loss": "sapo",
             "sapo_positive": 1.0, "sapo_negative": 1.05, "decoupled": False,
             "reduction": "sequence_mean_token_mean"},
    "lite_ppo": {"reward_mean": "group", "reward_std": "batch", "reduction": "token_mean"},
    "m2po": {"reward_mean": "group", "reward_std": "group", "second_moment_clip": 0.04,
             "clip_low": 0.3, "clip_high": 0.5, "decoupled": False, "reduction": "token_mean"},
    "m2po_areal": {"reward_mean": "group", "reward_std": "group", "second_moment": 0.04,
                   "clip_low": 1.0, "clip_high": math.inf, "weight_action": "none",
                   "reduction": "token_mean"},
    "maxrl": {"reward_mean": "group", "reward_std": "mean", "reduction": "token_mean"},
    "cispo": {"reward_mean": "group", "reward_std": "group", "loss": "cispo", "decoupled": False,
              "clip_low": 1.0, "clip_high": 4.0, "reduction": "token_mean"},
    "gmpo": {"reward_mean": "group", "reward_std": "group", "loss": "gmpo",
             "clip_low": 1 - math.exp(-0.4), "clip_high": math.exp(0.4) - 1,
             "reduction": "sequence_mean_token_mean"},
    "dppo": {"reward_mean": "group", "reward_std": "group", "loss": "dppo", "clip_low": 0.15,
             "clip_high": 0.15, "weight_action": "truncate", "weight_upper": 20.0,
             "reduction": "token_mean"},
    "sft": {"loss": "nll", "reduction": "token_mean"},
    "reward_model": {"loss": "bradley_terry"},
    "dpo": {"loss": "dpo", "reduction": "sequence_mean_token_sum", "pair_beta": 0.1},
    "ipo": {"loss": "ipo", "reduction": "sequence_mean_token_mean", "pair_beta": 0.1},
    "distill": {"reward_scale": 0.0, "kl_anchor": "teacher", "kl_placement": "reward",
                "kl_estimator": "k1", "kl_coefficient": 1.0, "gamma": 0.0,
                "reduction": "token_mean"},
    "distill_mixed": {"reward_mean": "group", "reward_std": "group", "kl_anchor": "teacher",
                      "kl_placement": "loss", "kl_estimator": "k2", "kl_coefficient": 5e-3,
                      "reduction": "sequence_mean_token_mean"},
}  # fmt: skip
OTHERWISE = {
    "critic": False, "reward_mean": "none", "reward_std": "none", "leave_one_out": False,
    "running_mean": 0.0,
    "advantage_mean": "none", "advantage_std": "none", "kl_placement": "none", "loss": "clip",
    "ratio_level": "token", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": 0.0,
    "drop_equal_rewards": False, "overlong_filter": False, "overlong_buffer": 0.0,
    "second_moment": 0.0, "second_moment_clip": 0.0, "decoupled": True, "gamma": 1.0, "lam": 1.0,
    "peers": "prompt",
    "kl_anchor": "reference", "kl_coefficient": 0.0, "kl_target": 0.0, "reward_bias": 0.0,
    "reward_scale": 1.0, "reward_clip": math.inf, "bootstrap_truncated": True, "value_clip": 0.5,
    "proximal": "recompute", "weight_action": "mask", "weight_upper": 5.0,
    "entropy_coefficient": 0.0, "divergence": "tv", "advantage": "gae",
}  # fmt: skip


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_its_papers_row(name):
    """The reference system standardises every one of them over the batch once more."""
    for field, value in {**OTHERWISE, **PAPERS[name]}.items():
        assert getattr(PRESETS[name], field) == value, field


def test_dapos_soft_zone_is_a_fifth_of_the_limit():
    """4096 of 20480 tokens in the paper; a count of tokens stays one."""
    assert resolve(overrides(preset="dapo"), 20_480).overlong_buffer == 4096
    assert resolve(overrides(preset="dapo", overlong_limit=100), 20_480).overlong_buffer == 20
    assert resolve(overrides(preset="dapo", overlong_buffer=7.0), 20_480).overlong_buffer == 7


def test_every_field_is_declared_once_and_is_a_key_of_its_type():
    config = rlx_config.default().algorithm
    assert set(config) == {*FIELDS, "preset"}
    for name, field in FIELDS.items():
        assert config.get_type(name) is field.type, name
        assert isinstance(field.default, field.type), name
        assert field.metadata["doc"], name
        assert (name in CHOICES) == (field.type is str and name != "loss_kwargs"), name
        assert (field.metadata["values"][:1] == "[") == (field.type in (int, float)), name


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_resolves_and_is_hashable(name):
    a = resolve(overrides(preset=name), max_new_tokens=77)
    assert hash(a) == hash(resolve(overrides(preset=name), max_new_tokens=77))
    assert a.name == name
    assert a.source.startswith("https://arxiv.org/abs/")
    assert (a.overlong_limit, a.constant_length) == (77, 77)


def test_an_override_replaces_one_field():
    a = resolve(overrides(clip_high=0.28, reduction="constant", constant_length=9), 77)
    assert (a.clip_low, a.clip_high, a.constant_length) == (0.2, 0.28, 9)


def test_not_decoupled_is_plain_ppo_unless_recomputing_is_asked_for():
    assert resolve(overrides(decoupled=False), 8).proximal == "behaviour"
    assert resolve(overrides(decoupled=False, proximal="recompute"), 8).proximal == "recompute"


def test_when_a_proximal_pass_is_due():
    a = resolve(overrides(), 8)
    assert not a.needs_proximal_pass(1)
    assert a.needs_proximal_pass(2)
    assert resolve(overrides(preset="reinforce_pp"), 8).needs_proximal_pass(1)
    assert not resolve(overrides(proximal="loglinear"), 8).needs_proximal_pass(4)
    assert not a.needs_reference
    assert resolve(overrides(preset="reinforce_pp_baseline"), 8).needs_reference


def test_an_unknown_preset_suggests_the_nearest():
    with pytest.raises(UserError, match=r"unknown algorithm.preset 'gropo'; did you mean 'grpo'\?"):
        resolve(overrides(preset="gropo"), 8)


@pytest.mark.parametrize("field", CHOICES)
def test_an_unknown_choice_names_its_key(field):
    with pytest.raises(UserError, match=f"unknown algorithm.{field} 'nonesuch'"):
        resolve(overrides(**{field: "nonesuch"}), 8)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"gamma": 1.5}, "algorithm.gamma=1.5"),
        ({"clip_low": -0.1}, "algorithm.clip_low=-0.1"),
        ({"kl_coefficient": math.nan}, "algorithm.kl_coefficient=nan"),
        ({"dual_clip": 0.5}, "algorithm.dual_clip=0.5"),
        ({"overlong_buffer": 9}, "algorithm.overlong_buffer=9"),
        ({"weight_lower": 6.0}, "algorithm.weight_lower=6.0"),
        ({"weight_level": "sequence"}, "set algorithm.weight_upper"),
        ({"weight_statistic": "k2"}, "set algorithm.weight_upper"),
        ({"weight_statistic": "k2", "weight_action": "truncate"}, "use weight_action=mask"),
        ({"weight_action": "truncate", "weight_upper": -1.0}, "must be above 0"),
        ({"leave_one_out": True, "reward_mean": "none"}, "set algorithm.reward_mean"),
        ({"weight_upper": math.nan}, "algorithm.weight_upper=nan"),
        ({"reward_scale": math.nan}, "algorithm.reward_scale=nan"),
        ({"dual_clip": math.nan}, "algorithm.dual_clip=nan"),
        ({"kl_placement": "loss"}, "kl_placement=loss with kl_coefficient=0"),
        (
            {"kl_placement": "loss", "kl_coefficient": 0.0, "kl_target": 0.1},
            "set algorithm.kl_coefficient",
        ),
        (
            {"kl_coefficient": 0.04},
            r"kl_coefficient=0.04 has no effect \(grpo\); it needs .*"
            r"kl_placement=reward\|loss: set that, or leave kl_coefficient unset$",
        ),
        ({"kl_target": 0.1}, r"kl_target=0.1 has no effect \(grpo\); .*kl_placement=reward"),
        ({"weight_upper": 1.0}, "weight_upper=1.0 masks every token that is on policy"),
        ({"weight_statistic": "k2", "weight_upper": 0.0}, "whose k2 is 0; set it above 0"),
        ({"weight_statistic": "k1", "weight_upper": -0.5}, "whose k1 is 0; set it above 0"),
        ({"weight_lower": 1.0}, "set it between 0 and 1, or leave it unset"),
        ({"weight_lower": 0.0}, "set it between 0 and 1, or leave it unset"),
        ({"weight_lower": 0.0, "weight_action": "truncate"}, "set it between 0 and 1"),
        ({"weight_statistic": "k1", "weight_upper": 1.0, "weight_lower": 0.5}, "between -inf and"),
        ({"weight_statistic": "k3", "weight_upper": 1.0, "weight_lower": 0.5}, "leave it unset"),
        ({"reward_mean": "none", "reward_std": "mean"}, "reward_std=mean divides by a mean"),
        ({"kl_anchor": "teacher"}, "kl_anchor=teacher without a KL term"),
        ({"second_moment": 0.04, "proximal": "loglinear"}, "set proximal=recompute"),
        ({"second_moment": 0.04, "decoupled": False}, "set proximal=recompute"),
        ({"second_moment_clip": 0.04}, "set loss=clip, proximal=behaviour, decoupled=False"),
        ({"preset": "cispo", "second_moment_clip": 0.04}, "got loss=cispo"),
        (
            {"preset": "dpo", "kl_placement": "loss", "kl_coefficient": 0.1},
            "kl_placement=loss is for rollouts; loss=dpo trains on pairs: set it to none",
        ),
        ({"preset": "sft", "critic": True}, "critic=True is for rollouts"),
        ({"preset": "sft", "second_moment": 0.1}, "second_moment=0.1 is for rollouts"),
        ({"preset": "ipo", "drop_equal_rewards": True}, "drop_equal_rewards=True is for rollouts"),
    ],
)
def test_what_cannot_work_is_explained(values, words):
    with pytest.raises(UserError, match=words):
        resolve(overrides(**values), 8)


@pytest.mark.parametrize(
    ("values", "needs"),
    [
        ({"sapo_positive": 2.0}, "loss=sapo"),
        ({"loss_kwargs": '{"largest": 4}'}, "loss=FILE.py:name"),
        ({"value_clip": 0.2}, "critic=True"),
        ({"divergence": "kl"}, "loss=dppo"),
        ({"bootstrap_truncated": True}, "critic=True"),
        ({"preset": "sapo", "clip_high": 0.3}, "loss=clip"),
        ({"preset": "rloo", "clip_low": 0.1}, "loss=clip"),
        ({"preset": "rloo", "dual_clip": 3.0}, "loss=clip"),
        (
            {"preset": "rloo", "proximal": "loglinear"},
            "loss=clip|sapo|cispo|gmpo|FILE.py:name or kl_placement=reward",
        ),
        ({"kl_estimator": "k2"}, "kl_placement=reward|loss"),
        ({"kl_horizon": 9}, "kl_placement=reward|loss"),
        ({"preset": "reinforce_pp", "kl_horizon": 9}, "kl_target above 0"),
        ({"constant_length": 100}, "reduction=constant"),
        ({"overlong_factor": 2.0}, "overlong_buffer above 0"),
        ({"decoupled": False, "weight_upper": 3.0}, "decoupled=True"),
        ({"preset": "sapo", "weight_action": "truncate"}, "decoupled=True"),
        ({"preset": "m2po_areal", "weight_upper": 3.0}, "weight_action=mask|truncate"),
        ({"weight_aggregate": "sum"}, "weight_level=sequence"),
        (
            {"preset": "rloo", "decoupled": False, "ratio_level": "sequence"},
            "loss=clip|sapo|cispo|gmpo|FILE.py:name or d",
        ),
        ({"preset": "ppo", "peers": "turn"}, "reward_mean=group or reward_std=group or adv"),
        ({"pair_beta": 0.3}, "loss=dpo|ipo"),
        ({"preset": "dpo", "clip_low": 0.1}, "loss=clip|sapo|reinforce"),
        ({"preset": "sft", "entropy_coefficient": 0.1}, "loss=clip|sapo|reinforce"),
        ({"preset": "dpo", "weight_upper": 3.0}, "loss=clip|sapo|reinforce"),
        ({"preset": "sft", "kl_anchor": "reference"}, "kl_placement=reward|loss or loss=dpo|ipo"),
    ],
    ids=str,
)
def test_an_override_that_acts_on_nothing_names_what_would_make_it_act(values, needs):
    field, value = list(values.items())[-1]
    with pytest.raises(UserError) as raised:
        resolve(overrides(**values), 8)
    begin, _, end = str(raised.value).partition(" has no effect (")
    assert begin == f"algorithm.{field}={value}"
    assert f"; it needs algorithm.{needs}" in end


@pytest.mark.parametrize("field", sorted({f for fields, _ in ACTS for f in fields}))
def test_the_table_of_what_acts_names_fields(field):
    assert any(name == field or name.startswith(field) for name in FIELDS), field


def test_what_asks_for_nothing_passes():
    resolve(overrides(preset="sapo", dual_clip=0.0, value_clip=0.0, critic=False), 8)
    resolve(overrides(decoupled=False, weight_action="none"), 8)
    truncated = overrides(weight_action="truncate", weight_upper=1.0, weight_lower=0.5)
    assert resolve(truncated, 8).weight_upper == 1  # V-trace's own bound


def test_rejecting_equal_rewards_needs_something_to_compare():
    with pytest.raises(UserError, match=r"n_samples=1 .* raise n_samples"):
        resolve(overrides(preset="dapo"), 8, n_samples=1)


@pytest.mark.parametrize("name", PRESETS)
def test_one_sample_a_prompt_is_refused_where_it_would_be_compared_with_itself(name):
    row = PRESETS[name]
    if row.reward_mean == "group":
        with pytest.raises(UserError, match=r"n_samples=1 .* raise n_samples"):
            resolve(overrides(preset=name), 8, n_samples=1)
    else:
        assert resolve(overrides(preset=name), 8, n_samples=1).name == name


def test_a_kl_term_may_be_weighed_by_zero_or_switched_off_whole():
    """Its divergence is then recorded, at the cost of the reference; or see gsm8k.py:grpo."""
    watched = resolve(overrides(kl_placement="loss", kl_coefficient=0.0), 8)
    assert (watched.needs_reference, watched.kl_coefficient) == (True, 0.0)
    assert not resolve(overrides(kl_placement="none", kl_coefficient=0.04), 8).needs_anchor
