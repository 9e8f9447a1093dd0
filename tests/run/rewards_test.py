"""A run's rewards are tried before anything starts, and a reward model is served."""

import json
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

import jax
import pytest

from rlx.base import UserError
from rlx.config import default
from rlx.launch.teacher import ScorerOptions
from rlx.model import hf
from rlx.model import params as parameters
from rlx.rollout.workflows import Prompts
from rlx.run import inputs, tokenizer_files
from rlx.run.room_options import check_reward, judge_of
from rlx.system.threads import LoopThread
from rlx.workers import worker_process
from tests.fixtures.chat_server import ChatServer
from tests.fixtures.commands import FLOAT32, RLX_MAIN

ROW = {"question": "q7", "answer": "x"}


def tried(tokenizer, *names, seconds=20.0):
    config = default()
    config.reward.terms = tuple((name, 1.0) for name in names)
    config.reward.timeout_seconds = seconds
    given = inputs.Inputs()
    given.weights, given.prompts = check_reward(config), Prompts(tokenizer)
    inputs._try_rewards(config, given, ROW)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def score(completion): ...", ["TypeError", "mine.py, line 1", "q7", "dry call"]),
        ("def score(*a, **k):\n  return a.x", ["AttributeError", "mine.py, line 2", "q7"]),
        ("def score(*a, **k):\n  while 1: pass", ["1 s (reward.timeout_seconds)", "line 1"]),
        ("def score(*a, **k):\n  return 'good'", ["'good'; a reward is", "line 1", "q7"]),
        ("async def score(*a, **k): return None", ["None; a reward is", "line 1", "q7"]),
        ("def score(completions): return [1]", ["1 rewards were returned for 2", "line 1", "q7"]),
        ("x = 1", ["mine.py has no 'score'"]),
        ("def scor(): ...", ["did you mean 'scor'?"]),
        ("import nowhere", ["cannot import", "ModuleNotFoundError", "mine.py, line 1"]),
        ("raise SystemExit(3)", ["SystemExit: 3", "mine.py, line 1"]),
    ],
)
def test_what_is_wrong_with_a_reward_is_one_line(tokenizer, tmp_path, source, words):
    path = tmp_path / "mine.py"
    path.write_text(source)
    with pytest.raises(UserError) as caught:
        tried(tokenizer, "gsm8k", f"{path}:score", seconds=1.0)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


def test_rewards_that_work_or_come_with_rlx_pass(tokenizer, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("async def score(completions): return [1] * len(completions)")
    tried(tokenizer, "gsm8k", f"{tmp_path}/mine.py:score")
    monkeypatch.setattr(worker_process, "SupervisedProcess", None)
    tried(tokenizer, "gsm8k", "math")


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory):
    """The embedded model with a random value head, as preset reward_model exports it."""
    policy, directory = hf.resolve("rlx:arithmetic"), tmp_path_factory.mktemp("reward") / "hf"
    config, params = hf.load(policy)
    params, config = parameters.with_value_head(params, config)
    params["value_head"] = jax.random.normal(jax.random.key(0), params["value_head"].shape)
    hf.save(directory, config, params, source=policy)
    return directory


def rewarded_by(tokenizer, path, *terms, **keys):
    config = default()
    config.data.max_prompt_tokens, config.sampling.max_new_tokens = 64, 128
    config.reward.model.path, config.reward.terms = str(path), terms
    config.update_from_flattened_dict(keys)
    options = ScorerOptions.of_reward_model(config)
    return inputs._model_rewarded(config, options, Prompts(tokenizer))


def test_a_reward_model_is_checked_before_anything_starts(tokenizer, reward_model):
    assert rewarded_by(tokenizer, "") is None
    for path, terms in ((reward_model, ()), ("", (("model", 1.0),))):
        with pytest.raises(UserError, match="the reward 'model' need each other; set the path"):
            rewarded_by(tokenizer, path, *terms)
    with pytest.raises(UserError, match=r"path=rlx:arithmetic is a language model of .*, wanted"):
        rewarded_by(tokenizer, "rlx:arithmetic", ("model", 1.0))
    with pytest.raises(UserError, match=r"a reward model of 9064; train one with preset rew"):
        rewarded_by(tokenizer, reward_model, ("model", 1.0), **{"sampling.max_new_tokens": 9000})
    own = tokenizer_files.load_tokenizer(reward_model)
    assert rewarded_by(own, reward_model, ("model", 0.5)).keywords == {"weight": 0.5}
    other = rewarded_by(tokenizer, reward_model, ("model", 0.5)).keywords
    assert other["prompts"].text(ROW) == Prompts(own).text(ROW)
    assert other["end"] in hf.load_config(reward_model).eos_token_ids


def test_a_judge_and_its_reward_need_each_other():
    config = default()
    assert judge_of(config) is None
    config.reward.terms = (("gsm8k", 1.0), ("judge", 0.5))
    with pytest.raises(UserError, match="need each other; name a model"):
        judge_of(config)
    config.reward.judge.models = ("m@http://127.0.0.1:1/v1",)
    _, weight = judge_of(config)
    assert weight == 0.5
    assert check_reward(config) == {"gsm8k": 1.0}
    config.reward.terms = ()
    with pytest.raises(UserError, match=r"reward\.name=judge or add"):
        judge_of(config)


@pytest.mark.slow
def test_a_run_is_graded_by_a_judge_of_which_it_keeps_the_verdicts(tmp_path):
    server, loop = ChatServer(json.dumps({"reason": "so so", "score": 4})), LoopThread("judge")
    loop.start()
    served = server.serve()
    url = loop.run(served.__aenter__())
    command = [
        *RLX_MAIN, "--config=configs/arithmetic.py", f"--workdir={tmp_path}",
        "--config.reward.terms=(('arithmetic', 1.0), ('judge', 0.5))",
        f"--config.reward.judge.models=('m@{url}',)",
        "--config.rollout.batch_prompts=2", "--config.sampling.n_samples=2",
        "--config.total_steps=2", "--config.sampling.max_new_tokens=32", "--config.fleet.slots=4",
        "--config.eval.num_questions=2", "--config.gate.enabled=False", FLOAT32,
    ]  # fmt: skip
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    finally:
        loop.run(served.__aexit__(None, None, None))
        loop.close()
    assert done.returncode == 0, done.stdout + done.stderr
    for record in map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines()):
        assert record["reward/judge"] == pytest.approx(0.4)
        wanted = record["reward/arithmetic"] + 0.5 * record["reward/judge"]
        assert record["task_reward"] == pytest.approx(wanted, abs=1e-4)
        assert "judge/tokens" in record
    for record in map(json.loads, (tmp_path / "eval.jsonl").read_text().splitlines()):
        assert "reward/judge" in record
    with closing(sqlite3.connect(tmp_path / "judge.sqlite3")) as kept:
        assert 0 < kept.execute("SELECT count(*) FROM verdicts").fetchone()[0] <= len(server.asked)


@pytest.mark.slow
def test_a_run_learns_from_a_reward_model_and_leaves_no_process(reward_model, tmp_path):
    command = [
        *RLX_MAIN, "--config=configs/arithmetic.py",
        f"--workdir={tmp_path}", f"--config.reward.model.path={reward_model}",
        "--config.reward.terms=(('arithmetic', 1.0), ('model', -0.5))",
        "--config.rollout.batch_prompts=2", "--config.sampling.n_samples=2",
        "--config.total_steps=2", "--config.sampling.max_new_tokens=32", "--config.fleet.slots=4",
        "--config.eval.num_questions=2", "--config.gate.enabled=False", FLOAT32,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    for record in map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines()):
        assert record["reward/model"] != 0
        wanted = record["reward/arithmetic"] - 0.5 * record["reward/model"]
        assert record["task_reward"] == pytest.approx(wanted, abs=1e-4)
    for record in map(json.loads, (tmp_path / "eval.jsonl").read_text().splitlines()):
        assert "reward/model" in record
    assert (tmp_path / "logs" / "reward-model-0.log").exists()
    names = [entry for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    assert not [n for n in names if str(reward_model).encode() in _command(n)]


def _command(entry: Path) -> bytes:
    try:
        return (entry / "cmdline").read_bytes()
    except OSError:
        return b""
