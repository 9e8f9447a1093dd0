"""Orders: requests of one model by their numbers, and weights of several on one fleet."""

import asyncio
import time
from functools import partial
from threading import Event

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx.fleet.requests import Sampling
from rlx.model.peft import WEIGHTS
from rlx.system.threads import DaemonThreads
from rlx.tinker.samplers import Samplers, WeightTurns
from rlx.tinker.tenants import TrainedModel


@settings(max_examples=20, deadline=None)
@given(st.permutations(range(12)), st.sets(st.integers(0, 11)))
def test_requests_run_one_at_a_time_in_the_order_of_their_numbers(numbers, failing):
    ran = []

    def work(number, model):
        assert model.next == number
        ran.append(number)
        if number in failing:
            raise ValueError(number)
        return {"number": number}

    async def whole():
        model, pool = TrainedModel("run", {}), DaemonThreads(1)
        calls = [model.run(number, partial(work, number), pool) for number in numbers]
        return await asyncio.gather(*calls, return_exceptions=True)

    for number, found in zip(numbers, asyncio.run(whole()), strict=True):
        assert (found == {"number": number}) != isinstance(found, ValueError)
        assert isinstance(found, ValueError) == (number in failing)
    assert ran == list(range(12))


def test_a_cancelled_wait_lets_no_other_request_begin_while_its_work_runs():
    ran, begun, leave = [], Event(), Event()

    def long(model):
        begun.set()
        assert leave.wait(10)
        ran.append("long")

    async def whole():
        model, other, pool = TrainedModel("a", {}), TrainedModel("b", {}), DaemonThreads(1)
        first = asyncio.create_task(model.run(0, long, pool))
        while not begun.is_set():
            await asyncio.sleep(0.01)
        first.cancel()
        second = asyncio.create_task(other.run(0, lambda model: ran.append("other"), pool))
        await asyncio.sleep(0.1)
        assert ran == []
        leave.set()
        assert await second == {"model_id": "b"}
        assert first.cancelled()

    asyncio.run(whole())
    assert ran == ["long", "other"]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.booleans()), max_size=60))
def test_only_requests_for_the_served_weights_run(steps):
    turns, running, waiting = WeightTurns(), [], []

    def begin(requests):
        for weights, number in requests:
            assert weights == turns.served
            waiting.remove((weights, number))
            running.append((weights, number))
        assert len({weights for weights, _ in running}) <= 1

    def end(request):
        begin(turns.end(request[0], request))

    for number, (weights, ends, leaves) in enumerate(steps):
        waiting.append((weights, number))
        begin(turns.add(weights, (weights, number)))
        if ends and running:
            end(running.pop())
        if leaves and waiting:
            end(waiting.pop(0))
    while running:
        end(running.pop())
    assert not waiting


def test_those_who_wait_for_other_weights_are_not_overtaken():
    turns = WeightTurns()
    assert turns.add("a", 1) == [1]
    assert turns.add("a", 2) == [2]
    assert turns.add("b", 3) == []
    assert turns.add("a", 4) == []  # else b would wait for ever
    assert turns.add("b", 5) == []
    assert turns.end("a", 1) == []
    assert turns.end("a", 2) == [3, 5]


def test_a_request_that_leaves_the_line_frees_those_behind_it():
    turns = WeightTurns()
    assert turns.add("a", 1) == [1]
    assert turns.add("b", 2) == []
    assert turns.add("a", 3) == []
    assert turns.end("b", 2) == [3]
    assert turns.end("a", 1) == turns.end("a", 3) == []


class OneAtATime:
    """A fleet that serves the weights published last, and notes which ones requests get."""

    def __init__(self):
        self.served, self.log, self.go_on = None, [], asyncio.Event()

    async def publish(self, version, source, method):
        self.served = source
        self.log.append(f"publish {source}")

    async def generate(self, prompt, sampling, n):
        served = self.served
        await self.go_on.wait()
        assert self.served == served, "weights changed under a request"
        self.log.append(f"sample {served}")
        return []


def line(monkeypatch, tmp_path, seconds):
    """A fleet, and a function that begins to sample from an adapter, read in its `seconds`."""

    def read(self, adapter):
        time.sleep(seconds[adapter.name])
        return adapter.name

    monkeypatch.setattr(Samplers, "_read_adapter", read)
    fleet = OneAtATime()
    samplers = Samplers(fleet, b"", "float32")

    def begin(name):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / WEIGHTS).touch()
        call = samplers.sample(tmp_path / name, [1, 2], Sampling(), 1, 0)
        return asyncio.create_task(call)

    return fleet, begin


def test_a_request_cancelled_in_the_line_ends_no_other(monkeypatch, tmp_path):
    async def whole():
        fleet, begin = line(monkeypatch, tmp_path, {"a": 0.0, "b": 0.0, "c": 0.0})
        first = begin("a")
        while not fleet.log:
            await asyncio.sleep(0.01)
        second, third = begin("b"), begin("c")
        await asyncio.sleep(0.05)
        second.cancel()
        await asyncio.sleep(0.1)
        fleet.go_on.set()
        await asyncio.gather(first, third)
        return fleet.log

    assert asyncio.run(whole()) == ["publish a", "sample a", "publish c", "sample c"]


def test_weights_are_published_in_the_order_of_their_turns(monkeypatch, tmp_path):
    async def whole():
        fleet, begin = line(monkeypatch, tmp_path, {"a": 0.3, "b": 0.0})
        fleet.go_on.set()
        first, second = begin("a"), begin("b")
        await asyncio.sleep(0.05)
        first.cancel()  # while its adapter is read
        await second
        await asyncio.sleep(0.4)
        return fleet.log

    assert asyncio.run(whole()) == ["publish a", "publish b", "sample b"]


def test_servers_that_read_adapters_get_one_with_each_request(tmp_path):
    asked = []

    class Fleet:  # without `publish`
        async def generate(self, prompt, sampling, n):
            asked.append(sampling.adapter)
            return []

        async def score(self, prompt, first, *, adapter):
            asked.append(adapter)
            return np.zeros(len(prompt), np.float32)

    async def whole():
        samplers = Samplers(Fleet(), b"", "float32", side_by_side=True)
        for adapter in (tmp_path, None):
            await samplers.sample(adapter, [1, 2, 3], Sampling(), 1, 3)

    asyncio.run(whole())
    assert asked == [str(tmp_path), str(tmp_path), "", ""]
