"""Hooks are told what happens, each with a record of its own; one that fails is off, and said."""

import pytest

from rlx.base import UserError
from rlx.observe.hooks import METHODS, Hooks
from rlx.observe.metrics import MetricsWriter


class Notes:
    """Takes down what it is told; `fails` names methods that raise."""

    def __init__(self, *fails):
        self.told, self.fails = [], fails

    def _note(self, method, *arguments):
        if method in self.fails:
            raise ZeroDivisionError("mine")
        self.told.append((method, *arguments))


for _name in METHODS:
    setattr(Notes, _name, lambda self, *arguments, name=_name: self._note(name, *arguments))


def test_each_hook_gets_a_record_that_it_may_keep_and_change(tmp_path):
    class Spoils:
        def on_step(self, step, record):
            record.clear()

    notes = Notes()
    hooks = Hooks([("spoils", Spoils()), ("notes", notes)], pytest.fail)
    hooks.begin({"total_steps": 2}, tmp_path, 0)
    writer = MetricsWriter(tmp_path, hooks)
    writer.write(
        "metrics.jsonl", {"step": 1, "task_reward": 0.5, "seconds": {"wait": float("nan")}}
    )
    writer.write("eval.jsonl", {"step": 1, "greedy_acc": 1.0})
    writer.write("gate.jsonl", {"step": 1, "ok": True})
    hooks.tell("on_checkpoint", 1, tmp_path / "checkpoints")
    hooks.end("finished")
    hooks.end("failed")
    assert notes.told == [
        ("on_begin", {"total_steps": 2}, tmp_path, 0),
        ("on_step", 1, {"step": 1, "task_reward": 0.5, "seconds": {"wait": None}}),
        ("on_eval", 1, {"step": 1, "greedy_acc": 1.0}),
        ("on_gate", 1, {"step": 1, "ok": True}),
        ("on_checkpoint", 1, tmp_path / "checkpoints"),
        ("on_end", "finished"),
    ]


def test_a_hook_that_fails_is_said_once_and_called_no_more(tmp_path, caplog):
    caplog.set_level("DEBUG", logger="rlx")  # as --traceback does
    said, bad, good = [], Notes("on_step"), Notes()
    hooks = Hooks([("mine.py:bad", bad), ("good", good)], said.append)
    hooks.begin({}, tmp_path, 0)
    for step in (1, 2):
        hooks.tell("on_step", step, {})
    hooks.end("finished")
    assert [each[0] for each in bad.told] == ["on_begin"]
    assert [each[0] for each in good.told] == ["on_begin", "on_step", "on_step", "on_end"]
    (line,) = said
    assert line.startswith("mine.py:bad: on_step fails and the hook is called no more, the run")
    assert "ZeroDivisionError: mine" in line
    assert "hooks_test.py, line " in line
    assert caplog.text.count("Traceback") == 1
    assert "in _note" in caplog.text


def test_a_hook_that_exits_does_not_end_the_run(tmp_path):
    class Leaves:
        def on_step(self, step, record):
            raise SystemExit(3)

    said = []
    hooks = Hooks([("mine.py:Leaves", Leaves())], said.append)
    hooks.begin({}, tmp_path, 0)
    hooks.tell("on_step", 1, {})
    assert "SystemExit: 3" in said[0]


def test_a_hook_that_cannot_begin_ends_the_run_and_those_that_have(tmp_path):
    first, second, third = Notes(), Notes("on_begin"), Notes()
    hooks = Hooks([("first", first), ("second", second), ("third", third)], pytest.fail)
    with pytest.raises(UserError, match=r"second: on_begin fails: .*hooks_test\.py, line "):
        hooks.begin({}, tmp_path, 0)
    hooks.end("failed")
    assert first.told[-1] == ("on_end", "failed")
    assert second.told == third.told == []


class Misspelt:
    def on_stpe(self, step, record): ...


class Short:
    def on_step(self, step): ...


class Async:
    async def on_eval(self, step, record): ...


class Whatever:
    def on_step(self, *arguments, **more): ...


@pytest.mark.parametrize(
    ("hook", "error"),
    [
        (Misspelt(), "unknown method of mine 'on_stpe'; did you mean 'on_step'"),
        (Short(), r"on_step: too many positional arguments; it is called as on_step\(step, record"),
        (Async(), r"on_eval is async and nobody awaits it; write `def on_eval\(step, record\)`"),
        (print, "mine is no hook; give it some of on_begin, on_step, on_eval"),
    ],
)
def test_what_is_no_hook_is_said_before_anything_starts(hook, error):
    Hooks([("mine", Whatever())])
    with pytest.raises(UserError, match=error):
        Hooks([("mine", hook)])
