"""A run's rewards are tried on the first row before anything starts."""

import pytest

from rlx.base import UserError
from rlx.config import default
from rlx.rewards import worker_process
from rlx.rollout.workflows import Prompts
from rlx.run import inputs

ROW = {"question": "q7", "answer": "x"}


def tried(tokenizer, *names, seconds=20.0):
    config = default()
    config.reward.terms = tuple((name, 1.0) for name in names)
    config.reward.timeout_seconds = seconds
    inputs._try_rewards(config, Prompts(tokenizer), ROW)


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
