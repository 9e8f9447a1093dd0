"""Run by state_files_test, in processes of several devices, joined or not: saves and restores.

python saved_states.py DIRECTORY [WHAT:NAME:MESH …], with PROCESSES=index/count/port.
"""

import os
import resource
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from rlx import config as config_lib
from rlx.base import DiskFull
from rlx.model.model_config import ModelConfig
from rlx.train import checkpoint, conductor, hosts, state_files
from rlx.train.train_options import TrainOptions
from rlx.train.update import JaxUpdate

MODEL = ModelConfig(
    architecture="Qwen2ForCausalLM", vocab_size=32, num_layers=2, model_dim=16, mlp_dim=32,
    num_heads=4, num_kv_heads=2, head_dim=4, tie_embeddings=True, attention_bias=True,
)  # fmt: skip
MB = 1 << 20


def trainer_of(mesh: str) -> JaxUpdate:
    config = config_lib.default()
    config.algorithm.preset, config.train.mesh = "ppo", mesh
    config.algorithm.kl_placement = "none"
    return JaxUpdate(MODEL, TrainOptions.of(config))


def numbers(abstract):
    """Noise in the state's leaves, the same in every process."""
    leaves, structure = jax.tree.flatten(abstract)
    made = [
        (np.random.default_rng(index).normal(size=leaf.shape) * 100).astype(leaf.dtype)
        for index, leaf in enumerate(leaves)
    ]
    return jax.tree.unflatten(structure, made)


def on_devices(abstract, values):
    def place(leaf, value):
        if leaf.sharding is None:
            return jax.device_put(value)
        return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: value[index])

    return jax.tree.map(place, abstract, values)


def begin(directory: Path, trainer: JaxUpdate, state):
    """What ends the save, on this host."""
    temporary = directory / ".writing-00000001"
    if jax.process_index():
        multihost_utils.sync_global_devices("made")
        return trainer.save(temporary, state).result

    def begin_state(path):
        assert path == temporary
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("made")
        return trainer.save(path, state)

    return checkpoint.begin(directory, 1, begin_state, trainer.state_bytes, {"step": 1})


def save(directory: Path, mesh: str) -> None:
    trainer = trainer_of(mesh)
    state = on_devices(trainer.abstract_state, numbers(trainer.abstract_state))
    end = begin(directory, trainer, state)
    other = jax.jit(partial(jax.tree.map, lambda leaf: leaf + 1), donate_argnums=0)(state)
    jax.block_until_ready(other)  # the update after the save
    end()


class Given(JaxUpdate):
    """A trainer that begins with noise, equal on all processes."""

    def __init__(self, mesh: str):
        super().__init__(MODEL, trainer_of(mesh)._options)

    def init(self):
        return on_devices(self.abstract_state, numbers(self.abstract_state))


def full(directory: Path, mesh: str) -> None:
    """The last process's disk is full: process 0 says so, and nothing is left."""
    cluster = hosts.Cluster(os.environ["MEET"], jax.process_count(), jax.process_index())
    joined = hosts.join(cluster, {})
    if cluster.index:
        free = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, free[1]))
        conductor.worker_loop(joined, Given)
        resource.setrlimit(resource.RLIMIT_FSIZE, free)
    else:
        update = conductor.driver(joined, Given, mesh=mesh)
        save = partial(update.save, state=update.init())
        with pytest.raises(DiskFull, match=r"process 1 of 2 .*: no disk space for its part of"):
            checkpoint.begin(directory, 1, save, update.state_bytes, {"step": 1})()
        assert not list(directory.iterdir())
        conductor.stop(joined)
    joined.close()
    multihost_utils.sync_global_devices("done")


def restore(directory: Path, mesh: str) -> None:
    trainer = trainer_of(mesh)
    wanted, got = numbers(trainer.abstract_state), trainer.restore(directory / "step_00000001")
    leaves = (jax.tree.leaves(tree) for tree in (got, trainer.abstract_state, wanted))
    for leaf, abstract, value in zip(*leaves, strict=True):
        assert abstract.sharding in (None, leaf.sharding)
        for shard in leaf.addressable_shards:
            assert np.asarray(shard.data).tobytes() == value[shard.index].tobytes()


def status(name: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.split(f"{name}:")[1].split()[0]) << 10


def memory(directory: Path, mesh: str) -> None:
    """Save 192 MB and restore them; how far does it raise this process's memory?"""
    places = NamedSharding(jax.make_mesh((8,), (mesh,)), PartitionSpec(None, mesh))
    state_files.BUCKET = bucket = 16 * MB
    size, count = 8 * MB, 24

    def make(number):
        shape = (size // 4 // 1024, 1024)
        return [jnp.full(shape, i, jnp.float32, device=places) + number for i in range(count)]

    first = make(0)[:2]
    directory.mkdir()
    state_files.begin(directory, first).result()  # imports and compiles
    state_files.read(directory, first)
    state = jax.block_until_ready(make(0.5))

    def measured(work):
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM from here
        before = status("VmRSS")
        work()
        return status("VmHWM") - before

    fresh = directory / "fresh"
    fresh.mkdir()
    saved = measured(lambda: state_files.begin(fresh, state).result())
    abstract = jax.eval_shape(lambda: state)
    abstract = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=places) for x in abstract]
    kept = []
    restored = measured(lambda: kept.append(state_files.read(fresh, abstract)))
    for a, b in zip(kept[0], state, strict=True):
        assert np.array_equal(a, b)
    whole = size * count
    print(f"state {whole / MB:.0f} MB, save {saved / MB:.0f}, restore {restored / MB:.0f}")
    # On a CPU what is saved need not be copied: it is its own snapshot.
    assert saved < whole / 2
    assert restored < whole + 2 * bucket


def main(root: str, *tasks: str) -> None:
    if processes := os.environ.get("PROCESSES"):
        index, count, port = processes.split("/")
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", int(count), int(index))
    for task in tasks:
        what, name, mesh = task.split("=")
        {"save": save, "restore": restore, "full": full, "memory": memory}[what](
            Path(root, name), mesh
        )
        print(task, "done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
