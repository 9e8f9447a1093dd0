"""How the loop ends when something fails: what is saved then, and what is said."""

import itertools
from concurrent.futures import Future
from pathlib import Path
from threading import Event, Timer
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from rlx import config as config_lib
from rlx.base import DiskFull, UserError
from rlx.fleet.client import Fleet
from rlx.run.auto_values import Precision
from rlx.run.frequency import KINDS, Position
from rlx.run.loop import FRUITLESS, _Loop

DISAGREE = UserError("gate: engine and trainer disagree")

WHOLE = {"n_valid_tokens": 1, "n_tokens": 1}


class NewcomersGate:
    """A gate that one server has not passed yet; `error` is its verdict."""

    asked, newcomers = False, True

    def __init__(self, error=None):
        self.error = error

    def ask(self, version, publish):
        self.asked = True

    def verdict(self, *_):
        self.asked = self.newcomers = False
        if self.error:
            raise self.error


@pytest.fixture
def loop():
    """loop(gate) → a loop at step 0 whose parts only note what they are asked."""

    def make(gate=None):
        config = config_lib.default()
        config.total_steps, config.eval.num_questions = 3, 0
        parts = MagicMock(
            config=config, gate=gate, stop=Event(), initial=Position(), turns=None,
            last=dict.fromkeys(KINDS, Position()), precision=Precision({}, "", 1, 0.0),
        )  # fmt: skip
        parts.inputs.algorithm = SimpleNamespace(data="rollouts")
        parts.fleet = Fleet.__new__(Fleet)
        parts.held_out.due.return_value, parts.held_out.under_way = False, []
        return _Loop(parts, state=object(), step=0)

    return make


def run_steps(loop):
    """Run the loop to its end as `rlx.run.loop.run` does."""
    with loop.save_on_failure():
        for groups in loop.batches():
            loop.train(groups)
    return loop.finish()


def steps_at_once(loop, monkeypatch):
    """A loop whose batches are ready and whose updates take no time."""
    made = loop()
    made.executor.collect.side_effect = lambda timeout: [MagicMock(group_id=0)]
    made.executor.counters.side_effect = lambda: {"generated_tokens": 1}
    made.parts.inputs.train_rows = [{}]
    made.parts.elapsed.return_value = 1.0
    made.parts.update.update.return_value = object(), dict(WHOLE)
    monkeypatch.setattr(made, "_publish", lambda: None)
    monkeypatch.setattr(made, "_drain_engine_spans", lambda *_: 0.0)
    return made


def test_a_newcomer_is_checked_before_a_batch_is_taken(loop):
    """It was asked nothing, so that the batches there are have no token of it."""
    made = loop(NewcomersGate())

    def collect(timeout):
        assert not made.gate.newcomers
        made.parts.stop.set()

    made.executor.collect.side_effect = collect
    assert made._collect() is None
    made.executor.collect.assert_called_once()


def test_servers_that_all_disagree_end_the_run_before_a_batch_is_taken(loop, monkeypatch):
    made, saves = loop(NewcomersGate(DISAGREE)), []
    monkeypatch.setattr(made, "_save", lambda: saves.append(made.step))
    with pytest.raises(UserError, match="disagree"):
        run_steps(made)
    assert (made.executor.collect.called, saves) == (False, [])


def test_a_full_disk_does_not_hide_what_ended_the_run(loop, monkeypatch):
    made = loop()
    made.saves.step = -1
    made.executor.collect.side_effect = UserError("no server is left")

    def full():
        raise DiskFull("no disk space for a checkpoint")

    monkeypatch.setattr(made, "_save", full)
    with pytest.raises(UserError, match="no server is left"):
        run_steps(made)
    said = [call.args[0] for call in made.progress.message.call_args_list]
    assert said == ["no disk space for a checkpoint; training continues until the next save"]


def test_a_second_interrupt_waits_for_no_save_under_way(loop):
    made, end = loop(), Event()
    saving = made.saves.disk.submit(end.wait)
    made.close(KeyboardInterrupt)
    assert not saving.done()
    end.set()


def test_a_step_that_is_done_at_once_is_recorded_before_the_next(loop, monkeypatch):
    """Else its record would have the next one's time, and the next one's none."""
    made, order = steps_at_once(loop, monkeypatch), []
    monkeypatch.setattr("rlx.run.loop.BUSY_SECONDS", 60.0)
    made.writer.write.side_effect = lambda name, record: order.append(f"record {record['step']}")

    def update(state, groups):
        order.append("update")
        return state, dict(WHOLE)

    made.parts.update.update.side_effect = update
    monkeypatch.setattr(made, "_save_due", lambda: False)
    monkeypatch.setattr(made, "finish", lambda: None)
    run_steps(made)
    assert order[:5] == ["update", "record 1", "update", "record 2", "update"]


@pytest.mark.parametrize(("own", "asked", "queued"), [(64, [], 0), (0, [], 5), (0, [2], -1)])
def test_each_step_shows_its_waiting_to_the_number_of_live_prompts(
    loop, monkeypatch, own, asked, queued
):
    """Unless that is fixed; the queue is unknown while questions of an evaluation wait in it."""
    made = steps_at_once(loop, monkeypatch)
    made.config.rollout.max_concurrent_rollouts = own
    made.held_out.under_way = asked
    made.held_out.take.return_value = []
    made.fleet.drain_queue = lambda: 5
    made.executor.tune.side_effect = lambda waited, queued: 40 + queued
    monkeypatch.setattr(made, "_save_due", lambda: False)
    monkeypatch.setattr(made, "finish", lambda: None)
    run_steps(made)
    found = [call.args[1] for call in made.writer.write.call_args_list]
    assert len(found) >= 2
    if own:
        assert not made.executor.tune.called
        assert all("max_concurrent_rollouts" not in record for record in found)
    else:
        assert all(record["max_concurrent_rollouts"] == 40 + queued for record in found)
        assert all(0 <= call.args[0] <= 1 for call in made.executor.tune.call_args_list)


@pytest.mark.parametrize(("trainer", "first"), [("jax", "train, compiling"), ("torch", "train")])
def test_the_first_step_says_that_it_compiles(loop, monkeypatch, trainer, first):
    made = steps_at_once(loop, monkeypatch)
    made.config.trainer = trainer
    made = _Loop(made.parts, state=object(), step=0)
    for _ in range(2):
        with made._phase("train", step=1):
            pass
        made.compiles = False  # as a record leaves it
    phases = [call.args[0] for call in made.progress.phase.call_args_list]
    assert phases == [first, "train"]


def test_a_step_whose_record_cannot_be_written_is_in_no_checkpoint(loop, monkeypatch):
    """Who goes on after such a checkpoint would never have the record."""
    made, saves = steps_at_once(loop, monkeypatch), []
    full = UserError("cannot write metrics.jsonl: No space left on device")
    made.writer.write.side_effect = full
    monkeypatch.setattr(made, "_save", lambda: saves.append(made.step))
    with pytest.raises(UserError, match="No space left"):
        run_steps(made)
    assert (made.step > 0, saves) == (True, [])


@pytest.mark.parametrize(("fails", "saved"), [("journal.check", [1]), ("write_rollouts", [])])
def test_no_checkpoint_has_a_step_without_a_record(loop, monkeypatch, fails, saved):
    made, saves, recorded = steps_at_once(loop, monkeypatch), [], []

    def fail_after_a_step(*_):
        if made.step:
            raise UserError("No space left")

    monkeypatch.setattr("rlx.run.loop.run_records.transcripts", lambda *_: [])
    made.writer.write.side_effect = lambda name, record: recorded.append(record["step"])
    failing = {"journal.check": made.parts.journal.check}.get(fails, made.writer.write_rollouts)
    failing.side_effect = fail_after_a_step
    monkeypatch.setattr(made, "_save_due", lambda: False)
    monkeypatch.setattr(made.saves, "save", lambda state, now: saves.append(now.step))
    with pytest.raises(UserError, match="No space left"):
        run_steps(made)
    assert (saves, set(saves) - set(recorded)) == (saved, set())


def test_a_stopped_run_saves_although_its_journal_cannot_be_written(loop, monkeypatch):
    made, saves = loop(), []
    made.parts.journal.check.side_effect = UserError("cannot write")
    monkeypatch.setattr(made.saves, "save", lambda state, now: saves.append(now.step))
    with pytest.raises(UserError, match="cannot write"):
        made.finish()
    assert saves == [0]


def test_a_checkpoint_counts_no_export_that_is_still_written(loop, monkeypatch):
    """A kill would lose this export: the run that goes on would wait for the next one."""
    made, hosts, written = loop(), [], Future()
    saves, saved = made.saves, Future()
    saved.set_result([7])
    made.parts.export.save.return_value, made.parts.export.write.return_value = [saved], written

    def begin(directory, step, begin_state, size, host, **_):
        hosts.append(host)
        return lambda: Path(f"step_{step:08d}")

    monkeypatch.setattr("rlx.run.saves.checkpoint.begin", begin)
    monkeypatch.setattr("rlx.run.saves.memory.exported", lambda sizes: 0)
    monkeypatch.setattr("rlx.run.saves.disk_warning", lambda *_: "")
    monkeypatch.setattr(saves, "show", lambda: None)
    made.config.export.every_steps = 4
    assert saves.due("export", Position(step=4))
    saves.export(object(), Position(step=4))
    saves.save(object(), Position(step=5))
    written.set_result(None)
    saves.save(object(), Position(step=6))
    assert [host["positions"]["export"]["step"] for host in hosts] == [0, 4]


@pytest.mark.parametrize(
    ("metrics", "why"),
    [
        ({"skipped_updates": 1.0, "grad_norm": float("nan")}, "norm is nan, so no update was made"),
        ({"sft_loss": float("nan")}, "sft_loss is nan"),
        ({"pair_loss": float("inf"), "skipped_updates": 1.0}, "pair_loss is inf"),
        ({"n_valid_tokens": 0}, "no token was left to train on"),
    ],
)
@pytest.mark.parametrize("total", [3, 20])
def test_steps_in_a_row_that_teach_nothing_end_the_run_unsaved(
    loop, monkeypatch, metrics, why, total
):
    made, saves = steps_at_once(loop, monkeypatch), []
    made.config.total_steps = total
    made.parts.update.update.side_effect = lambda *_: (object(), WHOLE | metrics)
    monkeypatch.setattr(made, "_save_due", lambda: False)
    monkeypatch.setattr(made.saves, "save", lambda state, now: saves.append(now))
    last = min(total, FRUITLESS)
    with pytest.raises(
        UserError, match=f"the last {last} steps, up to {last}, taught nothing: .*{why}"
    ):
        run_steps(made)
    assert not saves


def test_steps_that_teach_nothing_now_and_then_end_no_run(loop, monkeypatch):
    made = steps_at_once(loop, monkeypatch)
    made.config.total_steps, made.config.train.minibatches = 3 * FRUITLESS, 2
    steps = itertools.count()

    def update(state, groups):
        n = next(steps)
        bad = 1 + (n % FRUITLESS > 0)  # all but one of FRUITLESS make no update
        return state, WHOLE | {"skipped_updates": bad, "grad_norm": float("nan")}

    made.parts.update.update.side_effect = update
    monkeypatch.setattr(made, "_save_due", lambda: False)
    monkeypatch.setattr(made, "finish", lambda: (made.step, True))
    assert run_steps(made) == (3 * FRUITLESS, True)


@pytest.mark.parametrize(("step", "sent"), [(2, []), (3, [3])])
def test_only_a_complete_run_publishes_after_a_signal(loop, step, sent):
    """Its last evaluation would be of older weights, and no resumed run would make another."""
    made, published, earlier = loop(), [], Future()
    made.step, made.publishing = step, earlier
    made.parts.stop.set()
    made.parts.export.publish.side_effect = lambda *_: published.append(made.step)
    timer = Timer(0.5, earlier.set_result, [None])
    timer.start()
    made._publish()
    timer.join()
    assert published == sent
