"""docs/online.md does what it says: its commands, its curl and its application are run."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from rlx.agents import online_routes, session_state
from tests.fixtures.commands import path_without_torch

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/online.md").read_text()
START, CURL = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
(APP,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_page_has_every_status_and_every_route():
    told = set(map(int, re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE)))
    assert told == {*session_state._STATUS.values(), 401, 403, 503}
    for _, path in online_routes._ROUTES:
        assert path.replace("{id}", "ID") in PAGE


@pytest.mark.slow
def test_the_page_s_blocks_run(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PYTHONPATH": path_without_torch(ROOT), "PATH": path}
    options = {"cwd": tmp_path, "env": env, "text": True, "stdout": subprocess.PIPE}
    start = START.replace("8321", port).replace("python -m", "exec python -m")
    gateway = subprocess.Popen(["bash", "-ec", start], **options)
    try:
        assert f":{port}/v1" in gateway.stdout.readline()
        curl = ["bash", "-ec", CURL.replace("8321", port) + 'echo "$MINE" > key']
        done = subprocess.run(curl, timeout=120, **options)
        assert done.returncode == 0, done.stdout
        assert "'loss_mask': [False" in done.stdout
        key = (tmp_path / "key").read_text().split()[-1]
        found = {}
        exec(APP, found)
        url, words = f"http://127.0.0.1:{port}/v1", []
        from openai import OpenAI

        with OpenAI(base_url=url, api_key=key) as client:
            client.post("/session/refresh", cast_to=object)
        found["play"](url, key, ["1+2=?", "3+4=?"], lambda _, words_: words.append(words_) or True)
        assert len(words) == 2
    finally:
        gateway.send_signal(signal.SIGTERM)
        gateway.wait(60)
        gateway.stdout.close()
    assert gateway.returncode == 0
