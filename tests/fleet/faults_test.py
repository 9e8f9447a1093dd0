"""Real server processes that are killed, stopped and restarted while requests run."""

import asyncio
import dataclasses
import json
import os
import signal
import sys

import grpc
import numpy as np
import pytest

from rlx.config import default
from rlx.fleet import balancer, silence
from rlx.fleet import rollout_pb2 as pb
from rlx.fleet import rollout_pb2_grpc as rpc
from rlx.fleet.client import Fleet
from rlx.fleet.requests import Sampling, Timeouts
from rlx.launch.local import LocalServers
from rlx.option import read_options

PROMPT = [1, 2, 3]
MOST = 300
SEEDS = range(6)


@pytest.fixture
def servers(tools, tmp_path, monkeypatch):
    """Two processes; each step takes 5 ms, so a completion of 300 tokens takes 0.4 s."""
    monkeypatch.setenv("STEP_SECONDS", "0.005")
    local = LocalServers(
        "none",
        workdir=tmp_path,
        num_servers=2,
        command=(sys.executable, tools.script),
    )
    with local:
        local.wait()
        yield local


async def running_on_both(fleet):
    while not all(server.status.running for server in await fleet.status()):
        await asyncio.sleep(0.01)


async def disturbed(tools, tmp_path, servers, disturb):
    """Completions of several prompts during which `disturb(fleet)` happens."""
    fleet = servers.fleet(limits=tools.limits)
    try:
        await fleet.connect()
        await fleet.publish(3, tools.weights(0.5))
        tasks = [
            asyncio.create_task(fleet.generate(PROMPT, Sampling(seed=s, max_new_tokens=MOST), 4))
            for s in SEEDS
        ]
        await running_on_both(fleet)
        await disturb(fleet)
        return [await task for task in tasks]
    finally:
        await fleet.close()


def check(done, arithmetic):
    """No token lost, doubled or made by other weights than the published ones."""
    for seed, completions in zip(SEEDS, done, strict=True):
        for index, completion in enumerate(completions):
            assert completion.tokens.tolist() == arithmetic.completion(seed, index, MOST)
            assert set(completion.versions.tolist()) == {3}
            want = -0.5 / (1 + completion.tokens)
            np.testing.assert_allclose(completion.logprobs, want, rtol=1e-6)


def test_killed_server_loses_nothing_and_comes_back_with_the_weights(
    tools, tmp_path, servers, arithmetic
):
    async def kill(fleet):
        victim = servers.pids[0]
        os.kill(victim, signal.SIGKILL)
        while all(server.live for server in await fleet.status()):
            await asyncio.sleep(0.01)
        while not all(server.live for server in await fleet.status()):
            await asyncio.sleep(0.02)
        assert servers.pids[0] != victim
        assert [server.status.version for server in await fleet.status()] == [3, 3]
        again = [fleet.generate(PROMPT, Sampling(seed=s, max_new_tokens=MOST), 4) for s in SEEDS]
        check(await asyncio.gather(*again), arithmetic)

    done = tools.run(disturbed(tools, tmp_path, servers, kill))
    check(done, arithmetic)


def test_both_servers_killed(tools, tmp_path, servers, arithmetic):
    async def kill(fleet):
        for pid in servers.pids:
            os.kill(pid, signal.SIGKILL)

    done = tools.run(disturbed(tools, tmp_path, servers, kill))
    check(done, arithmetic)


def test_hung_server_is_treated_as_dead_until_it_answers(tools, tmp_path, servers, arithmetic):
    async def hang(fleet):
        os.kill(servers.pids[0], signal.SIGSTOP)
        while all(server.live for server in await fleet.status()):
            await asyncio.sleep(0.01)
        report = await fleet.publish(3, tools.weights(0.5))
        assert len(report.acks) == 1
        os.kill(servers.pids[0], signal.SIGCONT)
        while not all(server.live for server in await fleet.status()):
            await asyncio.sleep(0.02)

    done = tools.run(disturbed(tools, tmp_path, servers, hang))
    check(done, arithmetic)


def test_how_soon_a_hung_server_is_left_is_a_key_of_the_config(
    tools, tmp_path, servers, arithmetic
):
    """And five seconds by default: nobody waits for one server while another is idle."""
    assert default().fleet.hang_seconds == 5
    config = {**default().fleet, "hang_seconds": 0.5, "probe_seconds": 0.1}
    limits = read_options(Timeouts, config, request=600)

    async def main():
        fleet = servers.fleet(limits=limits)
        await fleet.connect()
        await fleet.publish(3, tools.weights(0.5))
        tasks = [
            asyncio.create_task(fleet.generate(PROMPT, Sampling(seed=s, max_new_tokens=MOST), 4))
            for s in SEEDS
        ]
        await running_on_both(fleet)
        os.kill(servers.pids[0], signal.SIGSTOP)
        done = [await task for task in tasks]  # it stays stopped
        (reason,) = (server.reason for server in await fleet.status() if not server.live)
        await fleet.close()
        return done, reason

    done, reason = tools.run(main())
    check(done, arithmetic)
    assert reason == "hung, no answer to Status for 0.5 s"


def test_hung_server_cannot_hold_up_a_publish(tools, tmp_path, servers):
    limits = dataclasses.replace(tools.limits, publish_timeout_seconds=0.5, hang_seconds=20.0)
    assert 300 < limits.publish_seconds(15 << 30) < 400  # a model of 7B in bfloat16

    async def main():
        fleet = servers.fleet(limits=limits)
        await fleet.connect()
        os.kill(servers.pids[1], signal.SIGSTOP)
        report = await fleet.publish(1, tools.weights(0.5))
        assert report.acks == (servers.wait()[0],)
        assert 0.4 < report.seconds < 5
        os.kill(servers.pids[1], signal.SIGCONT)
        await fleet.close()

    tools.run(main())


def test_servers_join_and_leave_by_a_file_while_requests_run(tools, tmp_path, servers, arithmetic):
    first, second = servers.wait()
    file = tmp_path / "servers"
    file.write_text(f"# ours\n{first}\n")

    async def main():
        limits = dataclasses.replace(tools.limits, hang_seconds=5.0)
        fleet = Fleet(
            [f"@{file}"], limits=limits, token=servers.token, publish_dir=servers.directory
        )

        def requests():
            asked = [
                fleet.generate(PROMPT, Sampling(seed=s, max_new_tokens=MOST), 4) for s in SEEDS
            ]
            return [asyncio.create_task(request) for request in asked]

        await fleet.connect()
        await fleet.publish(3, tools.weights(0.5))
        assert fleet.live == {first}
        file.write_text(f"{first}\n\n{second}  # new\n")
        while fleet.live != {first, second}:
            await asyncio.sleep(0.01)
        both = requests()
        await running_on_both(fleet)
        assert [server.status.version for server in await fleet.status()] == [3, 3]
        file.write_text(f"{second}\n")
        while fleet.live != {second}:
            await asyncio.sleep(0.01)
        done = [await request for request in both]  # the first one's too: it was not cut off
        await fleet.publish(3, tools.weights(0.5))
        os.kill(servers.pids[0], signal.SIGSTOP)  # nothing waits for what is not ours any more
        later = [await request for request in requests()]
        assert [server.address for server in await fleet.status()] == [second]
        file.unlink()
        await asyncio.sleep(5 * limits.probe_seconds)
        assert fleet.live == {second}
        await fleet.close()
        return done, later

    for done in tools.run(main()):
        check(done, arithmetic)


def test_a_server_started_by_hand_takes_weights_by_path(tools):
    """Trainer and server agree on a directory by default; neither was told one here."""

    async def main():
        command = (sys.executable, tools.script, "--model=none", f"--parent-pid={os.getpid()}")
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        try:
            port = json.loads(await process.stdout.readline())["port"]
            fleet = Fleet([f"127.0.0.1:{port}"], limits=tools.limits)
            await fleet.connect()
            report = await fleet.publish(1, tools.weights(0.5), "path")
            await fleet.close()
            return report.acks
        finally:
            process.terminate()
            await process.wait()

    assert len(tools.run(main())) == 1


def test_an_own_server_that_sends_no_token_is_started_again(
    tools, tmp_path, servers, arithmetic, monkeypatch
):
    """It is paused by another client, and answers all the while."""
    monkeypatch.setattr(balancer, "_LEAST", 0.5)
    monkeypatch.setattr(silence, "FACTOR", 2)

    async def main():
        victim, fleet = servers.pids[0], servers.fleet(limits=tools.limits)
        channel = grpc.aio.insecure_channel(servers.wait()[0])
        metadata = (("authorization", f"Bearer {servers.token}"),)

        def ask():
            sampling = [Sampling(seed=seed, max_new_tokens=MOST) for seed in SEEDS]
            return asyncio.gather(
                *(fleet.generate(PROMPT, s, 4, session=str(s.seed)) for s in sampling)
            )

        try:
            await fleet.connect()
            await fleet.publish(3, tools.weights(0.5))
            await ask()  # now some of the sessions belong to the victim
            pause = rpc.RolloutStub(channel).Pause
            await pause(pb.PauseRequest(lease_seconds=600), metadata=metadata)
            check(await ask(), arithmetic)
            while servers.pids[0] == victim or len(fleet.live) < 2:
                await asyncio.sleep(0.02)
        finally:
            await channel.close()
            await fleet.close()

    tools.run(main(), 60)
