"""A run that trains on what applications say, stopped in the middle of a session and continued."""

import json
import os
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
from contextlib import suppress

import numpy as np
import pytest

import rlx
from configs import arithmetic_online
from rlx.agents.online import OnlineOptions, OnlineSessions
from rlx.fleet.requests import Sampling
from rlx.rollout import arithmetic
from rlx.system.jsonl import read_jsonl
from tests.fixtures.commands import RLX_MAIN

ADMIN = "admin-key-of-the-tests"
GONE = (ConnectionError, urllib.error.URLError)


def config(port, steps):
    c = arithmetic_online.get_config()
    c.total_steps, c.rollout.batch_prompts, c.rollout.max_staleness = steps, 4, 1
    c.rollout.max_concurrent_rollouts = 16
    c.sampling.max_new_tokens, c.fleet.slots, c.train.row_buckets = 24, 8, (96,)
    c.eval.num_questions, c.gate.enabled, c.checkpoint.first_step = 2, False, 0
    c.model.compute_dtype = "float32"
    c.online.port, c.agents.reward_seconds = port, 0.0
    return c


@pytest.fixture
def port():
    """A free one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def kept(workdir):
    """The states of a run's sessions, by id."""
    online = OnlineSessions(workdir / "sessions", OnlineOptions(ADMIN), Sampling())
    online.close()
    return online.states


class Users:
    """Requests to a run's gateway, until it is gone."""

    def __init__(self, port):
        self.url, self.problems = f"http://127.0.0.1:{port}/v1", arithmetic.stream(3, "train")
        self.refused, self.over = 0, threading.Event()
        self.rated = {}  # what the run has acknowledged, by session

    def call(self, path, key=ADMIN, body=None):
        """JSON of a POST's answer, or its status where that is an error."""
        data = json.dumps(body or {}).encode()
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data, headers)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            status, again = error.code, error.headers["Retry-After"]
        assert status in (410, 429)
        assert (again or "").isdecimal() == (status == 429)
        self.refused += status == 429
        return status

    def opened(self):
        """A session, as soon as there is a place; ConnectionError when the run is over."""
        end = time.monotonic() + 300
        while time.monotonic() < end and not self.over.is_set():
            with suppress(*GONE):
                if isinstance(made := self.call("/sessions"), dict):
                    return made
            time.sleep(0.05)
        raise ConnectionError("no place for a session")

    def ask(self, key):
        """Ask a problem, and rate the answer."""
        messages = [{"role": "user", "content": next(self.problems)["question"]}]
        got = self.call("/chat/completions", key, {"model": "m", "messages": messages})
        thumb = len(got["choices"][0]["message"]["content"]) % 2
        told = self.call("/rewards", key, {"reward": thumb})
        if isinstance(told, dict):
            self.rated[told["id"]] = thumb
        return got

    def play(self):
        """Episodes under one key until the run is over."""
        try:
            key = self.opened()["api_key"]
            while True:
                self.ask(key)
                while not isinstance(self.call("/session/refresh", key), dict):
                    time.sleep(0.05)
        except GONE:
            return


@pytest.mark.slow
def test_sessions_are_trained_on_and_go_on_with_the_run(tmp_path, port, monkeypatch):
    monkeypatch.setenv("RLX_ADMIN_KEY", ADMIN)
    users, stop, held = Users(port), threading.Event(), {}

    class Stops:
        def on_step(self, step, record):
            stop.set()

    def hold():
        """Has an answer in an open session when the run ends; the others come after it."""
        held.update(users.opened())
        users.ask(held["api_key"])
        for thread in crowd:
            thread.start()

    crowd = [threading.Thread(target=users.play, daemon=True) for _ in range(12)]
    first = threading.Thread(target=hold, daemon=True)
    first.start()
    result = rlx.run(config(port, 4), tmp_path / "run", callbacks=[Stops()], stop=stop)
    users.over.set()
    for thread in [first, *crowd]:
        thread.join(120)
        assert not thread.is_alive()
    assert 1 <= result.step < 4
    assert users.refused > 0  # admission control was felt outside
    users.over.clear()
    before = kept(tmp_path / "run")

    def finish():
        """Goes on in the session of before, then others come."""
        key, end = held["api_key"], time.monotonic() + 300
        while time.monotonic() < end:
            try:
                users.ask(key)
                break
            except GONE:
                time.sleep(0.05)
        users.call("/session/end", key)
        for thread in crowd:
            thread.start()

    crowd = [threading.Thread(target=users.play, daemon=True) for _ in range(12)]
    last = threading.Thread(target=finish, daemon=True)
    last.start()
    result = rlx.run(config(port, 4), tmp_path / "run")
    users.over.set()
    for thread in [last, *crowd]:
        thread.join(120)
    assert (result.step, result.complete) == (4, True)
    assert [record["staleness_max"] <= 1 for record in result.metrics] == [True] * 4
    states = kept(tmp_path / "run")
    own = states[held["id"]]
    assert (len(own.completions), own.reward, own.ended) == (2, users.rated[own.id], "application")
    assert (own.taken, own.why) == ("trained", "")
    slots = [state.slot for state in states.values()]
    trained = [state for state in states.values() if state.taken == "trained" and not state.why]
    assert len({state.slot for state in trained}) == len(trained) >= 16
    assert {name for name, state in before.items() if state.taken == "trained"} <= {
        state.id for state in trained
    }
    assert min(np.bincount(slots)) >= 1


@pytest.mark.slow
def test_no_rating_is_lost_whatever_is_killed(tmp_path, port):
    users, workdir = Users(port), tmp_path / "run"
    flags = {
        "total_steps": 12, "rollout.batch_prompts": 4, "rollout.max_staleness": 1,
        "rollout.max_concurrent_rollouts": 16, "sampling.max_new_tokens": 24, "fleet.slots": 8,
        "train.row_buckets": "(96,)", "eval.num_questions": 2, "gate.enabled": False,
        "online.port": port, "observe.writers": "()", "model.compute_dtype": "float32",
        # Users of the killed run do not come back. Their sessions may hold the last places.
        "online.idle_seconds": 60,
    }  # fmt: skip
    command = [
        *RLX_MAIN, "--config=configs/arithmetic_online.py", f"--workdir={workdir}",
        *(f"--config.{key}={value}" for key, value in flags.items()),
    ]  # fmt: skip

    def attempt(steps, end):
        """Has users ask until the run has done some steps, then ends it."""
        users.over.clear()
        crowd = [threading.Thread(target=users.play, daemon=True) for _ in range(12)]
        with open(tmp_path / "log", "ab") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=log, start_new_session=True,
                env={**os.environ, "RLX_ADMIN_KEY": ADMIN},
            )  # fmt: skip
        try:
            for thread in crowd:
                thread.start()
            deadline = time.monotonic() + 300
            while process.poll() is None and time.monotonic() < deadline:
                done = list(read_jsonl(workdir / "metrics.jsonl"))
                if done and done[-1]["step"] >= steps:
                    break
                time.sleep(0.05)
            end(process)
            code = process.wait(120)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            users.over.set()
        for thread in crowd:
            thread.join(120)
        return code

    # Step 2 has the only checkpoint, so the kill loses the eight steps after it.
    assert attempt(10, lambda p: os.killpg(p.pid, signal.SIGKILL)) == -signal.SIGKILL
    before = dict(users.rated)
    assert len(before) >= 40
    attempt(6, lambda p: p.terminate())
    assert attempt(99, lambda p: None) == 0, (tmp_path / "log").read_text()[-3000:]
    states = kept(workdir)
    assert {name: states[name].reward for name in users.rated} == users.rated
    rated = [states[name] for name in before]
    trained = [state for state in rated if state.taken == "trained" and not state.why]
    # Those of the last places had none, and a place may have come too late for one.
    assert len(trained) >= 0.9 * len([state for state in rated if state.slot < 48])
    for state in states.values():
        assert state.reward is None or state.taken == "trained" or state.why or state.slot >= 44
