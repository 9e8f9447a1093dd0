"""A run that trains on what applications say, stopped in the middle of a session and continued."""

import json
import socket
import threading
import time
import urllib.error
import urllib.request
from contextlib import suppress

import numpy as np
import pytest

import rlx
from configs import arithmetic_online
from rlx.observe.jsonl import read_jsonl
from rlx.rollout import arithmetic

ADMIN = "admin-key-of-the-tests"
GONE = (ConnectionError, urllib.error.URLError)


def config(port, steps):
    c = arithmetic_online.get_config()
    c.total_steps, c.rollout.batch_prompts, c.rollout.max_staleness = steps, 4, 1
    c.rollout.max_concurrent_rollouts = 16
    c.sampling.max_new_tokens, c.fleet.slots, c.train.row_buckets = 24, 8, (96,)
    c.eval.num_questions, c.gate.enabled, c.checkpoint.first_step = 2, False, 0
    c.online.port, c.agents.reward_seconds = port, 0.0
    return c


@pytest.fixture
def port():
    """A free one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Users:
    """Requests to a run's gateway, until it is gone."""

    def __init__(self, port):
        self.url, self.problems = f"http://127.0.0.1:{port}/v1", arithmetic.stream(3, "train")
        self.refused, self.over = 0, threading.Event()

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
        self.call("/rewards", key, {"reward": thumb})
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
    journal = tmp_path / "run" / "sessions" / "journal.jsonl"
    before = len(list(read_jsonl(journal)))

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
    events = list(read_jsonl(journal))
    own = [e for e in events if e["session"] == held["id"]]
    assert [e["event"] for e in own] == [
        "open", "answer", "reward", "answer", "reward", "end", "take"
    ]  # fmt: skip
    assert (own[-1]["data"]["how"], own[-1]["data"]["why"]) == ("trained", "")
    slots = [e["data"]["slot"] for e in events if e["event"] == "open"]
    # A session that was taken and not trained on when the run stopped is taken again.
    parts = [[e["session"] for e in part if e["event"] == "take" and e["data"]["how"] == "trained"]
             for part in (events[:before], events[before:])]  # fmt: skip
    assert [len(set(part)) for part in parts] == [len(part) for part in parts]
    assert len({*parts[0], *parts[1]}) >= 16
    assert min(np.bincount(slots)) >= 1
