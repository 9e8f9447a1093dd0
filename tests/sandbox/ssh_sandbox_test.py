"""A sandbox over ssh to real sshd on loopback: the local one's outcomes, and nothing left there."""

import asyncio
import os
import signal
import uuid
from pathlib import Path

import pytest

from rlx.base import Unavailable, UserError
from rlx.sandbox.sandbox import ProgramLimits, Sandbox, SandboxOptions
from tests.launch.remote_servers_test import needs_sshd, ssh  # noqa: F401
from tests.sandbox.sandbox_test import PATIENCE, processes, until

pytestmark = needs_sshd
RUNAWAY = """
import os, time
try:
    if os.fork() == 0: os.setsid()
except OSError: pass
time.sleep(1e6)
"""
ENDLESS = ProgramLimits(wall_seconds=1e6)


def remote(ssh, *hosts, preload=(), require="none", workers=2):  # noqa: F811
    return SandboxOptions("ssh", require, workers, hosts, ssh).make(preload)


def connections(mark: str) -> list[int]:
    """Far ends, by the zygotes with `mark` that they started."""
    parents = set()
    for process in processes(mark):
        with open(f"/proc/{process}/stat") as stat:
            parents.add(int(stat.read().rpartition(")")[2].split()[1]))
    return [p for p in parents if b"far_end" in Path(f"/proc/{p}/cmdline").read_bytes()]


async def running(sandbox, mark):
    """Start a program that never ends; return its call once it and what it started run."""
    idle = len(processes(mark))
    call = asyncio.create_task(sandbox.run(RUNAWAY, ENDLESS))
    await asyncio.to_thread(until, lambda: len(processes(mark)) >= idle + 2)
    return call


def test_outcomes_are_the_local_ones(ssh):  # noqa: F811
    programs = (
        "print('ä' * 3)", "raise ValueError('no')", "import sys; sys.exit(3)", "while True: pass",
        "print('x' * 200_000)", "import numpy; print(numpy.arange(3).sum())", "a" * 300_000,
    )  # fmt: skip
    limits = ProgramLimits(wall_seconds=PATIENCE, cpu_seconds=1.0)

    async def outcomes(sandbox):
        async with sandbox:
            found = await asyncio.gather(*(sandbox.run(code, limits) for code in programs))
            return [(o.status, o.text, o.error) for o in found], sandbox.level

    found, levels = asyncio.run(outcomes(remote(ssh, "a", "b", preload=("numpy",))))
    here, level = asyncio.run(outcomes(Sandbox(2, ("numpy",), "none")))
    assert found == here
    assert levels == {"a": level, "b": level}


def test_a_runaway_ends_with_its_call_and_with_the_connection(ssh):  # noqa: F811
    mark = f"no_module_{uuid.uuid4().hex}"

    async def play():
        async with remote(ssh, "a", preload=(mark,)) as sandbox:
            idle = len(processes(mark))
            call = await running(sandbox, mark)
            call.cancel()
            await asyncio.to_thread(until, lambda: len(processes(mark)) == idle)
            assert (await sandbox.run("print(1)")).text == "1\n"  # over the same connection

            call = await running(sandbox, mark)
            before = set(processes(mark))
            (host,) = sandbox._hosts
            (cut := host._process).kill()  # ssh: the connection, and the call is made once more
            await asyncio.to_thread(until, lambda: not before & set(processes(mark)))
            # The trials of a new one's levels are processes, too.
            over = (None, cut)
            await asyncio.to_thread(until, lambda: host._process not in over and not host.dead)
            await asyncio.to_thread(until, lambda: len(processes(mark)) >= idle + 2)
            host._process.kill()
            with pytest.raises(Unavailable, match="on a: the connection was lost twice"):
                await call
            await asyncio.to_thread(until, lambda: not processes(mark))
            assert (await sandbox.run("print(2)")).text == "2\n"  # which connects again
        await asyncio.to_thread(until, lambda: not processes(mark))

    asyncio.run(play())


def test_calls_go_on_elsewhere_when_a_far_end_dies(ssh):  # noqa: F811
    mark = f"no_module_{uuid.uuid4().hex}"

    async def play():
        async with remote(ssh, "a", "b", preload=(mark,)) as sandbox:
            far = connections(mark)
            assert len(far) == 2
            for process in far:
                os.kill(process, signal.SIGKILL)
            found = await asyncio.gather(*(sandbox.run(f"print({n})") for n in range(6)))
            assert [outcome.text for outcome in found] == [f"{n}\n" for n in range(6)]
            a, b = sandbox._hosts
            a._command = [word.replace("a", "d") if word == "a" else word for word in a._command]
            a._process.kill()
            await asyncio.sleep(0)
            found = await asyncio.gather(*(sandbox.run(f"print({n})") for n in range(6)))
            assert [outcome.text for outcome in found] == [f"{n}\n" for n in range(6)]
            b._command = a._command
            b._process.kill()
            with pytest.raises(Unavailable) as error:
                await sandbox.run("print(1)")
            assert "no sandbox on a: ssh: connect to host" in str(error.value)
            assert "\n" not in str(error.value)

    asyncio.run(play())


def test_what_cannot_be_is_said_in_one_line(ssh, monkeypatch):  # noqa: F811
    async def enter(sandbox):
        async with sandbox:
            pass

    with pytest.raises(UserError, match=r"no sandbox on d: ssh: connect to host .*refused; `ssh"):
        asyncio.run(enter(remote(ssh, "a", "d")))
    broken = SandboxOptions("ssh", "none", 1, ("a",), ssh, "/no/python").make()
    with pytest.raises(UserError, match=r"no sandbox on a: .*/no/python.*sandbox\.python"):
        asyncio.run(enter(broken))
    with pytest.raises(UserError, match=r"sandbox\.kind=local with sandbox\.hosts=\('a',\)"):
        SandboxOptions(hosts=("a",))
    with pytest.raises(UserError, match="did you mean 'landlock'"):
        SandboxOptions("ssh", "landlok", 1, ("a",))


def test_the_far_ends_probe_decides_on_what_is_required(ssh):  # noqa: F811
    async def enter():
        async with remote(ssh, "a", require="bubblewrap") as sandbox:
            return sandbox.level["a"]

    async def here():
        async with Sandbox(1, require="bubblewrap") as sandbox:
            return sandbox.level

    try:
        level = asyncio.run(here())
    except UserError:
        with pytest.raises(UserError, match=r"no sandbox on a: sandbox\.require=bubblewrap cannot"):
            asyncio.run(enter())
    else:
        assert asyncio.run(enter()) == level
