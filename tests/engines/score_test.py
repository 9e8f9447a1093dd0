"""Fleet.score over real gRPC: who scores, what comes back, and what becomes of it when one dies."""

import asyncio
import os
import signal
import sys

import grpc
import numpy as np
import pytest

from rlx.engines.engine import EngineStopped
from rlx.fleet import rollout_pb2 as pb
from rlx.fleet.member import Failed
from rlx.fleet.requests import Sampling, Scores
from rlx.launch.local import LocalServers

TOKENS = [9, 4, 99, 0, 3]
WANTED = [0, 0, -0.01, -1.0, -0.25]  # from token 2 on, with the engine's scale of 1


def test_scores_begin_at_first_and_all_servers_have_their_share(tools, tmp_path):
    async def main():
        async with tools.fleet(2, tmp_path) as (fleet, engines, _):
            scores = await asyncio.gather(*(fleet.score(TOKENS, 2) for _ in range(8)))
            assert [len(engine.scored) for engine in engines] == [4, 4]
            for each in scores:
                assert (each.dtype, each.shape) == (np.float32, (5,))
                np.testing.assert_allclose(each, WANTED, rtol=1e-6)
            cold = await fleet.score(np.array(TOKENS), 2, temperature=0.5)
            np.testing.assert_allclose(cold, 2 * np.array(WANTED), rtol=1e-6)
            await fleet.publish(1, tools.weights(3.0))
            after = await fleet.score(TOKENS, 2)
            np.testing.assert_allclose(after, 3 * np.array(WANTED), rtol=1e-6)

    tools.run(main())


def test_a_request_without_a_temperature_is_scored_at_one(tools):
    async def main():
        async with tools.server() as (engine, server), tools.stub(server) as stub:
            reply = await stub.Score(pb.ScoreRequest(tokens=TOKENS, first=2))
            np.testing.assert_allclose(reply.logprobs, WANTED[2:], rtol=1e-6)
            assert (reply.version, engine.scored[0].temperature) == (0, 1.0)

    tools.run(main())


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tokens": []}, "tokens=0 tokens is out of range; it must be two or more"),
        ({"tokens": [3]}, "tokens=1 tokens is out of range; it must be two or more"),
        ({"first": 0}, "first=0 is out of range; it must be in [1, 4]"),
        ({"first": -1}, "first=-1 is out of range; it must be in [1, 4]"),
        ({"first": 5}, "first=5 is out of range; it must be in [1, 4]"),
        ({"temperature": 0.0}, "temperature=0.0 is out of range; it must be in [0.01, 100]"),
        ({"temperature": float("nan")}, "temperature=nan is out of range"),
        ({"tokens": [3, 1000]}, "outside the vocabulary of 1000"),
        ({"tokens": [3, -1]}, "outside the vocabulary of 1000"),
        ({"tokens": [3] * 4097}, "4097 tokens are too long"),
    ],
)
def test_a_malformed_score_is_an_invalid_argument_that_says_what_was_wanted(tools, fields, said):
    async def main():
        async with tools.server() as (engine, server), tools.stub(server) as stub:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Score(pb.ScoreRequest(**{"tokens": TOKENS, "first": 1, **fields}))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert said in caught.value.details()
            assert not engine.scored

    tools.run(main())


def test_a_malformed_score_is_a_value_error_and_costs_no_server(tools, tmp_path):
    async def main():
        async with tools.fleet(1, tmp_path) as (fleet, _, _):
            with pytest.raises(ValueError, match=r"127.0.0.1:\d+ does not serve a reward model"):
                await fleet.score(TOKENS, 2, values=True)
            for tokens, first, match in (([3, 5000], 1, "vocabulary"), ([3, 4], 2, "first=2")):
                with pytest.raises(ValueError, match=match):
                    await fleet.score(tokens, first)
            assert (await fleet.status())[0].live

    tools.run(main())


def test_a_server_without_its_engine_or_of_another_life_is_unavailable(tools):
    async def main():
        async with tools.server() as (engine, server), tools.stub(server) as stub:

            async def broken(request):
                raise EngineStopped("the device is lost")

            with pytest.raises(grpc.aio.AioRpcError, match="was restarted") as other:
                await stub.Score(pb.ScoreRequest(tokens=TOKENS, first=1, instance="another"))
            engine.score = broken
            with pytest.raises(grpc.aio.AioRpcError, match="the device is lost") as lost:
                await stub.Score(pb.ScoreRequest(tokens=TOKENS, first=1))
            for caught in (other, lost):
                assert caught.value.code() is grpc.StatusCode.UNAVAILABLE

    tools.run(main())


@pytest.fixture
def servers(tools, tmp_path, monkeypatch):
    """Two processes that take half a second for a score."""
    monkeypatch.setenv("STEP_SECONDS", "0.5")
    local = LocalServers(
        "none",
        workdir=tmp_path,
        num_servers=2,
        command=(sys.executable, tools.script),
    )
    with local:
        local.wait()
        yield local


def test_scores_of_a_killed_server_come_from_the_other_one(tools, tmp_path, servers):
    said = []

    async def main():
        fleet = servers.fleet(limits=tools.limits, on_message=said.append)
        try:
            await fleet.connect()
            await fleet.publish(3, tools.weights(2.0))
            tasks = [asyncio.create_task(fleet.score(TOKENS, 2)) for _ in range(6)]
            while [server.load for server in await fleet.status()] != [3, 3]:
                await asyncio.sleep(0.001)
            assert not any(task.done() for task in tasks)
            os.kill(servers.pids[0], signal.SIGKILL)
            for scores in await asyncio.gather(*tasks):
                np.testing.assert_allclose(scores, 2 * np.array(WANTED), rtol=1e-6)
            assert "is lost" in said[0]
            assert [server.load for server in await fleet.status()] == [0, 0]
        finally:
            await fleet.close()

    tools.run(main())


def test_a_failing_engine_is_tried_again_and_a_broken_one_is_left(
    tools, tmp_path, arithmetic, monkeypatch
):
    async def main():
        async with tools.fleet(1, tmp_path) as (fleet, engines, _):
            score, errors = engines[0].score, [RuntimeError("once"), RuntimeError("twice")]

            async def flaky(request):
                if errors:
                    raise errors.pop()
                return await score(request)

            engines[0].score = flaky
            np.testing.assert_allclose(await fleet.score(TOKENS, 2), WANTED, rtol=1e-6)
            errors += [RuntimeError("for ever")] * 10
            monkeypatch.setattr("rlx.fleet.client.MAX_ATTEMPTS", 3)
            with pytest.raises(Failed, match=r"3 attempts without a score: .*for ever"):
                await fleet.score(TOKENS, 2)
            assert len(errors) == 7
        async with tools.fleet(2, tmp_path) as (fleet, engines, _):

            def status():
                raise EngineStopped("the device is lost")

            async def score(request):
                status()

            engines[0].score, engines[0].status = score, status
            for _ in range(4):
                np.testing.assert_allclose(await fleet.score(TOKENS, 2), WANTED, rtol=1e-6)

    tools.run(main())


def test_too_few_scores_are_an_error_and_never_shift_the_rest(tools, tmp_path):
    async def main():
        async with tools.fleet(1, tmp_path) as (fleet, engines, _):

            async def short(request):
                return Scores(np.zeros(2, np.float32), 0)

            engines[0].score = short
            with pytest.raises(ValueError, match="2 logprobs instead of 3"):
                await fleet.score(TOKENS, 2)

    tools.run(main())


def test_a_cancelled_score_leaves_the_server(tools, tmp_path):
    async def main():
        async with tools.fleet(1, tmp_path) as (fleet, engines, _):
            gone = asyncio.Event()

            async def slow(request):
                try:
                    await asyncio.sleep(60)
                finally:
                    gone.set()

            engines[0].score = slow
            task = asyncio.create_task(fleet.score(TOKENS, 2))
            while (await fleet.status())[0].load == 0:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await gone.wait()
            status = (await fleet.status())[0]
            assert (status.load, status.live) == (0, True)

    tools.run(main())


def test_scores_beside_generation_change_neither(tools, tmp_path, arithmetic):
    async def main():
        engines = [arithmetic.ArithmeticEngine(step_seconds=0.002)]
        async with tools.fleet(1, tmp_path, engines) as (fleet, _, _):
            draws = [
                fleet.generate([1, 2], Sampling(seed=s, max_new_tokens=60), 2) for s in range(4)
            ]
            *done, scores = await asyncio.gather(*draws, fleet.score(TOKENS, 2))
            np.testing.assert_allclose(scores, WANTED, rtol=1e-6)
            for seed, completions in enumerate(done):
                for index, completion in enumerate(completions):
                    assert completion.tokens.tolist() == arithmetic.completion(seed, index, 60)

    tools.run(main())
