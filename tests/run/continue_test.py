"""Unfinished samples of a whole run that is killed and goes on with another engine.

Whatever the machine does besides, a test waits as long as the run's files grow.
"""

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rlx.journal import journal
from tests.run.kill_test import (
    BATCH,
    LONG,
    history,
    kill_at,
    last_lines,
    left_over,
    records,
    start,
)

SILENT = 600.0  # seconds without a new byte, then a run hangs
FLAGS = (*LONG, "--config.fleet.ready_seconds=900")
Samples = dict[tuple[int, int, int], list[int]]  # group, call and index → tokens


def under_way(workdir: Path) -> Samples:
    """Return the samples of groups that are not finished."""
    found: Samples = {}
    for record, _ in journal.read(workdir / "journal"):
        if record.kind == "tokens":
            tokens = record.group().trajectories[0].tokens.tolist()
            for group, call, index, at, count, _ in record.fields["pieces"]:
                sample = found.setdefault((group, call, index), [])
                sample[at:], tokens = tokens[:count], tokens[count:]
        elif record.kind == "group":
            found = {k: v for k, v in found.items() if k[0] != record.fields["group_id"]}
    return found


def grown(workdir: Path) -> int:
    """Return the bytes that a run has written so far."""
    files = [workdir.with_suffix(".log"), *workdir.rglob("*")]
    return sum(path.stat().st_size for path in files if path.is_file())


def wait_for(process: subprocess.Popen, workdir: Path, point: Callable[[], bool]) -> None:
    """Wait until `point()`, or the process ends if `point` is false for ever."""
    size, since = 0, time.monotonic()
    while process.poll() is None and not point():
        if size != (now := grown(workdir)):
            size, since = now, time.monotonic()
        assert time.monotonic() - since < SILENT, last_lines(workdir)
        time.sleep(0.1)


def end(process: subprocess.Popen, workdir: Path) -> int:
    """Wait until a run and all that it started have ended; return its status."""
    wait_for(process, workdir, lambda: False)
    deadline = time.monotonic() + SILENT
    while left_over(workdir):
        assert time.monotonic() < deadline, f"processes {left_over(workdir)} live on"
        time.sleep(0.1)
    return process.returncode


def check_continued(workdir: Path, had: Samples, total: int, max_staleness: int) -> dict:
    """Check that a finished run lost and doubled nothing; return its last note in starts.jsonl."""
    assert not list(history(workdir, total, max_staleness))
    events = [record for record, _ in journal.read(workdir / "journal")]
    assert not [record.fields for record in events if record.kind in ("fail", "skip")]
    made = {r.fields["group_id"]: r.group().trajectories for r in events if r.kind == "group"}
    for (group, *_), tokens in had.items():
        drawn = [t.tokens[t.versions >= 0][: len(tokens)].tolist() for t in made[group]]
        assert tokens in drawn
    return notes(workdir)[-1]


def notes(workdir: Path) -> list[dict]:
    """Return what each start has continued."""
    return [line["continued"] for line in records(workdir / "starts.jsonl") if "continued" in line]


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("engines", ["jax, vllm"])
def test_a_run_killed_with_one_engine_goes_on_with_the_other(tmp_path, engines):
    workdir = tmp_path / "run" / "run"
    workdir.parent.mkdir()
    flags = {"jax": (), "vllm": ("--config.allocation_mode=vllm:d1+jax:f1",)}
    first, second = ((*FLAGS, *flags[engine]) for engine in engines.split(", "))

    def reached() -> bool:
        saved = any(workdir.glob("checkpoints/step_*"))
        return saved and len(under_way(workdir)) > 2

    process = start(workdir, 1000, 2, *first)
    wait_for(process, workdir, reached)
    assert process.poll() is None, last_lines(workdir)
    kill_at(process, lambda: True)
    end(process, workdir)
    had, done = under_way(workdir), len(records(workdir / "metrics.jsonl"))
    total = max(done, *(group // BATCH for group, *_ in had)) + 1
    process = start(workdir, total, 2, *second)
    assert end(process, workdir) == 0, last_lines(workdir)
    note = check_continued(workdir, had, total, 2)
    tokens = sum(map(len, had.values()))
    assert (note["samples"], note["tokens"], note["repeated_tokens"]) == (len(had), tokens, 0)
