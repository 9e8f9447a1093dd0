"""Every key keeps its type, its default and the values that it accepts."""

import json
import re
from pathlib import Path

import pytest
from ml_collections import ConfigDict

from rlx import config as module
from rlx.base import UserError
from rlx.fleet.requests import Sampling
from rlx.option import read_options

# section → key → type, default, and the range or choices where it has them
SECTIONS = json.loads((Path(__file__).parent / "fixtures" / "config_keys.json").read_text())
KEYS = {
    f"{part}.{k}".lstrip("."): row for part, keys in SECTIONS.items() for k, row in keys.items()
}


def rows(tree: ConfigDict, prefix: str = ""):
    for key in tree:
        if isinstance(tree[key], ConfigDict):
            yield from rows(tree[key], f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", [tree.get_type(key).__name__, tree[key]]


def test_every_key_has_its_type_and_default():
    found = json.loads(json.dumps(dict(rows(module.default()))))
    assert found == {key: row[:2] for key, row in KEYS.items()}


def refusal(key: str, value: object) -> str:
    """Return the error of a config in which `key` has `value`; empty without one."""
    config = module.default().unlock()
    config.model.path = "rlx:arithmetic"
    section, _, name = key.rpartition(".")
    place = config
    for part in filter(None, section.split(".")):
        place = place[part]
    place[name] = type(place[name])(value)
    try:
        module.check(config)
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("key", [key for key, row in KEYS.items() if len(row) > 2])
def test_a_key_accepts_its_values_and_no_others(key):
    kind, _, values = KEYS[key]
    if kind == "str":
        assert f"unknown {key} 'nonesuch'" in refusal(key, "nonesuch")
        assert not [value for value in values if f"unknown {key}" in refusal(key, value)]
        return
    low, _, high = values.strip("()[]").partition(", ")
    outside, inside = [float(low) - 1], []
    (outside if values[0] == "(" else inside).append(float(low))
    if kind == "float" and high:
        (inside if values[-1] == "]" else outside).append(float(high))
        outside.append(float("nan"))
    for value in outside:
        assert refusal(key, value).startswith(f"{key}="), value
    for value in inside:  # what other keys refuse it for has other words
        assert not re.match(
            rf"{key}=\S+ (is below {low};|must be (in|finite))", refusal(key, value)
        )


@pytest.mark.parametrize(
    "sets", [("easy.jsonl",), (("easy", "a.jsonl"), ("easy", "b.jsonl")), (("a/b", "a.jsonl"),)]
)
def test_held_out_sets_are_pairs_each_name_once(sets):
    assert refusal("eval.sets", sets).startswith(f"eval.sets={sets!r}; write (name, source) pairs")
    assert not refusal("eval.sets", (("easy", "a.jsonl"), ("hard", "b.jsonl")))


def test_a_name_that_two_sections_have_must_be_given():
    rooms = {"seed": 1}, {"seed": 2, "top_k": 3}
    with pytest.raises(ValueError, match="seed of Sampling is a key of several sections"):
        read_options(Sampling, *rooms)
    found = read_options(Sampling, *rooms, seed=4)
    assert (found.seed, found.top_k) == (4, 3)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("train.row_buckets", ("abc",), "train.row_buckets has 'abc'; write whole numbers"),
        ("train.row_buckets", (), "exceeds the longest train.row_buckets entry 0"),
        ("fleet.addresses", (5,), "fleet.addresses has 5; write texts"),
        ("reward.terms", ("abc", 1.0), "reward.terms has 'abc'; write pairs, as (('a', 1),) with"),
        ("sampling.temperature", float("nan"), "sampling.temperature=nan must be above 0"),
        ("rollout.workflow_kwargs", {"rewards": (1.0, 0.6)}, ""),
    ],
)
def test_a_tuple_has_entries_of_its_kind(key, value, words):
    config = module.default().unlock()
    config.model.path = "rlx:arithmetic"
    config.update_from_flattened_dict({key: value})
    if not words:
        return module.check(config)
    with pytest.raises(UserError, match=re.escape(words)):
        module.check(config)


def test_both_trainers_take_compile():
    config = module.default()
    config.model.path, config.train.compile = "rlx:arithmetic", True
    module.check(config)


@pytest.mark.parametrize(
    ("key", "value"), [("seed", -1), ("seed", 1 << 32), ("online.port", 65536)]
)
def test_what_would_fail_in_the_middle_of_a_start_is_refused(key, value):
    config = module.default()
    config.model.path = "rlx:arithmetic"
    config.update_from_flattened_dict({key: value})
    with pytest.raises(UserError, match=f"{key}=.* must be in"):
        module.check(config)


@pytest.mark.parametrize(
    ("key", "value"),
    [*((f"{x}.addresses", ("far:8001",)) for x in ("fleet", "teacher", "reward.model")),
     ("observe.metrics_host", "0.0.0.0")],
)  # fmt: skip
def test_who_is_elsewhere_may_have_certificates(key, value):
    """A teacher elsewhere, or Prometheus, needs them, and with local servers they were refused."""
    config = module.default()
    config.model.path, config.fleet.tls.ca = "rlx:arithmetic", "ca.pem"
    with pytest.raises(UserError, match=r"fleet.tls.ca=ca.pem without fleet.addresses"):
        module.check(config)
    config.update_from_flattened_dict({key: value})
    module.check(config)


def test_a_guide_and_updates_that_abort_are_refused():
    """Each update failed the attempts at all answers under way, until their rows were skipped."""
    config = module.default()
    config.model.path, config.sampling.guide = "rlx:arithmetic", '{"type": "integer"}'
    module.check(config)
    config.fleet.kv_on_update = "abort"
    with pytest.raises(UserError, match=r"kv_on_update=abort with sampling\.guide"):
        module.check(config)


@pytest.mark.parametrize(("key", "value"), [("samples", 4), ("sets", (("easy", "a.jsonl"),))])
def test_answers_to_held_out_questions_need_servers(key, value):
    config = module.default()
    config.model.path, config.eval[key] = "rlx:arithmetic", value
    module.check(config)
    config.fleet.num_servers = 0
    with pytest.raises(UserError, match=f"eval.{key}=.* do nothing without servers"):
        module.check(config)
