"""The gate in a run, and the compare command: real servers that compute something else.

Runs that pass the gate are in main_test.py.
"""

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlx.mismatch.gate import _sentence
from tests.fixtures.commands import RLX_MAIN

MODEL = Path("rlx/assets/arithmetic")
RUN = [
    *RLX_MAIN, "--config=configs/arithmetic.py",
    "--config.rollout.batch_prompts=4", "--config.sampling.n_samples=4", "--config.fleet.slots=16",
    "--config.sampling.max_new_tokens=32", "--config.eval.num_questions=0",
    "--config.optimizer.learning_rate=3e-3", "--config.observe.writers=()",
    "--config.model.compute_dtype=float32",
]  # fmt: skip

# A server that says it has each new version and keeps the weights it began with.
FORGETFUL = """
import sys
from rlx import serve
from rlx.cli import command
from rlx.engines.jax.jax_engine import JaxEngine

load = JaxEngine.load

async def forget(self, path, version, kv="keep"):
    return await load(self, str(self.model_path / "model.safetensors"), version, kv)

JaxEngine.load = forget
command.run(lambda: serve.main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def other_rope(tmp_path_factory):
    """The packaged model with another RoPE base."""
    target = tmp_path_factory.mktemp("other") / "model"
    shutil.copytree(MODEL, target)
    config = json.loads((target / "config.json").read_text())
    config.pop("rope_theta")
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6}
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.fixture(scope="module")
def serve():
    """serve(model, what comes after `python`) → address; equal arguments share a server."""
    started = []

    @functools.cache
    def start(model, *program):
        command = [sys.executable, *(program or ("-m", "rlx.serve")), f"--model={model}",
                   "--engine=jax", "--slots=16", "--max-model-len=128"]  # fmt: skip
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return f"127.0.0.1:{json.loads(started[-1].stdout.readline())['port']}"

    yield start
    for process in started:
        process.kill()
        process.communicate()


def run(command, timeout=180):
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        out, errors = process.communicate(timeout=timeout)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return process.returncode, out, errors


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.mark.slow
def test_a_run_stops_before_its_first_step_when_one_server_computes_something_else(
    serve, other_rope, tmp_path
):
    good, bad = serve(MODEL), serve(other_rope)
    status, out, errors = run(
        [*RUN, f"--workdir={tmp_path}", f"--config.fleet.addresses=('{good}','{bad}')"]
    )
    assert status == 2, out + errors
    (line,) = errors.strip().splitlines()
    assert line.startswith(f"error: gate: engine {bad} and trainer disagree on version 0")
    assert "likely cause: RoPE base: the engine has base 1e+06, the trainer 10000" in line
    assert "position" in line
    assert "gate.jsonl" in line
    (record,) = records(tmp_path / "gate.jsonl")
    assert (record["step"], record["ok"]) == (0, False)
    assert record["servers"][good]["bad"] == 0 < record["servers"][bad]["bad"]
    assert record["servers"][good]["causes"] == []
    assert record["servers"][bad]["causes"][0]["cause"] == "RoPE base"
    assert not records(tmp_path / "metrics.jsonl"), "no step was taken"
    assert not (tmp_path / "checkpoints").exists(), "a mended command begins anew"


def test_the_line_of_a_passed_check_fits_a_terminal_that_would_cut_a_number():
    record = {"tokens": 12345, "servers": dict.fromkeys(range(64)), "step": 1000,
              "mean_delta": 1.2e-6, "max_delta": 1.2e-5}  # fmt: skip
    assert len(_sentence(record)) < 110


@pytest.mark.slow
def test_a_server_that_forgets_an_update_stops_the_run_and_costs_no_step(serve, tmp_path):
    address = serve(MODEL, "-c", FORGETFUL)
    status, out, errors = run(
        [*RUN, f"--workdir={tmp_path}", f"--config.fleet.addresses=('{address}',)",
         "--config.gate.every_steps=2", "--config.total_steps=9"]
    )  # fmt: skip
    assert status == 2, out + errors
    assert "version 0: engine and trainer agree, |Δ| mean" in out
    line = errors.strip().splitlines()[-1]
    assert "disagree on version 2" in line
    assert "stale weights: the engine still has the run's first weights" in line
    assert [(r["step"], r["ok"]) for r in records(tmp_path / "gate.jsonl")] == [
        (0, True), (2, False)
    ]  # fmt: skip
    steps = records(tmp_path / "metrics.jsonl")
    assert [step["step"] for step in steps] == [1, 2]
    assert [path.name for path in (tmp_path / "checkpoints").glob("step_*")] == ["step_00000002"]


@pytest.mark.slow
def test_a_server_that_joins_and_computes_something_else_is_refused_and_the_run_goes_on(
    serve, other_rope, tmp_path
):
    good, servers = serve(MODEL), tmp_path / "addresses"
    bad = serve(other_rope, "-m", "rlx.serve")  # its own: it may get the run's later weights
    servers.write_text(f"{good}\n")
    process = subprocess.Popen(
        [*RUN, f"--workdir={tmp_path / 'run'}", f"--config.fleet.addresses=('@{servers}',)",
         "--config.gate.every_steps=0", "--config.total_steps=100000"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip

    def steps():
        return len(records(tmp_path / "run" / "metrics.jsonl"))

    def until(condition):
        deadline = time.monotonic() + 180
        while not condition() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)

    try:
        until(steps)
        servers.write_text(f"{good}\n{bad}\n")
        until(lambda: len(records(tmp_path / "run" / "gate.jsonl")) > 1)
        before = steps()
        until(lambda: steps() >= before + 3)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=180)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130, out
    assert f"{bad} gets no requests: gate: engine {bad} and trainer disagree on version" in out
    first, second = records(tmp_path / "run" / "gate.jsonl")
    assert [set(each["servers"]) for each in (first, second)] == [{good}, {good, bad}]
    assert [each["ok"] for each in (first, second)] == [True, False]


COMPARE = [sys.executable, "-m", "rlx.compare", "--model=rlx:arithmetic", "--count=4",
           "--max-new-tokens=16", "--temperature=0.7"]  # fmt: skip


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("engine", ["jax", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_compare_prints_every_pair_and_exits_with_0(engine, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("1 + 1\n\n23 - 4\n")
    status, out, errors = run([*COMPARE, f"--engine={engine}", f"--prompts={prompts}"])
    assert status == 0, out + errors
    title, _, *lines = out.splitlines()
    assert title.startswith("2 completions, ")
    pairs = ["engine – rlx", "engine – transformers", "rlx – transformers"]
    assert [line[:24].strip() for line in lines] == pairs
    assert all(float(line[24:].split()[1]) < 1e-4 for line in lines)


def test_compare_names_the_cause_and_exits_with_1(serve, other_rope):
    status, out, errors = run([*COMPARE, f"--address={serve(other_rope)}"])
    assert status == 1, out + errors
    lines = out.splitlines()
    assert "position" in lines[2]
    assert lines[-1].startswith("likely cause: RoPE base")


@pytest.mark.vllm
@pytest.mark.slow
def test_compare_tells_vllms_half_precision_from_other_causes():
    status, out, errors = run(
        [*COMPARE, "--engine=vllm", "--dtype=bfloat16", "--max-delta=1e-3", "--mean-delta=1e-4",
         "--count=16", "--max-new-tokens=64"]
    )  # fmt: skip
    assert status == 1, out + errors
    assert "likely cause: dtype: the engine computes in bfloat16" in out.splitlines()[-1]


def test_compare_says_in_one_line_that_there_are_no_prompts(tmp_path):
    status, out, errors = run([*COMPARE, f"--prompts={tmp_path / 'none.txt'}"])
    assert status == 2
    assert len((out + errors).strip().splitlines()) == 1
    assert "none.txt" in errors
