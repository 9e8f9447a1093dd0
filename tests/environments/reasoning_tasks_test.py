"""Tasks of reasoning-gym: rows by seed and index, graded by the tasks' own functions."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlx.base import UserError
from rlx.config import check, default, with_environment
from rlx.environments import reasoning_tasks
from rlx.evaluation import question_sets
from rlx.rewards import rewards
from rlx.rewards.reward_pool import RewardCall, RewardError, RewardPool
from rlx.rollout import data
from rlx.system.jsonl import read_jsonl
from tests.fixtures.commands import FLOAT32, RLX_MAIN

ROOT = Path(__file__).parents[2]


def grade(row, completion):
    return rewards.reasoning_gym("", completion, [], [], **row)


def test_a_name_sets_rows_rewards_and_workflow():
    config = default()
    config.model.path = "rlx:arithmetic"
    config.data.kind, config.data.eval = "arithmetic", "rows.jsonl"
    config.rollout.workflow = "reasoning_gym:chain_sum"
    check(with_environment(config))
    assert (config.data.dataset, config.data.eval) == ("reasoning_gym:chain_sum", "")
    assert (config.rollout.workflow, config.reward.name) == ("rlvr", "reasoning_gym")
    before = config.to_json()
    assert with_environment(config).to_json() == before, "a config of a run that resumes"


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym.factory", None)
    with pytest.raises(UserError, match=r"need packages .*; pip install .*reasoning-gym"):
        data.load("reasoning_gym:chain_sum")


@pytest.fixture
def made():
    """Loads rows of tasks."""
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed")
    return lambda names, split="train", n=20: data.load(
        f"reasoning_gym:{names}", split=split, most=n
    )


@pytest.mark.witnesses
def test_a_row_is_a_function_of_seed_and_index(made):
    rows = made("chain_sum?max_terms=2&seed=3")
    assert rows == made("chain_sum?max_terms=2&seed=3", n=40)[:20]
    assert rows != made("chain_sum?max_terms=2&seed=4")
    assert len(made("chain_sum?size=30", n=None)) == 30
    program = (
        "import json; from rlx.rollout import data; print(json.dumps(data.load("
        "'reasoning_gym:chain_sum?max_terms=2&seed=3', most=20)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert json.loads(done.stdout) == rows, "in another process, as a run that resumes"


@pytest.mark.witnesses
def test_no_question_is_in_both_splits(made):
    """Two terms of one digit make few questions, most of them in both without the hash."""
    name = "chain_sum?min_terms=2&max_terms=2&min_digits=1&max_digits=1&seed="
    train = {row["question"] for seed in range(3) for row in made(f"{name}{seed}", n=300)}
    held_out = {row["question"] for row in made(f"{name}0", "test", 100)}
    assert len(train) > 50
    assert len(held_out) > 10
    assert not train & held_out


@pytest.mark.witnesses
def test_several_tasks_take_turns_each_with_its_settings(made):
    rows = made("chain_sum?max_terms=2, basic_arithmetic", n=6)
    names = [row["task"]["name"] for row in rows]
    assert names == ["chain_sum", "basic_arithmetic"] * 3
    assert [row["task"]["settings"] for row in rows[:2]] == [{"max_terms": 2}, {}]
    assert rows[0] == made("chain_sum?max_terms=2", n=1)[0]
    assert all(grade(row, row["answer"]) == 1.0 for row in rows)


@pytest.mark.witnesses
def test_the_answer_is_in_tags_or_a_box_or_the_whole_text(made):
    (row,) = made("chain_sum", n=1)
    right, wrong = row["answer"], str(int(row["answer"]) + 1)
    assert grade(row, f"<answer>{wrong}</answer> no, <answer>\n{right}\n</answer> is it") == 1.0
    assert grade(row, rf"it is \boxed{{{right}}}, I think") == 1.0
    assert grade(row, f"<think>maybe {wrong}</think> {right}\n") == 1.0
    assert 0 < grade(row, f"The final answer is {right}.") < 1, "as the package grades it"
    assert grade(row, f"<answer>{wrong}</answer>") < 0.5
    assert grade(row, "") == 0.0


@pytest.mark.witnesses
@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("chain_some", "no task 'chain_some'; did you mean 'chain_sum'"),
        ("", "no task ''"),
        ("chain_sum,zzzzzz", "no task 'zzzzzz'; its GALLERY.md lists all of them"),
        ("chain_sum?max_term=3", "unknown setting of chain_sum 'max_term'; did you mean 'max_te"),
        ("chain_sum?min_terms=0", "chain_sum refuses .*min_terms.*; correct them"),
        ("chain_sum?min_terms=few", "chain_sum refuses"),
    ],
)
def test_a_mistake_is_one_line(made, names, message):
    with pytest.raises(UserError, match=message) as error:
        made(names)
    assert "\n" not in str(error.value)


@pytest.mark.witnesses
def test_a_task_that_fails_is_a_failed_row_and_a_bad_answer_is_none(made, monkeypatch):
    (row,) = made("chain_sum", n=1)
    data_set = type(reasoning_tasks._data_set("chain_sum", "{}", row["task"]["seed"]))

    def strict(self, answer, entry):
        return float(int(answer) == int(entry["answer"]))

    monkeypatch.setattr(data_set, "score_answer", strict)
    assert grade(row, "no number") == 0.0
    assert grade(row, row["answer"]) == 1.0

    def broken(self, answer, entry):
        raise RuntimeError("the task is broken")

    monkeypatch.setattr(data_set, "score_answer", broken)
    with pytest.raises(RuntimeError, match="the task is broken"):
        grade(row, "1")


@pytest.mark.witnesses
def test_another_version_of_a_task_is_found(made):
    (row,) = made("chain_sum", n=1)
    pool = RewardPool("reasoning_gym", timeout=20.0)
    try:
        call = RewardCall("", row["answer"], [1], [2], row)
        assert pool.compute([call]).rewards == [1.0]
        other = RewardCall("", row["answer"], [1], [2], {**row, "question": "an older question"})
        with pytest.raises(RewardError, match="install the version that made the row"):
            pool.compute([other])
    finally:
        pool.close()


@pytest.mark.witnesses
def test_an_evaluation_takes_the_same_name(made):
    text = "reasoning_gym:chain_sum?max_terms=3,basic_arithmetic,arithmetic"
    (tasks, rows), (embedded, _) = question_sets.load_sets(text, "gsm8k", 6)
    assert (tasks.name, tasks.reward) == (text.removesuffix(",arithmetic"), "reasoning_gym")
    assert rows == made("chain_sum?max_terms=3,basic_arithmetic", "test", 6)
    assert embedded.name == "arithmetic"


@pytest.mark.slow
@pytest.mark.witnesses
@pytest.mark.filterwarnings("ignore")  # some tasks leave files open
def test_every_task_is_reproducible_and_grades_any_answer(made):
    for name in reasoning_tasks.tasks():
        rows = made(name, n=2)
        reasoning_tasks._data_set.cache_clear()
        reasoning_tasks._entry.cache_clear()
        assert rows == made(name, n=2), name
        for row in rows:
            assert 0.0 <= reasoning_tasks.score("x", row["question"], row["task"]) <= 1.0, name


@pytest.mark.slow
@pytest.mark.witnesses
def test_a_run_trains_on_a_task_and_resumes_on_the_same_rows(made, tmp_path):
    command = [
        *RLX_MAIN, "--config=configs/arithmetic.py", f"--workdir={tmp_path}/run",
        "--config.rollout.workflow=reasoning_gym:chain_sum?max_terms=2&size=40",
        "--config.rollout.batch_prompts=4", "--config.sampling.n_samples=4",
        "--config.sampling.max_new_tokens=32", "--config.data.max_prompt_tokens=128",
        "--config.eval.num_questions=4", "--config.fleet.slots=8", "--config.gate.prompts=1",
        "--config.algorithm.drop_equal_rewards=False", FLOAT32,
    ]  # fmt: skip
    for steps in (1, 3):
        done = subprocess.run(
            [*command, f"--config.total_steps={steps}"], cwd=ROOT, capture_output=True, text=True,
            timeout=600,
        )  # fmt: skip
        assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    steps = list(read_jsonl(tmp_path / "run" / "metrics.jsonl"))
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert all("reward/reasoning_gym" in step for step in steps)
    kept = json.loads((tmp_path / "run" / "config.json").read_text())
    assert kept["data"]["dataset"].startswith("reasoning_gym:chain_sum")
