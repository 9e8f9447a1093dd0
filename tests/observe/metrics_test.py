"""What a run writes is whole, readable, and forgets what a killed predecessor wrote too much."""

import json
import math
import os
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rlx.base import UserError
from rlx.observe import environment
from rlx.observe.metrics import MetricsWriter, forget
from rlx.system.jsonl import append_jsonl, jsonable, read_jsonl, set_aside, write_atomically


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_step_is_on_disk_when_write_returns(tmp_path):
    writer = MetricsWriter(tmp_path / "run")
    counts = {0: 3, np.int64(1): 4}
    writer.write("metrics.jsonl", {"step": 1, "task_reward": np.float32(0.5), "grad_norm": math.nan,
                  "staleness_histogram": counts, "entropy": float("inf")})  # fmt: skip
    assert lines(tmp_path / "run" / "metrics.jsonl") == [
        {"step": 1, "task_reward": 0.5, "grad_norm": None,
         "staleness_histogram": {"0": 3, "1": 4}, "entropy": None}
    ]  # fmt: skip
    writer.write("eval.jsonl", {"step": 1, "greedy_acc": 0.25})
    assert lines(tmp_path / "run" / "eval.jsonl") == [{"step": 1, "greedy_acc": 0.25}]
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert environment["python"].startswith("3.")
    assert environment["packages"]["numpy"] == np.__version__


def test_what_json_cannot_say_is_an_error_not_a_guess():
    assert jsonable((np.arange(2), {"a": [np.bool_(True)]})) == [[0, 1], {"a": [True]}]
    with pytest.raises(TypeError, match="object"):
        jsonable({"x": object()})


def test_a_restart_forgets_the_steps_after_its_checkpoint(tmp_path):
    writer = MetricsWriter(tmp_path)
    for step in range(1, 7):
        writer.write("metrics.jsonl", {"step": step, "run": "killed"})
        writer.write_rollouts(step, [{"step": step}])
    writer.write("eval.jsonl", {"step": 2})
    writer.write("eval.jsonl", {"step": 6})
    writer = MetricsWriter(tmp_path, first_step=5)
    writer.write("metrics.jsonl", {"step": 5, "run": "resumed"})
    assert [(r["step"], r["run"]) for r in lines(tmp_path / "metrics.jsonl")] == [
        (1, "killed"), (2, "killed"), (3, "killed"), (4, "killed"), (5, "resumed")
    ]  # fmt: skip
    assert [r["step"] for r in lines(tmp_path / "eval.jsonl")] == [2]
    assert [p.name for p in sorted((tmp_path / "rollouts").iterdir())] == [
        f"step-00000{step}.jsonl" for step in range(1, 5)
    ]


def test_a_torn_last_line_does_not_swallow_the_next_record(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "task_re')
    append_jsonl(path, {"step": 2})
    assert [r["step"] for r in read_jsonl(path)] == [1, 2]
    assert set_aside(path) == 1
    assert [r["step"] for r in lines(path)] == [1, 2], "the torn line stayed in the file"


@pytest.mark.parametrize(
    "line",
    [b'{"step": null}', b'{"stfp": 2}', b'{"step": 2, "ta\x00', b'{"step": "2"}', b'{"step": true}',
     b'{"step": -2}', b"[2]", b"null", b"", b"\xff\xfe", b"[" * 100_000],
)  # fmt: skip
def test_a_line_that_cannot_be_read_is_kept_beside_and_the_others_stay(tmp_path, line):
    path = tmp_path / "eval.jsonl"
    path.write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 3}\n{"step": 4, "gre')
    writer = MetricsWriter(tmp_path, first_step=5)
    assert writer.unreadable == 1
    assert [r["step"] for r in lines(path)] == [1, 3]
    assert (tmp_path / "eval.jsonl.unreadable").read_bytes() == line + b"\n"
    assert forget(tmp_path, 5) == 0


def test_the_gate_of_the_restored_step_is_told_once(tmp_path):
    for first_step, steps in ((1, (0, 3, 5)), (6, (5, 8))):  # it begins, then goes on after step 5
        writer = MetricsWriter(tmp_path, first_step=first_step)
        for step in steps:
            writer.write("gate.jsonl", {"step": step})
    assert [r["step"] for r in lines(tmp_path / "gate.jsonl")] == [0, 3, 5, 8]


def test_the_environment_says_what_the_caller_knows_better(tmp_path):
    MetricsWriter(tmp_path, place={"cores": 99, "servers": 3})
    found = json.loads((tmp_path / "environment.json").read_text())
    assert (found["cores"], found["servers"]) == (99, 3)


def test_the_command_to_go_on_is_one_that_a_shell_takes(monkeypatch, tmp_path):
    flags = ["/usr/bin/python3", "my main.py", "--config=a.py", "--config.data.train=a b.jsonl"]
    monkeypatch.setattr(sys, "orig_argv", flags)
    wanted = [*flags, f"--workdir={tmp_path}"]
    assert shlex.split(environment.resume_command(tmp_path)) == wanted
    assert shlex.split(environment.describe({})["command"]) == flags
    monkeypatch.setattr(sys, "orig_argv", wanted)
    assert shlex.split(environment.resume_command(tmp_path)) == wanted
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "ipykernel_launcher"])
    assert environment.resume_command(Path("a")) == "rlx.run with the same config and workdir='a'"


def test_a_users_files_and_what_differs_from_the_commit_are_kept(monkeypatch, tmp_path):
    work = tmp_path / "work"
    (work / "sub").mkdir(parents=True)
    for name in ("config.py", "sub/reward.py"):
        (work / name).write_text("a = 1\n")
    outside = tmp_path / "agent.py"
    outside.write_text("b = 2\n")
    git = ["git", "-C", str(work), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "a"]):
        subprocess.run([*git, *command], check=True)
    (work / "config.py").write_text("a = 3\n\n")
    monkeypatch.chdir(work)
    files = [Path("config.py"), work / "sub/reward.py", outside, Path("gone.py"), Path()]
    environment.keep(tmp_path / "kept", files)
    kept = {str(p.relative_to(tmp_path / "kept")) for p in (tmp_path / "kept").rglob("*.*")}
    assert kept - {f"{Path(__file__).parents[2].name}.diff"} == {
        "config.py", "sub/reward.py", "agent.py", "work.diff"
    }  # fmt: skip
    assert (tmp_path / "kept/config.py").read_text() == "a = 3\n\n"
    subprocess.run([*git, "checkout", "-q", "."], check=True)
    subprocess.run([*git, "apply", str(tmp_path / "kept/work.diff")], check=True)
    assert (work / "config.py").read_text() == "a = 3\n\n"


def test_text_of_a_model_survives_even_when_it_is_not_unicode(tmp_path):
    path = tmp_path / "rows.jsonl"
    append_jsonl(path, {"completion": "线 \ud800 </script>\u2028\n"})
    assert next(read_jsonl(path)) == {"completion": "线 \ud800 </script>\u2028\n"}
    assert len(path.read_bytes().splitlines()) == 1


def test_a_full_disk_is_one_line_and_leaves_no_half_record(tmp_path):
    """A file size limit stands in for the full disk: writes are cut short, then fail."""
    script = f"""
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
from rlx.observe import environment
from rlx.system.jsonl import append_jsonl
from rlx.base import UserError
for step in range(1, 100):
    try:
        append_jsonl({str(tmp_path / "metrics.jsonl")!r}, {{"step": step, "text": "x" * 100}})
    except UserError as error:
        print(error)
        break
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert "cannot write" in done.stdout
    assert "free some space" in done.stdout
    written = lines(tmp_path / "metrics.jsonl")
    assert [r["step"] for r in written] == list(range(1, len(written) + 1))
    assert len(written) == 8, "1000 bytes hold eight records of 124"


def test_unwritable_places_name_the_file(tmp_path):
    (tmp_path / "file").write_text("")
    for write in (lambda p: append_jsonl(p, {}), lambda p: write_atomically(p, b"")):
        with pytest.raises(UserError, match=r"file/metrics\.jsonl"):
            write(tmp_path / "file" / "metrics.jsonl")


def test_atomic_writes_leave_no_scratch_file(tmp_path):
    write_atomically(tmp_path / "a", b"1")
    write_atomically(tmp_path / "a", b"2")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_bytes() == b"2"
