"""The teacher of a run: what is checked before it starts, its servers, a run that learns of it."""

import asyncio
import dataclasses
import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rlx.algorithms import presets
from rlx.base import UserError
from rlx.config import default
from rlx.engines.server import Server
from rlx.fleet.client import Fleet
from rlx.fleet.requests import Timeouts
from rlx.launch import teacher
from rlx.launch.teacher import ScorerOptions
from rlx.model import hf
from rlx.run.room_options import RunOptions
from tests.fixtures.commands import FLOAT32, RLX_MAIN

STUDENT = hf.resolve("rlx:arithmetic")
GRPO, DISTILL, SFT = (presets.PRESETS[name] for name in ("grpo", "distill", "sft"))


def options_of(**changes):
    return ScorerOptions.of_teacher(config_of(**changes))


def config_of(**changes):
    c = default()
    c.model.path = "rlx:arithmetic"
    c.data.max_prompt_tokens, c.sampling.max_new_tokens = 64, 32
    c.algorithm.preset = "distill"
    for key, value in changes.items():
        c.teacher[key] = value
    return c


@pytest.fixture
def other(tmp_path):
    """A copy of the student's directory; `other(tokenizer=…, config=…)` edits its files."""
    copy = tmp_path / "teacher"
    shutil.copytree(STUDENT, copy)

    def edit(**edits):
        for name, change in edits.items():
            path = copy / f"{name}.json"
            record = json.loads(path.read_text())
            change(record)
            path.write_text(json.dumps(record))
        return options_of(path=str(copy))

    return edit


def test_a_teacher_of_the_same_vocabulary_passes_and_none_is_needed_without(other):
    teacher.check(other(), DISTILL, STUDENT)
    teacher.check(options_of(path="rlx:arithmetic"), DISTILL, STUDENT)
    teacher.check(options_of(addresses=("127.0.0.1:1",)), DISTILL, STUDENT)
    teacher.check(options_of(), GRPO, STUDENT)


def test_more_tokens_than_the_students_are_no_other_vocabulary(other):
    def add(record):
        record["added_tokens"].append({"id": 4000, "content": "<more>"})

    teacher.check(other(tokenizer=add), DISTILL, STUDENT)


def test_a_teacher_is_given_exactly_where_one_is_learned_from():
    with pytest.raises(UserError, match=r"kl_anchor=teacher\) needs a teacher; set"):
        teacher.check(options_of(), DISTILL, STUDENT)
    c = config_of(path="rlx:arithmetic")
    c.algorithm.preset = "grpo"
    with pytest.raises(UserError, match=r"preset=grpo \(kl_anchor=reference\) has no teacher"):
        teacher.check(ScorerOptions.of_teacher(c), GRPO, STUDENT)
    rows = dataclasses.replace(SFT, kl_anchor="teacher")
    with pytest.raises(UserError, match="a teacher scores rollouts; leave"):
        teacher.check(ScorerOptions.of_teacher(c), rows, STUDENT)


def test_another_vocabulary_is_named_by_its_first_token(other):
    words = list(teacher.vocabulary(STUDENT))
    swapped = words[5]

    def swap(record):
        vocab = record["model"]["vocab"]
        vocab[swapped], vocab[words[6]] = vocab[words[6]], vocab[swapped]

    with pytest.raises(UserError, match=r"has another vocabulary \(token") as caught:
        teacher.check(other(tokenizer=swap), DISTILL, STUDENT)
    assert repr(swapped) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_a_tokenizer_sizes_are_compared(other, tiny_model_dir, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(tiny_model_dir, bare)
    (bare / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"another vocabulary \(128 tokens, the student has"):
        teacher.check(options_of(path=str(bare)), DISTILL, STUDENT)


def test_a_context_that_is_too_short_is_said_before_anything_starts(other):
    c = other(config=lambda record: record.update(max_position_embeddings=90))
    with pytest.raises(UserError, match="= 96 exceeds the teacher's context of 90 tokens"):
        teacher.check(c, DISTILL, STUDENT)


def test_its_servers_take_what_the_students_take(monkeypatch):
    """Conversations of agents beyond a prompt and an answer were refused, with their rows."""
    monkeypatch.setattr(teacher, "LocalServers", lambda _, **options: options["max_model_len"])

    def longest(context):
        options = options_of(path="rlx:arithmetic")
        how = {"token": None, "tls": None, "on_message": print, "max_model_len": context}
        return teacher.servers(options, [(0,)], **how)

    most = teacher.directory.load_config(STUDENT).max_position
    assert [longest(n) for n in (64, 200, 2 * most)] == [96, 200, most]


def test_only_servers_of_the_runs_own_need_cores():
    assert options_of().num_local == 0
    assert options_of(path="x", num_servers=3).num_local == 3
    assert options_of(path="x", addresses=("a:1",), num_servers=3).num_local == 0


def test_a_dead_teacher_is_one_line_that_says_whose_server_it_is(tmp_path):
    async def main():
        server = Server(lambda: None)
        port = server.port
        await server.stop()
        fleet = Fleet([f"127.0.0.1:{port}"], limits=Timeouts(connect_seconds=0.3, backoff=0.1))
        with pytest.raises(UserError, match=r"^the teacher: no rollout server answered"):
            await teacher.connect(fleet)
        await fleet.close()

    asyncio.run(main())


def main_of(workdir: Path, *flags: str) -> subprocess.CompletedProcess:
    command = [
        *RLX_MAIN, "--config=configs/arithmetic.py", f"--workdir={workdir}",
        "--config.algorithm.preset=distill", "--config.rollout.batch_prompts=2",
        "--config.sampling.n_samples=2", "--config.fleet.slots=4", "--config.total_steps=1",
        "--config.sampling.max_new_tokens=32", "--config.eval.num_questions=2",
        "--config.observe.writers=()", "--config.gate.enabled=False", FLOAT32, *flags,
    ]  # fmt: skip
    return subprocess.run(command, capture_output=True, text=True, timeout=180)


@pytest.mark.slow
def test_a_run_learns_from_its_teacher_and_leaves_no_server(other, tmp_path):
    path = Path(other().path)
    tensors = load_file(path / "model.safetensors")
    name = "model.norm.weight"
    save_file({**tensors, name: tensors[name] * np.float32(0.5)}, path / "model.safetensors")
    workdir = tmp_path / "run"
    done = main_of(workdir, f"--config.teacher.path={path}")
    assert done.returncode == 0, done.stderr + done.stdout
    (record,) = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert record["reference_kl"] > 1e-3, "the teacher's other weights are seen"
    assert record["behaviour_kl"] < 1e-6
    assert record["teacher_busy_seconds"] > 0
    assert "score" in spans_of(workdir / "timeline.json", "teacher 0")
    (ready,) = [
        json.loads(line)
        for line in (workdir / "logs" / "teacher-0.log").read_text().splitlines()
        if line.startswith('{"port"')
    ]
    assert ready["port"]
    running = [
        entry.name
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and str(path).encode() in _command(entry)
    ]
    assert not running


def spans_of(timeline: Path, process: str) -> set[str]:
    """The kinds of what a process did."""
    events = json.loads(timeline.read_text())["traceEvents"]
    (pid,) = {e["pid"] for e in events if e["ph"] == "M" and e["args"].get("name") == process}
    return {e["name"] for e in events if e["ph"] == "X" and e["pid"] == pid}


def _command(entry: Path) -> bytes:
    try:
        return (entry / "cmdline").read_bytes()
    except OSError:
        return b""


def test_a_teacher_that_cannot_start_is_one_line_of_what_its_server_said(other, tmp_path):
    path = Path(other().path)
    tensors = load_file(path / "model.safetensors")
    name = "model.norm.weight"
    save_file({**tensors, name: tensors[name] * np.float32("nan")}, path / "model.safetensors")
    started = {"workdir": tmp_path, "on_message": print, **RunOptions.of(config_of()).servers}
    with (
        teacher.servers(
            options_of(path=str(path)), [(0,)], token=None, tls=None, **started
        ) as tutors,
        pytest.raises(UserError, match=r"^the teacher: a rollout server ended") as caught,
    ):
        teacher.fleet(tutors, Timeouts(), print)
    assert name in str(caught.value)
