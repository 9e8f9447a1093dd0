"""Which tokens the teacher's logprobs land on, and what becomes of a teacher that cannot answer."""

import asyncio
import dataclasses

import numpy as np
import pytest

from rlx.base import UserError
from rlx.fleet.requests import Sampling
from rlx.rollout.staleness import Limits
from rlx.rollout.teacher_scores import TeacherScored
from rlx.rollout.workflows import Task

ROW = {"question": "2 + 2?"}


class Script:
    """A teacher whose score of a token is −token − temperature; 99 and what precedes `first` show
    where it was not asked."""

    def __init__(self, error=None):
        self.asked, self.error = [], error

    async def score(self, tokens, first, *, temperature=1.0):
        self.asked.append((len(tokens), first, temperature))
        await asyncio.sleep(0)
        if self.error:
            raise self.error
        scores = -tokens.astype(np.float32) - temperature
        scores[:first] = 0
        return scores


def run(workflow, fleet, **options):
    return asyncio.run(workflow.run(fleet, Task(ROW, 4, 7, **options)))


def test_every_sampled_token_has_the_teachers_logprob_and_no_other_one(fake_workflow, fake_fleet):
    teacher, plain = Script(), fake_workflow(n=3)
    group = run(TeacherScored(plain, teacher, 0.7), fake_fleet())
    alone = run(fake_workflow(n=3), fake_fleet())
    assert (group.group_id, group.row, len(group.trajectories)) == (4, ROW, 3)
    for found, was in zip(group.trajectories, alone.trajectories, strict=True):
        assert found.reference_logprobs.dtype == np.float32
        wanted = np.where(was.loss_mask, -was.tokens - np.float32(0.7), 0)
        np.testing.assert_allclose(found.reference_logprobs, wanted, rtol=1e-6)
        np.testing.assert_array_equal(found.tokens, was.tokens)
        assert (found.reward, found.trajectory_id) == (was.reward, was.trajectory_id)
    assert teacher.asked == [(len(t.tokens), 3, 0.7) for t in alone.trajectories]


class Turns:
    """A workflow that gives a trajectory with observations between, and one without any sample."""

    def __init__(self, fake):
        self.fake = fake

    async def run(self, fleet, task):
        group = await self.fake.run(fleet, task)
        one = group.trajectories[0]
        mask = np.array([0, 0, 1, 0, 0, 1, 1, 0], bool)
        gaps = dataclasses.replace(
            one, tokens=np.arange(8, dtype=np.int32), loss_mask=mask,
            behaviour_logprobs=-mask.astype(np.float32), versions=np.where(mask, 0, -1),
        )  # fmt: skip
        none = dataclasses.replace(gaps, loss_mask=mask & False, trajectory_id="4.1")
        return dataclasses.replace(group, trajectories=(gaps, none))


def test_observations_between_get_zeros_and_a_trajectory_without_samples_is_not_sent(
    fake_workflow, fake_fleet
):
    teacher = Script()
    taught = TeacherScored(Turns(fake_workflow()), teacher, 1.0)
    one, none = run(taught, fake_fleet()).trajectories
    assert one.reference_logprobs.tolist() == [0, 0, -3, 0, 0, -6, -7, 0]
    assert none.reference_logprobs.tolist() == [0] * 8
    assert teacher.asked == [(8, 2, 1.0)]


def test_evaluations_are_not_scored(fake_workflow, fake_fleet, fake_executor):
    teacher = Script()
    executor = fake_executor(TeacherScored(fake_workflow(), teacher, 1.0), fake_fleet())
    try:
        greedy = Task(ROW, 0, 0, Sampling(temperature=0.0))
        evaluation = executor.workflow.run(executor.fleet, greedy)
        assert executor.loop.run(evaluation).trajectories
        assert not teacher.asked
        executor.set_version(0)
        (group,) = executor.collect(timeout=20)
        assert teacher.asked
        assert all(t.reference_logprobs is not None for t in group.trajectories)
    finally:
        executor.close()


@pytest.fixture
def fake_executor():
    from rlx.rollout.attempts import Patience
    from rlx.rollout.data import Cursor
    from rlx.rollout.executor import Executor

    def make(workflow, fleet):
        patience = Patience(pause=0.0, outage=0.0)
        rows, limits = Cursor([ROW], 0, False), Limits(1, 0, 1)
        executor = Executor(workflow, rows, limits, fleet, seed=0, patience=patience)
        executor.start()
        return executor

    return make


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("token 9 is out"), "the teacher refuses trajectory 4.0: token 9 is out"),
        (UserError("no rollout server alive"), "the teacher: no rollout server alive"),
    ],
)
def test_a_teacher_that_cannot_answer_ends_the_run_with_one_line(
    fake_workflow, fake_fleet, fake_executor, error, said
):
    with pytest.raises(UserError, match=said):
        run(TeacherScored(fake_workflow(n=1), Script(error), 1.0), fake_fleet())
    executor = fake_executor(TeacherScored(fake_workflow(n=1), Script(error), 1.0), fake_fleet())
    try:
        executor.set_version(0)
        with pytest.raises(UserError, match=r"^the teacher"):
            executor.collect(timeout=20)
    finally:
        executor.close()


def test_a_teacher_that_gives_no_numbers_ends_the_run(fake_workflow, fake_fleet):
    class Broken(Script):
        async def score(self, tokens, first, *, temperature=1.0):
            return np.full(len(tokens), np.nan, np.float32)

    with pytest.raises(UserError, match=r"trajectory 4.0 scores that are not finite"):
        run(TeacherScored(fake_workflow(n=1), Broken(), 1.0), fake_fleet())
