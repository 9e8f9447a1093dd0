"""Who gives orders to a run's own servers, or reaches what they load: who has their token."""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from shutil import which

import psutil
import pytest

from rlx.base import UserError
from rlx.fleet.scratch import Scratch
from rlx.launch.local import LocalServers

TESTS = Path(__file__).parent
COMMAND = (sys.executable, str(TESTS.parent / "fixtures" / "arithmetic_engine.py"))
NOBODY = 65534
CALLS = {"AddImage", "Generate", "Score", "Publish", "Pause", "Resume", "Status"}


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """A server whose user has a token of the same name for other servers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLX_FLEET_TOKEN", "of other servers")
        with LocalServers("none", workdir=tmp_path_factory.mktemp("run"), command=COMMAND) as local:
            local.wait()
            (Path(local.directory) / "weights").write_bytes(b"ours")
            yield local


def intrude(servers, uid):
    """What a process of `uid` without the token tried, and what of it worked."""
    (address,) = servers.wait()
    command = (sys.executable, TESTS / "intruder.py", str(uid), address, servers.directory)
    said = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert said.returncode == 0, said.stderr
    return json.loads(said.stdout)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_can_do_nothing(servers):
    found = intrude(servers, NOBODY)
    assert set(found["tried"]) >= {*CALLS, "list", "read weights", "write weights", "rename"}
    assert found["worked"] == []
    assert (Path(servers.directory) / "weights").read_bytes() == b"ours"


def test_a_process_of_the_same_user_can_call_nothing_without_the_token(servers):
    found = intrude(servers, os.getuid())
    assert set(found["tried"]) == CALLS
    assert found["worked"] == []


@pytest.mark.skipif(os.getuid() == 0 and not which("setpriv"), reason="root reads all of /proc")
def test_a_process_of_the_same_user_cannot_read_the_token(tmp_path):
    plain = ("setpriv", "--bounding-set=-sys_ptrace,-perfmon,-sys_admin")
    plain = plain if os.getuid() == 0 else ()  # what every other user lacks anyway
    with LocalServers("none", workdir=tmp_path, command=(*plain, *COMMAND)) as local:
        local.wait()
        (pid,) = local.pids
        for name in ("environ", "mem"):
            said = subprocess.run(
                (*plain, "head", "-c1", f"/proc/{pid}/{name}"), capture_output=True
            )
            assert b"Permission denied" in said.stderr, name


def test_the_token_is_fresh_and_on_no_command_line(servers, tmp_path):
    (pid,) = servers.pids
    environment = psutil.Process(pid).environ()
    assert environment["RLX_FLEET_TOKEN"] == servers.token != "of other servers"
    other = LocalServers("none", workdir=tmp_path, command=COMMAND)
    other.stop()
    assert other.token != servers.token
    assert min(len(other.token), len(servers.token)) >= 32
    for process in psutil.process_iter(["cmdline"]):
        assert servers.token not in " ".join(process.info["cmdline"] or ())


def test_a_private_directory_is_private_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        with Scratch(tmp_path) as scratch:
            modes = [os.stat(p).st_mode for p in (scratch.directory, f"{scratch.directory}/lock")]
    finally:
        os.umask(before)
    assert [stat.S_IMODE(mode) for mode in modes] == [0o700, 0o600]
    assert not list(tmp_path.iterdir())


def test_a_parent_in_which_everyone_may_rename_is_refused(tmp_path):
    tmp_path.chmod(0o777)
    with pytest.raises(UserError, match=r"mode 777.*fleet\.publish_dir"):
        Scratch(tmp_path)
    tmp_path.chmod(0o1777)
    Scratch(tmp_path).close()


def test_a_parent_that_is_not_there_is_one_line(tmp_path):
    with pytest.raises(UserError, match=r"No such file.*fleet\.publish_dir"):
        Scratch(tmp_path / "none")


RUN = """
import subprocess, sys, time
from rlx.launch.local import LocalServers
local = LocalServers("none", workdir=sys.argv[1], publish_dir=sys.argv[1], command=sys.argv[2:])
local.start().wait()
with open(local.directory + "/weights", "wb") as file:
    file.write(bytes(1 << 20))
print(local.directory, local._scratch._remover.pid, *local.pids, flush=True)
time.sleep(100)
"""


def killed_run(room, *whom):
    """The directory of a run that was killed with those of its processes that `whom` names."""
    command = (sys.executable, "-c", RUN, str(room), *COMMAND)
    run = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        directory, *pids = run.stdout.readline().split()
        named = dict(zip(("remover", "server"), map(int, pids), strict=True))
        assert (Path(directory) / "weights").exists()
        for name in whom:
            os.kill(named[name], signal.SIGKILL)
    finally:
        run.kill()
        run.communicate()
    return Path(directory)


def gone(path, seconds=20):
    deadline = time.monotonic() + seconds
    while path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return not path.exists()


@pytest.mark.parametrize("whom", [(), ("server",)])
def test_a_killed_run_leaves_no_weights(tmp_path, whom):
    assert gone(killed_run(tmp_path, *whom))


def test_what_a_killed_run_and_remover_left_goes_with_the_next_run(tmp_path):
    with Scratch(tmp_path) as alive:
        left = killed_run(tmp_path, "remover")
        assert left.exists()
        deadline = time.monotonic() + 20
        while left.exists():  # its server may take a moment to end
            Scratch(tmp_path).close()
            assert time.monotonic() < deadline
        assert Path(alive.directory).exists(), "a run that goes on keeps its own"
