"""Every process makes the same calls, in the same order, with equal arrays; one that fails says so.

They are threads here, joined by a pair of sockets; tests/run/hosts_run_test.py has real ones.
"""

import queue
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx.base import DiskFull, Group, Trajectory, UserError
from rlx.journal import records
from rlx.model.tensors import Buckets
from rlx.train import conductor, hosts
from rlx.train.hosts import Cluster, Hosts
from tests.train.hosts_test import SECONDS, free_port, leave


def groups(seed):
    rng = np.random.default_rng(seed)
    size = int(rng.integers(2, 9))
    arrays = (
        rng.integers(0, 99, size).astype(np.int32), np.arange(size) > 0,
        -rng.random(size).astype(np.float32), rng.integers(-1, 3, size).astype(np.int32),
    )  # fmt: skip
    return [Group(seed, (Trajectory(*arrays, float(rng.normal()), "stop", f"{seed}.0"),))]


class Recording:
    """A trainer that notes its calls; its state counts its updates.

    `fails`: name → exception; `written` is how a save ends, None: not at all.
    """

    model, devices, state_bytes = None, "2 × nothing", 8

    def __init__(self, log, fails, path):
        self.log, self.fails = log, fails
        self._note("made", path)

    def _note(self, name, *arguments):
        self.log.append((name, *arguments))
        if name in self.fails:
            raise self.fails[name]

    def init(self):
        self._note("init")
        return SimpleNamespace(step=0)

    def restore(self, path):
        self._note("restore", path)
        return SimpleNamespace(step=100)

    def update(self, state, groups):
        self._note("update", state.step, records.dumps(groups))
        return SimpleNamespace(step=state.step + 1), {"loss": 0.5}

    def evaluate(self, state, groups):
        self._note("evaluate", state.step, records.dumps(groups))
        return {"loss": 1.0}

    def logprobs(self, state, groups):
        self._note("logprobs", state.step, records.dumps(groups))
        return [t.behaviour_logprobs for group in groups for t in group.trajectories]

    def weights(self, state, adapters=False):
        self._note("weights", state.step, adapters)

        def buckets():
            for index in range(3):
                self._note("bucket", index)
                yield {f"{index}": np.full(2, index)}

        return Buckets({}, buckets())

    def save(self, path, state):
        self._note("save", path, state.step)
        done = Future()
        failure = self.fails.get("written")
        if failure:
            done.set_exception(failure)
        elif "written" not in self.fails:
            done.set_result(None)
        return done


def _named(connection, name):
    peer = hosts._Peer.at(connection)
    peer.name = name
    return peer


class Pair:
    """Process 0 with a conducted trainer, and another that follows, in a thread."""

    def __init__(self, lead_fails=(), follower_fails=()):
        ends = socket.socketpair()
        self.lead_log, self.log, self.ended = [], [], queue.Queue()
        self.lead, self.follower = (
            Hosts(
                Cluster("x:1", 2, index),
                [_named(ends[index], f"process {1 - index}")],
                end=lambda text, index=index: self.ended.put((index, text)),
            )
            for index in (0, 1)
        )
        self.told = queue.Queue()
        make = lambda path: Recording(self.log, dict(follower_fails), path)  # noqa: E731
        run = lambda: self.told.put(conductor.worker_loop(self.follower, make))  # noqa: E731
        threading.Thread(target=run, daemon=True).start()
        self.update = conductor.driver(
            self.lead, lambda path: Recording(self.lead_log, dict(lead_fails), path), path="first"
        )

    def stop(self):
        conductor.stop(self.lead, step=7)
        assert self.told.get(timeout=SECONDS) == {"step": 7}

    def close(self):
        leave(self.lead, self.follower)


_calls = st.lists(
    st.tuples(
        st.sampled_from(["update", "evaluate", "logprobs", "weights", "save", "restore"]),
        st.integers(0, 9),
    ),
    max_size=12,
)


@settings(max_examples=25)
@given(_calls)
def test_calls_in_any_order_are_repeated_with_equal_arrays(calls):
    pair = Pair()
    update, state = pair.update, pair.update.init()
    for name, seed in calls:
        if name == "update":
            state, metrics = update.update(state, groups(seed))
            assert metrics == {"loss": 0.5}
        elif name == "evaluate":
            assert update.evaluate(state, groups(seed)) == {"loss": 1.0}
        elif name == "logprobs":
            wanted = groups(seed)[0].trajectories[0].behaviour_logprobs
            np.testing.assert_array_equal(update.logprobs(state, groups(seed))[0], wanted)
        elif name == "weights":
            buckets = iter(update.weights(state, adapters=seed % 2 == 0))
            for index in range(min(seed, 3)):  # a publish may end early
                np.testing.assert_array_equal(next(buckets)[f"{index}"], np.full(2, index))
        elif name == "save":
            update.save(Path(f"step_{seed}"), state).result()
        else:
            state = update.restore(Path(f"step_{seed}"))
    pair.stop()
    pair.close()
    assert pair.log == pair.lead_log
    assert pair.ended.empty()


def test_a_state_that_the_others_have_no_more_is_refused():
    pair = Pair()
    first = pair.update.init()
    pair.update.update(first, groups(0))
    with pytest.raises(AssertionError, match="no longer have"):
        pair.update.logprobs(first, groups(0))
    pair.stop()
    pair.close()


def test_what_fails_alike_on_all_ends_none_of_them(monkeypatch):
    monkeypatch.setattr(hosts, "_ALIKE_SECONDS", 2.0)
    fails = {"update": ValueError("no turns")}
    pair = Pair(fails, fails)
    state = pair.update.init()
    with pytest.raises(ValueError, match="no turns"):
        pair.update.update(state, groups(0))
    pair.update.save(Path("x"), state)  # which waits until the other has come so far
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join()
    assert pair.ended.empty()
    pair.stop()
    pair.close()
    assert pair.log == pair.lead_log


@pytest.mark.parametrize("error", [DiskFull("full"), RuntimeError("no memory")])
def test_a_failure_of_another_process_is_raised_where_process_0_waits_for_it(error):
    pair = Pair(follower_fails={"save": error})
    state = pair.update.init()
    with pytest.raises(UserError, match=f"process 1: {type(error).__name__}: {error}") as raised:
        pair.update.save(Path("x"), state)
    assert isinstance(raised.value, DiskFull) == isinstance(error, DiskFull)
    pair.update.update(state, groups(0))  # after a full disk training goes on
    pair.stop()
    pair.close()


@pytest.mark.parametrize("error", [DiskFull("full"), PermissionError(13, "denied")])
def test_what_another_process_cannot_write_ends_the_save_that_waits_for_it(error):
    pair = Pair(lead_fails={"written": None}, follower_fails={"written": error})
    state = pair.update.init()
    whole = pair.update.save(Path("x"), state)
    with pytest.raises(UserError, match=f"process 1: {type(error).__name__}: ") as raised:
        whole.result(SECONDS)
    assert isinstance(raised.value, DiskFull) == isinstance(error, DiskFull)
    pair.update.update(state, groups(0))
    pair.stop()
    pair.close()
    assert pair.ended.empty()


HUNG = """
import os, signal, sys, threading
from rlx.train import conductor
from rlx.train.hosts import Cluster, join

class Trainer:
    model, devices, state_bytes = None, "", 0
    def __init__(self, path):
        self.calls = 0
    def init(self):
        return "state"
    def update(self, state, groups):
        self.calls += 1
        if self.calls == 2 and index == 1:
            self.hang()
        if self.calls == 2 and how != "alone":
            self.collective()
        return state, {}
    def hang(self):
        if how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        threading.Event().wait()
    def collective(self):
        threading.Event().wait()

address, index, count, how = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
hosts = join(Cluster(address, count, index, timeout=6.0, join=300.0, call=6.0), {})
if index:
    conductor.worker_loop(hosts, Trainer)
update = conductor.driver(hosts, Trainer, path="")
state = update.init()
for _ in range(2):
    state, _ = update.update(state, [])
threading.Event().wait()
"""


@pytest.mark.parametrize(
    ("how", "count", "wanted"),
    [
        ("alone", 2, "hangs: it has not finished the call 'update' in "),
        ("together", 3, " hang > threading.py:"),  # process 2 waits for it, as process 0 does
        ("stopped", 2, "is lost: no sign of life for "),
    ],
)
def test_a_process_that_hangs_in_a_call_ends_all_in_one_line_that_names_it(how, count, wanted):
    address = f"127.0.0.1:{free_port()}"
    all_ = [
        subprocess.Popen(
            [sys.executable, "-c", HUNG, address, str(index), str(count), how],
            stderr=subprocess.PIPE, text=True,
        )
        for index in range(count)
    ]  # fmt: skip
    try:
        said = [all_[0].communicate(timeout=300)[1]]
        all_[1].send_signal(signal.SIGCONT)  # who was stopped ends where it goes on
        said += [process.communicate(timeout=300)[1] for process in all_[1:]]
    finally:
        for process in all_:
            process.kill()
            process.wait()
    assert [process.returncode for process in all_] == [2] * count
    assert said[0].startswith("waiting up to ")  # for the others; then as they do
    said = [said[0].partition("\n")[2], *said[1:]]
    for line in said:
        assert line.count("\n") == 1
        assert "error: " in line
    for line in (said[0], said[-1])[: count - 1]:
        assert f"process 1 of {count} on " in line
        assert "process 2 of 3" not in line
        assert wanted in line


def test_a_failure_of_another_process_alone_ends_the_run(monkeypatch):
    monkeypatch.setattr(hosts, "_ALIKE_SECONDS", 0.0)
    pair = Pair(follower_fails={"update": RuntimeError("device is gone")})
    pair.update.update(pair.update.init(), groups(0))
    found = dict(pair.ended.get(timeout=SECONDS) for _ in range(2))
    assert found[0].startswith("process 1 failed: RuntimeError: device is gone")
    assert "process 1 failed" in found[1]


def test_the_end_of_process_0_ends_the_others_with_its_reason():
    pair = Pair()
    pair.lead.close("gate: engine and trainer disagree")
    index, text = pair.ended.get(timeout=SECONDS)
    assert (index, text.split(";")[0]) == (
        1, "process 0 ended: gate: engine and trainer disagree"
    )  # fmt: skip
    assert pair.ended.empty()


def test_a_trainer_that_one_process_cannot_make_is_refused():
    with pytest.raises(UserError, match="process 1: UserError: train"):
        Pair(follower_fails={"made": UserError("train.mesh=fsdp:3")})
