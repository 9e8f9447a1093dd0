"""Groups that sessions of one task make, and sessions whose groups fail."""

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace

import aiohttp
import numpy as np
import pytest

from rlx.agents.agent_options import AgentOptions
from rlx.agents.online import Denied, OnlineOptions
from rlx.agents.online_workflow import OnlineWorkflow, RunContext
from rlx.rollout.attempts import Patience
from rlx.rollout.data import Cursor
from rlx.rollout.executor import Executor
from rlx.rollout.staleness import Limits
from rlx.rollout.workflows import Task
from rlx.system.threads import LoopThread
from tests.agents.online_test import ADMIN, Site


def test_sessions_of_one_task_make_a_group(agents, tmp_path):
    lines = []

    async def main():
        listen = SimpleNamespace(host="127.0.0.1", port=0, tls_cert="", tls_key="")
        workflow = OnlineWorkflow(
            OnlineOptions(ADMIN), AgentOptions(), listen, agents.tokenizer(), agents.sampling, 2,
            held_out=None,
        )  # fmt: skip
        workflow.context = RunContext(tmp_path, 0, lambda: 0, lambda: 0, 0, lines.append)
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


def test_a_full_run_is_tried_again_after_as_long_as_it_was_full(agents):
    listen = SimpleNamespace(host="127.0.0.1", port=0, tls_cert="", tls_key="")
    options = OnlineOptions(ADMIN), AgentOptions(), listen
    workflow = OnlineWorkflow(*options, agents.tokenizer(), agents.sampling, 1, held_out=None)
    workflow._admitted -= 30
    with pytest.raises(Denied) as denied:
        workflow._admit("")
    assert 30 <= denied.value.wait < 60


def test_a_session_that_stays_the_only_one_of_its_task_keeps_no_place(agents, tmp_path):
    lines = []

    async def main():
        listen = SimpleNamespace(host="127.0.0.1", port=0, tls_cert="", tls_key="")
        workflow = OnlineWorkflow(
            OnlineOptions(ADMIN, idle_seconds=1.0), AgentOptions(), listen, agents.tokenizer(),
            agents.sampling, 2, held_out=None,
        )  # fmt: skip
        workflow.context = RunContext(tmp_path, 0, lambda: 0, lambda: 0, 0, lines.append)
        async with agents.fleet(agents.engine()) as (fleet, _), aiohttp.ClientSession() as http:
            group = asyncio.create_task(workflow.run(fleet, Task({}, 7, 0, version=0)))
            async with asyncio.timeout(60):
                while not lines:
                    await asyncio.sleep(0.01)
            s = Site(lines[0].removeprefix("sessions at "), http)

            async def rated(task):
                name, key = await s.made(task_id=task)
                await s.ask(key)
                await s.call("POST", "/rewards", key, {"reward": 1.0})
                await s.call("POST", "/session/end", key)
                return name

            single = await rated("a")
            first = (await s.call("POST", "/sessions", body={"task_id": "b"}))[0]
            async with asyncio.timeout(10):
                while not workflow._gateway.online.states[single].taken:
                    await asyncio.sleep(0.01)
            pair = [await rated("b") for _ in range(2)]
            found = await group
            states = [workflow._gateway.online.states[name] for name in (single, *pair)]
        await workflow.aclose()
        return first, found, states

    first, found, states = agents.run(main(), 120)
    assert (first, len(found.trajectories)) == (429, 2)
    assert [state.taken for state in states] == ["dropped", "trained", "trained"]
    assert states[0].why == "no other session of its task came"


def test_a_run_that_was_killed_trains_again_on_what_its_users_said(agents, tmp_path):
    engine = agents.engine()

    @asynccontextmanager
    async def run(version, dealt, first, longest=0):
        """A run at a version, with three groups under way; yields its site, groups and sessions."""
        lines, engine.version = [], version
        listen = SimpleNamespace(host="127.0.0.1", port=0, tls_cert="", tls_key="")
        workflow = OnlineWorkflow(
            OnlineOptions(ADMIN), AgentOptions(), listen, agents.tokenizer(), agents.sampling, 1,
            held_out=None,
        )  # fmt: skip
        workflow.context = RunContext(
            tmp_path, dealt, lambda: engine.version, lambda: 100, longest, lines.append
        )
        async with agents.fleet(engine) as (fleet, _), aiohttp.ClientSession() as http:
            tasks = [Task({}, number, 0, version=version) for number in range(first, first + 3)]
            groups = [asyncio.create_task(workflow.run(fleet, task)) for task in tasks]
            try:
                async with asyncio.timeout(60):
                    while not lines:
                        await asyncio.sleep(0.01)
                    url = lines[0].removeprefix("sessions at ")
                    again = lambda k: workflow.run(fleet, tasks[k])  # noqa: E731
                    yield Site(url, http), groups, workflow._gateway.online, again
            finally:
                for group in groups:
                    group.cancel()
                await asyncio.gather(*groups, return_exceptions=True)
                await workflow.aclose()

    async def rated(s, reward, end=True):
        name, key = await s.made()
        await s.ask(key)
        assert (await s.call("POST", "/rewards", key, {"reward": reward}))[0] == 200
        if end:
            assert (await s.call("POST", "/session/end", key))[0] == 200
        return name, key

    async def main():
        async with run(7, 4, 4) as (
            s,
            groups,
            online,
            again,
        ):  # later than the checkpoint, of version 2
            names = [(await rated(s, k))[0] for k in range(2)]
            last, key = await rated(s, 2, end=False)
            before = await asyncio.gather(*groups[:2])
            once_more = await again(1)  # where an attempt failed after it had its sessions
            assert [t.reward for t in once_more.trajectories] == [1.0]
        async with run(2, 4, 4) as (s, groups, online, _):  # the places 4, 5 and 6 once more
            repeated = await asyncio.gather(*groups)
            status = (await s.ask(key))[0]
            states = [online.states[name] for name in (*names, last)]
        async with run(9, 7, 4, longest=5) as (s, groups, online, _):  # and where they do not fit
            async with asyncio.timeout(60):
                while not all(online.states[name].why for name in (*names, last)):
                    await asyncio.sleep(0.01)
            online.forget()
            found = [await s.call("GET", f"/sessions/{n}/trajectories") for n in (*names, last)]
            listed = [state.taken for state in online.states.values()]
            online.forget()
            return before, repeated, status, states, found, listed, dict(online.states)

    before, again, status, states, found, listed, left = agents.run(main(), 120)
    rewards = [[t.reward for t in group.trajectories] for group in again]
    assert rewards == [[0.0], [1.0], [2.0]]
    for one, two in zip(before, again, strict=False):
        (one,), (two,) = one.trajectories, two.trajectories
        assert set(one.versions[one.loss_mask]) == {7}
        assert set(two.versions[two.loss_mask]) == {2}  # no token is newer than the policy
        for name in ("tokens", "behaviour_logprobs", "loss_mask"):
            np.testing.assert_array_equal(getattr(one, name), getattr(two, name))
    assert (status, [state.taken for state in states]) == (410, ["trained"] * 3)
    assert [state.ended for state in states] == ["application"] * 2 + ["restart"]
    assert [(code, body["reward"], body["why"]) for code, body, _ in found] == [
        (200, float(k), "its tokens are older than its slot") for k in range(3)
    ]
    assert [len(body["trajectories"]) for _, body, _ in found] == [1] * 3
    assert (listed, left) == (["exported"] * 3, {})


def test_sessions_of_a_group_that_is_given_up_say_why_and_are_exported(agents, tmp_path):
    """Of one whose attempts fail after they have the sessions, and of one with equal rewards."""

    class Scored(OnlineWorkflow):
        async def run(self, fleet, task):
            group = await super().run(fleet, task)
            if task.group_id == 0:
                raise RuntimeError("the teacher is down")
            return group

    lines, listen = [], SimpleNamespace(host="127.0.0.1", port=0, tls_cert="", tls_key="")
    workflow = Scored(
        OnlineOptions(ADMIN), AgentOptions(), listen, agents.tokenizer(), agents.sampling, 1,
        held_out=None,
    )  # fmt: skip
    workflow.context = RunContext(tmp_path, 0, lambda: 0, lambda: 100, 0, lines.append)
    loop, opened = LoopThread("executor"), agents.fleet(agents.engine())
    loop.start()
    executor = Executor(
        workflow, Cursor([{}]), Limits(2, 0, 2), loop.run(opened.__aenter__())[0], loop=loop,
        patience=Patience(attempts=2, rate=1.0, pause=0.0), request_timeout=None,
        drop_equal_rewards=True, on_drop=workflow.drop,
    )  # fmt: skip

    async def in_order(function):
        function()

    async def main():
        executor.set_version(0)
        while not lines:
            await asyncio.sleep(0.01)
        async with aiohttp.ClientSession() as http:
            s = Site(lines[0].removeprefix("sessions at "), http)
            made = [await s.made() for _ in range(2)]
            for _, key in made:
                await s.ask(key)
                assert (await s.call("POST", "/rewards", key, {"reward": 1.0}))[0] == 200
                assert (await s.call("POST", "/session/end", key))[0] == 200
            online = workflow._gateway.online
            while not all(online.states[name].why for name, _ in made):
                await asyncio.sleep(0.01)
            loop.run(in_order(online.forget))  # keeps what is not exported
            return [(await s.call("GET", f"/sessions/{n}/trajectories"))[1] for n, _ in made]

    try:
        failed, equal = agents.run(main(), 90)
    finally:
        executor.close()
        loop.run(opened.__aexit__(None, None, None))
        loop.close()
    assert failed["why"].startswith("its group failed: 2 of rollout.max_attempts=2 failed")
    assert "RuntimeError: the teacher is down" in failed["why"]
    assert equal["why"] == "all rewards of its group are equal"
    assert [len(one["trajectories"]) for one in (failed, equal)] == [1, 1]
