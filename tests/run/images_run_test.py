"""A run of a model that sees: gate, updates, publishes, resume, replay, report and comparison."""

import json
import subprocess
import sys

import pytest

from rlx.rollout import shapes

pytest.importorskip("PIL")
pytestmark = [pytest.mark.vllm, pytest.mark.slow]
SMALL = [
    "--config=configs/shapes.py", "--config.model.path=rlx:shapes", "--config.eval.num_questions=4",
    "--config.rollout.batch_prompts=4", "--config.sampling.n_samples=2",
    "--config.rollout.max_concurrent_rollouts=8",
]  # fmt: skip


def run(*command):
    done = subprocess.run(
        [sys.executable, "-m", *map(str, command)], text=True, capture_output=True, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_learns_from_pictures_resumes_and_is_replayed_bitwise(tmp_path):
    workdir = tmp_path / "run"
    for steps in (2, 3):
        run("rlx.main", *SMALL, f"--config.total_steps={steps}", f"--workdir={workdir}")
    (*_, gate) = records(workdir / "gate.jsonl")
    assert gate["ok"]
    assert gate["max_delta"] < 1e-4
    steps = records(workdir / "metrics.jsonl")
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert all(step["dropped"] == 0 for step in steps)
    assert len(records(workdir / "eval.jsonl")) >= 2
    names = {path.name for path in (workdir / "images").iterdir()}
    samples = [s for file in (workdir / "rollouts").iterdir() for s in records(file)]
    assert samples
    assert {name for sample in samples for name in sample["images"]} <= names
    assert '<img src="data:image/png;base64,' in (workdir / "report.html").read_text()
    assert "bitwise those of the run" in run("rlx.replay", workdir)
    run("rlx.replay", workdir, f"--bundle={tmp_path / 'steps.zip'}")
    assert "bitwise those of the run" in run("rlx.replay", tmp_path / "steps.zip")


def test_the_engine_is_compared_with_transformers_on_questions_about_pictures(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(map(json.dumps, shapes.problems(0, "held_out", 4))))
    said = run(
        "rlx.compare", "--model=rlx:shapes", "--engine=vllm", f"--prompts={rows}",
        "--max-new-tokens=4",
    )  # fmt: skip
    assert "engine – transformers" in said
