"""submit, wait, export_stats and rollout_batch over an in-process fleet."""

import asyncio
import threading
from contextlib import ExitStack
from dataclasses import replace

import pytest

from rlx.base import UserError
from rlx.evaluation.runner import Evaluator
from rlx.fleet.requests import Sampling
from rlx.rollout.attempts import Patience, RolloutError, Skipped

ROWS = [{"question": f"q{i}", "answer": str(i)} for i in range(12)]


@pytest.fixture
def make(fake_fleet, fake_workflow):
    """evaluator(fleet=…, workflow=…, **options), started; all are closed at the end."""

    def build(*, fleet=None, workflow=None, **options):
        async def connect():
            return fleet or fake_fleet()

        return stack.enter_context(Evaluator(connect, workflow or fake_workflow(), **options))

    with ExitStack() as stack:
        yield build


def test_groups_come_in_the_order_of_their_rows(make, fake_fleet):
    fleet = fake_fleet(turns=40)
    evaluator = make(fleet=fleet, concurrency=5)
    groups = evaluator.rollout_batch(ROWS, n=3, timeout=30)
    assert [g.row for g in groups] == ROWS
    assert all(len(g.trajectories) == 3 for g in groups)
    assert 1 < fleet.most_in_flight <= 5


def test_a_row_has_the_same_seed_whatever_runs_beside_it(make):
    first = make(concurrency=1).rollout_batch(ROWS, timeout=30)
    second = make(concurrency=12).rollout_batch(ROWS, timeout=30)
    for a, b in zip(first, second, strict=True):
        assert [t.tokens.tolist() for t in a.trajectories] == [
            t.tokens.tolist() for t in b.trajectories
        ]


def test_wait_takes_the_oldest_and_can_be_called_again(make):
    evaluator = make()
    futures = [evaluator.submit(row) for row in ROWS]
    assert [g.group_id for g in evaluator.wait(5, timeout=30)] == list(range(5))
    assert [g.group_id for g in evaluator.wait(timeout=30)] == list(range(5, 12))
    assert all(future.done() for future in futures)
    with pytest.raises(ValueError, match="0 rows submitted"):
        evaluator.wait(1)


def test_a_wait_that_ends_too_early_loses_nothing(make, fake_fleet):
    fleet = fake_fleet()
    fleet.hold = True
    evaluator = make(fleet=fleet)
    evaluator.submit(ROWS[0])
    with pytest.raises(TimeoutError, match="0 of 1 rows"):
        evaluator.wait(timeout=0.05)
    fleet.hold = False
    assert len(evaluator.wait(timeout=30)) == 1


def test_statistics_are_of_what_finished_since_the_last_time(make):
    evaluator = make()
    evaluator.rollout_batch(ROWS[:4], n=2, timeout=30)
    stats = evaluator.export_stats()
    assert (stats["num_groups"], stats["num_trajectories"]) == (4, 8)
    assert stats["completion_tokens"] > 0
    assert evaluator.export_stats()["num_groups"] == 0


def test_a_run_of_several_rows_counts_once_by_its_own_reward(make, fake_workflow):
    class Agent:
        """Half of the runs have one row and the reward 1, the others three rows and 0."""

        async def run(self, fleet, task):
            group = await fake.run(fleet, task)
            one, two = group.trajectories
            rows = [replace(one, reward=1.0)]
            for i in range(3):
                name = f"{two.trajectory_id}.{i}"
                part = {"trajectory_id": name, "reward": 0.5, "info": {"run_reward": 0.0}}
                rows.append(replace(two, **part))
            return replace(group, trajectories=tuple(rows))

    fake = fake_workflow()
    evaluator = make(workflow=Agent())
    evaluator.rollout_batch(ROWS[:4], n=2, timeout=30)
    stats = evaluator.export_stats()
    assert (stats["num_trajectories"], stats["reward"], stats["reward_std"]) == (16, 0.5, 0.5)


def test_another_sampling_and_workflow_can_be_named(make, fake_fleet, fake_workflow):
    fleet = fake_fleet()
    evaluator = make(fleet=fleet)
    evaluator.submit(ROWS[0], sampling=Sampling(temperature=0.0), workflow=fake_workflow(n=5))
    (group,) = evaluator.wait(timeout=30)
    assert len(group.trajectories) == 5
    assert fleet.calls[0][1].temperature == 0.0


def test_failures_are_retried_and_then_raised_with_their_cause(make, fake_workflow):
    def once(group_id, attempt):
        if attempt == 0 and group_id == 2:
            raise ValueError("bad luck")

    quick = Patience(pause=0.0)
    workflow = fake_workflow(misbehave=once)
    assert len(make(workflow=workflow, patience=quick).rollout_batch(ROWS, timeout=30)) == 12

    def always(group_id, attempt):
        if group_id == 2:
            raise ValueError("no luck at all")

    with pytest.raises(Skipped, match="row 2: ValueError: no luck at all") as error:
        make(workflow=fake_workflow(misbehave=always), patience=quick).rollout_batch(
            ROWS, timeout=30
        )
    assert isinstance(error.value.__cause__, ValueError)


def test_one_row_that_fails_leaves_the_others_and_many_end_it(make, fake_workflow):
    def misbehave(group_id, attempt):
        if group_id in bad:
            raise ValueError("no luck at all")

    bad = {2}
    patience = Patience(pause=0.0, outage=0.0)
    evaluator = make(workflow=fake_workflow(misbehave=misbehave), patience=patience)
    futures = [evaluator.submit(row) for row in ROWS]
    assert [type(f.exception(30)) for f in futures] == [
        Skipped if i == 2 else type(None) for i in range(12)
    ]
    bad = set(range(40))
    futures = [evaluator.submit(row, group_id=i) for i, row in enumerate(ROWS * 3)]
    kinds = {type(f.exception(30)) for f in futures}
    assert RolloutError in kinds


def test_a_failed_row_is_reported_once_and_others_can_be_asked(make, fake_workflow):
    def misbehave(group_id, attempt):
        if group_id == 2:
            raise ValueError("no luck at all")

    evaluator = make(workflow=fake_workflow(misbehave=misbehave), patience=Patience(pause=0.0))
    with pytest.raises(Skipped, match="no luck at all"):
        evaluator.rollout_batch(ROWS[:4], timeout=30)
    assert evaluator.wait() == []
    assert len(evaluator.rollout_batch(ROWS[:4], timeout=30)) == 4


def test_an_outage_is_reported_with_its_end(make, fake_workflow):
    def misbehave(group_id, attempt):
        if attempt < 2:
            raise ConnectionError("the judge is down")

    said = []
    workflow, patience = fake_workflow(misbehave=misbehave), Patience(pause=0.01, outage=60.0)
    evaluator = make(workflow=workflow, patience=patience, say=said.append)
    assert len(evaluator.rollout_batch(ROWS, timeout=30)) == len(ROWS)
    begun, ended = said
    assert "rollouts failed; they are tried again for 60 s" in begun
    assert "the judge is down" in begun
    assert ended.startswith("rollouts succeed again, after ")


def test_a_users_mistake_is_not_retried(make, fake_workflow):
    def wrong(group_id, attempt):
        raise UserError("the prompt is too long")

    workflow = fake_workflow(misbehave=wrong)
    with pytest.raises(UserError, match="too long"):
        make(workflow=workflow).rollout_batch(ROWS[:1], timeout=30)
    assert workflow.attempts == {0: 0}


def test_a_group_that_is_none_names_the_workflow_not_the_runner(make, fake_workflow):
    workflow = fake_workflow(misbehave=lambda *_: [1.0, float("nan")])
    evaluator = make(workflow=workflow, patience=Patience(pause=0.0))
    with pytest.raises(
        RolloutError, match=r"workflow FakeWorkflow \(.*\) gave, for row .*, trajectory 0.1 with"
    ):
        evaluator.rollout_batch(ROWS[:1], timeout=30)


def test_a_fleet_that_cannot_be_reached_is_an_error_of_start(fake_workflow):
    async def connect():
        await asyncio.sleep(0)
        raise UserError("no server answers")

    with (
        pytest.raises(UserError, match="no server answers"),
        Evaluator(connect, fake_workflow()),
    ):
        pass


def test_a_workflow_that_cannot_be_closed_leaves_no_thread_and_no_fleet(fake_fleet, fake_workflow):
    closed = []

    class Fleet(fake_fleet):
        async def close(self):
            closed.append(self)

    class Workflow(fake_workflow):
        async def aclose(self):
            raise OSError("its processes do not end")

    async def connect():
        return Fleet()

    with (
        pytest.raises(OSError, match="do not end"),
        Evaluator(connect, Workflow()) as evaluator,
    ):
        assert evaluator.rollout_batch(ROWS[:1], timeout=30)
    assert len(closed) == 1
    assert "evaluator" not in {thread.name for thread in threading.enumerate()}
