"""Casts: tensors go to all servers at once, whoever dies; nothing wrong is ever served.

Servers and the sender are processes of their own, and the group is gloo's in place of NCCL's.
"""

import asyncio
import dataclasses
import os
import signal
import socket
import sys
from contextlib import asynccontextmanager
from itertools import pairwise

import grpc
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from rlx.base import UserError
from rlx.fleet import cast, publish
from rlx.fleet import rollout_pb2 as pb
from rlx.fleet.cast import Broke, Came, CastProgress, Went, after
from rlx.fleet.requests import Sampling
from rlx.launch.local import LocalServers
from rlx.model import hf

SIZE = 48 << 20  # bytes of the ballast
PROGRAM = """
import sys
from rlx.engines.vllm import vllm_cast
cut = vllm_cast.buckets
def buckets(head):
    print("what a library prints", flush=True)
    return cut(head, 1 << 22)
vllm_cast.buckets = buckets
vllm_cast.main(sys.argv[1])
"""
EVENTS = st.one_of(
    st.builds(Went, st.tuples(st.integers(0, 2), st.integers(3, 4))),
    st.builds(Came, st.integers(0, 4), st.sampled_from([True, True, True, False])),
    st.builds(Broke, st.just("the sender died")),
)


@given(st.integers(0, 2), st.integers(0, 4), st.lists(EVENTS))
def test_only_all_good_buckets_in_order_after_the_start_are_a_whole(place, count, events):
    state = CastProgress(place, count)
    for event in events:
        before, state = state, after(state, event)
        assert state.came - before.came in (0, 1)
        if before.done or before.reason:
            assert state == before, "nothing leads out of an end"
    if state.done:
        first = next(e for e in events if isinstance(e, Went))
        assert events[0] == first
        assert place in first.places
        wanted = [first, *(Came(k, True) for k in range(count))]
        assert events[: len(wanted)] == wanted


def test_what_ends_a_cast():
    begun = after(CastProgress(1, 2), Went((0, 1)))
    assert not begun.done
    assert not begun.reason
    half = after(begun, Came(0, True))
    assert after(half, Came(1, True)).done
    for state, event, reason in [
        (CastProgress(1, 2), Went((0, 2)), "began without"),
        (CastProgress(1, 2), Came(0, True), "came after 0"),
        (begun, Came(1, True), "came after 0"),
        (begun, Went((0, 1)), "came after 0"),
        (half, Came(1, False), "bucket 1 was damaged"),
        (half, Broke("gone"), "gone after 1 of 2"),
    ]:
        assert reason in after(state, event).reason


def head_of(path):
    with open(path, "rb") as file:
        return cast.head_of(file)


@given(st.integers(1, 300))
def test_buckets_hold_every_byte_in_order(tmp_path_factory, limit):
    path = tmp_path_factory.mktemp("weights") / "w"
    sizes = {"a": (3, 5), "b": (), "c": (7,), "d": (0, 2), "e": (40,)}
    publish.write_weights({k: np.ones(shape, np.float32) for k, shape in sizes.items()}, path)
    made = cast.buckets(head_of(path), limit)
    assert {e.name: e.shape for bucket in made for e in bucket} == sizes
    for bucket in made:
        assert bucket[0].start == 0
        assert all(a.end == b.start for a, b in pairwise(bucket))
        assert bucket[-1].end <= limit or len([e for e in bucket if e.end > e.start]) == 1
    total = sum(bucket[-1].end for bucket in made)
    assert total == os.path.getsize(path) - len(head_of(path))


@pytest.mark.parametrize(
    "table",
    [b"{", b"[]", b'{"a": {}}',
     b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
     b'{"a": {"dtype": "X", "shape": [2], "data_offsets": [0, 4]}}'],
)  # fmt: skip
def test_a_damaged_head(table):
    with pytest.raises(ValueError, match="head of the weights is damaged"):
        cast.buckets(bytes(8) + table)


# Servers, the sender and the trainer in processes of their own.


def weights(version, **more):
    ballast = np.full(SIZE // 12, version, np.float32)
    tensors = {"scale": np.asarray(1 / (1 + version), np.float32)}
    return {**tensors, **{f"ballast{k}": ballast for k in range(3)}, **more}


@asynccontextmanager
async def processes(tools, tmp_path, monkeypatch, count=2):
    """Start servers that receive casts by gloo; yield the fleet, the servers and messages."""
    monkeypatch.setenv("CASTS", "gloo")
    monkeypatch.setattr(cast, "_PROGRAM", (sys.executable, "-c", PROGRAM))
    said = []
    limits = dataclasses.replace(
        tools.limits, hang_seconds=5.0, publish_timeout_seconds=60, outage_seconds=60
    )
    command = (sys.executable, tools.script)
    with LocalServers("none", workdir=tmp_path, num_servers=count, command=command) as local:
        fleet = local.fleet(limits=limits, on_message=said.append)
        try:
            await fleet.connect()
            yield fleet, local, said
        finally:
            await fleet.close()


async def served(fleet):
    """Address → version, after a look at the weights behind each one's tokens."""
    found = {}
    for address, (completion,) in (
        await fleet.probe([[1, 2]], Sampling(seed=3, max_new_tokens=4))
    ).items():
        (version,) = set(completion.versions.tolist())
        scale = -completion.logprobs * (1 + completion.tokens)
        np.testing.assert_allclose(scale, 1 / (1 + version), rtol=1e-5)
        found[address] = version
    return found


def methods(report):
    return [delivery.method for delivery in report.deliveries]


@pytest.mark.torch
def test_a_cast_a_joiner_and_wrong_weights(tools, tmp_path, monkeypatch):
    """All get it at once; who joins later gets the file; what is refused changes nothing."""

    async def main():
        async with processes(tools, tmp_path, monkeypatch) as (fleet, local, said):
            for version in (1, 2):
                report = await fleet.publish(version, weights(version), "gloo")
                assert (methods(report), report.sent_bytes) == (["gloo"] * 2, 0), said
                assert set((await served(fleet)).values()) == {version}
            for wrong in (np.ones(3, np.float32), np.asarray(np.nan, np.float32)):
                with pytest.raises(UserError, match="did not take version 3"):
                    await fleet.publish(3, weights(3, scale=wrong), "gloo")
            assert any("the model's is ()" in text for text in said)
            report = await fleet.publish(4, weights(4), "gloo")
            first = local.pids[0]
            os.kill(first, signal.SIGKILL)  # and its next process gets the file
            while local.pids[0] == first or len(fleet.live) < 2:
                await asyncio.sleep(0.1)
            assert set((await served(fleet)).values()) == {4}

            def unknown(address):
                raise socket.gaierror(f"{address} is unknown")

            monkeypatch.setattr(cast, "own_host", unknown)
            assert methods(await fleet.publish(5, weights(5), "gloo")) == ["stream"] * 2
            assert any("is unknown; servers get the file" in text for text in said)

    tools.run(main(), 240)


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("dies", ["sender", "server"])
def test_a_death_half_way(tools, tmp_path, monkeypatch, dies):
    """No server keeps a part of it. The others get the file, as does the dead one at its return."""

    async def main():
        mark = tmp_path / "mark"
        monkeypatch.setenv("SLOW_CAST", str(mark))
        async with processes(tools, tmp_path, monkeypatch, count=3) as (fleet, local, said):
            await fleet.publish(1, weights(1), "gloo")
            mark.unlink()
            publishing = asyncio.create_task(fleet.publish(2, weights(2), "gloo"))
            while not mark.exists():
                await asyncio.sleep(0.01)
            assert set((await served(fleet)).values()) == {1}
            victim = local.pids[0] if dies == "server" else fleet._sender._process.pid
            os.kill(victim, signal.SIGKILL)
            report = await publishing
            assert set(methods(report)) == {"stream"}
            assert any("broke" in text and "of 4 buckets" in text for text in said), said
            while len(fleet.live) < 3:
                await asyncio.sleep(0.05)
            assert list((await served(fleet)).values()) == [2] * 3
            report = await fleet.publish(3, weights(3), "gloo")
            assert list((await served(fleet)).values()) == [3] * 3
            assert methods(report) == ["gloo"] * 3, said

    tools.run(main(), 240)


def test_a_second_cast_during_the_first(tools, tmp_path, arithmetic):
    """It is refused, as is one by a backend that the engine does not have; files wait."""
    path = tmp_path / "w"
    publish.write_weights(weights(1), path)

    def message(version, backend):
        given = pb.PublishCast(backend=backend, head=head_of(path))
        header = pb.PublishHeader(version=version, crc32=version, cast=given)
        return iter([pb.PublishRequest(header=header)])

    class Slow(arithmetic.ArithmeticEngine):
        casts, go = "gloo", asyncio.Event()

        async def load(self, path, version, kv="keep"):
            await self.go.wait()
            self.version = version
            return 1

    async def main():
        async with (
            tools.server(Slow(), stage_dir=str(tmp_path)) as (engine, server),
            tools.stub(server) as stub,
        ):
            first = asyncio.ensure_future(stub.Publish(message(1, "gloo")))
            while not server._rollouts._casting:
                await asyncio.sleep(0.01)
            for backend, reason in [("gloo", "another one"), ("nccl", "another one")]:
                with pytest.raises(grpc.aio.AioRpcError, match=reason) as refused:
                    await stub.Publish(message(2, backend))
                assert refused.value.code() == grpc.StatusCode.ABORTED
            engine.go.set()
            assert (await first).version == engine.version == 1
            with pytest.raises(grpc.aio.AioRpcError, match="takes gloo"):
                await stub.Publish(message(3, "nccl"))
            assert (await stub.Publish(message(4, "gloo"))).version == 4

    tools.run(main())


@pytest.mark.vllm
def test_vllm_takes_a_cast_as_it_takes_the_file(vllm_servers):
    """Also on the way to it: wrong names, shapes and numbers leave the old weights."""
    rng = np.random.default_rng(0)
    old = load_file(hf.resolve("rlx:arithmetic") / "model.safetensors")
    new = {
        name: (v + 1e-3 * rng.standard_normal(v.shape)).astype(v.dtype) for name, v in old.items()
    }
    name = next(iter(new))
    greedy = Sampling(temperature=0.0, max_new_tokens=24, min_new_tokens=24)

    async def main():
        fleet, drawn = vllm_servers.fleet(), []

        async def look(version):
            completion = (await fleet.generate(np.arange(3, 12), greedy, 1))[0]
            assert set(completion.versions.tolist()) == {version}
            return completion.logprobs.tolist()

        try:
            await fleet.connect()
            for version, tensors, method in ((1, old, "path"), (2, new, "gloo"), (3, new, "path")):
                report = await fleet.publish(version, tensors, method)
                assert methods(report) == [method]
                drawn.append(await look(version))
            for wrong in (
                {**new, name: new[name][:1]},
                {**new, "other": np.ones(3, np.float32)},
                {**new, name: np.full_like(new[name], np.nan)},
            ):
                with pytest.raises(UserError, match="did not take version 4"):
                    await fleet.publish(4, wrong, "gloo")
                assert await look(3) == drawn[-1]
            assert methods(await fleet.publish(5, old, "gloo")) == ["gloo"]
            assert await look(5) == drawn[0]
            return drawn
        finally:
            await fleet.close()

    before, by_cast, by_path = asyncio.run(main())
    assert by_cast == by_path != before
