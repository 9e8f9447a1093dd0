"""2,000 malformed requests to a real server process: each has a status, and the process lives.

The seed is in the test's name and in every failure; set FUZZ_SEED for another.
"""

import asyncio
import os
import random
import sys
import zlib
from contextlib import suppress
from pathlib import Path

import grpc
import pytest

from rlx.fleet import publish, wire
from rlx.fleet import rollout_pb2 as pb
from rlx.fleet import rollout_pb2_grpc as rpc
from rlx.launch.local import LocalServers

SEED = int(os.environ.get("FUZZ_SEED", "0"))
COUNT = 2000
TOGETHER = 16  # requests at a time
DEADLINE = 30.0  # seconds for an answer
CODE = grpc.StatusCode
UNANSWERED = (CODE.DEADLINE_EXCEEDED, CODE.UNAVAILABLE)
ARITY = {
    "Generate": "unary_stream", "Score": "unary_unary", "Publish": "stream_unary",
    "Status": "unary_unary", "Resume": "unary_unary", "Nothing": "unary_unary",
}  # fmt: skip
METADATA = (("authorization", "Bearer sesame"),)
WILD_INTS = (0, 1, -1, 2, 7, 100, 1 << 15, 2**31 - 1, -(2**31))
WILD_LONGS = (*WILD_INTS, 2**63 - 1, -(2**63))
WILD_FLOATS = (0.0, -0.0, 1.0, 0.5, -1.0, 1e-45, 1e308, float("nan"), float("inf"), -float("inf"))
WILD_TEXTS = ("", "x", "\n", "\u0000", "é" * 50, "\U0001f600", "../../etc/passwd", "a" * 5000)


@pytest.fixture(params=["arithmetic", "jax", pytest.param("vllm", marks=pytest.mark.vllm)])
def server(request, tools, tmp_path):
    """A server process that nobody starts again."""
    options = {"workdir": tmp_path, "weight_roots": [str(tmp_path)], "max_restarts": 0}
    options["token"] = "sesame"
    if request.param == "arithmetic":
        local = LocalServers("none", command=(sys.executable, tools.script), **options)
    else:
        model = request.getfixturevalue("tiny_model_dir")
        engine = {"engine": request.param, "max_model_len": 128, "slots": 4}
        local = LocalServers(model, **engine, **options)
    with local:
        local.wait()
        yield local


def good_request(rng, **changes):
    sampling = pb.Sampling(temperature=1.0, top_p=1.0, max_new_tokens=8, seed=rng.randrange(99))
    fields = {"request_id": "r", "prompt_tokens": [3, 4, 5], "n": 2, **changes}
    return pb.GenerateRequest(sampling=sampling, **fields)


def wild_request(rng):
    """Any field may hold anything of its type; about half of them are as they should be."""
    message = good_request(rng)
    for name, values in (
        ("temperature", WILD_FLOATS), ("top_p", WILD_FLOATS), ("top_k", WILD_INTS),
        ("max_new_tokens", WILD_INTS), ("min_new_tokens", WILD_INTS), ("seed", WILD_LONGS),
    ):  # fmt: skip
        if rng.random() < 0.3:
            setattr(message.sampling, name, rng.choice(values))
    for name in ("n", "first_index", "prefix_len", "priority"):
        if rng.random() < 0.2:
            setattr(message, name, rng.choice(WILD_INTS))
    if rng.random() < 0.3:
        message.prompt_tokens.extend(rng.choices(WILD_INTS, k=rng.choice((1, 3, 300))))
    if rng.random() < 0.1:
        message.prompt_tokens[:] = [1] * rng.choice((0, 200_000))
    if rng.random() < 0.2:
        message.sampling.stop.extend(rng.choices(WILD_TEXTS, k=rng.choice((1, 5, 300))))
    if rng.random() < 0.2:
        message.sampling.stop_token_ids.extend(rng.choices(WILD_INTS, k=rng.choice((1, 300))))
    if rng.random() < 0.1:
        message.instance = rng.choice(WILD_TEXTS)
    return message.SerializeToString()


def good_score(rng):
    return pb.ScoreRequest(tokens=[3, 4, 5, 6], first=rng.choice((1, 2, 3)))


def wild_score(rng):
    message = good_score(rng)
    if rng.random() < 0.3:
        message.first = rng.choice(WILD_INTS)
    if rng.random() < 0.3:
        message.temperature = rng.choice(WILD_FLOATS)
    if rng.random() < 0.3:
        message.tokens.extend(rng.choices(WILD_INTS, k=rng.choice((1, 3, 300))))
    if rng.random() < 0.2:
        message.tokens[:] = [1] * rng.choice((0, 1, 128, 200_000))
    if rng.random() < 0.1:
        message.instance = rng.choice(WILD_TEXTS)
    return message.SerializeToString()


def wild_publish(rng):
    """Headers, chunks and nothings in any order; never the bytes of weights."""
    messages = []
    for _ in range(rng.randrange(5)):
        kind = rng.randrange(4)
        if kind == 0:
            header = pb.PublishHeader(
                version=rng.choice(WILD_INTS),
                path=rng.choice((*WILD_TEXTS, "/dev/zero", "/proc/self/mem", "/dev/shm", ".")),
                num_bytes=rng.choice((0, 1, 9, 1 << 20, 1 << 62, 2**64 - 1)),
                crc32=rng.choice((0, zlib.crc32(b"x"), 2**32 - 1)),
                kv=rng.choice((0, 1, 2, 99, -1)),
            )
            messages.append(pb.PublishRequest(header=header))
        elif kind == 1:
            data = rng.randbytes(rng.choice((0, 1, 9, 100_000)))
            offset = rng.choice((0, 1, 9, 2**64 - 1))
            messages.append(pb.PublishRequest(chunk=pb.PublishChunk(offset=offset, data=data)))
        else:
            messages.append(pb.PublishRequest())
    return [m.SerializeToString() for m in messages]


def damaged(rng, data):
    """A few bits flipped, a part cut out or bytes put in."""
    data = bytearray(data)
    for _ in range(rng.randint(1, 6)):
        at, kind = rng.randrange(len(data) + 1), rng.randrange(3)
        if kind == 0 and data:
            data[at % len(data)] ^= 1 << rng.randrange(8)
        elif kind == 1:
            data[at:at] = rng.randbytes(rng.randint(1, 4))
        else:
            del data[at : at + rng.randint(1, 30)]
    return bytes(data)


def lies(rng):
    """Wire format that promises more than follows, or text that is none."""
    field = bytes([rng.randrange(1, 9) << 3 | 2])
    return rng.choice((
        field + b"\xff\xff\xff\xff\x07" + b"x",  # 2 GB are to come
        field + b"\xff" * 10,
        field + b"\x02\xff\xfe",  # not UTF-8
        b"\x0b" * rng.randint(1, 500),  # groups that never end
        rng.randbytes(rng.randrange(200)),
    ))  # fmt: skip


def body(rng, method):
    """One message for `method`, as bytes."""
    kind = rng.randrange(3)
    if kind == 0:
        return lies(rng)
    if method == "Publish":
        return damaged(rng, (wild_publish(rng) or [b""])[0])
    good, wild = (good_score, wild_score) if method == "Score" else (good_request, wild_request)
    return damaged(rng, good(rng).SerializeToString()) if kind == 1 else wild(rng)


def requests(seed):
    """(number, method, arity, messages, cancelled after so many seconds or None)."""
    rng = random.Random(seed)
    for number in range(COUNT):
        method = rng.choice(("Generate", "Generate", "Score", "Publish", "Publish", *ARITY))
        arity, messages = ARITY[method], [body(rng, method)]
        if method == "Publish":
            mixed = [body(rng, method) for _ in range(rng.randrange(4))]
            messages = wild_publish(rng) if rng.random() < 0.6 else mixed
        if rng.random() < 0.05:  # several messages where there is one, or none of a publish; a
            # unary call without its message never leaves gRPC itself, until its deadline
            times = rng.randrange(3) if method == "Publish" else rng.randint(1, 3)
            arity, messages = "stream_stream", messages * times
        if number % 500 == 250:
            messages = [bytes(wire.MAX_MESSAGE_BYTES + 1)]
        yield number, method, arity, messages, rng.choice((None, None, None, rng.random() * 0.1))


async def answer(channel, method, arity, messages, cancel_after):
    """The status of one call; a stream is read for a moment, then cancelled."""
    call = getattr(channel, arity)(f"/rlx.fleet.Rollout/{method}")(
        iter(messages) if arity.startswith("stream") else messages[0],
        timeout=DEADLINE,
        metadata=METADATA,
    )
    if cancel_after is not None:
        asyncio.get_running_loop().call_later(cancel_after, call.cancel)
    with suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
        if arity.endswith("stream"):
            for _ in range(3):
                if await call.read() is grpc.aio.EOF:
                    break
            else:
                call.cancel()
        else:
            await call
    code = await call.code()
    if code is CODE.UNAVAILABLE and await call.details() == "the server was restarted":
        return CODE.INVALID_ARGUMENT  # the right answer to another server's instance
    return code


async def bombard(address, seed):
    """Sends all of `requests(seed)`; returns how often each status came."""
    work, codes = requests(seed), {}

    async def worker(channel):
        for number, method, arity, messages, cancel_after in work:
            code = await answer(channel, method, arity, messages, cancel_after)
            codes[code.name] = codes.get(code.name, 0) + 1
            where = f"FUZZ_SEED={seed}, request {number}: {method} {arity} {messages!r:.300}"
            assert code not in UNANSWERED, f"{code.name}, {where}"

    async with (
        grpc.aio.insecure_channel(
            address, options=(*wire.OPTIONS, ("grpc.max_send_message_length", -1))
        ) as channel,
        asyncio.TaskGroup() as group,
    ):
        for _ in range(TOGETHER):
            group.create_task(worker(channel))
    return codes


async def serves(address, seed):
    """One good completion, token by token with its version, after all calls are gone."""
    async with grpc.aio.insecure_channel(address, options=wire.OPTIONS) as channel:
        stub, known = rpc.RolloutStub(channel), {"timeout": DEADLINE, "metadata": METADATA}
        await stub.Resume(pb.ResumeRequest(), **known)
        async with asyncio.timeout(DEADLINE):
            while (status := await stub.Status(pb.StatusRequest(), **known)).running:
                await asyncio.sleep(0.01)
        call = stub.Generate(good_request(random.Random(seed)), **known)
        got = [chunk async for reply in call for chunk in wire.chunks_from(reply)]
        return status, {
            index: [t for chunk in got if chunk.index == index for t in chunk.tokens.tolist()]
            for index in (0, 1)
        }, {v for chunk in got for v in chunk.versions.tolist()}  # fmt: skip


def test_every_malformed_request_has_a_status_and_the_same_process_serves_on(
    server, tools, tmp_path
):
    (address,), (pid,) = server.wait(), server.pids
    before, tokens, _ = tools.run(serves(address, SEED), 60)
    codes = tools.run(bombard(address, SEED), 80)
    assert sum(codes.values()) == COUNT
    assert codes["INVALID_ARGUMENT"] > 200, codes
    after, again, versions = tools.run(serves(address, SEED), 60)
    assert (after.pid, after.instance, server.pids) == (before.pid, before.instance, (pid,))
    assert (again, versions) == (tokens, {before.version}), f"FUZZ_SEED={SEED}"
    assert after.version == before.version
    assert not list(Path(server.directory).glob(f"{publish._PREFIX}*")), "a staged file stayed"
