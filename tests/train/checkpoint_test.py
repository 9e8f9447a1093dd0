"""Checkpoints come back bit for bit, and no way of dying leaves a broken one."""

import collections
import concurrent.futures
import contextlib
import errno
import functools
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rlx.base import DiskFull, UserError
from rlx.train import checkpoint, state_files
from tests.fixtures.commands import with_devices


def state_of(seed: int, size: int = 7):
    """A state like the trainer's: nested dicts, optimizer NamedTuples, several dtypes."""
    rng = np.random.default_rng(seed)
    params = {
        "embed": jnp.asarray(rng.normal(size=(size, 3)), jnp.float32),
        "layers": {"q": jnp.asarray(rng.normal(size=(2, 3, 3)), jnp.bfloat16)},
    }
    moments = optax.adamw(1e-3).init(params)
    return {"params": params, "optimizer": moments, "step": jnp.int32(seed)}


def into(abstract):
    """A reader of a checkpoint's state, as `Update.restore` is one."""
    return functools.partial(state_files.read, abstract=abstract)


def assert_same_bits(a, b):
    assert jax.tree_util.tree_structure(a) == jax.tree_util.tree_structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def test_everything_comes_back_bit_for_bit(tmp_path):
    state = state_of(5)
    host = {"cursor": {"epoch": 1, "seed": 2**63}, "text": "Ω", "x": 0.1}
    checkpoint.save(tmp_path, 5, state, host)
    abstract = jax.eval_shape(lambda: state)
    back = checkpoint.restore_latest(tmp_path, into(abstract))
    assert_same_bits(back.state, state)
    assert back.host == host
    assert checkpoint.read_host(checkpoint.checkpoints(tmp_path)[-1]) == host


def test_keeps_the_newest(tmp_path):
    for step in (1, 2, 3, 12):
        checkpoint.save(tmp_path, step, state_of(step), {"step": step}, keep=2)
    assert [p.name for p in checkpoint.checkpoints(tmp_path)] == ["step_00000003", "step_00000012"]
    assert checkpoint.restore_latest(tmp_path, into(state_of(0))).host == {"step": 12}


def test_the_same_step_again_replaces_it(tmp_path):
    checkpoint.save(tmp_path, 4, state_of(1), {"try": 1})
    checkpoint.save(tmp_path, 4, state_of(2), {"try": 2})
    back = checkpoint.restore_latest(tmp_path, into(state_of(0)))
    assert back.host == {"try": 2}
    assert_same_bits(back.state, state_of(2))
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000004"]


def test_a_replacement_killed_between_its_renames_is_undone(tmp_path):
    path = checkpoint.save(tmp_path, 4, state_of(1), {"try": 1})
    path.rename(tmp_path / f".writing-replaced-{path.name}")
    assert checkpoint.restore_latest(tmp_path, into(state_of(0))).host == {"try": 1}


@pytest.mark.parametrize("link", [False, True])
def test_a_stray_file_ends_neither_a_save_nor_a_start(tmp_path, link):
    outside = tmp_path / "outside"
    outside.mkdir()
    saves = tmp_path / "checkpoints"
    saves.mkdir()
    for name in ("step_00000002", "step_00000009", ".writing-00000002", ".writing-replaced-x"):
        (saves / name).symlink_to(outside) if link and name[0] == "." else (saves / name).touch()
    assert checkpoint.restore_latest(saves, into(state_of(0))) is None
    for name in (".writing-00000002", ".writing-replaced-step_00000002"):
        (saves / name).touch()
    checkpoint.save(saves, 2, state_of(2), {"step": 2})
    assert checkpoint.restore_latest(saves, into(state_of(0))).host == {"step": 2}
    assert outside.is_dir()


def test_nothing_to_restore(tmp_path):
    assert checkpoint.restore_latest(tmp_path / "none", into(state_of(0))) is None


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove"])
def test_a_damaged_checkpoint_is_passed_over(tmp_path, damage, caplog):
    checkpoint.save(tmp_path, 1, state_of(1), {"step": 1})
    newest = checkpoint.save(tmp_path, 2, state_of(2), {"step": 2})
    victim = max((f for f in newest.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    if damage == "truncate":
        victim.write_bytes(data[: len(data) // 2])
    elif damage == "flip":
        victim.write_bytes(data)
    else:
        victim.unlink()
    assert checkpoint.restore_latest(tmp_path, into(state_of(0))).host == {"step": 1}
    assert str(newest) in caplog.text
    (tmp_path / "step_00000001" / "host.json").write_text("{}")
    with pytest.raises(UserError, match=r"none of the 1 checkpoints .* is whole"):
        checkpoint.restore_latest(tmp_path, into(state_of(0)))


def test_a_damaged_checkpoint_is_none_of_those_that_are_kept(tmp_path):
    """Else damage to the next one would leave no checkpoint, or one of steps that were undone."""
    checkpoint.save(tmp_path, 1, state_of(1), {"step": 1}, keep=2)
    for _ in range(2):  # the run makes step 9 again, and its checkpoint is damaged again
        checkpoint.save(tmp_path, 9, state_of(9), {"step": 9}, keep=2)
        (tmp_path / "step_00000009" / "host.json").write_text("{}")
        assert checkpoint.restore_latest(tmp_path, into(state_of(0))).host == {"step": 1}
    for step in (5, 12):
        checkpoint.save(tmp_path, step, state_of(step), {"step": step}, keep=2)
    assert [checkpoint.step_of(p) for p in checkpoint.checkpoints(tmp_path)] == [5, 12]
    assert (tmp_path / "damaged-step_00000009").is_dir()


def test_another_model_is_refused_with_the_parameters_name(tmp_path):
    checkpoint.save(tmp_path, 1, state_of(1), {})
    with pytest.raises(UserError, match=r"embed as float32\[7, 3\], .* wants float32\[8, 3\]"):
        checkpoint.restore_latest(tmp_path, into(state_of(1, size=8)))
    with pytest.raises(UserError, match=r"has extra as nothing"):
        checkpoint.restore_latest(tmp_path, into({**state_of(1), "extra": jnp.zeros(2)}))


def test_a_full_disk_is_told_before_anything_is_written(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, 1, state_of(1), {"step": 1})
    usage = collections.namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(free=1_000_000))
    with pytest.raises(UserError, match=r"needs about 1 MB, 1 MB are free; free some"):
        checkpoint.save(tmp_path, 2, state_of(2), {})
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001"]


_CHILD = """
import resource, sys
import jax.numpy as jnp, numpy as np
from rlx.base import DiskFull, Group, UserError
from rlx.train import checkpoint, state_files
directory, mode = sys.argv[1:]
noise = np.random.default_rng(0).normal(size=(5_000_000,)).astype(np.float32)
checkpoint.save(directory, 1, {"x": jnp.asarray(noise)}, {"step": 1})
if mode == "full":  # as a quota does: writes past some size fail, half-way through the state
    resource.setrlimit(resource.RLIMIT_FSIZE, (5_000_000, 5_000_000))
    try:
        checkpoint.save(directory, 2, {"x": jnp.asarray(noise)}, {})
    except UserError as error:
        print(error)
        sys.exit(3)
print("saving", flush=True)
for step in range(2, 1000):
    checkpoint.save(directory, step, {"x": jnp.asarray(noise + step)}, {"step": step}, keep=3)
"""


def _start(tmp_path, mode):
    return subprocess.Popen(
        [sys.executable, "-c", _CHILD, str(tmp_path), mode],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip


@pytest.mark.parametrize("where", ["at once", "behind"])
def test_writers_that_outlive_a_failed_save_leave_nothing(tmp_path, monkeypatch, where):
    """As tensorstore's do: one leaf fails, and the others' files still appear, in directories."""
    begun, late = threading.Event(), []

    def fail(path, state):
        def write():
            for index in range(50):
                (path / str(index)).mkdir(parents=True, exist_ok=True)
                begun.set()
                with contextlib.suppress(OSError):
                    (path / str(index) / "leaf").write_bytes(b"x")
                time.sleep(0.002)

        late.append(threading.Thread(target=write))
        late[0].start()
        begun.wait()
        if where == "at once":
            raise OSError(errno.ENOSPC, "full")
        failed = concurrent.futures.Future()
        failed.set_exception(OSError(errno.ENOSPC, "full"))
        return failed

    monkeypatch.setattr(state_files, "begin", fail)
    with pytest.raises(DiskFull):
        checkpoint.save(tmp_path, 3, state_of(3), {})
    late[0].join()
    assert not list(tmp_path.iterdir())


def test_a_state_may_be_given_up_and_changed_when_a_save_has_begun(tmp_path):
    state = jax.device_put(state_of(4), jax.devices()[0])
    wanted = jax.tree.map(np.array, state)
    size, host = 10_000, {"step": 4}
    begin = functools.partial(state_files.begin, state=state)
    finish = checkpoint.begin(tmp_path, 4, begin, size, host)
    changed = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 0 + 1, tree), donate_argnums=0)
    jax.block_until_ready(changed(state))
    host["step"] = 5
    assert finish() == tmp_path / "step_00000004"
    back = checkpoint.restore_latest(tmp_path, into(jax.eval_shape(lambda: wanted)))
    assert_same_bits(back.state, wanted)
    assert back.host == {"step": 4}


def test_a_disk_that_fills_half_way_leaves_nothing_half_written(tmp_path):
    child = _start(tmp_path, "full")
    output, _ = child.communicate(timeout=60)
    assert child.returncode == 3, output
    assert "no disk space for a checkpoint" in output
    assert output.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001"]
    abstract = {"x": jax.ShapeDtypeStruct((5_000_000,), jnp.float32)}
    assert checkpoint.restore_latest(tmp_path, into(abstract)).host == {"step": 1}


@pytest.mark.parametrize("when", ["state*", "manifest.json"])
def test_a_process_killed_while_it_saves_leaves_a_whole_checkpoint(tmp_path, when):
    child = _start(tmp_path, "kill")
    try:
        assert child.stdout.readline() == "saving\n"
        deadline = time.monotonic() + 60
        while True:  # stopped in the middle, whatever passes between a look and a signal
            assert time.monotonic() < deadline
            if list(tmp_path.glob(f".writing-*/{when}")):
                os.kill(child.pid, signal.SIGSTOP)
                os.waitpid(child.pid, os.WUNTRACED)
                if list(tmp_path.glob(f".writing-*/{when}")):
                    break
                os.kill(child.pid, signal.SIGCONT)
        os.kill(child.pid, signal.SIGKILL)
    finally:
        child.kill()
        child.communicate(timeout=60)
    assert list(tmp_path.glob(".writing-*")), "the process was not killed in the middle of a save"
    abstract = {"x": jax.ShapeDtypeStruct((5_000_000,), jnp.float32)}
    back = checkpoint.restore_latest(tmp_path, into(abstract))
    step = back.host["step"]
    assert step == checkpoint.step_of(checkpoint.checkpoints(tmp_path)[-1])
    noise = np.random.default_rng(0).normal(size=(5_000_000,)).astype(np.float32)
    assert np.array_equal(back.state["x"], noise + step if step > 1 else noise)
    checkpoint.save(tmp_path, step + 1, back.state, {"step": step + 1})
    assert not list(tmp_path.glob(".writing-*"))
    assert checkpoint.restore_latest(tmp_path, into(abstract)).host == {"step": step + 1}


_SHARDED = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from rlx.train import checkpoint, state_files
mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
value = np.arange(64, dtype=np.float32).reshape(8, 8)
first, second = NamedSharding(mesh, P("data", "tensor")), NamedSharding(mesh, P("tensor"))
checkpoint.save(sys.argv[1], 1, {"x": jax.device_put(value, first)}, {})
abstract = {"x": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=second)}
read = lambda path: state_files.read(path, abstract)
x = checkpoint.restore_latest(sys.argv[1], read).state["x"]
assert x.sharding == second, x.sharding
assert np.array_equal(x, value)
"""


def test_a_sharded_state_is_restored_to_another_sharding_and_to_one_device(tmp_path):
    subprocess.run(
        [sys.executable, "-c", _SHARDED, str(tmp_path)],
        check=True, timeout=120, env=with_devices(8),
    )  # fmt: skip
    abstract = {"x": jax.ShapeDtypeStruct((8, 8), jnp.float32)}
    x = checkpoint.restore_latest(tmp_path, into(abstract)).state["x"]
    assert np.array_equal(x, np.arange(64).reshape(8, 8))
