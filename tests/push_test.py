"""`rlx push` uploads what a run exported, by the hub's own client, to a hub on this machine."""

import base64
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
import yaml

from tests.fixtures.commands import path_without_torch


class Hub(BaseHTTPRequestHandler):
    """The calls of an upload: make a repository, ask how each file travels, send, commit."""

    def do_POST(self):
        hub, body = self.server, self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Authorization") != "Bearer right":
            self.answer({"error": "Invalid username or password."}, 401)
        elif self.path == "/api/repos/create":
            hub.made = json.loads(body)
            self.answer({"url": f"{hub.url}/me/first"})
        elif self.path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            modes = [(f["path"], "lfs" if f["path"].endswith("safetensors") else "regular")
                     for f in files]  # fmt: skip
            found = [{"path": p, "uploadMode": m, "shouldIgnore": False} for p, m in modes]
            self.answer({"files": found})
        elif self.path.endswith("/info/lfs/objects/batch"):
            objects = [{**each, "actions": {"upload": {"href": f"{hub.url}/put/{each['oid']}"}}}
                       for each in json.loads(body)["objects"]]  # fmt: skip
            self.answer({"transfer": "basic", "objects": objects})
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    hub.files[value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    hub.files[value["path"]] = hub.sent[value["oid"]]
            self.answer({"commitUrl": f"{hub.url}/me/first/commit/1", "commitOid": "1"})
        else:
            self.answer({"error": self.path}, 404)

    def do_PUT(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.sent[self.path.rpartition("/")[2]] = body
        self.answer({})

    def do_GET(self):
        self.answer({"id": "me/first", "sha": "0", "siblings": []})

    def answer(self, found, status=200):
        body = json.dumps(found).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.url = f"http://127.0.0.1:{server.server_port}"
    server.files, server.sent, server.made = {}, {}, {}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def workdir(tmp_path):
    run = tmp_path / "run"
    for name, text in {
        "hf/config.json": "{}", "hf/model.safetensors": "weights", "hf/README.md": "of the base",
        "adapter/adapter_config.json": "{}", "metrics.jsonl": '{"step": 8, "task_reward": 0.5}\n',
        "eval.jsonl": '{"step": 4, "greedy_acc": 0.25}\n{"step": 8, "greedy_acc": 0.75}\n',
        "config.json": '{"model": {"path": "Qwen/Qwen2.5-0.5B"}, "seed": 3, "total_steps": 8}',
    }.items():  # fmt: skip
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(text)
    return run


def push(hub, *words, token="right"):
    return subprocess.run(
        [sys.executable, "-m", "rlx.push", *map(str, words)], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": path_without_torch(), "HF_ENDPOINT": hub.url,
             "HF_TOKEN": token, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0",
             "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
    )  # fmt: skip


def test_a_run_is_uploaded_with_its_card(hub, workdir):
    done = push(hub, workdir, "me/first", "--license=mit")
    assert (done.returncode, done.stdout.strip()) == (0, f"{hub.url}/me/first"), done.stderr
    # The hub's client has had both spellings.
    assert hub.made.get("private") or hub.made.get("visibility") == "private", hub.made
    card = hub.files.pop("README.md").decode()
    assert hub.files == {"config.json": b"{}", "model.safetensors": b"weights",
                         "adapter/adapter_config.json": b"{}"}  # fmt: skip
    about = yaml.safe_load(card.split("---\n")[1])
    assert (about["license"], about["base_model"]) == ("mit", "Qwen/Qwen2.5-0.5B")
    assert about["model-index"][0]["results"][0]["metrics"][0]["value"] == 0.75
    assert "after 8 of 8 steps" in card
    assert "| 4 | 0.250 |\n| 8 | 0.750 |" in card


def test_the_card_can_be_read_first(hub, workdir):
    done = push(hub, workdir, "me/first", "--print")
    assert "| 8 | 0.750 |" in done.stdout
    assert not hub.files
    assert not hub.made


def test_the_card_of_a_killed_run_is_that_of_its_weights(hub, workdir):
    (workdir / "checkpoints/step_00000004").mkdir(parents=True)
    settings = (workdir / "config.json").read_text().replace('"seed": 3', '"seed": 0')
    (workdir / "config.json").write_text(settings)
    out = push(hub, workdir, "me/first", "--print").stdout
    assert "after 4 of 8 steps" in out
    assert "| `seed` | `0` |" in out
    assert "| 4 | 0.250 |" in out
    assert "0.75" not in out, "of weights that it has not"


def test_what_cannot_be_pushed_is_one_line(hub, workdir, tmp_path):
    for done, words in [
        (push(hub, workdir, "me/first", token="wrong"), "$HF_TOKEN"),
        (push(hub, workdir, "a b/c"), "cannot push to a b/c"),
        (push(hub, tmp_path, "me/first"), "no exported weights"),
        (push(SimpleNamespace(url="http://127.0.0.1:9"), workdir, "me/first"), "refused; check"),
    ]:
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert words in done.stderr
