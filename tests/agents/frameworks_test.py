"""The configs of agents on other people's frameworks train, with the frameworks as they come."""

import subprocess
from pathlib import Path

import pytest

from rlx.system.jsonl import read_jsonl
from tests.fixtures.commands import FLOAT32, RLX_MAIN

pytestmark = pytest.mark.witnesses
ROOT = Path(__file__).parents[2]
SHORT = [
    "--config.total_steps=2", "--config.rollout.batch_prompts=2", "--config.sampling.n_samples=2",
    "--config.eval.num_questions=4", "--config.fleet.slots=8", "--config.gate.prompts=1",
    FLOAT32,
    "--config.rollout.max_staleness=0",  # a batch has the same prompts whoever is done first
]  # fmt: skip


def trained(name, workdir):
    """The records of the steps of a short run."""
    command = [*RLX_MAIN, f"--config=configs/arithmetic_{name}.py"]
    done = subprocess.run(
        [*command, f"--workdir={workdir}", *SHORT], cwd=ROOT, capture_output=True, text=True,
        timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return list(read_jsonl(workdir / "metrics.jsonl"))


def test_two_frameworks_train_and_get_the_same_words_from_two_apis(tmp_path):
    """One asks /v1/responses and the other /v1/chat/completions: the draws are the prompts'."""
    pytest.importorskip("agents", reason="openai-agents is not installed")
    pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")
    runs = [trained(name, tmp_path / name) for name in ("agents_sdk", "langchain")]
    for steps in runs:
        assert [step["step"] for step in steps] == [1, 2]
        assert all(step["staleness_max"] == step["failed"] == 0 for step in steps)
        assert steps[0]["info/interactions"] > 1
    one, other = (steps[0] for steps in runs)
    same = ("n_tokens", "n_valid_tokens", "task_reward", "info/interactions")
    assert [one[name] for name in same] == [other[name] for name in same]
