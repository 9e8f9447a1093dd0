"""Fleet against servers in this process: routing, continuing, publishing."""

import asyncio
import dataclasses
import time

import numpy as np
import pytest

from rlx.base import UserError
from rlx.engines.server import Server
from rlx.fleet import publish
from rlx.fleet.client import Fleet
from rlx.fleet.member import Failed
from rlx.fleet.requests import Chunk, Sampling, Timeouts
from rlx.fleet.sample import PartialSample

PROMPT = [1, 2, 3]


def sampling(seed=1, most=40, **options):
    return Sampling(seed=seed, max_new_tokens=most, **options)


def check(completions, arithmetic, seed=1, most=40):
    """Every sample is the one an undisturbed server would have made."""
    for index, completion in enumerate(completions):
        wanted = arithmetic.completion(seed, index, most)
        assert completion.tokens.tolist() == wanted, index
        assert len(completion.logprobs) == len(completion.versions) == len(wanted)
        stopped = wanted[-1] == arithmetic.STOP_TOKEN
        assert completion.stop_reason == ("stop" if stopped else "length")
        assert completion.tokens.dtype == completion.versions.dtype == np.int32
        assert completion.logprobs.dtype == np.float32


def test_many_prompts_over_two_servers(tools, arithmetic, tmp_path):
    async def main():
        async with tools.fleet(2, tmp_path) as (fleet, engines, _):
            done = await asyncio.gather(
                *(fleet.generate(PROMPT, sampling(seed), 4) for seed in range(40))
            )
            for seed, completions in enumerate(done):
                check(completions, arithmetic, seed)
            counts = [len(engine.requests) for engine in engines]
            assert counts == [20, 20], "least-loaded routing must spread equal requests evenly"

    tools.run(main())


def test_a_server_without_masks_is_reported_once(tools, tmp_path):
    async def main():
        async with tools.fleet(1, tmp_path) as (fleet, _, _):
            said = []
            fleet.say = said.append
            await fleet.generate(PROMPT, sampling(top_p=0.9), 2)
            assert said == []
            for _ in range(2):
                await fleet.generate(PROMPT, sampling(top_p=0.9, return_masks=True), 2)
                await fleet.probe([PROMPT], sampling(top_p=0.9, return_masks=True))
            (line,) = said
            assert "biases importance weights; top_p=0.9; update the server's rlx" in line

    tools.run(main())


def test_a_server_that_is_not_admitted_gets_probes_and_weights_alone(tools, tmp_path):
    async def main():
        async with tools.fleet(2, tmp_path) as (fleet, engines, _):
            first, late = fleet.instances.items()
            await fleet.admit([first])
            await asyncio.gather(*(fleet.generate(PROMPT, sampling(s), 2) for s in range(8)))
            assert [len(engine.requests) for engine in engines] == [8, 0]
            report = await fleet.publish(1, tools.weights(1.0))
            assert set(report.acks) == {first[0], late[0]}
            assert set(await fleet.probe([PROMPT], sampling())) == {first[0], late[0]}
            await fleet.admit([(late[0], "another process of before")])
            waiting = asyncio.create_task(fleet.generate(PROMPT, sampling(), 1))
            await asyncio.sleep(0.3)
            assert not waiting.done()
            await fleet.admit([late])
            await waiting
            assert [len(engine.requests) for engine in engines] == [9, 2]

    tools.run(main())


def test_load_is_relative_to_slots(tools, tmp_path, arithmetic):
    async def main():
        engines = [arithmetic.ArithmeticEngine(slots=s, step_seconds=0.02) for s in (10, 30)]
        async with tools.fleet(2, tmp_path, engines) as (fleet, _, _):
            await asyncio.gather(*(fleet.generate(PROMPT, sampling(s), 1) for s in range(20)))
            assert [len(engine.requests) for engine in engines] == [5, 15]

    tools.run(main())


def test_a_server_knows_whether_anybody_watches_the_tokens(tools, tmp_path):
    async def main():
        async with tools.fleet(1, tmp_path) as (fleet, engines, _):
            await fleet.generate(PROMPT, sampling(), 1)
            await fleet.generate(PROMPT, sampling(), 1, watch=lambda chunk: None)
            assert [request.unwatched for request in engines[0].requests] == [True, False]

    tools.run(main())


def test_samples_go_on_from_the_tokens_that_the_caller_has(tools, tmp_path, arithmetic):
    """Each in a request of its own; one that is full, or has ended, needs none."""

    async def main():
        async with tools.fleet(1, tmp_path) as (fleet, engines, _):
            (whole,) = await fleet.generate(PROMPT, sampling(), 1)
            samples, seen, most = [PartialSample(i) for i in range(4)], [], len(whole.tokens)
            had = ((5, None), (most, None), (3, "stop"))
            for sample, (count, reason) in zip(samples, had, strict=False):
                tokens = np.array(arithmetic.completion(1, sample.index, count), np.int32)
                sample.add(Chunk(sample.index, tokens, tokens * -1.0, tokens * 0, reason))
            samples[0].on_add = seen.append
            done = await fleet.generate(PROMPT, sampling(), 4, samples=samples)
            requests = engines[0].requests[1:]
            assert [(r.first_index, r.n, r.prefix_len) for r in requests] == [(0, 1, 5), (3, 1, 0)]
            assert done[0].tokens.tolist() == whole.tokens.tolist()
            assert [len(each.tokens) for each in done[1:3]] == [most, 3]
            assert sum(len(chunk.tokens) for chunk in seen) == most - 5

    tools.run(main())


def test_session_keeps_its_server(tools, tmp_path):
    async def main():
        async with tools.fleet(3, tmp_path) as (fleet, engines, _):
            for turn in range(6):
                for session in "abc":
                    await fleet.generate([10 + turn], sampling(), 1, session=session)
            by_engine = [len(engine.requests) for engine in engines]
            assert sum(by_engine) == 18
            assert all(count % 6 == 0 for count in by_engine), by_engine

    tools.run(main())


def test_aborted_samples_are_resubmitted_with_what_they_have(tools, tmp_path, arithmetic):
    async def main():
        async with tools.fleet(1, tmp_path) as (fleet, engines, _):
            engines[0].abort_after = 16
            check(await fleet.generate(PROMPT, sampling(), 3), arithmetic)
            requests = engines[0].requests
            assert len(requests) > 3
            for request in requests[1:]:
                assert request.prefix_len == len(request.prompt_tokens) - 3 > 0
                assert request.sampling.max_new_tokens == 40
                assert request.n == 1, "samples with tokens have prompts of their own"
                made = arithmetic.completion(1, request.first_index, 40)[: request.prefix_len]
                assert request.prompt_tokens.tolist() == PROMPT + made

    tools.run(main())


def test_abort_without_a_token_is_legal_but_not_for_ever(tools, tmp_path, arithmetic, monkeypatch):
    async def main():
        async with tools.fleet(1, tmp_path) as (fleet, engines, _):
            generate = engines[0].generate
            left = 3

            async def aborting(request):
                nonlocal left
                left -= 1
                if left >= 0:
                    for i in range(request.n):
                        yield arithmetic.Chunk(request.first_index + i, stop_reason="abort")
                    return
                async for chunk in generate(request):
                    yield chunk

            engines[0].generate = aborting
            check(await fleet.generate(PROMPT, sampling(), 2), arithmetic)
            assert len(engines[0].requests) == 1
            monkeypatch.setattr("rlx.fleet.client.MAX_ATTEMPTS", 3)
            left = 100
            with pytest.raises(Failed, match="keeps aborting"):
                await fleet.generate(PROMPT, sampling(), 2)

    tools.run(main())


def test_bad_request_is_a_value_error(tools, tmp_path):
    async def main():
        async with tools.fleet(1, tmp_path) as (fleet, _, _):
            for prompt, match in (([], "prompt_tokens"), ([5000], "vocabulary")):
                with pytest.raises(ValueError, match=match):
                    await fleet.generate(prompt, sampling(), 1)
            with pytest.raises(ValueError, match="top_p"):
                await fleet.generate(PROMPT, sampling(top_p=0.0), 1)
            assert (await fleet.status())[0].live

    tools.run(main())


def test_engine_error_is_tried_again_then_raised(tools, tmp_path, arithmetic, monkeypatch):
    monkeypatch.setattr("rlx.fleet.client.MAX_ATTEMPTS", 3)

    async def main():
        async with tools.fleet(1, tmp_path) as (fleet, engines, _):
            generate, left = engines[0].generate, 2

            async def flaky(request):
                nonlocal left
                left -= 1
                if left >= 0:
                    raise ZeroDivisionError("now and then")
                async for chunk in generate(request):
                    yield chunk

            engines[0].generate = flaky
            check(await fleet.generate(PROMPT, sampling(), 2), arithmetic)
            left = 100
            with pytest.raises(Failed, match="ZeroDivisionError"):
                await fleet.generate(PROMPT, sampling(), 2)

    tools.run(main())


def test_unseeded_requests_differ_and_keep_their_seed(tools, tmp_path, arithmetic, monkeypatch):
    monkeypatch.setattr(arithmetic, "STOP_TOKEN", -1)  # no drawn seed may end a completion early

    async def main():
        async with tools.fleet(1, tmp_path) as (fleet, engines, _):
            engines[0].abort_after = 4
            for _ in range(2):
                await fleet.generate(PROMPT, Sampling(max_new_tokens=8), 1)
            seeds = [request.sampling.seed for request in engines[0].requests]
            assert len(seeds) == 4
            assert seeds[0] == seeds[1] != seeds[2] == seeds[3]

    tools.run(main())


def test_cancelled_generate_leaves_nothing_running(tools, tmp_path, arithmetic):
    async def main():
        engines = [arithmetic.ArithmeticEngine(step_seconds=0.01)]
        async with tools.fleet(1, tmp_path, engines) as (fleet, _, _):
            task = asyncio.create_task(fleet.generate(PROMPT, sampling(most=4000), 4))
            while not engines[0].running:
                await asyncio.sleep(0.005)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            while engines[0].running:
                await asyncio.sleep(0.005)
            status = (await fleet.status())[0]
            assert (status.live, status.load) == (True, 0)

    tools.run(main())


@pytest.mark.parametrize("method", ["path", "stream"])
def test_publish_reaches_every_server(tools, tmp_path, method):
    async def main():
        async with tools.fleet(3, tmp_path) as (fleet, engines, _):
            for version, scale in ((0, 0.75), (1, 0.5), (5, 0.25)):
                report = await fleet.publish(version, tools.weights(scale), method)
                assert len(report.acks) == 3
                assert report.num_bytes > 4
                assert [(e.version, e.scale) for e in engines] == [(version, scale)] * 3
                assert len(list(tmp_path.iterdir())) == 1, "only the current file may be kept"
            completion = (await fleet.generate(PROMPT, sampling(), 1))[0]
            assert set(completion.versions.tolist()) == {5}
            want = -0.25 / (1 + completion.tokens)
            np.testing.assert_allclose(completion.logprobs, want, rtol=1e-6)
        assert list(tmp_path.iterdir()) == []

    tools.run(main())


def test_large_stream_in_many_chunks(tools, tmp_path):
    async def main():
        async with tools.fleet(1, tmp_path) as (fleet, engines, _):
            tensors = {**tools.weights(0.5), "ballast": np.arange(3_000_000, dtype=np.float32)}
            report = await fleet.publish(1, tensors, "stream")
            assert report.num_bytes > 12_000_000
            assert engines[0].version == 1

    tools.run(main())


def test_weights_that_no_server_takes(tools, tmp_path):
    async def main():
        async with tools.fleet(2, tmp_path) as (fleet, engines, _):
            await fleet.publish(1, tools.weights(0.5))
            for bad, match in (
                ({"other": np.zeros(1, np.float32)}, "unexpected tensors"),
                (tools.weights(np.nan), "not finite"),
            ):
                with pytest.raises(UserError, match=match):
                    await fleet.publish(2, bad)
                assert all(server.live for server in await fleet.status())
            completion = (await fleet.generate(PROMPT, sampling(), 1))[0]
            assert set(completion.versions.tolist()) == {1}
            assert [e.version for e in engines] == [1, 1]
            assert len(list(tmp_path.iterdir())) == 1
            assert len((await fleet.publish(3, tools.weights(0.25))).acks) == 2

    tools.run(main())


def test_weights_that_the_only_server_refuses_when_it_joins(tools, tmp_path, arithmetic):
    async def main():
        async with tools.fleet(1, tmp_path) as (fleet, _, servers):
            await servers[0].stop()
            publishing = asyncio.create_task(fleet.publish(1, {"no": np.zeros(1, np.float32)}))
            while (await fleet.status())[0].live:
                await asyncio.sleep(0.01)
            options = {"port": servers[0].port, "weight_roots": [str(tmp_path)]}
            async with tools.server(**options):
                with pytest.raises(UserError, match="unexpected tensors"):
                    await publishing
                check(await fleet.generate(PROMPT, sampling(), 2), arithmetic)

    tools.run(main())


@pytest.mark.parametrize("error", [OSError("disk on fire"), ValueError("not to my taste")])
def test_server_without_the_version_is_out_until_it_has_it(tools, tmp_path, arithmetic, error):
    async def main():
        async with tools.fleet(2, tmp_path) as (fleet, engines, servers):
            good, bad = engines
            bad.step_seconds = 0.01
            load, broken = bad.load, True

            async def fail(path, version, kv="keep"):
                if broken:
                    raise error
                return await load(path, version, kv)

            bad.load = fail
            running = asyncio.gather(
                *(fleet.generate(PROMPT, sampling(s, 200), 2) for s in range(4))
            )
            while not bad.running:
                await asyncio.sleep(0.005)
            report = await fleet.publish(1, tools.weights(0.5))
            assert report.acks == (f"127.0.0.1:{servers[0].port}",)
            assert (good.version, bad.version) == (1, 0)
            for seed, completions in enumerate(await running):
                check(completions, arithmetic, seed, 200)
            before = len(bad.requests)
            for seed in range(4):
                await fleet.generate(PROMPT, sampling(seed), 1)
            assert len(bad.requests) == before, "a server without the version got a request"
            broken = False
            while not all(s.live for s in await fleet.status()):
                await asyncio.sleep(0.02)
            assert (bad.version, bad.scale) == (1, 0.5)

    tools.run(main())


def test_returning_server_gets_the_weights_before_its_first_request(tools, tmp_path, arithmetic):
    async def main():
        async with tools.fleet(1, tmp_path) as (fleet, _, servers):
            await fleet.publish(4, tools.weights(0.5))
            await servers[0].stop()
            pending = asyncio.create_task(fleet.generate(PROMPT, sampling(), 2))
            while (await fleet.status())[0].live:
                await asyncio.sleep(0.01)
            fresh = arithmetic.ArithmeticEngine()
            options = {"port": servers[0].port, "weight_roots": [str(tmp_path)]}
            async with tools.server(fresh, **options):
                completions = await pending
                check(completions, arithmetic)
                assert all(set(c.versions.tolist()) == {4} for c in completions)
                assert [load[1] for load in fresh.loads] == [4]

    tools.run(main())


def test_restart_between_two_probes_is_noticed(tools, tmp_path, arithmetic):
    """The channel reconnects by itself; without the instance a fresh server's tokens came back."""
    limits = dataclasses.replace(tools.limits, probe_seconds=60.0)

    async def main():
        async with tools.fleet(1, tmp_path, limits=limits) as (fleet, _, servers):
            await fleet.publish(4, tools.weights(0.5))
            await servers[0].stop()
            fresh = arithmetic.ArithmeticEngine()
            options = {"port": servers[0].port, "weight_roots": [str(tmp_path)]}
            async with tools.server(fresh, **options):
                completion = (await fleet.generate(PROMPT, sampling(), 1))[0]
                assert set(completion.versions.tolist()) == {4}

    tools.run(main())


def test_no_server_alive(tools, tmp_path):
    limits = dataclasses.replace(tools.limits, outage_seconds=0.5)

    async def main():
        async with tools.fleet(1, tmp_path, limits=limits) as (fleet, _, servers):
            said = []
            fleet._balancer._say = said.append
            await servers[0].stop()
            start = time.monotonic()
            tasks = [fleet.generate(PROMPT, sampling(), 1) for _ in range(5)]
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert time.monotonic() - start > 0.4
            for error in results:
                assert isinstance(error, UserError)
                assert "no rollout server alive for 0.5 s" in str(error)
            assert len([text for text in said if "waiting up to" in text]) == 1
            with pytest.raises(UserError, match="no rollout server alive"):
                await fleet.publish(1, tools.weights(0.5))

    tools.run(main())


def test_connect_without_servers(tools, tmp_path):
    async def main():
        engine_server = Server(lambda: None)
        port = engine_server.port
        await engine_server.stop()
        fleet = Fleet([f"127.0.0.1:{port}"], limits=Timeouts(connect_seconds=0.3, backoff=0.1))
        with pytest.raises(UserError, match=r"no rollout server answered within 0\.3 s"):
            await fleet.connect()
        await fleet.close()
        with pytest.raises(UserError, match="no server"):
            Fleet([])

    tools.run(main())


def test_connect_tells_at_once_for_whom_it_waits(tools):
    async def main():
        unused = Server(lambda: None)
        await unused.stop()
        said = asyncio.Queue()
        address = f"127.0.0.1:{unused.port}"
        fleet = Fleet([address], limits=Timeouts(connect_seconds=600), on_message=said.put_nowait)
        connecting = asyncio.create_task(fleet.connect())
        text = await said.get()
        assert f"waiting up to 599 s for rollout servers: {address} (" in text
        assert not connecting.done()
        connecting.cancel()
        await asyncio.gather(connecting, return_exceptions=True)
        await fleet.close()

    tools.run(main())


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("no host:8001", "there is no host named 'no host'"),
        ("a..b:8001", "'a..b' is not a valid host name"),
        ("127.0.0.1", "give host:port"),
        ("127.0.0.1:99999", "give host:port"),
        ("127.0.0.1:\N{SUPERSCRIPT TWO}", "give host:port"),
    ],
)
def test_an_address_that_never_can_answer_is_not_waited_for(address, words, tools):
    async def main():
        fleet = Fleet([address], limits=Timeouts(connect_seconds=600))
        with pytest.raises(UserError, match=words):
            await fleet.connect()
        await fleet.close()

    tools.run(main())


def test_connect_goes_on_with_the_servers_there_are(tools, tmp_path, arithmetic):
    async def main():
        async with tools.server() as (_, server):
            unused = Server(lambda: None)
            await unused.stop()
            said = []
            fleet = Fleet(
                [f"127.0.0.1:{unused.port}", f"127.0.0.1:{server.port}"],
                limits=dataclasses.replace(tools.limits, connect_seconds=0.5),
                on_message=said.append,
            )
            await fleet.connect()
            assert "continuing without" in said[-1]
            check(await fleet.generate(PROMPT, sampling(), 2), arithmetic)
            await fleet.close()

    tools.run(main())


def test_connect_follows_a_file_of_addresses(tools, tmp_path):
    """A server that took the place of another one was found only after `connect_seconds`."""

    async def main():
        async with tools.server() as (_, server):
            unused = Server(lambda: None)
            await unused.stop()
            file, address = tmp_path / "servers", f"127.0.0.1:{server.port}"
            file.write_text(f"127.0.0.1:{unused.port}")
            fleet = Fleet([f"@{file}"], limits=tools.limits)
            connecting = asyncio.create_task(fleet.connect())
            await asyncio.sleep(0.5)
            file.write_text(address)
            await connecting
            assert fleet.live == {address}
            await fleet.close()

    tools.run(main())


def test_token(tools, tmp_path, arithmetic):
    async def main():
        async with tools.server(token="sesame") as (_, server):
            address = f"127.0.0.1:{server.port}"
            for wrong in (None, "open"):
                fleet = Fleet([address], token=wrong, limits=tools.limits)
                with pytest.raises(UserError, match="refuses our bearer token"):
                    await fleet.connect()
                await fleet.close()
            fleet = Fleet([address], token="sesame", limits=tools.limits)
            await fleet.connect()
            check(await fleet.generate(PROMPT, sampling(), 2), arithmetic)
            await fleet.close()

    tools.run(main())


def test_spans_are_on_our_clock(tools, tmp_path, arithmetic):
    """A server whose clock is an hour ahead: its spans must lie within the call that made them."""
    limits = dataclasses.replace(tools.limits, probe_seconds=60.0)

    def clock():
        return time.monotonic_ns() + 3_600_000_000_000

    async def main():
        engines = [arithmetic.ArithmeticEngine(clock=clock)]
        async with tools.fleet(1, tmp_path, engines, limits, clock=clock) as (fleet, _, _):
            await fleet.drain_spans()
            start = time.monotonic_ns()
            await fleet.generate(PROMPT, sampling(), 1)
            end = time.monotonic_ns()
            ((_, spans),) = (await fleet.drain_spans()).items()
            assert len(spans) == 10
            for name, span_start, span_end in spans:
                assert name == "decode"
                assert start - 50_000_000 < span_start <= span_end < end + 50_000_000
            ((_, spans),) = (await fleet.drain_spans()).items()
            assert spans == []

    tools.run(main())


def test_leftovers_of_a_killed_run_are_swept(tools, tmp_path):
    left = tmp_path / f"{publish._PREFIX}left{publish._SUFFIX}"
    left.touch()

    async def main():
        async with tools.fleet(1, tmp_path, stage_dir="/dev/shm"):
            assert not left.exists()

    tools.run(main())


def test_cancelled_publish_leaves_no_file(tools, tmp_path):
    async def main():
        async with tools.fleet(1, tmp_path) as (fleet, engines, _):
            tensors = {**tools.weights(0.5), "ballast": np.zeros(2_000_000, np.float32)}
            for _ in range(5):
                task = asyncio.create_task(fleet.publish(1, tensors))
                while not list(tmp_path.iterdir()):
                    await asyncio.sleep(0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                while list(tmp_path.iterdir()):
                    await asyncio.sleep(0.005)
            assert (await fleet.publish(2, tensors)).acks
            assert engines[0].version == 2

    tools.run(main())
