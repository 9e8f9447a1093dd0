"""A directory knows who runs in it, and how the last one ended."""

import json
import os
import subprocess
import sys
import time

import pytest

from rlx.base import UserError
from rlx.system import workdir_lock
from rlx.system.workdir_lock import SILENT_SECONDS, lock_workdir

HOLD = """
import sys
from pathlib import Path
from rlx.system import workdir_lock
workdir_lock.BEAT_SECONDS = 0.05
with workdir_lock.lock_workdir(Path(sys.argv[1])) as before:
    print(before, flush=True)
    input()
"""


RACE = """
import sys, time
from pathlib import Path
from rlx.base import UserError
from rlx.system.workdir_lock import lock_workdir
print("ready", flush=True)
for turn in range(200):
    while not (Path(sys.argv[1]) / f"go{turn}").exists():
        pass
    try:
        with lock_workdir(Path(sys.argv[1])):
            print("got it", flush=True)
            sys.stdin.readline()
    except UserError:
        print("refused", flush=True)
        sys.stdin.readline()
    print("out", flush=True)
"""


def hold(directory):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(directory)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    return process, process.stdout.readline().strip()


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def last(directory):
    with lock_workdir(directory) as before:
        return before


def test_two_processes_do_not_run_in_one_directory(tmp_path):
    process, before = hold(tmp_path)
    try:
        assert before == "None"
        with pytest.raises(UserError, match=f"process {process.pid} runs in .*--workdir"):
            last(tmp_path)
    finally:
        process.communicate("\n")
    assert last(tmp_path) is None
    assert not list(tmp_path.iterdir())


def test_the_next_one_learns_that_the_last_was_killed(tmp_path, monkeypatch):
    process, _ = hold(tmp_path)
    process.kill()
    process.communicate()
    with lock_workdir(tmp_path) as before:
        assert before.pid == process.pid
        assert str(before).endswith("was killed, by SIGKILL, or with its machine")
        record = json.loads((tmp_path / "running.json").read_text())
    assert record["pid"] == os.getpid()
    (tmp_path / "running.json").write_text(json.dumps({**record, "pid": process.pid}))
    monkeypatch.setattr(workdir_lock, "oom_kills", lambda: record["oom_kills"] + 1)
    killed = last(tmp_path)
    assert killed.for_memory
    assert "out of memory" in str(killed)


def test_an_end_with_an_error_is_no_kill(tmp_path):
    with pytest.raises(KeyboardInterrupt), lock_workdir(tmp_path):
        raise KeyboardInterrupt
    assert last(tmp_path) is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"pid": "x", "begun": 1}', "\xff"])
def test_what_cannot_be_read_is_nobody(tmp_path, text):
    (tmp_path / "running.json").write_text(text)
    assert last(tmp_path) is None


def elsewhere(directory, silent=0.0):
    """A record of another host, whose last sign of life was `silent` seconds ago."""
    path = directory / "running.json"
    path.write_text(json.dumps({"pid": 7, "begun": "1", "machine": "node3 another-boot"}))
    os.utime(path, (time.time() - silent,) * 2)


def test_another_host_is_refused_until_it_gives_no_sign_of_life(tmp_path):
    elsewhere(tmp_path, silent=SILENT_SECONDS / 2)
    with pytest.raises(UserError, match=r"process 7 of node3 .alive 30 s ago.*60 s if its host"):
        last(tmp_path)
    assert json.loads((tmp_path / "running.json").read_text())["pid"] == 7
    elsewhere(tmp_path, silent=SILENT_SECONDS + 5)
    killed = last(tmp_path)
    assert killed.pid == 7
    assert not killed.for_memory


def test_a_process_gives_signs_of_life(tmp_path):
    process, _ = hold(tmp_path)
    try:
        path = tmp_path / "running.json"
        os.utime(path, (0, 0))
        wait_for(lambda: path.stat().st_mtime > 1e9)
    finally:
        process.communicate("\n")


def test_whoever_was_stopped_and_finds_another_in_its_place_ends(tmp_path):
    process, _ = hold(tmp_path)
    elsewhere(tmp_path)
    assert process.wait(60) == 2
    _, said = process.communicate()
    assert said.startswith("error: process 7 of node3 has taken")
    assert (tmp_path / "running.json").exists()


def test_of_many_that_start_together_one_gets_the_directory(tmp_path):
    """Three processes, each ready before any begins, two hundred times; a file starts them."""
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, str(tmp_path)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for _ in range(3)
    ]  # fmt: skip
    try:
        assert all(racer.stdout.readline() == "ready\n" for racer in racers)
        for turn in range(200):
            (tmp_path / f"go{turn}").touch()
            got = [racer.stdout.readline().strip() for racer in racers]
            assert sorted(got) == ["got it", *["refused"] * 2]
            for racer in racers:
                racer.stdin.write("\n")
                racer.stdin.flush()
            assert all(racer.stdout.readline() == "out\n" for racer in racers)
    finally:
        for racer in racers:
            racer.kill()
            racer.communicate()


def test_a_directory_is_made_and_goes_again_if_it_stays_empty(tmp_path):
    place = tmp_path / "a" / "b"
    with lock_workdir(place):
        assert place.is_dir()
    assert not place.exists()
    with lock_workdir(place):
        (place / "record").touch()
    assert place.exists()
