"""Server processes join a fleet by files of a directory, are killed, and leave, under requests."""

import asyncio
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest

from rlx.base import UserError
from rlx.fleet.addresses import Joining, announced
from rlx.fleet.client import Fleet
from rlx.fleet.requests import Sampling

MOST, SEEDS = 300, range(6)


@pytest.fixture
def start(tools, tmp_path, monkeypatch):
    """start() → a server process that has joined tmp_path/servers, and its address."""
    monkeypatch.setenv("STEP_SECONDS", "0.005")
    started = []

    async def start(*flags):
        command = (
            sys.executable, tools.script, "--model=none", f"--join={tmp_path / 'servers'}",
            f"--parent-pid={os.getpid()}", f"--weight-root={tmp_path}", *flags,
        )  # fmt: skip
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        started.append(process)
        line = await asyncio.to_thread(process.stdout.readline)
        return process, f"127.0.0.1:{json.loads(line)['port']}"

    yield start
    for process in started:
        process.kill()
        process.communicate()


def requests(fleet):
    asked = [fleet.generate([1, 2], Sampling(seed=s, max_new_tokens=MOST), 4) for s in SEEDS]
    return [asyncio.create_task(request) for request in asked]


def check(done, arithmetic):
    """No token lost, doubled or made by other weights than the published ones."""
    for seed, completions in zip(SEEDS, done, strict=True):
        for index, completion in enumerate(completions):
            assert completion.tokens.tolist() == arithmetic.completion(seed, index, MOST)
            assert set(completion.versions.tolist()) == {3}
            want = -0.5 / (1 + completion.tokens)
            np.testing.assert_allclose(completion.logprobs, want, rtol=1e-6)


def patient(tools):
    """Limits by which a slow machine is none that hangs."""
    return dataclasses.replace(
        tools.limits, connect_seconds=100, request=100, hang_seconds=60, outage_seconds=100
    )


async def until(condition):
    while not condition():
        await asyncio.sleep(0.01)


def test_servers_join_die_and_drain_and_no_token_is_lost(tools, tmp_path, start, arithmetic):
    place, said = tmp_path / "servers", []
    place.mkdir()
    for stale in ("127.0.0.1:1", "no-such-host.invalid:8001", "ours:not-a-port", ".half"):
        (place / stale).write_text("")

    async def busy(fleet, count):
        while sum(s.live and s.status.running > 0 for s in await fleet.status()) < count:
            await asyncio.sleep(0.01)

    async def main():
        fleet = Fleet(
            (), limits=patient(tools), publish_dir=str(tmp_path), on_message=said.append,
            joining=Joining(str(place)),
        )  # fmt: skip
        first = asyncio.create_task(start())
        await fleet.connect()  # which waits for the first
        _, first = await first
        await fleet.publish(3, tools.weights(0.5))
        assert fleet.live == {first}
        (two, second), (three, third) = await asyncio.gather(start(), start())
        assert not (place / "127.0.0.1:1").exists()  # nobody was there
        await until(lambda: fleet.live == {first, second, third})
        lives = fleet.instances
        asked = requests(fleet)
        await busy(fleet, 3)
        two.kill()
        await until(lambda: second not in fleet.live)
        three.send_signal(signal.SIGTERM)
        done = [await request for request in asked]
        await until(lambda: fleet.live == {first})
        assert await asyncio.to_thread(three.wait) == 0
        assert sorted(os.listdir(place)) == sorted(
            [".half", "no-such-host.invalid:8001", "ours:not-a-port", first, second]
        )
        # Another life at an old address is another server, for the gate too.
        _, fourth = await start(f"--port={third.rpartition(':')[2]}")
        assert fourth == third
        await until(lambda: third in fleet.live)
        assert fleet.instances[third] != lives[third]
        assert not (place / second).exists()
        (version,) = {s.status.version for s in await fleet.status() if s.live}
        assert version == 3
        done_again = [await request for request in requests(fleet)]
        await fleet.close()
        return done, done_again

    for done in tools.run(main(), 120):
        check(done, arithmetic)
    lost = [text for text in said if "is lost" in text]
    assert len(lost) == 1, said  # the killed one; the drained one has finished what it had
    assert sum("no-such-host.invalid" in text for text in said) == 1


def test_what_is_not_done_when_the_time_to_drain_is_over_goes_on_elsewhere(
    tools, tmp_path, start, arithmetic, monkeypatch
):
    monkeypatch.setenv("STEP_SECONDS", "0.02")

    async def main():
        joining = Joining(str(tmp_path / "servers"))
        servers = await asyncio.gather(start("--drain-seconds=0.3"), start())
        fleet = Fleet(
            (), limits=patient(tools), publish_dir=str(tmp_path), joining=joining
        )  # fmt: skip
        await fleet.connect()
        await until(lambda: len(fleet.live) == 2)
        await fleet.publish(3, tools.weights(0.5))
        asked = requests(fleet)
        while not all(server.status.running for server in await fleet.status()):
            await asyncio.sleep(0.01)
        servers[0][0].send_signal(signal.SIGTERM)
        done = [await request for request in asked]
        assert await asyncio.to_thread(servers[0][0].wait) == 0
        await fleet.close()
        return done

    check(tools.run(main(), 120), arithmetic)


def test_a_directory_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match="cannot look for servers in"):
        Joining(str(tmp_path / "none")).look()


def test_a_server_of_all_addresses_tells_the_name_of_its_machine(tmp_path):
    with announced(str(tmp_path), "0.0.0.0", 8001):
        assert os.listdir(tmp_path) == [f"{socket.gethostname()}:8001"]
    assert os.listdir(tmp_path) == []
