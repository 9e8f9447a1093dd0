"""`python -m rlx.evaluate --workflow=`: agents and workflows scored by the command."""

import subprocess
from types import SimpleNamespace

import pytest

from rlx.agents import loading, named_workflow
from rlx.agents.agent_options import AgentOptions
from rlx.agents.named_workflow import NamedWorkflow
from rlx.agents.workflow import AgentWorkflow, with_messages
from rlx.base import UserError
from rlx.evaluation import sample_files
from rlx.fleet.requests import Sampling
from rlx.rewards.reward_pool import RewardPool
from rlx.rollout.episode import MultiTurn
from rlx.rollout.workflows import RLVR, Prompts
from rlx.system.jsonl import read_jsonl
from tests.fixtures.commands import without_torch

VOTE = "experiments/2026-11-agents/vote.py:Vote"


def evaluate(*flags):
    command = [*without_torch("rlx.evaluate"), "--config=configs/arithmetic.py", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_an_agent_is_evaluated_and_continued_like_any_workflow(tmp_path):
    flags = (
        "--datasets=arithmetic", "--limit=3", "--n_samples=4", "--pass_at=4", "--maj_at=2",
        "--max_gen_tokens=48", f"--output={tmp_path}", f"--workflow={VOTE}",
    )  # fmt: skip
    first = evaluate(*flags, '--workflow_kwargs={"voters": 3}')
    assert first.returncode == 0, first.stderr
    header, line = first.stdout.splitlines()
    assert header.split() == [
        "dataset", "num_questions", "greedy_length", "sample_length", "greedy_acc",
        "sample_pass@1", "pass@4", "maj@2",
    ]  # fmt: skip
    assert line.split()[:2] == ["arithmetic", "3"]
    records = list(read_jsonl(tmp_path / "arithmetic" / "arithmetic.jsonl"))
    assert len(records) == 3 * 5
    for record in records:
        assert len(record["turns"]) == 3
        assert record["reward"] in (0.0, 1.0)
        assert all(record["question"] in turn["prompt"] for turn in record["turns"])
        assert record["turns"][-1]["completion"].startswith(record["completion"])
        if record["sample"] == -1:  # greedy voters agree
            assert len({turn["completion"] for turn in record["turns"]}) == 1
    assert sample_files.pending(tmp_path / "arithmetic" / "arithmetic.jsonl", 3, 4) == []
    other = evaluate(*flags, '--workflow_kwargs={"voters": 5}')
    assert other.returncode == 2
    assert "workflow_kwargs={'voters': 3}, this one has {'voters': 5}" in other.stderr


def test_a_mistake_is_one_line(tmp_path):
    done = evaluate("--datasets=arithmetic", f"--output={tmp_path}", f"--workflow={VOTE}r")
    assert done.returncode == 2
    assert "did you mean 'Vote'" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_workflow_of_rlx_gets_what_its_constructor_names(agents, tmp_path):
    tokenizer = agents.tokenizer()
    options = AgentOptions(system_prompt="be brief", turn_discount=0.5)

    def build(name, **kwargs):
        named = NamedWorkflow(name, kwargs, Prompts(tokenizer), Sampling(top_k=7), 3)
        return named.build("the pool", options)

    for name in ("rlvr", "rlx.rollout.workflows:RLVR"):
        assert isinstance(build(name), RLVR)
        assert named_workflow.uses_rewards(name)
    (tmp_path / "own.py").write_text(
        "class Own:\n"
        "  def __init__(self, tokenizer, n, depth=1): self.all = tokenizer, n, depth\n"
        "  async def run(self, fleet, task): pass\n"
    )
    own = f"{tmp_path}/own.py:Own"
    assert build(own, depth=2).all == (tokenizer, 3, 2)
    assert not named_workflow.uses_rewards(own)
    agent = build(f"{agents.classes}:Repeat", turns=2)
    assert isinstance(agent, AgentWorkflow)
    assert agent._options is options
    assert not named_workflow.uses_rewards(f"{agents.classes}:Repeat")
    with pytest.raises(UserError, match="did you mean 'sampling'"):
        build("rlvr", samplign=1)
    with pytest.raises(UserError, match=r"rollout.workflow 'rvlr'; did you mean 'rlvr'"):
        named_workflow.uses_rewards("rvlr", "rollout.workflow")


def test_tries_need_a_reward_that_does_not_come_after_the_last_one(agents):
    named = NamedWorkflow("multi_turn", {}, Prompts(agents.tokenizer()), Sampling(), 3)
    with pytest.raises(UserError, match="before models and judges grade; name a function"):
        named.build(RewardPool({}))  # as with reward.name=judge
    assert isinstance(named.build(RewardPool("exact")), MultiTurn)


def test_flags_go_before_the_config_s_workflow():
    rollout = SimpleNamespace(workflow="mine.py:A", workflow_kwargs={"x": 1})
    flags = SimpleNamespace(workflow="", workflow_kwargs="")
    assert loading.workflow_of(flags, rollout) == ("mine.py:A", {"x": 1})
    flags.workflow_kwargs = '{"x": 2}'
    assert loading.workflow_of(flags, rollout) == ("mine.py:A", {"x": 2})
    other = SimpleNamespace(workflow="mine.py:B", workflow_kwargs="")
    assert loading.workflow_of(other, rollout) == ("mine.py:B", {})


def test_what_an_agent_is_given_has_messages():
    row = {"question": "x", "answer": "y"}
    assert with_messages(row, "question", "be brief")["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "x"},
    ]
    own = [{"role": "user", "content": "mine"}]
    assert with_messages({**row, "messages": own}, "question", "")["messages"] == own
