"""rlx.debug_workflow against real HTTP servers: every mistake of an agent is named."""

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlx import debug_workflow
from rlx.agents import loading
from rlx.base import UserError
from rlx.debugger import concurrent_runs, debugger, preflight
from rlx.debugger.concurrent_runs import AgentRun, ConcurrentRuns
from rlx.debugger.recorder import Recorder
from rlx.system.jsonl import jsonable

pytest.importorskip("openai")
pytest.importorskip("aiohttp")
HERE = Path(__file__).parent
KEY = "sk-real"


@pytest.fixture(scope="module")
def server():
    """The base_url of the test's server."""
    process = subprocess.Popen(
        [sys.executable, HERE / "model_server.py"], stdout=subprocess.PIPE, text=True
    )
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}/v1"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def free_port():
    """A port of loopback that nobody has."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def command(server, agent, *flags, key=KEY):
    """The command's words for one of the agents."""
    return [
        sys.executable, "-m", "rlx.debug_workflow",
        f"--workflow={HERE / 'debugged_agents.py'}:{agent}", f"--base_url={server}", *flags,
    ], {**os.environ, "OPENAI_API_KEY": key, "PYTHONUNBUFFERED": "1"}  # fmt: skip


@pytest.fixture
def debug_agent(server, tmp_path):
    """Runs the command; gives (status, what it printed, report)."""

    def go(agent, *flags, rows=None, steps="2"):
        if rows is not None:
            (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
            flags = (f"--data={tmp_path / 'rows.jsonl'}", *flags)
        out = tmp_path / "report.json"
        words, env = command(server, agent, f"--steps={steps}", f"--output={out}", *flags)
        done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=env)
        assert KEY not in done.stdout + done.stderr
        assert "Traceback" not in done.stderr, done.stderr
        report = json.loads(out.read_text()) if out.exists() else {}
        return done.returncode, done.stdout + done.stderr, report

    return go


EDITABLE = """
import importlib.machinery, importlib.util, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "rlx":
            return importlib.machinery.PathFinder.find_spec(
                name, [{root!r} + "/" + "/".join(name.split(".")[:-1])])

sys.meta_path.insert(sys.meta_path.index(importlib.machinery.PathFinder) + 1, Finder())
"""


def test_it_runs_where_a_clone_lies_and_writes_nothing_unasked(server, tmp_path):
    """`import rlx` there is the clone's directory, a namespace without a file."""
    site, cwd = tmp_path / "site", tmp_path / "cwd"
    site.mkdir()
    (cwd / "rlx").mkdir(parents=True)
    (site / "sitecustomize.py").write_text(EDITABLE.format(root=str(HERE.parents[1])))
    words, env = command(server, "Good", "--steps=1")
    env["PYTHONPATH"] = str(site)
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=env, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [path.name for path in cwd.rglob("*")] == ["rlx"]


@pytest.fixture
def take(server):
    """The same in this process, where `openai` is imported once; gives the report."""

    def go(agent, *, rows=({},), batch=1, group=1, timeout=60.0, steps="2", model=""):
        cls = loading.load_class(f"{HERE / 'debugged_agents.py'}:{agent}")
        numbered, text = list(enumerate(rows)), []
        found = debugger.Debugger(
            cls, numbered, server, KEY, model, batch, group, timeout,
            section=lambda area, findings: None, text=text.append,
        )  # fmt: skip
        report = json.loads(json.dumps(jsonable(found.run(steps))))
        report["text"] = "\n".join(text)
        assert KEY not in json.dumps(report)
        return report

    return go


def named(report, name):
    """The remarks of a name: [(level, found, remedy)]."""
    return [
        (r["level"], r["found"], r["remedy"])
        for step in ("one", "many")
        for r in report.get(step, {}).get("remarks", [])
        if r["name"] == name
    ]


def test_a_good_agent_passes_both_steps(debug_agent):
    rows = [{"number": n, "wish": {"number": n}} for n in range(4)]
    status, text, report = debug_agent("Good", "--batch=4", "--group=4", rows=rows, steps="1,2")
    assert status == 0, text
    assert report["ok"]
    calls = report["one"]["calls"]
    assert [(c["status"], c["streamed"], c["answer"]) for c in calls] == [
        (200, False, "It is 42."),
        (200, True, "Itis42."),
    ]
    assert (calls[0]["prompt_tokens"], calls[0]["completion_tokens"]) == (12, 5)
    assert calls[1]["stop_reason"] == "stop"
    assert calls[1]["begin"] < calls[1]["first"] < calls[1]["end"]
    assert "call 1  /chat/completions  tiny-model" in text
    assert '       user  {"number": 0}' in text
    many = report["many"]
    assert many["runs"]["ok"] == 16
    assert many["calls_per_run"]["max"] == 2
    assert {row["row"] for row in many["outcomes"]} == {0, 1, 2, 3}
    assert all(len(row["completions"]) == 2 for row in many["outcomes"])
    assert 0 < many["call_seconds"]["max"] < many["run_seconds"]["max"]


def test_all_runs_are_under_way_at_once(take):
    """The server answers none before it was asked by all."""
    report = take("Good", rows=[{"wish": {"together": 16}}], batch=4, group=4)
    assert report["many"]["concurrency"]["calls_most"] == 16
    assert named(report, "concurrency")[0][0] != "problem"


@pytest.mark.parametrize(
    ("agent", "place", "remedy"),
    [
        ("Sleeps", r"debugged_agents\.py:\d+ Sleeps\.tool: time\.sleep\(0\.5\)", "asyncio.sleep"),
        ("AsksInSync", r"AsksInSync\.run: with urllib\.request\.urlopen.*, in", "async HTTP"),
        ("Computes", r"Computes\.run: re\.match\(", "it computes"),
    ],
)
def test_what_blocks_the_loop_is_named(take, agent, place, remedy):
    report = take(agent)
    (found, *_) = named(report, "kept busy by" if agent == "Computes" else "blocked by")
    assert re.search(place, found[1]), found
    assert remedy in found[2]
    assert report["many"]["stalls"]["causes"][0]["stalls"] >= 1


def test_exceptions_are_counted_and_shown_at_the_users_line(take):
    rows = [{"answer": "42"}, {"question": "no answer"}]
    report = take("RaisesForSome", batch=4, group=2, rows=rows)
    assert not report["ok"]
    ((_, found, remedy),) = named(report, "exception")
    assert found.startswith("4 × KeyError: 'answer' at "), found
    assert 'RaisesForSome.grade: return float(data["answer"]' in found
    assert found.endswith("(row 1)")
    assert remedy.endswith("--steps=1 --rows=1")
    report = take("RaisesForSome", rows=rows[1:], steps="1,2")
    assert not report["ok"]
    text = report["text"]
    shown = text[text.index("KeyError") :].splitlines()
    assert "RaisesForSome.run: return self.grade(data)" in shown[1]
    assert 'RaisesForSome.grade: return float(data["answer"]' in shown[2]
    assert "asyncio" not in "".join(shown[1:3])
    assert "many runs come once this one has no problem" in text


def test_runs_that_hang_are_ended_and_their_line_named(take):
    report = take("Hangs", batch=4, timeout=1.0, rows=[{"number": n} for n in range(4)])
    assert not report["ok"]
    ((_, found, _),) = named(report, "timeout")
    assert "1 × waited at" in found
    assert "Hangs.run: await asyncio.Event().wait()" in found
    assert found.endswith("(row 1)")
    assert report["many"]["runs"] == {"returned": 3, "timeout": 1, "ok": 3}


def test_what_does_not_end_is_named_and_left(take, monkeypatch):
    monkeypatch.setattr(concurrent_runs, "_GRACE", 0.1)
    report = take("Deaf", timeout=0.1)
    assert "catches CancelledError" in named(report, "timeout")[0][2]
    assert "tasks: " in named(report, "left behind")[0][1]


def test_a_loop_that_is_blocked_for_good_still_gives_a_report(debug_agent):
    status, text, report = debug_agent("Deadlocks", "--batch=2", "--group=1", "--timeout=1")
    assert status == 1, text
    assert "Deadlocks.run: _turn.acquire()" in named(report, "blocked by")[0][1]
    assert report["many"]["runs"]["lost"] >= 1
    assert "the event loop was blocked for" in named(report, "runs")[0][1]


def test_a_lost_run_stays_lost_when_it_is_collected():
    class Waits:
        async def run(self, data, **kwargs):
            await asyncio.sleep(60)

    run = AgentRun(1, 0, {})
    recorder = SimpleNamespace(base_url=str, api_key="")
    runs = ConcurrentRuns(Waits, [run], recorder, 0.0)
    runs._clients = SimpleNamespace(new=lambda: None)

    async def begin():
        call = runs._call(run)
        call.send(None)
        call.close()

    asyncio.run(begin())
    assert run.end == "lost"


@pytest.mark.parametrize("proxy", ["", "http://proxy.invalid:1"])
def test_the_environment_is_changed_where_a_proxy_is_set(server, monkeypatch, proxy):
    for name in ("http_proxy", "ALL_PROXY", "all_proxy", "HTTP_PROXY", "NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, proxy if name == "HTTP_PROXY" else "")
    for _ in range(2):
        with Recorder(server, KEY):
            assert os.environ["NO_PROXY"] == os.environ["no_proxy"]
    assert os.environ["NO_PROXY"] == ("127.0.0.1" if proxy else "")


def test_what_is_no_reward_is_named(take):
    values = {
        "nan": "run returned nan", "none": "run returned None", "text": "run returned '1.0', a str",
        "unknown": "run rewards 'chatcmpl-999999', an id that the server gave no completion",
        "empty": "run returned {}", "array": "run returned a numpy.ndarray of shape (3,)",
        "coroutine": "run returned coroutine, not yet awaited", "none_of": "is None",
    }  # fmt: skip
    rows = [{"value": value} for value in [*values, "float32", "int"]]
    report = take("Returns", batch=10, rows=rows)
    mistakes = {r["row"]: r["mistake"] for r in report["many"]["outcomes"]}
    for index, (value, words) in enumerate(values.items()):
        assert words in mistakes[index], value
    assert report["many"]["runs"]["ok"] == 2
    assert re.match(r"mean .*, from .* to ", named(report, "rewards")[0][1])
    assert len(named(report, "returned")) == len(values)


def test_runs_that_take_turns_are_seen(take):
    report = take("TakesTurns", batch=4, group=2)
    assert report["many"]["concurrency"]["calls_most"] == 1


def test_refusals_are_named_and_an_agent_may_live_with_them(take):
    rows = [{"wish": {"status": 429}}, {"wish": {"drop": True}}, {}]
    report = take("Refused", batch=3, rows=rows)
    calls = {found.split(":")[0] for _, found, _ in named(report, "calls")}
    assert calls == {"1 × answered 429", "1 × not answered"}
    assert named(report, "runs")[0][0] == "ok"


def test_what_is_left_behind_is_counted(debug_agent):
    _, _, report = debug_agent("LeavesThings", "--batch=8", "--group=1")
    found = [words for _, words, _ in named(report, "left behind")]
    assert found == ["tasks: 8 × sleep", "threads: 8 × lost", "connections: 8 × open"]


def test_a_model_name_of_the_agents_own_can_be_replaced(take):
    report = take("WrongModel", steps="1")
    assert not report["ok"]
    assert "--model=NAME" in named(report, "calls")[0][2]
    report = take("WrongModel", model="other-model", steps="1")
    assert report["ok"]
    assert report["one"]["calls"][0]["model"] == "default"  # as it asked


def test_an_agent_that_exits_ends_alone(take):
    report = take("Exits", group=2)
    assert "2 × SystemExit" in named(report, "exception")[0][1]


def test_what_is_wrong_with_a_server_is_one_line(server):
    root = server.removesuffix("/v1")
    cases = [
        (f"http://127.0.0.1:{free_port()}/v1", KEY, "", "ConnectionRefused.*; start the server"),
        (server, "wrong", "", "401: Incorrect API key provided.*; give --api_key"),
        (server, "", "", "401: .*give --api_key"),
        (root, KEY, "", "404.*http://127.0.0.1:8000/v1"),
        (f"{server}/chat/completions", KEY, "", "404.*http://127.0.0.1:8000/v1"),
        (f"{root}/wrong/v1", KEY, "", "JSONDecodeError.*an OpenAI-compatible server"),
        (f"{root}/slow/v1", KEY, "", "still loading its model"),
        (server, KEY, "tiny-modle", "did you mean 'tiny-model'"),
        (server.replace("http", "https"), KEY, "", "http:// where the server has no TLS"),
        ("http://no-such-host.invalid/v1", KEY, "", "give --base_url"),
        ("127.0.0.1:8000/v1", KEY, "", "unknown url type.*give --base_url=http://"),
        ("http://host:port/v1", KEY, "", "nonnumeric port.*give --base_url=http://"),
    ]
    for url, key, model, words in cases:
        with pytest.raises(UserError, match=words) as caught:
            preflight.check(url, key, model, timeout=0.2 if "/slow/" in url else 30.0)
        assert "\n" not in str(caught.value)
        assert KEY not in str(caught.value)
    assert preflight.check(server, KEY, "") == ("tiny-model", "other-model")
    assert preflight.check(f"{root}/none/v1", KEY, "of-no-list") == ()


def test_mistakes_on_the_command_line_are_told_before_anything_is_asked(monkeypatch, tmp_path):
    for words, expected in (
        (["--steps=3"], "--steps=3 is neither"),
        (["--batch=no"], "--batch=no is not a number"),
        (["--batch=0"], "--batch=0 and --group=8 must be 1 or more"),
        (["--rows=9"], "--rows=9 names no row of 1"),
        ([f"--data={tmp_path}/x.jsonl"], "no file"),
        (["--workflow=x.py:A"], "there is no file x.py"),
        (["--workflow=rlx.rollout.workflows:RLVR"], "is no agent but a workflow of rlx"),
        (["--workflow_kwargs=[]"], "is no JSON object"),
        (["--base_url="], "give --workflow=FILE.py:CLASS and --base_url"),
    ):
        line, _ = command("http://127.0.0.1:1/v1", "Good", *words)
        monkeypatch.setattr(sys, "argv", line[2:])
        with pytest.raises(UserError, match=re.escape(expected)):
            debug_workflow.main()


def test_rows_are_chosen_by_index_or_range(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"n": n}) + "\n" for n in range(5)))
    for wanted, expected in (("", range(5)), ("2", [2]), ("3:", [3, 4]), ("1:3", [1, 2])):
        found = debugger.load_rows(str(path), wanted)
        assert found == [(n, {"n": n}) for n in expected]
    for wrong in ("5", "x", "3:2", "-1"):
        with pytest.raises(UserError, match="--rows="):
            debugger.load_rows(str(path), wrong)
