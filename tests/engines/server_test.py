"""The server against bare calls: streams, publishes that must be refused, tokens, fuzz."""

import asyncio
import os
import random
import resource
import sys
import zlib
from contextlib import suppress

import grpc
import numpy as np
import pytest

from rlx.base import UserError
from rlx.engines import options
from rlx.engines import server as server_module
from rlx.engines.server import Server
from rlx.fleet import publish, wire
from rlx.fleet import rollout_pb2 as pb
from rlx.fleet.requests import Request, Sampling

CODE = grpc.StatusCode
DEADLINE = 10


def request(seed=1, n=2, max_new_tokens=20, prompt=(1, 2, 3), **changes):
    sampling = Sampling(seed=seed, max_new_tokens=max_new_tokens)
    prompt = np.asarray(prompt, np.int32)
    return wire.request_message(Request("r", prompt, sampling, n=n, **changes))


async def collect(call):
    tokens, reasons, messages = {}, {}, 0
    async for reply in call:
        messages += 1
        for chunk in wire.chunks_from(reply):
            tokens.setdefault(chunk.index, []).extend(chunk.tokens.tolist())
            reasons[chunk.index] = chunk.stop_reason or reasons.get(chunk.index)
    return tokens, reasons, messages


def parts(data, version=1, size=100, **changes):
    header = {"version": version, "num_bytes": len(data), "crc32": zlib.crc32(data), **changes}
    yield pb.PublishRequest(header=pb.PublishHeader(**header))
    for start in range(0, len(data), size):
        chunk = pb.PublishChunk(offset=start, data=data[start : start + size])
        yield pb.PublishRequest(chunk=chunk)


def file_bytes(tmp_path, tools, scale=0.5, ballast=1000):
    tensors = {**tools.weights(scale), "ballast": np.arange(ballast, dtype=np.float32)}
    publish.write_weights(tensors, tmp_path / "made")
    data = (tmp_path / "made").read_bytes()
    (tmp_path / "made").unlink()
    return data


async def status_of(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details()


def test_samples_of_a_prompt_come_in_one_stream(tools, arithmetic):
    async def main():
        async with tools.server() as (_, server), tools.stub(server) as stub:
            call = stub.Generate(request(n=3, first_index=5), timeout=DEADLINE)
            tokens, reasons, messages = await collect(call)
            assert tokens == {i: arithmetic.completion(1, i, 20) for i in (5, 6, 7)}
            ends = {
                i: "stop" if t[-1] == arithmetic.STOP_TOKEN else "length" for i, t in tokens.items()
            }
            assert reasons == ends
            assert messages <= 6, "the chunks of one step must share a message"

    tools.run(main())


def test_tokens_that_nobody_watches_come_in_fewer_messages(tools, arithmetic):
    async def main():
        engine = arithmetic.ArithmeticEngine(step_seconds=0.02)
        long = next(s for s in range(1000) if len(arithmetic.completion(s, 0, 120)) == 120)
        async with tools.server(engine) as (_, server), tools.stub(server) as stub:
            (watched, *of), (same, *fewer) = await asyncio.gather(
                *(collect(stub.Generate(request(long, 1, 120, unwatched=no), timeout=60))
                  for no in (False, True))
            )  # fmt: skip
            assert watched == same == {0: arithmetic.completion(long, 0, 120)}
            assert fewer[1] < of[1]

    tools.run(main())


def test_cancelled_call_aborts_its_samples(tools):
    async def main():
        async with tools.server() as (engine, server), tools.stub(server) as stub:
            engine.step_seconds = 0.01
            call = stub.Generate(request(n=4, max_new_tokens=4000), timeout=DEADLINE)
            await call.read()
            call.cancel()
            while engine.running:
                await asyncio.sleep(0.005)
            assert engine.aborted == 4

    tools.run(main())


def test_bad_request_has_a_status_and_the_server_lives(tools):
    async def main():
        async with tools.server() as (engine, server), tools.stub(server) as stub:
            for bad, match in (
                (request(prompt=()), "prompt_tokens"),
                (request(prompt=(1, 5000)), "vocabulary"),
                (request(prompt=(1,) * 5000), "too long"),
                (request(n=0), "n=0"),
            ):
                code, text = await status_of(stub.Generate(bad, timeout=DEADLINE).read())
                assert code is CODE.INVALID_ARGUMENT
                assert match in text
            stale = request()
            stale.instance = "another"
            code, _ = await status_of(stub.Generate(stale, timeout=DEADLINE).read())
            assert code is CODE.UNAVAILABLE
            tokens, _, _ = await collect(stub.Generate(request(), timeout=DEADLINE))
            assert len(tokens) == 2
            assert len(engine.requests) == 1

    tools.run(main())


def test_published_by_stream_or_path(tools, tmp_path):
    async def main():
        options = {"stage_dir": str(tmp_path), "weight_roots": [str(tmp_path)]}
        async with tools.server(**options) as (engine, server), tools.stub(server) as stub:
            data = file_bytes(tmp_path, tools)
            reply = await stub.Publish(iter(parts(data, 7)), timeout=DEADLINE)
            assert (reply.version, engine.version, engine.scale) == (7, 7, 0.5)
            assert reply.paused_ns > 0
            assert list(tmp_path.iterdir()) == [], "the staged file must go"
            crc = publish.write_weights(tools.weights(0.25), tmp_path / "w.safetensors")
            size = os.path.getsize(tmp_path / "w.safetensors")
            header = pb.PublishHeader(
                version=8, path=str(tmp_path / "w.safetensors"), num_bytes=size, crc32=crc,
                kv=pb.RECOMPUTE,
            )  # fmt: skip
            await stub.Publish(iter([pb.PublishRequest(header=header)]), timeout=DEADLINE)
            assert (engine.version, engine.scale) == (8, 0.25)
            assert [load[1:] for load in engine.loads] == [(7, "keep"), (8, "recompute")]
            status = await stub.Status(pb.StatusRequest(drain_spans=True), timeout=DEADLINE)
            assert status.version == 8
            assert not status.paused
            names = [span.name for span in status.spans]
            assert names == ["load version 7", "verify weights", "load version 8"]
            again = await stub.Status(pb.StatusRequest(drain_spans=True), timeout=DEADLINE)
            assert not again.spans

    tools.run(main())


OUT_OF_ORDER = ("chunks exchanged", "middle chunk missing", "chunk repeated")


def corruptions(data):
    """name → (requests, code)."""
    good = list(parts(data))
    flipped = list(parts(data[:300] + bytes([data[300] ^ 1]) + data[301:], crc32=zlib.crc32(data)))
    twice = [good[0], good[1], good[1], *good[2:]]
    return {
        "one bit flipped": (flipped, CODE.DATA_LOSS),
        "chunks exchanged": ([good[0], good[2], good[1], *good[3:]], CODE.DATA_LOSS),
        "last chunk missing": (good[:-1], CODE.DATA_LOSS),
        "middle chunk missing": ([*good[:2], *good[3:]], CODE.DATA_LOSS),
        "chunk repeated": (twice, CODE.DATA_LOSS),
        "more than announced": (list(parts(data, num_bytes=len(data) - 8)), CODE.DATA_LOSS),
        "less than announced": (list(parts(data, num_bytes=len(data) + 8)), CODE.DATA_LOSS),
        "no header": (good[1:], CODE.INVALID_ARGUMENT),
        "two headers": ([good[0], *good], CODE.INVALID_ARGUMENT),
        "nothing": ([], CODE.INVALID_ARGUMENT),
        "an empty message": ([pb.PublishRequest()], CODE.INVALID_ARGUMENT),
        "negative version": (list(parts(data, version=-1)), CODE.INVALID_ARGUMENT),
        "not safetensors": (list(parts(os.urandom(500))), CODE.FAILED_PRECONDITION),
        "larger than any disk": (list(parts(data, num_bytes=1 << 60)), CODE.RESOURCE_EXHAUSTED),
    }


def test_damaged_stream_never_reaches_the_engine(tools, tmp_path):
    options = {"stage_dir": str(tmp_path)}

    async def main():
        async with tools.server(**options) as (engine, server), tools.stub(server) as stub:
            await stub.Publish(iter(parts(file_bytes(tmp_path, tools), 3)), timeout=DEADLINE)
            data = file_bytes(tmp_path, tools, scale=0.125)
            for name, (messages, wanted) in corruptions(data).items():
                code, text = await status_of(stub.Publish(iter(messages), timeout=DEADLINE))
                assert code is wanted, name
                assert ("chunk at offset" in text) is (name in OUT_OF_ORDER), name
                assert list(tmp_path.iterdir()) == [], name
                assert (engine.version, engine.scale) == (3, 0.5), name
                status = await stub.Status(pb.StatusRequest(), timeout=DEADLINE)
                assert (status.version, status.paused) == (3, False), name
                await collect(stub.Generate(request(), timeout=DEADLINE))
            await stub.Publish(iter(parts(data, 4)), timeout=DEADLINE)
            assert (engine.version, engine.scale) == (4, 0.125)

    tools.run(main())


def test_publisher_that_leaves_in_the_middle(tools, tmp_path):
    options = {"stage_dir": str(tmp_path)}

    async def main():
        async with tools.server(**options) as (engine, server), tools.stub(server) as stub:
            call = stub.Publish(timeout=DEADLINE)
            for message in list(parts(file_bytes(tmp_path, tools)))[:3]:
                await call.write(message)
            while not list(tmp_path.iterdir()):
                await asyncio.sleep(0.005)
            call.cancel()
            while list(tmp_path.iterdir()):
                await asyncio.sleep(0.005)
            assert engine.version == 0

    tools.run(main())


def test_path_must_lie_in_a_weight_root(tools, tmp_path):
    root, outside = tmp_path / "root", tmp_path / "rootless.safetensors"
    root.mkdir()
    crc = publish.write_weights(tools.weights(0.5), outside)
    (root / "link").symlink_to(outside)

    async def main():
        async with (
            tools.server(weight_roots=[str(root)]) as (engine, server),
            tools.stub(server) as stub,
        ):
            for path, wanted in (
                (outside, CODE.PERMISSION_DENIED),
                (root / ".." / "rootless.safetensors", CODE.PERMISSION_DENIED),
                (root / "link", CODE.PERMISSION_DENIED),
                ("rootless.safetensors", CODE.PERMISSION_DENIED),
                (root / "none", CODE.NOT_FOUND),
                (root, CODE.NOT_FOUND),
                (f"{root}/a\0b", CODE.INVALID_ARGUMENT),
            ):
                size = outside.stat().st_size
                header = pb.PublishHeader(version=1, path=str(path), num_bytes=size, crc32=crc)
                call = stub.Publish(iter([pb.PublishRequest(header=header)]), timeout=DEADLINE)
                code, _ = await status_of(call)
                assert code is wanted, path
            assert not engine.loads

    tools.run(main())


def test_path_with_other_bytes_than_promised(tools, tmp_path):
    crc = publish.write_weights(tools.weights(0.5), tmp_path / "w")
    size = (tmp_path / "w").stat().st_size

    async def main():
        async with (
            tools.server(weight_roots=[str(tmp_path)]) as (engine, server),
            tools.stub(server) as stub,
        ):
            for wrong in ({"crc32": crc ^ 1}, {"num_bytes": size + 1}):
                fields = {"num_bytes": size, "crc32": crc, **wrong}
                header = pb.PublishHeader(version=1, path=str(tmp_path / "w"), **fields)
                call = stub.Publish(iter([pb.PublishRequest(header=header)]), timeout=DEADLINE)
                code, _ = await status_of(call)
                assert code is CODE.DATA_LOSS
            assert not engine.loads

    tools.run(main())


def test_update_keeps_requests_and_stamps_each_token(tools, tmp_path, arithmetic):
    options = {"stage_dir": str(tmp_path)}

    async def main():
        async with tools.server(**options) as (engine, server), tools.stub(server) as stub:
            engine.step_seconds = 0.005
            call = stub.Generate(request(n=1, max_new_tokens=400, seed=11), timeout=DEADLINE)
            replies = aiter(call)
            first = wire.chunks_from(await anext(replies))
            data = file_bytes(tmp_path, tools)
            await stub.Publish(iter(parts(data, 1)), timeout=DEADLINE)
            rest = [chunk async for reply in replies for chunk in wire.chunks_from(reply)]
            tokens, logprobs, versions = (
                np.concatenate([getattr(chunk, name) for chunk in (*first, *rest)])
                for name in ("tokens", "logprobs", "versions")
            )
            assert tokens.tolist() == arithmetic.completion(11, 0, 400)
            assert sorted(set(versions.tolist())) == [0, 1]
            assert (np.diff(versions) >= 0).all()
            scale = np.where(versions == 0, 1.0, 0.5)
            np.testing.assert_allclose(logprobs, -scale / (1 + tokens), rtol=1e-6)

    tools.run(main())


def test_pause_holds_over_a_publish(tools, tmp_path):
    options = {"stage_dir": str(tmp_path)}

    async def main():
        async with tools.server(**options) as (_, server), tools.stub(server) as stub:
            await stub.Pause(pb.PauseRequest(), timeout=DEADLINE)
            call = stub.Generate(request(), timeout=DEADLINE)
            await stub.Publish(iter(parts(file_bytes(tmp_path, tools))), timeout=DEADLINE)
            status = await stub.Status(pb.StatusRequest(), timeout=DEADLINE)
            assert (status.paused, status.version) == (True, 1)
            await stub.Resume(pb.ResumeRequest(), timeout=DEADLINE)
            tokens, _, _ = await collect(call)
            assert len(tokens) == 2

    tools.run(main())


def test_token(tools):
    async def main():
        async with tools.server(token="sesame") as (engine, server), tools.stub(server) as stub:
            right = (("authorization", "Bearer sesame"),)
            for wrong in (
                None,
                (("authorization", "Bearer open"),),
                (("authorization", "sesame"),),
            ):
                options = {"timeout": DEADLINE, "metadata": wrong}
                for call in (
                    stub.Status(pb.StatusRequest(), **options),
                    stub.Generate(request(), **options).read(),
                    stub.Publish(iter(parts(b"x")), **options),
                ):
                    assert (await status_of(call))[0] is CODE.UNAUTHENTICATED
            assert not engine.requests
            assert (await stub.Status(pb.StatusRequest(), timeout=DEADLINE, metadata=right)).slots

    tools.run(main())


def test_port_in_use(tools):
    async def main():
        async with tools.server() as (_, server):
            with pytest.raises(UserError, match=f"{server.port}.*in use"):
                Server(lambda: None, port=server.port)
        with pytest.raises(UserError, match="token"):
            Server(lambda: None, host="0.0.0.0")
        with pytest.raises(UserError, match="65535"):
            Server(lambda: None, port=65536)

    tools.run(main())


@pytest.mark.parametrize(
    ("flag", "words"),
    [("--hang-seconds=5", "is for vLLM; use --engine=vllm"),
     ("--drain-seconds=5", "without --join; give both"),
     ("--drain-seconds=nan", "nan is not a number from 0"),
     ("--hang-seconds=-1", "-1 is not a number from 0"),
     ("--max-queue=0", "0 is not a whole number from 1")],
)  # fmt: skip
def test_flags_that_do_nothing_or_are_out_of_range_are_refused(flag, words):
    with pytest.raises(UserError, match=words):
        options.server_options(options.parser().parse_args(["--model=any", flag]))


def test_servers_without_a_seed_draw_apart():
    """On GPUs, where vLLM gets no seeds of requests, two servers drew by the same numbers."""
    seeds = [options.parser().parse_args(["--model=any"]).seed for _ in range(2)]
    assert seeds[0] != seeds[1]


def test_engine_that_breaks_has_a_status(tools):
    async def main():
        async with tools.server() as (engine, server), tools.stub(server) as stub:

            def broken(request):
                raise ZeroDivisionError("engine")

            generate, engine.generate = engine.generate, broken
            code, _ = await status_of(stub.Generate(request(), timeout=DEADLINE).read())
            assert code is CODE.UNKNOWN
            engine.generate = generate
            assert (await collect(stub.Generate(request(), timeout=DEADLINE)))[2]

    tools.run(main())


def mutated(data, rng):
    data = bytearray(data)
    for _ in range(rng.randint(1, 8)):
        kind = rng.randrange(3)
        at = rng.randrange(len(data) + 1)
        if kind == 0 and data:
            data[at % len(data)] = rng.randrange(256)
        elif kind == 1:
            data[at:at] = rng.randbytes(rng.randint(1, 4))
        else:
            del data[at : at + rng.randint(1, 4)]
    return bytes(data)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_every_malformed_message_has_a_status(tools, tmp_path):
    """400 messages of random and damaged bytes to each kind of method; afterwards all is well."""
    rng = random.Random(0)

    async def main():
        options = {"stage_dir": str(tmp_path), "weight_roots": [str(tmp_path)]}
        async with tools.server(**options) as (engine, server):
            address = f"127.0.0.1:{server.port}"
            async with grpc.aio.insecure_channel(address, options=wire.OPTIONS) as channel:
                answered = 0
                good = request(n=2, max_new_tokens=8).SerializeToString()
                header = next(parts(b"x" * 50)).SerializeToString()
                for i in range(400):
                    data = rng.randbytes(rng.randint(0, 60)) if i % 4 == 0 else None
                    name = ("Generate", "Publish", "Status", "Resume", "Nothing")[i % 5]
                    if name == "Publish":
                        call = channel.stream_unary(f"/rlx.fleet.Rollout/{name}")
                        messages = [data or mutated(header, rng) for _ in range(rng.randint(1, 3))]
                        done = asyncio.ensure_future(
                            _answer(call(iter(messages), timeout=DEADLINE))
                        )
                    elif name == "Generate":
                        call = channel.unary_stream(f"/rlx.fleet.Rollout/{name}")
                        stream = call(data or mutated(good, rng), timeout=DEADLINE)
                        done = asyncio.ensure_future(_drained(stream))
                    else:
                        call = channel.unary_unary(f"/rlx.fleet.Rollout/{name}")
                        done = asyncio.ensure_future(_answer(call(data or good, timeout=DEADLINE)))
                    code = await done
                    assert code not in (CODE.DEADLINE_EXCEEDED, CODE.UNAVAILABLE), (i, name)
                    answered += 1
                assert answered == 400
            async with tools.stub(server) as stub:
                await stub.Resume(pb.ResumeRequest(), timeout=DEADLINE)
                await stub.Publish(iter(parts(file_bytes(tmp_path, tools), 9)), timeout=DEADLINE)
                assert engine.version == 9
                assert len((await collect(stub.Generate(request(), timeout=DEADLINE)))[0]) == 2
                assert list(tmp_path.iterdir()) == []

    tools.run(main(), 60)


async def _answer(call):
    with suppress(grpc.aio.AioRpcError):
        await call
    return await call.code()


async def _drained(call):
    with suppress(grpc.aio.AioRpcError):
        for _ in range(50):  # a damaged request may be a good one with a long completion
            if await call.read() is grpc.aio.EOF:
                break
        else:
            call.cancel()
            return CODE.CANCELLED
    return await call.code()


STRANGERS = """
import resource, socket, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
kept = [socket.socket() for _ in range(400)]
for one in kept:
    one.setblocking(False)
    one.connect_ex(("127.0.0.1", int(sys.argv[1])))
print("open", flush=True)
sys.stdin.read()
"""


def test_connections_that_say_nothing_keep_no_client_out(tools, monkeypatch):
    """More of them than this process may open files."""
    short = ("grpc.server_handshake_timeout_ms", "grpc.max_connection_idle_ms")
    options = [(k, 1000 if k in short else v) for k, v in server_module._SERVER_OPTIONS]
    monkeypatch.setattr(server_module, "_SERVER_OPTIONS", tuple(options))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)

    async def among_strangers(server):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", STRANGERS, str(server.port),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
        )  # fmt: skip
        try:
            assert await process.stdout.readline() == b"open\n"
            async with tools.stub(server) as stub:
                await stub.Status(pb.StatusRequest(), wait_for_ready=True, timeout=30)
        finally:
            process.kill()
            await process.wait()
        # An HTTP/2 connection without a call, too.
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0")
        await reader.read()
        writer.close()

    async def main():
        async with tools.server() as (_, server):
            await asyncio.wait_for(among_strangers(server), 60)

    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        tools.run(main())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_only_requests_without_tokens_are_a_sign_of_a_hang(tools, arithmetic):
    async def main():
        engine = arithmetic.ArithmeticEngine(step_seconds=0.02)
        async with tools.server(engine) as (_, server), tools.stub(server) as stub:

            def mark():
                server._rollouts.look()
                return server.signs(0.0)["engine"].mark

            assert mark() is None
            call = stub.Generate(request(max_new_tokens=3000, prompt=(5, 5, 5)))
            await anext(aiter(call))
            before = mark()
            await asyncio.sleep(0.1)
            assert before != mark() is not None
            await engine.pause()
            assert mark() is None
            words = server.signs(0.0)["engine"].what()
            call.cancel()
        assert words == "the engine makes no token; 2 samples asked for, 2 decoding, 0 waiting"

    tools.run(main())
