"""A run is scraped: its numbers are those of its records, and its list has every listener."""

import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families as families

from rlx.base import UserError
from rlx.config import default
from rlx.launch.run_secrets import CERTIFICATE, KEY, make_secrets
from rlx.observe.progress import Progress
from rlx.run import trainer_metrics
from rlx.run.trainer_metrics import gauges_of, serve_metrics
from tests.observe.monitoring_test import METRICS, PLACE
from tests.run.python_test import told


def free_ports(count):
    """The first of `count` ports in a row that are free now."""
    for first in range(20_000 + os.getpid() % 20_000, 60_000, count):
        try:
            for port in range(first, first + count):
                socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return first
    raise AssertionError("no port is free")


def page(address, context=None):
    scheme = "https" if context else "http"
    url = f"{scheme}://{address}/metrics"
    with urllib.request.urlopen(url, timeout=10, context=context) as answer:
        return answer.read().decode()


def numbers(text):
    return {s.name: s.value for family in families(text) for s in family.samples}


@pytest.fixture
def parts(tmp_path, monkeypatch):
    """Parts of a run with one finished step and two servers, one of which is lost."""
    monkeypatch.setattr(trainer_metrics.memory, "state", lambda sizes: {"parameters": 5, "more": 2})
    monkeypatch.setattr(trainer_metrics.memory, "exported", lambda sizes: 3)
    workdir = tmp_path / "one"
    workdir.mkdir()
    record = {"step": 7, "task_reward": 0.5, "failed": 1, "seconds": {"wait": 0.25}}
    (workdir / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    gate = {"step": 7, "ok": True, "limits": {"mean": 0.06}, "servers": {"a:1": {"tokens": 3}}}
    (workdir / "gate.jsonl").write_text(json.dumps(gate) + "\n")
    config = default()
    config.observe.metrics_port = free_ports(2)
    fleet = SimpleNamespace(
        states=lambda: {"a:1": "", "b:1": "lost"}, metrics_listeners=lambda: ["b:9"]
    )
    executor = SimpleNamespace(counters=lambda: {"failed": 4})
    return SimpleNamespace(
        config=config, workdir=workdir, executor=executor, fleets={"policy": fleet}, sizes=None,
        progress=Progress(9),
    )  # fmt: skip


def test_names_are_those_of_the_records_without_histograms():
    record = {
        "step": 3, "task_reward": 0.5, "reward/my term": 2, "seconds": {"wait": 0.25}, "ok": True,
        "staleness_histogram": {"0": 10}, "note": "text", "none": None,
        "servers": {"a:1": {"x": 1}},
    }  # fmt: skip
    assert gauges_of(record) == {
        "task_reward": 0.5, "reward_my_term": 2, "seconds_wait": 0.25, "ok": True
    }  # fmt: skip
    assert gauges_of({"greedy_acc": 1.0}, "eval_") == {"eval_greedy_acc": 1.0}


def test_a_scrape_has_the_last_records_and_what_is_true_now(parts, monkeypatch):
    port = parts.config.observe.metrics_port
    os.utime(parts.workdir / "metrics.jsonl", (0, 0))  # of a process before
    with serve_metrics(parts):
        seen = numbers(page(f"127.0.0.1:{port}"))
        assert seen["rlx_task_reward"] == 0.5
        assert seen["rlx_seconds_wait"] == 0.25
        assert seen["rlx_failed"] == 4, "of the executor, not of the last step"
        assert (seen["rlx_gate_ok"], seen["rlx_gate_limits_mean"]) == (1, 0.06)
        assert (seen["rlx_servers"], seen["rlx_servers_live"]) == (2, 1)
        assert (seen["rlx_checkpoint_bytes"], seen["rlx_max_staleness"]) == (10, 2)
        assert 0 <= seen["rlx_seconds_since_step"] < 60, "since the start: the record is older"
        for jump in (7200, -7200):
            with monkeypatch.context() as patch:
                patch.setattr(time, "time", lambda now=time.time, by=jump: now() + by)
                after = numbers(page(f"127.0.0.1:{port}"))["rlx_seconds_since_step"]
            assert 0 <= after < 60, "the wall clock jumped"
        free = shutil.disk_usage(parts.workdir).free
        assert seen["rlx_disk_free_bytes"] == pytest.approx(free, rel=0.1)
        assert not [name for name in seen if "a_1" in name]
        listed = json.loads((parts.workdir / "prometheus.json").read_text())
    common = {"job": "rlx", "run": "one", "model": "policy"}
    assert listed == [
        {"targets": [f"127.0.0.1:{port}"],
         "labels": {**common, "role": "trainer", "__scheme__": "http"}},
        {"targets": ["b:9"], "labels": {**common, "role": "server", "__scheme__": "https"}},
    ]  # fmt: skip
    assert json.loads((parts.workdir / "prometheus.json").read_text()) == []
    with pytest.raises(urllib.error.URLError):
        page(f"127.0.0.1:{port}")


def test_the_list_follows_the_servers_and_a_full_disk_does_not_end_scrapes(parts, monkeypatch):
    path, at = parts.workdir / "prometheus.json", f"127.0.0.1:{parts.config.observe.metrics_port}"
    with serve_metrics(parts):
        for servers in (["b:9"], ["b:9", "c:9"], []):
            parts.fleets["policy"].metrics_listeners = lambda servers=servers: servers
            page(at)
            written = path.stat().st_mtime_ns
            page(at)
            assert path.stat().st_mtime_ns == written, "it was written again"
            listed = json.loads(path.read_text())
            assert [each["targets"] for each in listed] == [[at], *([name] for name in servers)]

        def full(*_):
            raise UserError("no space left for prometheus.json")

        with monkeypatch.context() as patch:
            patch.setattr(trainer_metrics, "write_atomically", full)
            parts.fleets["policy"].metrics_listeners = lambda: ["d:9"]
            assert "rlx_disk_free_bytes" in numbers(page(at))


@pytest.mark.parametrize("missing", [("fleets", "executor"), ("executor",)])
def test_before_the_run_is_built_the_trainer_is_listed_and_has_no_number(parts, missing):
    for name in missing:
        delattr(parts, name)
    with serve_metrics(parts):
        seen = numbers(page(f"127.0.0.1:{parts.config.observe.metrics_port}"))
        assert "process_open_fds" in seen
        assert not [name for name in seen if name.startswith("rlx_")]
        first, *_ = json.loads((parts.workdir / "prometheus.json").read_text())
        assert first["labels"]["role"] == "trainer"


def test_a_full_disk_does_not_hide_the_failure_of_the_run(parts, monkeypatch):
    def full(path, data):
        raise UserError(f"cannot write {path}: no space left")

    def run():
        with serve_metrics(parts):
            monkeypatch.setattr(trainer_metrics, "write_atomically", full)
            raise UserError("loss is nan")

    with pytest.raises(UserError, match="loss is nan"):
        run()


def test_a_taken_port_and_an_open_address_are_one_line(parts):
    own = parts.config.observe
    with (
        socket.create_server(("127.0.0.1", own.metrics_port)),
        pytest.raises(UserError, match=r"cannot serve metrics on .* choose another port"),
        serve_metrics(parts),
    ):
        pass
    own.metrics_host = "0.0.0.0"
    with (
        pytest.raises(UserError, match=r"anyone could scrape them; .*fleet.tls"),
        serve_metrics(parts),
    ):
        pass


def test_beyond_loopback_the_run_s_own_certificate_opens_it(parts, tmp_path):
    """As in runs on Slurm and Ray, whose trainer gets these files."""
    make_secrets(tmp_path / "ray", ["127.0.0.1"])
    cert, key = str(tmp_path / "ray" / CERTIFICATE), str(tmp_path / "ray" / KEY)
    parts.config.fleet.tls.update({"ca": cert, "cert": cert, "key": key})
    parts.config.observe.metrics_host = "0:0:0:0:0:ffff:127.0.0.1"  # not known to be loopback
    at, context = f"127.0.0.1:{parts.config.observe.metrics_port}", ssl.create_default_context()
    context.load_verify_locations(cert)
    with serve_metrics(parts):
        with pytest.raises((urllib.error.URLError, OSError)):
            page(at, context)
        context.load_cert_chain(cert, key)
        assert numbers(page(at, context))["rlx_task_reward"] == 0.5


@pytest.fixture
def prometheus(tmp_path, parts):
    """A function from a query of a Prometheus that watches WORKDIR/prometheus.json to results."""
    program = shutil.which("prometheus")
    if not program:
        pytest.skip("needs Prometheus: apt-get install prometheus")
    docs = (Path(__file__).parents[2] / "docs" / "runs.md").read_text()
    config = re.search(r"```yaml\n(.*?)```", docs, re.DOTALL)[1]
    for before, after in (
        ("runs/", f"{tmp_path}/"),
        ("rules.yml", f"{PLACE}/rules.yml"),
        ("interval: 10s", "interval: 1s"),
    ):
        assert before in config
        config = config.replace(before, after)
    (tmp_path / "prometheus.yml").write_text(config)
    port = parts.config.observe.metrics_port + 1
    process = subprocess.Popen(
        [program, f"--config.file={tmp_path}/prometheus.yml",
         f"--storage.tsdb.path={tmp_path}/tsdb", f"--web.listen-address=127.0.0.1:{port}"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip

    def ask(path):
        assert process.poll() is None, "Prometheus refuses the config"
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/{path}", timeout=10) as answer:
            return json.load(answer)["data"]

    yield ask
    process.terminate()
    process.wait()


def test_prometheus_takes_the_config_of_the_docs_the_rules_and_the_list(parts, prometheus):
    """`up` has the labels that the rules ask for."""
    query = "query?query=" + urllib.parse.quote('{__name__=~"rlx_gate_ok|up"}')
    with serve_metrics(parts):
        for _ in range(60):
            try:
                found = [each["metric"] for each in prometheus(query)["result"]]
                if {"rlx_gate_ok", "up"} <= {labels["__name__"] for labels in found}:
                    break
            except OSError:
                pass
            time.sleep(0.5)
        else:
            pytest.fail("Prometheus has found no trainer")
        roles = {(each["__name__"], each["role"], each["job"], each["run"]) for each in found}
        assert {("rlx_gate_ok", "trainer", "rlx", "one"), ("up", "trainer", "rlx", "one")} <= roles
        (group,) = prometheus("rules")["groups"]
        assert [rule["health"] in ("ok", "unknown") for rule in group["rules"]] == [True] * 6


@pytest.mark.slow
def test_a_real_run_and_its_servers_have_every_number_of_dashboard_and_rules(tmp_path):
    port = free_ports(3)
    program = f"""
import json, urllib.request

c = config(3)
c.observe.metrics_port, c.gate.enabled, c.fleet.num_servers = {port}, True, 2

class Scrapes:
    steps = []
    def page(self, address):
        return urllib.request.urlopen(f"http://{{address}}/metrics", timeout=60).read().decode()
    def on_step(self, step, record):
        self.steps.append((record, self.page("127.0.0.1:{port}")))
    def on_end(self, reason):
        self.steps.append((None, self.page("127.0.0.1:{port}")))  # with the last evaluation
        listed = json.load(open("run/prometheus.json"))
        servers = [self.page(each["targets"][0]) for each in listed[1:]]
        notes.told = [self.steps, listed, servers]

result = rlx.run(c, "run", callbacks=[Scrapes()])
assert json.load(open("run/prometheus.json")) == []
"""
    steps, listed, servers = told(program, tmp_path)
    record, seen = steps[2][0], numbers(steps[2][1])
    assert seen["rlx_global_step"] == record["step"] == 3
    for name in ("task_reward", "grad_norm", "step_seconds", "staleness_mean"):
        assert seen[f"rlx_{name}"] == pytest.approx(record[name]), name
    for name, seconds in record["seconds"].items():
        assert seen[f"rlx_seconds_{name}"] == pytest.approx(seconds)
    assert 0 <= seen["rlx_seconds_since_step"] < 60
    assert (seen["rlx_servers"], seen["rlx_servers_live"]) == (2, 2)
    targets = [each["targets"] for each in listed]
    assert targets == [[f"127.0.0.1:{port + i}"] for i in range(3)]
    assert [each["labels"]["role"] for each in listed] == ["trainer", "server", "server"]
    assert all(numbers(text)["rlx_engine_alive"] == 1 for text in servers)
    everything = [numbers(text) for text in (*(text for _, text in steps), *servers)]
    assert METRICS - {name for each in everything for name in each} == set()
