"""Hangs of processes without a run: a blocked loop, an engine that makes no token, and stacks."""

import asyncio
import subprocess
import sys
import time

import pytest

from rlx.cli import hangs
from rlx.system.process_supervisor import ask_for_stacks

SLEEPS = "import sys, time; print('up', flush=True); time.sleep(60)"


@pytest.fixture
def quick(monkeypatch):
    """Looks and limits that take parts of a second."""
    monkeypatch.setattr(hangs, "_TICK", 0.02)
    for name in ("loop", "engine"):
        monkeypatch.setitem(hangs.SECONDS, name, 0.3)


def test_a_blocked_loop_is_named_with_the_line_that_blocks_it(quick, capfd):
    async def blocked():
        with hangs.reported_here("the loop of all requests"):
            await asyncio.sleep(0.5)  # it turns: nothing is late
            assert capfd.readouterr().err == ""
            time.sleep(1.0)

    asyncio.run(blocked())
    stacks, _, line = capfd.readouterr().err.strip().rpartition("\n")
    place = f"{__file__}:{blocked.__code__.co_firstlineno + 4} "
    assert line.startswith(f"the loop of all requests is blocked at {place}")
    assert line.endswith("s; the stacks of all threads are above")
    assert "in blocked" in stacks


@pytest.mark.parametrize("moves", [False, True])
def test_an_engine_is_reported_only_while_it_makes_no_token(quick, capfd, moves):
    tokens = [0]

    def signs(woken):
        tokens[0] += moves
        return {"engine": hangs.Sign(tokens[0], lambda: "the engine makes no token")}

    async def serve():
        with hangs.reported_here("the loop", signs):
            await asyncio.sleep(0.8)

    asyncio.run(serve())
    assert ("the engine makes no token, for" in capfd.readouterr().err) != moves


def test_only_processes_that_can_are_asked_for_their_stacks():
    asks = "import faulthandler, signal; faulthandler.register(signal.SIGUSR1); "
    start = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with (
        subprocess.Popen([sys.executable, "-c", asks + SLEEPS], **start) as can,
        subprocess.Popen([sys.executable, "-c", SLEEPS], **start) as cannot,
    ):
        for process in (can, cannot):
            assert process.stdout.readline() == "up\n"
        ask_for_stacks([can.pid, cannot.pid, 1 << 30])
        assert "most recent call first" in can.stderr.readline()
        assert cannot.poll() is None
        for process in (can, cannot):
            process.kill()
