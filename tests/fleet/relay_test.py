"""Weights that servers send to each other: every live server gets them, once, whatever fails."""

import asyncio
import dataclasses
import os
import signal
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlx.base import UserError
from rlx.fleet import member, publish, relay
from rlx.fleet import rollout_pb2 as pb
from rlx.fleet.client import Fleet
from rlx.fleet.requests import Sampling
from rlx.launch.local import LocalServers

CODE = grpc.StatusCode
CHUNK = 2 << 20
SIZE = 10 * CHUNK + 1234  # bytes


def weights(version, size=SIZE, scale=None):
    """The arithmetic engine's weights, of which a version changes 2 %."""
    ballast = np.arange(size // 2, dtype=np.uint16)
    for k in range(1, version + 1):
        ballast[k::50] += 1
    scale = 1.0 / (1 + version) if scale is None else scale
    return {"scale": np.asarray(scale, np.float32), "ballast": ballast.view(np.float16)}


def names(count):
    return [pb.RelayServer(address=f"s{k}", instance=f"i{k}") for k in range(count)]


# The tree.


def reached(servers, fanout, dead=frozenset(), level=1):
    """Address → level of the servers that get the weights, when the dead ones pass nothing on."""
    found = {}
    for head, *below in relay.parts(servers, fanout):
        if head.address not in dead:
            inner = reached(below, fanout, dead, level + 1)
            assert head.address not in inner
            assert not set(inner) & set(found)
            found |= {head.address: level, **inner}
    return found


@given(st.integers(0, 200), st.integers(1, 9))
def test_every_server_is_reached_once_and_soon(count, fanout):
    servers = names(count)
    levels = reached(servers, fanout)
    assert sorted(levels) == sorted(s.address for s in servers)
    assert sum(level == 1 for level in levels.values()) == min(count, fanout)
    depth = max(levels.values(), default=0)
    if fanout == 1:
        assert depth == count
    else:
        assert fanout ** (depth - 1) <= max(1, count), "depth is at most 1 + log of the servers"
    sizes = [len(part) for part in relay.parts(servers, fanout)]
    assert max(sizes, default=0) - min(sizes, default=0) <= 1


def test_nobody_is_reached_without_a_fanout():
    assert relay.parts(names(3), 0) == []


def replies(servers, fanout, dead):
    """Return the results of all servers, as a trainer gets them when the dead ones say nothing."""
    found = []
    for head, *below in relay.parts(servers, fanout):
        if head.address in dead:
            found.append(pb.Relayed(address=head.address, error="UNAVAILABLE"))
        else:
            reply = pb.PublishReply(version=7)
            found += [pb.Relayed(address=head.address, reply=reply), *replies(below, fanout, dead)]
    return found


@given(st.data(), st.integers(1, 40), st.integers(1, 5))
def test_after_any_deaths_each_live_server_gets_it_once(data, count, fanout):
    """From a server, or from the trainer: never from both, and never from none."""
    servers = names(count)
    dead = data.draw(st.sets(st.sampled_from([s.address for s in servers])))
    relayed = set(reached(servers, fanout, dead))

    async def main():
        made = relay.routes(servers, fanout, (7, 5))
        for route in made:
            if route.relay:
                if route.server.address in dead:
                    route.settle("it died")
                else:
                    given = [route.relay.below, fanout, dead]
                    route.settle(pb.PublishReply(version=7, relayed=replies(*given)))
        for route in made:
            address = route.server.address
            if route.relay:
                assert route.result.done() == (address not in dead)
            elif address in relayed:
                assert route.result.result().version == 7
            else:
                assert isinstance(route.result.result(), str), "the trainer sends it"
                assert route.blamed == (address in dead and route.result.result() == "UNAVAILABLE")

    asyncio.run(main())


@given(st.integers(1, 60), st.integers(1, 5))
def test_routes_are_those_of_the_parts(count, fanout):
    async def main():
        made = relay.routes(names(count), fanout, (7, 5))
        for route in made:
            for head, *below in relay.parts(
                [r.server for r in route.below] if not route.relay else route.relay.below, fanout
            ):
                (child,) = [r for r in made if r.server.address == head.address]
                assert [r.server.address for r in child.below] == [s.address for s in below]
        return [route.server.address for route in made if route.relay]

    heads = [part[0].address for part in relay.parts(names(count), fanout)]
    assert asyncio.run(main()) == heads


# Servers in this process.


def limited(tools, fanout, **changes):
    return dataclasses.replace(tools.limits, relay_fanout=fanout, **changes)


def patient(tools, fanout):
    """On a busy machine servers in one process answer Status late while weights arrive."""
    return limited(tools, fanout, hang_seconds=15.0)


def kept(server):
    base = server._rollouts._kept.weights
    return Path(base.path).read_bytes() if base else None


def loads(engines):
    return [[version for _, version, _ in engine.loads] for engine in engines]


@pytest.mark.parametrize("fanout", [1, 2, 3])
def test_the_trainer_sends_to_a_few_and_all_have_it(tools, tmp_path, fanout):
    async def main():
        async with tools.fleet(7, tmp_path, limits=patient(tools, fanout)) as (fleet, engines, _):
            for version in (1, 2):
                report = await fleet.publish(version, weights(version), "stream")
                assert len(report.acks) == 7
                assert report.sent_bytes == fanout * report.num_bytes
                assert [d.method for d in report.deliveries] == ["stream"] * 7
                assert [e.scale for e in engines] == [np.float32(1 / (1 + version))] * 7
            assert loads(engines) == [[1, 2]] * 7
            assert len(os.listdir(tmp_path)) == 1
            assert all(d.paused_ns > 0 for d in report.deliveries)

    tools.run(main())


def test_without_relays_the_trainer_sends_to_all(tools, tmp_path):
    async def main():
        async with tools.fleet(4, tmp_path, limits=patient(tools, 0)) as (fleet, engines, _):
            report = await fleet.publish(1, weights(1), "stream")
            assert report.sent_bytes == 4 * report.num_bytes
            assert loads(engines) == [[1]] * 4

    tools.run(main())


def test_deltas_go_the_same_way(tools, tmp_path):
    async def main():
        async with tools.fleet(5, tmp_path, limits=patient(tools, 2)) as (fleet, engines, servers):
            first = await fleet.publish(1, weights(1), "delta")
            assert first.sent_bytes == 2 * first.num_bytes
            report = await fleet.publish(2, weights(2), "delta")
            assert [d.method for d in report.deliveries] == ["delta"] * 5
            assert report.sent_bytes == 2 * fleet._weights.delta.num_bytes
            wanted = Path(fleet._weights.path).read_bytes()
            assert all(kept(server) == wanted for server in servers)
            servers[4]._rollouts._kept.replace(None)  # below another one, and nobody knows
            report = await fleet.publish(3, weights(3), "delta")
            assert [d.method for d in report.deliveries] == ["delta"] * 4 + ["stream"]
            assert loads(engines) == [[1, 2, 3]] * 5
            servers[0]._rollouts._kept.replace(None)  # the first of its part
            report = await fleet.publish(4, weights(4), "delta")
            assert [d.method for d in report.deliveries] == ["stream"] + ["delta"] * 4
            assert loads(engines) == [[1, 2, 3, 4]] * 5

    tools.run(main())


def test_weights_that_all_refuse(tools, tmp_path):
    async def main():
        async with tools.fleet(4, tmp_path, limits=patient(tools, 1)) as (fleet, engines, _):
            await fleet.publish(1, weights(1), "stream")
            with pytest.raises(UserError, match="not finite"):
                await fleet.publish(2, weights(2, scale=np.nan), "stream")
            await fleet.publish(3, weights(3), "stream")
            assert loads(engines) == [[1, 3]] * 4

    tools.run(main())


@pytest.mark.parametrize("where", [0, 1])
def test_a_server_that_refuses_does_not_keep_it_from_others(tools, tmp_path, where):
    async def main():
        async with tools.fleet(3, tmp_path, limits=patient(tools, 1)) as (fleet, engines, _):
            await fleet.publish(1, weights(1), "stream")
            load = engines[where].load

            async def refuse(path, version, kv="keep"):
                if version == 2:
                    raise ValueError("not today")
                return await load(path, version, kv)

            engines[where].load = refuse
            report = await fleet.publish(2, weights(2), "stream")
            assert len(report.acks) == 2
            others = [e for e in engines if e is not engines[where]]
            assert [e.version for e in others] == [2, 2]
            await fleet.publish(3, weights(3), "stream")
            while len(fleet.live) < 3:
                await asyncio.sleep(0.01)
            assert [e.version for e in engines] == [3] * 3

    tools.run(main())


def test_publishes_at_once_and_requests_meanwhile(tools, tmp_path, arithmetic):
    async def main():
        async with tools.fleet(5, tmp_path, limits=patient(tools, 2)) as (fleet, engines, _):
            for engine in engines:
                engine.step_seconds = 0.002
            await fleet.publish(1, weights(1), "delta")
            running = [
                asyncio.create_task(
                    fleet.generate([1, 2], Sampling(seed=seed, max_new_tokens=300), 4)
                )
                for seed in range(5)
            ]
            versions = range(2, 6)
            await asyncio.gather(*(fleet.publish(v, weights(v), "delta") for v in versions))
            for seed, task in enumerate(running):
                for index, completion in enumerate(await task):
                    assert completion.tokens.tolist() == arithmetic.completion(seed, index, 300)
                    scales = np.float32(1 / (1 + completion.versions))
                    want = -scales / (1 + completion.tokens)
                    np.testing.assert_allclose(completion.logprobs, want, rtol=1e-5)
            assert loads(engines) == [[1, 2, 3, 4, 5]] * 5

    tools.run(main())


# One server and bare calls.


@asynccontextmanager
async def pair(tools, tmp_path):
    """Two servers; the first is asked by bare calls to send to the second."""
    options = {"stage_dir": str(tmp_path)}
    async with (
        tools.server(**options) as first,
        tools.server(**options) as second,
        tools.stub(first[1]) as stub,
    ):
        yield first, second, stub


def place(server, **changes):
    """How a trainer describes a server that has had no weights."""
    known = {"address": f"127.0.0.1:{server.port}", "instance": server._rollouts._instance}
    return pb.RelayServer(**(known | changes))


def messages(path, version, *, relay=None, damage=None, pause=None, crcs=True):
    """A publish of `path` in chunks of 1000 bytes, of which the one at `damage` is damaged."""
    data, crc = Path(path).read_bytes(), 0
    yield pb.PublishRequest(
        header=pb.PublishHeader(
            version=version, num_bytes=len(data), crc32=publish.checksum(path), relay=relay
        )
    )
    for start in range(0, len(data), 1000):
        part = data[start : start + 1000]
        crc = publish.zlib.crc32(part, crc)
        if start == damage:
            part = bytes([part[0] ^ 1]) + part[1:]
        yield pb.PublishRequest(
            chunk=pb.PublishChunk(offset=start, data=part, crc32=crc if crcs else None)
        )


def file_of(tmp_path, version):
    path = tmp_path / f"v{version}"
    publish.write_weights(weights(version, 20_000), path)
    return path


async def outcome(call):
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        return error.code()


def test_a_damaged_chunk_is_not_passed_on(tools, tmp_path):
    path = file_of(tmp_path, 1)

    async def main():
        async with pair(tools, tmp_path) as ((one, _), (two, server), stub):
            calls, receive = [], server._rollouts._take_publish

            async def watched(requests):
                calls.append(seen := [])

                async def noted():
                    async for request in messages_of:
                        seen.append(request)
                        yield request

                messages_of, requests._requests = requests._requests, noted()
                return await receive(requests)

            server._rollouts._take_publish = watched
            below = pb.PublishRelay(below=[place(server)], fanout=1)
            for damage, crcs in ((0, True), (5000, True), (19_000, True), (None, False)):
                given = messages(path, 1, relay=below, damage=damage, crcs=crcs)
                assert await outcome(stub.Publish(given, timeout=9)) is CODE.DATA_LOSS
                for seen in calls:
                    data = b"".join(r.chunk.data for r in seen)
                    assert path.read_bytes()[: damage or 0].startswith(data)
                while server._rollouts._relayed:
                    await asyncio.sleep(0.005)
                calls.clear()
                assert (one.version, two.version) == (0, 0)
            reply = await stub.Publish(messages(path, 1, relay=below), timeout=9)
            assert [(r.address, r.error, r.reply.version) for r in reply.relayed] == [
                (place(server).address, "", 1)
            ]
            assert (one.version, two.version) == (1, 1)

    tools.run(main())


def test_a_server_sends_the_token_to_another_machine_only_inside_tls(tools, tmp_path):
    path = file_of(tmp_path, 1)

    async def main():
        async with pair(tools, tmp_path) as ((one, _), (two, server), stub):
            for address, error in (
                ("10.0.0.1:80", "the token would be sent unencrypted"),
                ("127.0.0.1:1", "UNAVAILABLE"),
                (f"127.0.0.1:{server.port}", ""),
            ):
                below = pb.PublishRelay(below=[place(server, address=address)], fanout=1)
                metadata = (("authorization", "Bearer sesame"),)
                given = messages(path, 1, relay=below)
                reply = await stub.Publish(given, timeout=9, metadata=metadata)
                (result,) = reply.relayed
                assert error in result.error
                assert (one.version, two.version) == (1, 0 if error else 1)

    tools.run(main())


def test_a_relayed_publish_that_is_late_or_meant_for_another_server_changes_nothing(
    tools, tmp_path
):
    one, two = file_of(tmp_path, 1), file_of(tmp_path, 2)

    async def main():
        async with pair(tools, tmp_path) as ((engine, server), _, stub):
            for wrong in ({"instance": "another"}, {"version": 3}, {"crc32": 3}):
                late = pb.PublishRelay(to=place(server, **wrong))
                call = stub.Publish(messages(one, 1, relay=late), timeout=9)
                assert await outcome(call) is CODE.ABORTED
            # It begins in time; meanwhile the trainer sends the next version.
            right = pb.PublishRelay(to=place(server))
            slow = stub.Publish(timeout=9)
            old = list(messages(one, 1, relay=right))
            for message in old[:5]:
                await slow.write(message)
            while not server._rollouts._relayed:
                await asyncio.sleep(0.005)
            assert (await stub.Publish(messages(two, 2), timeout=9)).version == 2
            assert await outcome(slow) is CODE.ABORTED
            call = stub.Publish(messages(one, 1, relay=right), timeout=9)
            assert await outcome(call) is CODE.ABORTED
            assert loads([engine]) == [[2]]

    tools.run(main())


def test_a_late_publish_is_refused_at_the_last_moment(tools, tmp_path):
    """It was received whole while another one was being loaded."""
    one, two = file_of(tmp_path, 1), file_of(tmp_path, 2)

    async def main():
        async with pair(tools, tmp_path) as ((engine, server), _, stub):
            load, go = engine.load, asyncio.Event()

            async def wait(*given):
                await go.wait()
                return await load(*given)

            engine.load = wait
            newer = asyncio.ensure_future(stub.Publish(messages(two, 2), timeout=9))
            while not server._rollouts._changing.locked():
                await asyncio.sleep(0.005)
            relayed = pb.PublishRelay(to=place(server))
            older = asyncio.ensure_future(
                outcome(stub.Publish(messages(one, 1, relay=relayed), timeout=9))
            )
            while len(server._rollouts._installs) < 2:
                await asyncio.sleep(0.005)
            go.set()
            assert (await newer).version == 2
            assert await older is CODE.ABORTED
            assert loads([engine]) == [[2]]

    tools.run(main())


# Processes.


@asynccontextmanager
async def processes(tools, tmp_path, count, limits):
    """A fleet of server processes, all of which have version 1; yields (fleet, servers, says)."""
    said = []
    command = (sys.executable, tools.script)
    local = LocalServers("none", workdir=tmp_path, num_servers=count, command=command)
    with local:
        fleet = local.fleet(limits=limits, on_message=said.append)
        try:
            await fleet.connect()
            await fleet.publish(1, weights(1), "stream")
            yield fleet, local, said
        finally:
            await fleet.close()


def at_chunk(monkeypatch, number, act):
    """Call `act` before the trainer sends this chunk for the first time."""
    chunks, left = publish.chunks, [1]

    def disturbed(path, size):
        for k, part in enumerate(chunks(path, size)):
            if k == number and left:
                left.clear()
                act()
            yield part

    monkeypatch.setattr(member, "chunks", disturbed)


async def check(fleet, version, count):
    """All servers come to have the version, and tokens of it only."""
    while len(fleet.live) < count:
        await asyncio.sleep(0.02)
    found = [server.status for server in await fleet.status() if server.live]
    assert [(s.version, s.weights_crc32) for s in found] == [
        (version, fleet._weights.crc32)
    ] * count
    done = await fleet.probe([[1, 2]], Sampling(seed=3, max_new_tokens=5))
    for (completion,) in done.values():
        want = -1 / (1 + version) / (1 + completion.tokens)
        np.testing.assert_allclose(completion.logprobs, want, rtol=1e-5)
        assert set(completion.versions.tolist()) == {version}


@pytest.mark.parametrize("which", [0, 1, 3])
def test_a_server_is_killed_while_it_passes_weights_on(tools, tmp_path, monkeypatch, which):
    async def main():
        limits = limited(tools, 1, connect_seconds=20, publish_timeout_seconds=20)
        async with processes(tools, tmp_path, 4, limits) as (fleet, local, _):
            victim = local.pids[which]
            at_chunk(monkeypatch, 5, lambda: os.kill(victim, signal.SIGKILL))
            report = await fleet.publish(2, weights(2), "stream")
            assert len(report.acks) >= 3
            assert report.seconds < 15
            await check(fleet, 2, 4)
            monkeypatch.setattr(member, "chunks", publish.chunks)
            report = await fleet.publish(3, weights(3), "stream")
            await check(fleet, 3, 4)

    tools.run(main(), 90)


@pytest.mark.parametrize("which", [0, 1, 3])
def test_a_server_is_stopped_while_it_passes_weights_on(tools, tmp_path, monkeypatch, which):
    """And goes on later, when others have a newer version: it gives them nothing old."""

    async def main():
        limits = limited(tools, 1, connect_seconds=20, publish_timeout_seconds=30)
        async with processes(tools, tmp_path, 4, limits) as (fleet, local, said):
            victim = local.pids[which]
            at_chunk(monkeypatch, 5, lambda: os.kill(victim, signal.SIGSTOP))
            report = await fleet.publish(2, weights(2), "stream")
            assert len(report.acks) == 3
            assert report.seconds < 15
            if which == 1:  # the two below it did not wait for a slow one
                assert sum(text.endswith("is lost") for text in said) >= 2
            await check(fleet, 2, 3)
            monkeypatch.setattr(member, "chunks", publish.chunks)
            report = await fleet.publish(3, weights(3), "stream")
            assert len(report.acks) == 3
            os.kill(victim, signal.SIGCONT)
            await check(fleet, 3, 4)
            await asyncio.sleep(1)
            await check(fleet, 3, 4)

    tools.run(main(), 90)


class Detour:
    """A TCP proxy in front of a server, which counts what comes, and can cut or slow it."""

    def __init__(self, port):
        self._target, self.cut_at, self.slow = port, 0, 0.0
        self._writers, self.came = [], 0

    async def start(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self):
        self._server.close()
        self.cut()

    def cut(self):
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _serve(self, reader, writer):
        number = len(self._writers)
        there, back = await asyncio.open_connection("127.0.0.1", self._target)
        self._writers += [writer, back]
        await asyncio.gather(
            self._copy(reader, back, self.slow if number else 0.0),
            self._copy(there, writer, 0.0),
            return_exceptions=True,
        )
        back.close()

    async def _copy(self, reader, writer, slow):
        while data := await reader.read(1 << 16):
            self.came += len(data)
            if self.cut_at and self.came > self.cut_at:
                self.cut_at = 0
                self.cut()
            await asyncio.sleep(slow)
            writer.write(data)
            await writer.drain()


@asynccontextmanager
async def detoured(tools, tmp_path, count, which, limits):
    """A fleet of servers of which one is reached by a detour; yields (fleet, engines, detour)."""
    async with tools.fleet(count, tmp_path, limits=limits) as (_, engines, servers):
        detour = Detour(servers[which].port)
        await detour.start()
        ports = [server.port for server in servers]
        ports[which] = detour.port
        said = []
        fleet = Fleet(
            [f"127.0.0.1:{port}" for port in ports],
            limits=limits, publish_dir=str(tmp_path), on_message=said.append,
        )  # fmt: skip
        try:
            await fleet.connect()
            yield fleet, engines, detour, said
        finally:
            await fleet.close()
            await detour.stop()


@pytest.mark.parametrize("which", [0, 1])
def test_a_connection_is_cut_in_the_middle(tools, tmp_path, which):
    async def main():
        limits = patient(tools, 1)
        async with detoured(tools, tmp_path, 4, which, limits) as (fleet, engines, detour, _):
            await fleet.publish(1, weights(1), "stream")
            detour.cut_at = detour.came + SIZE // 2
            report = await fleet.publish(2, weights(2), "stream")
            assert len(report.acks) >= 3
            assert detour.cut_at == 0
            await check(fleet, 2, 4)
            await fleet.publish(3, weights(3), "stream")
            await check(fleet, 3, 4)
            assert {version for (_, version, _) in engines[3].loads} == {1, 2, 3}

    tools.run(main())


def test_a_server_that_gets_it_too_slowly_is_left_to_the_trainer(tools, tmp_path, monkeypatch):
    """And the servers below it as well; nobody waits, and next time it is not in the way."""
    monkeypatch.setattr(relay, "_SLACK_SECONDS", 0.5)

    async def main():
        limits = limited(tools, 1, hang_seconds=5.0)
        async with detoured(tools, tmp_path, 4, 2, limits) as (fleet, engines, detour, said):
            detour.slow = 0.2  # to it from its neighbour: 64 s for the file
            report = await fleet.publish(1, weights(1), "stream")
            assert len(report.acks) == 4
            assert report.seconds < 10
            assert report.sent_bytes >= 3 * report.num_bytes
            assert sum("from the trainer: it came too slowly" in text for text in said) == 2
            assert sorted(loads(engines)) == [[1]] * 4
            report = await fleet.publish(2, weights(2), "stream")
            assert report.seconds < 2
            assert report.sent_bytes == 2 * report.num_bytes, "to the chain, and to the slow one"
            await check(fleet, 2, 4)

    tools.run(main())
