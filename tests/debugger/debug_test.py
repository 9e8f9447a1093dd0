"""rlx.debug_workflow against real HTTP servers: every mistake of an agent is named."""

import asyncio
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from rlx import debug_workflow
from rlx.base import UserError
from rlx.debugger import debugger
from rlx.model.directory import resolve

pytest.importorskip("openai")
pytest.importorskip("anthropic")
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


def words(server, agent, *flags):
    """The command's arguments for one of the agents."""
    return [f"--workflow={HERE / 'debugged_agents.py'}:{agent}", f"--base_url={server}", *flags]


@pytest.fixture
def debug(server, tmp_path, monkeypatch, capfd):
    """Runs the command in this process; gives (status, what it printed, report)."""

    def go(agent, *flags, rows=({},), steps="2"):
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        data, out = f"--data={tmp_path}/rows.jsonl", tmp_path / "report.json"
        own = words(server, agent, data, f"--steps={steps}", f"--output={out}", "--group=1", *flags)
        monkeypatch.setattr(sys, "argv", ["debug_workflow", *own])
        monkeypatch.setenv("OPENAI_API_KEY", KEY)
        status, printed = debug_workflow.main(), capfd.readouterr().out
        assert KEY not in printed + out.read_text()
        return status, printed, json.loads(out.read_text())

    return go


def failures(report):
    """Return row number → error of each failed run."""
    return {run["index"]: run["error"] for run in report["many"]["runs"]}


def test_a_good_agent_passes_both_steps(debug):
    rows = [{"number": n, "wish": {"number": n}} for n in range(4)]
    status, text, report = debug("Good", "--batch=4", "--group=4", rows=rows, steps="1,2")
    assert status == 0, text
    calls = report["one"]["runs"][0]["calls"]
    assert [(c["path"], c["status"], c["answer"], c["stop_reason"]) for c in calls] == [
        ("/chat/completions", 200, "It is 42.", "stop"),
        ("/chat/completions", 200, "It is 42.", "stop"),
        ("/messages", 200, "It is 42.", "end_turn"),
    ]
    assert "call 1  /chat/completions  tiny-model" in text
    assert '       user  {"number": 0}\n     answer  It is 42.' in text
    many = report["many"]
    assert (many["done"], many["failed"]) == (16, 0)
    assert {run["index"] for run in many["runs"]} == {0, 1, 2, 3}
    assert all(list(run["reward"].values()) == [0.0, 1.0, 0.5] for run in many["runs"])
    assert 0 < many["call_seconds"]["p50"] <= many["call_seconds"]["max"]
    assert many["call_seconds"]["max"] < many["run_seconds"]["max"]
    assert "16 of 16 ok" in text
    assert "mean reward 0.5" in text


def test_all_runs_are_under_way_at_once(debug):
    """The server answers none before it was asked by all."""
    row = {"how": "", "wish": {"together": 16}}
    assert debug("AsTheRowSays", "--batch=4", "--group=4", rows=[row])[0] == 0


def test_failures_are_counted_by_exception_and_line(debug):
    hows = ["raises", "exits", "hangs", "nan", "none", "unknown", "text", "none of"]
    rows = [{"how": how} for how in [*hows, "raises", "well"]]
    status, text, report = debug("AsTheRowSays", "--batch=10", "--timeout=2", rows=rows)
    found = failures(report)
    assert status == 1
    assert (report["many"]["done"], report["many"]["failed"]) == (1, 9)
    place = r"\(.*debugged_agents.py, line \d+\)"
    expected = (
        f"KeyError: 'answer' {place}", f"SystemExit: 3 {place}",
        f"it did not end in 2 s {place}", "run returned nan", "run returned None",
        "run rewards 'no-id', which is no completion of this run",
        "run returned '1.0', a str", "is None",
    )  # fmt: skip
    for index, pattern in enumerate(expected):
        assert re.search(pattern, found[index]), found[index]
    assert re.search(f"failed: 2 × KeyError: 'answer' {place} \\(rows 0, 8\\)", text)
    assert "look at one: --steps=1 --rows=0" in text
    _, text, _ = debug("AsTheRowSays", rows=[{"how": "raises"}], steps="1,2")
    assert "in grade\n    return float(data" in text
    assert "fix this run before running many" in text


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("blocks", r"blocked the event loop for 1 s; .*debugged_agents.py:\d+ .*_turn.acquire"),
        pytest.param("deaf", "re-raise CancelledError", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_does_not_end_is_ended_and_named(debug, how, error):
    status, _, report = debug("AsTheRowSays", "--batch=1", "--timeout=1", rows=[{"how": how}])
    assert status == 1
    assert re.search(error, failures(report)[0])


def test_a_client_that_runs_share_is_a_failure(debug):
    _, _, report = debug("SharedClient", "--batch=4", rows=[{}])
    # Any run may be the first, whose client all of them use.
    good, *others = sorted(run["error"] for run in report["many"]["runs"])
    assert not good
    assert len(others) == 3
    assert all("asked for no completion; does it use the base_url" in error for error in others)


def test_refusals_are_counted_by_status(debug):
    wishes = [{"status": 429}, {"status": 429}, {"drop": True}, {}]
    rows = [{"how": "", "wish": wish} for wish in wishes]
    status, text, report = debug("AsTheRowSays", "--batch=4", rows=rows)
    assert status == 1
    assert "calls: 2 × 429: refused, request" in text
    assert "calls: 1 × not answered: ServerDisconnectedError" in text
    assert report["many"]["done"] == 1


def test_a_model_name_of_the_agents_own_can_be_replaced(debug):
    rows = [{"how": "", "model": "default"}]
    status, text, _ = debug("AsTheRowSays", rows=rows, steps="1")
    assert status == 1
    assert "404: The model `default` does not exist" in text
    status, text, _ = debug("AsTheRowSays", "--model=other-model", rows=rows, steps="1")
    assert status == 0
    assert "/chat/completions  default" in text  # as it asked


def test_a_server_that_does_not_answer_as_it_should_is_one_line(server):
    from rlx.debugger.forwarder import Forwarder

    async def models(url, key, model):
        async with Forwarder(url, key, model) as found:
            return await found.models(0.2 if "/slow/" in url else 30.0)

    root = server.removesuffix("/v1")
    cases = [
        (f"http://127.0.0.1:{free_port()}/v1", KEY, "", "Cannot connect.*; start the server"),
        (server, "wrong", "", "401 Incorrect API key provided.*correct --api_key"),
        (server, "", "", "401 Incorrect"),
        (root, KEY, "", "404.*http://HOST:PORT/v1"),
        (f"{root}/wrong/v1", KEY, "", "JSONDecodeError.*correct --api_key or --base_url"),
        (f"{root}/slow/v1", KEY, "", "TimeoutError"),
        (server, KEY, "tiny-modle", "did you mean 'tiny-model'"),
        (server.replace("http", "https"), KEY, "", "ssl"),
        ("127.0.0.1:8000/v1", KEY, "", "correct --api_key or --base_url=http://"),
        ("http://host:port/v1", KEY, "", "correct --api_key or --base_url=http://"),
    ]
    for url, key, model, expected in cases:
        with pytest.raises(UserError, match=expected) as caught:
            asyncio.run(models(url, key, model))
        assert "\n" not in str(caught.value)
        assert KEY not in str(caught.value)
    assert asyncio.run(models(server, KEY, "")) == ["tiny-model", "other-model"]
    assert asyncio.run(models(f"{root}/none/v1", KEY, "of-no-list")) == []


def test_mistakes_on_the_command_line_are_named_before_anything_is_asked(monkeypatch, tmp_path):
    for flag, expected in (
        ("--steps=3", "--steps=3 is invalid"),
        ("--batch=no", "--batch=no is not a number"),
        ("--batch=0", "--batch=0 and --group=8 must be 1 or more"),
        ("--rows=9", "--rows=9 selects none of 1"),
        (f"--data={tmp_path}/x.jsonl", "no file"),
        ("--workflow=x.py:A", "there is no file x.py"),
        ("--workflow=rlx.rollout.workflows:RLVR", "is a workflow of rlx, not an agent"),
        ("--workflow_kwargs=[]", "is not a JSON object"),
        ("--base_url=", "give --workflow=FILE.py:CLASS and --base_url"),
    ):
        line = ["debug_workflow", *words("http://127.0.0.1:1/v1", "Good", flag)]
        monkeypatch.setattr(sys, "argv", line)
        with pytest.raises(UserError, match=re.escape(expected)):
            debug_workflow.main()


def test_rows_are_chosen_by_index_or_range(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"n": n}) + "\n" for n in range(5)))
    for wanted, expected in (("", range(5)), ("2", [2]), ("3:", [3, 4]), ("1:3", [1, 2])):
        assert debugger.load_rows(str(path), wanted) == [(n, {"n": n}) for n in expected]
    for wrong in ("5", "x", "3:2", "-1"):
        with pytest.raises(UserError, match="--rows="):
            debugger.load_rows(str(path), wrong)


@pytest.mark.vllm
@pytest.mark.slow
def test_against_vllms_own_server(tmp_path):
    from experiments.bench.gateway import vllm_serve

    with vllm_serve(resolve("rlx:arithmetic"), 8, tmp_path) as (url, _):
        own = words(
            url, "Arithmetic", "--config=configs/arithmetic.py", "--batch=8", "--group=2",
            f"--output={tmp_path / 'report.json'}",
        )  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-m", "rlx.debug_workflow", *own], capture_output=True, text=True,
            timeout=200, env={**os.environ, "OPENAI_API_KEY": "bench"},
        )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "report.json").read_text())["many"]["done"] == 16
