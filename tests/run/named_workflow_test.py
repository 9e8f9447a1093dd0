"""rollout.workflow: a class of one's own is built for the run, or refused before it starts."""

import json
import os
from pathlib import Path

import pytest
from ml_collections import ConfigDict

from configs import arithmetic
from rlx.agents.workflow import AgentWorkflow
from rlx.base import UserError
from rlx.config import check
from rlx.run import inputs
from rlx.system.process_supervisor import descendants

AGENTS = Path(__file__).parents[1] / "agents/agent_classes.py"
OWN = """
from rlx.base import Group
from rlx.rollout.workflows import trajectory


class Own:
    def __init__(self, prompts, sampling, depth=1{more}):
        self.prompts, self.sampling, self.depth = prompts, sampling, depth

    async def run(self, fleet, task):
        ids = self.prompts.ids(task.row)
        (done,) = await fleet.generate(ids, self.sampling, 1)
        return Group(task.group_id, (trajectory(ids, done, {reward}, f"{{task.group_id}}.0"),))
"""


@pytest.fixture
def config(tmp_path):
    """One whose rows have no answer."""
    found = arithmetic.get_config()
    rows = [{"question": f"{i}a+1=?"} for i in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found.data.kind, found.data.train = "jsonl", f"{tmp_path}/rows.jsonl"
    return found


def own(config, tmp_path, reward="0.5", more="", kwargs=None):
    (tmp_path / "mine.py").write_text(OWN.format(reward=reward, more=more))
    config.rollout.workflow, config.rollout.workflow_kwargs = f"{tmp_path}/mine.py:Own", kwargs


def refused(config):
    with pytest.raises(UserError) as error:
        inputs.prepare(config)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("kwargs", [{"depth": 3}, '{"depth": 3}', ConfigDict({"depth": 3})])
def test_a_workflow_that_gives_rewards_itself_needs_no_answers_and_no_workers(
    config, tmp_path, kwargs
):
    own(config, tmp_path, kwargs=kwargs)
    check(config)
    found = inputs.prepare(config)
    assert type(found.workflow).__name__ == "Own"
    assert found.workflow.depth == 3
    assert found.workflow.sampling.max_new_tokens == config.sampling.max_new_tokens
    before = descendants(os.getpid())
    found.reward_pool.start()
    assert descendants(os.getpid()) == before
    found.reward_pool.close()


def test_a_workflow_that_is_graded_needs_what_its_reward_needs(config, tmp_path):
    own(config, tmp_path, more=", reward_pool=None")
    assert "the row has no 'answer'" in refused(config)


def test_a_workflow_that_gives_rewards_itself_gets_the_answer_that_was_named(config, tmp_path):
    own(config, tmp_path, reward='float(len(task.row["answer"]))')
    rows = [{"question": f"{i}a+1=?", "total": str(i)} for i in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config.data.answer_key = "total"
    assert inputs.prepare(config).train_rows[3]["answer"] == "3"


def test_terms_that_no_workflow_asks_for_are_refused(config, tmp_path):
    own(config, tmp_path)
    config.reward.terms = (("gsm8k", 1.0), ("model", 0.5))
    assert "reward.terms has gsm8k, and rollout.workflow=" in refused(config)


def test_what_cannot_work_is_one_line_before_anything_starts(config, tmp_path):
    own(config, tmp_path, reward='task.row["good"]')
    said = refused(config)
    assert "mine.py:Own failed in a dry run on row {'question': '0a+1=?'}: KeyError: 'good'" in said
    assert f"({tmp_path}/mine.py, line 13)" in said
    config.rollout.workflow_kwargs = {"dept": 1}
    assert "did you mean 'depth'" in refused(config)
    config.rollout.workflow_kwargs = "[1]"
    assert "rollout.workflow_kwargs='[1]' is not a JSON object" in refused(config)
    config.rollout.workflow = f"{tmp_path}/mine.py:Onw"
    assert "rollout.workflow=" in refused(config)
    assert "did you mean 'Own'" in refused(config)
    config.rollout.workflow = "rlrv"
    assert "did you mean 'rlvr'" in refused(config)


def test_an_agent_class_has_the_run_s_options(config):
    config.rollout.workflow, config.rollout.workflow_kwargs = f"{AGENTS}:Repeat", {"turns": 2}
    config.agents.turn_discount, config.agents.export, config.reward.workers = 0.5, "concat", 3
    found = inputs.prepare(config).workflow
    assert isinstance(found, AgentWorkflow)
    assert found.name.startswith(f"Repeat ({AGENTS.resolve()}, line ")
    options = found._options
    assert (options.turn_discount, options.export, options.workers) == (0.5, "concat", 3)
