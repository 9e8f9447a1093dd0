"""The doctor lists what of a user's own is plugged into a run, and where it lies."""

import pytest

from rlx.config import default
from rlx.observe import writers
from rlx.run.run_checks import SEAMS, user_plugins

FILE = """
class Writer:
    def on_step(self, step, record): ...

class Bad:
    def on_setp(self, step, record): ...

bound = Writer()

def score(prompt, completion, prompt_ids, completion_ids): ...
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FILE)
    return default()


def rows(config):
    return [(row.name, row.level, row.result, row.remedy) for row in user_plugins(config)]


def test_what_is_of_rlx_is_not_listed(config):
    assert rows(config) == []


def test_each_thing_is_listed_with_its_place(config, tmp_path):
    config.data.chat_template = "mine.jinja"
    config.reward.terms = (("gsm8k", 1.0), ("mine.py:score", 0.1))
    config.observe.writers = ("tensorboard", "mine.py:Writer", "mine.py:bound")
    config.sandbox.kind = "mine.py:Writer"
    place = f"({tmp_path / 'mine.py'}, line"
    assert rows(config) == [
        ("reward.terms", "ok", f"mine.py:score {place} 10)", ""),
        ("observe.writers", "ok", f"mine.py:Writer {place} 2)", ""),
        ("observe.writers", "ok", f"mine.py:bound {place} 2)", ""),
        ("sandbox.kind", "ok", f"mine.py:Writer {place} 2)", ""),
        ("data.chat_template", "ok", "mine.jinja", ""),
    ]


def test_what_is_wrong_is_a_problem(config, monkeypatch):
    monkeypatch.setattr(writers.importlib.util, "find_spec", lambda name: None)
    config.reward.name = "mine.py:scor"
    config.observe.writers = ("mine.py:Bad", "tensorbord", "wandb")
    found = rows(config)
    assert [(name, level) for name, level, *_ in found] == [
        ("reward.name", "problem"), *[("observe.writers", "problem")] * 3,
    ]  # fmt: skip
    for (*_, text, remedy), word in zip(
        found,
        (
            "did you mean 'score'?",
            "did you mean 'on_step'?",
            "did you mean 'tensorboard'?",
            "'.[wandb]'",
        ),
        strict=True,
    ):
        assert word in text + remedy


def test_the_seams_are_keys_of_a_config():
    config = default()
    missing = [key for key in SEAMS if key.split(".")[1] not in config[key.split(".")[0]]]
    assert missing == []
