"""`python -m rlx.evaluate --workflow=`: agents and workflows scored by the command."""

import subprocess
import sys

import pytest

from rlx.agents import from_command_line
from rlx.agents.workflow import AgentWorkflow, with_messages
from rlx.base import UserError
from rlx.evaluation import sample_files
from rlx.fleet.requests import Sampling
from rlx.observe.jsonl import read_jsonl
from rlx.rollout.workflows import RLVR

VOTE = "experiments/2026-11-agents/vote.py:Vote"


def evaluate(*flags):
    command = [sys.executable, "-m", "rlx.evaluate", "--config=configs/arithmetic.py", *flags]
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


def test_a_workflow_of_rlx_gets_what_its_constructor_names(agents):
    shared = {
        "prompts": None, "tokenizer": agents.tokenizer(), "sampling": Sampling(), "n": 1,
        "reward_pool": None, "workers": 2,
    }  # fmt: skip
    for name in ("", "rlx.rollout.workflows.RLVR"):
        workflow, graded = from_command_line.build(name, {}, **shared)
        assert isinstance(workflow, RLVR)
        assert graded
    agent, graded = from_command_line.build(f"{agents.classes}:Repeat", {"turns": 2}, **shared)
    assert isinstance(agent, AgentWorkflow)
    assert not graded
    with pytest.raises(UserError, match="did you mean 'sampling'"):
        from_command_line.build("", {"samplign": 1}, **shared)


def test_what_an_agent_is_given_has_messages():
    row = {"question": "x", "answer": "y"}
    assert with_messages(row, "question", "be brief")["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "x"},
    ]
    own = [{"role": "user", "content": "mine"}]
    assert with_messages({**row, "messages": own}, "question", "")["messages"] == own
