"""What a sharded gradient sends between devices, read in the compiled program."""

import functools
import json
import math
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("collectives.py")
ROWS, TOKENS, WIDTH, MLP, VOCABULARY = 8, 48, 64, 160, 512


@functools.cache
def sent(mesh, remat="full", chunk=1024):
    """What `collectives.py` prints, of a process with 8 devices and the compiler's whole passes."""
    environment = {k: v for k, v in os.environ.items() if k != "JAX_DISABLE_MOST_OPTIMIZATIONS"}
    flags = f"{environment.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, PROGRAM, mesh, remat, str(chunk)], check=True, timeout=600,
        capture_output=True, text=True,
        env={**environment, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def shapes(found, kind, loop=None):
    """Shapes of what the collectives of a kind carry, in the loop over layers or beside it."""
    return Counter(
        tuple(shape)
        for one in found["collectives"]
        if one["kind"] == kind and loop in (None, one["loop"])
        for shape in one["shapes"]
    )


def matrices(found):
    return Counter(tuple(s) for s in found["weights"].values() if len(s) == 2)


@pytest.mark.parametrize(
    ("mesh", "remat", "chunk", "times"),
    [
        ("fsdp:8", "full", 16, 3),
        pytest.param("fsdp:8", "none", 1024, 2, marks=pytest.mark.slow),
        pytest.param("replica:2,fsdp:4", "none", 16, 2, marks=pytest.mark.slow),
    ],
)
def test_fsdp_gathers_weights_and_reduces_gradients_once(mesh, remat, chunk, times):
    """Nothing of the activations travels: each weight once a pass, each gradient once."""
    found = sent(mesh, remat, chunk)
    gathered = shapes(found, "all-gather")
    # An embedding that is looked up has no product in the backward pass, the head one in each.
    assert gathered.pop((VOCABULARY, WIDTH)) == 1 + 2
    layers = Counter({s: n for s, n in matrices(found).items() if VOCABULARY not in s})
    assert gathered.keys() == layers.keys()
    # Nothing needs what the last product of a block gives again, so it is not computed again.
    assert all(2 * n <= gathered[shape] <= times * n for shape, n in layers.items())
    reduced = shapes(found, "all-reduce") + shapes(found, "reduce-scatter")
    own = Counter(tuple(sorted(s)) for s in found["weights"].values())
    of_arrays = Counter({s: n for s, n in _merged(reduced).items() if s})
    # Replicas add up what each device keeps of a gradient that is reduced within them.
    kept = {tuple(sorted((WIDTH // 4, s[0] * s[1] // WIDTH))) for s in layers}
    assert not of_arrays.keys() - own.keys() - (kept if "replica" in mesh else set())
    assert own == Counter({s: n for s, n in of_arrays.items() if s in own})
    kinds = {one["kind"] for one in found["collectives"]}
    assert kinds <= {"all-gather", "all-reduce", "reduce-scatter"}


@pytest.mark.slow
def test_tensor_parallel_blocks_send_the_residual_stream_alone():
    """Two gathers and two sums of a device's tokens × width a layer, forward; no MLP, no logits."""
    found = sent("fsdp:4,tensor:2", "none")
    own = ROWS // 4 * TOKENS * WIDTH
    for one in found["collectives"]:
        for shape in one["shapes"]:
            of_tokens = TOKENS in shape or ROWS // 4 * TOKENS in shape
            assert not (of_tokens and math.prod(shape) > own), one
            assert not (of_tokens and {MLP, MLP // 2, VOCABULARY, VOCABULARY // 2} & {*shape}), one


def test_what_travels_is_in_the_compute_dtype_and_gradients_are_float32():
    found = sent("fsdp:8", "full", 16)
    sizes = {"x".join(map(str, s)) for s in found["weights"].values() if len(s) == 2}
    sizes |= {"x".join(map(str, s[::-1])) for s in found["weights"].values() if len(s) == 2}
    kinds = Counter(dtype for shape, dtype in found["constrained"] if shape in sizes)
    assert kinds["bf16"] > kinds["f32"] > 0


def _merged(counter):
    """The counter with transposed shapes counted together."""
    total = Counter()
    for shape, count in counter.items():
        total[tuple(sorted(shape))] += count
    return total
