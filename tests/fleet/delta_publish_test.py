"""Publishing by delta over real gRPC: bit-exact, and the whole file where the base is not there."""

import asyncio
import os
import signal
import sys
import zlib
from pathlib import Path

import grpc
import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from rlx.base import UserError
from rlx.engines.jax.jax_engine import JaxEngine
from rlx.fleet import delta, member, publish
from rlx.fleet import rollout_pb2 as pb
from rlx.fleet.requests import Request, Sampling
from rlx.launch.local import LocalServers
from rlx.model import hf

CODE = grpc.StatusCode
DEADLINE = 10
PROMPT = [1, 2, 3]
SIZE = 200_000


def step(version, scale=None, size=SIZE):
    """The arithmetic engine's weights after `version` steps, each of which moves 2 % of them."""
    ballast = np.arange(size, dtype=np.uint16)
    for k in range(1, version + 1):
        ballast[k::50] += 1
    scale = 1.0 / (1 + version) if scale is None else scale
    return {"scale": np.asarray(scale, np.float32), "ballast": ballast.view(np.float16)}


def ways(report):
    return [delivery.method for delivery in report.deliveries]


def kept(server):
    """The bytes that a server in this process keeps; None when it keeps no file."""
    base = server._rollouts._kept.weights
    return Path(base.path).read_bytes() if base else None


async def draw(fleet, most=40):
    sampling = Sampling(seed=5, max_new_tokens=most)
    return (await fleet.generate(PROMPT, sampling, 1))[0]


# One server and bare calls.


class Publisher:
    """Messages of publishes to one server, made of files in `directory`."""

    def __init__(self, directory):
        self.directory, self.files = directory, {}

    def weights(self, version, **options):
        path = self.directory / f"v{version}"
        crc = publish.write_weights(step(version, **options), path)
        self.files[version] = (path, path.stat().st_size, crc)

    def whole(self, version, keep=True):
        path, size, crc = self.files[version]
        header = pb.PublishHeader(version=version, num_bytes=size, crc32=crc, keep=keep)
        return self._messages(header, path.read_bytes())

    def delta(self, base, version, *, made=None, damaged=None, **changes):
        """`made`: sent as the delta. `damaged`: sent instead. `changes`: of header fields."""
        old, new = self.files[base], self.files[version]
        if made is None:
            path = self.directory / "delta"
            path.touch()
            delta.encode(old[0], new[0], path, 1 << 30)
            made = path.read_bytes()
        header = pb.PublishHeader(version=version, num_bytes=new[1], crc32=new[2], keep=True)
        header.delta.base_version, header.delta.base_crc32 = base, old[2]
        header.delta.num_bytes, header.delta.crc32 = len(made), zlib.crc32(made)
        for name, value in changes.items():
            target = header.delta if name.startswith("base_") else header
            setattr(target, name, value)
        return self._messages(header, made if damaged is None else damaged)

    @staticmethod
    def _messages(header, data, size=10_000):
        yield pb.PublishRequest(header=header)
        for start in range(0, len(data), size):
            chunk = pb.PublishChunk(offset=start, data=data[start : start + size])
            yield pb.PublishRequest(chunk=chunk)


async def code_of(stub, messages):
    call = stub.Publish(messages, timeout=DEADLINE)
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return CODE.OK


@pytest.fixture
def rooms(tmp_path):
    """Where the server stages, and where the publisher's files are."""
    stage, files = tmp_path / "stage", tmp_path / "files"
    stage.mkdir()
    files.mkdir()
    return stage, Publisher(files)


def test_a_delta_makes_the_file_and_replaces_the_base(tools, rooms):
    stage, made = rooms
    for version in (1, 2, 3):
        made.weights(version)

    async def main():
        async with tools.server(stage_dir=str(stage)) as (engine, server), tools.stub(server) as s:
            assert await code_of(s, made.whole(1)) is CODE.OK
            for version in (2, 3):
                assert await code_of(s, made.delta(version - 1, version)) is CODE.OK
                assert (engine.version, engine.scale) == (version, np.float32(1 / (1 + version)))
                assert kept(server) == made.files[version][0].read_bytes()
                assert len(os.listdir(stage)) == 1, "one base, and nothing else"
            status = await s.Status(pb.StatusRequest(drain_spans=True), timeout=DEADLINE)
            assert [span.name for span in status.spans].count("apply delta") == 2
            assert await code_of(s, made.whole(1, keep=False)) is CODE.OK
            assert kept(server) is None, "kept for a publisher that sends no deltas"
            assert os.listdir(stage) == []
            assert await code_of(s, made.whole(1)) is CODE.OK
        assert os.listdir(stage) == [], "the base must go with the server"

    tools.run(main())


def refusals(made):
    """name → (messages, code)."""
    good = b"".join(m.chunk.data for m in made.delta(1, 2))
    bad = good[:50] + bytes([good[50] ^ 1]) + good[51:]
    return {
        "another version": (made.delta(1, 2, base_version=5), CODE.ABORTED),
        "another base": (made.delta(1, 2, base_crc32=5), CODE.ABORTED),
        "a base that was never here": (made.delta(3, 2), CODE.ABORTED),
        "another size": (made.delta(1, 2, num_bytes=made.files[2][1] + 2), CODE.ABORTED),
        "another result": (made.delta(1, 2, crc32=5), CODE.ABORTED),
        "a bit flipped on the way": (made.delta(1, 2, damaged=bad), CODE.DATA_LOSS),
        "cut short on the way": (made.delta(1, 2, damaged=good[:-9]), CODE.DATA_LOSS),
        "made badly": (made.delta(1, 2, made=bad), CODE.ABORTED),
        "made too short": (made.delta(1, 2, made=good[:-9]), CODE.ABORTED),
        "no delta at all": (made.delta(1, 2, made=os.urandom(500)), CODE.ABORTED),
        "no bytes": (made.delta(1, 2, made=b""), CODE.ABORTED),
        "weights that the engine refuses": (made.delta(1, 4), CODE.FAILED_PRECONDITION),
    }


def test_a_refused_delta_changes_nothing(tools, rooms):
    stage, made = rooms
    for version in (1, 2, 3):
        made.weights(version)
    made.weights(4, scale=np.nan)

    async def main():
        async with tools.server(stage_dir=str(stage)) as (engine, server), tools.stub(server) as s:
            assert await code_of(s, made.delta(1, 2)) is CODE.ABORTED, "nothing is kept yet"
            assert await code_of(s, made.whole(1)) is CODE.OK
            for name, (messages, wanted) in refusals(made).items():
                assert await code_of(s, messages) is wanted, name
                assert (engine.version, engine.scale) == (1, 0.5), name
                assert kept(server) == made.files[1][0].read_bytes(), name
                assert len(os.listdir(stage)) == 1, name
            assert await code_of(s, made.delta(1, 2)) is CODE.OK
            assert kept(server) == made.files[2][0].read_bytes()

    tools.run(main())


def test_a_publisher_that_leaves_in_the_middle_of_a_delta(tools, rooms):
    stage, made = rooms
    made.weights(1)
    made.weights(2)

    async def main():
        async with tools.server(stage_dir=str(stage)) as (engine, server), tools.stub(server) as s:
            assert await code_of(s, made.whole(1)) is CODE.OK
            call = s.Publish(timeout=DEADLINE)
            await call.write(next(made.delta(1, 2)))
            while len(os.listdir(stage)) < 3:  # base, result, delta
                await asyncio.sleep(0.005)
            call.cancel()
            while len(os.listdir(stage)) > 1:
                await asyncio.sleep(0.005)
            assert engine.version == 1
            assert await code_of(s, made.delta(1, 2)) is CODE.OK

    tools.run(main())


# A fleet.


def test_after_the_first_file_only_deltas_go_over_the_wire(tools, tmp_path, arithmetic):
    async def main():
        async with tools.fleet(2, tmp_path) as (fleet, engines, servers):
            first = await fleet.publish(1, step(1), "delta")
            assert ways(first) == ["stream", "stream"]
            assert first.sent_bytes == 2 * first.num_bytes > 4 * SIZE
            for version in (2, 3, 4):
                report = await fleet.publish(version, step(version), "delta")
                assert ways(report) == ["delta", "delta"]
                assert 0 < report.sent_bytes < 0.04 * first.sent_bytes
                assert 0 < report.stall_seconds < report.seconds
                wanted = Path(fleet._weights.path).read_bytes()
                assert [kept(server) == wanted for server in servers] == [True, True]
                assert [(e.version, e.scale) for e in engines] == [
                    (version, np.float32(1 / (1 + version)))
                ] * 2
                assert len(os.listdir(tmp_path)) == 4, "file, delta, and a base a server"
            assert (await fleet.publish(4, step(4), "delta")).sent_bytes < 500
            by_path = await fleet.publish(5, step(5), "path")
            assert (ways(by_path), by_path.sent_bytes) == (["path", "path"], 0)
            assert len(os.listdir(tmp_path)) == 1, "nothing is kept where no delta comes"
            assert ways(await fleet.publish(6, step(6), "delta")) == ["stream", "stream"]
        assert os.listdir(tmp_path) == []

    tools.run(main())


def test_a_late_joiner_and_one_that_came_back_get_the_file_and_then_deltas(tools, tmp_path):
    async def main():
        async with tools.fleet(2, tmp_path) as (fleet, _, servers):
            await fleet.publish(1, step(1), "delta")
            await servers[1].stop()
            while sum(server.live for server in await fleet.status()) > 1:
                await asyncio.sleep(0.01)
            assert ways(await fleet.publish(2, step(2), "delta")) == ["delta"]
            options = {"port": servers[1].port, "stage_dir": str(tmp_path)}
            async with tools.server(**options) as (engine, again):
                while not all(server.live for server in await fleet.status()):
                    await asyncio.sleep(0.01)
                assert engine.version == 2, "live before it had the weights"
                assert fleet._members[1].delivery.method == "stream"
                report = await fleet.publish(3, step(3), "delta")
                assert ways(report) == ["delta", "delta"]
                assert kept(again) == Path(fleet._weights.path).read_bytes()

    tools.run(main())


def test_a_server_that_lost_its_base_gets_the_file_at_once(tools, tmp_path):
    async def main():
        async with tools.fleet(2, tmp_path) as (fleet, engines, servers):
            await fleet.publish(1, step(1), "delta")
            servers[0]._rollouts._kept.replace(None)  # restarted, and nobody has noticed
            report = await fleet.publish(2, step(2), "delta")
            assert ways(report) == ["stream", "delta"]
            assert report.deliveries[0].sent_bytes >= report.num_bytes
            assert all(server.live for server in await fleet.status())
            assert [engine.version for engine in engines] == [2, 2]
            assert ways(await fleet.publish(3, step(3), "delta")) == ["delta", "delta"]

    tools.run(main())


def test_a_server_whose_answer_was_lost_gets_the_file(tools, tmp_path):
    async def main():
        async with tools.fleet(2, tmp_path) as (fleet, engines, _):
            await fleet.publish(1, step(1), "delta")
            bad, load = engines[1], engines[1].load

            async def fail(path, version, kv="keep"):
                bad.load = load
                await load(path, version, kv)
                raise OSError("the disk under the engine burns")

            bad.load = fail
            report = await fleet.publish(2, step(2), "delta")
            assert ways(report) == ["delta"]
            while not all(server.live for server in await fleet.status()):
                await asyncio.sleep(0.01)
            assert fleet._members[1].delivery.method == "stream"
            assert ways(await fleet.publish(3, step(3), "delta")) == ["delta", "delta"]

    tools.run(main())


def test_a_version_that_nobody_takes_is_no_base(tools, tmp_path):
    async def main():
        async with tools.fleet(2, tmp_path) as (fleet, engines, _):
            await fleet.publish(1, step(1), "delta")
            with pytest.raises(UserError, match="not finite"):
                await fleet.publish(2, step(2, np.nan), "delta")
            assert len(os.listdir(tmp_path)) == 3
            completion = await draw(fleet)
            assert set(completion.versions.tolist()) == {1}
            report = await fleet.publish(3, step(3), "delta")
            assert ways(report) == ["delta", "delta"], "of version 1, which they still have"
            assert [engine.version for engine in engines] == [3, 3]

    tools.run(main())


@pytest.mark.parametrize("times", [1, 2])
def test_a_delta_damaged_on_the_way_is_sent_once_more(tools, tmp_path, monkeypatch, times):
    chunks, left = publish.chunks, [times]

    def damaged(path, size):
        for offset, data in chunks(path, size):
            if left[0] and len(data) < SIZE:  # of a delta
                left[0] -= 1
                data = data[:-1] + bytes([data[-1] ^ 1])
            yield offset, data

    async def main():
        async with tools.fleet(1, tmp_path) as (fleet, engines, servers):
            await fleet.publish(1, step(1), "delta")
            monkeypatch.setattr(member, "chunks", damaged)
            if times == 1:
                report = await fleet.publish(2, step(2), "delta")
                assert ways(report) == ["delta"]
                assert report.sent_bytes == 2 * fleet._weights.delta.num_bytes
                assert engines[0].version == 2
            else:
                with pytest.raises(UserError, match="DATA_LOSS"):
                    await fleet.publish(2, step(2), "delta")
                assert engines[0].version == 1
                assert len((await draw(fleet)).tokens)
            assert kept(servers[0]) == Path(fleet._weights.path).read_bytes()

    tools.run(main())


def test_quick_successions_while_requests_run(tools, tmp_path, arithmetic):
    """Ten versions as fast as they go: every token is of a published one and says which."""

    async def main():
        async with tools.fleet(2, tmp_path) as (fleet, engines, servers):
            for engine in engines:
                engine.step_seconds = 0.002
            await fleet.publish(1, step(1), "delta")
            running = [
                asyncio.create_task(
                    fleet.generate(PROMPT, Sampling(seed=seed, max_new_tokens=400), 4)
                )
                for seed in (11, 12, 13)
            ]
            versions = range(2, 12)
            reports = await asyncio.gather(*(fleet.publish(v, step(v), "delta") for v in versions))
            assert {way for report in reports for way in ways(report)} == {"delta"}
            for seed, task in zip((11, 12, 13), running, strict=True):
                for index, completion in enumerate(await task):
                    assert completion.tokens.tolist() == arithmetic.completion(seed, index, 400)
                    assert (np.diff(completion.versions) >= 0).all()
                    scale = 1 / (1 + completion.versions)
                    want = -scale / (1 + completion.tokens)
                    np.testing.assert_allclose(completion.logprobs, want, rtol=1e-6)
            wanted = Path(fleet._weights.path).read_bytes()
            assert [kept(server) == wanted for server in servers] == [True, True]

    tools.run(main())


def test_a_killed_process_comes_back_and_takes_deltas_again(tools, tmp_path):
    options = {"num_servers": 2}
    command = (sys.executable, tools.script)
    with LocalServers("none", workdir=tmp_path, command=command, **options) as servers:

        async def main():
            fleet = servers.fleet(limits=tools.limits)
            try:
                await fleet.connect()
                await fleet.publish(1, step(1), "delta")
                assert ways(await fleet.publish(2, step(2), "delta")) == ["delta", "delta"]
                os.kill(servers.pids[0], signal.SIGKILL)
                while all(server.live for server in await fleet.status()):
                    await asyncio.sleep(0.01)
                assert ways(await fleet.publish(3, step(3), "delta"))[-1] == "delta"
                while not all(server.live for server in await fleet.status()):
                    await asyncio.sleep(0.02)
                assert [server.status.version for server in await fleet.status()] == [3, 3]
                assert ways(await fleet.publish(4, step(4), "delta")) == ["delta", "delta"]
                assert set((await draw(fleet)).versions.tolist()) == {4}
            finally:
                await fleet.close()

        tools.run(main(), 60)
    assert not Path(servers.directory).exists(), "what the killed one kept must be swept"


def test_the_jax_engine_holds_the_very_bits(tools, tmp_path, tiny_model_dir):
    """A delta of bf16 weights makes the same engine, and the same tokens, as reading the file."""
    old = load_file(tiny_model_dir / "model.safetensors")
    old = {name: value.astype(ml_dtypes.bfloat16) for name, value in old.items()}
    rng = np.random.default_rng(0)
    new = {
        name: (v.astype(np.float32) * (1 + 1e-3 * rng.standard_normal(v.shape))).astype(v.dtype)
        for name, v in old.items()
    }
    engine = JaxEngine(
        str(tiny_model_dir), slots=4, max_model_len=64, decode_steps=4, dtype="bfloat16"
    )

    async def tokens():
        sampling = Sampling(seed=1, max_new_tokens=16, min_new_tokens=16)
        request = Request("r", np.asarray([3, 17, 44], np.int32), sampling)
        return [(c.tokens, c.logprobs, c.versions) async for c in engine.generate(request)]

    async def main():
        async with tools.fleet(1, tmp_path, [engine]) as (fleet, _, _):
            await fleet.publish(1, old, "delta")
            before = await tokens()
            report = await fleet.publish(2, new, "delta")
            assert ways(report) == ["delta"]
            assert report.sent_bytes < 0.8 * report.num_bytes
            wanted = engine._read(fleet._weights.path)
            for got, want in zip(
                jax.tree.leaves(engine._params), jax.tree.leaves(wanted), strict=True
            ):
                assert np.asarray(got).tobytes() == np.asarray(want).tobytes()
            after = await tokens()
            assert after != before
            await fleet.publish(2, new, "path")
            assert await tokens() == after

    tools.run(main(), 120)


@pytest.mark.vllm
def test_vllm_takes_a_delta_as_it_takes_the_file(vllm_servers):
    old = load_file(hf.resolve("rlx:arithmetic") / "model.safetensors")
    old = {name: value.astype(ml_dtypes.bfloat16) for name, value in old.items()}
    rng = np.random.default_rng(0)
    new = {
        name: (v.astype(np.float32) + 1e-4 * rng.standard_normal(v.shape)).astype(v.dtype)
        for name, v in old.items()
    }
    greedy = Sampling(temperature=0.0, max_new_tokens=24, min_new_tokens=24)

    async def main():
        fleet, drawn = vllm_servers.fleet(), []
        try:
            await fleet.connect()
            for version, tensors, method in (
                (1, old, "delta"),
                (2, new, "delta"),
                (3, new, "path"),
            ):
                report = await fleet.publish(version, tensors, method)
                completion = (await fleet.generate(PROMPT, greedy, 1))[0]
                assert set(completion.versions.tolist()) == {version}
                drawn.append((ways(report), completion.logprobs.tolist()))
            return drawn
        finally:
            await fleet.close()

    before, by_delta, by_path = asyncio.run(main())
    assert [before[0], by_delta[0], by_path[0]] == [["stream"], ["delta"], ["path"]]
    assert by_delta[1] == by_path[1] != before[1]
