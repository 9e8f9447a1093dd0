"""A server that answers and sends no token: the decision, and a real one among healthy ones."""

import asyncio
import dataclasses

import grpc
from hypothesis import given
from hypothesis import strategies as st

from rlx.fleet import balancer, silence
from rlx.fleet.client import Fleet
from rlx.fleet.requests import Sampling
from rlx.fleet.silence import FACTOR, TokenWaits, silent_seconds

PROMPT = [1, 2, 3]


def after(*events):
    """The state after (event, time) pairs."""
    state = TokenWaits()
    for name, *times in events:
        state = getattr(state, name)(*times)
    return state


ASKED = after(("began", 0.0))
WORKS = after(("began", 0.0), ("token", 2.0))  # takes 2 s to a token


def test_a_server_has_many_times_as_long_as_others_need():
    limit = 5.0 + FACTOR * 2.0
    assert silent_seconds(ASKED, [WORKS], limit, 5.0) == 0.0
    assert silent_seconds(ASKED, [WORKS], limit + 1, 5.0) == limit + 1
    slow = after(("began", 0.0), ("token", 20.0))
    assert silent_seconds(ASKED, [WORKS, slow], limit + 1, 5.0) == 0.0


def test_a_server_is_not_silent_without_calls_or_without_others_that_work():
    assert silent_seconds(TokenWaits(), [WORKS], 1e6, 5.0) == 0.0
    assert silent_seconds(ASKED, [], 1e6, 5.0) == 0.0
    assert silent_seconds(ASKED, [ASKED], 1e6, 5.0) == 0.0
    assert silent_seconds(after(("began", 0.0), ("ended",)), [WORKS], 1e6, 5.0) == 0.0
    earlier = after(("began", 3.0))  # of others nothing has come since
    assert silent_seconds(earlier, [WORKS], 1e6, 5.0) == 0.0


def test_a_token_and_an_update_begin_the_wait_anew():
    later = after(("began", 0.0), ("token", 50.0))
    for event in ("token", "updated"):
        state = after(("began", 0.0), (event, 40.0))
        assert silent_seconds(state, [later], 44.0, 5.0) == 0.0
    assert after(("began", 0.0), ("updated", 40.0), ("token", 41.0)).longest == 1.0


@given(st.lists(st.sampled_from(["began", "token", "updated"]), max_size=20), st.floats(0, 1e3))
def test_a_server_that_needs_as_long_as_it_once_did_is_not_silent(events, gap):
    """Whatever came before: it is measured by itself as well."""
    state, now = ASKED, 0.0
    for name in events:
        now += gap
        state = getattr(state, name)(now)
    other = dataclasses.replace(WORKS, last=now + 1.0)
    assert silent_seconds(state, [other], state.since + FACTOR * state.longest, 5.0) == 0.0


class Proxy(grpc.GenericRpcHandler):
    """All calls go on to a server; until `healed`, answers of Generate do not come back."""

    def __init__(self, port):
        self.healed, self.asked = asyncio.Event(), 0
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")

    def service(self, details):
        call = self._channel.stream_stream(details.method)

        async def forward(requests, context):
            mute = not self.healed.is_set() and details.method.endswith("/Generate")
            self.asked += mute
            async for reply in call(requests, metadata=context.invocation_metadata()):
                if not mute:
                    await context.write(reply)
            if mute:
                await self.healed.wait()

        return grpc.stream_stream_rpc_method_handler(forward)


def test_a_server_that_sends_no_token_is_left_out_until_it_sends_one(
    tools, arithmetic, tmp_path, monkeypatch
):
    """Three healthy servers are there; its requests waited for their deadline and came back."""
    monkeypatch.setattr(balancer, "_LEAST", 0.5)
    monkeypatch.setattr(silence, "FACTOR", 2)
    limits, lines = dataclasses.replace(tools.limits, request=600), []

    async def main():
        async with tools.fleet(4, tmp_path) as (_, _, servers):
            front, proxy = grpc.aio.server(), Proxy(servers[3].port)
            front.add_generic_rpc_handlers((proxy,))
            mute = f"127.0.0.1:{front.add_insecure_port('127.0.0.1:0')}"
            await front.start()
            addresses = [mute, *(f"127.0.0.1:{server.port}" for server in servers[:3])]
            fleet = Fleet(addresses, limits=limits, on_message=lines.append)
            try:
                await fleet.connect()
                jobs = [
                    fleet.generate(PROMPT, Sampling(seed=s, max_new_tokens=20), 1, session=str(s))
                    for s in range(16)
                ]
                done = await asyncio.gather(*jobs)
                assert proxy.asked >= 4
                assert mute not in fleet.live
                asked = proxy.asked
                again = [
                    fleet.generate(PROMPT, Sampling(seed=s, max_new_tokens=20), 1) for s in (1, 2)
                ]
                await asyncio.gather(*again)
                assert proxy.asked <= asked + 1  # it is asked for a token, to see
                proxy.healed.set()
                while mute not in fleet.live:
                    await asyncio.sleep(0.05)
                return done
            finally:
                await fleet.close()
                await front.stop(None)
                await proxy._channel.close()

    for seed, (completion,) in enumerate(tools.run(main(), 60)):
        assert completion.tokens.tolist() == arithmetic.completion(seed, 0, 20)
    assert len(lines) == 1
    assert "it answers and sends no token, while others do" in lines[0]


def test_a_call_does_not_go_back_to_the_server_that_failed_it(tools, tmp_path):
    def broken(request):
        tried.append(request)
        raise RuntimeError("no")

    async def main():
        async with tools.fleet(2, tmp_path) as (fleet, engines, _):
            for seed in range(8):
                sampling = Sampling(seed=seed, max_new_tokens=4)
                await fleet.generate(PROMPT, sampling, 1, session="s")
                if not seed:
                    (own,) = (engine for engine in engines if engine.requests)
                    own.generate = broken

    tried = []
    tools.run(main())
    assert len(tried) == 1  # and the session stays where it was served


def test_a_paused_server_is_not_the_least_loaded_one(tools, tmp_path):
    async def main():
        async with tools.fleet(2, tmp_path) as (fleet, engines, _):
            await engines[0].pause()
            await fleet.status()
            for seed in range(6):
                await fleet.generate(PROMPT, Sampling(seed=seed, max_new_tokens=4), 1)
            return [len(engine.requests) for engine in engines]

    assert tools.run(main()) == [0, 6]


def test_a_request_that_waits_until_its_deadline_ends_no_other(tools, tmp_path):
    """A queue may be longer than that. The server was lost, with all requests that it answered."""
    limits, lines = dataclasses.replace(tools.limits, request=0.4), []

    async def main():
        async with tools.fleet(1, tmp_path, limits=limits) as (fleet, (engine,), _):
            fleet._members[0]._say = lines.append
            await engine.pause()
            waits = fleet.generate(PROMPT, Sampling(seed=1, max_new_tokens=4), 1)
            asked = asyncio.create_task(waits)
            await asyncio.sleep(1.0)
            await engine.resume()
            await asked

    tools.run(main())
    assert lines == []
