"""docs/agents.md does what it says: its agent and its program are run as they stand."""

import asyncio
import re
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

PAGE = Path("docs/agents.md").read_text()
AGENT, PROGRAM, ASK = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
*_, BRIEF = re.findall(r"```python\n(.*?)```", Path("docs/running.md").read_text(), re.DOTALL)


@contextmanager
def served(agents, engine):
    """The address of a server in a thread."""
    ready, end, found = threading.Event(), asyncio.Event(), []

    async def main():
        async with agents.fleet(engine) as (_, server):
            found.extend([f"127.0.0.1:{server.port}", asyncio.get_running_loop()])
            ready.set()
            await end.wait()

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    try:
        assert ready.wait(20)
        yield found[0]
    finally:
        found[1].call_soon_threadsafe(end.set)
        thread.join()


def test_the_page_s_agent_is_evaluated_by_the_page_s_program(agents, tmp_path):
    (tmp_path / "my_agent.py").write_text(AGENT)
    agents.tokenizer().save_pretrained(tmp_path / "model")
    tries = iter(range(1000))
    with served(agents, agents.engine(lambda *_: f"it is {next(tries) % 3}")) as address:
        text = PROGRAM.replace("127.0.0.1:8470", address)
        text = text.replace("path/to/model", str(tmp_path / "model"))
        assert text.count(address) == text.count(str(tmp_path)) == 1
        program = tmp_path / "program.py"
        shown = "print(len(groups), len(groups[0].trajectories))\n"
        program.write_text(f"{text}{shown}{BRIEF}{shown}")
        done = subprocess.run(
            [sys.executable, program], capture_output=True, text=True, timeout=120
        )
    assert done.returncode == 0, done.stderr
    stats, counts, brief, same = done.stdout.splitlines()
    assert "'num_trajectories': 8.0" in stats
    assert "'num_trajectories': 8.0" in brief
    assert (counts, same) == ("1 4", "1 8")


def test_every_field_that_the_page_names_is_taken():
    from rlx.agents import chat

    listed = PAGE.split("takes `messages`")[1].split("chat_template_kwargs`.")[0]
    assert set(re.findall(r"`(\w+)`", listed)) <= chat.SCHEMA.keys()


def test_the_page_s_clients_ask_a_gateway(agents):
    found = {}
    exec(ASK, found)

    async def main():
        async with agents.gateway(agents.engine(lambda *_: "it is 7")) as g:
            g.gateway.sessions.open(agents.sampling, "", endless=True)
            return await asyncio.to_thread(found["ask"], g.gateway.base_url())

    assert agents.run(main()) == ("it is 7", "it is 7")
