"""Servers that a fleet lets sleep and wakes, also those that are lost meanwhile."""

import asyncio
import dataclasses
import time

import pytest

from rlx.fleet import balancer, silence
from rlx.fleet.client import Fleet
from rlx.fleet.requests import Sampling


class Sleeper:
    """Notes of the arithmetic engine's sleeps: (level, or 0 for waking; version)."""

    @staticmethod
    def of(arithmetic):
        class Engine(arithmetic.ArithmeticEngine):
            def __init__(self, **options):
                super().__init__(**options)
                self.notes, self.blank = [], False

            async def pause(self, level=0):
                await super().pause()
                self.notes.append((level, self.version))
                self.blank |= level == 2

            async def resume(self):
                if self.blank:
                    raise ValueError("the server sleeps without weights")
                await super().resume()
                self.notes.append((0, self.version))

            async def load(self, *args, **options):
                self.blank = False
                return await super().load(*args, **options)

        return Engine


@pytest.fixture
def sleeping(tools, tmp_path, arithmetic):
    """sleeping(count, **options) → as `tools.fleet`, with engines that note their sleeps."""

    def make(count, **options):
        engines = [Sleeper.of(arithmetic)() for _ in range(count)]
        return tools.fleet(count, tmp_path, engines, **options)

    return make


async def answers(fleet, seconds=0.2):
    """A request, whether it was answered within these seconds, and its task."""
    task = asyncio.create_task(fleet.generate([1, 2, 3], Sampling(max_new_tokens=8, seed=1), 2))
    await asyncio.wait([task], timeout=seconds)
    return task.done(), task


def test_requests_wait_while_servers_sleep(tools, sleeping):
    async def main():
        async with sleeping(2) as (fleet, engines, _):
            await fleet.set_sleep(1)
            done, task = await answers(fleet)
            assert not done
            await fleet.publish(1, tools.weights(0.5))
            assert not task.done()
            await fleet.set_sleep(0)
            assert {int(v) for made in await task for v in made.versions} == {1}
            for engine in engines:
                assert engine.notes == [(1, 0), (0, 1)]

    tools.run(main())


@pytest.mark.parametrize("level", [1, 2])
def test_a_server_that_comes_back_sleeps_as_the_others_do(tools, sleeping, level):
    async def main():
        async with sleeping(2) as (fleet, engines, servers):
            await fleet.publish(1, tools.weights(0.5))
            await fleet.set_sleep(level)
            member = fleet._members[0]
            member.fail("a test says so")
            while member.address not in fleet.live:
                await asyncio.sleep(0.01)
            assert engines[0].notes[-1] == (level, 1)
            await fleet.publish(2, tools.weights(0.25))
            await fleet.set_sleep(0)
            assert fleet.instances.keys() == {f"127.0.0.1:{server.port}" for server in servers}
            assert [engine.notes[-1] for engine in engines] == [(0, 2)] * 2
            assert (await answers(fleet, 10))[0]

    tools.run(main())


def test_a_server_that_lost_its_weights_gets_them_before_it_wakes(tools, sleeping):
    async def main():
        async with sleeping(1) as (fleet, (engine,), _):
            await fleet.publish(1, tools.weights(0.5))
            await fleet.set_sleep(2)
            await fleet.set_sleep(0)  # nothing was published: it refuses, and is lost
            assert (await answers(fleet, 10))[0]
            assert engine.notes == [(2, 1), (0, 1)]
            assert [version for _, version, _ in engine.loads] == [1, 1]

    tools.run(main())


def test_waking_has_time_for_the_size_of_the_weights(tools, sleeping, monkeypatch):
    monkeypatch.setattr("rlx.fleet.requests._SLOWEST", 10.0)  # bytes/s
    limits = dataclasses.replace(tools.limits, publish_timeout_seconds=0.2)

    async def main():
        async with sleeping(1, limits=limits) as (fleet, (engine,), _):
            await fleet.publish(1, tools.weights(0.5))
            await fleet.set_sleep(1)
            wake = engine.resume

            async def resume():
                await asyncio.sleep(1.0)
                await wake()

            engine.resume = resume
            await fleet.set_sleep(0)
            assert len(fleet.live) == 1
            assert engine.notes == [(1, 1), (0, 1)]

    tools.run(main())


def test_a_fleet_that_begins_asleep_wakes_its_servers_once(tools, sleeping):
    async def main():
        async with sleeping(1, asleep=True) as (_, (engine,), (server,)):
            assert engine.notes == [(1, 0)]
            other = Fleet(
                [f"127.0.0.1:{server.port}"], limits=tools.limits, publish_dir="/tmp", sleep=1
            )
            await other.connect()
            assert engine.notes == [(1, 0)] * 2
            await other.set_sleep(0)
            assert engine.notes[2:] == [(0, 0)]
            await other.close()

    tools.run(main())


def test_a_server_that_sleeps_is_not_silent(tools, sleeping, monkeypatch):
    """The last tokens of another one may come after it fell asleep; it would be killed for that."""
    monkeypatch.setattr(balancer, "_LEAST", 0.1)
    monkeypatch.setattr(silence, "FACTOR", 1)

    async def main():
        async with sleeping(2) as (fleet, engines, _):
            for engine in engines:
                engine.step_seconds = 0.01
            sampling = Sampling(max_new_tokens=4000, seed=1)
            asked = asyncio.create_task(fleet.probe([[1, 2, 3]], sampling))  # of both servers
            await asyncio.sleep(0.3)
            await fleet.set_sleep(1)
            one, other = fleet._members
            assert one.waits.calls == other.waits.calls == 1
            other.waits = other.waits.token(time.monotonic())
            await asyncio.sleep(1.0)
            assert [*fleet.states().values()] == ["", ""]
            asked.cancel()

    tools.run(main())


def test_weights_that_come_while_a_server_wakes_reach_it(tools, sleeping):
    async def main():
        async with sleeping(2) as (fleet, engines, _):
            await fleet.publish(1, tools.weights(0.5))
            await fleet.set_sleep(0)
            waking, go_on = asyncio.Event(), asyncio.Event()

            async def resume():
                waking.set()
                await go_on.wait()

            engines[0].resume = resume
            member = fleet._members[0]
            member.fail("a test says so")
            await waking.wait()
            await fleet.publish(2, tools.weights(0.25))
            go_on.set()
            while member.address not in fleet.live:
                await asyncio.sleep(0.01)
            assert engines[0].version == 2

    tools.run(main())
