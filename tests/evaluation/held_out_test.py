"""Held-out evaluations of a run: none ends it, none is lost where it stops."""

from types import SimpleNamespace

import pytest

from rlx.base import Unavailable
from rlx.config import default
from rlx.evaluation.held_out import HeldOut
from rlx.observe.timeline import Timeline
from rlx.rollout.attempts import Patience
from rlx.rollout.data import Cursor
from rlx.rollout.executor import Executor
from rlx.rollout.staleness import Limits

ROWS = [{"question": f"q{i}", "answer": str(i)} for i in range(5)]


@pytest.fixture
def make(fake_fleet, fake_workflow):
    """make(done, start, …) → (held_out, executor, what was said, what was skipped)."""
    executors = []

    def build(done=(), start=0, misbehave=None, fleet=None):
        config = default()
        config.eval.every_steps, config.total_steps = 10, 100
        config.rollout.max_attempts = 1
        workflow = fake_workflow(misbehave=misbehave)
        executor = Executor(
            workflow, Cursor(ROWS), Limits(2, 0, 4), fleet or fake_fleet(),
            patience=Patience(attempts=1),
        )  # fmt: skip
        executors.append(executor)
        executor.start()
        said, skipped = [], []
        inputs = SimpleNamespace(eval_rows=ROWS, held_out=[])
        held_out = HeldOut(
            config, inputs, done, start, Timeline(), lambda: 0.0, skipped.append, said.append
        )
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
    assert one["message"] == "it cannot be graded"
    assert not said


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
