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

from tests.fixtures.commands import with_devices

PROGRAM = Path(__file__).with_name("collectives.py")
ROWS, TOKENS, WIDTH, MLP, VOCABULARY = 8, 48, 64, 160, 512
KEY_HEADS, HEAD = 2, 16


@functools.cache
def sent(mesh, remat="full", chunk=1024, *experts):
    """What `collectives.py` prints, of a process with 8 devices and the compiler's whole passes."""
    environment = {k: v for k, v in os.environ.items() if k != "JAX_DISABLE_MOST_OPTIMIZATIONS"}
    done = subprocess.run(
        [sys.executable, PROGRAM, mesh, remat, str(chunk), *experts], check=True, timeout=600,
        capture_output=True, text=True, env=with_devices(8, environment),
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def shapes(found, kind, loop=None):
    """Shapes of what the collectives of a kind carry, in the loop over layers or beside it.

    Without a first axis of size 1, which is a device's part of the replicas.
    """
    return Counter(
        tuple(shape[1:] if shape[:1] == [1] else shape)
        for one in found["collectives"]
        if one["kind"] == kind and loop in (None, one["loop"])
        for shape in one["shapes"]
    )


def matrices(found):
    return Counter(tuple(s) for s in found["weights"].values() if len(s) == 2)


def sizes_of(mesh):
    return {name: int(size) for name, size in (part.split(":") for part in mesh.split(","))}


def keys_and_values(mesh):
    """Shape of the keys or values of a device's rows, in blocks: of all tokens, and of its own."""
    axes = sizes_of(mesh)
    heads = max(KEY_HEADS // axes.get("tensor", 1), 1)
    rows, blocks = ROWS // axes.get("fsdp", 1), 2 * axes.get("context", 1)
    one = (rows, heads, TOKENS // blocks, HEAD)
    return (blocks, *one), (2, *one)


@pytest.mark.parametrize(
    ("mesh", "remat", "chunk", "times"),
    [
        ("fsdp:8", "full", 16, 3),
        pytest.param("fsdp:8", "none", 1024, 2, marks=pytest.mark.slow),
        pytest.param("replica:2,fsdp:4", "none", 16, 2, marks=pytest.mark.slow),
        pytest.param("fsdp:2,context:4", "full", 16, 3, marks=pytest.mark.slow),
        pytest.param("context:8", "none", 1024, 2, marks=pytest.mark.slow),
    ],
)
def test_weights_are_gathered_and_their_gradients_reduced_once(mesh, remat, chunk, times):
    """Of the activations keys and values alone travel: each weight once a pass, gradients once."""
    found = sent(mesh, remat, chunk)
    gathered, scattered = shapes(found, "all-gather"), shapes(found, "reduce-scatter")
    reduced = shapes(found, "all-reduce")
    if "context" in mesh:  # keys and values in both passes, their gradients in the backward one
        whole, own = keys_and_values(mesh)
        assert gathered.pop(whole) == 2 + 2
        assert scattered.pop(own) == 2
        permuted = shapes(found, "collective-permute")
        for counter in (gathered, reduced, permuted):  # one number a token, back in the row's order
            for shape in [s for s in counter if len(s) > 2 and math.prod(s) <= ROWS * TOKENS]:
                del counter[shape]
        assert not permuted
    # An embedding that is looked up has no product in the backward pass, the head one in each.
    assert gathered.pop((VOCABULARY, WIDTH)) == 1 + 2
    layers = Counter({s: n for s, n in matrices(found).items() if VOCABULARY not in s})
    assert gathered.keys() == layers.keys()
    # Nothing needs what the last product of a block gives again, so it is not computed again.
    assert all(2 * n <= gathered[shape] <= times * n for shape, n in layers.items())
    own = Counter(tuple(sorted(s)) for s in found["weights"].values())
    of_arrays = Counter({s: n for s, n in _merged(reduced + scattered).items() if s})
    # Replicas add up what each device keeps of a gradient that is reduced within them.
    kept = {tuple(sorted((WIDTH // 4, s[0] * s[1] // WIDTH))) for s in matrices(found)}
    assert not of_arrays.keys() - own.keys() - (kept if "replica" in mesh else set())
    for shape, count in own.items():
        # Rows and tokens of a norm's gradient are two sums, of one number a column.
        assert count <= of_arrays[shape] <= count * (1 + ("context" in mesh and len(shape) == 1))
    kinds = {one["kind"] for one in found["collectives"]}
    permutes = {"collective-permute"} if "context" in mesh else set()
    assert kinds <= {"all-gather", "all-reduce", "reduce-scatter"} | permutes


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["fsdp:4,tensor:2", "context:4,tensor:2"])
def test_tensor_parallel_blocks_send_the_residual_stream_alone(mesh):
    """Gathers and sums of a device's tokens × width, as Megatron has them; no MLP, no logits."""
    found, axes = sent(mesh, "none"), sizes_of(mesh)
    rows, tokens = ROWS // axes.get("fsdp", 1), TOKENS // axes.get("context", 1)
    keys = keys_and_values(mesh)
    stream = rows * tokens * WIDTH
    for one in found["collectives"]:
        for shape in one["shapes"]:
            of_tokens = bool({tokens, TOKENS, rows * tokens} & {*shape})
            assert not (of_tokens and math.prod(shape) > stream and tuple(shape) not in keys), one
            assert not (of_tokens and {MLP, MLP // 2, VOCABULARY, VOCABULARY // 2} & {*shape}), one

    def of_stream(kind):
        counted = shapes(found, kind, loop=True).items()
        return sum(n for s, n in counted if math.prod(s) == stream and s not in keys)

    # A block's input is gathered and its output scattered, the reverse in the backward pass, where
    # its input is gathered once more for a weight's gradient. The CPU's compiler has all-reduce and
    # slice in place of reduce-scatter, and adds up q, k, v and gate, up by themselves.
    assert of_stream("all-gather") == 2 + 2 + 1
    assert of_stream("all-reduce") + of_stream("reduce-scatter") == 2 + 3 + 2


@pytest.mark.slow
def test_experts_stay_where_they_are_and_their_devices_gather_tokens():
    """Forward, once more for the backward pass, and there the gradients of what they gave back."""
    found = sent("fsdp:2,expert:4", "full", 1024, "experts")
    own = ROWS * TOKENS // 8
    gathered = shapes(found, "all-gather", loop=True)
    scattered = shapes(found, "reduce-scatter", loop=True)
    assert gathered[4 * own, WIDTH] == 2 + 1
    assert scattered[own, WIDTH] == 1 + 1
    # Of the 8 experts' matrices a device gathers, over fsdp, the halves of its own two.
    for shape, count in {(2, WIDTH, 40): 2, (2, 40, WIDTH): 1}.items():
        assert gathered[shape] == 2 * count
    assert not [s for s in gathered + scattered if len(s) == 3 and s[0] == 8]
    largest = max(4 * own * WIDTH, VOCABULARY * WIDTH)
    for one in found["collectives"]:
        assert all(math.prod(shape) <= largest for shape in one["shapes"]), one


def test_what_travels_is_in_the_compute_dtype_and_gradients_are_float32():
    found = sent("fsdp:8", "full", 16)
    sizes = {"x".join(map(str, s)) for s in found["weights"].values() if len(s) == 2}
    sizes |= {"x".join(map(str, s[::-1])) for s in found["weights"].values() if len(s) == 2}
    kinds = Counter(dtype for shape, dtype in found["constrained"] if shape in sizes)
    assert kinds["bf16"] > kinds["f32"] > 0


@pytest.mark.slow
def test_keys_and_values_travel_in_the_compute_dtype():
    found = sent("fsdp:2,context:4", "full", 16)
    whole, _ = keys_and_values("fsdp:2,context:4")
    assert {*map(tuple, found["gathered"])} == {("x".join(map(str, whole)), "bf16")}


def _merged(counter):
    """The counter with transposed shapes counted together."""
    total = Counter()
    for shape, count in counter.items():
        total[tuple(sorted(shape))] += count
    return total
