"""The planner's command: what it prints can be used, and bad input is one line."""

import json
import re
import runpy
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from rlx.base import Group, Trajectory, UserError, leaves
from rlx.config import default
from rlx.journal.journal import Journal
from rlx.launch import allocation
from rlx.run import plan_run
from rlx.run.room_options import as_json
from rlx.system.jsonl import append_jsonl

SHAPE = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 152064,
    "num_hidden_layers": 28, "hidden_size": 3584, "num_attention_heads": 28,
    "num_key_value_heads": 4, "intermediate_size": 18944, "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False, "eos_token_id": 1,
}  # fmt: skip


@pytest.fixture
def model(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text(json.dumps(SHAPE))
    return tmp_path / "model"


def plan(model, *flags, status=0):
    command = [
        sys.executable, "-m", "rlx.plan", "--config=configs/gsm8k.py",
        f"--config.model.path={model}", "--config.sampling.max_new_tokens=8192",
        "--config.rollout.batch_prompts=64", "--config.rollout.max_concurrent_rollouts=256", *flags,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout if not status else done.stderr


def test_the_best_allocations_use_all_gpus_and_fit(model, tmp_path):
    trace = tmp_path / "trace.json"
    out = plan(model, "--gpus=32", "--gpu=h800", "--explain", f"--timeline={trace}",
               "--answer_tokens=3000", "--cut_share=0.05", "--dollars=2")  # fmt: skip
    found = re.findall(r"^(vllm\S+) +([\d.,e+]+) ", out, re.MULTILINE)
    assert len(found) >= 2
    assert all(allocation.parse(text).gpus == 32 for text, _ in found)
    seconds = [float(s.replace(",", "")) for _, s in found]
    assert seconds == sorted(seconds)
    assert "answers of 3,0" in out
    assert "5% of them at 8,192" in out
    assert "dollars" in out
    assert "KV cache for" in out
    assert {e["name"] for e in json.loads(trace.read_text())["traceEvents"]} >= {
        "publish",
        "generate",
    }


def test_an_allocation_may_have_any_order_and_letters(model):
    first, second = (
        plan(model, "--gpus=32", "--gpu=h100", f"--allocation={text}").splitlines()[-1].split()[1:]
        for text in ("vllm:d16+jax:f8t2", "jax:f8t2+vllm:d16")
    )
    assert first == second


def test_a_key_is_varied(model):
    out = plan(model, "--gpus=16", "--gpu=h100", "--what_if=rollout.max_staleness=0,4")
    rows = [line.split() for line in out.splitlines() if re.match(r"[04] ", line)]
    assert [row[0] for row in rows] == ["0", "4"]
    assert float(rows[1][2]) < float(rows[0][2])


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--gpus=8", "--gpu=h10"], "unknown --gpu .h10.; did you mean"),
        (["--gpus=8"], "--gpu is not given; choose one of a100"),
        (["--gpus=0", "--gpu=h100"], "--gpus='0' is not a number from 1"),
        (["--gpus=1", "--gpu=h100"], r"do not fit 1 × .*; 8 do: --gpus=8, vllm"),
        (["--gpus=8", "--gpu=h100", "--allocation=vllm:d4+jax:f8"], "has 12 GPUs"),
        (["--gpus=8", "--gpu=h100", "--allocation=jax:f8"], "1 parts.*that fits is vllm:d"),
        (["--gpus=8", "--gpu=h100", "--allocation=vllm:d7+jax:f1"], "does not fit GPUs of 85 GB"),
        (["--gpus=8", "--gpu=h100", "--explain", "--what_if=seed=1"], "leave one of them out"),
        (["--gpus=8", "--gpu=h100", "--answer_tokens=9000"], "give a mean between"),
        (["--gpus=8", "--gpu=h100", "--turns=inf"], "--turns=inf is not a number from 0"),
        (["--run=x", "--answer_tokens=900"], "--answer_tokens does nothing with a run"),
        (["--gpu=this", "--prompt_tokens=90"], "--prompt_tokens does nothing with a run"),
        (["--run=x", "--gpus=8", "--gpu=h100"], "--config does nothing with a run"),
        (["--gpus=8", "--gpu=h100", "--what_if=rollout.max_stalenes=1"], "max_staleness"),
    ],
)
def test_bad_input_is_one_line(model, flags, line):
    error = plan(model, *flags, status=2)
    assert re.search(line, error)
    assert len(error.strip().splitlines()) == 1


def a_run(workdir, model, seconds, mode="vllm:d1+jax:f7", devices="8 × NVIDIA H100 80GB HBM3"):
    """A recorded run of four steps, whose answers have 300 tokens."""
    config = default()
    changes = {
        "model.path": str(model), "rollout.batch_prompts": 4, "sampling.n_samples": 2,
        "sampling.max_new_tokens": 8192, "data.max_prompt_tokens": 512,
        "rollout.max_concurrent_rollouts": 64, "allocation_mode": mode,
    }  # fmt: skip
    config.update_from_flattened_dict(changes)
    journal = Journal(workdir / "journal", 0, 1 << 20)
    journal.append("start", {"order": 0})
    mask = np.arange(400) >= 100
    for step in range(4):
        ids = range(4 * step, 4 * step + 4)
        for i in ids:
            made = [
                Trajectory(np.zeros(400, np.int32), mask, np.zeros(400, np.float32),
                           np.where(mask, step, -1).astype(np.int32), 0.0, "stop", f"{i}.{k}")
                for k in range(2)
            ]  # fmt: skip
            journal.append("group", {"group_id": i}, Group(i, tuple(made)))
        journal.append("take", {"step": step, "groups": [*ids]})
        append_jsonl(workdir / "metrics.jsonl", {"step": step + 1, "start": 0, **seconds})
    journal.close()
    there = {"devices": devices, "cores": 2}
    append_jsonl(
        workdir / "starts.jsonl",
        {"start": 0, "step": 0, "config": as_json(config), "environment": there},
    )


def test_a_run_is_refitted_and_the_change_is_named(model, tmp_path):
    workdir = tmp_path / "run"
    a_run(workdir, model, {"step_seconds": 40.0, "seconds": {"train": 10.0, "wait": 30.0},
                           "server_busy_seconds": 40.0, "publish_seconds": 1.0})  # fmt: skip
    command = [sys.executable, "-m", "rlx.plan"]
    done = subprocess.run([*command, str(workdir)], capture_output=True, text=True, timeout=120)
    out = done.stdout
    assert done.returncode == 0, out + done.stderr
    assert "8 × NVIDIA H100 80GB HBM3: 4 prompts × 2 answers" in out
    assert "prompts of 100 tokens, answers of 300 (measured)" in out
    assert "40 s a step, trainer idle 75%, servers idle 0%" in out
    factors = re.search(r"servers take (\S+) and the trainer (\S+) times", out)
    assert float(factors[1]) > 5
    assert float(factors[2]) > 1.2
    # A server of eight short answers waits for its weights, which four GPUs read faster.
    change = re.search(
        r"change allocation_mode=vllm:d1t4\S+: (\S+) s .* of (\S+) s with vllm:d1", out
    )
    assert float(change[1]) < 0.9 * float(change[2])
    assert float(change[2]) == pytest.approx(40, rel=0.1), "the refitted plan is the run"
    plan = json.loads((workdir / "plan.json").read_text())
    assert plan["allocation"] == "vllm:d1+jax:f7"
    assert plan["seconds"]["generate"] < 10, "by the data sheet"
    more = float(re.search(r"and a publish (\S+) s more", out)[1])
    assert plan["seconds"]["publish"] + more == pytest.approx(1, abs=0.05), "as measured"


def test_this_machine_is_measured_with_a_config_only():
    command = [sys.executable, "-m", "rlx.plan", "--gpu=this", "--gpus=2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "give --config=FILE" in done.stderr


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--config.model.path=nowhere"], "error: --gpu=this: .*nowhere"),
        (["--config.rollout.max_concurrent_rollouts=-1"], "error: --gpu=this: .*=-1 is below 0"),
    ],
)
def test_a_config_that_cannot_run_measures_nothing(flags, line):
    command = [sys.executable, "-m", "rlx.plan", "--config=configs/arithmetic.py", "--gpu=this"]
    done = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stdout + done.stderr
    assert re.search(line, done.stderr)
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_short_run_measures_this_machine():
    command = [
        sys.executable, "-m", "rlx.plan", "--config=configs/arithmetic.py", "--gpu=this",
        "--config.rollout.batch_prompts=4", "--config.sampling.max_new_tokens=32",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    measured = re.search(r"measured in \S+: (\S+) s a step", done.stdout)
    planned = re.search(r"^jax:d1\+jax:f1 +(\S+) ", done.stdout, re.MULTILINE)
    assert float(planned[1]) == pytest.approx(float(measured[1]), rel=0.15)
    assert "answers of" in done.stdout
    assert "(measured)" in done.stdout


def test_a_run_on_an_unknown_device_is_one_line(model, tmp_path):
    a_run(tmp_path / "run", model, {"step_seconds": 1.0, "seconds": {}}, "", "8 × TPU v5")
    command = [sys.executable, "-m", "rlx.plan", f"--run={tmp_path / 'run'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert re.fullmatch(r"error: .* ran on 8 × TPU v5.*; give GPUs .*\n", done.stderr)


def test_a_run_without_a_recorded_step_is_one_line(model, tmp_path):
    a_run(tmp_path / "run", model, {"step_seconds": 1.0, "seconds": {}}, "", "1 × cpu")
    (tmp_path / "run/metrics.jsonl").unlink()
    command = [sys.executable, "-m", "rlx.plan", f"--run={tmp_path / 'run'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert re.fullmatch(r"error: .*/run has no record of a step; .*\n", done.stderr)


def test_a_probe_leaves_nothing_elsewhere_and_begins_there_with_nothing(tmp_path, monkeypatch):
    """The second one went on with the copy of the first one's last checkpoint."""
    config, started = default(), []
    elsewhere = {"checkpoint.copy_to": "s3://b/p", "observe.metrics_port": 9100,
                 "observe.traces": "http://localhost:4318"}  # fmt: skip
    config.update_from_flattened_dict({"model.path": "rlx:arithmetic", **elsewhere})
    done = subprocess.CompletedProcess([], 1, "", "error: stop here")
    monkeypatch.setattr(plan_run.subprocess, "run", lambda c, **_: started.append(c) or done)
    with pytest.raises(UserError, match="--gpu=this: stop here"):
        plan_run.probe(config, tmp_path / "run")
    values = dict(leaves(runpy.run_path(started[0][3].partition("=")[2])["get_config"]()))
    assert [values[key] for key in elsewhere] == ["", 0, ""]
    assert config.checkpoint.copy_to == "s3://b/p"


def test_a_run_on_cpus_predicts_other_settings(model, tmp_path):
    seconds = {"step_seconds": 60.0, "seconds": {"train": 12.0, "wait": 48.0},
               "server_busy_seconds": 60.0, "publish_seconds": 1.0}  # fmt: skip
    a_run(tmp_path / "run", model, seconds, "", "1 × cpu")
    command = [sys.executable, "-m", "rlx.plan", str(tmp_path / "run")]
    rows = {}
    for setting in ("fleet.num_servers=1,2", "rollout.max_staleness=0,2"):
        done = subprocess.run(
            [*command, f"--what_if={setting}"], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stdout + done.stderr
        for row in re.findall(r"^\d +jax.*", done.stdout, re.MULTILINE):
            value, allocated, step, _, waits, *_ = row.split()
            rows[setting[:8], int(value)] = allocated, float(step), waits
    assert rows["fleet.nu", 1][0] == "jax:d1+jax:f1"
    assert rows["fleet.nu", 1][1] == pytest.approx(60, rel=0.1), "the refitted plan is the run"
    # Two servers share the core that the trainer leaves them.
    assert rows["fleet.nu", 2][1] > 0.8 * rows["fleet.nu", 1][1]
    assert rows["rollout.", 0][1] > 1.2 * rows["rollout.", 2][1]
    assert rows["rollout.", 0][2] != "0%"
    assert not (tmp_path / "run/plan.json").exists(), "a CPU has no data sheet"
    for flag in ("--gpus=8", "--allocation=jax:d2+jax:f1"):
        done = subprocess.run([*command, flag], capture_output=True, text=True, timeout=120)
        assert done.returncode == 2, done.stdout + done.stderr
        assert f"{flag.partition('=')[0]} does nothing with a run on CPUs" in done.stderr


@pytest.mark.parametrize(
    ("every", "repeated"),
    [
        ({}, 300),
        ({"every_seconds": 0.0, "every_steps": 100}, 3000),
        ({"every_seconds": 600.0, "every_steps": 2}, 60),
        ({"every_seconds": 10.0}, 30),
        ({"every_seconds": 0.0}, 6000),
    ],
)
def test_a_failure_repeats_half_of_what_is_between_two_checkpoints(every, repeated):
    config, means = default(), SimpleNamespace(step_seconds=60.0)
    config.total_steps = 200
    config.checkpoint.update(every)
    plan = SimpleNamespace(trainer_gpus=50_700, prediction=means)
    assert plan_run._failure_factor(config, plan) == pytest.approx((300 + repeated) / 3600)
