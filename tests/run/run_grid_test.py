"""A sweep runs what is left of its grid, goes on after a failure or a stop, and ends its runs."""

import json
import os
import re
import signal
import subprocess
import sys

import psutil
import pytest

from rlx import sweep as command
from rlx.base import UserError
from rlx.config import default
from rlx.observe.run_table import find, score, summary
from rlx.run import allocate, run_grid
from rlx.system.jsonl import append_jsonl
from tests.fixtures.commands import path_without_torch
from tests.run.main_test import wait_for

ROOT = command.__file__.rpartition("/rlx/")[0]
FAST = [  # a run of some seconds, without servers
    "--config=configs/arithmetic_sft.py", "--config.fleet.num_servers=0",
    "--config.eval.num_questions=8", "--config.rollout.batch_prompts=4",
    "--config.data.max_prompt_tokens=64", "--config.model.compute_dtype=float32",
]  # fmt: skip


def begin(*words):
    return subprocess.Popen(
        [sys.executable, "-m", "rlx.sweep", *FAST, *words], stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, cwd=ROOT, start_new_session=True,
        env={**os.environ, "PYTHONPATH": path_without_torch()},
    )  # fmt: skip


def states(workdir):
    return {path.name: summary(path, {})["state"] for path in find([workdir])}


def test_a_grid_has_every_combination_and_names_that_are_directories():
    runs = run_grid.grid(["optimizer.learning_rate=1e-5,1e-4", "train.row_buckets=(96,192),(192,)"])
    assert runs["optimizer.learning_rate=1e-5,train.row_buckets=_96,192_"] == [
        "--config.optimizer.learning_rate=1e-5", "--config.train.row_buckets=(96,192)",
    ]  # fmt: skip
    assert len(runs) == 4
    assert [*run_grid.grid(["model.path=a/b c"])] == ["model.path=a_b_c"]
    some = run_grid.grid(["seed=0,1,2,3", "total_steps=1,2"], 3)
    assert len(some) == 3
    assert some == run_grid.grid(["seed=0,1,2,3", "total_steps=1,2"], 3), "the same after a stop"
    assert some.items() <= run_grid.grid(["seed=0,1,2,3", "total_steps=1,2"]).items()
    assert len(run_grid.grid(["seed=0,1"], 9)) == 2


@pytest.mark.parametrize(
    "axis",
    ["seed", "seed=", "--seed=1,2", "seed=1,1", "model.path=a/b,a b", "seed=0,1 seed=2,3"],
)
def test_what_is_no_axis_is_refused(axis):
    axes = [axis] if "/" in axis else axis.split()
    with pytest.raises(UserError, match=re.escape(axis)):
        run_grid.grid(axes)


def test_runs_at_a_time_share_cores_and_gpus(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 4})
    monkeypatch.setattr(run_grid, "gpus", lambda: ("4", "5", "7"))
    config = default()
    assert run_grid.slots(2, config) == [([0, 1], ("4",)), ([2, 3, 4], ("5", "7"))]
    with pytest.raises(UserError, match="--jobs=4 does not fit; give 1 to 3, the number of GPUs"):
        run_grid.slots(4, config)
    config.scheduler.type = "slurm"
    assert run_grid.slots(4, config) == [([0, 1, 2, 3, 4], ())] * 4
    config.scheduler.type = "local"
    monkeypatch.setattr(run_grid, "gpus", lambda: ())
    assert [cores for cores, _ in run_grid.slots(6, config)][-1] == [4], (
        "more runs than cores share them"
    )
    with pytest.raises(UserError, match="--jobs=0 does not fit; give 1 or more"):
        run_grid.slots(0, config)
    assert allocate.gpus({"CUDA_VISIBLE_DEVICES": "4,5"}) == ("4", "5")


@pytest.mark.parametrize(
    ("axis", "words"),
    [("optimizer.lr=1,2", "'optimizer.lr'; did you mean 'optimizer.learning_rate'"),
     ("seed=0,x", "seed=x is not a whole number"),
     ("optimizer.name=adamw,adamm", "adamm")],
)  # fmt: skip
def test_a_wrong_setting_is_refused_before_any_run_starts(axis, words, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    argv = ["rlx.sweep", *FAST, axis, f"--workdir={tmp_path / 's'}"]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(UserError, match=words):
        command.main()
    assert not (tmp_path / "s").exists()


@pytest.mark.slow
def test_a_failed_run_is_a_row_and_a_second_call_runs_only_what_is_left(tmp_path):
    given = ["--config.total_steps=1", f"--workdir={tmp_path}", "model.path=nowhere,rlx:arithmetic"]
    process = begin(*given)
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 1, out
    assert states(tmp_path) == {"model.path=nowhere": "failed",
                                "model.path=rlx_arithmetic": "finished"}  # fmt: skip
    assert "model.path=nowhere: failed, with status 2: " in out
    assert f"{tmp_path}/comparison.html" in out
    table = [line for line in out.splitlines() if line.startswith(str(tmp_path))]
    assert any(re.search("model.path=nowhere +failed", line) for line in table), out
    assert any("nowhere: " in line and "not a directory" in line for line in table), out
    second = begin(*given)
    out, _ = second.communicate(timeout=300)
    assert second.returncode == 1, out
    assert "1 of 2 runs to do" in out
    assert "model.path=rlx_arithmetic: starts" not in out


@pytest.mark.slow
def test_ctrl_c_ends_the_runs_and_the_same_command_goes_on(tmp_path):
    given = [f"--workdir={tmp_path}", "seed=0,1"]
    process = begin("--config.total_steps=1000", *given)
    steps = tmp_path / "seed=0" / "metrics.jsonl"
    wait_for(steps.exists)
    (child,) = [c for c in psutil.Process(process.pid).children() if "rlx.main" in c.cmdline()]
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 130, out
    assert not psutil.pid_exists(child.pid)
    assert states(tmp_path) == {"seed=0": "stopped"}
    assert "seed=1: starts" not in out
    done = json.loads(steps.read_text().splitlines()[-1])["step"]
    process = begin(f"--config.total_steps={done + 1}", *given, "--jobs=2")
    out, _ = process.communicate(timeout=300)
    assert process.returncode == 0, out
    assert states(tmp_path) == {"seed=0": "finished", "seed=1": "finished"}
    assert [json.loads(line)["start"] for line in steps.read_text().splitlines()][-1] == 2


@pytest.mark.slow
def test_halving_finishes_the_better_half_and_decides_again_alike(tmp_path):
    given = [f"--workdir={tmp_path}", "--config.total_steps=16", "--config.eval.every_steps=2",
             "optimizer.learning_rate=1e-9,3e-4,1e-3", "--halve=2"]  # fmt: skip
    process = begin(*given)
    out, _ = process.communicate(timeout=400)
    assert process.returncode == 0, out
    ends = states(tmp_path)
    assert ends["optimizer.learning_rate=1e-9"] == "stopped", out
    assert sorted(ends.values()) == ["finished", "stopped", "stopped"], out
    rows = {path.name: summary(path, {}) for path in find([tmp_path])}
    steps = sorted(row["step"] for row in rows.values())
    assert 4 <= steps[0] < 8 <= steps[1] < 16 == steps[2], steps
    process = begin(*given)
    again, _ = process.communicate(timeout=100)
    assert ": starts" not in again, again
    left = [line for line in out.splitlines() if ": ends at step " in line]
    assert left == [line for line in again.splitlines() if ": ends at step " in line]
    assert len(left) == 2


@pytest.mark.parametrize(("metric", "better"), [("task_reward", 0.9), ("sft_loss", 0.1)])
def test_an_evaluation_before_the_first_step_decides_nothing(tmp_path, metric, better):
    """By default there is no other until the end, and it is the same for all."""
    for name, value in (("a", 0.5), ("b", better)):
        append_jsonl(tmp_path / name / "eval.jsonl", {"step": 0, "greedy_acc": 0.3})
        for step in range(1, 5):
            append_jsonl(tmp_path / name / "metrics.jsonl", {"step": step, metric: value})
    assert score(tmp_path / "b", 4) > score(tmp_path / "a", 4)
    append_jsonl(tmp_path / "a" / "eval.jsonl", {"step": 4, "greedy_acc": 0.4})
    assert score(tmp_path / "a", 4) == 0.4


@pytest.mark.parametrize("name", ["eval.jsonl", "metrics.jsonl"])
def test_a_run_that_diverged_keeps_no_earlier_score(tmp_path, name):
    key = "held_out_sft_loss" if name == "eval.jsonl" else "sft_loss"
    for run, last in (("good", 0.9), ("diverged", None)):
        append_jsonl(tmp_path / run / "eval.jsonl", {"step": 0, "held_out_sft_loss": 2.0})
        for step in range(1, 9):
            append_jsonl(tmp_path / run / name, {"step": step, key: 0.1 if step < 8 else last})
    assert score(tmp_path / "diverged", 8) == -float("inf") < score(tmp_path / "good", 8) < 0


def test_a_value_of_pairs_is_one_value():
    terms = ["(('gsm8k',1.0),('a.py:b',0.1))", "(('gsm8k',1.0),)"]
    runs = run_grid.grid([f"reward.terms={','.join(terms)}"])
    assert [*runs.values()] == [[f"--config.reward.terms={value}"] for value in terms]
