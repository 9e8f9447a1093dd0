"""The machine's rows: what is good, what is slow, what cannot work."""

import socket

import pytest

from rlx.checkup import machine
from rlx.checkup.machine import Devices

GB = 10**9


@pytest.mark.parametrize(
    ("finding", "level", "word"),
    [
        (machine.judge_devices(Devices(kind="cpu"), 0, {}), "ok", "1 × cpu"),
        (machine.judge_devices(Devices("gpu", "H100", 8, 80 * GB), 8, {}), "ok", "80.0 GB each"),
        (machine.judge_devices(Devices(), 2, {}), "warning", "rlx[cuda]"),
        (machine.judge_devices(Devices(), 2, {"JAX_PLATFORMS": "cpu"}), "warning", "unset"),
        (machine.judge_devices("no answer after 1 s", 0, {}), "problem", "no answer"),
        (machine.judge_cores(4, 4, 1.0), "ok", "4 of 4"),
        (machine.judge_cores(1, 4, 0.0), "warning", "take turns"),
        (machine.judge_cores(4, 4, 9.0), "warning", "others are at work"),
        (machine.judge_address("h:1", ""), "ok", "accepts"),
        (machine.judge_address("h:1", "refused"), "problem", "rlx.serve"),
        (machine.judge_shared_memory(64 << 20, 64 << 20), "warning", "--shm-size"),
        (machine.judge_shared_memory(8 * GB, 8 * GB), "ok", "8.00 GB"),
        (machine.judge_shared_memory(64 << 20, 64 << 20, 10**6), "ok", "0.00 GB"),
        (machine.judge_shared_memory(8 * GB, GB, 2 * GB), "problem", "fleet.publish_dir"),
        (machine.judge_clock(1e-9, [4e-8, 0.0], 1.9e9), "ok", "40 ns"),
        (machine.judge_clock(1e-9, [4e-8, -1e-9], 1.9e9), "problem", "backwards"),
        (machine.judge_clock(0.016, [0.016], 1.9e9), "problem", "coarse"),
        (machine.judge_clock(1e-9, [4e-8], 0.0), "warning", "set the date"),
    ],
)
def test_a_row_says_what_is_wrong_and_what_to_do(finding, level, word):
    assert finding.level == level
    assert word in finding.found + finding.remedy
    assert bool(finding.remedy) == (level != "ok")


def test_workdirs_that_are_full_or_closed_are_told(tmp_path):
    assert machine.judge_workdir(tmp_path, 50 * GB, True).level == "ok"
    assert machine.judge_workdir(tmp_path, 10**8, True).level == "warning"
    assert machine.judge_workdir(tmp_path, 50 * GB, False).level == "problem"
    assert machine.existing(tmp_path / "a" / "b") == tmp_path


def test_addresses_are_tried():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert machine.reach(f"127.0.0.1:{port}") == ""
    assert "refused" in machine.reach(f"127.0.0.1:{port}")
    assert machine.reach("nonsense")
    assert machine.check_loopback().level == "ok"


def test_a_jax_that_hangs_or_fails_is_an_answer(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "jax.py").write_text("import time; time.sleep(60)")
    assert machine.devices(seconds=1.0) == "no answer after 1 s"
    (tmp_path / "jax.py").write_text("raise RuntimeError('no driver')")
    assert machine.devices() == "RuntimeError: no driver"


def test_memory_is_some_of_what_there_is():
    total = machine.os.sysconf("SC_PAGE_SIZE") * machine.os.sysconf("SC_PHYS_PAGES")
    assert 0 < machine.memory_available() < total
    assert machine.check_shared_memory(0, "/nowhere").level == "problem"
