"""The terminal's two faces, as strings: plain lines, and the panel at several widths."""

import io

import pytest
from rich.console import Console

from rlx.base import UserError
from rlx.observe.progress import Progress


class Clock:
    """Seconds that pass when told to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def record(make_run, tmp_path):
    """The records of a made-up run: `record(step)`."""
    from rlx.system.jsonl import read_jsonl

    records = list(read_jsonl(make_run(tmp_path / "run", steps=20) / "metrics.jsonl"))
    return lambda step: records[step - 1] | {"running": 5}


def terminal(width=80, **options):
    options = {"force_terminal": True, "color_system": None, "_environ": {}} | options
    return Console(file=io.StringIO(), width=width, height=30, legacy_windows=False, **options)


def panel(progress, console):
    """What the panel shows now, as lines."""
    with console.capture() as capture:
        console.print(progress._render())
    return capture.get().splitlines()


def test_without_a_terminal_each_step_is_one_line_of_named_values(record):
    console = Console(file=io.StringIO(), width=80)
    clock = Clock()
    with Progress(20, console, clock=clock) as progress:
        progress.phase("waiting")
        progress.message("listening on [::1]:80 [bold]")
        progress.update(record(1) | {"task_reward": 0.25, "step_seconds": 9.0})
        progress.evaluation({"step": 1, "greedy_acc": 0.5, "num_questions": 200, "version": 1})
        progress.update(record(2) | {"task_reward": None, "step_seconds": 2.0})
    message, first, evaluation, second = console.file.getvalue().splitlines()
    assert message == "listening on [::1]:80 [bold]", "markup in a message was interpreted"
    assert first.startswith("step 1/20  epoch 0  reward 0.250  staleness 0 (max 0)  tokens ")
    assert first.endswith("left –"), "one step, the compiling one, says nothing about the rest"
    assert evaluation.startswith("eval 1/20  greedy_acc 0.500  questions 200  version 1")
    assert "reward –  held-out 0.500" in second
    assert second.endswith("left 36 s"), "18 steps of the second step's 2 s"
    for name in ("generated/s", "trained/s", "seconds", "train ", "failed 0", "dropped 0"):
        assert name in second


def test_a_run_that_ended_or_hangs_still_has_its_steps_to_make(record):
    clock = Clock()
    progress = Progress(20, terminal(), clock=clock)
    for step in (1, 2):
        progress.update(record(step) | {"step_seconds": 2.0})
    clock.now += 1.0
    assert "left 35 s" in "\n".join(panel(progress, terminal())), "18 steps, one of them begun"
    clock.now += 86_400
    progress.phase("stopped")
    assert "left 34 s" in "\n".join(panel(progress, terminal()))


def test_messages_and_the_end_are_also_in_a_file(tmp_path):
    log = tmp_path / "console.log"
    for error in (UserError("no server answers; start one"), KeyboardInterrupt()):
        progress = Progress(20, terminal(), log=log)
        progress.message("listening on [::1]:80\x1b[2J")
        progress.__exit__(type(error), error, None)
    assert [line[20:] for line in log.read_text().splitlines()] == [
        "listening on [::1]:80⟨ESC⟩[2J", "ended by UserError: no server answers; start one",
        "listening on [::1]:80⟨ESC⟩[2J", "ended by KeyboardInterrupt: ",
    ]  # fmt: skip
    with Progress(20, terminal(), log=tmp_path / "nowhere" / "console.log") as progress:
        progress.message("a file that cannot be written ends nothing")


def test_the_panel_shows_everything_and_fits(record):
    console, clock = terminal(), Clock()
    progress = Progress(20, console, title="arithmetic", clock=clock)
    for step in range(1, 16):
        progress.update(record(step))
    progress.evaluation({"step": 10, "greedy_acc": 0.62})
    progress.phase("waiting for rollouts")
    clock.now += 3
    shown = panel(progress, console)
    text = "\n".join(shown)
    for part in ("rlx · arithmetic", "step 15/20", "75%", "epoch 0", "version 15", "elapsed",
                 "left", "reward", "held-out   0.620", "greedy, step 10", "staleness", "2 max",
                 "generated", "trained", "MFU", "wait", "train", "publish", "5 live",
                 "128 accepted", "1 rejected", "0 failed", "0 dropped",
                 "waiting for rollouts 3.00 s", "█"):  # fmt: skip
        assert part in text, part
    assert {len(line) for line in shown} == {80}, "the panel's edges are not straight"


PAIRS = {"step": 3, "pair_loss": 0.5, "pair_accuracy": 0.75, "pair_margin": 0.0, "n_tokens": 900}


def test_a_run_on_a_dataset_shows_its_losses_and_no_reward():
    console = Console(file=io.StringIO(), width=80)
    with Progress(20, console, clock=Clock()) as progress:
        progress.evaluation({"step": 0, "held_out_pair_loss": 0.7, "held_out_pair_accuracy": 0.5})
        progress.update(PAIRS)
    evaluation, step = console.file.getvalue().splitlines()
    wanted = "eval 0/20  held_out_pair_loss 0.700  held_out_pair_accuracy 0.500  questions"
    assert evaluation.startswith(wanted)
    wanted = "step 3/20  epoch 0  loss 0.500  accuracy 0.750  margin 0  held-out-loss 0.700  "
    assert step.startswith(f"{wanted}held-out-accuracy 0.500  tokens 900  trained/s")
    for word in ("reward", "staleness", "generated", "greedy"):
        assert word not in evaluation + step


def test_the_panel_of_a_run_on_a_dataset_has_both_held_out_numbers():
    console = terminal()
    progress = Progress(20, console, clock=Clock())
    progress.update({"step": 3, "sft_loss": 0.04, "n_tokens": 900})
    progress.evaluation({"step": 2, "greedy_acc": 0.9, "held_out_sft_loss": 0.03})
    text = "\n".join(panel(progress, console))
    for part in ("loss       0.0400", "held-out   0.900", "greedy, step 2", "held-out   0.0300",
                 "loss, step 2"):  # fmt: skip
        assert part in text, part
    assert "reward" not in text
    assert "staleness" not in text


@pytest.mark.parametrize("width", [30, 50, 79, 80, 200])
def test_the_panel_fits_every_width(record, width):
    console = terminal(width)
    progress = Progress(20, console, clock=Clock())
    empty = panel(progress, console)
    progress.update(record(1))
    progress.evaluation({"step": 1, "greedy_acc": None})
    for shown in (empty, panel(progress, console)):
        assert {len(line) for line in shown} == {min(width, 120)}


def test_the_panel_ends_by_saying_how(record):
    for last, error, word in ((20, None, "finished"), (12, None, "stopped"),
                              (12, KeyboardInterrupt, "interrupted")):  # fmt: skip
        console = terminal()
        try:
            with Progress(20, console, clock=Clock()) as progress:
                progress.message("a message above")
                progress.update(record(last))
                if error:
                    raise error
        except KeyboardInterrupt:
            pass
        written = console.file.getvalue()
        assert word in written
        assert "a message above" in written


def test_the_clock_of_the_rest_runs_between_steps(record):
    clock = Clock()
    progress = Progress(10, terminal(), clock=clock)
    for step in (1, 2):
        progress.update(record(step) | {"step_seconds": 4.0, "elapsed_seconds": 4.0 * step})
    clock.now += 3.0
    assert progress._remaining() == 8 * 4.0 - 3.0
    assert progress._elapsed() == 11.0
    clock.now += 1000
    assert progress._remaining() == 7 * 4.0, "a run that hangs, or has ended, has its steps to make"


def test_a_resumed_run_begins_where_it_was(record):
    clock, console = Clock(), terminal()
    progress = Progress(20, console, clock=clock)
    progress.begin = {"step": 15, "version": 15, "epoch": 2, "elapsed_seconds": 3600.0}
    clock.now += 60
    text = "\n".join(panel(progress, console))
    for part in ("step 15/20", "75%", "epoch 2 · version 15", "elapsed 1:01:00"):
        assert part in text
    progress.update(record(16) | {"elapsed_seconds": 3670.0})
    assert "elapsed 1:01:10" in "\n".join(panel(progress, console))


def test_a_terminal_without_unicode_gets_plain_lines(record):
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="replace")
    console = Console(file=file, force_terminal=True, width=80, color_system=None, _environ={})
    with Progress(20, console, clock=Clock()) as progress:
        progress.update(record(1))
    file.flush()
    assert file.buffer.getvalue().startswith(b"step 1/20  epoch 0  reward")
