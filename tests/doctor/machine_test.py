"""The machine's rows: what is good, what is slow, what cannot work."""

import os
import socket

import pytest

from rlx.doctor import machine
from rlx.doctor.machine import Devices
from rlx.sandbox.sandbox import Outcome
from rlx.system.host_port import refusal
from rlx.system.workdir_lock import existing

GB = 10**9
RAN = Outcome("ok", "42\n", "", 0.1)


@pytest.mark.parametrize(
    ("finding", "level", "word"),
    [
        (machine.judge_devices(Devices(kind="cpu"), 0, {}), "ok", "1 × cpu"),
        (machine.judge_devices(Devices("gpu", "H100", 8, 80 * GB), 8, {}), "ok", "80.0 GB each"),
        (machine.judge_devices(Devices(), 2, {}), "warning", "pip install -e '.[cuda]'"),
        (machine.judge_devices(Devices(), 2, {"JAX_PLATFORMS": "cpu"}), "warning", "unset"),
        (machine.judge_devices("no answer after 1 s", 0, {}), "problem", "no answer"),
        (machine.judge_gpus_in_use([(400, 80_000), (1, 80_000)]), "ok", "of 2 GPUs"),
        (machine.judge_gpus_in_use([(1, 8), (61_440, 81_920)]), "warning", "GPU 1: 60.0 of 80.0"),
        (machine.judge_address("h:1", "", "teacher.addresses"), "ok", "accepts"),
        (machine.judge_address("h:1", "refused"), "problem", "rlx.serve"),
        (machine.judge_sandbox("namespaces", {}, RAN), "ok", "by namespaces"),
        (
            machine.judge_sandbox("landlock", {"bubblewrap": "bwrap is not"}, RAN),
            "ok",
            "no bubblew",
        ),
        (
            machine.judge_sandbox("none", {"seccomp": "refused"}, RAN),
            "warning",
            "no seccomp: refused",
        ),
        (machine.judge_sandbox("none", {}, Outcome("lost", "", "no", 0.0)), "problem", "lost"),
    ],
)
def test_a_row_says_what_is_wrong_and_what_to_do(finding, level, word):
    assert finding.level == level
    assert word in finding.result + finding.remedy
    assert bool(finding.remedy) == (level != "ok")


def test_workdirs_that_are_full_or_closed_are_told(tmp_path):
    assert machine.judge_workdir(tmp_path, 50 * GB, True).level == "ok"
    assert machine.judge_workdir(tmp_path, 10**8, True).level == "warning"
    assert machine.judge_workdir(tmp_path, 50 * GB, False).level == "problem"
    assert existing(tmp_path / "a" / "b") == tmp_path


def test_addresses_are_tried():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert refusal(f"127.0.0.1:{port}", 3.0) is None
    assert "refused" in str(refusal(f"127.0.0.1:{port}", 3.0))
    assert refusal("nonsense", 3.0)


def test_a_jax_that_hangs_or_fails_is_an_answer(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "jax.py").write_text("import time; time.sleep(60)")
    assert machine.devices(seconds=1.0) == "no answer after 1 s"
    (tmp_path / "jax.py").write_text("raise RuntimeError('no driver')")
    assert machine.devices() == "RuntimeError: no driver"


def test_nvidia_smi_is_asked_what_others_hold(tmp_path, monkeypatch):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 61440, 81920\necho '0, 81920'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert machine.gpus_in_use() == [(61440, 81920), (0, 81920)]
    smi.write_text("#!/bin/sh\necho 'No devices were found'\n")
    assert machine.gpus_in_use() == []
    assert machine.judge_gpus_in_use([]) is None


def test_a_publish_dir_is_a_problem_where_it_is_missing_or_too_small(tmp_path):
    found = machine.check_publish_dir(str(tmp_path), 10**6)
    assert (found.level, found.result.endswith("need 1.0 MB")) == ("ok", True)
    for place, needed in (("/nowhere", 0), (str(tmp_path), 10**18)):
        found = machine.check_publish_dir(place, needed)
        assert (found.level, "fleet.publish_dir" in found.remedy) == ("problem", True)
    assert machine.check_publish_dir(str(tmp_path), 10**18, 10**18 - 1).level == "problem"
    assert machine.check_publish_dir(str(tmp_path), 10**18, 10**18).level == "warning"
