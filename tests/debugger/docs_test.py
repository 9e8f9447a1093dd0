"""docs/debugging.md does what it says: its files are written and its commands run, in its order."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fixtures.commands import path_without_torch

pytest.importorskip("openai")
pytest.importorskip("aiohttp")
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/debugging.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
STATUS = iter([0, 0, 1, 0])  # of its commands after the server's, in their order


def numberless(line):
    """A line of output without what differs from run to run."""
    return re.sub(r"\d[\d.:]*", "#", line)


@pytest.mark.slow
def test_the_page_from_its_server_to_an_agent_without_a_problem(tmp_path):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    hidden = ("OPENAI_API_KEY", "XDG_CACHE_HOME")
    environment = {k: v for k, v in os.environ.items() if k not in hidden}
    environment["PYTHONPATH"] = path_without_torch(ROOT, environment={})
    (_, serve), *blocks = BLOCKS
    program, *arguments = shlex.split(serve)
    assert program == "python"
    output, server = "", subprocess.Popen(
        [sys.executable, *arguments, "--port=0"], cwd=tmp_path, env=environment, text=True,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    try:
        url = json.loads(server.stdout.readline())["base_url"]
        for language, block in blocks:
            block = block.replace("http://127.0.0.1:8000/v1", url)
            if language == "python":
                (tmp_path / re.match(r"# ([\w.]+)\n", block)[1]).write_text(block)
            elif language == "text":
                lines = [numberless(line) for line in output.splitlines()]
                for line in filter(None, block.splitlines()):
                    wanted = numberless(line).removesuffix(" …")
                    assert any(found.startswith(wanted) for found in lines), f"{line}\n{output}"
            else:
                program, *arguments = shlex.split(block.replace("\\\n", " "))
                assert program == "python"
                done = subprocess.run(
                    [sys.executable, *arguments], cwd=tmp_path, env=environment, timeout=300,
                    capture_output=True, text=True,
                )  # fmt: skip
                output = done.stdout
                assert done.returncode == next(STATUS), output + done.stderr
        report = json.loads((tmp_path / "report.json").read_text())
        assert report["ok"]
        assert (report["many"]["done"], report["many"]["failed"]) == (32, 0)
    finally:
        server.terminate()
        server.wait()
        server.stdout.close()
