"""Environments of OpenEnv: the package's own server and client, played against our gateway."""

import subprocess
import sys
from pathlib import Path

import pytest

from rlx.agents.agent_options import AgentOptions
from rlx.agents.workflow import AgentWorkflow
from rlx.base import UserError
from rlx.config import check, default, with_environment
from rlx.environments import openenv_tasks
from rlx.evaluation import question_sets
from rlx.evaluation.runner import Evaluator
from rlx.rollout import data
from rlx.rollout.attempts import Patience, RolloutError
from tests.fixtures.evaluator_fleet import Fleet

NOWHERE = "openenv:http://127.0.0.1:9"
FORM = {"properties": {"metadata": {"type": "object"}, "word": {"type": "string"}}}


def test_a_name_sets_rows_and_workflow():
    config = default()
    config.model.path = "rlx:arithmetic"
    config.rollout.workflow = NOWHERE
    check(with_environment(config))
    assert (config.data.dataset, config.rollout.workflow) == (NOWHERE, openenv_tasks.AGENT)


def test_answers_are_a_field_of_the_action_or_all_of_it():
    move = {"x": {"type": "integer"}, "y": {"type": "integer"}}
    assert openenv_tasks._field(FORM, "") == "word"
    assert openenv_tasks._field({"properties": move}, "") == ""
    assert openenv_tasks._field({"properties": {**move, "say": {"type": "string"}}}, "say") == "say"
    with pytest.raises(UserError, match="did you mean 'word'"):
        openenv_tasks._field(FORM, "wort")
    assert openenv_tasks._text({"text": "hi", "done": False, "metadata": {}}) == "hi"
    assert openenv_tasks._text({"board": [1], "done": False}) == '{"board": [1]}'


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "openenv.core", None)
    with pytest.raises(UserError, match=r"need packages .*; pip install .*openenv"):
        data.load(NOWHERE)


@pytest.fixture(scope="module")
def url():
    """The address of a running server."""
    pytest.importorskip("openenv.core", reason="openenv-core is not installed")
    place = Path(__file__).with_name("openenv_server.py")
    command = [sys.executable, "-W", "ignore", str(place)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield f"openenv:http://127.0.0.1:{process.stdout.readline().strip()}"
        process.kill()


@pytest.fixture(scope="module")
def shared(agents, url):
    """Evaluates episodes by one worker, which takes seconds to start; yields it and its engine."""
    workflow = AgentWorkflow(
        openenv_tasks.AGENT, agents.tokenizer(), agents.sampling, 1, options=AgentOptions()
    )
    engine = agents.engine()
    connect = Fleet(agents, engine).connect
    with Evaluator(connect, workflow, patience=Patience(attempts=1), timeout=120.0) as run:
        yield run, engine


@pytest.mark.witnesses
def test_rows_are_episodes_and_no_seed_is_in_two_splits(url):
    train, held_out = data.load(f"{url}?size=50"), data.load(f"{url}?size=50", split="test")
    seeds = [{row["seed"] for row in rows} for rows in (train, held_out)]
    assert len(seeds[0]) == len(seeds[1]) == 50
    assert not seeds[0] & seeds[1]
    assert train == data.load(f"{url}?size=50")
    ((found, rows),) = question_sets.load_sets(url, "arithmetic", 3)
    assert (found.workflow, len(rows)) == (openenv_tasks.AGENT, 3)
    with pytest.raises(UserError, match="did you mean 'turns'"):
        data.load(f"{url}?turn=3")


def test_a_server_that_is_down_is_one_line():
    pytest.importorskip("openenv.core", reason="openenv-core is not installed")
    with pytest.raises(UserError, match=r"does not answer: .*; start its server") as error:
        data.load(NOWHERE)
    assert "\n" not in str(error.value)


@pytest.mark.witnesses
def test_an_episode_is_one_trajectory_with_the_sum_of_its_rewards(url, shared):
    run, engine = shared
    (row,) = data.load(f"{url}?size=1")
    right = str(row["seed"] % 10 + 1)
    engine.reply = lambda prompt, *_: right if "Once more." in prompt else "?"
    ((trajectory,),) = [group.trajectories for group in run.rollout_batch([row], n=1, timeout=120)]
    assert trajectory.prompt == f"<|user|>Compute {row['seed'] % 10} + 1.<|end|><|assistant|>"
    assert trajectory.completion == f"?<|end|><|user|>Once more.<|end|><|assistant|>{right}<|end|>"
    assert (trajectory.reward, trajectory.info["steps"]) == (0.75, 2.0)
    engine.reply = lambda *_: "?"
    (limited,) = data.load(f"{url}?size=1&turns=3")
    (group,) = run.rollout_batch([limited], n=1, timeout=120)
    assert group.trajectories[0].reward == -0.75


@pytest.mark.witnesses
@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("raise", r"failed after 0 steps: .*the board is broken"),
        ("nan", "without a reward, or with NaN"),
    ],
)
def test_an_environment_that_fails_is_one_line_and_others_go_on(url, shared, said, message):
    run, engine = shared
    (row,) = data.load(f"{url}?size=1")
    engine.reply = lambda *_: said
    with pytest.raises(RolloutError, match=message):
        run.submit(row).result(120)
    run._waiting.clear()
    engine.reply = lambda *_: str(row["seed"] % 10 + 1)
    (group,) = run.rollout_batch([row], n=1, timeout=120)
    assert group.trajectories[0].reward == 1.0
