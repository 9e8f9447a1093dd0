"""The processes that a command starts itself: heard once, missed at once, gone with it."""

import os
import signal
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from rlx.base import UserError
from rlx.config import default
from rlx.run import trainers
from rlx.run.trainers import spawn_local_ranks
from rlx.train.hosts import Cluster, Hosts, join
from tests.fixtures.commands import ended

LONG = 100_000.0  # that nobody waits for


def config_of(processes=2):
    config = default()
    config.trainer, config.cluster.processes, config.cluster.join_seconds = "torch", processes, LONG
    return config


def use(monkeypatch, program):
    """Let the others be this program."""
    monkeypatch.setattr(sys, "orig_argv", [sys.executable, "-c", program])


def test_an_error_of_another_process_is_left_to_process_0_and_the_rest_is_heard(monkeypatch, capfd):
    use(monkeypatch, "import sys; print('a warning\\nerror: train.mesh', file=sys.stderr)")
    with spawn_local_ranks(config_of(3)) as config:
        assert config.cluster.process == 0
    assert capfd.readouterr().err == "a warning\n" * 2


@pytest.mark.parametrize(
    ("program", "wanted"),
    [
        ("import no_such_module", "with status 1: ModuleNotFoundError: No module named 'no_such"),
        ("raise SystemExit('error: bad key')", "with status 1: bad key"),
        ("import os; os.kill(os.getpid(), 15)", "by SIGTERM"),
    ],
)
def test_a_process_that_ends_before_it_comes_is_missed_at_once(program, wanted, monkeypatch):
    use(monkeypatch, program)
    with (
        pytest.raises(UserError, match=f"^process 1 of 2 ended {wanted}"),
        spawn_local_ranks(config_of()) as config,
    ):
        join(Cluster.of({}, **config.cluster), {})


def test_a_host_with_another_file_of_the_users_loss_is_another_run(tmp_path, monkeypatch):
    seen, file = [], tmp_path / "loss.py"
    monkeypatch.setattr(
        trainers, "join", lambda cluster, equal: seen.append(equal) or Hosts(cluster, [])
    )
    monkeypatch.setattr(trainers, "library", lambda config: SimpleNamespace(set_up=lambda: None))
    config = default()
    config.algorithm.loss = f"{file}:own"
    for text in ("one", "one", "another"):
        file.write_text(text)
        with trainers.join_processes(config, threading.Event()):
            pass
    assert seen[0] == seen[1] != seen[2]


STARTS = """
import sys, threading
from rlx.config import default
from rlx.run.trainers import spawn_local_ranks
config = default()
config.trainer, config.cluster.processes = "torch", 2
with spawn_local_ranks(config):
    print(sys.argv[1:], __import__("os").getpid(), flush=True)
    threading.Event().wait()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_end_of_a_command_ends_what_it_has_started_even_where_that_is_stopped(number):
    pipe = {"stdout": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen([sys.executable, "-c", STARTS], **pipe) as process:
        try:
            said = [process.stdout.readline() for _ in range(2)]  # both are in the block
            (other,) = (int(line.split()[-1]) for line in said if "process=1" in line)
            os.kill(other, signal.SIGSTOP)
            process.send_signal(number)
            assert ended(other, 60.0)
        finally:
            os.killpg(process.pid, signal.SIGKILL)


JOINS = """
import sys, psutil
from rlx.config import default
from rlx.run import trainers
from rlx.train.hosts import Cluster, join
config, (trainer, address, index) = default(), sys.argv[1:]
config.trainer = trainer
hosts = join(Cluster(address, 2, int(index), join=200), {})
trainers.library(config).join(hosts)
own = psutil.Process().net_connections("inet")
listening = [c.laddr.ip for c in own if c.status == psutil.CONN_LISTEN]
print({address.removeprefix("::ffff:") for address in listening}, flush=True)
sys.stdin.read()
hosts.close()
trainers.library(config).leave()
"""


@pytest.mark.slow
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
@pytest.mark.parametrize("trainer", ["jax", "torch"])
def test_a_trainers_library_listens_only_where_its_processes_are(trainer, host):
    """The coordination service of JAX and the store of PyTorch ask callers for nothing."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"{host}:{free.getsockname()[1]}"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    pair = [
        subprocess.Popen([sys.executable, "-c", JOINS, trainer, address, str(index)], **pipes)
        for index in range(2)
    ]
    try:
        found = [process.stdout.readline() for process in pair]
        for process in pair:
            process.stdin.close()  # then they leave together
        assert [process.wait(60) for process in pair] == [0, 0]
    finally:
        for process in pair:
            process.kill()
            process.wait()
            process.stdout.close()
    assert found == ["{'127.0.0.1'}\n"] * 2
