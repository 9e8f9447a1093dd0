"""Turns of trainer and servers: the state machine, its shell, and runs that take turns."""

import asyncio
import itertools
import os
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlx import config as config_lib
from rlx.base import UserError
from rlx.config import check
from rlx.doctor.machine import Devices
from rlx.engines.engine import SLEEPS
from rlx.fleet.requests import Sampling
from rlx.launch.local import LocalServers
from rlx.run.allocate import apply_allocation, gpu_environment
from rlx.run.turns import CACHE, WEIGHTS, DeviceTurn, OutOfTurn, Turns, follow, in_turns, rests
from rlx.system.jsonl import read_jsonl
from rlx.system.threads import LoopThread
from tests.fixtures.commands import FLOAT32, RLX_MAIN

RECORDS = ("metrics", "eval")
EVENTS = ("batch", "asleep", "published", "rested", "woken")


def reachable():
    """Every turn that events lead to, and its successors: {turn: {(event, level): turn}}."""
    found, new = {}, [DeviceTurn()]
    while new:
        turn = new.pop()
        found[turn] = {}
        for event, level in itertools.product(EVENTS, (CACHE, WEIGHTS)):
            try:
                after = follow(turn, event, level)
            except OutOfTurn:
                continue
            found[turn][event, level] = after
            if after not in found and after not in new:
                new.append(after)
    return found


def test_of_all_turns_none_has_both_at_work_and_none_is_a_dead_end():
    found = reachable()
    assert {turn.phase for turn in found} == {"wake", "generate", "sleep", "train"}
    for turn, after in found.items():
        assert after, f"{turn} is a dead end"
        if turn.phase == "generate":
            assert not turn.blank, "servers generate without weights"
            assert {event for event, _ in after} == {"batch"}
        if turn.phase == "train" and turn.blank:
            assert turn.level == WEIGHTS
            assert {event for event, _ in after} == {"published"}, "weights come before they wake"
        seen, new = set(), [turn]
        while new:
            seen.add(one := new.pop())
            new += [after for after in found[one].values() if after not in seen]
        assert any(t.phase == "generate" for t in seen), f"{turn} never generates again"


class Device:
    """A fleet and a trainer that count the bytes that they hold of one device."""

    BYTES = 100

    def __init__(self, rest):
        self.weights, self.cache, self.state, self.step = 10, 0, 40, 0
        self.rest = self.off if rest else None
        self.turns = Turns(self, self, self.rest)

    def run(self, coroutine):
        try:
            coroutine.send(None)
        except StopIteration:
            return

    async def set_sleep(self, level):
        assert level or self.weights, "it wakes without weights"
        self.cache = 0 if level else 80 if self.rest else 45
        self.weights = 0 if level == WEIGHTS else self.weights
        self.fits()

    def off(self, state):
        self.state = 0
        return state

    def train(self):
        assert not self.cache, "servers hold their cache"
        self.state, self.step = 40, 45
        self.fits()
        self.step = 0

    def fits(self):
        used = self.weights + self.cache + self.state + self.step
        assert used <= self.BYTES, f"{used} bytes"


@given(
    st.booleans(),
    st.lists(st.tuples(st.sampled_from(["step", "save"]), st.sampled_from([CACHE, WEIGHTS]))),
)
def test_any_order_of_steps_and_saves_fits_the_device(rest, events):
    device = Device(rest)
    state = device.turns.give("state", published=False)
    for event, level in events:
        device.turns.take(level if event == "step" else CACHE)
        device.turns.take(WEIGHTS)  # nothing happens: it is the trainer's turn already
        device.train()
        device.weights = 10 if event == "step" else device.weights
        assert device.turns.give(state, published=event == "step") == state
        assert device.turns.give(state, published=False) == state  # nothing happens
        assert device.turns.turn.phase == "generate"
    assert device.weights


def test_a_trainer_that_has_published_nothing_cannot_wake_empty_servers():
    device = Device(False)
    device.turns.give(None, published=False)
    device.turns.take(WEIGHTS)
    with pytest.raises(OutOfTurn, match="rested in DeviceTurn"):
        device.turns.give(None, published=False)
    with pytest.raises(OutOfTurn, match="published in DeviceTurn"):
        Device(False).turns.give(None, published=True)


@pytest.mark.parametrize(
    ("billions", "share", "wanted"), [(1.5, 0, False), (3, 0, False), (3, 0.6, True), (7, 0, True)]
)
def test_a_state_leaves_the_gpu_where_the_server_needs_its_place(billions, share, wanted):
    devices = Devices("gpu", "NVIDIA H100", 1, 74 << 30, "9.0")
    assert rests(int(12e9 * billions), devices, share) is wanted
    assert not rests(int(12e9 * billions), Devices(), share), "a CPU has one memory"


def config_of(**changes):
    config = config_lib.default()
    config.model.path, config.fleet.sleep = "somewhere", "cache"
    config.update_from_flattened_dict({k.replace("__", "."): v for k, v in changes.items()})
    return config


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"fleet__addresses": ("a:1",)}, "with fleet.addresses or fleet.join.*set it to off"),
        ({"trainer": "torch"}, "with trainer=torch.*set trainer=jax"),
        ({"allocation_mode": "vllm:d1+jax:f1"}, r"own GPUs; write \| for \+"),
        ({"fleet__num_servers": 2}, "all share one device; set fleet.num_servers=1"),
        ({"fleet__sleep": "kv"}, "unknown fleet.sleep 'kv'"),
    ],
)
def test_what_cannot_take_turns_is_one_line(changes, words):
    with pytest.raises(UserError, match=words) as error:
        check(config_of(**changes))
    assert "\n" not in str(error.value)
    assert not in_turns(config_lib.default(), 8, Devices("gpu"))


def test_turns_need_one_process_and_on_a_gpu_an_allocation():
    check(config := config_of())
    assert in_turns(config, 1, Devices())
    with pytest.raises(UserError, match="trainer of 2 processes: only one"):
        in_turns(config, 2, Devices())
    with pytest.raises(UserError, match=r"set allocation_mode=jax:d1\|jax:f1"):
        in_turns(config, 1, Devices("gpu"))


def test_on_a_shared_gpu_both_processes_give_memory_back(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.delenv("XLA_PYTHON_CLIENT_ALLOCATOR", raising=False)
    config = apply_allocation(config_of(allocation_mode="vllm:d1|jax:d1"))
    check(config)
    with gpu_environment(config) as servers:
        assert servers == (("0",),)
        assert os.environ["XLA_PYTHON_CLIENT_ALLOCATOR"] == "platform"
        assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ
    assert "XLA_PYTHON_CLIENT_ALLOCATOR" not in os.environ
    assert in_turns(config, 1, Devices("gpu"))


COMMAND = [
    *RLX_MAIN, "--config=configs/arithmetic.py", "--config.total_steps=4", FLOAT32,
    "--config.rollout.batch_prompts=4", "--config.sampling.n_samples=4",
    "--config.sampling.max_new_tokens=48", "--config.sampling.min_new_tokens=40",
    "--config.fleet.slots=8", "--config.eval.num_questions=8", "--config.eval.every_steps=2",
    "--config.gate.every_steps=2", "--config.gate.max_new_tokens=8", "--config.observe.writers=()",
    "--config.train.share_prefixes=off", "--config.reward.timeout_seconds=60",
]  # fmt: skip


def finished(workdir, *flags):
    """Records of a run with these flags: (steps, evaluations)."""
    done = subprocess.run(
        [*COMMAND, *flags, f"--workdir={workdir}"], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return [list(read_jsonl(workdir / f"{name}.jsonl")) for name in RECORDS]


@pytest.mark.slow
def test_a_synchronous_run_in_turns_is_the_same_run(tmp_path):
    """No request is unfinished at a sleep, so every number is that of a run without turns."""
    found = {}
    for sleep in SLEEPS:
        flags = "--config.rollout.max_staleness=0", f"--config.fleet.sleep={sleep}"
        found[sleep] = finished(tmp_path / sleep, *flags)
        assert all(record["staleness_max"] == 0 for record in found[sleep][0])
    names = ("task_reward", "actor_loss", "grad_norm", "entropy", "n_valid_tokens", "n_tokens")
    for sleep in SLEEPS[1:]:
        for own, plain in zip(found[sleep][0], found["off"][0], strict=True):
            assert [own[n] for n in names] == [plain[n] for n in names]
            assert own["seconds"]["sleep"] >= 0
            assert own["seconds"].keys() >= {"train", "publish", "sleep"}
        held_out = [(r["step"], r["greedy_acc"], r["version_end"]) for r in found[sleep][1]]
        assert held_out == [(r["step"], r["greedy_acc"], r["version_end"]) for r in found["off"][1]]


@pytest.mark.slow
@pytest.mark.parametrize("sleep", SLEEPS[1:])
def test_an_asynchronous_run_keeps_its_requests_over_sleeps(tmp_path, sleep):
    """Samples that slept have tokens of several versions, and the journal makes them again."""
    workdir = tmp_path / "run"
    # One answer at a time: a busy trainer begins its turn before all admitted ones are there.
    few = ("--config.fleet.slots=1", "--config.rollout.batch_prompts=2", "--config.total_steps=6")
    steps, evaluations = finished(workdir, f"--config.fleet.sleep={sleep}", *few)
    assert [record["step"] for record in steps] == [1, 2, 3, 4, 5, 6]
    assert max(record["crossed_ratio"] for record in steps) > 0
    assert max(record["staleness_max"] for record in steps) <= 2
    assert sum(record["failed"] for record in steps) == 0
    assert [record["step"] for record in evaluations] == [0, 2, 4, 6]
    replayed = subprocess.run(
        [sys.executable, "-m", "rlx.replay", str(workdir), "--generation"],
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert replayed.returncode == 0, replayed.stdout + replayed.stderr
    print(replayed.stdout)


def resident(pid):
    """Bytes of a process that are in memory."""
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.slow
def test_a_sleeping_server_gives_its_memory_back(tiny_model_dir, tmp_path):
    """Of a cache of 168 MB; it starts asleep. glibc maps arrays from 32 MB on by themselves."""
    options = {"slots": 640, "max_model_len": 512, "sleep": "cache"}
    cache = 2 * 2 * 640 * 512 * 32 * 4  # keys and values, layers, slots, tokens, width, float32
    loop = LoopThread("test")
    loop.start()
    with LocalServers(tiny_model_dir, workdir=tmp_path, **options) as servers:
        servers.wait()
        (pid,) = servers.pids
        fleet = servers.fleet(sleep=CACHE)
        loop.run(fleet.connect(), 60)
        sampling, sizes = Sampling(max_new_tokens=32, seed=1), {"start": resident(pid)}
        answer = loop.submit(fleet.generate(np.arange(3, 9), sampling, 4))
        loop.run(asyncio.sleep(0.5))
        assert not answer.done(), "it generates while it sleeps"
        loop.run(fleet.set_sleep(0), 60)
        answer.result(60)
        for turn in range(3):
            sizes[turn, "awake"] = resident(pid)
            loop.run(fleet.set_sleep(CACHE), 60)
            loop.run(asyncio.sleep(0.5))  # XLA frees what it has just used in its own time
            sizes[turn, "asleep"] = resident(pid)
            loop.run(fleet.set_sleep(0), 60)
            loop.run(fleet.generate(np.arange(3, 9), sampling, 4), 60)
            assert sizes[turn, "awake"] - sizes[turn, "asleep"] > 0.95 * cache, sizes
        assert sizes[2, "asleep"] - sizes[0, "asleep"] < 0.1 * cache, sizes
        print({str(k): round(v / 1e6) for k, v in sizes.items()}, cache / 1e6)
        loop.run(fleet.close(), 60)
    loop.close()


@pytest.mark.slow
def test_a_run_in_turns_outlives_its_server(tmp_path):
    """It is killed at any moment, awake or asleep, and comes back asleep; nothing is lost."""
    workdir, log = tmp_path / "run", tmp_path / "log"
    flags = "--config.fleet.sleep=weights", "--config.total_steps=8", "--config.gate.enabled=False"
    with log.open("w") as file:
        process = subprocess.Popen(
            [*COMMAND, *flags, f"--workdir={workdir}"], stdout=file, stderr=file
        )
        killed, draw, deadline = 0, np.random.default_rng(0), time.monotonic() + 600
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
            steps = len(list(read_jsonl(workdir / "metrics.jsonl")))
            if killed < 3 and steps > 2 * killed:
                time.sleep(draw.uniform(0, 1.0))
                children = psutil.Process(process.pid).children()
                for server in [child for child in children if "rlx.serve" in child.cmdline()]:
                    server.kill()
                    killed += 1
    assert process.wait(60) == 0, log.read_text()[-3000:]
    assert killed == 3, "the run was too fast"
    steps, evaluations = (list(read_jsonl(workdir / f"{name}.jsonl")) for name in RECORDS)
    assert [record["step"] for record in steps] == [*range(1, 9)]
    assert max(record["staleness_max"] for record in steps) <= 2
    assert evaluations[-1]["step"] == 8
    assert evaluations[-1]["failed"] == 0
