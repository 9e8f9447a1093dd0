"""Fleet.probe: the same prompts to every live server, each answering for itself."""

import asyncio
import dataclasses

import numpy as np
import pytest

from rlx.fleet.member import Failed
from rlx.fleet.requests import Sampling

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8]]
SAMPLING = Sampling(max_new_tokens=6, min_new_tokens=6, seed=3)


def test_every_server_answers_every_prompt_in_order(tools, tmp_path):
    async def main():
        async with tools.fleet(3, tmp_path) as (fleet, _, servers):
            await fleet.publish(4, tools.weights(1.0))
            found = await fleet.probe(PROMPTS, SAMPLING)
            assert set(found) == {f"127.0.0.1:{server.port}" for server in servers}
            expected = [(await fleet.generate(p, SAMPLING, 1))[0] for p in PROMPTS]
            for completions in found.values():
                for one, other in zip(completions, expected, strict=True):
                    np.testing.assert_array_equal(one.tokens, other.tokens)
                    np.testing.assert_array_equal(one.logprobs, other.logprobs)
                    assert set(one.versions.tolist()) == {4}
            assert [server.load for server in await fleet.status()] == [0, 0, 0]

    tools.run(main())


def test_each_answer_is_of_its_own_server(tools, tmp_path):
    async def main():
        async with tools.fleet(2, tmp_path) as (fleet, engines, servers):
            await fleet.publish(1, tools.weights(1.0))
            engines[1].scale = 2.0  # behind everyone's back
            found = await fleet.probe(PROMPTS, SAMPLING)
            right, wrong = (found[f"127.0.0.1:{server.port}"] for server in servers)
            pairs = zip(right, wrong, strict=True)
            assert all(not np.array_equal(a.logprobs, b.logprobs) for a, b in pairs)

    tools.run(main())


def test_a_queue_counts_as_long_as_it_was_at_its_shortest(tools, tmp_path):
    async def main():
        async with tools.fleet(2, tmp_path) as (fleet, engines, servers):
            await fleet.publish(1, tools.weights(1.0))
            for engine, queues in zip(engines, ((7, 3, 9), (4, 6, 5)), strict=True):
                waiting, real = iter(queues), engine.status
                engine.status = lambda waiting=waiting, real=real: dataclasses.replace(
                    real(), queued=next(waiting, 8)
                )
            assert fleet.drain_queue() == 0
            for _ in range(3):
                await fleet.status()
            assert fleet.drain_queue() == 3 + 4
            await fleet.status()
            assert fleet.drain_queue() == 8 + 8, "it begins anew"
            await servers[0].stop()
            while len(fleet.live) > 1:
                await asyncio.sleep(0.002)
            assert fleet.drain_queue() == 8, "of live servers"
            await servers[1].stop()
            while fleet.live:
                await asyncio.sleep(0.002)
            assert fleet.drain_queue() == -1, "unknown"

    tools.run(main())


def test_a_server_that_is_lost_meanwhile_is_left_out(tools, tmp_path):
    async def main():
        async with tools.fleet(2, tmp_path) as (fleet, engines, servers):
            await fleet.publish(1, tools.weights(1.0))
            await engines[0].pause()
            asking = asyncio.create_task(fleet.probe(PROMPTS, SAMPLING))
            while not engines[0].status().running + engines[0].status().queued:
                await asyncio.sleep(0.002)
            await servers[0].stop()
            assert set(await asking) == {f"127.0.0.1:{servers[1].port}"}

    tools.run(main())


def test_what_an_update_aborts_goes_on_where_it_was(tools, tmp_path, arithmetic, monkeypatch):
    async def aborting(request):
        for i in range(request.n):
            yield arithmetic.Chunk(request.first_index + i, stop_reason="abort")

    async def main():
        async with tools.fleet(2, tmp_path) as (fleet, engines, servers):
            long = Sampling(max_new_tokens=12, seed=3)
            whole = await fleet.probe(PROMPTS, long)
            engines[0].abort_after = 4
            parts = await fleet.probe(PROMPTS, long)
            address = f"127.0.0.1:{servers[0].port}"
            for one, other in zip(whole[address], parts[address], strict=True):
                np.testing.assert_array_equal(one.tokens, other.tokens)
            assert any(request.prefix_len for request in engines[0].requests)
            assert not any(request.prefix_len for request in engines[1].requests)
            engines[0].generate = aborting
            monkeypatch.setattr("rlx.fleet.client.MAX_ATTEMPTS", 3)
            with pytest.raises(Failed, match="keeps aborting"):
                await fleet.probe(PROMPTS, long)

    tools.run(main())


def test_a_request_that_no_server_can_serve_raises(tools, tmp_path):
    async def main():
        async with tools.fleet(1, tmp_path) as (fleet, _, _):
            with pytest.raises(ValueError, match="at least one"):
                await fleet.probe([[]], SAMPLING)

    tools.run(main())
