"""vLLM's own endpoint beside the fleet's, over real HTTP."""

import json
import socket
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

from rlx.engines.vllm.openai_http import OPEN
from rlx.launch.local import LocalServers


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def ask(url, token="sesame", **body):
    """(status, answer) of a GET, or of a POST with a body."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
    data = json.dumps(body).encode() if body else None
    try:
        request = urllib.request.Request(url, data, headers)
        with urllib.request.urlopen(request, timeout=30) as page:
            return page.status, json.load(page)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, None


@pytest.mark.vllm
def test_a_completion_over_http_and_nothing_else(tiny_model_dir, tmp_path):
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    options = {"engine": "vllm", "slots": 4, "max_model_len": 128, "openai_port": port}
    with LocalServers(tiny_model_dir, workdir=tmp_path, token="sesame", **options) as local:
        local.wait()
        status, models = ask(f"{url}/v1/models")
        assert status == 200
        name = models["data"][0]["id"]
        body = {"model": name, "prompt": [3, 4, 5], "max_tokens": 5, "ignore_eos": True}
        status, answer = ask(f"{url}/v1/completions", **body)
        assert status == 200
        assert answer["usage"] == {**answer["usage"], "prompt_tokens": 3, "completion_tokens": 5}
        for token in ("", "open"):
            for path in OPEN:
                assert ask(url + path, token, **body)[0] == 401, path
        closed = ("/pause", "/resume", "/collective_rpc", "/metrics", "/tokenize", "/docs",
                  "/invocations", "/scale_elastic_ep", "/inference/v1/generate")  # fmt: skip
        for path in closed:
            assert ask(url + path)[0] == ask(url + path, **body)[0] == 404, path


def test_only_vllm_has_it(tools):
    command = (sys.executable, tools.script, "--model=none", f"--openai-port={free_port()}")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("error: --openai-port=")
    assert done.stderr.count("\n") == 1
    assert "--engine=vllm" in done.stderr
