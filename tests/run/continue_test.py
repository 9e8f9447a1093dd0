"""Unfinished samples of a whole run that ends: by SIGTERM, or by a kill that changes the engine.

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
# With few slots a sample is under way nearly always, however fast the server is.
FLAGS = (*LONG, "--config.fleet.ready_seconds=900", "--config.fleet.slots=2")
MIXED = '''
from openai import AsyncOpenAI

from rlx.agents.workflow import AgentWorkflow
from rlx.rollout.workflows import RLVR


class Asks:
    """An agent that does not try again, so that it fails when its gateway does."""

    async def run(self, data, **extra_kwargs):
        async with AsyncOpenAI(max_retries=0, **extra_kwargs) as client:
            got = await client.chat.completions.create(model="default", messages=data["messages"])
        return float(len(got.choices[0].message.content or "") % 7)


class Mixed:
    def __init__(self, prompts, sampling, n, reward_pool):
        agent = AgentWorkflow(__file__ + ":Asks", prompts.tokenizer, sampling, n)
        self.both = RLVR(prompts, sampling, reward_pool, n), agent

    async def run(self, fleet, task):
        return await self.both[task.group_id % 2].run(fleet, task)

    async def aclose(self):
        await self.both[1].aclose()
'''

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


@pytest.mark.slow
def test_after_a_sigterm_every_sample_goes_on(tmp_path):
    """Also an agent's, which would fail if its servers went before it is cancelled."""
    pytest.importorskip("openai", reason="the agent needs the extra agents")
    (tmp_path / "mixed.py").write_text(MIXED)
    workdir, had = tmp_path / "run" / "run", Samples()
    workdir.parent.mkdir()
    flags = (*FLAGS, f"--config.rollout.workflow={tmp_path}/mixed.py:Mixed")

    def reached() -> bool:
        groups = {group % 2 for group, *_ in under_way(workdir)}
        return len(records(workdir / "metrics.jsonl")) >= 1 and groups == {0, 1}

    for _ in range(5):  # they may all finish while the run saves
        process = start(workdir, 1000, 2, *flags)
        wait_for(process, workdir, reached)
        process.terminate()
        assert end(process, workdir) == 130, last_lines(workdir)
        if had := under_way(workdir):
            break
    assert had
    done = len(records(workdir / "metrics.jsonl"))
    total = max(done, *(group // BATCH for group, *_ in had)) + 1  # all of them are trained on
    assert (workdir / "checkpoints" / f"step_{done:08d}").is_dir(), "it has saved its last step"
    process = start(workdir, total, 2, *flags)
    assert end(process, workdir) == 0, last_lines(workdir)
    kept = check_continued(workdir, had, total, 2)
    tokens = sum(map(len, had.values()))
    lines = workdir.with_suffix(".log").read_text()
    assert (kept["samples"], kept["repeated_tokens"]) == (len(had), 0)
    assert f"continued: {tokens} tokens of {len(had)} samples" in lines


@pytest.mark.vllm
@pytest.mark.parametrize("engines", ["jax, vllm", "vllm, jax"])
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
