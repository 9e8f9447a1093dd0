"""A directory that is replaced is there at every moment, whoever is killed."""

import os
import signal
import subprocess
import sys
import time

import pytest

from rlx.system import atomic_directory as module
from rlx.system.atomic_directory import atomic_directory, sweep

REPLACE = """
import sys
from pathlib import Path
from rlx.system.atomic_directory import atomic_directory
for turn in range(1_000_000):
    with atomic_directory(Path(sys.argv[1])) as fresh:
        for name in "ab":
            (fresh / name).write_text(str(turn))
    print(turn, flush=True)
"""


def replace(path, text):
    with atomic_directory(path) as fresh:
        (fresh / "a").write_text(text)


def test_it_is_there_at_every_moment_and_a_killed_writers_copy_goes_at_the_next_write(tmp_path):
    path, left = tmp_path / "hf", 0
    for turn in range(20):
        child = subprocess.Popen([sys.executable, "-c", REPLACE, str(path)], stdout=subprocess.PIPE)
        try:
            assert child.stdout.readline()
            deadline = time.monotonic() + 60
            while not list(tmp_path.glob(".hf-*")):
                assert time.monotonic() < deadline
                os.stat(path)  # never missing
        finally:
            child.send_signal(signal.SIGKILL)
            child.communicate()
        assert {p.name for p in path.iterdir()} == {"a", "b"}
        assert (path / "a").read_text() == (path / "b").read_text()
        left += len(list(tmp_path.iterdir())) - 1
        assert left <= turn + 1, "a killed writer's copy is still there"
    assert left > 2, "no writer was killed while it wrote"
    replace(path, "new")
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


def test_a_living_writers_copy_is_not_swept(tmp_path):
    path = tmp_path / "hf"
    with atomic_directory(path) as fresh:
        (fresh / "a").write_text("first")
        replace(path, "second")
    assert (path / "a").read_text() == "first"
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize("killed", [False, True])
def test_without_an_exchange_what_was_taken_away_comes_back(tmp_path, monkeypatch, killed):
    monkeypatch.setattr(module, "exchange", lambda one, other: False)
    path = tmp_path / "hf"
    replace(path, "first")
    replace(path, "second")
    assert (path / "a").read_text() == "second"
    if killed:  # between the two renames
        (tmp_path / ".hf-old-x").mkdir()
        path.rename(tmp_path / ".hf-old-x" / "hf")
    sweep(path)
    assert (path / "a").read_text() == "second"
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize("name", ["hf", "hf[1]"])
def test_only_what_was_left_of_the_same_path_is_swept(tmp_path, name):
    """A path of a longer name may have been moved away, too; brackets are no pattern."""
    other, own = tmp_path / f".{name}-new-old-x" / f"{name}-new", tmp_path / f".{name}-x"
    other.mkdir(parents=True)
    own.mkdir()
    sweep(tmp_path / name)
    assert other.is_dir()
    assert not own.exists()
