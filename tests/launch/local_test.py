"""Local servers: cores, start, death, restart, and an end with whoever started them."""

import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlx.base import UserError
from rlx.fleet.member import Timeouts
from rlx.fleet.wire import TOKEN_VARIABLE
from rlx.launch.local import CpuPlan, LocalServers, cpu_plan, start_early
from rlx.system.threads import LoopThread
from tests.fixtures.commands import ended

SCRIPT = str(Path(__file__).parents[1] / "fixtures" / "arithmetic_engine.py")
COMMAND = (sys.executable, SCRIPT)


@pytest.mark.parametrize(
    ("cores", "servers", "threads", "plan"),
    [
        ((0,), 2, 0, CpuPlan((0,), ((0,), (0,)))),
        ((0, 1), 1, 0, CpuPlan((0,), ((1,),))),
        ((4, 6), 1, 0, CpuPlan((4,), ((6,),))),
        ((0, 1), 2, 0, CpuPlan((0,), ((1,), (1,)))),
        ((0, 1, 2), 1, 0, CpuPlan((0, 1), ((2,),))),
        ((0, 1, 2, 3), 1, 0, CpuPlan((0, 1), ((2, 3),))),
        ((0, 1, 2, 3), 1, 1, CpuPlan((0, 1, 2), ((3,),))),
        ((0, 1, 2, 3), 1, 9, CpuPlan((0,), ((1, 2, 3),))),
        ((0, 1, 2, 3), 3, 0, CpuPlan((0,), ((1,), (2,), (3,)))),
        ((0, 1, 2, 3), 2, 2, CpuPlan((0,), ((1, 2), (1, 3)))),
        ((0, 1, 2), 0, 0, CpuPlan((0, 1, 2), ())),
    ],
)
def test_cpu_plan(cores, servers, threads, plan):
    assert cpu_plan(cores, servers, threads) == plan


@pytest.mark.parametrize(
    ("cores", "servers", "threads", "shared"),
    [(2, 1, 0, True), (2, 2, 0, True), (3, 2, 0, True), (3, 1, 0, False), (2, 1, 1, False)],
)
def test_processes_of_one_core_each_share_all(cores, servers, threads, shared):
    plan = cpu_plan(range(cores), servers, threads, sharing=True)
    everything = tuple(range(cores))
    if shared:
        assert plan == CpuPlan(everything, (everything,) * servers)
    else:
        assert plan == cpu_plan(everything, servers, threads)


@given(
    st.lists(st.integers(0, 500), min_size=1, max_size=64, unique=True).map(sorted),
    st.integers(1, 20),
    st.integers(0, 70),
)
def test_servers_alone_have_all_cores(cores, servers, threads):
    plan = cpu_plan(cores, servers, threads, trains=False)
    each = min(threads or max(1, len(cores) // servers), len(cores))
    assert [len(set(own)) for own in plan.servers] == [each] * servers
    used = [core for own in plan.servers for core in own]
    assert set(used) <= set(cores)
    times = [used.count(core) for core in cores]
    assert max(times) - min(times) <= 1, "no core is used again before each has been"


@given(
    st.lists(st.integers(0, 500), min_size=1, max_size=64, unique=True).map(sorted),
    st.integers(0, 20),
    st.integers(0, 70),
)
def test_cpu_plan_uses_what_there_is(cores, servers, threads):
    plan = cpu_plan(cores, servers, threads)
    assert len(plan.servers) == servers
    everyone = (plan.trainer, *plan.servers)
    for one in everyone:
        assert one
        assert set(one) <= set(cores)
        assert len(set(one)) == len(one)
    if len(cores) >= 2:
        assert all(not set(plan.trainer) & set(one) for one in plan.servers)
    if len(cores) > servers * max(1, threads):
        assert sum(map(len, everyone)) == len(cores), "cores of one's own, and none idle"


def start(tmp_path, **options):
    options = {"num_servers": 1, "command": COMMAND, **options}
    return LocalServers("none", workdir=tmp_path, **options)


@pytest.fixture
def cores():
    """Every core of this machine; a process of several of pytest has few of its own."""
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, range(os.cpu_count()))
    yield sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, own)


def test_start_wait_stop(tmp_path, cores):
    with start(tmp_path, num_servers=2) as local:
        addresses = local.wait()
        assert len(set(addresses)) == 2
        pids = local.pids
        plan = cpu_plan(cores, 2)
        for pid, cpus in zip(pids, plan.servers, strict=True):
            assert tuple(sorted(os.sched_getaffinity(pid))) == cpus
            assert "\nUmask:\t0077\n" in Path(f"/proc/{pid}/status").read_text()
            assert psutil.Process(pid).environ()["OMP_NUM_THREADS"] == str(len(cpus))
        for i, address in enumerate(addresses):
            assert (
                f'"port": {address.split(":")[1]}'
                in (tmp_path / f"logs/server-{i}.log").read_text()
            )
        assert sorted(os.sched_getaffinity(0)) == cores
    assert all(ended(pid, 0.1) for pid in pids)
    assert local.pids == ()
    local.stop()


EARLY = (sys.executable, "-u", SCRIPT)
ENGINE = {"engine": "arithmetic", "slots": 4, "max_model_len": 64, "dtype": "float32"}


@pytest.mark.parametrize("slots", [4, 8])
def test_an_early_server_serves_only_with_the_engine_that_it_started(tmp_path, slots, monkeypatch):
    monkeypatch.setattr("rlx.launch.local.COMMAND", EARLY)
    options = {**ENGINE, "decode_steps": 4}
    cpus = tuple(sorted(os.sched_getaffinity(0)))
    with start_early("none", cpus, 3, options) as early:
        given = {**options, "slots": slots, "seed": 3, "plan": CpuPlan(cpus, (cpus,))}
        with start(tmp_path, command=EARLY, early=[early], kv_on_update="abort", **given) as local:
            local.wait()
            taken = slots == options["slots"]
            assert (local.pids == (early.pid,)) == taken
            assert ended(early.pid, 0.1) != taken
            (environment,) = (psutil.Process(pid).environ() for pid in local.pids)
            assert (environment[TOKEN_VARIABLE] == local.token) != taken
            thread = LoopThread("fleet")
            thread.start()
            fleet = local.fleet()
            thread.run(fleet.connect())  # which needs the token
            thread.run(fleet.close())
            thread.close()
    assert '{"port": ' in (tmp_path / "logs" / "server-0.log").read_text()
    assert ended(early.pid, 0.1)


def test_an_early_server_ends_when_nobody_takes_it(monkeypatch):
    monkeypatch.setattr("rlx.launch.local.COMMAND", EARLY)
    with start_early(
        "none", sorted(os.sched_getaffinity(0)), 0, {**ENGINE, "decode_steps": 4}
    ) as p:
        p.stdin.close()
        assert p.wait(60) == 0


def test_stop_ends_a_stopped_server(tmp_path, monkeypatch):
    monkeypatch.setattr("rlx.launch.local._STOP_SECONDS", 60.0)
    with start(tmp_path) as local:
        local.wait()
        (pid,) = local.pids
        os.kill(pid, signal.SIGSTOP)
        start_time = time.monotonic()
    assert ended(pid, 0.1)
    assert time.monotonic() - start_time < 30, "it was killed for not listening, not ended"


def test_stop_kills_a_server_that_does_not_listen(tmp_path, monkeypatch):
    monkeypatch.setattr("rlx.launch.local._STOP_SECONDS", 0.2)
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        'print(\'{"port": 1, "pid": 1}\', flush=True); time.sleep(60)'
    )
    with start(tmp_path, command=(sys.executable, "-c", code)) as local:
        local.wait()
        (pid,) = local.pids
    assert ended(pid, 0.1)


def test_stop_while_it_starts(tmp_path):
    local = start(tmp_path).start()
    while not local.pids:
        time.sleep(0.001)
    (pid,) = local.pids
    local.stop()
    assert ended(pid, 0.1)
    with pytest.raises(UserError, match="stopped before they were ready"):
        local.wait()


def test_server_that_cannot_start_says_why(tmp_path):
    local = LocalServers("broken", workdir=tmp_path, num_servers=2, command=COMMAND)
    with local, pytest.raises(UserError, match="at start with status 2: no model in broken"):
        local.wait()
    assert local.pids == ()


def test_server_that_is_never_ready(tmp_path):
    sleeper = (sys.executable, "-c", "import time; time.sleep(60)")
    with start(tmp_path, command=sleeper, ready_timeout=0.3) as local:
        (pid,) = local.pids or (0,)
        with pytest.raises(UserError, match=r"not ready within 0\.3 s"):
            local.wait()
    assert not pid or ended(pid, 0.1)


def test_a_large_model_has_longer_to_start(tmp_path):
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.truncate(15 << 30)  # a hole
    for model, least, most in ((tmp_path, 400, 600), ("none", 180, 180)):
        local = LocalServers(model, workdir=tmp_path, command=COMMAND)
        local.stop()
        assert least <= local._ready_timeout <= most


def test_dead_server_is_started_again_on_its_port(tmp_path):
    said = []
    with start(tmp_path, on_message=said.append) as local:
        (address,) = local.wait()
        (pid,) = local.pids
        os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 20
        port = int(address.split(":")[1])
        while time.monotonic() < deadline and (local.pids in ((), (pid,)) or not listens(port)):
            time.sleep(0.02)
        assert listens(port)
        assert len(local.pids) == 1
        assert local.pids != (pid,)
    (line,) = said
    first, peak = line.split(" at a peak of ")
    assert first == f"rollout server server-0 (port {port}) ended by SIGKILL"
    number, rest = peak.split(" GB ")
    assert rest.startswith("of memory (its log is ")
    assert 0.01 < float(number) < 2, "an interpreter with numpy and gRPC"


@pytest.fixture
def loop():
    thread = LoopThread("fleet")
    thread.start()
    yield thread
    thread.close()


def test_the_silence_of_a_server_is_not_that_of_its_successor_while_it_starts(tmp_path):
    program = f"import time, runpy; time.sleep(1); runpy.run_path({SCRIPT!r}, run_name='__main__')"
    said, command, log = [], (sys.executable, "-c", program), tmp_path / "logs" / "server-0.log"
    with start(tmp_path, command=command, answer_timeout=60.0, on_message=said.append) as local:
        (address,) = local.wait()
        local._silent[address] = math.inf
        deadline = time.monotonic() + 30
        while len(said) < 2 or not listens(int(address.split(":")[1])):
            assert time.monotonic() < deadline
            time.sleep(0.02)
            local._silent.update({address: 99.0} if len(said) == 2 else {})
        time.sleep(0.2)
    assert [line.split(")")[1].split(" at ")[0] for line in said] == [
        f" sends no token; killing it; the stacks of its threads are in {log}", " ended by SIGKILL",
    ]  # fmt: skip
    assert re.search(r"Current thread 0x.* \(most recent call first\):\n +File", log.read_text())


def test_hung_server_is_killed_and_started_again(tmp_path, loop):
    said = []
    # The fleet reaches the new server at its next attempt, which gRPC makes up to a second later.
    with start(tmp_path, num_servers=2, answer_timeout=4.0, on_message=said.append) as local:
        address, _ = local.wait()
        pid, other = local.pids
        fleet = local.fleet(limits=Timeouts(hang_seconds=0.3, probe_seconds=0.1))
        loop.run(fleet.connect())
        os.kill(pid, signal.SIGSTOP)
        deadline = time.monotonic() + 30
        port = int(address.split(":")[1])
        while time.monotonic() < deadline and (len(said) < 2 or address not in fleet.live):
            time.sleep(0.02)
        assert ended(pid, 0.1)
        assert address in fleet.live
        assert local.pids[1] == other
        loop.run(fleet.close())
    name = f"rollout server server-0 (port {port})"
    assert said[0] == f"{name} has not answered for 4 s; killing it"
    assert said[1].startswith(f"{name} ended by SIGKILL at a peak of ")
    assert len(said) == 2


def listens(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_restarts_have_an_end(tmp_path):
    once = tmp_path / "once"
    code = (
        f"import os, sys; first = not os.path.exists({str(once)!r}); open({str(once)!r}, 'w')\n"
        'print(\'{"port": 1, "pid": 1}\' if first else "error: no luck", flush=True); sys.exit(3)'
    )
    said = []
    with start(
        tmp_path, command=(sys.executable, "-c", code), max_restarts=2, on_message=said.append
    ) as local:
        local.wait()
        deadline = time.monotonic() + 20
        while len(said) < 3 and time.monotonic() < deadline:
            time.sleep(0.02)
    assert [text.endswith("starting it again") for text in said] == [True, True, False]
    assert said[-1].endswith("after 2 restarts: no luck")


PARENT = """
import sys, time
from rlx.launch.local import LocalServers
local = LocalServers("none", workdir=sys.argv[1], num_servers=2, command=sys.argv[2:]).start()
local.wait()
print(*local.pids, flush=True)
time.sleep(100)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killed_parent_leaves_no_process(tmp_path, number):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path), *COMMAND], stdout=subprocess.PIPE, text=True
    )
    try:
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2
        assert all(psutil.pid_exists(pid) for pid in pids)
    finally:
        parent.send_signal(number)
        parent.communicate()
    assert all(ended(pid) for pid in pids)


def test_killed_parent_while_servers_start(tmp_path):
    """The kernel's signal is armed a while after the fork; an earlier end of the parent is seen."""
    slow = PARENT.replace("local.wait()\n", "while len(local.pids) < 2: time.sleep(0.001)\n")
    parent = subprocess.Popen(
        [sys.executable, "-c", slow, str(tmp_path), *COMMAND], stdout=subprocess.PIPE, text=True
    )
    try:
        pids = [int(word) for word in parent.stdout.readline().split()]
    finally:
        parent.kill()
        parent.communicate()
    assert len(pids) == 2
    assert all(ended(pid, 10) for pid in pids)


def serve(*flags, **env):
    return subprocess.run(
        [*COMMAND, "--model=none", *flags],
        capture_output=True, text=True, timeout=30, env={**os.environ, **env},
    )  # fmt: skip


def test_port_in_use_is_one_line(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        result = serve(f"--port={taken.getsockname()[1]}")
    assert result.returncode == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: cannot listen on 127.0.0.1:")
    assert "in use" in line


def test_listening_elsewhere_without_a_token_is_one_line():
    result = serve("--host=0.0.0.0", RLX_FLEET_TOKEN="")
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert "needs a token and TLS" in line


def test_serve_by_hand_ends_on_sigterm_with_status_0():
    process = subprocess.Popen(
        [*COMMAND, "--model=none"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline().startswith('{"port": ')
    finally:
        process.terminate()
        _, errors = process.communicate(timeout=20)
    assert (process.returncode, errors) == (0, "")
