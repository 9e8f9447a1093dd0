"""Run by hf_test in a process with 8 devices: each device's slices are those of the whole."""

import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from rlx.model import hf, sharding

MESHES = ("fsdp:8", "tensor:8", "fsdp:4,tensor:2", "replica:2,fsdp:2,tensor:2")
MB = 1 << 20


def own_memory() -> int:
    """Bytes that this process has for itself, the pages of files not counted."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) << 10


class Peak:
    """The most memory that the process had for itself while the block ran, above that before."""

    def __enter__(self):
        self.over, self._before, self._done = 0, own_memory(), threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self):
        while not self._done.wait(0.001):
            self.over = max(self.over, own_memory() - self._before)

    def __exit__(self, *_):
        self._done.set()
        self._thread.join()


def load(path, mesh, dtype, bucket=hf.BUCKET):
    config = hf.load_config(path)
    places = sharding.named_shardings(config, mesh)
    with hf.open_tensors(path) as tensors:
        got = hf.from_hf(tensors, config, dtype, places, bucket)
    assert jax.tree.map(lambda leaf: leaf.sharding, got) == places
    return got


def slices(*paths):
    for path in paths:
        for dtype in (jnp.float32, jnp.bfloat16):
            whole = hf.load(path, dtype)[1]
            for text, bucket in ((MESHES[0], 100), *((mesh, hf.BUCKET) for mesh in MESHES)):
                got = load(path, sharding.make_mesh(text), dtype, bucket)
                for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(whole), strict=True):
                    assert a.dtype == b.dtype
                    assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), (path, text)


def memory(large, small):
    mesh, bucket = sharding.make_mesh("fsdp:4,tensor:2"), 4 * MB
    load(small, mesh, jnp.float32, 100)  # compiles, and imports
    with Peak() as peak:
        params = load(large, mesh, jnp.float32, bucket)
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    by_device = dict.fromkeys(jax.devices(), 0)
    for leaf in jax.tree.leaves(params):
        for shard in leaf.addressable_shards:
            by_device[shard.device] += shard.data.nbytes
    largest = max(by_device.values())
    print(f"model {whole / MB:.0f} MB, peak {peak.over / MB:.0f}, a device {largest / MB:.1f}")
    assert largest < whole / 8 + MB
    # On the way: what was read, the same transposed and cast, and a device's copy of that; and the
    # compiler's own, which differs between machines. A second copy would be all of it again.
    assert whole - 8 * MB < peak.over < whole + 3 * bucket + 60 * MB


def main(mode, *paths):
    {"slices": slices, "memory": memory}[mode](*paths)


main(*sys.argv[1:])
