"""A directory knows who runs in it, and how the last one ended."""

import json
import os
import subprocess
import sys

import pytest

from rlx.base import UserError
from rlx.launch import occupancy
from rlx.launch.occupancy import occupied, require_free

HOLD = """
import sys
from pathlib import Path
from rlx.launch.occupancy import occupied
with occupied(Path(sys.argv[1])) as before:
    print(before, flush=True)
    input()
"""


def hold(directory):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(directory)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    return process, process.stdout.readline().strip()


def test_two_processes_do_not_run_in_one_directory(tmp_path):
    process, before = hold(tmp_path)
    try:
        assert before == "None"
        with pytest.raises(UserError, match=f"process {process.pid} runs in .*--workdir"):
            require_free(tmp_path)
    finally:
        process.communicate("\n")
    assert require_free(tmp_path) is None
    assert not list(tmp_path.iterdir())


def test_the_next_one_learns_that_the_last_was_killed(tmp_path, monkeypatch):
    process, _ = hold(tmp_path)
    process.kill()
    process.communicate()
    with occupied(tmp_path) as before:
        assert before.pid == process.pid
        assert str(before).endswith("without a word, by SIGKILL, or with its machine")
        record = json.loads((tmp_path / "running.json").read_text())
    assert record["pid"] == os.getpid()
    (tmp_path / "running.json").write_text(json.dumps({**record, "pid": process.pid}))
    monkeypatch.setattr(occupancy, "oom_kills", lambda: record["oom_kills"] + 1)
    killed = require_free(tmp_path)
    assert killed.for_memory
    assert "killed for want of memory" in str(killed)


def test_an_end_with_an_error_is_no_kill(tmp_path):
    with pytest.raises(KeyboardInterrupt), occupied(tmp_path):
        raise KeyboardInterrupt
    assert require_free(tmp_path) is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"pid": "x", "begun": 1}', "\xff"])
def test_what_cannot_be_read_is_nobody(tmp_path, text):
    (tmp_path / "running.json").write_text(text)
    assert require_free(tmp_path) is None


def test_another_machines_process_is_not_looked_for_here(tmp_path):
    with occupied(tmp_path):
        record = json.loads((tmp_path / "running.json").read_text())
        (tmp_path / "running.json").write_text(json.dumps({**record, "machine": "elsewhere x"}))
        killed = require_free(tmp_path)
    assert killed is not None
    assert not killed.for_memory
