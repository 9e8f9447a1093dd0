"""Threads for users' calls: named, left to the process's end, never those of rlx's own."""

import ast
import asyncio
import contextvars
import time
import zlib
from functools import partial
from pathlib import Path
from threading import Event

import pytest

import rlx
from rlx.system.threads import DaemonThreads, _name, in_thread

SECONDS = 20.0


def hang(end):
    end.wait()
    return "done"


def test_calls_beyond_the_places_wait_and_are_named():
    threads, end = DaemonThreads(2), Event()
    futures = [threads.submit(hang, end) for _ in range(3)]
    while len(threads.calls) < 2:
        time.sleep(0.001)
    (name, begun), _ = threads.calls.values()
    assert name.startswith("hang (")
    assert "threads_test.py, line " in name
    assert begun <= time.monotonic()
    assert not futures[2].running()
    end.set()
    assert [future.result(SECONDS) for future in futures] == ["done"] * 3
    while threads.calls:
        time.sleep(0.001)


def test_the_name_of_a_call_has_no_data():
    data = bytes(1 << 20)
    assert _name(partial(zlib.crc32, data, 7)) == "crc32"
    assert _name(partial(contextvars.copy_context().run, sum, [1])) == "sum"


def test_an_error_is_the_callers():
    with pytest.raises(ZeroDivisionError):
        DaemonThreads(1).submit(lambda: 1 / 0).result(SECONDS)


def test_a_call_that_nobody_waits_for_leaves_its_place():
    """As of a rollout whose time is up; `asyncio.to_thread` names the function behind it."""
    threads, end = DaemonThreads(1), Event()

    async def main():
        asyncio.get_running_loop().set_default_executor(threads)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.to_thread(hang, end), 0.05)
        assert [name.split(" ")[0] for name, _ in threads.calls.values()] == ["hang"]
        assert await asyncio.to_thread(int, "3") == 3

    asyncio.run(asyncio.wait_for(main(), SECONDS))
    end.set()


def test_calls_of_our_own_have_threads_though_users_have_all():
    threads, end = DaemonThreads(1), Event()

    async def main():
        asyncio.get_running_loop().set_default_executor(threads)
        hung = [asyncio.ensure_future(asyncio.to_thread(hang, end)) for _ in range(4)]
        assert await in_thread(int, "3") == 3
        end.set()
        await asyncio.gather(*hung)

    asyncio.run(asyncio.wait_for(main(), SECONDS))


def test_the_pool_of_users_code_serves_nothing_of_ours_on_the_trainers_loop():
    """Only tools are called there: they are users' code."""
    found = []
    rooms = ("fleet", "sandbox", "workers", "environments", "rewards", "rollout", "agents")
    for room in (*rooms, "evaluation", "mismatch"):
        for path in (Path(rlx.__file__).parent / room).glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute) and node.attr in ("to_thread", "getaddrinfo"):
                    module = getattr(node.value, "id", "")
                    if (module, node.attr) != ("socket", "getaddrinfo"):
                        found.append(f"{room}/{path.name}")
    assert found == ["rollout/tools.py"]
