"""Held-out evaluations of a run: none ends it, none is lost where it stops."""

import asyncio
import dataclasses
import re

import pytest

from rlx.base import Unavailable, UserError
from rlx.evaluation.held_out import CONCURRENCY, PRIORITY, HeldOut
from rlx.fleet.requests import Sampling
from rlx.observe.timeline import Timeline
from rlx.rollout.attempts import Patience
from rlx.rollout.data import Cursor
from rlx.rollout.executor import Executor
from rlx.rollout.staleness import Limits

ROWS = [{"question": f"q{i}", "answer": str(i)} for i in range(5)]
LIMITS, ONCE = Limits(2, 0, 4), Patience(attempts=1)
SECONDS = 30.0  # no wait in here takes so long unless something is broken


@pytest.fixture
def make(fake_fleet, fake_workflow):
    """make(done, start, …) → (held_out, executor, what was said, what was skipped)."""
    executors = []

    def build(
        done=(), start=0, misbehave=None, fleet=None, workflow=None, rows=ROWS,
        limits=LIMITS, patience=ONCE, **options,
    ):  # fmt: skip
        workflow = workflow or fake_workflow(misbehave=misbehave)
        executor = Executor(workflow, Cursor(ROWS), limits, fleet or fake_fleet())
        executors.append(executor)
        executor.start()
        said, skipped = [], []
        held_out = HeldOut(
            rows=rows, groups=[], sampling=Sampling(temperature=0.0, max_new_tokens=7),
            total_steps=100, patience=patience, timeout=30.0, done=set(done), start=start,
            owed=start - start % 10, timeline=Timeline(), elapsed=lambda: 0.0,
            on_skip=skipped.append, say=said.append, **options,
        )  # fmt: skip
        return held_out, executor, said, skipped

    yield build
    for executor in executors:
        executor.close()


def test_a_question_that_fails_scores_nothing_and_is_named(make):
    def misbehave(group_id, attempt):
        if group_id == 2:
            raise ValueError("it cannot be graded")
        return [1.0]

    held_out, executor, said, skipped = make(misbehave=misbehave)
    held_out.begin(0, executor)
    (record,) = held_out.take(None)
    assert (record["failed"], record["greedy_acc"]) == (1, 0.8)
    (one,) = skipped
    assert (one["which"], one["row"], one["step"], one["attempts"]) == ("eval", 2, 0, 1)
    assert re.fullmatch(r"it cannot be graded \(.*held_out_test\.py, line \d+\)", one["message"])
    assert not said


def test_sets_are_scored_by_name_with_samples_and_wait_in_line(make, fake_fleet, fake_workflow):
    """Half of the draws are right, and the second question of the set `b` fails."""

    class Graded:
        async def run(self, fleet, task):
            if task.row["question"] == "b1":
                raise ValueError("it cannot be graded")
            rewards = [0.0, 1.0, 0.0, 1.0] if task.sampling.temperature else [1.0]
            return await fake_workflow(misbehave=lambda *_: rewards).run(fleet, task)

    sets = {name: [{"question": f"{name}{i}", "answer": ""} for i in range(4)] for name in "ab"}
    fleet = fake_fleet()
    held_out, executor, _, skipped = make(
        fleet=fleet,
        workflow=Graded(),
        rows=[],
        sets=sets,
        random_sampling=Sampling(1.0),
        n_samples=4,
    )
    assert held_out.due(0)
    held_out.begin(0, executor)
    (record,) = held_out.take(SECONDS)
    assert (record["a/greedy_acc"], record["a/sample_acc"], record["a/pass@4"]) == (1, 0.5, 1)
    assert (record["b/greedy_acc"], record["b/sample_acc"], record["b/failed"]) == (0.75, 0.375, 1)
    assert record["a/num_questions"] == 4
    assert 0 < record["a/seconds"] <= record["seconds"]
    assert "greedy_acc" not in record
    assert {call[3] for call in fleet.calls} == {0}  # none goes before training's prompts
    assert [(skip["set"], skip["row"]) for skip in skipped] == [("b", 1)] * 2


def test_a_run_of_several_rows_counts_once_and_questions_have_draws_of_their_own(
    make, fake_workflow
):
    seeds = set()

    class Agent:
        """Of two runs one is right, in a row; the other is wrong, in three."""

        async def run(self, fleet, task):
            seeds.add(task.seed)
            rewards, asked = [1.0, 0.0, 0.0, 0.0], dataclasses.replace(task, n=4)
            group = await fake_workflow(misbehave=lambda *_: rewards).run(fleet, asked)
            ids = (f"{task.group_id}.{part}" for part in ("0", "1.0", "1.1", "1.2"))
            pairs = zip(group.trajectories, ids, strict=True)
            rows = tuple(dataclasses.replace(t, trajectory_id=name) for t, name in pairs)
            return dataclasses.replace(group, trajectories=rows)

    held_out, executor, *_ = make(workflow=Agent(), random_sampling=Sampling(1.0), n_samples=2)
    held_out.begin(0, executor)
    (record,) = held_out.take(SECONDS)
    assert (record["sample_acc"], record["pass@2"], record["failed"]) == (0.5, 1, 0)
    assert len(seeds) == len(ROWS)


def test_an_evaluation_that_cannot_be_made_is_told_of_and_stays_due(make):
    def misbehave(group_id, attempt):
        raise Unavailable("no rollout server alive for 300 s")

    held_out, executor, said, skipped = make(misbehave=misbehave)
    held_out.begin(0, executor)
    assert list(held_out.take(None)) == []
    assert said == ["no evaluation of step 0: Unavailable: no rollout server alive for 300 s"]
    assert held_out.due(0)
    assert not skipped


def test_a_run_that_stops_waits_for_an_evaluation_but_not_for_ever(make, fake_fleet):
    fleet = fake_fleet()
    fleet.hold = True
    held_out, executor, *_ = make(fleet=fleet)
    held_out.begin(0, executor)
    assert list(held_out.take(0.05)) == []
    assert held_out.under_way == [0]
    fleet.hold = False
    (record,) = held_out.take(30.0)
    assert (record["step"], record["failed"]) == (0, 0)


def test_an_evaluation_during_training_has_its_own_counters(make, fake_fleet):
    fleet = fake_fleet(turns=20)
    rows = [{"question": f"e{i}", "answer": str(i)} for i in range(40)]
    held_out, executor, *_ = make(fleet=fleet, rows=rows, limits=Limits(4, 1, 8))
    executor.set_version(0)
    held_out.begin(0, executor)
    for step in range(10):
        assert executor.collect(timeout=SECONDS)
        fleet.version = step + 1
        executor.set_version(step + 1)
    (record,) = held_out.take(SECONDS)
    assert (record["num_questions"], record["failed"]) == (40, 0)
    assert 0 <= record["version_end"] <= 10
    assert record["greedy_acc"] in (0.0, 1.0)  # all are one draw
    assert record["mean_tokens"] >= 1
    calls = [call for call in fleet.calls if call[3] == PRIORITY]
    assert len(calls) == 40
    assert all(n == 1 and s.temperature == 0 for _, s, n, _ in calls)
    counters = executor.counters()
    assert counters["accepted"] == 40 + counters["buffered"]
    assert counters["failed"] == 0
    assert fleet.most_in_flight <= 8 + CONCURRENCY


def test_evaluations_go_on_while_no_prompt_is_admitted_and_after(make):
    held_out, executor, *_ = make()
    held_out.add(10)
    for step in (0, 10):
        held_out.begin(step, executor)
        (record,) = held_out.take(SECONDS)
        assert record["failed"] == 0
        executor.stop_admitting()


def test_a_question_that_fails_is_asked_again_and_then_scores_nothing(make, fake_workflow):
    """No number of them ends an evaluation: training is not to die of what only measures it."""

    def misbehave(group_id, attempt):
        if (group_id == 1 and attempt < 2) or group_id in range(3, 12):
            raise UserError(f"question {group_id}") if group_id == 3 else OSError("no judge")
        if group_id == 12:
            raise asyncio.CancelledError
        return [1.0]

    workflow, rows = fake_workflow(misbehave=misbehave), ROWS * 3 + ROWS[:2]
    patience = Patience(pause=0.0, outage=0.0)
    held_out, executor, said, skipped = make(workflow=workflow, rows=rows, patience=patience)
    held_out.begin(0, executor)
    (record,) = held_out.take(SECONDS)
    assert (record["failed"], record["greedy_acc"]) == (10, 7 / 17)
    assert sorted(r["row"] for r in skipped) == list(range(3, 13))
    (third,) = (r["message"] for r in skipped if r["row"] == 3)
    assert re.fullmatch(r"question 3 \(.*held_out_test\.py, line \d+\)", third)
    assert [workflow.attempts[i] + 1 for i in (0, 1, 3, 12)] == [1, 3, 3, 3]
    assert executor.counters()["failed"] == 0
    assert not said


@pytest.mark.parametrize(
    ("done", "start", "due"),
    [
        ([], 0, True),
        ([], 7, True),  # stopped while step 0 was evaluated
        ([0], 7, False),
        ([0, 10], 27, True),  # that of step 20 is missing, and its weights are gone
        ([0, 10, 20], 27, False),
        ([0, 10, 27], 29, False),  # 27 stood in for 20
        ([0, 10], 20, True),
        ([0, 10, 20], 20, False),
    ],
)
def test_a_continuation_makes_up_for_an_evaluation_that_was_cut_off(make, done, start, due):
    held_out, *_ = make(done, start)
    assert held_out.due(start) is due
    assert not held_out.due(start + 1 if (start + 1) % 10 else start + 2)
