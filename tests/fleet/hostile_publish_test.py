"""Publishes that would read what they must not, wait for ever, or fill the disk."""

import ast
import asyncio
import os
import sys
import zlib
from pathlib import Path

import grpc
import psutil
import pytest

import rlx.fleet
from rlx.fleet import publish, wire
from rlx.fleet import rollout_pb2 as pb
from rlx.fleet import rollout_pb2_grpc as rpc
from rlx.launch.local import LocalServers

CODE = grpc.StatusCode
DEADLINE = 10


async def status_of(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details()


def header(**fields):
    return pb.PublishRequest(header=pb.PublishHeader(version=1, **fields))


def chunk(offset, data):
    return pb.PublishRequest(chunk=pb.PublishChunk(offset=offset, data=data))


def test_only_regular_files_in_the_roots_are_opened(tools, tmp_path):
    """Nothing of these may hang, a pipe above all."""
    root, secret = tmp_path / "root", tmp_path / "secret"
    root.mkdir()
    crc = publish.write_weights(tools.weights(0.5), secret)
    (root / "out").symlink_to(tmp_path)
    (root / "round").symlink_to(root / "round")
    (root / "full").symlink_to("/dev/full")
    os.mkfifo(root / "pipe")
    cases = {
        f"{root}/out/secret": CODE.PERMISSION_DENIED,
        f"{root}/../secret": CODE.PERMISSION_DENIED,
        f"{root}x/secret": CODE.PERMISSION_DENIED,
        "secret": CODE.PERMISSION_DENIED,
        "../secret": CODE.PERMISSION_DENIED,
        "/proc/self/environ": CODE.PERMISSION_DENIED,
        "/proc/self/fd/0": CODE.PERMISSION_DENIED,
        f"/proc/self/root{secret}": CODE.PERMISSION_DENIED,
        "/dev/zero": CODE.PERMISSION_DENIED,
        f"{root}/full": CODE.PERMISSION_DENIED,
        f"{root}/round": CODE.NOT_FOUND,
        f"{root}/pipe": CODE.NOT_FOUND,
        f"{root}/": CODE.NOT_FOUND,
        f"{root}/a\0b": CODE.INVALID_ARGUMENT,
        f"{root}/{'a/' * 100_000}": CODE.INVALID_ARGUMENT,
    }

    async def main():
        options = {"weight_roots": [str(root)]}
        async with tools.server(**options) as (engine, server), tools.stub(server) as stub:
            for path, wanted in cases.items():
                message = header(path=path, num_bytes=secret.stat().st_size, crc32=crc)
                code, text = await status_of(stub.Publish(iter([message]), timeout=DEADLINE))
                assert code is wanted, (path[:100], text)
            assert not engine.loads

    tools.run(main())


GB = 1 << 30


def sparse(path, size):
    with open(path, "wb") as file:
        file.truncate(size)
    return str(path)


@pytest.fixture
def process(tools, tmp_path):
    """A server process that nobody starts again: (address, psutil's process, its metadata)."""
    options = {"command": (sys.executable, tools.script), "weight_roots": [str(tmp_path)]}
    with LocalServers("none", workdir=tmp_path / "run", max_restarts=0, **options) as local:
        (address,), (pid,) = local.wait(), local.pids
        yield address, psutil.Process(pid), (("authorization", f"Bearer {local.token}"),)


async def busy(process):
    """Once the process has burnt 0.2 s of CPU from here on."""
    start = sum(process.cpu_times()[:2])
    while sum(process.cpu_times()[:2]) < start + 0.2:
        await asyncio.sleep(0.02)


def test_a_file_that_shrinks_while_it_is_read_is_refused(tools, tmp_path, process):
    address, server, known = process
    path = sparse(tmp_path / "large", 8 * GB)

    async def main():
        async with grpc.aio.insecure_channel(address, options=wire.OPTIONS) as channel:
            stub = rpc.RolloutStub(channel)
            message = header(path=path, num_bytes=8 * GB, crc32=1)
            call = stub.Publish(iter([message]), timeout=60, metadata=known)
            task = asyncio.ensure_future(status_of(call))
            await busy(server)
            os.truncate(path, 1 << 20)
            assert (await task)[0] is CODE.DATA_LOSS
            status = await stub.Status(pb.StatusRequest(), timeout=DEADLINE, metadata=known)
            assert status.pid == server.pid

    tools.run(main(), 90)


def test_nobody_reads_on_for_a_client_that_has_gone(tools, tmp_path, process):
    address, server, known = process
    path, size = sparse(tmp_path / "huge", 256 * GB), 256 * GB

    async def main():
        async with grpc.aio.insecure_channel(address, options=wire.OPTIONS) as channel:
            stub = rpc.RolloutStub(channel)
            wrong = stub.Publish(
                iter([header(path=path, num_bytes=GB)]), timeout=DEADLINE, metadata=known
            )
            code, text = await status_of(wrong)  # at once: nothing needs to be read for it
            assert (code, str(size) in text) == (CODE.DATA_LOSS, True)
            call = stub.Publish(iter([header(path=path, num_bytes=size)]), metadata=known)
            await busy(server)
            call.cancel()
            async with asyncio.timeout(20):  # while it reads, half a second of CPU in each
                spent = [0.0, sum(server.cpu_times()[:2])]
                while spent[-1] - spent[-2] > 0.1:
                    await asyncio.sleep(0.5)
                    spent.append(sum(server.cpu_times()[:2]))

    tools.run(main(), 60)


def test_a_publish_that_stalls_or_sends_nothing_is_given_up(tools, tmp_path):
    async def main():
        options = {"stage_dir": str(tmp_path), "stall_seconds": 0.3}
        async with tools.server(**options) as (engine, server), tools.stub(server) as stub:
            first = [header(num_bytes=100), chunk(0, b"x")]
            for sent in ([], first[:1], first):
                call = stub.Publish(timeout=DEADLINE)
                for message in sent:
                    await call.write(message)
                code, text = await status_of(call)
                assert code is CODE.DEADLINE_EXCEEDED
                assert "nothing came for 0.3 s" in text
            sent = [header(num_bytes=100), *[chunk(0, b"")] * 1000]
            code, text = await status_of(stub.Publish(iter(sent), timeout=DEADLINE))
            assert (code, text) == (CODE.INVALID_ARGUMENT, "a chunk is empty")
            assert list(tmp_path.iterdir()) == []
            assert not engine.loads

    tools.run(main())


def test_sizes_have_limits(tools, tmp_path):
    async def main():
        async with tools.server(stage_dir=str(tmp_path)) as (engine, server):
            address = f"127.0.0.1:{server.port}"
            unlimited = (("grpc.max_send_message_length", -1),)
            async with grpc.aio.insecure_channel(address, options=unlimited) as channel:
                for method in ("unary_unary", "stream_unary"):
                    name = "Status" if method == "unary_unary" else "Publish"
                    data = bytes(wire.MAX_MESSAGE_BYTES + 1)
                    call = getattr(channel, method)(f"/rlx.fleet.Rollout/{name}")
                    message = data if method == "unary_unary" else iter([data])
                    code, _ = await status_of(call(message, timeout=DEADLINE))
                    assert code is CODE.RESOURCE_EXHAUSTED, name
            async with tools.stub(server) as stub:
                for size in (1 << 50, 2**64 - 1):
                    call = stub.Publish(iter([header(num_bytes=size)]), timeout=DEADLINE)
                    code, text = await status_of(call)
                    assert code is CODE.RESOURCE_EXHAUSTED
                    assert "no space for the weights" in text
                sent = [header(num_bytes=1, crc32=zlib.crc32(b"x")), chunk(0, b"x" * (1 << 20))]
                code, _ = await status_of(stub.Publish(iter(sent), timeout=DEADLINE))
                assert code is CODE.DATA_LOSS
            assert list(tmp_path.iterdir()) == []
            assert not engine.loads

    tools.run(main())


def test_a_drip_ends_with_the_whole_publish(tools, tmp_path, monkeypatch):
    """Within the time of its size, or its caller's if that is longer."""
    monkeypatch.setattr("rlx.engines.service.Timeouts.publish_seconds", lambda self, size: 0.5)

    async def drip():
        yield header(num_bytes=1 << 20)
        for at in range(1 << 20):
            await asyncio.sleep(0.01)
            yield chunk(at, b"x")

    async def main():
        async with tools.server(stage_dir=str(tmp_path)) as (_, server), tools.stub(server) as stub:
            _, text = await status_of(stub.Publish(drip(), timeout=2.0))
            assert "more than 0.5 s" not in text
            for _ in range(5):  # grpcio says INTERNAL where a write of its own meets the end
                code, text = await status_of(stub.Publish(drip()))
                if code is not CODE.INTERNAL:
                    break
            assert code is CODE.DEADLINE_EXCEEDED
            assert "more than 0.5 s" in text

    tools.run(main())


def test_no_file_of_the_fleet_can_unpickle():
    for path in Path(rlx.fleet.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            loads = isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.load"
            unsafe = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"} & {
                name.split(".")[0] for name in names
            }
            assert not unsafe, f"{path.name} imports {unsafe}"
            assert not loads, f"{path.name} uses torch.load"
