"""What one caller cannot do to a server for others: fill its queue, or leave it paused."""

import asyncio

import grpc
import numpy as np
import pytest

from rlx.fleet import rollout_pb2 as pb
from rlx.fleet import wire
from rlx.fleet.requests import Request, Sampling, ScoreRequest

CODE = grpc.StatusCode


def request(n=1, tokens=4):
    sampling = Sampling(seed=1, max_new_tokens=tokens)
    return wire.request_message(Request("r", np.array([1, 2], np.int32), sampling, n))


async def here(stub, count):
    while (await stub.Status(pb.StatusRequest())).running != count:
        await asyncio.sleep(0.01)


def test_a_full_server_refuses_and_serves_again_when_it_is_not(tools, arithmetic):
    async def main():
        async with (
            tools.server(arithmetic.ArithmeticEngine(), max_queue=8) as (engine, server),
            tools.stub(server) as stub,
        ):
            await engine.pause()
            waiting = [stub.Generate(request(3)) for _ in range(2)]
            await here(stub, 6)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in stub.Generate(request(3)):
                    pass
            assert caught.value.code() is CODE.RESOURCE_EXHAUSTED
            assert caught.value.details().startswith("the queue is full: 6 samples are here")
            last = asyncio.ensure_future(stub.Generate(request(2)).read())  # it fits
            await here(stub, 8)
            score = wire.score_message(ScoreRequest(np.array([1, 2], np.int32), 1))
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Score(score)
            assert caught.value.code() is CODE.RESOURCE_EXHAUSTED
            waiting[0].cancel()
            await here(stub, 5)
            await engine.resume()
            await last
            assert (await stub.Score(score)).logprobs
            assert await stub.Generate(request(9)).read() is not grpc.aio.EOF, "alone, any size"

    tools.run(main())


def test_rollouts_and_scores_outlast_full_servers(tools, tmp_path, arithmetic):
    """More than all servers take at once: nothing fails, however often it is refused."""
    engines = [arithmetic.ArithmeticEngine(step_seconds=0.02) for _ in range(2)]

    async def main():
        async with tools.fleet(2, tmp_path, engines, max_queue=4) as (fleet, *_):
            sampling = Sampling(seed=1, max_new_tokens=16)
            tasks = [fleet.generate([1, 2], sampling, 4) for _ in range(16)]
            tasks += [fleet.score([1, 2, 3], 1) for _ in range(16)]
            probe = asyncio.create_task(fleet.probe([[1, 2]] * 3, sampling))
            done = await asyncio.gather(*tasks)
            for completions in done[:16]:
                for index, completion in enumerate(completions):
                    assert completion.tokens.tolist() == arithmetic.completion(1, index, 16)
            assert len(await probe) == 2

    tools.run(main())


def test_another_server_takes_what_one_is_too_full_for(tools, tmp_path, arithmetic):
    async def main():
        async with (
            tools.fleet(2, tmp_path, max_queue=4) as (fleet, engines, servers),
            tools.stub(servers[0]) as stub,  # somebody else's
        ):
            await engines[0].pause()
            other = asyncio.ensure_future(stub.Generate(request(4)).read())
            await here(stub, 4)
            for _ in range(6):
                await fleet.generate([1, 2], Sampling(seed=1, max_new_tokens=4), 1)
            assert not other.done()
            other.cancel()

    tools.run(main())


def test_a_pause_ends_with_its_lease_and_the_log_says_so(tools):
    said = []

    async def main():
        async with tools.server(say=said.append) as (_, server), tools.stub(server) as stub:
            await stub.Pause(pb.PauseRequest(lease_seconds=600))
            await stub.Pause(pb.PauseRequest(lease_seconds=0.2))  # the last word
            assert (await stub.Status(pb.StatusRequest())).paused or said
            assert await stub.Generate(request()).read() is not grpc.aio.EOF
            assert said == ["paused for 0.2 s and not asked to resume; continuing"]
            assert not (await stub.Status(pb.StatusRequest())).paused

    tools.run(main())


def test_a_resume_ends_the_lease_and_pausing_again_renews_it(tools):
    said = []

    async def main():
        async with tools.server(say=said.append) as (_, server), tools.stub(server) as stub:
            await stub.Pause(pb.PauseRequest(lease_seconds=0.3))
            await stub.Resume(pb.ResumeRequest())
            await stub.Pause(pb.PauseRequest(lease_seconds=0.3))
            await stub.Pause(pb.PauseRequest(lease_seconds=60))
            await asyncio.sleep(0.6)
            assert (await stub.Status(pb.StatusRequest())).paused
            assert said == []

    tools.run(main())


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf"), 1e9])
def test_a_lease_is_of_a_sensible_length(tools, seconds):
    async def main():
        async with tools.server() as (_, server), tools.stub(server) as stub:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Pause(pb.PauseRequest(lease_seconds=seconds))
            assert caught.value.code() is CODE.INVALID_ARGUMENT
            assert not (await stub.Status(pb.StatusRequest())).paused

    tools.run(main())
