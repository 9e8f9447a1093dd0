"""A server that joins gets the weights from another one: whole, or from the trainer after all."""

import asyncio
import dataclasses
import os
import signal
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import grpc
import numpy as np
import pytest

from rlx.base import UserError
from rlx.fleet import relay, wire
from rlx.fleet import rollout_pb2 as pb
from rlx.fleet.client import Fleet
from rlx.fleet.member import Member
from rlx.fleet.requests import Sampling
from rlx.launch.local import LocalServers

CHUNK = 2 << 20
SIZE = 10 * CHUNK + 1234  # bytes
CODE = grpc.StatusCode


def weights(version):
    """The arithmetic engine's weights, of which a version changes 2 %."""
    ballast = np.arange(SIZE // 2, dtype=np.uint16)
    for k in range(1, version + 1):
        ballast[k::50] += 1
    scale = np.asarray(1.0 / (1 + version), np.float32)
    return {"scale": scale, "ballast": ballast.view(np.float16)}


def limited(tools, fanout=1, hang_seconds=5.0):
    """On a busy machine servers in one process answer Status late while weights arrive."""
    return dataclasses.replace(
        tools.limits, relay_fanout=fanout, connect_seconds=20, publish_timeout_seconds=30,
        hang_seconds=hang_seconds,
    )  # fmt: skip


async def until(condition):
    while not condition():
        await asyncio.sleep(0.01)


def member(fleet, address):
    return next(m for m in fleet._members if m.address == address)


async def check(fleet, version, count):
    """All servers come to have the version, and tokens of it only."""

    def arrived():
        goal = version, fleet._weights.crc32
        found = [m for m in fleet._members if m.live and m._serves == goal]
        return len(found) == count

    await until(arrived)
    done = await fleet.probe([[1, 2]], Sampling(seed=3, max_new_tokens=5))
    assert len(done) == count
    for (completion,) in done.values():
        want = -1 / (1 + version) / (1 + completion.tokens)
        np.testing.assert_allclose(completion.logprobs, want, rtol=1e-5)
        assert set(completion.versions.tolist()) == {version}
    for one in await fleet.status():
        assert (one.status.version, one.status.weights_crc32) == (version, fleet._weights.crc32)


# Servers in this process.


@asynccontextmanager
async def growing(tools, tmp_path, count, limits, method="delta"):
    """A fleet of all servers except the last, with version 1; yields what adds that one, too."""
    room = tmp_path / "room"
    room.mkdir()
    said, file = [], tmp_path / "addresses"
    async with tools.fleet(count, room, limits=limits) as (_, engines, servers):
        names = [f"127.0.0.1:{server.port}" for server in servers]
        file.write_text("\n".join(names[:-1]))
        fleet = Fleet([f"@{file}"], limits=limits, publish_dir=str(room), on_message=said.append)
        try:
            await fleet.connect()
            await fleet.publish(1, weights(1), method)

            async def join():
                file.write_text("\n".join(names))
                await until(lambda: names[-1] in fleet.live)
                return member(fleet, names[-1]).delivery

            yield fleet, engines, servers, said, join
        finally:
            await fleet.close()


def test_the_trainer_sends_nothing_to_a_joiner(tools, tmp_path):
    async def main():
        async with growing(tools, tmp_path, 3, limited(tools)) as (fleet, _, servers, said, join):
            delivery = await join()
            assert (delivery.method, delivery.sent_bytes) == ("stream", 0), said
            await check(fleet, 1, 3)
            report = await fleet.publish(2, weights(2), "delta")
            assert [d.method for d in report.deliveries] == ["delta"] * 3
            assert report.sent_bytes == fleet._weights.delta.num_bytes
            wanted = Path(fleet._weights.path).read_bytes()
            assert all(Path(s._rollouts._kept.weights.path).read_bytes() == wanted for s in servers)
            await check(fleet, 2, 3)

    tools.run(main())


@pytest.mark.parametrize("why", ["no fanout", "streamed", "dropped", "damaged", "unreachable"])
def test_what_no_server_can_send_comes_from_the_trainer(tools, tmp_path, why, monkeypatch):
    async def main():
        limits = limited(tools, fanout=why != "no fanout")
        method = "stream" if why == "streamed" else "delta"
        async with growing(tools, tmp_path, 2, limits, method) as (
            fleet, _, (first, _), said, join,
        ):  # fmt: skip
            base = first._rollouts._kept.weights
            if why == "dropped":
                first._rollouts._kept.replace(None)
            if why == "damaged":
                with open(base.path, "r+b") as file:
                    file.seek(SIZE // 2)
                    file.write(b"damage")
            if why == "unreachable":
                transport = SimpleNamespace(check_address=lambda *_: None, channel=nowhere)
                monkeypatch.setattr("rlx.fleet.relay.transport", transport)
            delivery = await join()
            assert (delivery.method, delivery.sent_bytes) == ("stream", fleet._weights.num_bytes)
            reason = {"dropped": "does not have version 1", "damaged": "checksum"}.get(why, "")
            told = [text for text in said if "gets version 1 from the trainer" in text]
            assert len(told) == (why not in ("no fanout", "streamed"))
            assert all(reason in text for text in told)
            await check(fleet, 1, 2)

    def nowhere(*_):
        return grpc.aio.insecure_channel("127.0.0.1:1", options=wire.OPTIONS)

    tools.run(main())


@pytest.mark.parametrize("refused", [False, True])
def test_a_server_joins_while_all_others_get_a_version(tools, tmp_path, refused, monkeypatch):
    """It waits for the first that has it; if they refuse it, it gets the version before."""
    calls, call = [], Member._call

    def noted(self, weights, *rest):
        calls.append((self.address, weights.version))
        return call(self, weights, *rest)

    monkeypatch.setattr(Member, "_call", noted)

    async def main():
        async with growing(tools, tmp_path, 3, limited(tools, hang_seconds=10)) as (
            fleet, engines, servers, said, join,
        ):  # fmt: skip
            go, begun = asyncio.Event(), []
            for engine in engines[:2]:

                async def wait(path, version, kv="keep", load=engine.load):
                    begun.append(version)
                    await go.wait()
                    if refused and version == 2:
                        raise ValueError("not today")
                    return await load(path, version, kv)

                engine.load = wait
            publishing = asyncio.ensure_future(fleet.publish(2, weights(2), "delta"))
            await until(lambda: len(begun) == 2)
            joining = asyncio.ensure_future(join())
            await until(lambda: len(fleet._members) == 3)
            await asyncio.sleep(0.5)
            assert not joining.done()
            assert not engines[2].loads
            go.set()
            delivery = await joining
            assert (delivery.method, delivery.sent_bytes) == ("stream", 0), said
            if refused:
                with pytest.raises(UserError, match="not today"):
                    await publishing
            else:
                assert len((await publishing).acks) == 2
            assert [version for _, version, _ in engines[2].loads] == [1 if refused else 2]
            assert not [v for address, v in calls if address.endswith(f":{servers[2].port}")]
            await check(fleet, 1 if refused else 2, 3)

    tools.run(main())


def test_servers_that_join_at_once_have_a_sender_each(tools, tmp_path):
    async def main():
        async with growing(tools, tmp_path, 4, limited(tools)) as (fleet, *_):
            late, found = fleet._member("127.0.0.1:1"), []
            for _ in range(6):
                found.append(await fleet._peer(late, fleet._weights))
                found[-1].passing += 1
            assert [len({*found[k : k + 3]}) for k in (0, 3)] == [3, 3]

    tools.run(main())


def test_the_reply_of_the_sender_is_lost(tools, tmp_path, monkeypatch):
    """A server that returns has the weights already when the trainer sends them once more."""
    passed = relay.Incoming.pass_on

    async def lost(self, *given):
        await passed(self, *given)
        raise ValueError("the reply is lost")

    monkeypatch.setattr(relay.Incoming, "pass_on", lost)

    async def main():
        async with tools.fleet(2, tmp_path, limits=limited(tools)) as (fleet, engines, _):
            await fleet.publish(1, weights(1), "delta")
            await check(fleet, 1, 2)
            back = fleet._members[1]
            async with back._updating:  # it returns when the next version is there
                back.fail("the network was cut")
                back._has = None  # so that no delta fits
                publishing = asyncio.create_task(fleet.publish(2, weights(2), "delta"))
                while fleet._weights.version < 2:
                    await asyncio.sleep(0.01)
            assert len((await publishing).acks) == 1
            await check(fleet, 2, 2)
            assert back.delivery.sent_bytes == fleet._weights.num_bytes
            assert [version for _, version, _ in engines[1].loads] == [1, 2, 2]
            fleet._balancer.raise_foreign()

    tools.run(main())


def test_a_server_keeps_no_third_file_for_a_joiner(tools, tmp_path):
    """It ends sending a removed file when the next version begins to come."""

    async def main():
        options = {"stage_dir": str(tmp_path)}
        async with tools.fleet(1, tmp_path, limits=limited(tools)) as (fleet, _, (server,)):
            await fleet.publish(1, weights(1), "delta")
            async with tools.server(**options) as (late, joiner), tools.stub(server) as stub:
                taken = asyncio.Event()

                async def wait(requests):
                    async for _ in requests:
                        taken.set()
                        await asyncio.sleep(3600)

                joiner._rollouts._take_publish = wait
                one = fleet._weights
                to = pb.RelayServer(
                    address=f"127.0.0.1:{joiner.port}", instance=joiner._rollouts._instance
                )
                way = pb.PublishRelay(below=[to], fanout=1, kept=True)
                header = pb.PublishHeader(
                    version=1, num_bytes=one.num_bytes, crc32=one.crc32, relay=way
                )
                call = stub.Publish(iter([pb.PublishRequest(header=header)]), timeout=20)
                call = asyncio.ensure_future(call)
                await taken.wait()
                path = server._rollouts._kept.weights.path
                await fleet.publish(2, weights(2), "delta")
                assert len(server._rollouts._kept.passing) == 1, "the removed file is still sent"
                assert f"{path} (deleted)" in open_files()
                await fleet.publish(3, weights(3), "delta")
                assert f"{path} (deleted)" not in open_files()
                with pytest.raises(grpc.aio.AioRpcError, match="not kept any more") as refused:
                    await call
                assert refused.value.code() is CODE.ABORTED
                assert not server._rollouts._kept.passing
                assert late.version == 0

    def open_files():
        return [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
                if os.path.islink(f"/proc/self/fd/{fd}")]  # fmt: skip

    tools.run(main())


# Processes.


class Slow:
    """A TCP proxy in front of a server, which counts what comes and delays all but the trainer."""

    def __init__(self, port):
        self._target, self.seconds, self.came, self._tasks = port, 0.1, 0, []

    async def start(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self):
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader, writer):
        own = not self._tasks  # the trainer comes first
        there, back = await asyncio.open_connection("127.0.0.1", self._target)
        pairs = ((reader, back, not own), (there, writer, False))
        self._tasks += [asyncio.ensure_future(self._copy(*pair)) for pair in pairs]

    async def _copy(self, reader, writer, slow):
        try:
            while data := await reader.read(1 << 18):
                self.came += len(data) if slow else 0
                await asyncio.sleep(self.seconds if slow else 0)
                writer.write(data)
                await writer.drain()
        finally:
            writer.close()


@asynccontextmanager
async def processes(tools, tmp_path, limits, count=3):
    """Server processes; all except the last have version 1, and that one joins by a slow way."""
    said, file = [], tmp_path / "addresses"
    command = (sys.executable, tools.script)
    with LocalServers("none", workdir=tmp_path, num_servers=count, command=command) as local:
        addresses = local.wait()
        slow = Slow(int(addresses[-1].rpartition(":")[2]))
        await slow.start()
        file.write_text("\n".join(addresses[:-1]))
        fleet = Fleet(
            [f"@{file}"], token=local.token, publish_dir=local.directory, limits=limits,
            on_message=said.append,
        )  # fmt: skip
        try:
            await fleet.connect()
            await fleet.publish(1, weights(1), "delta")
            joiner = f"127.0.0.1:{slow.port}"
            file.write_text("\n".join([*addresses[:-1], joiner]))
            await until(lambda: slow.came > SIZE // 3)
            senders = [m.address for m in fleet._members if m.passing]
            assert len(senders) == 1
            yield fleet, local.pids[addresses.index(senders[0])], slow, said, joiner
        finally:
            await fleet.close()
            await slow.stop()


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_the_sender_is_killed_or_stopped_half_way(tools, tmp_path, how):
    """The joiner gets it from the trainer; a stopped sender that goes on changes nothing."""

    async def main():
        async with processes(tools, tmp_path, limited(tools, hang_seconds=1.0)) as (
            fleet,
            pid,
            slow,
            said,
            joiner,
        ):
            os.kill(pid, how)
            assert joiner not in fleet.live
            await until(lambda: joiner in fleet.live)
            assert slow.came < SIZE, "it was half-way"
            assert any("gets version 1 from the trainer" in text for text in said), said
            assert member(fleet, joiner).delivery.sent_bytes == fleet._weights.num_bytes
            if how == signal.SIGKILL:
                return  # and its next process has another port
            await fleet.publish(2, weights(2), "delta")
            os.kill(pid, signal.SIGCONT)
            await check(fleet, 2, 3)
            await asyncio.sleep(1)
            await check(fleet, 2, 3)

    tools.run(main(), 90)


@pytest.mark.slow
@pytest.mark.parametrize("publishes", [1, 3])
def test_publishes_begin_during_a_join(tools, tmp_path, publishes):
    """One: the joiner gets the whole old version, then the changes. More: the old file is gone."""

    async def main():
        async with processes(tools, tmp_path, limited(tools, hang_seconds=1.0)) as (
            fleet,
            _,
            slow,
            said,
            joiner,
        ):
            slow.seconds = 0.3
            for version in range(2, 2 + publishes):
                report = await fleet.publish(version, weights(version), "delta")
                assert len(report.acks) == 2
                assert joiner not in fleet.live
            slow.seconds = 0.01
            await check(fleet, 1 + publishes, 3)
            delivery = member(fleet, joiner).delivery
            if publishes == 1:
                delta = fleet._weights.delta.num_bytes
                assert (delivery.method, delivery.sent_bytes) == ("delta", delta), said
            else:
                assert any("not kept any more" in text for text in said)
                assert (delivery.method, delivery.sent_bytes) == ("stream", 0), said
            report = await fleet.publish(9, weights(9), "delta")
            assert [d.method for d in report.deliveries] == ["delta"] * 3
            await check(fleet, 9, 3)

    tools.run(main(), 90)
