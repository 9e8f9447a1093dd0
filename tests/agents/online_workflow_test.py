"""Groups that sessions of one task make, and when the next place in training is to be expected."""

import asyncio
from types import SimpleNamespace

import aiohttp
import pytest

from rlx.agents.online import OnlineOptions
from rlx.agents.online_workflow import OnlineWorkflow, RunPlace, expected_wait
from rlx.agents.workflow import AgentOptions
from rlx.rollout.workflows import Task
from tests.agents.online_test import ADMIN, Site


def test_sessions_of_one_task_make_a_group(agents, tmp_path):
    lines = []

    async def main():
        listen = SimpleNamespace(host="127.0.0.1", port=0, tls_cert="", tls_key="")
        workflow = OnlineWorkflow(
            OnlineOptions(ADMIN), AgentOptions(), listen, agents.tokenizer(), agents.sampling, 2,
            judge=None,
        )  # fmt: skip
        workflow.place = RunPlace(tmp_path, 0, lambda: 0, 0, lines.append)
        async with agents.fleet(agents.engine()) as (fleet, _), aiohttp.ClientSession() as http:
            groups = [
                asyncio.create_task(workflow.run(fleet, Task({}, number, 0, version=0)))
                for number in (7, 8)
            ]
            async with asyncio.timeout(60):
                while not lines:
                    await asyncio.sleep(0.01)
            s = Site(lines[0].removeprefix("sessions at "), http)
            nameless = await s.call("POST", "/sessions", body={})
            # The tasks come by turns, and each finds its own group.
            keys = [(await s.made(task_id=task))[1] for task in ("a", "b", "a", "b")]
            full = [await s.call("POST", "/sessions", body={"task_id": t}) for t in ("a", "c")]
            for number, key in enumerate(keys):
                await s.ask(key)
                assert (await s.call("POST", "/rewards", key, {"reward": number}))[0] == 200
                assert (await s.call("POST", "/session/end", key))[0] == 200
            found = await asyncio.gather(*groups)
        await workflow.aclose()
        return nameless, full, found

    nameless, full, found = agents.run(main(), 120)
    assert (nameless[0], nameless[1]["error"]["code"]) == (400, "session_nameless")
    assert [status for status, *_ in full] == [429, 429]
    rewards = [[t.reward for t in group.trajectories] for group in found]
    assert [group.group_id for group in found] == [7, 8]
    assert rewards == [[0.0, 2.0], [1.0, 3.0]]


def test_the_next_place_is_expected_by_the_rate_of_steps():
    assert expected_wait((), 5.0) == 0.0
    assert expected_wait((1.0, 1.01, 1.02), 5.0) == 0.0, "one moment has no rate"
    # Three steps, 10 s apart, each of which let two slots in.
    steps = (0.0, 0.01, 10.0, 10.01, 20.0, 20.01)
    assert expected_wait(steps, 20.01) == pytest.approx(10.0)
    assert expected_wait(steps, 26.01) == pytest.approx(4.0)
    assert expected_wait(steps, 50.01) == pytest.approx(30.0), "later than ever: as long again"
