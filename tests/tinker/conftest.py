"""A server of the embedded model, started as a user does, and clients of it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session", params=["jax", pytest.param("torch", marks=pytest.mark.torch)])
def tinker_server(tmp_path_factory, request):
    """`python -m rlx.tinker` on a free port; base_url, and the directory of its checkpoints."""
    workdir = tmp_path_factory.mktemp("tinker")
    command = [
        sys.executable, "-m", "rlx.tinker", "--model=rlx:arithmetic", "--port=0", "--slots=16",
        "--name=Qwen/Qwen3-8B-Base", f"--trainer={request.param}",
        f"--workdir={workdir / 'saved'}",
    ]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with open(workdir / "log", "wb") as log:
        server = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        line = server.stdout.readline()
        assert line, (workdir / "log").read_text()
        url = json.loads(line)["base_url"]
        yield SimpleNamespace(url=url, saved=workdir / "saved", trainer=request.param)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)
        server.stdout.close()
    assert server.returncode == 0, (workdir / "log").read_text()
    assert "Traceback" not in (workdir / "log").read_text()
