"""Evaluations: what is still to ask, continuing, names, and the command on the packaged model."""

import asyncio
import json
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import jax
import numpy as np
import pytest

from configs import arithmetic
from rlx import config as rlx_config
from rlx.base import UserError
from rlx.evaluation import question_sets, sample_files
from rlx.evaluation.sample_files import GREEDY, QuestionOptions, SampleRange
from rlx.fleet.requests import Sampling
from rlx.launch.local import LocalServers
from rlx.model import directory, hf
from rlx.rollout import arithmetic as rollout_arithmetic
from rlx.run.export import named_models
from rlx.run.room_options import RunOptions
from rlx.run.score_models import _Job, _Model, score_models
from rlx.system.jsonl import append_jsonl, read_jsonl, set_aside
from rlx.system.workdir_lock import fresh_workdir, lock_workdir
from tests.fixtures.chat_server import ChatServer
from tests.fixtures.commands import FLOAT32, RLX_MAIN, without_torch

ASK = [
    *without_torch("rlx.evaluate"), "--config=configs/arithmetic.py",
    "--datasets=arithmetic,{file}", "--limit=4", "--n_samples=10", "--pass_at=8", "--maj_at=5",
    "--max_gen_tokens=48", "--output={out}", FLOAT32,
]  # fmt: skip


def score(config, models, sets, out, **options):
    """The table of a config's evaluation."""
    return score_models(config, models, sets, QuestionOptions(**options), out, lambda *_: None)


def ask(out, file):
    command = [part.format(out=out, file=file) for part in ASK]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_what_is_pending_is_what_the_file_does_not_have(tmp_path):
    path = tmp_path / "samples.jsonl"
    assert sample_files.pending(path, 1, 10) == [
        SampleRange(0, GREEDY, 1),
        SampleRange(0, 0, 8),
        SampleRange(0, 8, 2),
    ]
    for sample in (GREEDY, 8, 9, 3):
        append_jsonl(path, {"index": 0, "sample": sample})
    assert sample_files.pending(path, 1, 10) == [SampleRange(0, 0, 8)]
    assert sample_files.pending(path, 1, 0) == []
    assert len(sample_files.pending(path, 2, 10)) == 4


def test_a_sample_counts_once_and_only_those_asked_for(tmp_path):
    path = tmp_path / "samples.jsonl"
    for sample, reward in ((GREEDY, 1.0), (0, 1.0), (0, 0.0), (1, 0.0), (2, 1.0)):
        append_jsonl(path, {"index": 0, "sample": sample, "reward": reward, "tokens": 5,
                            "answer": str(reward)})  # fmt: skip
    asked = QuestionOptions(n_samples=2, pass_at=(2,), maj_at=())
    row = sample_files.summary("x", path, 1, asked)
    assert (row["greedy_acc"], row["sample_pass@1"], row["pass@2"]) == (1.0, 0.5, 1.0)


@pytest.mark.slow
def test_the_command_prints_the_table_and_goes_on_where_it_stopped(tmp_path):
    file = tmp_path / "own.jsonl"
    rows = [{"question": "20a+3b=?", "answer": "23"}, {"question": "41a-1b=?", "answer": "40"}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "out"
    first = ask(out, file)
    assert first.returncode == 0, first.stderr
    header, *lines = first.stdout.splitlines()
    assert header.split() == [
        "dataset", "num_questions", "greedy_length", "sample_length", "greedy_acc",
        "sample_pass@1", "pass@8", "maj@5",
    ]  # fmt: skip
    assert [line.split()[:2] for line in lines] == [["arithmetic", "4"], ["own", "2"]]
    results = json.loads((out / "results.json").read_text())
    assert all(set(row["intervals"]) == set(header.split()[2:]) for row in results)

    samples = out / "arithmetic" / "arithmetic.jsonl"
    whole = samples.read_bytes()
    lines = whole.splitlines(keepends=True)
    assert len(lines) == 4 * 11
    kept = b"".join(lines[:17])
    samples.write_bytes(kept + lines[17][:20])  # killed in the middle of a line
    second = ask(out, file)
    assert second.returncode == 0, second.stderr
    assert "own" not in second.stderr  # nothing to ask of it any more
    assert samples.read_bytes().startswith(kept)
    seen = {(r["index"], r["sample"]): r["completion"] for r in read_jsonl(samples)}
    before = [json.loads(line) for line in lines]
    # Seeds are the samples' own, so what was generated again is what was lost.
    assert seen == {(r["index"], r["sample"]): r["completion"] for r in before}
    assert second.stdout == first.stdout

    changed = subprocess.run(
        [*[p.format(out=out, file=file) for p in ASK], "--temperature=0.7"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert changed.returncode == 2
    assert "temperature=0.6, this one has 0.7; give another --output" in changed.stderr


def test_a_question_that_failed_is_wrong_without_a_length_and_asked_again(tmp_path):
    path, asked = tmp_path / "set.jsonl", QuestionOptions(n_samples=2, pass_at=())
    good = {"question": "q", "answer": "1", "completion": "1", "reward": 1.0, "tokens": 4}
    bad = {**good, "answer": None, "completion": "", "reward": 0.0, "tokens": 0, "error": "E: no"}
    for index, kinds in enumerate([[good, good, good], [bad, bad, bad]]):
        for sample, record in zip((-1, 0, 1), kinds, strict=True):
            append_jsonl(path, {**record, "index": index, "sample": sample})
    row = sample_files.summary("set", path, 2, asked)
    assert (row["greedy_acc"], row["sample_pass@1"], row["greedy_length"]) == (0.5, 0.5, 4.0)
    assert row["failed"] == 1
    assert [(j.index, j.first) for j in sample_files.pending(path, 2, 2)] == [(1, -1), (1, 0)]
    for sample in (-1, 0, 1):
        append_jsonl(path, {**good, "index": 1, "sample": sample})
    row = sample_files.summary("set", path, 2, asked)
    assert (row["greedy_acc"], row["failed"]) == (1.0, 0)
    assert sample_files.pending(path, 2, 2) == []


def test_models_are_named_by_what_tells_them_apart(tmp_path, monkeypatch):
    for path in ("a/hf", "b/hf"):
        (tmp_path / path).mkdir(parents=True)
    names = named_models([str(tmp_path / "a/hf"), str(tmp_path / "b/hf"), "rlx:arithmetic"])
    assert list(names)[:2] == ["a-hf", "b-hf"]
    assert named_models(["rlx:arithmetic"]).keys() == {"arithmetic"}
    monkeypatch.chdir(tmp_path)
    copy = str(tmp_path).lstrip("/")  # of the same path below this directory
    Path(copy).mkdir(parents=True)
    assert len(named_models([str(tmp_path), copy])) == 2, "one was left out in silence"
    assert named_models([".."]).keys() == {"model"}, "its samples would lie above --output"
    with pytest.raises(UserError, match="twice"):
        named_models(["rlx:arithmetic", "rlx:arithmetic"])


def test_too_long_an_answer_for_the_model_is_explained(tmp_path):
    config = rlx_config.default()
    config.sampling.max_new_tokens = 100_000
    models = named_models(["rlx:arithmetic"])
    with pytest.raises(UserError, match="exceeds the context"):
        score(config, models, [], Path(tmp_path))


def test_rows_of_a_run_with_several_rewards_are_graded_by_the_one_that_is_named(tmp_path, capsys):
    config = arithmetic.get_config()
    sets = [question_sets.find(name, config.reward.name) for name in ("arithmetic", "own.jsonl")]
    for terms, said in ((), ""), ((("mine.py:brevity", 1.0),), "own is graded by reward.name=ar"):
        config.reward.terms = terms
        assert score(config, {}, [(each, []) for each in sets], tmp_path) == []
        assert said in capsys.readouterr().err


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run's directory with a checkpoint: one step of LoRA on demonstrations."""
    workdir = tmp_path_factory.mktemp("run")
    command = [
        *RLX_MAIN, "--config=configs/arithmetic_sft.py",
        "--config.lora.rank=2", "--config.fleet.num_servers=0", "--config.rollout.batch_prompts=4",
        "--config.total_steps=1", FLOAT32, f"--workdir={workdir}",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return workdir


@pytest.mark.slow
def test_a_checkpoint_is_asked_beside_an_hf_directory(trained, tmp_path):
    """Both are one policy, and float32 all the way, so greedy answers are the same."""
    command = [
        *without_torch("rlx.evaluate"), "--config=configs/arithmetic.py",
        "--datasets=arithmetic",
        f"--models={trained},{trained / 'hf'}", "--limit=3", "--n_samples=0",
        "--max_gen_tokens=16", f"--output={tmp_path}", "--config.model.publish_dtype=float32",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    settings = json.loads((tmp_path / "settings.json").read_text())
    names = list(settings["models"])
    assert names == [trained.name, "hf"]
    assert settings["models"][trained.name].endswith("checkpoints/step_00000001")
    answers = [
        {r["index"]: r["completion"] for r in read_jsonl(tmp_path / name / "arithmetic.jsonl")}
        for name in names
    ]
    assert answers[0] == answers[1]
    assert (tmp_path / names[0] / "hf" / "model.safetensors").exists()
    header, *lines = done.stdout.splitlines()
    assert header.split()[:3] == ["model", "dataset", "num_questions"]
    assert [line.split()[:2] for line in lines] == [[name, "arithmetic"] for name in names]


@pytest.mark.slow
def test_running_servers_are_given_the_model(tmp_path, monkeypatch):
    """Whatever they serve: answers are those of a server that began with it."""
    base, other = directory.resolve("rlx:arithmetic"), tmp_path / "other"
    described, params = hf.load(base)
    noise = np.random.default_rng(0)
    hf.save(
        other, described,
        jax.tree.map(lambda p: p + 0.02 * noise.standard_normal(p.shape, np.float32), params),
        source=base,
    )  # fmt: skip
    config = arithmetic.get_config()
    config.sampling.max_new_tokens = 16
    sets = [(question_sets.BENCHMARKS["arithmetic"], rollout_arithmetic.problems(0, "held_out", 3))]
    models = {"other": other, "base": base}

    def answers(out):
        score(config, models, sets, out, n_samples=0, pass_at=())
        return [
            {r["index"]: r["completion"] for r in read_jsonl(out / name / "arithmetic.jsonl")}
            for name in models
        ]

    wanted = answers(tmp_path / "own")
    assert wanted[0] != wanted[1]
    with LocalServers(base, workdir=tmp_path, **RunOptions.of(config).servers) as servers:
        monkeypatch.setenv("RLX_FLEET_TOKEN", servers.token)
        with config.unlocked():
            config.fleet.addresses = tuple(servers.wait())
        assert answers(tmp_path / "given") == wanted
    place = tmp_path / "servers"
    with LocalServers(base, workdir=tmp_path, join=place, **RunOptions.of(config).servers) as two:
        monkeypatch.setenv("RLX_FLEET_TOKEN", two.token)
        with config.unlocked():
            config.fleet.addresses, config.fleet.join = (), str(place)
        two.wait()
        assert answers(tmp_path / "joined") == wanted, "a server that joined has other weights"


@pytest.mark.slow
def test_judges_grade_rows_without_answers(tmp_path):
    file = tmp_path / "own.jsonl"
    file.write_text('{"question": "20a+3b=?"}\n{"question": "41a-1b=?"}\n')
    config = arithmetic.get_config()
    config.reward.name, config.sampling.max_new_tokens, config.fleet.slots = "judge", 8, 2
    config.model.compute_dtype = config.model.publish_dtype = "float32"
    models, out = {"a": directory.resolve("rlx:arithmetic")}, tmp_path / "out"
    sets = question_sets.load_sets(str(file), "judge", 0)
    server = ChatServer('{"reason": "good", "score": 10}', '{"reason": "bad", "score": 0}')

    async def evaluate():
        async with server.serve() as url:
            config.reward.judge.models = (f"m@{url}",)
            return await asyncio.to_thread(
                score, config, models, sets, out, n_samples=0, pass_at=()
            )

    (row,) = asyncio.run(evaluate())
    assert (row["num_questions"], row["greedy_acc"], len(server.asked)) == (2, 0.5, 2)
    (rubric := tmp_path / "rubric.txt").write_text("Is it short?")
    config.reward.judge.rubric = str(rubric)
    with pytest.raises(UserError, match=r"with judge=\['m', 'rubric .*this one has \['m', 'rubric"):
        score(config, models, sets, out, n_samples=0, pass_at=())
    config.reward.judge.rubric, config.reward.judge.models = "", ()
    with pytest.raises(UserError, match="need each other"):
        score(config, models, sets, tmp_path / "other", n_samples=0, pass_at=())


def test_an_outage_of_the_servers_is_reported(capsys):
    def fleet(on_message, **_):
        on_message("no rollout server alive")
        raise UserError("stop here")

    config = rlx_config.default()
    model = _Model(config, RunOptions.of(config), QuestionOptions(), None, None)
    with pytest.raises(UserError, match="stop here"):
        model.ask(SimpleNamespace(fleet=fleet), None, None)
    assert capsys.readouterr().err == "no rollout server alive\n"


def test_a_reward_model_is_refused(tmp_path):
    config, valued = rlx_config.default(), tmp_path / "valued"
    shutil.copytree(directory.resolve("rlx:arithmetic"), valued)
    described = json.loads((valued / "config.json").read_text())
    described["architectures"] = ["Qwen2ForSequenceClassification"]
    (valued / "config.json").write_text(json.dumps(described | {"id2label": {"0": "reward"}}))
    with pytest.raises(UserError, match="is a reward model, which generates no text"):
        score(config, {"a": valued}, [], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("limit", [-1, 10**20])
def test_a_limit_out_of_range_is_one_line(limit):
    with pytest.raises(UserError, match=f"--limit={limit} is out of range; give a number up to"):
        question_sets.load_sets("arithmetic", "arithmetic", limit)


def test_data_sets_by_name_path_or_both():
    assert question_sets.find("gsm8k", "x").reward == "gsm8k"
    assert question_sets.find("runs/my.jsonl", "math") == question_sets.Benchmark(
        "my", "runs/my.jsonl", "math"
    )
    assert question_sets.find("gsm8k=some/where.jsonl", "x").reward == "gsm8k"
    assert question_sets.find("mine=rows.jsonl", "math", "problem") == question_sets.Benchmark(
        "mine", "rows.jsonl", "math", "problem"
    )
    assert question_sets.find("runs/x=1/rows.jsonl", "math").name == "rows"
    with pytest.raises(UserError, match="did you mean 'gsm8k'"):
        question_sets.find("gsm8", "x")
    with pytest.raises(UserError, match="names gsm8k twice"):
        question_sets.load_sets("gsm8k=a.jsonl,gsm8k=b.jsonl", "x", 0)


def test_the_questions_of_a_file_have_the_configs_key(tmp_path):
    file = tmp_path / "own.jsonl"
    file.write_text('{"problem": "1+1=?", "answer": "2"}\n')
    for text in (str(file), f"mine={file}"):
        [(_, rows)] = question_sets.load_sets(text, "math", 0, "problem")
        assert (rows[0]["question"], rows[0]["answer"]) == ("1+1=?", "2")
    file = tmp_path / "own.csv"
    file.write_text("problem,final\n1+1=?,2\n")
    [(_, rows)] = question_sets.load_sets(str(file), "gsm8k", 0, "problem", "final")
    assert (rows[0]["question"], rows[0]["answer"]) == ("1+1=?", "2")
    with pytest.raises(UserError, match="has no 'answer', only 'problem', 'final'"):
        question_sets.load_sets(str(file), "gsm8k", 0, "problem")
    with pytest.raises(UserError, match="an evaluation has no reward model"):
        question_sets.load_sets(str(file), "model", 0)


def test_an_evaluation_that_wrote_no_sample_claims_no_directory(tmp_path):
    before = QuestionOptions(temperature=0.1)
    settings = sample_files.settings(before, {"m": "m"}, {}, {}, tmp_path)
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    assert sample_files.settings(QuestionOptions(), {"m": "n"}, {}, {}, tmp_path)
    append_jsonl(tmp_path / "m" / "x.jsonl", {"index": 0, "sample": 0})
    with pytest.raises(UserError, match=r"holds an evaluation with temperature=0.1"):
        sample_files.settings(QuestionOptions(), {"m": "m"}, {}, {}, tmp_path)


def test_a_sample_that_cannot_be_read_is_put_aside_and_asked_for_again(tmp_path):
    path = tmp_path / "set.jsonl"
    sample = {"index": 0, "sample": -1, "tokens": 3, "reward": 1.0, "answer": None}
    spoilt = [{**sample, "index": 1, key: None} for key in ("index", "tokens", "reward")]
    for record in (sample, *spoilt, {**sample, "index": 1, "answer": 7}):
        append_jsonl(path, record)
    assert set_aside(path, sample_files.is_sample) == 4
    assert [job.index for job in sample_files.pending(path, 2, 0)] == [1]
    assert len(list(read_jsonl(path.with_name("set.jsonl.unreadable")))) == 4


def test_an_evaluation_is_refused_where_another_goes_on(tmp_path):
    with lock_workdir(tmp_path), pytest.raises(UserError, match=r"runs in .*give another --output"):
        score(rlx_config.default(), {}, [], tmp_path, n_samples=0, pass_at=())
    assert not list(tmp_path.iterdir())


def test_runs_that_begin_together_get_directories_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(fresh_workdir, ["configs/small.py"] * 64))
    assert len(set(found)) == 64


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("data.chat_template", "a.jinja", "chat_template='a.jinja', this one has None"),
        ("sampling.guide", "{}", "guide='{}', this one has None"),
        ("sampling.stop", ("x",), r"stop=\['x'\], this one has None"),
        ("model.publish_dtype", "bfloat16", "dtype='bfloat16', this one has None"),
        ("reward.name", "math", r"'math'\], this one is \['own.jsonl', 0, 'gsm8k'\]"),
    ],
)
def test_samples_of_another_prompt_end_or_grader_are_not_continued(tmp_path, key, value, told):
    def begin(config):
        name = config.reward.name
        sets = [(question_sets.Benchmark("own", "own.jsonl", name), [])]
        score(config, {}, sets, tmp_path, n_samples=0, pass_at=())

    config = rlx_config.default()
    config.update_from_flattened_dict({key: value})
    begin(config)
    append_jsonl(tmp_path / "m" / "own.jsonl", {"index": 0, "sample": 0})
    begin(config)
    with pytest.raises(UserError, match=told):
        begin(rlx_config.default())


def test_samples_of_other_weights_at_the_same_place_are_not_continued(tmp_path):
    """A run's hf/ is written again by each checkpoint."""
    weights, out = tmp_path / "hf" / "model.safetensors", tmp_path / "out"
    weights.parent.mkdir()
    weights.write_bytes(b"")
    os.utime(weights, (0, 1_000_000_000))
    args = QuestionOptions(), {"hf": str(weights.parent)}, {}, {}, out
    append_jsonl(out / "hf" / "x.jsonl", {"index": 0, "sample": 0})
    before = sample_files.settings(*args)
    (out / "settings.json").write_text(json.dumps(before))
    assert sample_files.settings(*args) == before
    os.utime(weights, (0, 1_100_000_000))
    with pytest.raises(UserError, match="holds hf of weights written Sun Sep  9 01:46:40 2001 UTC"):
        sample_files.settings(*args)
    del before["weights"]  # of an earlier release
    (out / "settings.json").write_text(json.dumps(before))
    assert "2004" in sample_files.settings(*args)["weights"]["hf"]


def test_a_guide_and_stops_of_the_config_hold(tmp_path):
    asked = []

    class Asked(MagicMock):
        def submit(self, row, *, sampling, **_):
            asked.append(sampling)
            raise UserError("stop here")

    config = rlx_config.default()
    config.sampling.guide, config.sampling.stop = '{"type": "integer"}', ("x",)
    model = _Model(config, RunOptions.of(config), QuestionOptions(), None, tmp_path)
    job = _Job("x", [{}], [SampleRange(0, 0, 8)], tmp_path / "x.jsonl", None, None)
    evaluator = patch("rlx.run.score_models.Evaluator", lambda *_, **__: Asked())
    with evaluator, pytest.raises(UserError, match="stop here"):
        model.ask(MagicMock(), job, lambda *_: None)
    assert asked == [Sampling(0.6, 0.95, stop=("x",), guide='{"type": "integer"}')]


def test_samples_of_a_set_with_a_url_are_not_continued_with_other_settings(tmp_path):
    """A set's file is as deep as its name has slashes."""
    settings = sample_files.settings(QuestionOptions(temperature=0.1), {"m": "m"}, {}, {}, tmp_path)
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    append_jsonl(tmp_path / "m" / "openenv:http://a:1.jsonl", {"index": 0, "sample": 0})
    with pytest.raises(UserError, match=r"holds an evaluation with temperature=0.1"):
        sample_files.settings(QuestionOptions(), {"m": "m"}, {}, {}, tmp_path)


def job_of(tmp_path, *rows, reward="gsm8k"):
    config = rlx_config.default()
    model = _Model(
        config, RunOptions.of(config), QuestionOptions(n_samples=0, pass_at=()), None, tmp_path
    )
    return model.job_of(question_sets.Benchmark("own", "own.jsonl", reward), rows)


def test_samples_of_another_question_or_answer_are_not_continued(tmp_path):
    row = {"question": "1+1=?", "answer": "2"}
    sample = {"index": 0, "sample": GREEDY, "reward": 0.0, "tokens": 1, "answer": "2"}
    written = {**sample, "question": row["question"], "answer_key": "3"}
    append_jsonl(tmp_path / "own.jsonl", written)
    assert job_of(tmp_path, row | {"answer": "3"}) is None, "nothing is left to ask"
    for corrected in (row, row | {"question": "1+2=?", "answer": "3"}):
        with pytest.raises(UserError, match="another row 1 of own; give another --output"):
            job_of(tmp_path, corrected)


def test_a_row_that_no_answer_could_solve_is_refused_before_any_is_asked(tmp_path):
    with pytest.raises(UserError, match="row 1: the answer 'x' holds no number"):
        job_of(tmp_path, {"question": "q", "answer": "x"})
