"""Failures with one cause end no run, and those that last do: by a clock that is passed in."""

import heapq
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx.rewards.reward_pool import RewardCall, RewardPool
from rlx.rollout.attempts import Failures, Patience, RolloutError
from rlx.rollout.data import Cursor
from rlx.rollout.executor import Executor
from rlx.rollout.staleness import Limits


class World:
    """Prompts that take `seconds` each and fail where `fails(group_id, begun, now)`; no sleeping.

    It keeps `live` of them under way as the executor does, until `until` seconds have passed.
    """

    def __init__(self, live, seconds, fails, patience=None, until=1000.0):
        self.patience = patience or Patience()
        self.failures, self.now, self.ended = Failures(self.patience, live), 0.0, None
        self.done, self.skipped, self.said = {}, [], []
        fresh, running, later = iter(range(10**9)), [], []
        while self.now < until and self.ended is None:
            while later and later[0][0] <= self.now and len(running) < live:
                _, group_id, held = heapq.heappop(later)
                heapq.heappush(running, (self.now + seconds(group_id), group_id, held, self.now))
            out = self.failures.outage_seconds(self.now) is not None
            while len(running) < live and not (
                out and len(running) + len(later) >= self.failures.room
            ):
                group_id = next(fresh)
                heapq.heappush(running, (self.now + seconds(group_id), group_id, 0, self.now))
            if later and (not running or later[0][0] < running[0][0]) and len(running) < live:
                self.now = max(self.now, later[0][0])
                continue
            self.now, group_id, held, begun = heapq.heappop(running)
            if not (failed := fails(group_id, begun, self.now)):
                self.done[group_id] = self.now
            self.said += filter(
                None, [self.failures.add(group_id, failed, held == 0, begun, self.now)]
            )
            if not failed:
                continue
            error, lasted = ConnectionError("503"), self.failures.outage_seconds(self.now)
            self.ended = self.failures.verdict(error, f"row {group_id}", self.now)
            counted = 0 if lasted is not None else held + 1
            if self.patience.over(counted, error):
                self.skipped.append(group_id)
            else:
                pause = self.patience.back_off(held + 1, lasted or 0.0, group_id)
                heapq.heappush(later, (self.now + pause, group_id, counted or held))


def spread(group_id):
    """1 to 2 seconds, another for each prompt."""
    return 1.0 + group_id * 0.618 % 1.0


@pytest.mark.parametrize("live", [1, 2, 10, 100, pytest.param(10_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("outage", [0.5, 60.0])
def test_an_outage_costs_its_own_time_and_no_prompt(live, outage):
    down, up = 20.0, 20.0 + outage
    world = World(live, spread, lambda g, begun, now: down <= now < up, until=up + 40)
    assert world.ended is None
    assert world.skipped == []
    first = min(at for at in world.done.values() if at >= up)
    assert first < up + 0.5 * outage + 4.0
    assert len([at for at in world.done.values() if at >= up]) >= live / 2


@pytest.mark.parametrize("live", [128, 512, 2048])
def test_a_trainer_that_was_stopped_goes_on(live):
    """All that was under way is too late at once; what begins then takes its own time."""
    world = World(live, lambda g: 300.0 + g % 100, lambda g, b, now: b < 700 <= now, until=2500)
    assert world.ended is None
    assert world.skipped == []
    assert len(world.done) > live


@pytest.mark.parametrize("live", [1, 10, 100, 10_000])
@pytest.mark.parametrize("seconds", [0.01, 2.0, 300.0])
def test_failures_without_end_end_the_run(live, seconds):
    began = 2.5 * seconds
    world = World(live, lambda g: seconds, lambda g, b, now: now >= began, until=1e5)
    assert isinstance(world.ended, RolloutError)
    assert "rollouts failed" in str(world.ended)
    assert 120.0 <= world.now - began <= 150.0 + max(3, 60 / live) * seconds


@pytest.mark.parametrize("live", [10, 1000])
def test_failures_of_two_thirds_end_the_run_and_of_a_third_do_not(live):
    """Whatever share of the attempts they are: a prompt that fails is tried three times."""
    assert World(live, spread, lambda g, b, now: g % 3 > 0).ended
    world = World(live, spread, lambda g, b, now: g % 3 == 0, until=300.0)
    assert world.ended is None
    bad = {g for g in world.skipped if g % 3 == 0}
    assert len(bad) == len(world.skipped) > live / 4


def test_no_failure_ends_a_run_with_rate_1_and_each_prompt_is_given_up():
    world = World(10, spread, lambda g, b, now: True, Patience(rate=1.0), until=500.0)
    assert world.ended is None
    assert len(world.skipped) > 10


def test_an_outage_is_said_once_and_its_end_too():
    world = World(100, spread, lambda g, begun, now: 10 <= now < 40, until=60)
    assert len(world.said) == 2
    assert world.said[0].endswith("they are tried again for 120 s")
    assert world.said[1].startswith("rollouts succeed again, after 3")


@settings(max_examples=50, deadline=None)
@given(
    events=st.lists(st.tuples(st.integers(0, 20), st.booleans(), st.floats(0, 50)), max_size=120),
    outage=st.sampled_from([0.0, 5.0, 120.0]),
)
def test_whatever_happens_a_run_ends_only_after_an_outage_of_its_length(events, outage):
    failures, now = Failures(Patience(outage=outage), 10), 0.0
    for group_id, failed, seconds in events:
        begun, now = now, now + seconds
        failures.add(group_id, failed, True, begun, now)
        lasted = failures.outage_seconds(now)
        assert lasted is None or 0 <= lasted < outage
        if failed and failures.verdict(OSError("gone"), "row 1", now):
            assert lasted is None


@pytest.mark.parametrize("live", [128, 512])
def test_a_judge_that_is_down_for_two_seconds_ends_no_run(
    live, tmp_path, fake_fleet, fake_workflow
):
    """In real workers: all prompts under way fail at once, and each comes to its end."""
    (tmp_path / "judge.py").write_text(
        "import os, time\n"
        "def score(prompt, completion, prompt_ids, completion_ids, up, **row):\n"
        "    if time.time() < float(open(up).read()):\n"
        "        raise ConnectionError('503 Service Unavailable')\n"
        "    return 1.0\n"
    )
    (tmp_path / "up").write_text("0")
    rows = [{"question": f"q{i}", "up": str(tmp_path / "up")} for i in range(2048)]

    class Judged(fake_workflow):
        async def run(self, fleet, task):
            group = await super().run(fleet, task)
            await pool.grade([RewardCall("", "", [1], [1], task.row)])
            return group

    pool, skipped, said = RewardPool(f"{tmp_path}/judge.py:score", workers=2), [], []
    executor = Executor(
        Judged(), Cursor(rows), Limits(live // 2, 1, live), fleet := fake_fleet(),
        on_skip=skipped.append, say=said.append,
    )  # fmt: skip
    executor.start()
    try:
        for step in range(4):
            if step == 2:
                (tmp_path / "up").write_text(str(time.time() + 2.0))
            fleet.version = step
            executor.set_version(step)
            assert executor.collect(timeout=60) is not None
        counters = executor.counters()
    finally:
        executor.close()
        pool.close()
    assert counters["failed"] > live / 4
    assert counters["dropped"] == 0
    assert skipped == []
