"""`python -m experiments.gpu.run` on a CPU, tiny: what a GPU hour would write."""

import json
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.gpu import attention, measure, step
from rlx.model.attention import attention as trained
from rlx.model.params import forward_flops


def test_an_attention_that_is_wrong_is_seen():
    given = attention.inputs(1, 64, 4, 2, 8, jnp.float32)
    limit = attention.LIMITS["float32"]
    assert max(attention.errors(trained, given).values()) < limit

    def of_whole_rows(q, k, v, ids, sizes):
        return trained(q, k, v, jnp.ones_like(ids))

    def of_other_groups(q, k, v, ids, sizes):
        return trained(q, k[:, :, ::-1], v[:, :, ::-1], ids)

    for wrong in (of_whole_rows, of_other_groups):
        assert min(attention.errors(wrong, given).values()) > 100 * limit


def test_useful_flops_are_those_of_the_segments():
    found = step.work(step.TINY, measure.segments(2, 64, padding=True))
    whole = 3 * forward_flops(step.TINY, np.array([32, 16, 8] * 2))
    assert sum(part.flops for part in found.values()) == pytest.approx(whole)


@pytest.mark.slow
def test_every_part_runs_tiny_on_a_cpu_and_writes_what_it_found(tmp_path):
    out = tmp_path / "gpu.json"
    command = [sys.executable, "-m", "experiments.gpu.run", "--platform=cpu", "--tiny"]
    parts = ("attention", "step_4k", "task", "decode")
    done = subprocess.run(
        [*command, f"--out={out}", f"--parts={','.join(parts)}", "--minutes=10"],
        capture_output=True, text=True, timeout=2400, check=False,
    )  # fmt: skip
    report = json.loads(out.read_text())
    assert done.returncode == 0, report
    assert [name for name, part in report["parts"].items() if part["status"] == "ok"] == [*parts]
    found = {name: part["result"] for name, part in report["parts"].items()}
    assert all(result["device"]["platform"] == "cpu" for result in found.values())
    assert found["attention"]["equal"]
    errors = [e for case in found["attention"]["cases"].values() for e in case.values()]
    assert len(errors) == 4 * len(found["attention"]["cases"]) >= 8
    assert all(0 < e < found["attention"]["limit"] for e in errors), "0: nothing was compared"
    measured = found["step_4k"]
    assert set(measured["parts"]) == {
        "projections", "mlp", "attention", "head", "optimizer", "other"
    }  # fmt: skip
    assert sum(part["share"] for part in measured["parts"].values()) == pytest.approx(1)
    assert measured["utilisation"] > 0
    assert measured["memory"]["planned"] > 0
    assert measured["memory"]["estimate"] > 0
    assert list(found["task"]["accuracy"]) == ["0", "2"]
    assert found["task"]["steps_per_second"] > 0
    assert all(rate > 0 for rate in found["decode"]["tokens_per_second"].values())
    for name in parts:
        assert name in done.stdout


@pytest.mark.torch
@pytest.mark.slow
def test_the_trainer_in_torch_has_its_own_parts(tmp_path):
    out = tmp_path / "gpu.json"
    done = subprocess.run(
        [sys.executable, "-m", "experiments.gpu.run", "--platform=cpu", "--tiny", "--trainer=torch",
         "--parts=attention,step_4k", f"--out={out}"],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    report = json.loads(out.read_text())
    assert done.returncode == 0, report
    found = {name: part["result"] for name, part in report["parts"].items()}
    assert found["attention"]["equal"]
    assert found["attention"]["cases"]["rlx_segments, 4 heads, 1 kv heads"]["grad_k"] > 0
    assert found["step_4k"]["tokens_per_second"] > 0


def test_a_part_that_cannot_run_is_reported_and_the_others_go_on(tmp_path):
    out = tmp_path / "gpu.json"
    done = subprocess.run(
        [sys.executable, "-m", "experiments.gpu.run", "--tiny", "--platform=none_such",
         "--parts=attention,decode", f"--out={out}"],
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    parts = json.loads(out.read_text())["parts"]
    assert done.returncode == 1
    assert {part["status"] for part in parts.values()} == {"failed"}
    assert all("none_such" in part["error"] for part in parts.values())
    assert done.stdout.count("failed") == 2
