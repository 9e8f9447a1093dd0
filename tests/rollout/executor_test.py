"""The executor against an in-process fleet: real threads, every order, no sleeping for luck."""

import asyncio
import dataclasses
import re
import threading
import time
import traceback

import numpy as np
import pytest

from rlx.base import Unavailable, UserError
from rlx.journal import history, records
from rlx.rollout.attempts import Patience, RolloutError
from rlx.rollout.concurrency import tunable_limits
from rlx.rollout.data import Cursor
from rlx.rollout.executor import Executor, Exhausted, group_seed
from rlx.rollout.staleness import Limits, StalenessViolation

ROWS = [{"question": f"q{i}", "answer": str(i)} for i in range(17)]
PRECISE = Patience(pause=0.0, outage=0.0)  # a few failures end a run that has done nothing else
NONE = Patience(rate=0.0, outage=0.0)  # one failure ends a run
SECONDS = 30.0  # no wait in here takes so long unless something is broken


class Notes:
    """A journal in memory."""

    def __init__(self):
        self.records = []

    def __call__(self, kind, fields, group=None):
        number = len(self.records)
        packed = records.pack(group) if group else b""
        self.records += records.scan(records.encode(number, kind, fields, packed))
        return number

    def after(self, host):
        found = history.recover(host, history.position(host), self.records)
        assert found.complete
        return found.host, found.groups


def cursor(**kw):
    return Cursor(ROWS, seed=3, **kw)


@pytest.fixture
def make(fake_fleet, fake_workflow):
    """Makes executors and closes them."""
    made = []

    def build(limits, *, fleet=None, workflow=None, shares=None, **kw):
        notes, rows = kw.setdefault("note", Notes()), cursor(shares=shares or {})
        executor = Executor(workflow or fake_workflow(), rows, limits, fleet or fake_fleet(), **kw)
        executor.notes = notes
        made.append(executor)
        executor.start()
        return executor

    yield build
    for executor in made:
        executor.close()


def collect(executor):
    batch = executor.collect(timeout=SECONDS)
    assert batch is not None, executor.counters()
    return batch


def into(records):
    """An `on_skip` that keeps what skipped.jsonl would."""
    return lambda skipped: records.append(skipped.record("train"))


def held(executor):
    """What a checkpoint and the journal give to an executor that goes on."""
    return executor.notes.after(executor.state())


def publish(executor, fleet, version):
    """Servers have the version first; then it counts."""
    fleet.version = version
    executor.set_version(version)


def wait_for(condition, seconds=SECONDS):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.parametrize("eta", [0, 1, 3])
def test_batches_within_the_bound_each_prompt_once(make, fake_fleet, eta):
    fleet = fake_fleet(turns=40)
    executor = make(Limits(4, eta, 16), fleet=fleet)
    publish(executor, fleet, 0)
    seen = []
    for step in range(30):
        batch = collect(executor)
        assert [g.group_id for g in batch] == sorted(g.group_id for g in batch)
        for group in batch:
            assert step - group.oldest_version <= eta
            assert group.row == executor._rows.row(group.group_id)
        seen += [g.group_id for g in batch]
        if eta == 0:
            assert seen == list(range(len(seen)))
        publish(executor, fleet, step + 1)
    assert len(set(seen)) == 30 * 4
    counters = executor.counters()
    assert counters["dropped"] == counters["failed"] == counters["rejected"] == 0
    assert counters["accepted"] == 30 * 4 + counters["buffered"]
    assert fleet.most_in_flight <= 16


def test_nothing_starts_before_the_first_version(make, fake_fleet):
    fleet = fake_fleet()
    executor = make(Limits(2, 1, 8), fleet=fleet)
    assert executor.collect(timeout=0.05) is None
    assert fleet.calls == []
    publish(executor, fleet, 0)
    collect(executor)


def test_admission_stops_at_eta_plus_one_batches(make, fake_fleet):
    fleet = fake_fleet()
    executor = make(Limits(4, 2, 1000), fleet=fleet)
    publish(executor, fleet, 0)
    wait_for(lambda: executor.counters()["accepted"] == 12)
    for _ in range(3):
        collect(executor)
    assert executor.collect(timeout=0.05) is None  # the publish is missing
    assert executor.counters()["admitted"] == 12
    publish(executor, fleet, 3)
    collect(executor)


@pytest.mark.parametrize("eta", [0, 1, 3])
def test_forced_staleness_makes_every_batch_lag_by_the_bound(make, fake_fleet, eta):
    fleet = fake_fleet(turns=40)
    executor = make(Limits(4, eta, 3), fleet=fleet, force_staleness=True)
    publish(executor, fleet, 0)
    for step in range(3 * eta + 3):
        lags = {step - v for g in collect(executor) for t in g.trajectories
                for v in t.versions[t.loss_mask]}  # fmt: skip
        assert lags == {min(step, eta)}
        publish(executor, fleet, step + 1)


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("eta", [0, 2])
def test_no_prompt_is_admitted_that_no_batch_will_take(make, fake_fleet, eta, force):
    """Neither by a run nor by one that continues it for longer, and nothing is dropped."""
    fleet = fake_fleet(turns=20)
    executor = make(Limits(4, eta, 16, 3), fleet=fleet, force_staleness=force)
    publish(executor, fleet, 0)
    seen = []
    for step in range(3):
        seen += [g.group_id for g in collect(executor)]
        publish(executor, fleet, step + 1)
    executor.loop.run(asyncio.sleep(0))
    assert len(fleet.calls) == executor.counters()["admitted"] == 12
    host, groups = held(executor)
    assert (host["pending"], groups) == ([], [])

    again = make(Limits(4, eta, 16, 5), fleet=fleet, force_staleness=force)
    again.restore(host, groups)
    for step in range(3, 5):
        publish(again, fleet, step)
        seen += [g.group_id for g in collect(again)]
    assert seen == list(range(20)) if eta == 0 else sorted(seen) == list(range(20))
    assert again.counters()["admitted"] == 20
    assert again.counters()["dropped"] == 0


def test_a_slow_prompt_is_waited_for_when_due_and_not_before(make, fake_fleet, fake_workflow):
    gate = asyncio.Event()

    class Slow(fake_workflow):
        async def run(self, fleet, task):
            group = await super().run(fleet, task)
            if task.group_id == 0:
                await gate.wait()
            return group

    fleet = fake_fleet()
    executor = make(Limits(2, 1, 8), fleet=fleet, workflow=Slow())
    publish(executor, fleet, 0)
    assert 0 not in [g.group_id for g in collect(executor)]
    publish(executor, fleet, 1)
    wait_for(lambda: executor.counters()["buffered"] >= 3)
    assert executor.collect(timeout=0.05) is None
    executor.loop.call_soon(gate.set)
    assert 0 in [g.group_id for g in collect(executor)]


def test_failures_are_retried_with_another_seed(make, fake_fleet, fake_workflow):
    def misbehave(group_id, attempt):
        if group_id in (1, 5) and attempt < 2:
            raise ValueError(f"bad luck {group_id}")

    fleet = fake_fleet()
    executor = make(
        Limits(4, 1, 8),
        fleet=fleet,
        workflow=fake_workflow(misbehave=misbehave),
        patience=Patience(pause=0.0),
    )
    publish(executor, fleet, 0)
    ids = [g.group_id for _ in range(2) for g in collect(executor)]
    assert sorted(ids) == list(range(8))
    assert executor.counters()["failed"] == 4
    seeds = [sampling.seed for _, sampling, _, _ in fleet.calls]
    assert len(set(seeds)) == len(seeds)
    assert group_seed(0, 1, 2) in seeds


def test_the_budget_ends_the_run_with_the_traceback(make, fake_fleet, fake_workflow):
    def misbehave(group_id, attempt):
        raise LookupError("the reward server is gone")

    told = []
    executor = make(
        Limits(4, 0, 8), workflow=fake_workflow(misbehave=misbehave),
        patience=Patience(pause=0.01, outage=0.2), on_skip=told.append,
    )  # fmt: skip
    executor.set_version(0)
    words = r"\d of the last \d rollouts failed.*max_failure_rate=0.5.*gone"
    with pytest.raises(RolloutError, match=words) as caught:
        collect(executor)
    text = "".join(traceback.format_exception(caught.value))
    assert "in misbehave" in text
    assert executor.counters()["failed"] >= 3
    assert executor.counters()["dropped"] == 0
    assert executor.counters()["skipped"] == len(told) == 0, "not the prompts' fault"
    frames = []
    for _ in range(3):  # as an evaluation asks, for each row
        with pytest.raises(RolloutError) as again:
            collect(executor)
        frames.append(len(traceback.extract_tb(again.value.__traceback__)))
    assert len(set(frames)) == 1, "frames of one call are added to the next one's"


def test_what_ends_a_run_is_a_line_with_the_row_the_users_lines_and_a_remedy(make, fake_workflow):
    def parse(text):
        return int(text)

    def misbehave(group_id, attempt):
        parse("nothing\nat all")

    executor = make(Limits(4, 0, 8), workflow=fake_workflow(misbehave=misbehave), patience=PRECISE)
    executor.set_version(0)
    with pytest.raises(UserError) as caught:
        collect(executor)
    text = str(caught.value)
    assert "\n" not in text
    assert re.search(r"the last one, row \d+ \{'question': 'q\d+'\}: ValueError: ", text)
    first = parse.__code__.co_firstlineno
    places = f"{__file__}, line {first + 4}; {__file__}, line {first + 1})"
    assert places in text
    assert text.endswith("fix that and resume with the same --workdir")


@pytest.mark.parametrize("bad", [float("nan"), float("-inf"), None, "1.0", 1e39, 10**400])
def test_a_reward_that_is_none_names_the_workflow_and_the_row(bad, make, fake_fleet, fake_workflow):
    """Whichever workflow it is from: a NaN in one reward would be one in the whole batch."""
    executor = make(
        Limits(1, 0, 1),
        workflow=fake_workflow(misbehave=lambda *_: [1.0, bad]),
        patience=NONE,
    )
    executor.set_version(0)
    words = (
        r"FakeWorkflow \(.*, line \d+\) gave, for row .*'q\d+'.*, trajectory 0\.1 with the reward "
    )
    with pytest.raises(RolloutError, match=words + re.escape(repr(bad)[:60])):
        collect(executor)
    assert executor.counters()["failed"] == 1


@pytest.mark.parametrize("number", [1, True, np.float32(0.5), np.int64(3), np.bool_(False)])
def test_numbers_of_any_kind_are_rewards(number, make, fake_workflow):
    executor = make(Limits(1, 0, 1), workflow=fake_workflow(misbehave=lambda *_: [0.0, number]))
    executor.set_version(0)
    (group,) = collect(executor)
    assert group.trajectories[1].reward == number


def test_a_long_run_meets_many_failures(make, fake_fleet, fake_workflow):
    """Every second prompt fails once, a third of all attempts: fewer than the half allowed."""

    def misbehave(group_id, attempt):
        if attempt == 0 and group_id % 2:
            raise ConnectionError("a hiccup")

    fleet = fake_fleet()
    executor = make(
        Limits(2, 0, 2), fleet=fleet, workflow=fake_workflow(misbehave=misbehave),
        patience=Patience(pause=0.0),
    )  # fmt: skip
    for version in range(20):
        publish(executor, fleet, version)
        assert [g.group_id for g in collect(executor)] == [2 * version, 2 * version + 1]
    assert executor.counters()["failed"] == 20


@pytest.mark.parametrize("error", [ValueError("no gold answer"), UserError("it has 2000 tokens")])
def test_a_prompt_that_cannot_work_is_skipped_and_named(error, make, fake_fleet, fake_workflow):
    """Batches stay whole and within the bound: the next prompt has its place.

    The row comes again in the next epochs and is skipped again.
    """
    bad = cursor().index(3)

    def misbehave(group_id, attempt):
        if cursor().index(group_id) == bad:
            raise error

    skipped, fleet, now = [], fake_fleet(turns=20), [0.0]
    executor = make(
        Limits(4, 1, 8), fleet=fleet, workflow=fake_workflow(misbehave=misbehave),
        on_skip=into(skipped), clock=lambda: time.monotonic() + now[0],
    )  # fmt: skip
    seen = []
    for step in range(30):
        publish(executor, fleet, step)
        now[0] += 60.0  # every back-off is over
        batch = collect(executor)
        assert all(step - g.oldest_version <= 1 for g in batch)
        seen += [g.group_id for g in batch]
    again = [g for g in range(200) if cursor().index(g) == bad]
    assert len(set(seen)) == len(seen) == 120
    assert not set(seen) & set(again)
    wait_for(lambda: executor.counters()["skipped"] == len(skipped))  # counted, then named
    assert len(skipped) >= 2
    failed = 3 * len(skipped)
    counters = executor.counters()
    assert counters["dropped"] == 0
    assert counters["failed"] >= failed
    assert {r["group_id"] for r in skipped} <= set(again)
    one = skipped[0]
    assert (one["which"], one["row"], one["attempts"]) == ("train", bad, 3)
    assert ROWS[bad]["question"] in one["text"]
    assert one["error"] == type(error).__name__
    assert re.fullmatch(rf"{error} \(.*executor_test.py, line \d+\)", one["message"])


def test_other_prompts_go_before_one_that_failed(make, fake_fleet, fake_workflow):
    """It waits 1 s, then 8 s: a failure is not repeated in a loop."""

    def misbehave(group_id, attempt):
        if group_id == 0:
            raise ConnectionError("the judge is busy")

    now, fleet, workflow = [0.0], fake_fleet(), fake_workflow(misbehave=misbehave)
    executor = make(Limits(2, 0, 1), fleet=fleet, workflow=workflow, clock=lambda: now[0])
    attempts = []
    for step in range(6):
        publish(executor, fleet, step)
        assert 0 not in [g.group_id for g in collect(executor)]
        attempts.append(workflow.attempts[0] + 1)
        now[0] += 0.6 if step < 3 else 8.0
    assert attempts == [1, 1, 2, 2, 3, 3]
    assert executor.counters()["skipped"] == 1


@pytest.mark.parametrize("attempts", [1, 9])
def test_what_has_failed_is_remembered_by_a_continuation(attempts, make, fake_fleet, fake_workflow):
    """Also one that was tried more often than is allowed now: it has one attempt, not none."""

    def misbehave(group_id, attempt):
        if group_id == 0:
            raise ValueError("never")

    fleet = fake_fleet()
    first = make(
        Limits(2, 0, 8), fleet=fleet, workflow=fake_workflow(misbehave=misbehave),
        clock=lambda: 0.0,
    )  # fmt: skip
    publish(first, fleet, 0)
    assert [g.group_id for g in collect(first)] == [1, 2]
    host, groups = held(first)
    assert host["pending"] == [[0, 1]]
    host["pending"][0][1] = attempts

    skipped, workflow = [], fake_workflow(misbehave=misbehave)
    second = make(
        Limits(2, 0, 8), fleet=fleet, workflow=workflow, on_skip=into(skipped),
        patience=Patience(attempts=2),
    )  # fmt: skip
    second.restore(host, groups)
    publish(second, fleet, 1)
    assert [g.group_id for g in collect(second)] == [3, 4]
    assert [(r["group_id"], r["attempts"]) for r in skipped] == [(0, attempts + 1)]
    assert second.counters()["skipped"] == 1
    assert second.state()["skipped"] == 1
    assert second.state()["pending"] == []


def test_no_server_ends_the_run_and_is_held_against_no_prompt(make, fake_workflow):
    def misbehave(group_id, attempt):
        raise Unavailable("no rollout server alive for 300 s")

    executor = make(Limits(4, 0, 8), workflow=fake_workflow(misbehave=misbehave))
    executor.set_version(0)
    with pytest.raises(Unavailable, match="no rollout server alive"):
        collect(executor)
    wait_for(lambda: executor.counters()["running"] == 0)
    pending = executor.state()["pending"]
    assert pending == [[g, 0] for g in range(len(pending))]


def test_a_users_mistake_in_every_row_ends_the_run_in_one_line(make, fake_workflow):
    def misbehave(group_id, attempt):
        raise UserError("rows are JSON")

    executor = make(Limits(4, 0, 8), workflow=fake_workflow(misbehave=misbehave), patience=PRECISE)
    executor.set_version(0)
    with pytest.raises(UserError, match=r"^rows are JSON \(\d of the last \d rollouts failed\)$"):
        collect(executor)


def test_a_trajectory_that_training_has_no_room_for_is_refused_when_it_finishes(
    make, fake_fleet, fake_workflow
):
    class Long(fake_workflow):
        async def run(self, fleet, task):
            group = await super().run(fleet, task)
            if task.group_id != 1:
                return group
            one = group.trajectories[0]
            longer = {
                name: np.resize(getattr(one, name), 100)
                for name in ("tokens", "loss_mask", "behaviour_logprobs", "versions")
            }
            return dataclasses.replace(
                group, trajectories=(dataclasses.replace(one, **longer), group.trajectories[1])
            )

    skipped, fleet = [], fake_fleet()
    executor = make(
        Limits(3, 0, 8), fleet=fleet, workflow=Long(), max_tokens=99, on_skip=into(skipped),
        patience=Patience(pause=0.0),
    )  # fmt: skip
    publish(executor, fleet, 0)
    assert [g.group_id for g in collect(executor)] == [0, 2, 3]
    assert executor.counters()["failed"] == 3
    (record,) = skipped
    assert record["row"] == cursor().index(1)
    for words in ("trajectory 1.0", "100 tokens", "room for 99", "'question': 'q"):
        assert words in record["message"]


def test_arrays_of_different_lengths_are_refused_when_they_finish(make, fake_workflow):
    class Uneven(fake_workflow):
        async def run(self, fleet, task):
            group = await super().run(fleet, task)
            one = dataclasses.replace(group.trajectories[0], loss_mask=np.ones(1, bool))
            return dataclasses.replace(group, trajectories=(one,))

    executor = make(Limits(1, 0, 1), workflow=Uneven(), patience=NONE)
    executor.set_version(0)
    with pytest.raises(RolloutError, match=r"trajectory 0.0 with.*lengths \[1, \d+\]"):
        collect(executor)


def test_an_attempt_that_takes_too_long_has_failed(make, fake_fleet):
    fleet = fake_fleet()
    fleet.hold = True
    executor = make(Limits(1, 0, 1), fleet=fleet, patience=NONE, request_timeout=0.05)
    executor.set_version(0)
    with pytest.raises(RolloutError, match=r"request_timeout_seconds=0.05"):
        collect(executor)
    assert fleet.in_flight == 0


@pytest.mark.parametrize("kind", [asyncio.CancelledError, SystemExit])
def test_a_workflow_that_ends_from_within_is_a_failure_not_a_lost_prompt(make, fake_workflow, kind):
    def misbehave(group_id, attempt):
        if attempt == 0:
            raise kind

    executor = make(
        Limits(2, 0, 2),
        workflow=fake_workflow(misbehave=misbehave),
        patience=Patience(pause=0.0),
    )
    executor.set_version(0)
    assert [g.group_id for g in collect(executor)] == [0, 1]


def test_dynamic_filtering_gives_the_place_to_the_next_prompt(make, fake_fleet, fake_workflow):
    def misbehave(group_id, attempt):
        return [1.0, 1.0] if group_id % 3 else [0.0, 1.0]

    fleet = fake_fleet(turns=20)
    executor = make(
        Limits(2, 0, 8),
        fleet=fleet,
        workflow=fake_workflow(misbehave=misbehave),
        drop_equal_rewards=True,
    )
    publish(executor, fleet, 0)
    for step in range(15):
        assert [g.group_id for g in collect(executor)] == [step * 6, step * 6 + 3]
        publish(executor, fleet, step + 1)
    counters = executor.counters()
    assert counters["rejected"] > 40  # but never 40 in a row
    assert counters["rejected"] >= 2 * counters["accepted"] - 4
    assert counters["dropped"] == 0


@pytest.mark.parametrize(
    ("returns", "rejected"),
    [
        (((0.81, 0.9, 1.0), (0.81, 0.9, 1.0)), True),  # both right, in as many turns
        (((0.9, 1.0), (0.81, 0.9, 1.0)), False),  # fewer turns are better
        (((1.0, 0.0), (1.0, 1.0)), False),
        (((0.0,), (0.0, 0.0)), True),
        (((1.0, 0.0),), False),  # only one run
    ],
)
def test_a_discount_between_turns_is_no_difference_between_runs(
    returns, rejected, make, fake_workflow
):
    class Turns:
        """Runs whose turns, a token each, have returns of their own; others differ."""

        async def run(self, fleet, task):
            group = await fake.run(fleet, task)
            if task.group_id:
                return group
            runs = []
            for t, own in zip(group.trajectories, returns, strict=False):
                turns = np.array([0, 0, *range(1, len(own))], np.int32)
                row = {"tokens": turns, "versions": 0 * turns, "turn_ids": turns}
                row |= {"loss_mask": np.arange(len(turns)) > 0, "behaviour_logprobs": 0.0 * turns}
                row["turn_rewards"] = own
                runs.append(dataclasses.replace(t, reward=own[0], **row))
            return dataclasses.replace(group, trajectories=tuple(runs))

    fake = fake_workflow(misbehave=lambda group_id, attempt: [0.0, 1.0])
    executor = make(Limits(1, 0, 1), workflow=Turns(), drop_equal_rewards=True)
    executor.set_version(0)
    assert [g.group_id for g in collect(executor)] == [int(rejected)]
    assert executor.counters()["rejected"] == rejected


def test_endless_rejection_ends_the_run(make, fake_workflow):
    executor = make(
        Limits(2, 0, 8),
        workflow=fake_workflow(misbehave=lambda group_id, attempt: [0.0, 0.0]),
        drop_equal_rewards=True,
        patience=PRECISE,
    )
    executor.set_version(0)
    with pytest.raises(UserError, match=r"last 40 groups were all rejected.*all 0"):
        collect(executor)


def test_a_judge_that_is_down_and_gives_all_the_same_ends_no_run_before_its_time(
    make, fake_workflow
):
    now = [0.0]
    executor = make(
        Limits(2, 0, 8), workflow=fake_workflow(misbehave=lambda *_: [0.0, 0.0]),
        drop_equal_rewards=True, clock=lambda: now[0],
    )  # fmt: skip
    executor.set_version(0)
    wait_for(lambda: executor.counters()["rejected"] > 60)
    assert executor.counters()["accepted"] == 0
    now[0] = 130.0
    with pytest.raises(UserError, match="groups were all rejected"):
        executor.collect()


@pytest.mark.parametrize("resumed", [False, True])
def test_a_run_that_has_solved_its_data_hands_out_what_is_left_and_says_so(
    resumed, make, fake_fleet, fake_workflow
):
    """Some rows nobody gets right; the rest all do, after four groups from which to learn."""

    def misbehave(group_id, attempt):
        if group_id < 4:
            return [0.0, 1.0]
        return [0.0, 0.0] if group_id % 3 == 0 else [1.0, 1.0]

    fleet = fake_fleet(turns=0)
    options = {"workflow": fake_workflow(misbehave=misbehave), "drop_equal_rewards": True}
    executor = make(Limits(2, 1, 1), fleet=fleet, **options)
    publish(executor, fleet, 0)
    if resumed:
        wait_for(lambda: executor.counters()["buffered"] == 4)
        collect(executor)
        host, groups = held(executor)
        executor = make(Limits(2, 1, 1), fleet=fleet, **options)
        executor.restore(host, groups)
        publish(executor, fleet, 1)
    wait_for(lambda: executor.counters()["rejected"] >= 40 or resumed is False)
    ids = [g.group_id for _ in range(1 if resumed else 2) for g in collect(executor)]
    assert ids == ([2, 3] if resumed else [0, 1, 2, 3])
    publish(executor, fleet, 2)
    with pytest.raises(Exhausted, match=r"last 40 groups.*2\d of them at the best reward, 1"):
        collect(executor)
    assert executor.counters()["dropped"] == 0


def test_a_policy_that_has_fallen_apart_has_not_solved_its_data(make, fake_fleet, fake_workflow):
    fleet = fake_fleet()
    executor = make(
        Limits(2, 0, 8),
        fleet=fleet,
        workflow=fake_workflow(misbehave=lambda g, _: [0.0, 1.0] if g < 2 else [0.0, 0.0]),
        drop_equal_rewards=True,
        patience=PRECISE,
    )
    publish(executor, fleet, 0)
    collect(executor)
    publish(executor, fleet, 1)
    with pytest.raises(UserError, match=r"last 40 groups.*all 0.*no answer gets 1 any more"):
        collect(executor)


def test_a_server_that_stamps_old_versions_is_noticed(make, fake_fleet):
    fleet = fake_fleet()
    executor = make(Limits(1, 1, 4), fleet=fleet)
    publish(executor, fleet, 0)
    collect(executor)
    collect(executor)
    executor.set_version(1)  # the fleet goes on sampling with version 0
    with pytest.raises(StalenessViolation, match="admitted at version 1"):
        collect(executor)


def test_same_seed_same_groups_whatever_the_timing(make, fake_fleet):
    def texts(seed, turns, seed_of_run=5):
        fleet = fake_fleet(seed=seed, turns=turns)
        executor = make(Limits(4, 0, 16), fleet=fleet, seed=seed_of_run)
        found = []
        for step in range(4):
            publish(executor, fleet, step)
            batch = collect(executor)
            found += [t.tokens.tolist() for g in batch for t in g.trajectories]
        return found

    assert texts(1, 3) == texts(2, 50)
    assert texts(1, 3) != texts(1, 3, seed_of_run=6)


def test_resume_continues_where_it_stopped(make, fake_fleet, fake_workflow):
    """With η = 0 the resumed run is the one that was never stopped, prompts under way included."""

    def tokens(batch):
        return [(g.group_id, [t.tokens.tolist() for t in g.trajectories]) for g in batch]

    fleet = fake_fleet()
    whole = make(Limits(3, 0, 16), fleet=fleet)
    expected = []
    for step in range(6):
        publish(whole, fleet, step)
        expected.append(tokens(collect(whole)))

    fleet = fake_fleet()
    first = make(Limits(3, 0, 16), fleet=fleet)
    for step in range(3):
        publish(first, fleet, step)
        assert tokens(collect(first)) == expected[step]
    fleet.hold = True
    publish(first, fleet, 3)
    wait_for(lambda: first.counters()["running"] == 3)
    host, groups = held(first)
    assert [pair[0] for pair in host["pending"]] == [9, 10, 11]
    assert groups == []

    fleet = fake_fleet()
    second = make(Limits(3, 0, 16), fleet=fleet)
    second.restore(host, groups)
    for step in range(3, 6):
        publish(second, fleet, step)
        assert tokens(collect(second)) == expected[step]
    assert second.counters()["accepted"] == 18


def test_resume_keeps_finished_groups_and_trains_on_no_prompt_twice(make, fake_fleet):
    limits = Limits(3, 2, 64)
    fleet = fake_fleet()
    executor = make(limits, fleet=fleet)
    publish(executor, fleet, 0)
    seen = [g.group_id for g in collect(executor)]
    wait_for(lambda: executor.counters()["buffered"] == 6)
    publish(executor, fleet, 1)
    wait_for(lambda: executor.counters()["buffered"] == 9)
    host, groups = held(executor)
    assert len(groups) == 9

    fleet = fake_fleet()
    fleet.version = 1
    again = make(limits, fleet=fleet)
    again.restore(host, groups)
    for step in range(1, 9):
        publish(again, fleet, step)
        batch = collect(again)
        assert all(step - g.oldest_version <= 2 for g in batch)
        seen += [g.group_id for g in batch]
    assert set(seen) >= set(range(12))
    assert len(set(seen)) == 27
    assert again.counters()["dropped"] == 0


def texts(batch):
    return [(g.group_id, [t.tokens.tolist() for t in g.trajectories]) for g in batch]


@pytest.mark.parametrize("kills", [1, 3])
@pytest.mark.parametrize("eta", [0, 2])
@pytest.mark.parametrize("shares", [{}, {"easy": 0.1, "hard": 0.1}], ids=["all", "shares"])
def test_a_killed_run_repeats_its_batches_and_loses_no_finished_group(
    make, fake_fleet, fake_workflow, eta, kills, shares
):
    """From its last checkpoint, which is older than its last batches, again and again."""

    def misbehave(group_id, attempt):
        if group_id % 5 == 0 and attempt == 0:
            raise ValueError("the first time")
        return [1.0, 1.0] if group_id % 7 == 0 else [0.0, 1.0]

    notes, limits = Notes(), Limits(3, eta, 7)
    options = {"note": notes, "drop_equal_rewards": True, "patience": PRECISE}
    options["patience"] = Patience(pause=0.0, outage=30.0)
    options["shares"] = shares
    found, host, finished, rows = {}, None, set(), {}
    for attempt in range(kills + 1):
        fleet, step = fake_fleet(), 0
        executor = make(limits, fleet=fleet, workflow=fake_workflow(misbehave=misbehave), **options)
        if attempt:
            restored, groups = notes.after(host)
            assert {g.group_id for g in groups} == finished
            executor.restore(restored, groups)
            step = restored["step"]
            notes("start", {"order": step + executor.num_repeated, "whole": True, "rows": ""})
            assert executor.num_repeated == len(found) - step
        begun = step
        while step < begun + 5:
            publish(executor, fleet, step)
            batch = collect(executor)
            assert found.setdefault(step, texts(batch)) == texts(batch)
            assert all(step - g.oldest_version <= eta for g in batch)
            assert all(rows.setdefault(g.group_id, g.row) == g.row for g in batch)
            step += 1
            if step == begun + 2:
                host = executor.state()
        assert executor.counters()["dropped"] == 0
        executor.close()
        kept = [r.fields["group_id"] for r in notes.records if r.kind == "group"]
        taken = {g for k, batch in found.items() if k < host["step"] for g, _ in batch}
        finished = set(kept) - taken
        assert len(kept) == len(set(kept)), "a finished group was generated again"
    trained = [group_id for batch in found.values() for group_id, _ in batch]
    assert len(trained) == len(set(trained)) == 3 * len(found)
    drawn = {}  # a prompt keeps its row over kills
    for fields in (r.fields for r in notes.records if r.kind == "admit"):
        assert drawn.setdefault(fields["group_id"], fields.get("row")) == fields.get("row")
    assert shares or not any(row is not None for row in drawn.values())


def test_rows_that_teach_nothing_are_drawn_less(make, fake_fleet, fake_workflow):
    """Rows 0 to 5 are all right, 6 to 11 all wrong; the journal tells what a state would."""

    def rewards(group_id, attempt):
        row = executor._rows.index(group_id)
        return [float(row < 6)] * 2 if row < 12 else [0.0, 1.0]

    limits, shares = Limits(2, 1, 4), {"easy": 0.25, "hard": 0.5}
    fleet = fake_fleet()
    executor = make(limits, fleet=fleet, workflow=fake_workflow(misbehave=rewards), shares=shares)
    before, counts = executor.state(), np.zeros(17)
    for step in range(300):
        publish(executor, fleet, step)
        for group in collect(executor):
            counts[int(group.row["answer"])] += 1
    useful = counts[12:].mean()
    assert 0.15 < counts[:6].mean() / useful < 0.4
    assert 0.35 < counts[6:12].mean() / useful < 0.65
    assert np.ptp(counts[12:]) <= 2
    executor.close()
    after, _ = executor.notes.after(before)
    now, again = executor.state()["cursor"], cursor(shares=shares)
    again.load_state_dict(after["cursor"])
    found = again.state_dict()
    assert {key: found[key] for key in ("position", "place")} == {
        key: now[key] for key in ("position", "place")
    }
    assert dict(found["pools"]) == dict(now["pools"])
    assert dict(now["drawn"]).items() <= dict(found["drawn"]).items()
    assert executor.counters()["passed_rows"] == now["place"] - now["position"] > 100


def test_without_its_groups_a_checkpoint_generates_them_again(make, fake_fleet):
    """As after journal.keep=0, or damage: the prompts are not lost."""
    fleet = fake_fleet()
    executor = make(Limits(2, 2, 64), fleet=fleet)
    publish(executor, fleet, 0)
    seen = [g.group_id for g in collect(executor)]
    wait_for(lambda: executor.counters()["buffered"] == 4)
    host = executor.state()

    fleet = fake_fleet()
    again = make(Limits(2, 2, 64), fleet=fleet)
    again.restore(host, [])
    for step in range(1, 5):
        publish(again, fleet, step)
        seen += [g.group_id for g in collect(again)]
    assert set(seen) >= set(range(8))
    assert len(seen) == len(set(seen))
    assert again.counters()["dropped"] == 4


def test_resume_with_a_tighter_bound_generates_again(make, fake_fleet):
    fleet = fake_fleet()
    executor = make(Limits(2, 3, 64), fleet=fleet)
    publish(executor, fleet, 0)
    seen = [g.group_id for g in collect(executor)]
    wait_for(lambda: executor.counters()["buffered"] == 6)
    host, groups = held(executor)

    fleet = fake_fleet()
    again = make(Limits(2, 0, 64), fleet=fleet)
    again.restore(host, groups)
    assert again.counters()["dropped"] == 6
    for step in range(1, 5):
        publish(again, fleet, step)
        seen += [g.group_id for g in collect(again)]
    assert sorted(seen) == list(range(10))


def test_a_run_that_goes_on_has_the_running_means_of_before(make, fake_fleet):
    def baselines(batches):
        return [t.baseline for batch in batches for g in batch for t in g.trajectories]

    def begun(*kept):
        fleet = fake_fleet()
        executor = make(Limits(4, 0, 16), fleet=fleet, running_mean=0.95)
        if kept:
            executor.restore(*kept)
        return executor, fleet

    whole = []
    first, fleet = begun()
    for step in range(4):
        publish(first, fleet, step)
        whole.append(collect(first))
        if step == 1:
            first.loop.run(asyncio.sleep(0))
            kept = held(first)
    second, fleet = begun(*kept)
    again = []
    for step in (2, 3):
        publish(second, fleet, step)
        again.append(collect(second))
    assert baselines(again) == baselines(whole[2:])
    assert len(set(baselines(whole))) > 2


def test_the_number_of_live_prompts_changes_and_survives_a_kill(make, fake_fleet):
    limits = tunable_limits(Limits(4, 2, 0), 1)
    fleet = fake_fleet(turns=40)
    executor = make(limits, fleet=fleet)
    before = executor.state()
    assert before["concurrency"] == 12
    for number in (11, 10, 9, 8):
        assert executor.tune(0.5, 1000) == number
    assert executor.tune(0.5, -1) == 8, "no server: nothing is known"
    publish(executor, fleet, 0)
    wait_for(lambda: executor.counters()["admitted"] > 8)
    assert fleet.most_in_flight == 8
    executor.close()
    found = [r.fields for r in executor.notes.records if r.kind == "concurrency"]
    assert found == [{"prompts": n} for n in (11, 10, 9, 8)], "changes only"
    host, groups = executor.notes.after(before)  # killed before a checkpoint
    again = make(limits)
    again.restore(host, groups)
    assert again.state()["concurrency"] == 8
    fixed = make(Limits(4, 2, 5))
    fixed.restore(host, groups)
    assert fixed.state()["concurrency"] == 5, "what the command says"
    old = make(limits)
    old.restore({k: v for k, v in host.items() if k != "concurrency"}, groups)
    assert old.state()["concurrency"] == 12, "a checkpoint of an earlier rlx"


def test_restore_refuses_another_dataset_unless_it_is_allowed(make):
    executor = make(Limits(2, 0, 4))
    host, groups = held(executor)
    host["cursor"]["digest"] = "0"
    with pytest.raises(UserError, match=r"dataset's content changed.*data.allow_change=True"):
        executor.restore(host, groups)
    assert "dataset's content changed" in executor.restore(host, groups, allow_change=True)


def test_stop_admitting_lets_what_runs_finish(make, fake_fleet):
    fleet = fake_fleet()
    fleet.hold = True
    executor = make(Limits(2, 5, 64), fleet=fleet)
    publish(executor, fleet, 0)
    wait_for(lambda: executor.counters()["running"] == 12)
    executor.stop_admitting()
    fleet.hold = False
    wait_for(lambda: executor.counters()["buffered"] == 12)
    collect(executor)
    publish(executor, fleet, 1)
    executor.loop.run(asyncio.sleep(0))  # whatever the publish set going on the loop has begun
    assert executor.counters()["admitted"] == 12
    collect(executor)


def test_coroutines_run_on_the_loop_and_never_wait_for_themselves(make):
    executor = make(Limits(2, 0, 8))

    async def where():
        return threading.current_thread().name

    async def nested():
        return executor.loop.run(where())

    assert executor.loop.run(where()) == "executor"
    with pytest.raises(RuntimeError, match="wait for itself"):
        executor.loop.run(nested())


def test_counters_of_time(make, fake_fleet, fake_workflow):
    now = [0.0]
    fleet = fake_fleet()
    executor = Executor(fake_workflow(), cursor(), Limits(2, 0, 8), fleet, clock=lambda: now[0])
    try:
        executor.start()
        publish(executor, fleet, 0)
        wait_for(lambda: executor.counters()["buffered"] == 2)
        now[0] = 7.0  # seven seconds without a live prompt
        assert executor.counters()["idle_seconds"] == 7.0
        assert executor.counters()["wait_seconds"] == 0.0
        batch = collect(executor)
        tokens = sum(t.num_trained for g in batch for t in g.trajectories)
        assert executor.counters()["generated_tokens"] == tokens
    finally:
        executor.close()


def test_a_dead_thread_is_not_waited_for(make):
    executor = make(Limits(2, 0, 8))
    executor.close()
    with pytest.raises(RuntimeError, match="not running"):
        executor.collect(timeout=SECONDS)
    executor.close()


def test_close_cancels_what_is_under_way(make, fake_fleet):
    fleet = fake_fleet()
    fleet.hold = True
    executor = make(Limits(8, 3, 32), fleet=fleet)
    publish(executor, fleet, 0)
    wait_for(lambda: fleet.in_flight == 32)
    executor.close()
    assert fleet.in_flight == 0
    assert not executor.loop.alive


def test_ten_thousand_live_prompts(make, fake_fleet, fake_workflow):
    """The rules cost little beside the tasks themselves; generous for a loaded machine."""
    fleet = fake_fleet(turns=0)
    fleet.hold = True
    executor = make(Limits(500, 19, 10_000), fleet=fleet, workflow=fake_workflow(n=1))
    publish(executor, fleet, 0)
    wait_for(lambda: executor.counters()["running"] == 10_000, 10 * SECONDS)
    fleet.hold = False
    started = time.process_time()
    for _ in range(20):
        assert len(collect(executor)) == 500
    assert time.process_time() - started < 20.0
