"""docs/algorithms.md is what the table of presets says."""

import dataclasses
import importlib.util
from pathlib import Path

import pytest

from rlx.algorithms.algorithm import CHOICES
from rlx.algorithms.presets import PRESETS
from rlx.base import UserError

SCRIPT = Path(__file__).parent.parent.parent / "docs" / "algorithms.py"
spec = importlib.util.spec_from_file_location("algorithms_page", SCRIPT)
docs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(docs)


def said(algorithm):
    return docs.row(algorithm) + docs.section(algorithm)


def test_the_committed_page_is_current():
    assert docs.PAGE.read_text() == docs.page(), "run: python docs/algorithms.py"


@pytest.mark.parametrize("name", PRESETS)
def test_the_page_has_every_preset_with_its_source(name):
    page = docs.PAGE.read_text()
    assert f"| [{name}](#{name}) |" in page
    assert f"### {name}\n\nTrained on " in page
    assert page.count(PRESETS[name].source) >= 2


@pytest.mark.parametrize("name", PRESETS)
def test_what_is_said_of_a_preset_does_not_depend_on_its_name(name):
    renamed = dataclasses.replace(PRESETS[name], name="nonesuch")
    assert docs.section(renamed) == docs.section(PRESETS[name]).replace(
        f"### {name}", "### nonesuch"
    )


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("grpo", {"drop_equal_rewards": True}),
        ("grpo", {"overlong_filter": True}),
        ("grpo", {"overlong_buffer": 512.0}),
        ("dapo", {"overlong_buffer": 0.5}),
        ("dapo", {"overlong_factor": 2.0}),
        ("grpo", {"reward_mean": "batch"}),
        ("grpo", {"reward_std": "none"}),
        ("grpo", {"leave_one_out": True}),
        ("grpo", {"peers": "turn"}),
        ("reinforce_pp", {"kl_anchor": "teacher"}),
        ("reinforce_pp", {"kl_placement": "loss"}),
        ("reinforce_pp", {"kl_estimator": "k3"}),
        ("reinforce_pp", {"kl_coefficient": 0.5}),
        ("reinforce_pp", {"kl_target": 6.0}),
        ("grpo", {"critic": True}),
        ("ppo", {"gamma": 0.9}),
        ("ppo", {"lam": 0.9}),
        ("grpo", {"advantage_mean": "batch"}),
        ("grpo", {"advantage_std": "group"}),
        ("grpo", {"proximal": "behaviour"}),
        ("grpo", {"decoupled": False}),
        ("grpo", {"weight_level": "sequence"}),
        ("grpo", {"weight_action": "truncate"}),
        ("grpo", {"weight_action": "none"}),
        ("grpo", {"weight_statistic": "k2"}),
        ("grpo", {"weight_upper": 2.0}),
        ("grpo", {"weight_lower": 0.5}),
        ("m2po", {"second_moment_clip": 0.1}),
        ("m2po_areal", {"second_moment": 0.1}),
        ("grpo", {"loss": "sapo"}),
        ("grpo", {"loss": "reinforce"}),
        ("grpo", {"loss": "cispo"}),
        ("grpo", {"reward_std": "mean"}),
        ("grpo", {"ratio_level": "sequence_token"}),
        ("dppo", {"divergence": "kl"}),
        ("grpo", {"ratio_level": "sequence"}),
        ("grpo", {"clip_low": 0.1}),
        ("grpo", {"clip_high": 0.3}),
        ("grpo", {"dual_clip": 3.0}),
        ("sapo", {"sapo_positive": 2.0}),
        ("sapo", {"sapo_negative": 2.0}),
        ("ppo", {"value_clip": 0.0}),
        ("dpo", {"pair_beta": 0.2}),
        ("grpo", {"entropy_coefficient": 0.01}),
        ("grpo", {"reduction": "prompt_mean"}),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_a_changed_field_changes_what_is_said(name, changes):
    row = PRESETS[name]
    assert said(dataclasses.replace(row, **changes)) != said(row)


@pytest.mark.parametrize("field", CHOICES)
def test_an_unknown_choice_is_an_error(field):
    for name in ("grpo", "dpo", "sft"):
        row = dataclasses.replace(PRESETS[name], **{field: "nonesuch"})
        with pytest.raises(UserError, match=f"unknown algorithm.{field} 'nonesuch'"):
            said(row)


@pytest.mark.parametrize("loss", CHOICES["loss"])
def test_the_equation_of_a_loss_is_that_of_the_function_that_computes_it(loss, monkeypatch):
    row = dataclasses.replace(PRESETS["grpo"], loss=loss)
    words = docs.equation(docs.LOSSES[loss])
    assert f"| `loss` | {loss} | `{words}` |" in docs.section(row)
    monkeypatch.setitem(docs.LOSSES, loss, lambda z, algorithm: z)  # no docstring
    with pytest.raises(UserError, match="has no equation"):
        docs.section(row)
    monkeypatch.delitem(docs.LOSSES, loss)
    with pytest.raises(UserError, match=f"unknown algorithm.loss '{loss}'"):
        docs.section(row)


@pytest.mark.parametrize("field", ["loss", *docs.BY_CHOICE])
def test_every_choice_with_an_equation_has_one_of_its_own(field):
    functions = [docs.BY_CHOICE.get(field)] * len(CHOICES[field])
    if field == "loss":
        words = [docs.equation(docs.LOSSES[choice]) for choice in CHOICES[field]]
    else:
        pairs = zip(functions, CHOICES[field], strict=True)
        words = [docs.equation(function, choice) for function, choice in pairs]
    assert len(set(words)) == len(words)
    assert "\n" not in "".join(words)


def test_a_choice_without_a_line_in_the_docstring_is_an_error():
    with pytest.raises(UserError, match="loss_weights has no equation nonesuch"):
        docs.equation(docs.BY_CHOICE["reduction"], "nonesuch")


def test_a_mean_over_pairs_is_not_said_to_be_one_over_sequences():
    assert "| `1 / n_seq / pairs` |" in docs.section(PRESETS["ipo"])
    assert "sequences" not in docs.section(PRESETS["dpo"])


def test_sapo_is_held_against_the_behaviour_policy_as_a_run_has_it():
    sapo = next(a for a in docs.ROWS if a.name == "sapo")
    assert "| `proximal` | behaviour |" in docs.section(sapo)
