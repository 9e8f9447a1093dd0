"""Tools of real MCP servers: called in generation, over stdio and HTTP, while servers fail."""

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from rlx.base import UserError
from rlx.environments import mcp_tools
from rlx.fleet.requests import Sampling
from rlx.rewards.reward_pool import RewardPool
from rlx.rollout import tools as toolbox
from rlx.rollout.tool_use import ToolUse
from rlx.rollout.workflows import Prompts, Task
from rlx.sandbox.sandbox import SandboxOptions
from rlx.system.jsonl import read_jsonl
from tests.fixtures.commands import FLOAT32, RLX_MAIN, ended
from tests.rollout.scripted import Scripted
from tests.rollout.tool_use_test import HERMES

pytestmark = pytest.mark.witnesses
pytest.importorskip("mcp", reason="mcp is not installed")

ROOT = Path(__file__).parents[2]
SERVER = Path(__file__).with_name("mcp_server.py")
STDIO = f"mcp:{sys.executable} {SERVER}"
ROW = {"question": "1 + 2?", "answer": "3"}


def port_of_loopback():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextmanager
def http_server(port):
    """A server over HTTP that answers."""
    with subprocess.Popen(
        [sys.executable, SERVER, f"--http={port}"], stderr=subprocess.DEVNULL
    ) as process:
        try:
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    break
                time.sleep(0.05)
            yield f"mcp:http://127.0.0.1:{port}/mcp"
        finally:
            process.kill()


@pytest.fixture
def address(request):
    """A server's entry in the list of tools, by the transport that a test asks for."""
    if request.param == "stdio":
        yield STDIO
    else:
        with http_server(port_of_loopback()) as found:
            yield found


@pytest.fixture
def pool():
    """No rewards: what the tools answer is looked at."""
    with_none = RewardPool({})
    yield with_none
    with_none.close()


@pytest.fixture
def hermes(tokenizer):
    import copy

    found = copy.copy(tokenizer)
    found.chat_template = HERMES
    return found


def text_of(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def model_of(*calls):
    """A model that makes these calls in one answer, one after the other."""

    def model(prompt, index):
        begun = prompt.partition("<|user|>")[2].partition("<|assistant|>")[2]
        made = begun.count("</tool_response>")
        written = begun.rpartition("<|assistant|>")[2] if made else begun
        return calls[made][len(written) :] if made < len(calls) else "done<|end|>"

    return model


class Run:
    """A workflow with a server's tools, whose groups can be run one after the other."""

    def __init__(self, tokenizer, pool, address, **options):
        self.tokenizer = tokenizer
        sampling = Sampling(max_new_tokens=4000)
        options = {"max_calls": 9, **options}
        self.workflow = ToolUse(
            Prompts(tokenizer), sampling, pool, 1, SandboxOptions(), tools=[address], **options
        )

    async def answers(self, *calls):
        """The tools' outputs, and the trajectory."""
        fleet = Scripted(self.tokenizer, model_of(*calls))
        (t,) = (await self.workflow.run(fleet, Task(ROW, 4, 9))).trajectories
        texts = t.completion.split("<tool_response>")[1:]
        return [text.partition("</tool_response>")[0] for text in texts], t


def run(coroutine, seconds=120):
    return asyncio.run(asyncio.wait_for(coroutine, seconds))


@pytest.mark.parametrize("address", ["stdio", "http"], indirect=True)
def test_a_model_sees_and_calls_the_tools_of_a_server(hermes, pool, address):
    made = Run(hermes, pool, address)

    async def main():
        try:
            return await made.answers(
                text_of("add_all", numbers=[1, 2.5], factor=2, label="it is ", exact=False),
                text_of("count"),
                text_of("count"),
                text_of("refuse", reason="not today"),
                text_of("add_all", numbers="1, 2"),
                text_of("add_all", numbers=["a"]),
                text_of("crush"),
                text_of("picture"),
            ), await made.workflow._tools["picture"].run()
        finally:
            await made.workflow.aclose()

    (outputs, t), picture = run(main())
    assert outputs[:3] == ["it is 7 False", "1", "2"], "one process has both calls"
    assert "Error: " in outputs[3]
    assert "not today" in outputs[3]
    assert outputs[4] == "Error: numbers must be of type array"
    assert outputs[5].startswith("Error: "), "the server looks at what is in the list"
    assert "a call is a JSON object of name: " in outputs[6]
    assert outputs[7] == "[image]", "this policy sees none"
    assert picture == "data:image/png;base64,iVBORw0K"
    assert (t.info["tools/calls"], t.info["tools/success"]) == (8, 4 / 8)
    assert t.completion.endswith("done")
    described = hermes.decode(t.tokens).partition("<|user|>")[0]
    assert '"name": "add_all", "description": "Adds numbers."' in described
    assert '"factor": {' in described


def test_a_server_that_dies_is_an_error_and_starts_again(hermes, pool, capsys):
    made = Run(hermes, pool, STDIO)

    async def main():
        first, t = await made.answers(text_of("count"), text_of("process"), text_of("crash"))
        second, _ = await made.answers(text_of("count"), text_of("process"))
        await made.workflow.aclose()
        return first, second, t

    first, second, t = run(main())
    assert first[2] == "Error: Connection closed"
    assert t.completion.endswith("done"), "the answer goes on"
    assert second[0] == "1", "a new process"
    assert ended(int(first[1]))
    assert ended(int(second[1])), "its process ends with the workflow"
    assert "Connection closed; the next call starts it again" in capsys.readouterr().err


def test_a_server_that_hangs_costs_an_answer_and_starts_again(hermes, pool, monkeypatch):
    monkeypatch.setattr(mcp_tools, "_SILENT_SECONDS", 0.5)
    made = Run(hermes, pool, STDIO, max_seconds=20.0)

    async def main():
        (process,), _ = await made.answers(text_of("process"))
        made.workflow._max_seconds = 1.0
        _, t = await made.answers(text_of("hang"))
        made.workflow._max_seconds = 20.0
        second, _ = await made.answers(text_of("count"))
        await made.workflow.aclose()
        return int(process), t, second

    process, t, second = run(main())
    assert (t.info["tools/over_seconds"], t.truncated) == (1, True)
    assert second == ["1"]
    assert ended(process)


def test_an_http_server_may_go_and_come_back(hermes, pool):
    port = port_of_loopback()
    with http_server(port) as address:
        made = Run(hermes, pool, address)

    async def main():
        gone, t = await made.answers(text_of("count"), text_of("count"))
        with http_server(port):
            back, _ = await made.answers(text_of("count"), text_of("process"))
            os.kill(int(back[1]), signal.SIGKILL)
            lost, _ = await made.answers(text_of("count"))
        with http_server(port):
            again, _ = await made.answers(text_of("count"))
        await made.workflow.aclose()
        return gone, back, lost, again, t

    gone, back, lost, again, t = run(main())
    assert all(text.startswith("Error: the server does not answer") for text in gone)
    assert t.completion.endswith("done")
    assert (back[0], again) == ("1", ["1"])
    assert lost[0].startswith("Error: ")


def test_a_process_that_hangs_ends_with_the_process_of_the_run(tmp_path):
    """Its input has ended, and it does not read."""
    program = f"""
import asyncio
from rlx.environments import mcp_tools

found = {{tool.name: tool for tool in mcp_tools.tools({STDIO.removeprefix("mcp:")!r})}}

async def main():
    print(await found["process"].run(), flush=True)
    await found["hang"].run()

asyncio.run(main())
"""
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as holder:
        server = psutil.Process(int(holder.stdout.readline()))
        time.sleep(1.0)
        assert server.is_running()
        holder.kill()
        assert ended(server)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("mcp:", "no program ''"),
        ("mcp:no-such-program -x", "no program 'no-such-program'"),
        (f"mcp:{sys.executable} -c 'raise SystemExit(\"no key\")'", "does not answer: no key"),
        (f"mcp:{sys.executable} $NO_SUCH_NAME", r"the variable NO_SUCH_NAME is not set"),
        ("mcp:http://127.0.0.1:9/mcp", "does not answer: .*onnect"),
        (f"mcp:{sys.executable} {SERVER} '", "No closing quotation"),
    ],
)
def test_a_server_that_cannot_work_is_one_line_before_anything_starts(entry, message):
    with pytest.raises(UserError, match=message) as error:
        toolbox.load([entry], SandboxOptions())
    assert str(error.value).startswith(f"rollout.workflow_kwargs.tools: {entry} cannot be used (")
    assert "\n" not in str(error.value)


def test_a_variable_reaches_a_command_by_its_name(monkeypatch):
    monkeypatch.setenv("OF_A_SERVER", str(SERVER))
    found = toolbox.load([f"mcp:{sys.executable} $OF_A_SERVER"], SandboxOptions())
    assert "add_all" in [tool.name for tool in found]
    with pytest.raises(UserError, match="'add_all' is invalid or taken"):
        toolbox.load([STDIO, STDIO], SandboxOptions())


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(UserError, match=r"MCP tools need packages .*; pip install .*mcp"):
        toolbox.load([STDIO], SandboxOptions())


@pytest.mark.slow
def test_a_run_trains_with_the_tools_of_a_server(tmp_path):
    """The embedded model calls `calculator`, which is a tool of the server here."""
    own = shutil.copy(SERVER, tmp_path)  # other tests, and other runs of them, start servers too
    tool = f"mcp:{sys.executable} {own} calculator"
    kwargs = {"tools": [tool], "max_calls": 2, "max_output_tokens": 16}
    command = [
        *RLX_MAIN, "--config=configs/arithmetic_tools.py", f"--workdir={tmp_path}/run",
        f"--config.rollout.workflow_kwargs={json.dumps(kwargs)}", "--config.total_steps=2",
        "--config.rollout.batch_prompts=4", "--config.sampling.n_samples=4",
        "--config.eval.num_questions=4", "--config.fleet.slots=8", "--config.gate.prompts=1",
        FLOAT32,
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    steps = list(read_jsonl(tmp_path / "run" / "metrics.jsonl"))
    assert [step["step"] for step in steps] == [1, 2]
    assert max(step["tools/calls"] for step in steps) > 0
    running = [p.info["cmdline"] or () for p in psutil.process_iter(["cmdline"])]
    assert not [words for words in running if str(own) in words]
