"""A run on a Ray cluster: its processes on nodes that are killed under it."""

import contextlib
import importlib.util
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from unittest.mock import MagicMock

import psutil
import pytest

from rlx.base import UserError
from rlx.config import default
from rlx.launch import ray_cluster
from rlx.launch.processes import Process
from rlx.launch.ray_cluster import RayCluster, Running
from rlx.run.on_ray import _RayRun
from rlx.system.signals import interrupts
from tests.fixtures.commands import FLOAT32, RLX_MAIN, ended
from tests.run.main_test import processes_of, records, wait_for
from tests.run.run_grid_test import FAST
from tests.run.trainer_metrics_test import free_ports, page

ROOT = Path(__file__).parents[2]
DOCS = re.search(r"## Ray\n.*?^python -m rlx.main (.*?)^```",
                 (ROOT / "docs" / "cluster.md").read_text(), re.DOTALL | re.MULTILINE)  # fmt: skip
COMMAND = shlex.split(DOCS[1].replace("\\\n", ""))
FLAGS = [
    "--config.scheduler.type=ray",
    "--config.rollout.batch_prompts=4", "--config.sampling.n_samples=4", "--config.fleet.slots=16",
    "--config.sampling.max_new_tokens=32", "--config.eval.num_questions=0",
    "--config.observe.writers=()", "--config.checkpoint.first_step=1",
    "--config.checkpoint.every_steps=1", "--config.fleet.num_servers=2", FLOAT32,
]  # fmt: skip
NODES = ("127.0.0.2", "127.0.0.3", "127.0.0.4", "127.0.0.5")  # Ray counts 127.0.0.1 as none
GRADERS = ("127.0.0.6", "127.0.0.7")  # no process of a run fits there, but workers
GRADER = r"""
import sys
from rlx.base import UserError
from rlx.config import default
from rlx.launch.ray_workers import starter
from rlx.rewards.reward_pool import RewardCall, RewardError, RewardPool
from rlx.workers.worker_process import WorkerLimits

config = default()
config.reward.resources, config.reward.environment = "grader:1", ("RLX_TEST_WORKER",)
config.reward.workers = 9
try:
    starter("reward", config)
except UserError as error:
    print(error, flush=True)
config.reward.workers = 1
limits, start = WorkerLimits.of(config.reward, config.sandbox), starter("reward", config)
pool = RewardPool("arithmetic", timeout=60, limits=limits, start=start)
texts = "\\boxed{2}", "\\boxed{3}"
calls = [RewardCall("1+1=", text, [1], [1], {"answer": "2"}) for text in texts]
for _ in sys.stdin:
    try:
        print(pool.compute(calls).rewards, pool.drain_spans()[0].pid, flush=True)
    except RewardError as error:
        print("error", error, flush=True)
pool.close()
"""
SECONDS = 300.0  # of a run on a machine that does something else, too


def ray(test):
    """Mark a test that needs Ray."""
    there = importlib.util.find_spec("ray") is not None
    return pytest.mark.ray(pytest.mark.skipif(not there, reason="needs the extra ray")(test))


class Cluster:
    """A head without cores, and three nodes of two, as processes of this machine."""

    def __init__(self, directory: str):
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.address = f"{NODES[0]}:{free.getsockname()[1]}"
        self.directory = directory
        self.environment = {
            **os.environ, "RAY_USAGE_STATS_ENABLED": "0", "RLX_TEST_RAY": directory,
            "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_health_check_initial_delay_ms": "0", "RAY_health_check_period_ms": "1000",
            "RAY_health_check_timeout_ms": "5000", "RAY_health_check_failure_threshold": "5",
        }  # fmt: skip

    def up(self):
        """Start the head, and the nodes one after the other: two at once take the same socket."""
        port = self.address.rpartition(":")[2]
        head = (f"--port={port}", f"--node-ip-address={NODES[0]}", "--num-cpus=0", "--head",
                "--include-dashboard=false", f"--temp-dir={self.directory}")  # fmt: skip
        nodes = ((f"--address={self.address}", f"--node-ip-address={host}", "--num-cpus=2")
                 for host in NODES[1:])  # fmt: skip
        graders = ((f"--address={self.address}", f"--node-ip-address={host}", "--num-cpus=0",
                    '--resources={"grader": 1}') for host in GRADERS)  # fmt: skip
        for flags in (head, *nodes, *graders):
            assert self.start(*flags), Path(self.directory, "log").read_text()
        self.environment["RAY_ADDRESS"] = self.address

    def start(self, *flags):
        """Whether a node began; Ray gives it 30 s, which a busy machine may not have at once."""
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", *flags,
                   "--disable-usage-stats", "--object-store-memory=80000000"]  # fmt: skip
        for _ in range(3):
            before = self.processes()
            with open(f"{self.directory}/log", "ab") as log:
                if not subprocess.call(
                    command, env=self.environment, stdout=log, stderr=log, timeout=SECONDS
                ):
                    return True
            for process in set(self.processes()) - set(before):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        return False

    def processes(self):
        """Those that have the cluster's variable: Ray's, and what they started."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("RLX_TEST_RAY") == self.directory:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def raylet(self, host):
        return next(
            p for p in self.processes()
            if p.name() == "raylet" and f"--node_ip_address={host}" in p.cmdline()
        )  # fmt: skip

    def where(self, pid):
        """The node that a process runs on."""
        words = [
            w for p in psutil.Process(pid).parents() if p.name() == "raylet" for w in p.cmdline()
        ]
        (host,) = [w.partition("=")[2] for w in words if w.startswith("--node_ip_address=")]
        return host

    def workers(self, module):
        """The processes on Ray's nodes that run a module."""
        return [
            child.pid
            for raylet in self.processes() if raylet.name() == "raylet"
            for child in raylet.children(recursive=True)
            if child.cmdline()[1:4] == ["-P", "-m", module]
        ]  # fmt: skip

    def kill(self, host):
        """Kill a node's raylet, and then all that it had started."""
        raylet = self.raylet(host)
        started = raylet.children(recursive=True)
        for process in (raylet, *started):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def close(self):
        everyone = self.processes()
        for process in list(everyone):  # Ray's agents write a title over their variables
            with contextlib.suppress(psutil.NoSuchProcess):
                everyone += process.children(recursive=True)
        for process in everyone:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(everyone, timeout=30)


@pytest.fixture(scope="module")
def cluster():
    """One of three nodes and two for workers, of which tests kill some."""
    directory = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # short: sockets are in it
    made = Cluster(directory)
    try:
        made.up()
        yield made
    finally:
        made.close()
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def start(tmp_path):
    """start(flags, environment) → a run in tmp_path/run, whose output goes to tmp_path/log."""
    started = []

    def make(*flags, environment=os.environ, command=("--config=configs/arithmetic.py",)):
        own = {**environment, "RLX_TEST_RUN": str(tmp_path / "run")}
        own.pop("RLX_TEST_RAY", None)
        with open(tmp_path / "log", "w") as log:
            started.append(subprocess.Popen(
                [*RLX_MAIN, *command, f"--workdir={tmp_path / 'run'}", *FLAGS, *flags],
                stdout=log, stderr=log, env=own, start_new_session=True,
            ))  # fmt: skip
        return started[-1]

    yield make
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def last_line(path):
    return path.read_text().strip().splitlines()[-1]


def steps(run):
    return [record["step"] for record in records(run / "metrics.jsonl")]


@ray
def test_too_little_is_said_with_the_arithmetic(cluster, start, tmp_path):
    process = start("--config.fleet.num_servers=9", "--dry_run", environment=cluster.environment)
    assert process.wait(SECONDS) == 2
    wanted = "error: 5 processes on 127.0.0.4 need a core each, and Ray has 2 there; use"
    assert last_line(tmp_path / "log").startswith(wanted)


@ray
def test_runs_of_a_sweep_are_jobs_at_the_same_time(cluster, tmp_path):
    sweep, command = tmp_path / "sweep", [sys.executable, "-m", "rlx.sweep"]
    done = subprocess.run(
        [*command, *FAST, "--config.scheduler.type=ray", "--config.total_steps=4", "seed=0,1",
         "--jobs=2", f"--workdir={sweep}"],
        env=cluster.environment, text=True, capture_output=True, timeout=SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert (sweep / "comparison.html").exists()
    runs = [sweep / "seed=0", sweep / "seed=1"]
    assert [steps(run) for run in runs] == [[1, 2, 3, 4]] * 2
    for run in runs:
        assert re.search(r"127\.0\.0\.[345]: trainer 0: CPU\n", (run / "output.log").read_text())
    begun = [records(run / "starts.jsonl")[0]["time"] for run in runs]
    took = [records(run / "metrics.jsonl")[-1]["elapsed_seconds"] for run in runs]
    assert max(begun) < min(start + seconds for start, seconds in zip(begun, took, strict=True))


@ray
def test_the_docs_run_goes_on_on_what_is_left_when_a_trainers_node_dies(cluster, start, tmp_path):
    run, log, port = tmp_path / "run", tmp_path / "log", free_ports(3)
    process = start(
        "--config.total_steps=4", "--config.reward.workers=2",
        "--config.reward.resources=grader:1", f"--config.observe.metrics_port={port}",
        command=COMMAND, environment=cluster.environment,
    )  # fmt: skip
    wait_for(lambda: len(steps(run)) >= 2 or process.poll() is not None, SECONDS)
    assert {*map(cluster.where, cluster.workers("rlx.rewards.reward_worker"))} == {*GRADERS}
    assert "rlx_servers 2.0" in page(f"{NODES[1]}:{port}")
    listed = [each["targets"][0] for each in json.loads((run / "prometheus.json").read_text())]
    assert listed == [f"{NODES[1]}:{port}", f"{NODES[3]}:{port + 1}", f"{NODES[3]}:{port + 2}"]
    assert "rlx_engine_alive 1.0" in page(listed[2])
    cluster.kill(NODES[2])
    assert process.wait(SECONDS) == 0, log.read_text()
    said = log.read_text()
    assert f"{NODES[2]}: trainer 1: CPU\n" in said  # the plan
    assert "trainer 1 is lost: its actor or node has died" in said
    assert "trainer 0 | resuming after step" in said
    assert sorted(set(steps(run))) == [1, 2, 3, 4]
    assert (run / "report.html").exists()
    assert not processes_of(run)


@ray
def test_applications_have_sessions_on_the_trainers_node(cluster, start, tmp_path):
    run, log, over = tmp_path / "run", tmp_path / "log", threading.Event()
    process = start(
        "--config.sampling.n_samples=1", "--config.online.port=0", "--config.total_steps=1000",
        command=("--config=configs/arithmetic_online.py",),
        environment={**cluster.environment, "RLX_ADMIN_KEY": "admin-key-of-the-tests"},
    )  # fmt: skip
    said = re.compile(r"sessions at (https://127\.0\.0\.3:\d+/v1); certificate: (\S+)")
    wait_for(lambda: said.search(log.read_text()) or process.poll() is not None, SECONDS)
    url, certificate = said.search(log.read_text()).groups()
    trusted = ssl.create_default_context(cafile=certificate)

    def call(path, key, body):
        headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=SECONDS, context=trusted) as answer:
            return json.loads(answer.read())

    def play():
        while not over.is_set():
            with contextlib.suppress(urllib.error.HTTPError, OSError):
                key = call("/sessions", "admin-key-of-the-tests", {})["api_key"]
                text = [{"role": "user", "content": "1 + 2 ="}]
                call("/chat/completions", key, {"model": "m", "messages": text})
                call("/rewards", key, {"reward": 1.0})
                call("/session/end", key, {})
            time.sleep(0.1)

    with pytest.raises(urllib.error.HTTPError, match="401"):
        call("/sessions", "a-key-that-is-not-the-admins", {})
    users = [threading.Thread(target=play, daemon=True) for _ in range(6)]
    for user in users:
        user.start()
    wait_for(lambda: len(steps(run)) >= 2 or process.poll() is not None, SECONDS)
    assert process.poll() is None, log.read_text()
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(SECONDS) == 130, log.read_text()
    over.set()
    assert "Traceback" not in log.read_text()
    assert not processes_of(run)


@ray
def test_reward_workers_are_where_the_resources_are_and_go_on_elsewhere(cluster):
    with subprocess.Popen(
        [sys.executable, "-c", GRADER], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env={**cluster.environment, "RLX_TEST_WORKER": "a secret of the reward's"},
    ) as pool:  # fmt: skip

        def graded(wanted=r"\[1.0, 0.0\] (\d+)\n"):
            """What a line of the pool says in the end, until it is as wanted."""
            deadline, said = time.monotonic() + SECONDS, ""
            while not (found := re.fullmatch(wanted, said)):
                assert time.monotonic() < deadline, said
                pool.stdin.write("once more\n")
                pool.stdin.flush()
                said = pool.stdout.readline()
            return int((found.groups() or "0")[0])

        wanted = (
            "9 workers with reward.resources=grader:1 need 9 grader, and the Ray cluster has 2; "
        )
        assert pool.stdout.readline() == f"{wanted}lower reward.workers\n"
        first = graded()
        assert cluster.where(first) in GRADERS
        variables = psutil.Process(first).environ()
        assert variables["RLX_TEST_WORKER"] == "a secret of the reward's"
        assert "RAY_AUTH_TOKEN" not in variables
        os.kill(first, signal.SIGKILL)
        graded("error reward 'arithmetic' failed .*: the worker process died .exit code -9. .*\n")
        killed = cluster.where(graded())
        cluster.kill(killed)
        third = graded()
        assert cluster.where(third) in {*GRADERS} - {killed}
        pool.stdin.close()
        assert pool.wait(SECONDS) == 0
    assert ended(third, SECONDS)


@ray
def test_agents_go_on_when_the_servers_node_dies_and_ctrl_c_ends_all(cluster, start, tmp_path):
    run, log = tmp_path / "run", tmp_path / "log"
    process = start(
        "--config.total_steps=1000", "--config.agents.resources=grader:1",
        command=("--config=configs/arithmetic_agent.py",), environment=cluster.environment,
    )  # fmt: skip
    wait_for(lambda: steps(run) or process.poll() is not None, SECONDS)
    (agent,) = cluster.workers("rlx.agents.worker")
    assert cluster.where(agent) in GRADERS
    cluster.kill(NODES[3])
    again = f"on {NODES[3]} is lost: its actor or node has died; starting another"
    wait_for(lambda: again in log.read_text() or process.poll() is not None, SECONDS)
    before = len(steps(run))
    wait_for(lambda: len(steps(run)) >= before + 2 or process.poll() is not None, SECONDS)
    assert process.poll() is None, log.read_text()
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(SECONDS) == 130, log.read_text()
    said = log.read_text()
    assert said.count('| {"port"') >= 3
    assert "(1 of 3)" not in said
    assert "trainer 0 | stopped after step" in said
    assert not processes_of(run)


@ray
def test_a_cluster_that_is_not_there_is_said_at_once(start, tmp_path):
    process = start(environment={**os.environ, "RAY_ADDRESS": "127.0.0.1:1"})
    assert process.wait(SECONDS) == 2
    wanted = "error: RAY_ADDRESS=127.0.0.1:1: no head of a Ray cluster listens there"
    assert last_line(tmp_path / "log").startswith(wanted)
    assert not (tmp_path / "run").exists()


def test_a_server_that_wrote_many_lines_is_replaced(tmp_path):
    """Its ready line was looked for among its last 200, so its death ended the run."""
    left = [['{"port": 1, "pid": 2}'], [f"request {n}" for n in range(300)], ["bye"]]
    ray = MagicMock()
    ray.wait.side_effect = lambda refs, **_: (refs, [])
    ray.get.side_effect = lambda _: (None if left[1:] else -9, left.pop(0))
    ray.get_runtime_context.return_value.gcs_address = "a:1"
    cluster = RayCluster(ray)
    one = Running(Process("server", 0, "a", (), 1, (), {}), MagicMock(), None, reply="ref")
    while not one.over:
        cluster.look([one], 0.0)
    run = _RayRun(cluster, default(), tmp_path, [])
    run._running, run._hosts, run._environment, again = [one], ("a",), {}, MagicMock()
    cluster.again = lambda *_: again
    run._replace_ended()
    assert run._running == [again]


def test_a_server_has_the_platform_of_the_plan(monkeypatch, tmp_path):
    """JAX_PLATFORMS of the command's own shell took its place."""
    ray, start = MagicMock(), MagicMock()
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(ray_cluster, "SupervisedProcess", start)
    start.return_value.running = False
    env = {"JAX_PLATFORMS": "cpu", "RLX_FLEET_TOKEN": "t"}
    planned = Process("trainer", 0, "a", (), 1, ("rlx",), {"JAX_PLATFORMS": "cuda"})
    ray_cluster.Keeper().begin(planned, env, ".", str(tmp_path / "log"))
    found = start.call_args.kwargs["environment"]
    assert (found["JAX_PLATFORMS"], found["RLX_FLEET_TOKEN"]) == ("cuda", "t")


def test_only_a_first_server_that_cannot_start_ends_the_run(tmp_path):
    """One that was to replace a lost server, whose memory is not free at once, ended it too."""
    cluster, run = MagicMock(), _RayRun(MagicMock(), default(), tmp_path, [])
    run._cluster, run._hosts, run._environment = cluster, ("a",), {}
    server = Process("server", 0, "a", (), 1, (), {})
    run._running = [Running(server, MagicMock(), None, code=-9, ready=True)]
    run._replace_ended()
    run._running = [Running(server, MagicMock(), None, code=2)]
    run._replace_ended()
    assert run._running == [cluster.again.return_value]
    first = _RayRun(cluster, default(), tmp_path, [])
    first._running = [Running(server, MagicMock(), None, code=2)]
    with pytest.raises(UserError, match="server 0 on a ended"):
        first._replace_ended()


def test_ctrl_c_before_the_start_ends_the_command(tmp_path):
    run, end = _RayRun(MagicMock(), default(), tmp_path, []), time.monotonic() + 10

    def wait_for_nodes():
        os.kill(os.getpid(), signal.SIGINT)
        while time.monotonic() < end:
            time.sleep(0.01)

    with interrupts(run.interrupt), pytest.raises(KeyboardInterrupt):
        wait_for_nodes()


def test_ray_that_is_not_installed_is_said_in_one_line(tmp_path):
    program = "import sys; sys.modules['ray'] = None; sys.argv[0] = 'rlx'; import rlx.cli.command"
    program += " as c, rlx.main as m; c.run(m.main)"
    done = subprocess.run(
        [sys.executable, "-c", program, "--config=configs/arithmetic.py", *FLAGS,
         f"--workdir={tmp_path / 'run'}"],
        capture_output=True, text=True, timeout=SECONDS,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == (
        "error: scheduler.type=ray needs Ray (import of ray halted; None in sys.modules); "
        "pip install -e '.[ray]'\n"
    )
