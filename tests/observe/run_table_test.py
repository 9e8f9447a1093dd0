"""A table of runs says what their files say, of whole, running, killed and damaged ones."""

import io
import json
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from rich.console import Console

from rlx.base import UserError
from rlx.observe import run_table as rows
from rlx.observe.metrics import STARTS, note_failure
from rlx.observe.run_status import STATUS, status
from rlx.system.jsonl import append_jsonl
from rlx.system.workdir_lock import lock_workdir

DEFAULTS = {"seed": 0, "total_steps": 9, "optimizer": {"learning_rate": 1e-6, "b2": 0.99}}


def starts(workdir, command="", **config):
    """Add a start, with the command line of its process."""
    about = {"config": {**DEFAULTS, **config}, "environment": {"command": command}}
    append_jsonl(workdir / STARTS, {"start": 1, "step": 0, **about})


def row(workdir):
    return SimpleNamespace(**rows.summary(workdir, DEFAULTS))


@pytest.fixture
def run(make_run, tmp_path):
    return make_run(tmp_path / "runs" / "one", steps=40)


@pytest.mark.parametrize(
    ("command", "file", "changed"),
    [
        ("python -m rlx.main --config=configs/arithmetic.py --config.seed=3 "
         "--config.optimizer.b2=0.9", "arithmetic", {"optimizer.b2": "0.9"}),
        ("rlx train --config rlx:gsm8k:dapo --workdir=x", "gsm8k:dapo", {}),
        ("python train.py", "", {"optimizer.learning_rate": "0.01"}),
        ("python -m rlx.main --config='half", "", {"optimizer.learning_rate": "0.01"}),
    ],
)  # fmt: skip
def test_a_row_names_the_config_and_what_the_command_line_changes(tmp_path, command, file, changed):
    starts(tmp_path, command, seed=3, optimizer={"learning_rate": 0.01, "b2": 0.99})
    found = row(tmp_path)
    assert (found.config or "", found.seed, found.total) == (file, 3, 9)
    assert found.changed == (changed if file else changed | {"seed": "3"})


def test_a_row_has_the_last_and_the_best_held_out_value(run):
    for step, accuracy in ((50, 0.99), (60, 0.5), (70, None)):
        append_jsonl(run / "eval.jsonl", {"step": step, "greedy_acc": accuracy})
    found = row(run)
    assert (found.metric, found.held_out, found.best, found.best_step) == ("greedy", None, 0.99, 50)
    assert found.step == 40
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert found.minutes == last["elapsed_seconds"] / 60
    (run / "eval.jsonl").unlink()
    for step, loss in ((1, 0.2), (2, 0.1), (3, 0.3)):
        append_jsonl(run / "eval.jsonl", {"step": step, "held_out_sft_loss": loss})
    found = row(run)
    assert (found.metric, found.held_out, found.best, found.best_step) == ("loss", 0.3, 0.1, 2)


def test_the_state_is_that_of_the_lock_and_of_the_last_note(run):
    assert (row(run).state, row(run).note) == ("unknown", "no end recorded")
    append_jsonl(run / STARTS, {"step": 40, "ended": "finished"})
    assert row(run).state == "finished"
    with lock_workdir(run):
        assert (row(run).state, row(run).note) == ("running", f"process {os.getpid()}")
    starts(run)
    assert row(run).state == "unknown", "the end before it is not its own"
    note_failure(run, ValueError, ValueError("no such\nfile"), None)
    assert (row(run).state, row(run).note) == ("failed", "ValueError: no such file")
    note_failure(run, KeyboardInterrupt, KeyboardInterrupt(), None)
    assert row(run).state == "stopped"
    before = (run / STARTS).read_bytes()
    note_failure(run, None, None, None)
    assert (run / STARTS).read_bytes() == before


def test_a_killed_process_leaves_a_stopped_run(run):
    hold = (
        "import sys, pathlib\nfrom rlx.system.workdir_lock import lock_workdir\n"
        "with lock_workdir(pathlib.Path(sys.argv[1])): print(flush=True); input()"
    )
    words = [sys.executable, "-c", hold, str(run)]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdout.readline()
    assert (row(run).state, row(run).note) == ("running", f"process {process.pid}")
    process.kill()
    process.communicate()
    assert (row(run).state, row(run).note) == ("stopped", f"process {process.pid} was killed")
    assert (run / "running.json").exists()


def test_another_host_is_alive_while_it_updates_its_file(run):
    path = run / "running.json"
    path.write_text(json.dumps({"pid": 7, "begun": "1", "machine": "node3 another-boot"}))
    assert row(run).state == "running"
    os.utime(path, (time.time() - 90,) * 2)
    assert row(run).state == "stopped"


def test_damaged_and_half_written_directories_are_rows_that_say_so(run):
    whole = row(run).note
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"step": 41, "task_re')  # a killed process leaves half a line
    (run / "config.json").write_text('{"seed": ')
    assert row(run).note == f"{whole}; config.json is missing or damaged"
    assert row(run).step == 40
    (run / "metrics.jsonl").write_text('{"step": 1}\n')
    assert row(run).note.endswith("metrics.jsonl is damaged: it ends at step 1, eval.jsonl goes on")
    for name in ("config.json", "metrics.jsonl", "eval.jsonl"):
        (run / name).unlink()
    (run / STARTS).write_text('[]\n{"start": 1, "config": 3, "environment": []}\n')
    found = row(run)
    assert (found.step, found.seed, found.held_out, found.minutes) == (0, None, None, None)
    assert "config.json is missing" in found.note
    assert "config.json is missing" in "\n".join(rows.table([vars(found)]))


def test_runs_are_found_below_directories_and_not_inside_of_runs(make_run, tmp_path):
    for name in ("b/deep/one", "a", ".hidden"):
        make_run(tmp_path / name, steps=1)
    make_run(tmp_path / "a" / "code" / "copy", steps=1)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    found = [path.relative_to(tmp_path).as_posix() for path in rows.find([tmp_path])]
    assert found == ["a", "b/deep/one"]
    with pytest.raises(UserError, match="nowhere is not a directory; give a WORKDIR"):
        rows.find([tmp_path / "nowhere"])


def test_rows_are_sorted_by_field_or_by_changed_key(tmp_path):
    for name, best, rate in (("a", 0.5, "1e-5"), ("b", 0.9, "1e-4"), ("c", None, "")):
        flag = f"--config.optimizer.learning_rate={rate}" if rate else ""
        starts(tmp_path / name, f"rlx train --config=x.py {flag}")
        if best:
            append_jsonl(tmp_path / name / "eval.jsonl", {"step": 1, "greedy_acc": best})
    found = [vars(row(path)) for path in rows.find([tmp_path])]

    def order(key):
        return "".join(one["run"][-1] for one in rows.sorted_rows(found, key))

    assert (order("run"), order("best"), order("optimizer.learning_rate")) == ("abc", "bac", "bac")
    with pytest.raises(UserError, match="unknown --sort 'bests'; did you mean 'best'"):
        rows.sorted_rows(found, "bests")
    lines = rows.table([one | {"changed": one["changed"] | {"seed": "7"}} for one in found])
    assert lines[-4] == "all: seed=7"
    assert lines[0].split()[:4] == ["run", "state", "config", "changed"]
    assert "optimizer.learning_rate=1e-4" in lines[2]
    assert lines[2].split()[-3:] == ["0.900", "@1", "–"]


def test_changed_keys_are_sorted_as_numbers(tmp_path):
    for name, value in (("a", "2"), ("b", "10"), ("c", "8")):
        starts(tmp_path / name, f"rlx train --config=x.py --config.rollout.max_staleness={value}")
    found = [vars(row(path)) for path in rows.find([tmp_path])]
    order = [one["run"][-1] for one in rows.sorted_rows(found, "rollout.max_staleness")]
    assert order == ["b", "c", "a"], "the largest first"
    found[0]["changed"]["train.row_buckets"] = [192]  # of a run without a command line
    assert len(rows.sorted_rows(found, "train.row_buckets")) == 3


def test_the_command_lists_runs_as_a_table_or_as_json(run, tmp_path):
    def command(*words):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        argv = [sys.executable, "-m", "rlx.runs", *words]
        return subprocess.check_output(argv, text=True, cwd=tmp_path, env=environment)

    assert "runs/one" in command()
    (found,) = json.loads(command(str(run), "--json"))
    assert found["step"] == 40
    empty = tmp_path / "empty"
    empty.mkdir()
    assert command(str(empty)) == f"no run under {empty}\n"
    assert command(str(run), str(empty)).endswith(f"no run under {empty}\n")


def test_a_status_has_progress_parts_and_messages_of_a_living_run(run):
    records = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(records[:10]))
    now = time.time() + 2
    (run / "console.log").write_text("".join(f"message \x1b[2J{n}\n" for n in range(20)))
    about = {"time": now - 1, "phase": "train", "phase_seconds": 3.0, "version": 10, "running": 4,
             "buffered": 2, "failed": 1, "skipped": 0, "evaluations": [10],
             "servers": {"h:1": "", "h:2": "not connected yet"}}  # fmt: skip

    def shown(pid, later=0.0):
        (run / STATUS).write_text(json.dumps({**about, "pid": pid}))
        paper = Console(width=100, record=True, file=io.StringIO())
        for part in status(run, now + later):
            paper.print(part)
        return paper.export_text()

    with lock_workdir(run):
        text = shown(os.getpid())
        assert "starting" in shown(1), "an earlier process wrote the file"
        late = shown(os.getpid(), 60.0)
    for part in ("running: process", "step 10/40", "left ", "train 4.0", "2 buffered", "reward",
                 "evaluation of step 10 under way", "1 of 2 alive; h:2 (not connected yet)",
                 "greedy, step", "mean", "message ⟨ESC⟩[2J19"):  # fmt: skip
        assert part in text, part
    assert "2J3\n" not in text
    assert "no sign of life" not in text
    assert "no sign of life for 1:01" in late
    ended = shown(os.getpid())
    assert "unknown" in ended
    assert "buffered" not in ended


def test_a_status_without_a_run_is_refused(tmp_path):
    with pytest.raises(UserError, match="holds no run; give its WORKDIR"):
        next(status(tmp_path, 0.0))


def test_a_run_that_is_named_twice_is_one(tmp_path):
    """It counted twice in the mean of seeds."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "console.log").touch()
    assert rows.find([tmp_path, tmp_path / "a"]) == [tmp_path / "a"]
