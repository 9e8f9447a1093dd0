"""Sessions that applications have, over real HTTP; and a gateway that is killed with SIGKILL."""

import asyncio
import json
import os
import random
import signal
import stat
import subprocess
import sys
import time
from contextlib import asynccontextmanager

import aiohttp
import numpy as np
import openai
import pytest

from rlx.agents.api_gateway import Gateway
from rlx.agents.online import FILE, OnlineOptions, OnlineSessions
from rlx.agents.session_state import Denied
from rlx.agents.sessions import Interaction
from rlx.base import UserError
from rlx.fleet.sample import Completion
from tests.fixtures.commands import without_torch

ADMIN = "admin-key-of-the-tests"
HELLO = {"model": "m", "messages": [{"role": "user", "content": "hello there"}]}


class Site:
    """A gateway with sessions, and requests to it."""

    def __init__(self, base_url, http, online=None):
        self.base_url, self.http, self.online = base_url, http, online

    async def call(self, method, path, key=ADMIN, body=None):
        """(status, JSON, headers) of a request; a body of bytes goes as it is."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with self.http.request(method, self.base_url + path, headers=headers, data=data) as r:
            return r.status, await r.json(), r.headers

    async def made(self, **body):
        """(id, key) of a new session."""
        status, found, _ = await self.call("POST", "/sessions", body=body)
        assert status == 201, found
        return found["id"], found["api_key"]

    async def ask(self, key, body=HELLO):
        return await self.call("POST", "/chat/completions", key, body)

    def client(self, key):
        return openai.AsyncOpenAI(base_url=self.base_url, api_key=key, max_retries=0)


@asynccontextmanager
async def site(agents, directory, clock=None, engine=None, **options):
    """A Site in this process."""
    async with (
        agents.fleet(engine or agents.engine()) as (fleet, _),
        aiohttp.ClientSession() as http,
    ):
        given = OnlineOptions(ADMIN, **options)
        clocks = {"clock": clock} if clock else {}
        online = OnlineSessions(directory, given, agents.sampling, **clocks)
        gateway = Gateway(fleet, agents.tokenizer(), online=online)
        await gateway.start()
        try:
            yield Site(gateway.base_url(), http, online)
        finally:
            await gateway.stop()


def test_an_application_asks_is_rewarded_and_refreshes_by_one_key(agents, tmp_path):
    async def main():
        async with site(agents, tmp_path) as s:
            first, key = await s.made(task_id="greet")
            async with s.client(key) as client:
                got = await client.chat.completions.create(**HELLO)
                thumb = {"reward": True, "completion_id": got.id}
                await client.post("/rewards", body=thumb, cast_to=object)
                second = await client.post("/session/refresh", cast_to=object)
                again = await client.chat.completions.create(**HELLO)
            await s.call("POST", "/rewards", key, {"reward": 0.25})
            await s.call("POST", "/session/end", key)
            rows = [
                await s.call("GET", f"/sessions/{i}/trajectories") for i in (first, second["id"])
            ]
            listed = (await s.call("GET", "/sessions"))[1]["data"]
            return got, again, second, [body for _, body, _ in rows], listed

    got, again, second, (one, two), listed = agents.run(main())
    assert (second["task"], second["state"]) == ("greet", "open")
    assert (one["reward"], one["ended"], one["taken"]) == ({got.id: 1.0}, "refresh", "exported")
    assert (two["reward"], two["ended"]) == (0.25, "application")
    assert [c["id"] for c in two["completions"]] == [again.id]
    (row,) = two["trajectories"]
    assert sum(row["loss_mask"]) == 12
    assert {v for v, m in zip(row["versions"], row["loss_mask"], strict=True) if m} == {0}
    assert row["reward"] == 0.25
    assert [state["state"] for state in listed] == ["taken", "taken"]
    assert not any("key" in state for state in listed)


def test_every_mistake_has_its_status(agents, tmp_path):
    now = [1000.0]

    async def main():
        async with site(agents, tmp_path, lambda: now[0], idle_seconds=60, most=3) as s:
            name, key = await s.made()
            _, old = await s.made()
            await s.call("POST", "/session/end", old)
            asked = "/chat/completions"
            reward = {"reward": 1.0}
            tries = [
                (401, "POST", asked, None, HELLO), (401, "POST", asked, "unknown", HELLO),
                (401, "POST", "/session/refresh", "unknown", None),
                (401, "GET", "/sessions", "unknown", None),
                (401, "POST", "/session/end", "", None),
                (403, "POST", asked, ADMIN, HELLO), (403, "POST", "/session/end", ADMIN, None),
                (403, "GET", "/sessions", key, None), (403, "POST", "/sessions", old, {}),
                (404, "GET", "/sessions/none/trajectories", ADMIN, None),
                (405, "PUT", "/sessions", ADMIN, None),
                (409, "GET", f"/sessions/{name}/trajectories", ADMIN, None),
                (409, "POST", "/rewards", key, reward),
                (409, "POST", "/rewards", key, {"reward": {}}),
                (409, "POST", "/sessions", ADMIN, {"api_key": key}),
                (409, "POST", "/sessions", ADMIN, {"api_key": ADMIN}),
                (410, "POST", asked, old, HELLO), (410, "POST", "/session/end", old, None),
                (400, "POST", "/sessions", ADMIN, b"{"), (400, "POST", "/sessions", ADMIN, [1]),
                (400, "POST", "/sessions", ADMIN, {"task_id": 3}),
                (400, "POST", "/sessions", ADMIN, {"tusk_id": "x"}),
                (400, "POST", "/sessions", ADMIN, {"api_key": "short"}),
                (400, "POST", "/rewards", key, b"\xff"), (400, "POST", "/rewards", key, {}),
                (400, "POST", "/rewards", key, {"reward": "good"}),
                (400, "POST", asked, key, {"model": "m"}),
            ]  # fmt: skip
            found = [(await s.call(*each))[0] for _, *each in tries]
            _, body, _ = await s.ask(key)
            late = [{"reward": 1, "completion_id": "other"}, {"reward": {body["id"]: None}}]
            found += [(await s.call("POST", "/rewards", key, each))[0] for each in late]
            odd = {"x-api-key": "schlüssel"}  # the other header, and bytes that are no ASCII
            async with s.http.get(s.base_url + "/sessions", headers=odd) as answer:
                found.append(answer.status)
            await s.made()
            await s.made()
            full = await s.call("POST", "/sessions", body={})
            refused = await s.call("POST", "/session/refresh", old)
            now[0] += 61
            s.online.sweep()
            idle = (await s.ask(key))[0], s.online.states[name].ended
            fresh = (await s.call("POST", "/session/refresh", key))[0]
            return [*zip([t[0] for t in tries], found, [t[1:] for t in tries], strict=False)], (
                found[len(tries) :], full, refused, idle, fresh
            )  # fmt: skip

    pairs, (late, full, refused, idle, fresh) = agents.run(main(), 60)
    assert [(w, g, t) for w, g, t in pairs if w != g] == []
    assert late == [400, 400, 401]
    assert (full[0], full[2]["Retry-After"], full[1]["error"]["code"]) == (429, "1", "session_full")
    assert (refused[0], idle, fresh) == (429, (410, "idle"), 200)


def test_an_end_ends_a_request_and_a_key_in_the_address_will_do(agents, tmp_path):
    engine = agents.engine(step_seconds=0.01, together=2)  # the first request waits for a second

    async def main():
        async with site(agents, tmp_path, engine=engine) as s:
            _, key = await s.made()
            asking = asyncio.create_task(s.ask(key))
            while not engine.running:
                await asyncio.sleep(0.01)
            by_path = s.base_url.replace("/v1", f"/{key}/v1")
            async with s.http.post(f"{by_path}/session/end") as answer:
                ended = answer.status
            with pytest.raises(aiohttp.ClientConnectionError):
                await asking
            while engine.running:
                await asyncio.sleep(0.01)
            return ended, engine.aborted

    assert agents.run(main()) == (200, 1)


def test_a_conversation_goes_on_after_a_restart_token_for_token(agents, tmp_path):
    turns = [{"role": "user", "content": "one"}]

    async def main():
        async with site(agents, tmp_path) as s:
            name, key = await s.made(api_key="a-key-of-an-application")
            _, body, _ = await s.ask(key, {"model": "m", "messages": turns})
            turns.append(body["choices"][0]["message"])
            await s.call("POST", "/rewards", key, {"reward": 1, "completion_id": body["id"]})
            before = list(s.online.sessions[name].interactions), s.online.states[name]
            with pytest.raises(UserError, match="another process"):
                OnlineSessions(tmp_path, OnlineOptions(ADMIN), agents.sampling)
        async with site(agents, tmp_path) as s:
            after = list(s.online.sessions[name].interactions), s.online.states[name]
            turns.append({"role": "user", "content": "two"})
            await s.ask(key, {"model": "m", "messages": turns})
            await s.call("POST", "/session/end", key)
            s.online.forget()
            kept = await s.online.export(name)
        async with site(agents, tmp_path) as s:
            assert await s.online.export(name) == kept
            s.online.take(name, "exported")
            s.online.forget()
            gone = s.online.states
            refreshed = (await s.call("POST", "/session/refresh", key))[0]
            return before, after, kept, list(gone)[:-1], refreshed

    (made, state), (again, restored), kept, gone, refreshed = agents.run(main(), 60)
    assert (state.reward, state.completions) == (restored.reward, restored.completions)
    for one, two in zip(made, again, strict=True):
        assert one.full_text == two.full_text
        for field in ("tokens", "logprobs", "versions"):
            a, b = getattr(one.completion, field), getattr(two.completion, field)
            np.testing.assert_array_equal(a, b)
            assert a.dtype == b.dtype
        np.testing.assert_array_equal(one.prompt_tokens, two.prompt_tokens)
    # One conversation is one row, each turn with its own return.
    (row,) = json.loads(kept)["trajectories"]
    assert row["turn_rewards"] == [1.0, 0.0]
    assert (gone, refreshed) == ([], 200)
    files = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert files == {FILE: 0o600}
    assert b"a-key-of-an-application" not in (tmp_path / FILE).read_bytes()


def test_the_database_is_of_one_process_and_keeps_no_more_than_is_asked_for(
    agents, tmp_path, monkeypatch
):
    monkeypatch.setattr("rlx.agents.online._FORGET_ROWS", 60)
    monkeypatch.setattr("rlx.agents.online._KEYS", 5)
    online = OnlineSessions(tmp_path, OnlineOptions(ADMIN), agents.sampling)
    files = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert files == {FILE: 0o600, f"{FILE}-wal": 0o600}
    code = "import sqlite3, sys; sqlite3.connect(sys.argv[1], 0).execute('SELECT * FROM keys')"
    command = [sys.executable, "-c", code, str(tmp_path / FILE)]
    other = subprocess.run(command, capture_output=True, text=True)
    assert "database is locked" in other.stderr
    for _ in range(200):
        state, key = online.open("x" * 30_000)
        online.end(state.id, "application")
        online.take(state.id, "dropped")
        online.sweep()
    with pytest.raises(Denied, match="unknown session"):
        online.state("session-none")
    assert len(online.states) < 30
    online.close()
    assert (tmp_path / FILE).stat().st_size < 3 << 20
    online = OnlineSessions(tmp_path, OnlineOptions(ADMIN), agents.sampling)
    assert online.refresh(key).task == state.task
    online.close()


def test_a_damaged_database_is_refused_by_each_start_and_left_as_it_is(agents, tmp_path):
    def read():
        OnlineSessions(tmp_path, OnlineOptions(ADMIN), agents.sampling).close()

    online = OnlineSessions(tmp_path, OnlineOptions(ADMIN), agents.sampling)
    for _ in range(100):
        online.open("a task")
    online.close()
    file = tmp_path / FILE
    good = file.read_bytes()
    answer = good.replace(b'"task": "a task"', b'"tusk": "a task"')
    page = good[:8192] + bytes(4096) + good[12288:]
    for spoilt in (b"spoilt" * 1000, good[: len(good) // 2], page, answer):
        file.write_bytes(spoilt)
        for _ in range(2):
            with pytest.raises(UserError, match=f"{FILE} is damaged"):
                read()
        assert file.read_bytes() == spoilt
    file.write_bytes(good)
    read()


def test_the_wall_clock_ends_no_session_and_keeps_none(agents, tmp_path, monkeypatch):
    wall, steady = [1e9], [50.0]
    monkeypatch.setattr("time.time", lambda: wall[0])

    def begun():
        options = OnlineOptions(ADMIN, idle_seconds=60)
        return OnlineSessions(tmp_path, options, agents.sampling, clock=lambda: steady[0])

    online = begun()
    (one, _), (two, _) = online.open(), online.open()
    assert one.opened == 1e9
    for step in (3600.0, -86400.0):
        wall[0] += step
        online.sweep()
        assert not any(state.ended for state in online.states.values())
    steady[0] += 30
    online.end(two.id, "application")
    online.close()
    wall[0], steady[0] = 1e9 - 86400, 7.0  # another boot, with its clock a day back
    online = begun()
    assert online.states[two.id].touched == 1e9 + 30
    online.sweep()
    assert not online.states[one.id].ended
    steady[0] += 61
    online.sweep()
    assert online.states[one.id].ended == "idle"
    assert online.states[one.id].touched == 1e9 + 91
    online.close()
    wall[0], steady[0] = 1e9 + 86400, 9.0  # a day ahead: rewards are not late
    online = begun()
    assert online.states[one.id].touched == 1e9 + 86400
    online.close()


def test_an_export_of_many_rows_leaves_the_loop_free(agents, tmp_path):
    async def main():
        online = OnlineSessions(tmp_path, OnlineOptions(ADMIN), agents.sampling)
        state, _ = online.open()
        session = online.sessions[state.id]
        session.on_keep = None
        for number in range(20):  # as turns whose thoughts a template drops
            tokens, some = np.full(20_000, number, np.int32), np.zeros(50, np.int32)
            drawn = Completion(some, some.astype(np.float32), some, "stop")
            session.keep(Interaction(f"c{number}", 0, tokens, "x", drawn, "y", "y"))
        online.end(state.id, "application")
        exporting = asyncio.create_task(online.export(state.id))
        looks = [time.monotonic()]
        while not exporting.done():
            await asyncio.sleep(0.001)
            looks.append(time.monotonic())
        online.close()
        return await exporting, looks

    body, looks = asyncio.run(main())
    assert len(json.loads(body)["trajectories"]) == 20
    assert max(np.diff(looks)) < (looks[-1] - looks[0]) / 2


def test_idle_sessions_end_once_a_full_disk_has_room_again(agents, tmp_path, monkeypatch):
    monkeypatch.setattr("rlx.agents.online.SWEEP_SECONDS", 0.01)
    now, looks = [0.0], []

    def clock():
        looks.append(now[0])
        return now[0]

    async def main():
        options = OnlineOptions(ADMIN, idle_seconds=1.0)
        online = OnlineSessions(tmp_path, options, agents.sampling, clock=clock)
        name = online.open()[0].id
        online._db.execute("PRAGMA query_only = ON")  # cannot be written
        now[0] = 5.0
        sweeping = asyncio.create_task(online.run())
        async with asyncio.timeout(120):
            while 5.0 not in looks:
                await asyncio.sleep(0.01)
            assert not online.states[name].ended
            online._db.execute("PRAGMA query_only = OFF")
            while not (online.states[name].ended or sweeping.done()):
                await asyncio.sleep(0.01)
        sweeping.cancel()
        await asyncio.gather(sweeping, return_exceptions=True)
        online.close()
        return online.states[name].ended

    assert asyncio.run(main()) == "idle"


async def begin(*flags):
    """(process, base_url) of `python -m rlx.gateway`."""
    command = (*without_torch("rlx.gateway"), *flags)
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    return process, json.loads(await process.stdout.readline())["base_url"]


async def use(s, told, chance):
    """One user's episodes under one key, until the gateway is gone; `told`: what it was told."""
    try:
        name, key = await s.made()
        while True:
            mine = told[name] = {"key": key, "ids": [], "reward": None, "ended": False}
            for _ in range(chance.randint(1, 3)):
                status, body, _ = await s.ask(key)
                assert status == 200
                mine["ids"].append(body["id"])
            value = chance.random()
            assert (await s.call("POST", "/rewards", key, {"reward": value}))[0] == 200
            mine["reward"] = value
            status, state, _ = await s.call("POST", "/session/refresh", key)
            assert status == 200
            mine["ended"], name = True, state["id"]
    except (aiohttp.ClientError, ConnectionError):
        return


def test_a_gateway_killed_at_random_has_lost_nothing_that_it_told(agents, tmp_path):
    agents.tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "admin").write_text(ADMIN)
    chance, told = random.Random(0), {}

    async def main():
        async with agents.fleet(agents.engine()) as (_, server), aiohttp.ClientSession() as http:
            flags = (
                f"--model={tmp_path / 'model'}", f"--servers=127.0.0.1:{server.port}", "--port=0",
                f"--admin-key={tmp_path / 'admin'}", f"--sessions={tmp_path / 'sessions'}",
            )  # fmt: skip
            for kill in (True, True, False):
                process, url = await begin(*flags)
                s = Site(url, http)
                try:
                    listed = (await s.call("GET", "/sessions"))[1]["data"]
                    states = {state["id"]: state for state in listed}
                    for name, mine in told.items():
                        state = states[name]
                        assert list(state["completions"][: len(mine["ids"])]) == mine["ids"]
                        assert mine["reward"] in (None, state["reward"])
                        if mine["ended"]:
                            assert state["ended"] == "refresh"
                    for mine in list(told.values())[-4:]:  # the same keys go on
                        assert (await s.call("POST", "/session/refresh", mine["key"]))[0] == 200
                    if kill:
                        goal = len(told) + chance.randint(20, 60)
                        users = [asyncio.create_task(use(s, told, chance)) for _ in range(4)]
                        while len(told) < goal:
                            await asyncio.sleep(chance.random() / 100)
                        os.kill(process.pid, signal.SIGKILL)
                        await asyncio.gather(*users)
                finally:
                    if process.returncode is None and not kill:
                        process.terminate()
                    await process.wait()

    agents.run(main(), 300)
    assert len(told) > 40
    assert sum(len(mine["ids"]) for mine in told.values()) > 60
