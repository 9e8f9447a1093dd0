"""Machines with ssh and nothing else: three real sshd on loopback, with keys of their own."""

import getpass
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest

from rlx import cluster
from rlx.base import UserError
from rlx.doctor import __main__ as doctor
from rlx.fleet.addresses import Joining
from rlx.fleet.client import Fleet
from rlx.fleet.requests import Timeouts
from rlx.fleet.tls import Tls
from rlx.launch import remote_servers, run_secrets
from rlx.launch.remote_servers import PACKAGES, Machines, checks_of, table
from rlx.system import host_agent
from rlx.system.threads import LoopThread
from tests.fixtures.commands import ended

SSHD, HOSTS = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin"), ("a", "b", "c")
SCRIPT = str(Path(__file__).parents[1] / "fixtures" / "arithmetic_engine.py")
DOCS = Path("docs/cluster.md")
needs_sshd = pytest.mark.skipif(not SSHD, reason="sshd is not installed")


@pytest.fixture(scope="module")
def ssh(tmp_path_factory):
    """The ssh command that knows hosts a, b, c, and d, where nobody listens."""
    place = tmp_path_factory.mktemp("ssh")
    place.chmod(0o700)
    for key in ("host", "user"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(place / key)], check=True
        )
    shutil.copy(place / "user.pub", place / "authorized")
    made = Path("/run/sshd") if os.geteuid() == 0 and not os.path.exists("/run/sshd") else None
    if made:
        made.mkdir(mode=0o755)
    daemons, config, known = [], "", ""
    try:
        for number, host in enumerate((*HOSTS, "d"), 2):
            address = f"127.0.0.{number}"  # each its own, as Ray's nodes need
            with socket.socket() as free:
                free.bind((address, 0))
                port = free.getsockname()[1]
            config += f"Host {host}\n HostName {address}\n Port {port}\n"
            known += f"[{address}]:{port} {(place / 'host.pub').read_text()}"
            if host == "d":
                continue
            log = (place / f"{host}.log").open("wb")
            daemons.append(subprocess.Popen(
                [SSHD, "-D", "-e", "-f", "/dev/null", "-h", str(place / "host"), "-p", str(port),
                 "-o", f"ListenAddress={address}", "-o", "PasswordAuthentication=no",
                 "-o", f"AuthorizedKeysFile={place / 'authorized'}", "-o", "UsePAM=no",
                 "-o", "StrictModes=no", "-o", "PidFile=none", "-o", "PermitRootLogin=yes"],
                stdout=log, stderr=log,
            ))  # fmt: skip
            log.close()
            deadline = time.monotonic() + 60
            while True:
                with suppress(OSError):
                    socket.create_connection((address, port), 1).close()
                    break
                said = (place / f"{host}.log").read_text()
                assert daemons[-1].poll() is None, said
                assert time.monotonic() < deadline, said
        (place / "known").write_text(known)
        (place / "config").write_text(
            f"{config}Host *\n User {getpass.getuser()}\n IdentityFile {place / 'user'}\n"
            f" IdentitiesOnly yes\n UserKnownHostsFile {place / 'known'}\n"
        )
        yield f"ssh -F {place / 'config'}"
    finally:
        for daemon in daemons:
            daemon.terminate()
            daemon.wait()
        if made:
            made.rmdir()


def command(ssh, tmp_path, capsys, *arguments, serve=(SCRIPT,)):
    """Status and output of `python -m rlx.cluster` with hosts and a shared directory."""
    flags = (f"--shared={tmp_path / 'shared'}", *arguments[1:])
    if arguments[0] == "up":
        flags = (f"--ssh={ssh}", "--model=none", *flags)
    status = cluster.main([arguments[0], *flags], serve)
    return status, capsys.readouterr().out


def of_the_docs(program, tmp_path, *flags):
    """The arguments that docs/cluster.md gives after `python -m PROGRAM`, with places of ours."""
    (line,) = [line for line in DOCS.read_text().splitlines() if f"-m {program}" in line]
    words = line.split(f"-m {program}")[1].replace("/shared", f"{tmp_path}/shared").split()
    return [*(word.replace("=DIR", "=none") for word in words), *flags]


@pytest.fixture
def ending(tmp_path):
    """Ends what a test has started and left."""
    yield
    if (tmp_path / "shared" / remote_servers.STATE).exists():
        remote_servers.down(tmp_path / "shared")


@needs_sshd
def test_up_status_and_down_on_three_hosts(ssh, tmp_path, capsys, monkeypatch, ending):
    asked = of_the_docs("rlx.doctor", tmp_path, f"--ssh={ssh}")
    monkeypatch.setattr(sys, "argv", ["rlx.doctor", *asked])
    assert doctor.main() == 0
    assert [line.count("✓") for line in capsys.readouterr().out.splitlines()] == [0, 7, 7, 7]
    asked = of_the_docs("rlx.cluster up", tmp_path, f"--ssh={ssh}", "--", "--slots=4")
    status, out = cluster.main(["up", *asked], (SCRIPT,)), capsys.readouterr().out
    assert status == 0, out
    checks = [line for line in out.splitlines() if line[:3].strip() in HOSTS and "✓ yes" in line]
    assert [line.count("✓") for line in checks] == [7, 7, 7]
    assert "--config.fleet.join=" in out
    assert len(list((tmp_path / "shared" / "servers").iterdir())) == 3
    with pytest.raises(UserError, match="has servers already"):
        command(ssh, tmp_path, capsys, "up", "--hosts=a,b,c")
    _, found = remote_servers.read(tmp_path / "shared")
    started = [one["pid"] for host in HOSTS for one in found[host]]
    assert cluster.main(["status", *of_the_docs("rlx.cluster status", tmp_path)]) == 0
    assert capsys.readouterr().out.count("✓ runs") == 3
    os.kill(started[1], signal.SIGKILL)
    assert ended(started[1], 60)
    status, out = command(ssh, tmp_path, capsys, "status")
    assert (status, out.count("✓ runs"), out.count("✗ ended")) == (1, 2, 1)
    assert cluster.main(["down", *of_the_docs("rlx.cluster down", tmp_path)]) == 0
    assert all(ended(pid, 60) for pid in started)
    assert not list((tmp_path / "shared" / "servers").iterdir())
    with pytest.raises(UserError, match="nothing was started"):
        command(ssh, tmp_path, capsys, "status")


@needs_sshd
def test_servers_with_metrics_ask_for_the_run_s_certificate_and_report_where(
    ssh, tmp_path, capsys, ending
):
    with socket.create_server(("127.0.0.2", 0)) as free:
        port = free.getsockname()[1]
    flags = ("--hosts=a,b", "--servers=2", f"--metrics-port={port}")
    status, out = command(ssh, tmp_path, capsys, "up", *flags)
    assert (status, "--config.fleet.tls.cert=" in out) == (0, True), out
    secret = tmp_path / "shared" / "secrets"
    cert, key = str(secret / run_secrets.CERTIFICATE), str(secret / run_secrets.KEY)
    token, loop = (secret / run_secrets.TOKEN).read_text(), LoopThread("fleet")
    loop.start()
    found = {}
    for tls in (Tls(ca=cert), Tls(cert, key, cert)):
        joining = Joining(str(tmp_path / "shared" / "servers"), tls)
        limits = Timeouts(connect_seconds=60.0 if tls.cert else 3.0)
        fleet = Fleet((), token=token, joining=joining, limits=limits, publish_dir=str(tmp_path))
        try:
            loop.run(fleet.connect())
            for _ in range(100):
                if len(fleet.metrics_listeners()) == 4:
                    break
                time.sleep(0.1)
        except UserError as error:
            found[tls.cert] = str(error)
        else:
            found[tls.cert] = fleet.metrics_listeners()
        loop.run(fleet.close())
    loop.close()
    assert "no rollout server answered" in found[""]
    assert found[cert] == [f"127.0.0.{n}:{port + i}" for n in (2, 3) for i in (0, 1)]
    for address in found[cert]:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as page:
            assert b"rlx_engine_alive 1" in page.read()


@needs_sshd
def test_servers_that_joined_by_hand_stay(ssh, tmp_path, capsys, ending):
    servers = tmp_path / "shared" / "servers"
    servers.mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as by_hand:
        mine = f"127.0.0.1:{by_hand.getsockname()[1]}"
        for name in (mine, "127.0.0.1:1"):
            (servers / name).write_text(name)
        status, out = command(ssh, tmp_path, capsys, "up", "--hosts=a")
        assert (status, len(os.listdir(servers))) == (0, 2), out
        assert command(ssh, tmp_path, capsys, "down")[0] == 0
        assert os.listdir(servers) == [mine]


@needs_sshd
def test_a_server_that_cannot_start_leaves_none_running(ssh, tmp_path, capsys):
    code = (
        "import os, runpy, sys; sys.argv = sys.argv[1:]; "
        "'/b-0.log' in os.readlink('/proc/self/fd/1') and "
        "sys.exit('error: no room; lower fleet.slots'); "
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    with pytest.raises(UserError, match=r"b: server 0 ended or is not ready .no room; lower fleet"):
        command(ssh, tmp_path, capsys, "up", "--hosts=a,b", serve=("-c", code, SCRIPT))
    assert not (tmp_path / "shared" / remote_servers.STATE).exists()
    assert not list((tmp_path / "shared" / "servers").iterdir())


@needs_sshd
def test_ctrl_c_while_servers_are_started_leaves_none_running(ssh, tmp_path, capsys, monkeypatch):
    ask, started = Machines.ask, []

    def interrupted(self, action, requests):
        answers = ask(self, action, requests)
        if action == "start":
            started.extend(one["pid"] for some in answers.values() for one in some)
            os.kill(os.getpid(), signal.SIGINT)
        return answers

    monkeypatch.setattr(Machines, "ask", interrupted)
    with pytest.raises(KeyboardInterrupt):
        command(ssh, tmp_path, capsys, "up", "--hosts=a,b")
    assert len(started) == 2
    assert all(ended(pid, 60) for pid in started)
    assert not (tmp_path / "shared" / remote_servers.STATE).exists()


@pytest.fixture
def local_ssh(tmp_path):
    """An ssh that runs everything here, and dies after a start where the file `cut` is."""
    script = tmp_path / "ssh"
    script.write_text(f"""#!/bin/bash
[ "$1" != -G ] || exec echo hostname 127.0.0.1
while [ "$1" != -- ]; do shift; done
shift
[ ! -e {tmp_path}/away ] || exit 255
program=$(cat)
answer=$("${{@//\\'/}}" <<< "$program")
[[ $program = *"(start("* && -e {tmp_path}/cut ]] && touch {tmp_path}/away && exit 255
echo "$answer"
""")
    script.chmod(0o755)
    return str(script)


@pytest.mark.parametrize("unreachable", [True, False])
def test_what_a_host_started_is_ended_though_its_answer_was_lost(
    local_ssh, tmp_path, capsys, ending, unreachable
):
    """The host was forgotten: `down` left its servers running, and then knew of none."""
    log, away = tmp_path / "shared" / "logs" / "a-0.log", tmp_path / "away"
    (tmp_path / "cut").touch()
    if not unreachable:
        script = Path(local_ssh)
        script.write_text(script.read_text().replace(f"touch {away} && ", ""))
    code = "import time; time.sleep(600)"
    with pytest.raises(UserError, match=r"a: status 255|rlx\.cluster down"):
        command(local_ssh, tmp_path, capsys, "up", "--hosts=a", serve=("-c", code))
    pid = json.loads(log.with_name("a-0.log.pid").read_text())["pid"]
    if unreachable:
        assert not ended(pid, 0.1)
        away.unlink()
        status, out = command(local_ssh, tmp_path, capsys, "status")
        assert (status, "✓ runs" in out) == (0, True)
        assert command(local_ssh, tmp_path, capsys, "down")[0] == 0
    assert ended(pid, 10)
    assert not (tmp_path / "shared" / remote_servers.STATE).exists()


def test_the_ports_of_all_servers_and_their_metrics_are_looked_at(local_ssh, tmp_path, capsys):
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        for flag in (f"--metrics-port={port}", f"--port={port - 1}"):
            flags = ("--hosts=a", "--servers=2", flag)
            status, out = command(local_ssh, tmp_path, capsys, "up", *flags)
            assert status == 1
            assert f"port {port}: Address already in use" in out
    status, out = command(local_ssh, tmp_path, capsys, "up", *flags[:2], "--port=65535")
    assert (status, "port 65536: " in out) == (1, True)


def test_a_host_that_does_not_answer_is_not_said_to_have_ended_its_servers(tmp_path):
    server = {"name": "server 0", "log": "no", "pid": os.getpid(), "begun": "1"}
    remote_servers._write(Machines(("a",), "false", "python3"), tmp_path, {"a": [server]})
    shown, well = remote_servers.status(tmp_path)
    assert not well
    assert "does not answer" in shown
    assert "ended" not in shown


def test_servers_are_not_started_by_srun_which_would_end_them(tmp_path):
    with pytest.raises(UserError, match="processes of srun end with its step"):
        remote_servers.up(Machines(("n1",), "srun", "python3"), tmp_path, {"n1": []})


@needs_sshd
def test_what_keeps_a_host_from_serving_is_told_and_nothing_starts(ssh, tmp_path, capsys):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        status, out = command(ssh, tmp_path, capsys, "up", "--hosts=a,d", f"--port={port}")
    assert status == 1
    assert f"✗ a: ports: port {port}: Address already in use → give another --port" in out
    assert "✗ d: reach: " in out
    assert "work without a password (ssh-copy-id d)" in out
    status, out = command(ssh, tmp_path, capsys, "up", "--hosts=a", "--python=/no/python")
    assert status == 1
    assert "give the hosts' Python by --python" in out
    assert not list((tmp_path / "shared").iterdir())


def test_a_host_that_differs_is_named_with_the_remedy():
    here = host_agent.look(".", list(PACKAGES), "/", "", [])
    other = {**here, "shared": "No such file", "ports": "", "clock": time.time() - 60,
             "versions": {**here["versions"], "numpy": "0.1", "jax": ""}}  # fmt: skip
    now = time.time()
    checks = checks_of("b", {**here, "shared": "", "ports": ""}, here, (now - 5, now))
    assert all(check.level == "ok" for check in checks)
    wrong = {c.name: c for c in checks_of("c", other, here, (now, now)) if c.level != "ok"}
    assert set(wrong) == {"packages", "clock", "shared"}
    assert "numpy 0.1 (here " in wrong["packages"].result
    assert "jax missing (here " in wrong["packages"].result
    assert all(check.remedy for check in wrong.values())
    text = table([*checks, *wrong.values()])
    assert "✗ c: clock: 60.0 s off → set it by NTP (chrony)" in text
    older = checks_of("d", {**here, "python": "3.9.2"}, here, (now, now))
    assert [c.name for c in older if c.remedy and c.name == "python"] == ["python"]


def test_the_doctor_asks_the_hosts_of_a_slurm_job_by_srun(tmp_path, monkeypatch, capsys):
    for name, lines in {
        "scontrol": 'test "$*" = "show hostnames n[1-2]" && printf "n1\\nn2\\n"',
        "srun": 'while [ "${1#--}" != "$1" ]; do shift; done; exec "$@"',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{lines}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    machines = Machines.of("", "ssh", sys.executable, {"SLURM_JOB_NODELIST": "n[1-2]"})
    assert machines.hosts == ("n1", "n2")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    monkeypatch.setattr(sys, "argv", ["rlx.doctor", "--cluster", f"--workdir={tmp_path}"])
    assert doctor.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert [(line.split()[0], line.count("✓")) for line in lines[1:]] == [("n1", 7), ("n2", 7)]
    with pytest.raises(UserError, match="give each host once"):
        Machines.of("a,a", "ssh", "python3", {})


def test_a_process_id_that_is_anothers_by_now_is_not_ended():
    ours = {"pid": os.getpid(), "begun": host_agent.start_ticks(os.getpid())}
    assert host_agent.alive([ours]) == [True]
    assert host_agent.stop([{**ours, "begun": "1"}], 0.1) == [False]
