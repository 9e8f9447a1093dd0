"""Games of textarena, played against our gateway."""

import asyncio
import importlib.util
import re
import sys

import pytest

from rlx.agents.agent_options import AgentOptions
from rlx.agents.workflow import AgentWorkflow
from rlx.base import UserError
from rlx.config import check, default, with_environment
from rlx.environments import textarena_tasks
from rlx.evaluation import question_sets
from rlx.evaluation.runner import Evaluator
from rlx.rollout import data
from rlx.rollout.attempts import Patience
from tests.fixtures.evaluator_fleet import Fleet

GAME = "textarena:GuessTheNumber-v0"
pytestmark = pytest.mark.witnesses
needed = pytest.mark.skipif(not importlib.util.find_spec("textarena"), reason="no textarena")


def test_a_name_sets_rows_and_workflow_and_without_the_package_the_extra_is_named(monkeypatch):
    config = default()
    config.model.path, config.rollout.workflow = "rlx:arithmetic", GAME
    check(with_environment(config))
    assert (config.data.dataset, config.rollout.workflow) == (GAME, textarena_tasks.AGENT)
    monkeypatch.setitem(sys.modules, "textarena", None)
    with pytest.raises(UserError, match=r"needs packages .*; pip install .*textarena"):
        data.load(GAME)


@needed
def test_rows_are_episodes_and_no_seed_is_in_two_splits():
    train, held_out = data.load(f"{GAME}?size=50"), data.load(f"{GAME}?size=50", split="test")
    seeds = [{row["seed"] for row in rows} for rows in (train, held_out)]
    assert len(seeds[0]) == len(seeds[1]) == 50
    assert not seeds[0] & seeds[1]
    ((found, rows),) = question_sets.load_sets(GAME, "arithmetic", 3)
    assert (found.workflow, len(rows)) == (textarena_tasks.AGENT, 3)


@needed
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("textarena:GuesTheNumber-v0", "did you mean 'GuessTheNumber-v0'"),
        (f"{GAME}?turn=3", "did you mean 'turns'"),
        ("textarena:TicTacToe-v0", "does not begin with one player"),
    ],
)
def test_what_cannot_be_played_is_one_line(name, message):
    with pytest.raises(UserError, match=message) as error:
        data.load(name)
    assert "\n" not in str(error.value)


@pytest.fixture(scope="module")
def shared(agents):
    """Evaluates episodes by one worker, which takes seconds to start; yields it and its engine."""
    workflow = AgentWorkflow(
        textarena_tasks.AGENT, agents.tokenizer(), agents.sampling, 1, options=AgentOptions()
    )
    engine = agents.engine()
    connect = Fleet(agents, engine).connect
    with Evaluator(connect, workflow, patience=Patience(attempts=1), timeout=120.0) as run:
        yield run, engine


def halving(prompt, *_):
    """Return the middle of the numbers that the hints leave."""
    low, high = 1, 20
    for guess, hint in re.findall(r"\[(\d+)\].*?number is (higher|lower)", prompt):
        low, high = (int(guess) + 1, high) if hint == "higher" else (low, int(guess) - 1)
    return f"[{(low + high) // 2}]"


@needed
def test_an_episode_is_one_trajectory_with_the_reward_of_the_game(shared):
    run, engine = shared
    (row,) = data.load(f"{GAME}?size=1")
    engine.reply = halving
    ((won,),) = [group.trajectories for group in run.rollout_batch([row], n=1, timeout=120)]
    assert won.reward == 1.0
    assert won.prompt.startswith("<|user|>You are Player 0. You are playing Guess The Number.")
    assert "The target number is" in won.completion
    engine.reply = lambda *_: "nonsense"  # the game ends after some
    ((lost,),) = [group.trajectories for group in run.rollout_batch([row], n=1, timeout=120)]
    assert lost.reward < 1.0
    (short,) = data.load(f"{GAME}?size=1&turns=1")
    ((cut,),) = [group.trajectories for group in run.rollout_batch([short], n=1, timeout=120)]
    assert (cut.reward, cut.info["turns"]) == (0.0, 1.0)


@needed
def test_a_game_that_fails_is_one_line(monkeypatch):
    httpx = pytest.importorskip("httpx")
    answer = {
        "id": "1", "object": "chat.completion", "created": 0, "model": "default",
        "choices": [{
            "index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "[3]"},
        }],
    }  # fmt: skip
    (row,) = data.load(f"{GAME}?size=1")
    played = textarena_tasks._begin("GuessTheNumber-v0", 1)
    monkeypatch.setattr(textarena_tasks, "_begin", lambda *_: played)
    monkeypatch.setattr(type(played), "step", lambda *_: 1 // 0)

    async def play():
        transport = httpx.MockTransport(lambda _: httpx.Response(200, json=answer))
        async with httpx.AsyncClient(transport=transport) as client:
            agent = textarena_tasks.TextArenaAgent()
            await agent.run(row, base_url="http://model", api_key="k", http_client=client)

    with pytest.raises(UserError, match=r"failed in turn 0: .*division"):
        asyncio.run(play())
