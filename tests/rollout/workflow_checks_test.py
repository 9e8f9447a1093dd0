"""A user's workflow that gives what is no group: found without a server, in one line."""

import asyncio
import dataclasses
import re
import threading

import numpy as np
import pytest

from rlx.agents.named_workflow import NamedWorkflow
from rlx.base import Group, UserError
from rlx.fleet.requests import Sampling
from rlx.rollout import workflow_checks
from rlx.rollout.teacher_scores import TeacherScored
from rlx.rollout.workflow_checks import TrajectoryError, checked_group
from rlx.rollout.workflows import Prompts, Task
from rlx.system import threads

ROW = {"question": "20 + 52?", "answer": "72"}
OWN = """
import numpy as np
from rlx.base import Group
from rlx.rollout.workflows import trajectory


class Own:
    def __init__(self, prompts, sampling, n, mistake=""):
        self.prompts, self.sampling, self.n, self.mistake = prompts, sampling, n, mistake

    async def run(self, fleet, task):
        prompt = self.prompts.ids(task.row)
        if self.mistake == "text":
            prompt = self.prompts.text(task.row)
        done = await fleet.generate(prompt, self.sampling, self.n)
        while self.mistake == "never ends":
            await fleet.generate(prompt, self.sampling, 1)
        if self.mistake == "key":
            task.row["solution"]
        if self.mistake == "leaves":
            raise SystemExit(0)
        reward = float("nan") if self.mistake == "nan" else 1.0
        head = np.array(prompt, np.int32)
        name = "0.0" if self.mistake == "ids" else "0.%d"
        ids = [name.replace("%d", str(i)) for i in range(len(done))]
        found = [trajectory(head, d, reward, i) for d, i in zip(done, ids)]
        if self.mistake == "list":
            return found
        return Group(task.group_id + (self.mistake == "group"), tuple(found), task.row)
"""


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    return f"{tmp_path}/own.py:Own"


def line_of(words):
    return 1 + next(i for i, line in enumerate(OWN.splitlines()) if words in line)


def test_a_workflow_that_is_well_passes_without_a_server(own, tokenizer):
    NamedWorkflow(own, {}, Prompts(tokenizer), Sampling(), 3).try_out(ROW)


@pytest.mark.parametrize(
    ("mistake", "said", "at"),
    [
        ("key", "KeyError: 'solution' ", 'task.row["solution"]'),
        ("leaves", "SystemExit: 0 ", "raise SystemExit"),
        ("text", "TypeError: generate takes token ids of a prompt, not '<|user|>", "generate("),
        (
            "nan",
            "gave, for row {'question': '20 + 52?'}, trajectory 0.0 with the reward nan",
            "def run",
        ),
        ("list", "gave, for row {'question': '20 + 52?'}, a list, not a Group", "def run"),
        ("group", "gave, for row {'question': '20 + 52?'}, group 1, not 0", "def run"),
        ("ids", "trajectories ['0.0', '0.0', '0.0'], not of ids", "def run"),
    ],
)
def test_a_mistake_is_one_line_with_file_line_and_row(own, tokenizer, mistake, said, at):
    named = NamedWorkflow(own, {"mistake": mistake}, Prompts(tokenizer), Sampling(), 3)
    with pytest.raises(UserError) as error:
        named.try_out(ROW)
    text = str(error.value)
    assert "\n" not in text
    assert text.startswith(
        f"workflow {own} failed in a dry run on row {{'question': '20 + 52?'}}: "
    )
    assert said in text
    assert f"({own.removesuffix(':Own')}, line {line_of(at)})" in text


def test_a_workflow_that_asks_until_it_is_content_ends_too(own, tokenizer, monkeypatch):
    monkeypatch.setattr(workflow_checks, "DRY_SECONDS", 0.05)
    named = NamedWorkflow(own, {"mistake": "never ends"}, Prompts(tokenizer), Sampling(), 3)
    with pytest.raises(UserError, match=r"TimeoutError: .*own\.py, line \d+\)"):
        named.try_out(ROW)


def test_a_workflow_that_blocks_its_loop_ends_too(monkeypatch):
    monkeypatch.setattr(workflow_checks, "DRY_SECONDS", 0.05)
    monkeypatch.setattr(threads, "CLOSE_SECONDS", 0.05)
    end = threading.Event()

    class Blocks:
        async def run(self, fleet, task):
            end.wait()

    with pytest.raises(UserError, match="TimeoutError"):
        workflow_checks.dry_run(Blocks(), ROW, "blocks", 1)
    end.set()


def changed(**what):
    """A workflow whose trajectory differs from a good one."""

    class Changed:
        def __init__(self, plain):
            self.plain = plain

        async def run(self, fleet, task):
            group = await self.plain.run(fleet, task)
            one = group.trajectories[0]
            given = {k: v(getattr(one, k)) if callable(v) else v for k, v in what.items()}
            return Group(task.group_id, (dataclasses.replace(one, **given),), task.row)

    return Changed


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ({"tokens": list}, "tokens that are not a one-dimensional array"),
        ({"versions": lambda v: v[None]}, "versions that are not a one-dimensional array"),
        ({"loss_mask": lambda m: m[1:]}, "inconsistent shapes: per-token arrays have lengths"),
        ({"loss_mask": lambda m: m | True}, "its first token is trained on"),
        ({"turn_ids": np.zeros(1, np.int32)}, "per-token arrays have lengths [1, "),
        ({"behaviour_logprobs": lambda p: p * np.nan}, "behaviour_logprobs that are not finite"),
        ({"turn_ids": lambda ids: [0]}, "turn_ids that are not a one-dimensional array: '[0]'"),
        ({"reward": "1"}, "the reward '1'; a reward is a finite number"),
        ({"info": {"same": "yes"}}, "info['same'] that is not a number: 'yes'"),
        ({"info": {"same": None}}, "info['same'] that is not a number: 'None'"),
        ({"info": {1: 0.5}}, "info[1] that is not a number: '0.5'"),
        ({"prompt": b"20 + 52?"}, "prompt that is not text: "),
    ],
)
def test_what_cannot_be_trained_on_is_refused_where_it_was_made(
    what, said, fake_workflow, fake_fleet
):
    workflow = changed(**what)(fake_workflow())
    with pytest.raises(TrajectoryError, match=re.escape(said)) as error:
        asyncio.run(checked_group(workflow, fake_fleet(), Task(ROW, 4, 7)))
    assert re.match(r"workflow Changed \(.*_test.py, line \d+\) gave, for row ", str(error.value))


def test_a_workflow_cannot_change_the_row_that_checkpoints_hold(fake_workflow, fake_fleet):
    class Notes:
        async def run(self, fleet, task):
            task.row["seen"] = object()
            task.row["turns"].append("and this?")  # would stay for its next attempt and epoch
            group = await fake_workflow().run(fleet, task)
            return dataclasses.replace(group, row={"seen": task.row["seen"]})

    row = {**ROW, "turns": ["20 + 52?"]}
    assert asyncio.run(checked_group(Notes(), fake_fleet(), Task(row, 4, 7))).row is row
    assert row == {**ROW, "turns": ["20 + 52?"]}


def test_a_teacher_s_wrapper_has_the_name_of_the_workflow_inside(fake_workflow, fake_fleet):
    workflow = TeacherScored(changed(tokens=list)(fake_workflow()), None, 1.0)
    with pytest.raises(TrajectoryError, match=r"workflow Changed \("):
        asyncio.run(checked_group(workflow, fake_fleet(), Task(ROW, 4, 7)))
    small = TeacherScored(fake_workflow(), None, 1.0)
    assert small.name.startswith("FakeWorkflow (")
