"""A run's rows: the packaged model and real files, good and bad; the commands that show them."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from configs import arithmetic, arithmetic_sft
from rlx import main
from rlx.base import UserError
from rlx.doctor import __main__ as doctor
from rlx.doctor import machine, memory, packages
from rlx.doctor.machine import Devices
from rlx.model import hf
from rlx.rollout.workflows import Prompts
from rlx.run import config_checks, loop, run_checks
from rlx.run.inputs import prepare
from rlx.run.room_options import sizes_of
from rlx.run.tokenizer_files import load_tokenizer

GB = 10**9


@pytest.fixture
def config():
    return arithmetic.get_config()


@pytest.fixture
def model():
    return hf.load_config(hf.resolve("rlx:arithmetic"))


def rows_of(config, tmp_path, devices=Devices()):  # noqa: B008 - frozen
    return {row.name: row for row in config_checks.check(config, tmp_path / "run", devices)}


def test_a_good_config_has_no_problem_and_writes_nothing(config, tmp_path):
    found = rows_of(config, tmp_path)
    assert not [row for row in found.values() if row.level == "problem"]
    model, data = ["tensors", "tokenizer", "chat template"], ["rows", "prompts"]
    memory = ["trainer", "publishing", "disk"]
    assert {*model, *data, *memory, "batch", "staleness"} <= found.keys()
    assert "16 prompts × 8 = 128 trajectories" in found["batch"].result
    assert "(2 + 1) × 16 = 48 prompts ahead" in found["staleness"].result
    assert not list(tmp_path.iterdir())


def test_cudnn_is_told_of_where_jax_trains_alone(config, tmp_path):
    gpu = Devices("gpu", "H100", 1, 80 * GB)
    assert "attention" in rows_of(config, tmp_path, gpu)
    config.trainer = "torch"
    assert "attention" not in rows_of(config, tmp_path, gpu)


def test_several_problems_are_shown_together(config, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(Path("rlx/assets/arithmetic"), model)
    (model / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    whole = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**whole, "vocab_size": 277}))
    config.model.path, config.train.minibatches = str(model), 99
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1", "answer": "2"}\n')
    config.data.kind, config.data.train, config.reward.name = "jsonl", str(rows), "gsm8k"
    found = rows_of(config, tmp_path)
    bad = {name for name, row in found.items() if row.level == "problem"}
    assert bad == {"values", "tensors", "tokenizer", "rows"}
    assert "chat template" in found["tokenizer"].result
    assert "99 exceeds" in found["values"].result
    assert "no 'question'" in found["rows"].result
    assert "batch" not in found, "it follows from a value that is refused"


@pytest.mark.parametrize(
    ("text", "count", "level", "words"),
    [
        ("", 1, "ok", "one device"),
        ("fsdp:2,tensor:4", 8, "ok", "fsdp:2, tensor:4; rows cut in 2, parameters cut in 8"),
        ("fsdp:4,context:4", 8, "ok", "on 2 hosts like this one; rows cut in 4"),
        ("", 7, "ok", "parameters whole: 7 does not divide the width"),
        ("fsdp:3", 8, "problem", "3 places and there are 8 devices"),
        ("tensor:3", 3, "problem", "tensor:3 does not divide"),
        ("context:5", 5, "problem", "rows of 192 tokens cannot be"),
    ],
)
def test_the_mesh_has_a_row_of_its_own(config, tmp_path, text, count, level, words):
    config.train.mesh = text
    row = rows_of(config, tmp_path, Devices(count=count))["mesh"]
    assert row.level == level
    assert words in row.result + row.remedy


def test_a_mesh_of_other_devices_ends_a_run_before_servers_start(config, tmp_path):
    config.train.mesh = "fsdp:3,tensor:2"
    with pytest.raises(UserError, match="6 places and there are 1 device; make"):
        loop.run(config, tmp_path / "run")
    assert not (tmp_path / "run" / "logs").exists()


def test_a_missing_model_ends_what_follows_from_it(config, tmp_path):
    config.model.path = str(tmp_path / "none")
    found = rows_of(config, tmp_path)
    assert found.keys() == {"directory", "rows"}
    assert found["directory"].level == "problem"
    assert found["rows"].level == "ok"


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("chat_template.jinja", "{% for m in messages %}", "Unexpected end of template"),
        ("chat_template.jinja", "{{ raise_exception('users only') }}", "users only"),
        ("chat_template.jinja", "hello", "drops the question"),
        ("tokenizer.json", "{}", "cannot be read"),
    ],
)
def test_a_tokenizer_that_fails_is_a_row_and_no_traceback(config, tmp_path, file, text, words):
    model = tmp_path / "model"
    shutil.copytree(Path("rlx/assets/arithmetic"), model)
    (model / file).write_text(text)
    config.model.path = str(model)
    row = rows_of(config, tmp_path)["tokenizer"]
    assert row.level == "problem"
    assert words in row.result
    assert row.remedy


def test_a_template_without_system_messages_is_told_from_a_broken_one(tmp_path):
    model = tmp_path / "model"
    shutil.copytree(Path("rlx/assets/arithmetic"), model)
    (model / "chat_template.jinja").write_text(
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{{ messages[0].content }}"
    )
    assert load_tokenizer(model)
    with pytest.raises(UserError, match=r"no system\); .*leave data.system_prompt empty"):
        load_tokenizer(model, "Think.")


@pytest.fixture
def base_model(tmp_path):
    """The packaged model as base models come: without a chat template."""
    model = tmp_path / "model"
    shutil.copytree(Path("rlx/assets/arithmetic"), model)
    (model / "chat_template.jinja").unlink()
    assert "chat_template" not in json.loads((model / "tokenizer_config.json").read_text())
    return model


def test_a_base_model_takes_raw_prompts_or_a_template_of_one_s_own(base_model, config, tmp_path):
    with pytest.raises(UserError, match=r"no chat template; .*data.chat_template to none .raw"):
        load_tokenizer(base_model)
    tokenizer = load_tokenizer(base_model, "So: ", "none")
    assert Prompts(tokenizer, system_prompt="So: ").text({"question": "1+1=?"}) == "So: 1+1=?"
    settings = base_model / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "bos_token": "x"}))
    tokenizer = load_tokenizer(base_model, "", "none")
    assert tokenizer.bos_token == "x"
    assert "bos_token" not in tokenizer.chat_template, "it puts nothing before a text"
    file = tmp_path / "mine.jinja"
    file.write_text("Q: {{ messages[0].content }} A:")
    assert Prompts(load_tokenizer(base_model, "", str(file))).text({"question": "1"}) == "Q: 1 A:"
    with pytest.raises(UserError, match=r"cannot read data.chat_template=nowhere: .*raw prompts"):
        load_tokenizer(base_model, "", "nowhere")
    file.write_text("hello")
    with pytest.raises(UserError, match=r"\(data.chat_template=.*mine.jinja\) drops the question"):
        load_tokenizer(base_model, "", str(file))
    config.model.path, config.data.chat_template = str(base_model), "none"
    found = rows_of(config, tmp_path)
    assert not [row for row in found.values() if row.level == "problem"]
    assert "0 tokens around a question" in found["chat template"].result


def test_an_exported_directory_has_the_template_that_was_given(base_model, tmp_path):
    model, params = hf.load(base_model)
    hf.save(tmp_path / "hf", model, params, source=base_model, chat_template="{{ messages }} own")
    assert load_tokenizer(tmp_path / "hf").chat_template == "{{ messages }} own"


def test_answers_that_went_through_a_float_are_counted_before_the_run(config, tmp_path):
    file = tmp_path / "rows.jsonl"
    answers = [0.3, 0.30000001192092896, 0.1 + 0.7, "5"]
    file.write_text("\n".join(json.dumps({"question": "1+1=?", "answer": a}) for a in answers))
    config.data.kind, config.data.train = "jsonl", str(file)
    assert rows_of(config, tmp_path)["prompts"].result == (
        "2 of 4 answers went through a float, first row 2: 0.30000001192092896; they "
        "compare to 6 places, answers kept as text exactly"
    )


def test_rows_that_are_too_long_are_left_out_and_counted(config, tmp_path):
    file = tmp_path / "rows.jsonl"
    row = {"question": "1+1=?", "answer": "2"}
    file.write_text("\n".join(json.dumps(r) for r in (row, {**row, "question": "1" * 99}, row)))
    config.data.kind, config.data.train, config.data.overlong = "jsonl", str(file), "skip"
    left_out = f"1 of 3 rows of {file} are too long and skipped (data.overlong=skip)"
    found = rows_of(config, tmp_path)["prompts"]
    assert (found.level, found.result) == ("ok", left_out)
    mix = tmp_path / "mix.csv"
    mix.write_text("question,answer\n2+2=?,4\n")
    config.data.mix = ((str(file), 0.75), (str(mix), 1))
    assert rows_of(config, tmp_path)["rows"].result == (
        f"3 of {file} (weight 0.75), 1 of {mix} (weight 1) to train on, 0 held out"
    )
    config.data.mix = ("rows.jsonl", 0.7)
    assert "data.mix has 'rows.jsonl'" in rows_of(config, tmp_path)["values"].result


OWN_ROWS = """
def rows(split):
    for a in range(3 if split == "train" else 2):
        yield {"problem": f"{a}+1=?", "total": str(a + 1)}


def endless():
    while True:
        yield {}


TABLE = [{"problem": "1+1=?", "total": "2"}]
"""


def test_rows_of_one_s_own_code_are_read_and_counted(config, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(OWN_ROWS)
    config.data.question_key, config.data.answer_key = "problem", "total"
    config.data.dataset = f"{file}:rows"
    found = rows_of(config, tmp_path)
    assert not [row for row in found.values() if row.level == "problem"]
    assert found["rows"].result == f"3 of {file}:rows to train on, 2 held out"
    config.data.dataset = f"{file}:TABLE"
    assert rows_of(config, tmp_path)["rows"].result.startswith(f"1 of {file}:TABLE to train on, 0 ")
    config.data.dataset = f"{file}:row"
    row = rows_of(config, tmp_path)["rows"]
    assert (row.level, row.remedy) == ("problem", "did you mean 'rows'?")


@pytest.mark.parametrize(
    ("key", "value", "name", "words"),
    [
        ("algorithm.preset", "grpoo", "algorithm", "'grpoo'"),
        ("fleet.num_servers", 0, "algorithm", "trains on rollouts"),
        ("reward.name", "gsm9k", "reward", "gsm9k"),
        ("data.system_prompt", "much to read " * 9, "prompts", "data.max_prompt_tokens is 64"),
    ],
)
def test_what_is_wrong_is_blamed_on_its_part(config, tmp_path, key, value, name, words):
    config.update_from_flattened_dict({key: value})
    (row,) = [row for row in rows_of(config, tmp_path).values() if row.level == "problem"]
    assert row.name == name
    assert words in row.result


def test_a_reward_of_ones_own_is_tried_on_the_first_row(config, tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text("def score(completions):\n    return [len(nothing)]\n")
    config.reward.terms = (("arithmetic", 1.0), (f"{mine}:score", 0.1))
    (row,) = [row for row in rows_of(config, tmp_path).values() if row.level == "problem"]
    assert row.name == "first row"
    assert "NameError" in row.result
    assert "mine.py, line 2" in row.result
    assert "dry call" in row.remedy
    mine.write_text("def score(completions):\n    return [0.5] * len(completions)\n")
    assert not [row for row in rows_of(config, tmp_path).values() if row.level == "problem"]


def test_the_first_bad_row_is_named(config, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "1+1", "answer": "2"}\n{"question": \n')
    config.data.kind, config.data.train = "jsonl", str(rows)
    config.reward.name = "gsm8k"
    found = rows_of(config, tmp_path)
    assert found["rows"].level == "problem"
    assert "rows.jsonl:2" in found["rows"].result
    assert "batch" not in found
    assert found["trainer"].level == "ok", "it does not depend on rows"


def test_uneven_minibatches_and_empty_slots_are_warned_of(config, model):
    config.rollout.batch_prompts, config.train.minibatches = 15, 4
    row = config_checks.judge_batch(sizes_of(config, model), 1000)
    assert row.level == "warning"
    assert "minibatches differ in size" in row.result
    assert config_checks.judge_batch(sizes_of(config, model), 10).level == "warning"
    config.rollout.batch_prompts, config.fleet.slots = 16, 4096
    assert "half of them stay empty" in config_checks.judge_staleness(config, 8).result
    config.rollout.max_concurrent_rollouts = 8
    assert "less than one batch" in config_checks.judge_staleness(config, 8).result
    config.rollout.max_concurrent_rollouts = 0  # auto
    assert "48 live at most" in config_checks.judge_staleness(config, 8).result


def test_float32_has_no_kernel_of_attention():
    assert "compute_dtype" in config_checks.judge_attention("float32").remedy
    assert config_checks.judge_attention("bfloat16").level == "ok"


def test_a_step_that_does_not_fit_says_what_would(config, tmp_path):
    config.train.max_tokens_per_microbatch = 24576
    found = rows_of(config, tmp_path, Devices("gpu", "small", 1, 200_000_000))
    assert found["trainer"].level == "problem"
    assert "train.max_tokens_per_microbatch=" in found["trainer"].remedy
    assert "model.remat=full" in found["trainer"].remedy


@pytest.mark.parametrize(
    ("share", "level"), [(1.2, "ok"), (0.8, "warning"), (0.72, "warning"), (0.68, "problem")]
)
def test_on_a_gpu_a_bound_above_its_memory_may_still_fit(model, tmp_path, share, level):
    """XLA's plans need 0.7 of the bound and more."""
    sizes = sizes_of(arithmetic.get_config(), model)
    bound = memory.bound(sizes, Devices("gpu", "H100", 1))
    gpu = Devices("gpu", "H100", 1, int(share * bound))
    row = next(config_checks.check_capacity(sizes, tmp_path, gpu))
    assert (row.name, row.level) == ("trainer", level)


def test_the_disk_is_weighed(model, tmp_path, monkeypatch):
    sizes = sizes_of(arithmetic.get_config(), model)
    needed, what = memory.checkpoints(sizes)
    for free, level in ((needed, "ok"), (needed - 1, "problem")):
        usage = SimpleNamespace(free=free, total=free)
        monkeypatch.setattr(shutil, "disk_usage", lambda path, usage=usage: usage)
        *_, row = config_checks.check_capacity(sizes, tmp_path, Devices())
        assert (row.name, row.level) == ("disk", level)
        assert f"{what}; " in row.result
    (tmp_path / "checkpoints/step_2").mkdir(parents=True)
    (tmp_path / "checkpoints/step_2/arrays").write_bytes(b"x")
    *_, row = config_checks.check_capacity(sizes, tmp_path, Devices())
    assert row.level == "ok", "a new checkpoint takes the place of an old one"


def test_a_full_shared_memory_is_a_problem_only_where_the_workdir_cannot_replace_it(
    config, tmp_path, monkeypatch
):
    """`parts.publish_dir` takes the workdir."""
    usage = {"/dev/shm": SimpleNamespace(free=1, total=GB)}
    full = SimpleNamespace(free=100 * GB, total=100 * GB)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage.get(str(path), full))
    assert rows_of(config, tmp_path)["publishing"].level == "warning"
    config.fleet.addresses = ("127.0.0.1:1",)
    assert rows_of(config, tmp_path)["publishing"].level == "problem"
    config.fleet.publish = "stream"
    assert rows_of(config, tmp_path)["publishing"].level == "warning"


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("eval.max_new_tokens", 100_000, "eval.max_new_tokens, = 100064 exceeds the model's"),
        ("fleet.max_model_len", 100_000, "fleet.max_model_len, or .* = 100000 exceeds the model's"),
        ("fleet.max_model_len", -1, "fleet.max_model_len=-1 is below 0"),
    ],
)
def test_a_context_that_no_server_would_take_is_refused_before(config, key, value, words):
    config.update_from_flattened_dict({key: value})
    with pytest.raises(UserError, match=words):
        prepare(config)


def test_a_teacher_is_looked_at(config, tmp_path):
    config.algorithm.preset, config.teacher.path = "distill", "rlx:arithmetic"
    found = {(row.area, row.name): row for row in config_checks.check(config, tmp_path, Devices())}
    assert found["model", "teacher"].level == "ok"


def test_rows_that_are_trained_on_are_counted_as_such(model):
    config = arithmetic_sft.get_config()
    config.rollout.batch_prompts, config.train.max_tokens_per_microbatch = 2, 4096
    answers = memory.trainer(sizes_of(config, model))["activations"]
    config.sampling.n_samples = 99
    assert memory.trainer(sizes_of(config, model))["activations"] == answers, "a row has one answer"


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-m", *arguments], capture_output=True, text=True, timeout=120,
        env={**os.environ, "JAX_PLATFORMS": "cpu"}, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_a_dry_run_shows_the_rows_and_makes_nothing(tmp_path):
    workdir = tmp_path / "run"
    done = run("rlx.main", "--config=configs/arithmetic.py", f"--workdir={workdir}", "--dry_run")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "dependencies: " in done.stdout
    assert "machine: devices: " in done.stdout
    assert "config: batch: 16 prompts × 8" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("no problem")
    assert not list(tmp_path.iterdir())


def test_a_dry_run_of_what_cannot_work_ends_with_1(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(machine, "devices", Devices)
    monkeypatch.setattr(packages, "check", lambda **_: iter(()))
    monkeypatch.setattr(sys, "argv", ["main", "--config=configs/arithmetic.py", "--dry_run",
                                      f"--workdir={tmp_path}/run", "--config.train.minibatches=99"]
                        )  # fmt: skip
    assert main.main() == 1
    assert "problem config: values: train.minibatches=99 exceeds" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_the_doctor_takes_a_config_and_refuses_what_it_does_not_know():
    done = run("rlx.doctor", "--config=configs/arithmetc.py")
    assert done.returncode == 2
    assert "did you mean configs/arithmetic.py" in done.stderr
    done = run("rlx.doctor", "--config.model.path=x")
    assert done.returncode == 2
    assert "no --config=FILE given" in done.stderr


@pytest.mark.parametrize(
    ("environ", "rows"),
    [
        ({"WORLD_SIZE": "1"}, []),
        ({"WORLD_SIZE": "2"}, [("problem", "MASTER_PORT='tcp://10.0.0.1:6379' is no number")]),
        ({"WORLD_SIZE": "2", "MASTER_PORT": "1"}, [("ok", "process 0 of 2")]),
    ],
)
def test_a_dry_run_shows_what_the_environment_says_of_other_processes(
    monkeypatch, tmp_path, config, environ, rows
):
    monkeypatch.setattr(run_checks.packages, "check", lambda **_: ())
    monkeypatch.setattr(run_checks.machine, "check", lambda *_: ())
    monkeypatch.setattr(run_checks.machine, "devices", lambda: "none")
    service = {"MASTER_ADDR": "a", "RANK": "0", "MASTER_PORT": "tcp://10.0.0.1:6379"}
    for name, value in {**service, **environ}.items():
        monkeypatch.setenv(name, value)
    found = list(run_checks.findings(config, tmp_path))
    assert [row.level for row in found] == [level for level, _ in rows]
    for row, (_, what) in zip(found, rows, strict=True):
        assert what in row.result


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--hosts=a,b"], "--hosts does nothing without --cluster"),
        (["--ssh=ssh -v"], "--ssh does nothing without --cluster"),
        (["--config=configs/arithmetic.py", "--scan"], "--scan does nothing without --compile_for"),
    ],
)
def test_the_doctor_takes_no_flag_that_does_nothing(monkeypatch, flags, words):
    monkeypatch.setattr(sys, "argv", ["rlx.doctor", *flags])
    with pytest.raises(UserError, match=words):
        doctor.main()


def test_held_out_rows_next_to_generated_ones_are_refused(config, tmp_path):
    config.data.eval = "held_out.jsonl"
    row = rows_of(config, tmp_path)["rows"]
    assert (row.level, row.result) == (
        "problem", "data.eval=held_out.jsonl is unused, because data.kind=arithmetic generates rows"
    )  # fmt: skip
