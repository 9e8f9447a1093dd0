"""The line that keeps a loop from turning is found while it does."""

import asyncio
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rlx.agents.loop_watch import LoopWatch, Place, blamed, debugging, own_clock, remedy


def test_the_blocking_line_is_seen_while_it_blocks():
    seen, found = threading.Event(), []

    def late(seconds, computed, stack):
        found.append((seconds, stack))
        seen.set()

    async def run():
        watch = LoopWatch(late)
        watch.start()
        assert seen.wait(60)  # holds the loop up until the watch has looked
        watch.stop()

    asyncio.run(run())
    seconds, stack = found[0]
    assert seconds > 0
    lines = blamed(stack)
    assert "run: assert seen.wait(60)" in lines[0]
    assert "threading.py" in lines[-1]
    assert remedy("\n".join(lines), False).startswith("wait by asyncio's own Lock")


@pytest.mark.parametrize(
    ("line", "computes", "instead"),
    [
        ("agent.py:3 Agent.run: time.sleep(1)", False, "await asyncio.sleep"),
        ("openai/_base_client.py:9 SyncAPIClient.request: x", False, "use the async client"),
        ("urllib/request.py:1 urlopen: x", False, "use an async HTTP client"),
        ("ssl.py:1 create_default_context: x", True, "a new client reads all certificates"),
        ("agent.py:3 Agent.run: time.sleep(1)", True, "it computes"),
        ("agent.py:3 Agent.run: ask()", False, "await asyncio.to_thread"),
    ],
)
def test_what_to_write_instead(line, computes, instead):
    assert remedy(line, computes).startswith(instead)


def test_a_debuggers_prompt_is_no_blocked_loop():
    assert debugging([Place("/usr/lib/python3.11/pdb.py", 1, "Pdb.interaction")])
    assert not debugging([Place("/home/a/agent.py", 1, "Agent.run")])


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the kernel does not count")
def test_what_others_compute_on_our_cpu_does_not_count():
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    other = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE
    )
    try:
        other.stdout.readline()
        clock, until = own_clock(), time.thread_time() + 0.2
        own, wall = clock(), time.monotonic()
        while time.thread_time() < until:
            pass
        assert clock() - own < 0.8 * (time.monotonic() - wall)
    finally:
        other.kill()
        other.communicate()
        os.sched_setaffinity(0, cores)
