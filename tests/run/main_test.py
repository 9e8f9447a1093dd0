"""The main job as a user runs it: real processes, the packaged model, files on disk."""

import contextlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlx import main
from rlx.observe.run_table import summary
from tests.fixtures.commands import RLX_MAIN

COMMAND = [
    *RLX_MAIN, "--config=configs/arithmetic.py",
    "--config.rollout.batch_prompts=4", "--config.sampling.n_samples=4", "--config.fleet.slots=16",
    "--config.sampling.max_new_tokens=32", "--config.eval.num_questions=8",
    "--config.eval.every_steps=2", "--config.model.compute_dtype=float32",
]  # fmt: skip


def start(
    workdir: Path, *flags: str, environment: dict | None = None, command=COMMAND
) -> subprocess.Popen:
    return subprocess.Popen(
        [*command, f"--workdir={workdir}", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={
            **os.environ,
            **(environment or {}),
            "RLX_TEST_RUN": str(workdir),
        },  # whatever it starts inherits this
    )


def finish(process: subprocess.Popen, timeout: float = 180) -> tuple[int, str]:
    try:
        out, _ = process.communicate(timeout=timeout)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return process.returncode, out


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for(condition, seconds: float = 120):
    """The first true value of `condition()`."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)
    return value


def state_of(workdir: Path) -> str:
    """The state that `rlx runs` shows."""
    return summary(workdir, {})["state"]


def processes_of(workdir: Path) -> list[int]:
    """The run in `workdir` and every process that it started, by an inherited variable."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                variables = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if f"RLX_TEST_RUN={workdir}".encode() in variables:
                found.append(int(entry.name))
    return found


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("finished")
    status, out = finish(start(workdir, "--config.total_steps=3", "--config.gate.every_steps=2"))
    assert status == 0, out
    return workdir, out


def test_a_finished_run_leaves_what_the_readme_says(finished_run):
    workdir, out = finished_run
    steps = records(workdir / "metrics.jsonl")
    assert [record["step"] for record in steps] == [1, 2, 3]
    wanted = {
        "step", "version", "task_reward", "kl_reward", "final_reward", "advantage",
        "importance_weight", "actor_clip_ratio", "actor_loss", "ppo_approx_kl", "entropy",
        "grad_norm", "behaviour_weight", "behaviour_kl", "avg_seq_len", "avg_prompt_len", "n_seqs",
        "n_tokens", "n_valid_tokens", "no_eos_ratio", "staleness_min", "staleness_mean",
        "staleness_max", "staleness_histogram", "tokens_per_version", "seconds", "step_seconds",
        "generated_tokens_per_second", "consumed_tokens_per_second", "dropped", "epoch",
        "global_step", "admitted", "accepted", "rejected", "failed", "model_flops",
        "update_seconds", "tokens_per_second_per_device", "mfu",
    }  # fmt: skip
    for record in steps:
        assert wanted <= record.keys(), wanted - record.keys()
        assert record["dropped"] == 0
        assert record["staleness_max"] <= 2
        assert record["n_seqs"] == 16
    scores = records(workdir / "eval.jsonl")
    assert [score["step"] for score in scores] == [0, 2, 3]
    assert [score["version"] for score in scores] == [0, 2, 3]
    assert all(s["num_questions"] == 8 and 0 <= s["greedy_acc"] <= 1 for s in scores)
    trace = json.loads((workdir / "timeline.json").read_text())
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert {"trainer", "server 0", "rewards", "publish"} <= names
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert not [e["name"] for e in spans if any(map(str.isdigit, e["name"]))]
    assert {e["args"]["version"] for e in spans if e["name"] == "publish"} == {1, 2, 3}
    assert {"train", "pack and dispatch", "compute", "load"} <= {e["name"] for e in spans}
    pids = {
        e["args"]["name"]: e["pid"] for e in trace["traceEvents"] if e["name"] == "process_name"
    }
    computed = [e["ts"] + e["dur"] / 2 for e in spans if e["name"] == "compute"]
    published = [e["ts"] for e in spans if (e["name"], e["pid"]) == ("publish", pids["publish"])]
    late = [p > c for p, c in zip(sorted(published), sorted(computed), strict=True)]
    assert sum(late) >= 2, "a publish begins when its update is computed"
    told = re.findall(r"`([^`]+)`", (Path(__file__).parents[2] / "docs/metrics.md").read_text())
    checks = records(workdir / "gate.jsonl")
    keys = {name for record in (*steps, *scores, *checks) for name in record}
    assert {k for k in keys - {*told} if not k.startswith(("reward/", "info/"))} == set()
    assert (workdir / "report.html").stat().st_size > 10_000
    assert list((workdir / "rollouts").glob("step-*.jsonl"))
    assert list((workdir / "tensorboard").iterdir())
    assert "step 3/3" in out


def test_a_finished_run_has_passed_the_gate_and_shows_what_it_cost(finished_run):
    workdir, out = finished_run
    found = records(workdir / "gate.jsonl")
    assert [(record["step"], record["ok"]) for record in found] == [(0, True), (2, True)]
    for record in found:
        assert 0 < record["max_delta"] < 1e-4
        assert record["tokens"] > 32
        assert record["probe_seconds"] > 0 < record["score_seconds"]
    lines = [line for line in out.splitlines() if line.startswith("gate: ")]
    assert len(lines) == 2
    assert "tokens of 1 server, version 0: engine and trainer agree" in lines[0]
    seconds = [record["seconds"] for record in records(workdir / "metrics.jsonl")]
    assert ["gate" in each for each in seconds] == [True, False, True]
    trace = json.loads((workdir / "timeline.json").read_text())["traceEvents"]
    assert sum(event["name"] == "gate" for event in trace) == 2


@pytest.mark.torch
def test_the_exported_directory_loads_in_transformers(finished_run):
    import transformers

    workdir, _ = finished_run
    model = transformers.AutoModelForCausalLM.from_pretrained(workdir / "hf")
    tokenizer = transformers.AutoTokenizer.from_pretrained(workdir / "hf")
    ids = tokenizer("12+34=?", return_tensors="pt").input_ids
    assert model(ids).logits.isfinite().all()


@pytest.mark.slow
def test_a_second_start_and_a_resume_compile_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    rows = [{"question": f"{n}a+{n}b=?", "answer": str(2 * n)} for n in range(1, 9)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    one_shape_of_each = [
        "--config.data.kind=jsonl", f"--config.data.train={tmp_path / 'rows.jsonl'}",
        "--config.data.max_prompt_tokens=24", "--config.sampling.max_new_tokens=8",
        "--config.fleet.slots=1",  # with more, how many prompts are prefilled at once varies
        "--config.train.max_tokens_per_microbatch=192", "--config.train.share_prefixes=off",
    ]  # fmt: skip

    def compiled_by(workdir: str, steps: int) -> set[str]:
        """The programs that a run of trainer and server had to compile, by name."""
        before = set((tmp_path / "cache").rglob("*-cache"))
        status, out = finish(
            start(tmp_path / workdir, f"--config.total_steps={steps}", *one_shape_of_each)
        )
        assert status == 0, out
        return {path.name for path in set((tmp_path / "cache").rglob("*-cache")) - before}

    first = compiled_by("one", 1)
    for program in ("accumulate", "apply", "end_batch", "prepare", "logprob_step", "_decode"):
        assert any(name.startswith(f"jit_{program}-") for name in first), program
    assert compiled_by("one", 2) == set(), "after a resume"
    assert compiled_by("two", 2) == set(), "at a second start"


def test_a_finished_run_leaves_no_process(finished_run):
    workdir, _ = finished_run
    assert not processes_of(workdir)
    assert state_of(workdir) == "finished"
    assert json.loads((workdir / "status.json").read_text())["servers"]


@pytest.mark.slow
def test_ctrl_c_saves_and_the_same_command_goes_on(tmp_path):
    auto = "--config.rollout.max_concurrent_rollouts=auto"
    process = start(tmp_path, auto, "--config.total_steps=1000")
    wait_for(lambda: records(tmp_path / "metrics.jsonl"))
    os.killpg(process.pid, signal.SIGINT)
    status, out = finish(process)
    assert status == 130, out
    assert "Traceback" not in out
    done = records(tmp_path / "metrics.jsonl")
    assert (tmp_path / "hf" / "model.safetensors").exists()
    assert not processes_of(tmp_path)
    last = done[-1]["step"]
    status, out = finish(start(tmp_path, auto, f"--config.total_steps={last + 2}"))
    assert status == 0, out
    steps = records(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in steps] == list(range(1, last + 3))
    assert steps[: len(done)] == done
    assert steps[-1]["staleness_max"] <= 2
    assert all(1 <= record["max_concurrent_rollouts"] <= 3 * 4 for record in steps)
    assert [record["step"] for record in records(tmp_path / "gate.jsonl")] == [0, last]


def test_rows_that_cannot_be_graded_are_skipped_and_end_neither_training_nor_evaluation(tmp_path):
    (tmp_path / "strict.py").write_text(
        "def score(prompt, completion, prompt_ids, completion_ids, answer, **row):\n"
        "    if answer == 'broken':\n"
        "        raise LookupError('this row has no answer')\n"
        "    return float(len(completion) % 2)\n"
    )
    rows, workdir = tmp_path / "rows.jsonl", tmp_path / "run"
    answers = ["1", "2", "broken", "4", "5", "6", "7", "8"]
    rows.write_text(
        "".join(
            json.dumps({"question": f"{i}+{i}=?", "answer": a}) + "\n"
            for i, a in enumerate(answers)
        )
    )
    process = start(
        workdir, "--config.total_steps=6", "--config.data.kind=jsonl",
        f"--config.data.train={rows}", f"--config.data.eval={rows}",
        "--config.reward.name=strict:score", "--config.rollout.max_attempts=1",
        "--config.gate.enabled=False", "--config.eval.every_steps=0",
        environment={"PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"},
    )  # fmt: skip
    status, out = finish(process)
    assert status == 0, out
    steps = records(workdir / "metrics.jsonl")
    assert [record["step"] for record in steps] == [1, 2, 3, 4, 5, 6]
    assert all(r["n_seqs"] == 16 and r["dropped"] == 0 and r["staleness_max"] <= 2 for r in steps)
    skipped = records(workdir / "skipped.jsonl")
    trained = [r for r in skipped if r["which"] == "train"]
    assert len(trained) >= steps[-1]["skipped"] >= 1
    assert {(r["row"], r["attempts"], r["error"]) for r in skipped} == {(2, 1, "RewardError")}
    assert all("this row has no answer" in r["message"] and "2+2" in r["text"] for r in skipped)
    scores = records(workdir / "eval.jsonl")
    assert [(s["step"], s["failed"]) for s in scores] == [(0, 1), (6, 1)]
    assert len(skipped) - len(trained) == 2
    assert "skipped train row 2 after 1 attempts" in out
    assert "skipped eval row 2" in out
    assert "this row has no answer" in (workdir / "report.html").read_text()


def test_ctrl_c_waits_for_an_evaluation_under_way(tmp_path):
    process = start(tmp_path, "--config.total_steps=1000", "--config.eval.num_questions=400")
    while "gate: " not in process.stdout.readline():  # it is passed after the evaluation has begun
        assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)
    status, out = finish(process)
    assert status == 130, out
    scores = records(tmp_path / "eval.jsonl")
    assert scores[0]["step"] == 0, out
    assert scores[0]["num_questions"] == 400
    assert state_of(tmp_path) == "stopped"


def test_ctrl_c_while_a_line_is_printed(tmp_path):
    process = start(
        tmp_path, "--config.total_steps=1000", "--config.eval.every_steps=0",
        environment={"PYTHONUNBUFFERED": ""},  # stdout with a lock
    )  # fmt: skip
    pipe = os.open(f"/proc/self/fd/{process.stdout.fileno()}", os.O_WRONLY | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while os.write(pipe, b"\n"):
            pass
    os.close(pipe)
    wait_for((tmp_path / "gate.jsonl").exists)
    time.sleep(2)  # the gate's line waits for somebody to read
    os.killpg(process.pid, signal.SIGINT)
    time.sleep(0.5)
    status, out = finish(process)
    assert status == 130, out
    assert "finishing this step, then saving" in out


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--config.model.path=nowhere"], ["nowhere", "not a directory"]),
        (["--config.algorithm.preset=grop"], ["'grop'", "'grpo'"]),
        (["--config.data.kind=jsonl", "--config.data.train=no.jsonl"], ["no.jsonl"]),
        (["--config.sampling.max_new_tokens=100000"], ["train.row_buckets"]),
        (["--config.reward.name=gsm9k"], ["gsm9k", "gsm8k"]),
        (["--config.optimizer.name=adamm"], ["adamm", "adamw"]),
    ],
)
def test_bad_input_ends_in_one_line_and_writes_nothing(tmp_path, refused, flags, words):
    workdir = tmp_path / "run"
    line = refused(*COMMAND[3:], f"--workdir={workdir}", *flags)
    for word in words:
        assert word in line
    assert not workdir.exists()


JSONL = ["--config.data.kind=jsonl", "--config.reward.name=gsm8k"]


@pytest.mark.parametrize(
    ("text", "flags", "words"),
    [
        ('{"question": "1+1", "answer": "2"}\n{"question": \n', JSONL, ["rows.jsonl:2"]),
        ('{"question": "1+1", "answer": "2"}\n\n5', JSONL, ["rows.jsonl:3", "JSON object"]),
        ("", JSONL, ["rows.jsonl", "empty"]),
        ('{"question": "1+1"}\n', JSONL, ["rows.jsonl:1", "answer"]),
        ('{"question": "1+1", "answer": "two"}\n', JSONL, ["row 1", "no number"]),
        ('{"question": "' + "1+" * 99 + '1", "answer": "1"}\n', JSONL, ["row 1", "tokens", "64"]),
    ],
)
def test_bad_rows_are_named_and_nothing_is_written(tmp_path, refused, text, flags, words):
    rows, workdir = tmp_path / "rows.jsonl", tmp_path / "run"
    rows.write_text(text)
    files = (f"--workdir={workdir}", f"--config.data.train={rows}")
    line = refused(*COMMAND[3:], *flags, *files)
    for word in words:
        assert word in line
    assert not workdir.exists()


def test_a_missing_model_file_is_named_and_nothing_is_written(tmp_path):
    model, workdir = tmp_path / "model", tmp_path / "run"
    shutil.copytree(Path("rlx/assets/arithmetic"), model)
    (model / "model.safetensors").unlink()
    status, out = finish(start(workdir, f"--config.model.path={model}"))
    assert status == 2, out
    assert len(out.strip().splitlines()) == 1, out
    assert "model.safetensors" in out
    assert not workdir.exists()


def test_a_finished_run_says_so_before_anything_starts(finished_run, monkeypatch, capsys):
    workdir, _ = finished_run
    before = {p: p.read_bytes() for p in workdir.iterdir() if p.is_file()}
    flags = [f"--workdir={workdir}", "--config.total_steps=3", "--config.algorithm.preset=dapo"]
    monkeypatch.setattr(sys, "argv", ["rlx.main", *COMMAND[3:], *flags])
    assert main.main() == 0
    said = f"all 3 steps are done; raise --config.total_steps to train on in {workdir}\n"
    assert capsys.readouterr().out == said
    assert {p: p.read_bytes() for p in workdir.iterdir() if p.is_file()} == before


@pytest.mark.slow
def test_a_run_that_goes_on_with_other_settings_keeps_what_it_was(finished_run, tmp_path):
    workdir, reward = tmp_path / "run", tmp_path / "mine.py"
    shutil.copytree(finished_run[0], workdir)
    reward.write_text("def score(prompt, completion, *ids, **row):\n    return 1.0\n")
    before = {name: (workdir / name).read_bytes() for name in ("config.json", "environment.json")}
    spans = len(json.loads((workdir / "timeline.json").read_text())["traceEvents"])
    flags = (f"--config.reward.name={reward}:score", "--config.total_steps=4")
    status, out = finish(start(workdir, "--config.optimizer.schedule=linear", *flags))
    assert status == 0, out
    change = f"reward.name arithmetic → {reward}:score"
    assert "settings change after step 3: total_steps 3 → 4; " in out
    assert change in out
    assert "learning rate " in out
    assert {name: (workdir / name).read_bytes() for name in before} == before
    assert [r["start"] for r in records(workdir / "metrics.jsonl")] == [1, 1, 1, 2]
    first, end, second, _ = records(workdir / "starts.jsonl")
    assert (first["step"], end["step"], second["step"]) == (0, 3, 3)
    assert change in second["changed"]
    assert second["config"]["reward"]["name"] == f"{reward}:score"
    assert len(json.loads((workdir / "timeline.json").read_text())["traceEvents"]) > spans
    assert "settings change after step 3" in (workdir / "console.log").read_text()
    assert (workdir / "code/start-2/mine.py").read_text() == reward.read_text()
    assert (workdir / "code/start-1/configs/arithmetic.py").exists()


def test_a_workdir_that_holds_another_run_is_refused(finished_run, refused):
    workdir, _ = finished_run
    before = (workdir / "metrics.jsonl").read_bytes()
    flags = (f"--workdir={workdir}", "--config.checkpoint.recover_mode=off")
    assert "holds another run" in refused(*COMMAND[3:], *flags)
    assert (workdir / "metrics.jsonl").read_bytes() == before


@pytest.fixture(scope="module")
def by_hand():
    """Two servers, and their addresses; a run finds them as the one before has left them."""
    servers = [
        subprocess.Popen(
            [sys.executable, "-m", "rlx.serve", "--model=rlx:arithmetic", "--slots=16",
             "--max-model-len=96", "--port=0"],
            stdout=subprocess.PIPE, text=True,
        )
        for _ in range(2)
    ]  # fmt: skip
    try:
        ports = [json.loads(server.stdout.readline())["port"] for server in servers]
        yield tuple(f"127.0.0.1:{port}" for port in ports)
        assert all(server.poll() is None for server in servers)
    finally:
        for server in servers:
            server.kill()
            server.communicate()


@pytest.mark.slow
def test_two_servers_started_by_hand_take_streamed_weights(tmp_path, by_hand):
    # Their version is ahead of the run's, as after another run: the run's own weights come first.
    for run, method in (("first", "stream"), ("second", "delta")):
        flags = (f"--config.fleet.publish={method}", "--config.total_steps=2")
        status, out = finish(start(tmp_path / run, f"--config.fleet.addresses={by_hand}", *flags))
        assert status == 0, out
        steps = records(tmp_path / run / "metrics.jsonl")
        assert [step["step"] for step in steps] == [1, 2]
        assert all(step["dropped"] == 0 and step["staleness_max"] <= 2 for step in steps)
        assert 0 < steps[-1]["publish_stall_seconds"] < steps[-1]["publish_seconds"]
        assert steps[-1]["publish_bytes"] > 0


def test_a_server_that_is_added_to_a_run_passes_the_gate_before_it_is_learnt_from(
    tmp_path, by_hand
):
    file, run = tmp_path / "servers", tmp_path / "run"
    file.write_text(by_hand[0])
    process = start(
        run, f"--config.fleet.addresses={(f'@{file}',)}", "--config.fleet.publish=stream",
        "--config.fleet.probe_seconds=0.1", "--config.gate.every_steps=0",
        "--config.total_steps=1000",
    )  # fmt: skip
    try:
        wait_for(lambda: records(run / "metrics.jsonl"))
        file.write_text("\n".join(by_hand))
        checks = wait_for(lambda: (found := records(run / "gate.jsonl"))[1:] and found)
    finally:
        process.send_signal(signal.SIGINT)
        status, out = finish(process)
    assert status == 130, out
    assert [set(check["servers"]) for check in checks] == [{by_hand[0]}, set(by_hand)]
    assert all(check["ok"] for check in checks)
    assert f"rollout server {by_hand[1]} is added" in out


def test_a_publish_that_no_server_takes_ends_the_run_and_keeps_its_steps(tmp_path):
    room = tmp_path / "room"
    room.mkdir()
    process = start(
        tmp_path / "run", "--config.total_steps=1000", "--config.rollout.max_staleness=0",
        f"--config.fleet.publish_dir={room}", "--config.checkpoint.first_step=0",
    )  # fmt: skip
    wait_for(lambda: records(tmp_path / "run" / "metrics.jsonl"))
    assert state_of(tmp_path / "run") == "running"
    shutil.rmtree(room)
    status, out = finish(process)
    assert status == 2, out
    assert out.strip().splitlines()[-1].startswith("error: ")
    assert state_of(tmp_path / "run") == "failed"
    done = records(tmp_path / "run" / "metrics.jsonl")[-1]["step"]
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("step_*")
    assert int(checkpoint.name.removeprefix("step_")) == done


@pytest.mark.slow
def test_a_checkpoint_that_does_not_fit_is_told_and_training_goes_on(tmp_path):
    """The trainer's files end at a megabyte, as by a quota: records fit, the state does not."""
    process = start(
        tmp_path, "--config.total_steps=30", "--config.algorithm.preset=sft",
        "--config.fleet.num_servers=0", "--config.checkpoint.first_step=20",
        "--config.sampling.max_new_tokens=128",
    )  # fmt: skip
    wait_for(lambda: records(tmp_path / "metrics.jsonl"))
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (10**6, 10**6))
    status, out = finish(process)
    assert status == 2, out
    told = [line for line in out.splitlines() if "no disk space for a checkpoint" in line]
    assert len(told) == 2, out
    assert told[0].endswith("training continues until the next save")
    assert told[1].startswith("error: ")
    assert [step["step"] for step in records(tmp_path / "metrics.jsonl")] == list(range(1, 31))
    assert not list((tmp_path / "checkpoints").iterdir())


@pytest.mark.slow
def test_a_killed_run_leaves_no_process_and_no_weights_and_goes_on(tmp_path, monkeypatch):
    """kill_test.py kills at named points, many times."""
    room, workdir = tmp_path / "room", tmp_path / "run"
    room.mkdir()
    monkeypatch.setenv("RLX_FLEET_TOKEN", "of other servers")
    flags = (f"--config.fleet.publish_dir={room}", "--config.checkpoint.every_steps=1")
    process = start(workdir, "--config.total_steps=1000", *flags)
    try:
        wait_for(lambda: list(room.glob("*/rlx-weights-*")))
        (directory,) = room.iterdir()
        assert directory.stat().st_mode & 0o777 == 0o700
        # From its first checkpoint on a run can be looked at.
        wait_for(lambda: (workdir / "report.html").exists() or process.poll() is not None)
        assert json.loads((workdir / "timeline.json").read_text())["traceEvents"]
        assert (workdir / "hf" / "config.json").exists()
        started = [pid for pid in processes_of(workdir) if pid != process.pid]
        assert started, "its server at least"
        for pid in started:
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            assert b"RLX_FLEET_TOKEN=of other servers" not in variables
    finally:
        process.kill()
        process.communicate()
    wait_for(lambda: not processes_of(workdir), 30)
    wait_for(lambda: not list(room.iterdir()), 30)
    saved = max(int(path.name[len("step_") :]) for path in workdir.glob("checkpoints/step_*"))
    status, out = finish(start(workdir, f"--config.total_steps={saved + 2}", *flags))
    assert status == 0, out
    steps = records(workdir / "metrics.jsonl")
    assert [record["step"] for record in steps] == list(range(1, saved + 3))
    assert all(record["dropped"] == 0 for record in steps)
    assert not list(room.iterdir())


@pytest.mark.vllm
def test_two_vllm_servers_train_the_same_model_by_the_same_command(tmp_path):
    flags = ("--config.fleet.engine=vllm", "--config.fleet.num_servers=2")
    status, out = finish(start(tmp_path / "run", *flags, "--config.total_steps=4"), timeout=300)
    assert status == 0, out
    steps = records(tmp_path / "run" / "metrics.jsonl")
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    assert all(step["dropped"] == 0 and step["staleness_max"] <= 2 for step in steps)
    assert {step["step"] for step in records(tmp_path / "run" / "eval.jsonl")} == {0, 2, 4}
    assert not processes_of(tmp_path / "run")
