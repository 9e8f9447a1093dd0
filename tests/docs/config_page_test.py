"""The reference of the config names every key, and says of it what the checks go by."""

import importlib.util
import inspect
from pathlib import Path

import pytest

from rlx import config as module
from rlx.base import UserError
from rlx.cli.flags import leaves
from rlx.train.optimizer_options import OptimizerOptions

SCRIPT = Path(__file__).parents[2] / "docs" / "config_page.py"
spec = importlib.util.spec_from_file_location("config_page", SCRIPT)
docs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(docs)


def test_every_key_has_a_row_in_its_part():
    page, rows = docs.page(), {}
    for part in page.split("\n## "):
        head = part.split("\n")[0] + "." if not part.startswith("# ") else ""
        rows |= {head + line.split("`")[1]: line for line in part.split("\n") if line[:3] == "| `"}
    keys = set(dict(leaves(module.default())))
    assert set(rows) == keys - {"observe.tensorboard"}, "which is gone, and says so"
    assert "| `max_staleness` | `2` | ≥ 0 | η: versions; 0 is synchronous training |" in page
    assert "| `top_p` | `1.0` | 0 … 1, 0 excluded |" in rows["sampling.top_p"]


@pytest.mark.parametrize("key", ["c.rollout.max_staleness = 2", "c.fleet = ConfigDict()"])
def test_a_key_without_words_is_named(key, monkeypatch):
    source = inspect.getsource(module.default)
    line = next(line for line in source.splitlines() if key in line)
    bare = source.replace(line, line.split("  # ")[0])
    monkeypatch.setattr(inspect, "getsource", lambda function: bare)
    named = key.split(" ")[0].removeprefix("c.")
    with pytest.raises(ValueError, match=f"rlx/config.py says nothing of {named};"):
        docs.page()


@pytest.fixture
def config():
    made = module.default()
    made.model.path = "rlx:arithmetic"
    module.check(made)
    return made.unlock()


def put(config, key, value):
    """Set a key to a value of its type."""
    *parts, name = key.split(".")
    for part in parts:
        config = config[part]
    config[name] = type(config[name])(value)


@pytest.mark.parametrize("key", module.CHOICES)
def test_a_choice_that_is_not_told_is_refused(key, config):
    put(config, key, "nonesuch")
    with pytest.raises(UserError, match=f"unknown {key} 'nonesuch'"):
        module.check(config)


@pytest.mark.parametrize("key", module.RANGES)
def test_a_number_outside_of_what_is_told_is_refused(key, config):
    interval = module.RANGES[key]
    low, _, high = interval.strip("()[]").partition(", ")
    outside = [float(low) - 1] + [float(low)] * (interval[0] == "(")
    outside += [float(high)] * (interval[-1] == ")") + [float("nan")] if high else []
    for value in outside:
        put(config, key, value)
        with pytest.raises(UserError, match=rf"^{key}="):
            module.check(config)


@pytest.mark.parametrize("name", [name for name in docs.OF_OPTIMIZER if name != "name"])
def test_what_is_told_of_the_optimizer_is_what_it_takes(name):
    with pytest.raises(UserError, match=f"optimizer.{name}="):
        OptimizerOptions(**{name: -1.0})
    if "excluded" in docs.OF_OPTIMIZER[name]:
        with pytest.raises(UserError, match=f"optimizer.{name}="):
            OptimizerOptions(**{name: 1.0})
