"""Failures of memory, disk and ports as what they are: real ones, wherever they can be had."""

import errno
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import nullcontext

import pytest

from rlx.base import UserError
from rlx.config import default
from rlx.doctor import failures
from rlx.engines import kv_memory
from rlx.system import exit_reason

ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"}

TRAINER = """
import resource, sys
from functools import partial
import jax, numpy as np
from rlx.cli import command
from rlx.doctor import failures, memory
from rlx.doctor.machine import Devices
from rlx.base import Group, Trajectory
from rlx.config import default
from rlx.model import params
from rlx.model.model_config import ModelConfig
from rlx.run.room_options import sizes_of
from rlx.train.train_options import TrainOptions
from rlx.train.update import JaxUpdate

model = ModelConfig(
    "Qwen2ForCausalLM", vocab_size=64, num_layers=4, model_dim=64, mlp_dim=1024, num_heads=2,
    num_kv_heads=1, head_dim=32, tie_embeddings=True)
config = default()
config.data.max_prompt_tokens = config.sampling.max_new_tokens = 256
config.train.max_tokens_per_microbatch = 65536
config.rollout.batch_prompts = 16
n = 512
mask = np.arange(n) >= 8
one = Trajectory(np.ones(n, np.int32), mask, np.where(mask, -4, 0).astype(np.float32),
                 np.where(mask, 0, -1).astype(np.int32), 1.0, "stop", "0.0")
groups = [Group(i, (one,) * 8) for i in range(16)]

def main():
    update = JaxUpdate(model, TrainOptions.of(config))
    state = update.init(params.init(model, jax.random.key(0)))
    jax.block_until_ready(state)
    now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + (1 << 30),) * 2)
    advice = partial(memory.advice, sizes_of(config, model), Devices)
    with failures.friendly_errors(advice, "train step 1"):
        jax.block_until_ready(update.update(state, groups)[0])

command.run(main, explain=failures.explain)
"""


def run(script, *arguments):
    return subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=120,
        env=ENVIRONMENT, check=False,
    )  # fmt: skip


def test_a_trainer_out_of_memory_says_how_much_and_what_to_lower():
    done = run(TRAINER)
    assert done.returncode == 2, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "out of memory (train step 1): " in line
    assert " GB more wanted" in line
    assert "a step takes at most about " in line
    assert "activations" in line
    for setting in ("model.remat=full", "train.max_tokens_per_microbatch=32768"):
        assert setting in line
    assert "Traceback" not in done.stderr


FULL = """
import resource, sys
from rlx.cli import command
from rlx.doctor import failures
def main():
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    with open(sys.argv[1], "wb") as file:
        file.write(bytes(5000))
command.run(main, explain=failures.explain)
"""


def test_a_full_disk_is_one_line_in_every_command(tmp_path):
    done = run(FULL, str(tmp_path / "file"))
    assert done.returncode == 2, done.stderr
    assert "no space left" in done.stderr
    assert "--workdir" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_port_in_use_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match="in use"), failures.friendly_errors():
            socket.create_server(("127.0.0.1", port))


def test_what_is_known_is_found_behind_other_errors():
    def raised(inner):
        try:
            try:
                raise inner
            except Exception as error:
                raise RuntimeError("the publish failed") from error
        except RuntimeError as error:
            return error

    full = OSError(errno.ENOSPC, "No space left on device", "/dev/shm/rlx-weights-1")
    words = str(failures.explain(raised(full)))
    assert "/dev/shm/rlx-weights-1" in words
    assert "fleet.publish_dir" in words
    group = ExceptionGroup("two", [ValueError("no"), MemoryError()])
    words = str(failures.explain(raised(group), doing="wait"))
    assert re.match(r"memory is used up \(wait\): [\d.]+ of [\d.]+ GB free ", words)
    files = OSError(errno.EMFILE, "Too many open files")
    assert "ulimit -n" in str(failures.explain(files))


@pytest.mark.parametrize("number", [
    errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ESTALE, errno.ENODEV, errno.EEXIST,
    errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP,
])  # fmt: skip
def test_a_place_that_cannot_be_used_is_named_in_one_line(number):
    for place in ("/nfs/a.jsonl", b"/nfs/a.jsonl"):
        words = str(failures.explain(OSError(number, "x", place), doing="checkpoint step=2"))
        assert words.startswith(f"/nfs/a.jsonl (checkpoint step=2): {os.strerror(number)}")
        assert words.endswith("give another")
    assert failures.explain(OSError(number, "of a socket")) is None


@pytest.mark.parametrize("name", ["running.json", "checkpoints", "logs"])
def test_a_file_where_a_directory_should_be_and_the_reverse_are_one_line(name, tmp_path):
    (tmp_path / name).mkdir() if name == "running.json" else (tmp_path / name).touch()
    script = (
        "import sys; from pathlib import Path; from rlx.cli import command\n"
        "from rlx.doctor import failures; from rlx.system import workdir_lock\n"
        "path = Path(sys.argv[1])\n"
        "def main():\n"
        "    with workdir_lock.lock_workdir(path):\n"
        "        for name in ('checkpoints', 'logs'): (path / name).mkdir(exist_ok=True)\n"
        "command.run(main, explain=failures.explain)\n"
    )
    done = run(script, str(tmp_path))
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {tmp_path / name}: ")
    assert "a file is where a directory should be, or the reverse: move it away" in line


@pytest.mark.parametrize(
    "error",
    [
        ValueError("RESOURCE_EXHAUSTED"),
        OSError(errno.ENOENT, "no"),
        RuntimeError("a bug"),
        KeyError(),
    ],
)
def test_a_bug_stays_a_bug(error):
    assert failures.explain(error) is None
    with pytest.raises(type(error)), failures.friendly_errors():
        raise error


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ("RESOURCE_EXHAUSTED: Out of memory allocating 1600000000 bytes.", "1.60 GB more wanted"),
        ("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 12.50GiB.", "13.42 GB more"),
        ("INTERNAL: Error dispatching computation: Out of memory allocating 8 bytes.", "0.00 GB"),
        ("RESOURCE_EXHAUSTED: CUDA_ERROR_OUT_OF_MEMORY", "out of memory; do this"),
    ],
)
def test_what_an_allocator_wanted_is_read_from_its_words(said, wanted):
    assert wanted in str(failures.explain(RuntimeError(said), lambda: "do this"))


def test_the_run_explains_what_its_trainer_meets(monkeypatch, tmp_path):
    from rlx.doctor import memory
    from rlx.run import loop

    def fails(*_):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 5000000000 bytes.")

    class Inputs:
        model_config = None

    monkeypatch.setattr(loop, "prepare", lambda config: Inputs)
    monkeypatch.setattr(loop.resume, "prepare_workdir", lambda config, workdir: [])
    monkeypatch.setattr(loop, "build", fails)
    monkeypatch.setattr(loop, "sizes_of", lambda config, model: None)
    monkeypatch.setattr(memory, "advice", lambda sizes, devices, started: "lower this")
    monkeypatch.setattr(loop, "lock_workdir", lambda workdir: nullcontext())
    config = default()
    config.model.path, config.observe.writers = "rlx:arithmetic", ()
    with pytest.raises(UserError, match=r"first step\): 5\.00 GB more wanted; lower this"):
        loop.run(config, tmp_path)


SERVE = """
import resource, sys
sys.argv[1:] = ["--model=rlx:arithmetic", "--slots=20000", "--max-model-len=512"]
from rlx import serve
from rlx.cli import command
from rlx.doctor import failures
resource.setrlimit(resource.RLIMIT_AS, (6 << 30,) * 2)
command.run(lambda: serve.main(sys.argv[1:]), explain=failures.explain, teardown=False)
"""


@pytest.mark.slow
def test_an_engine_without_room_for_its_cache_says_what_to_lower():
    done = run(SERVE)
    assert done.returncode == 2, done.stderr
    last = done.stderr.splitlines()[-1]
    assert "20000 slots of 512 tokens need 20.97 GB" in last
    assert "with 10000: 10.49 GB" in last
    assert "fleet.max_model_len" in last


def test_vllms_failures_of_memory_get_a_remedy_and_others_none():
    words = "RuntimeError: Engine core initialization failed. See root cause above."
    assert "64 sequences of 1536 tokens" in kv_memory.vllm_advice(words, 64, 1536)
    assert kv_memory.vllm_advice("ValueError: unknown architecture", 64, 1536) == ""


def test_a_killed_process_is_told_with_its_peak_memory():
    child = subprocess.Popen(
        [sys.executable, "-c", "x = b'1' * 200_000_000; print(1, flush=True); input()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert child.stdin
    assert child.stdout
    child.stdout.readline()
    peak = exit_reason.peak_memory(child.pid)
    os.kill(child.pid, signal.SIGKILL)
    child.communicate()
    words = exit_reason.words(child.returncode, peak, killed_for_memory=True)
    assert words.startswith("by SIGKILL, because memory ran out: it had 0.2")
    assert exit_reason.peak_memory(child.pid) == 0, "it is gone"
    assert "fleet.slots" in words
    plain = exit_reason.words(-9, 10**9)
    assert plain == "by SIGKILL at a peak of 1.00 GB of memory"
    assert exit_reason.words(2, 0) == "with status 2"
    assert exit_reason.words(-15, 0) == "by SIGTERM"


def test_the_kernels_count_of_kills_is_read(tmp_path):
    (tmp_path / "vmstat").write_text("pgfault 12\noom_kill 3\noom_kill_other 9\n")
    assert exit_reason.oom_kills(tmp_path / "vmstat") == 3
    assert exit_reason.oom_kills(tmp_path / "none") == 0


def test_a_kill_is_seen_though_its_process_took_a_moment_to_end():
    now, kills = [0.0], [7]
    watch = exit_reason.OomKills(count=lambda: kills[0], clock=lambda: now[0])
    for second in range(60):
        now[0] = second
        watch.look()
    assert not watch.lately()
    kills[0] = 8
    for _ in range(5):  # the process is dying, and looks alive
        now[0] += 1
        watch.look()
    assert watch.lately()
    for _ in range(60):
        now[0] += 1
        watch.look()
    assert not watch.lately(), "that was another's, a minute ago"


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (['{"port": 1, "pid": 2}', ""], ""),
        (["error: no such model; give one"], "no such model; give one"),
        (["CUDA error: an illegal memory access", "EngineDeadError"],
         "CUDA error: an illegal memory access … EngineDeadError; lower fleet.slots"),
        (["torch.OutOfMemoryError: CUDA out of memory."],
         "torch.OutOfMemoryError: CUDA out of memory; lower fleet.slots"),
        (["out of memory; lower fleet.slots (with 2: 1 GB)"],
         "out of memory; lower fleet.slots (with 2: 1 GB)"),
    ],
)  # fmt: skip
def test_what_a_server_wrote_last_is_told_with_what_to_lower(lines, said):
    found = exit_reason.last_words(lines)
    assert found.startswith(said)
    assert bool(found) == bool(said)
    assert found.count("fleet.slots") <= 1
