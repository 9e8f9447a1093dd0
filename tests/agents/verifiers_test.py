"""Environments of verifiers: rows, and episodes of the package's own loop against our gateway."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlx.agents.agent_options import AgentOptions
from rlx.agents.workflow import AgentWorkflow
from rlx.base import UserError
from rlx.config import check, default, with_environment
from rlx.environments import verifiers_tasks
from rlx.evaluation import question_sets
from rlx.evaluation.runner import Evaluator
from rlx.rollout import data
from rlx.rollout.attempts import Patience, RolloutError
from rlx.system.jsonl import read_jsonl
from tests.fixtures.commands import FLOAT32, RLX_MAIN, without_torch
from tests.fixtures.evaluator_fleet import Fleet

ROOT = Path(__file__).parents[2]
PACKAGES = Path(__file__).with_name("verifiers_packages")


def test_a_name_sets_rows_and_workflow():
    config = default()
    config.model.path = "rlx:arithmetic"
    config.data.kind, config.data.eval = "arithmetic", "rows.jsonl"
    config.rollout.workflow = "verifiers:sums_env?taskset.num_tasks=9"
    check(with_environment(config))
    assert config.data.dataset == "verifiers:sums_env?taskset.num_tasks=9"
    assert (config.data.eval, config.rollout.workflow) == ("", verifiers_tasks.AGENT)
    before = config.to_json()
    assert with_environment(config).to_json() == before, "a config of a run that resumes"


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    with pytest.raises(UserError, match=r"need packages .*; pip install .*verifiers"):
        data.load("verifiers:sums_env")


@pytest.fixture(scope="module")
def package():
    """Makes the environments of this test importable, here and in workers."""
    pytest.importorskip("verifiers.v1", reason="verifiers is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(PACKAGES)
        patch.setenv("PYTHONPATH", str(PACKAGES), prepend=":")  # of servers of tools
        patch.setenv("UV_OFFLINE", "1")  # the chat program's packages are in its cache
        yield


@pytest.fixture
def load(package):
    """Loads rows of an environment."""
    return lambda name, split="train", most=None: data.load(
        f"verifiers:{name}", split=split, most=most
    )


@pytest.mark.witnesses
def test_rows_are_the_environments_tasks_each_in_one_split(load):
    train, held_out = load("sums_env"), load("sums_env", "test")
    assert len(train) + len(held_out) == 60
    assert len(held_out) > 3
    numbers = [row["task"]["idx"] for row in train]
    assert numbers == sorted(numbers)
    assert {row["question"] for row in train + held_out} == {
        f"Compute {k % 10} + {k // 10}." for k in range(60)
    }
    row = train[0]
    assert row["environment"] == "sums_env"
    assert row["task"]["answer"] == row["answer"]
    assert len(load("sums_env?taskset.num_tasks=20&size=5")) == 5
    assert len(load("tool_env?size=30")) == 30, "of tasks without end"


@pytest.mark.witnesses
def test_an_evaluation_takes_the_same_name(load):
    ((found, rows),) = question_sets.load_sets("verifiers:sums_env", "arithmetic", 3)
    assert (found.name, found.workflow) == ("verifiers:sums_env", verifiers_tasks.AGENT)
    assert rows == load("sums_env", "test", 3)


@pytest.mark.witnesses
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sum_env", "there is no module 'sum_env', did you mean 'sums_env'"),
        ("", "names no environment"),
        ("my env", "names no environment"),
        ("json", "cannot be made: .*Taskset"),
        ("old_env", "cannot be made: .*defines no `__all__`; a taskset must export"),
        ("sums_env?taskset.num_task=3", "cannot be made: .*taskset.num_task Extra inputs"),
        ("sums_env?taskset.num_tasks=few", "cannot be made: .*taskset.num_tasks .*integer"),
        ("sums_env?agent.harness.id=bush", "bush"),
        ("sums_env?taskset=3", "cannot be made"),
        ("sums_env?id=user-sim", "has the roles assistant, user, and one can be trained"),
    ],
)
def test_a_mistake_is_one_line(load, name, message):
    with pytest.raises(UserError, match=message) as error:
        load(name)
    assert "\n" not in str(error.value)


@pytest.fixture(scope="module")
def shared(agents, package):
    """Evaluates episodes by one worker, which takes seconds to start; yields it and its engine."""
    workflow = AgentWorkflow(
        verifiers_tasks.AGENT, agents.tokenizer(), agents.sampling, 1, options=AgentOptions()
    )
    engine = agents.engine()
    connect = Fleet(agents, engine).connect
    with Evaluator(connect, workflow, patience=Patience(attempts=1), timeout=120.0) as run:
        yield run, engine


@pytest.fixture
def play(shared):
    """Plays rows, `n` times each; the engine answers by `reply`."""
    run, engine = shared

    def groups(rows, reply, n=1):
        engine.reply = reply
        run.export_stats()
        return run.rollout_batch(rows, n=n, timeout=120)

    return groups


@pytest.mark.witnesses
def test_an_episode_has_each_reward_by_name(load, shared, play):
    rows = load("sums_env", most=2)
    assert rows[0]["answer"] != rows[1]["answer"]
    groups = play(rows, lambda prompt, seed, index: f"= {rows[0]['answer']}", n=2)
    stats = shared[0].export_stats()
    found = [t for group in groups for t in group.trajectories]
    assert [t.reward for t in found] == [1 + 0.5 / 3] * 2 + [0.5 / 3] * 2
    assert found[0].completion == f"= {rows[0]['answer']}"
    assert found[0].prompt == f"<|user|>{rows[0]['question']}<|end|><|assistant|>"
    assert (found[0].behaviour_logprobs[found[0].loss_mask] < 0).all()
    assert stats["reward/exact"] == 0.5
    assert stats["reward/brief"] == pytest.approx(1 / 3)
    assert stats["info/characters"] == 3


@pytest.mark.witnesses
def test_turns_of_a_simulated_user_are_one_trajectory(load, play):
    (row,) = load("retry_env", most=1)
    (group,) = play([row], lambda prompt, *_: row["answer"] if "No." in prompt else "?")
    (trajectory,) = group.trajectories
    again = f"<|user|>No. {row['question']}<|end|><|assistant|>{row['answer']}<|end|>"
    assert trajectory.completion == f"?<|end|>{again}"
    assert sorted(set(trajectory.turn_ids.tolist())) == [0, 1]
    assert trajectory.info["reward/exact"] == 1.0


@pytest.mark.witnesses
def test_the_environments_tool_is_called(load, play):
    (row,) = load("tool_env", most=1)

    def reply(prompt, seed, index):
        if "<|tool|>" in prompt:
            return prompt.split("<|tool|>")[1].split("<|end|>")[0]
        a, b = map(int, row["question"].split())
        call = {"name": "calculator_add", "arguments": {"a": a, "b": b}}
        return f"<tool_call>{json.dumps(call)}</tool_call>"

    (group,) = play([row], reply)
    (trajectory,) = group.trajectories
    assert (trajectory.reward, trajectory.info["tool_calls"]) == (1.0, 1.0)


def failed(run, fault, load, message):
    (row,) = load(f"sums_env?taskset.task.fault={fault}", most=1)
    with pytest.raises(RolloutError, match=message):
        run.submit(row).result(120)
    run._waiting.clear()


@pytest.mark.witnesses
def test_an_episode_that_fails_is_one_line_and_others_go_on(load, shared, play):
    (good,) = load("sums_env", most=1)
    line = r"TaskError: .*RuntimeError: the grader is broken \(.*sums_env.py, line 22\)$"
    failed(shared[0], "raises", load, line)
    failed(shared[0], "nan", load, r"reward/exact of the returned reward is nan; rewards must be")
    assert play([good], lambda *_: good["answer"])[0].trajectories[0].reward > 1.0


@pytest.mark.slow
@pytest.mark.witnesses
@pytest.mark.parametrize("name", ["sums_env", "retry_env"])
def test_a_run_trains_on_an_environment_and_passes_over_rows_that_fail(package, tmp_path, name):
    parts = (f"verifiers:{name}", 2), (f"verifiers:{name}?taskset.task.fault=raises", 1)
    done = subprocess.run(
        [
            *RLX_MAIN, "--config=configs/arithmetic.py", f"--workdir={tmp_path}",
            f"--config.rollout.workflow=verifiers:{name}",
            f"--config.data.mix={parts}", f"--config.data.eval=verifiers:{name}",
            "--config.total_steps=2",
            "--config.rollout.batch_prompts=2", "--config.sampling.n_samples=2",
            "--config.rollout.max_concurrent_rollouts=2", "--config.rollout.max_attempts=1",
            "--config.sampling.max_new_tokens=32", "--config.data.max_prompt_tokens=64",
            "--config.fleet.max_model_len=256", "--config.train.row_buckets=(256,)",
            "--config.eval.num_questions=2", "--config.fleet.slots=8", "--config.gate.prompts=1",
            "--config.algorithm.drop_equal_rewards=False", FLOAT32,
        ],
        cwd=ROOT, capture_output=True, text=True, timeout=600,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{PACKAGES}"},
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    steps = list(read_jsonl(tmp_path / "metrics.jsonl"))
    assert [step["step"] for step in steps] == [1, 2]
    for step in steps:
        wanted = {"reward/exact", "reward/brief", "info/characters", "info/interactions"}
        assert wanted <= set(step)
    skipped = list(read_jsonl(tmp_path / "skipped.jsonl"))
    assert skipped, "no row that fails was drawn"
    assert all("the grader is broken" in str(each) for each in skipped)


@pytest.mark.slow
@pytest.mark.witnesses
def test_rlx_evaluate_takes_an_environment_s_name(package, tmp_path):
    name = "verifiers:retry_env"
    done = subprocess.run(
        [
            *without_torch("rlx.evaluate"), "--config=configs/arithmetic.py", "--limit=2",
            f"--datasets={name}", "--n_samples=2", "--pass_at=2", "--max_gen_tokens=32",
            f"--output={tmp_path}", "--config.fleet.max_model_len=256",
        ],
        cwd=ROOT, capture_output=True, text=True, timeout=600,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{PACKAGES}"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    records = list(read_jsonl(tmp_path / "arithmetic" / f"{name}.jsonl"))
    assert len(records) == 2 * 3
    assert all(record["turns"] for record in records)
