"""A run with the trainer in PyTorch, by its command: it learns, saves, and goes on."""

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.torch]
PROGRAM = """
import sys
from rlx.main import main
status = main()
assert "jax" not in sys.modules
sys.exit(status)
"""


def run(workdir, steps):
    command = [
        sys.executable, "-c", PROGRAM, "--config=configs/arithmetic.py", f"--workdir={workdir}",
        "--config.trainer=torch", f"--config.total_steps={steps}", "--config.eval.num_questions=64",
        "--config.checkpoint.first_step=1",
        # XLA does not optimise the server's programs here, and bfloat16 takes it minutes then.
        "--config.model.compute_dtype=float32",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return records(workdir / "metrics.jsonl")


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_learns_and_goes_on_after_its_checkpoint(tmp_path):
    first = run(tmp_path, 2)
    assert [record["step"] for record in first] == [1, 2]
    again = run(tmp_path, 10)
    assert [record["step"] for record in again] == list(range(1, 11))
    assert again[:2] == first
    assert all(record["skipped_updates"] == 0 for record in again)
    scores = [record["greedy_acc"] for record in records(tmp_path / "eval.jsonl")]
    assert scores[-1] > scores[0] + 0.1
    assert records(tmp_path / "gate.jsonl"), "its tokens were compared with a server's"
    assert "PyTorch" in json.loads((tmp_path / "environment.json").read_text())["devices"]
