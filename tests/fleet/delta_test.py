"""Deltas between weight files: lossless for every bit pattern, refused when damaged."""

import os
import random
import zlib
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rlx.fleet import delta, publish

DTYPES = [np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16), np.dtype(np.float32),
          np.dtype(np.float64), np.dtype(np.int32)]  # fmt: skip
# signed zeros, smallest denormals, infinities and NaNs with payloads, per width
ODD = {
    2: [0x0000, 0x8000, 0x0001, 0x8001, 0x7F80, 0xFF80, 0x7F81, 0xFFC1, 0x7C00, 0x7C01, 0xFFFF],
    4: [0, 0x80000000, 1, 0x80000001, 0x7F800000, 0x7F800001, 0xFFC00001, 0xFFFFFFFF],
    8: [0, 1 << 63, 1, 0x7FF0000000000000, 0x7FF0000000000001, (1 << 64) - 1],
}
FEW = settings(max_examples=120, deadline=None)


def bits(dtype, shape):
    """Arrays of any bit pattern, the odd ones often."""
    unsigned = np.dtype(f"u{dtype.itemsize}")
    most = (1 << (8 * dtype.itemsize)) - 1
    elements = st.sampled_from(ODD[dtype.itemsize]) | st.integers(0, most)
    return hnp.arrays(unsigned, shape, elements=elements).map(lambda a: a.view(dtype))


@st.composite
def pairs(draw):
    """Two versions of a few tensors; some of the second are the first's, wholly or in part."""
    old, new = {}, {}
    for name in draw(st.lists(st.sampled_from("abcde"), max_size=4, unique=True)):
        dtype = draw(st.sampled_from(DTYPES))
        shape = draw(hnp.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=9))
        old[name] = draw(bits(dtype, shape))
        other = draw(bits(dtype, shape))
        how = draw(st.sampled_from(["same", "other", "some"]))
        mask = draw(hnp.arrays(bool, shape)) if how == "some" else np.full(shape, how == "other")
        new[name] = np.where(mask, other.view(f"u{dtype.itemsize}"),
                             old[name].view(f"u{dtype.itemsize}")).view(dtype)  # fmt: skip
    return old, new


def files(directory, old, new):
    """(base, new, delta, result), the last two empty."""
    paths = [Path(directory) / name for name in ("base", "new", "delta", "result")]
    publish.write_weights(old, paths[0])
    publish.write_weights(new, paths[1])
    for path in paths[2:]:
        path.write_bytes(b"")
    return paths


def round_trip(directory, old, new):
    """Checks that the delta makes the new file; returns its number of bytes."""
    base, wanted, made, result = files(directory, old, new)
    num_bytes, crc = delta.encode(base, wanted, made, 1 << 40)
    assert made.stat().st_size == num_bytes
    assert zlib.crc32(made.read_bytes()) == crc
    result.write_bytes(b"x" * (wanted.stat().st_size + 10))  # what was there before does not stay
    got = delta.apply(base, made, result)
    assert result.read_bytes() == wanted.read_bytes()
    assert got == publish.checksum(wanted)
    return num_bytes


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("delta")


@FEW
@given(pair=pairs(), block=st.integers(1, 40))
def test_every_bit_pattern_comes_back(scratch, pair, block):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta, "BLOCK", block)
        round_trip(scratch, *pair)


@FEW
@given(st.lists(st.integers(0, 1500), min_size=1, max_size=30, unique=True))
def test_gaps_of_every_length(positions):
    positions = np.sort(np.asarray(positions))
    gaps = delta._gaps(positions)
    np.testing.assert_array_equal(delta._positions(gaps, len(positions), 1501), positions)
    assert len(gaps) <= len(positions) + 1501 // 255


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("share", [0.0, 1e-4, 0.02, 0.5, 1.0])
def test_large_tensors_of_several_blocks(tmp_path, dtype, share):
    rng = np.random.default_rng(3)
    size = 2 * delta.BLOCK + 17 if dtype.itemsize == 2 else delta.BLOCK + 17
    unsigned = f"u{dtype.itemsize}"
    old = rng.integers(0, 1 << (8 * dtype.itemsize - 1), size, dtype=unsigned)
    step = rng.integers(-1, 2, size).astype(unsigned) * (rng.random(size) < share)
    new = old + step.astype(unsigned)
    num_bytes = round_trip(tmp_path, {"w": old.view(dtype)}, {"w": new.view(dtype)})
    changed = (old != new).sum()
    most = 1.4 * changed + new.nbytes / 4000 + 2000  # where few changed: the gaps between them
    assert num_bytes <= most, "a change of one unit takes about a byte"


def test_nothing_changed_is_next_to_nothing(tmp_path):
    tensors = {"w": np.arange(3 * delta.BLOCK, dtype=np.float32)}
    assert round_trip(tmp_path, tensors, tensors) < 300


def test_it_stops_at_the_limit(tmp_path):
    rng = np.random.default_rng(0)
    base, new, made, _ = files(
        tmp_path,
        {"w": rng.integers(0, 1 << 16, 50_000, np.uint16).view(ml_dtypes.bfloat16)},
        {"w": rng.integers(0, 1 << 16, 50_000, np.uint16).view(ml_dtypes.bfloat16)},
    )
    assert delta.encode(base, new, made, 80_000) is None
    assert delta.encode(base, new, made, 200_000)


@FEW
@given(st.integers(0, 30).flatmap(lambda n: st.tuples(*[st.binary(min_size=n, max_size=n)] * 2)))
def test_bytes_of_any_number_and_meaning_come_back(scratch, contents):
    base, new, made, result = (scratch / name for name in ("base", "new", "delta", "result"))
    for path, content in zip((base, new, made, result), (*contents, b"", b""), strict=True):
        path.write_bytes(content)
    delta.encode(base, new, made, 1 << 20)
    assert delta.apply(base, made, result) == zlib.crc32(contents[1])
    assert result.read_bytes() == contents[1]


def test_files_of_two_sizes_have_no_delta(tmp_path):
    base, new, made, _ = files(tmp_path, {"w": np.zeros(4)}, {"w": np.zeros(5)})
    with pytest.raises(ValueError, match="different sizes"):
        delta.encode(base, new, made, 1 << 20)


def small_delta(directory):
    """Paths of a delta of a few hundred bytes with every kind of stream."""
    rng = np.random.default_rng(1)
    old = {"a": rng.integers(0, 1 << 16, 900, np.uint16).view(ml_dtypes.bfloat16),
           "b": rng.standard_normal(300).astype(np.float32)}  # fmt: skip
    new = {"a": old["a"].copy(), "b": old["b"].copy()}
    new["a"].view(np.uint16)[::3] += 1
    new["a"].view(np.uint16)[700:] = old["a"].view(np.uint16)[700:]
    new["b"][5:9] *= 3
    paths = files(directory, old, new)
    delta.encode(*paths[:3], 1 << 20)
    return paths


def test_a_damaged_delta_is_refused_or_seen_by_its_result(tmp_path, monkeypatch):
    """3,000 damaged ones: ValueError, or a file of the same size whose checksum tells."""
    monkeypatch.setattr(delta, "BLOCK", 256)
    base, new, made, result = small_delta(tmp_path)
    good, size, right = made.read_bytes(), new.stat().st_size, publish.checksum(new)
    rng, refused = random.Random(0), 0
    for _ in range(3000):
        bad = bytearray(good)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(bad))
            kind = rng.randrange(4)
            if kind == 0:
                bad[at] ^= 1 << rng.randrange(8)
            elif kind == 1:
                bad[at:at] = rng.randbytes(rng.randint(1, 4))
            elif kind == 2:
                del bad[at : at + rng.randint(1, 4)]
            else:
                bad[at : at + 4] = rng.choice((b"\xff\xff\xff\xff", bytes(4)))
        if not bad or bad == good:
            continue
        made.write_bytes(bad)
        try:
            crc = delta.apply(base, made, result)
        except ValueError:
            refused += 1
            continue
        assert result.stat().st_size == size
        assert (crc == right) is (result.read_bytes() == new.read_bytes())
    assert refused > 2000


@pytest.mark.parametrize("length", [0, 1, 23, 24, 60, 100])
def test_a_delta_that_ends_early(tmp_path, length):
    base, _, made, result = small_delta(tmp_path)
    made.write_bytes(made.read_bytes()[:length])
    with pytest.raises(ValueError, match="too early"):
        delta.apply(base, made, result)


def test_a_delta_with_a_tail(tmp_path):
    base, _, made, result = small_delta(tmp_path)
    made.write_bytes(made.read_bytes() + b"\0")
    with pytest.raises(ValueError, match="1 bytes follow"):
        delta.apply(base, made, result)


@pytest.mark.parametrize(("gap_bytes", "why"), [(1, "does not end"), (1 << 28, "1 changes of 64")])
def test_a_stream_that_inflates_to_more_than_belongs_there(tmp_path, gap_bytes, why):
    """A few bytes that stand for 256 MiB cost neither the memory nor the time."""
    made = zlib.compressobj(9, zlib.DEFLATED, -15)
    bomb = b"".join(made.compress(bytes(1 << 24)) for _ in range(16)) + made.flush()
    base, _, path, result = small_delta(tmp_path)
    size = base.stat().st_size
    path.write_bytes(
        delta._HEAD.pack(b"rlxdelta", 2, 64, size)
        + delta._CHANGES.pack(1, gap_bytes)
        + delta._STREAM.pack(1, len(bomb))
        + bomb
    )
    with pytest.raises(ValueError, match=why):
        delta.apply(base, path, result)


@pytest.mark.parametrize(
    ("magic", "number", "block", "off"),
    [
        (b"rlxdeltb", 2, 64, 0),
        (b"rlxdelta", 1, 64, 0),
        (b"rlxdelta", 2, 0, 0),
        (b"rlxdelta", 2, (1 << 24) + 1, 0),
        (b"rlxdelta", 2, 64, 1),
    ],
)
def test_a_head_that_cannot_be(tmp_path, magic, number, block, off):
    base, _, path, result = small_delta(tmp_path)
    head = delta._HEAD.pack(magic, number, block, base.stat().st_size + off)
    path.write_bytes(head + delta._CHANGES.pack(0, 0))
    with pytest.raises(ValueError, match="delta"):
        delta.apply(base, path, result)


def test_another_base_shows_in_the_checksum(tmp_path):
    base, new, made, result = small_delta(tmp_path)
    other = bytearray(base.read_bytes())
    other[-1] ^= 1
    base.write_bytes(other)
    assert delta.apply(base, made, result) != publish.checksum(new)
    base.write_bytes(other[:-1])
    with pytest.raises(ValueError, match="is for a file of"):
        delta.apply(base, made, result)


def test_stage_makes_a_delta_of_two_versions_of_ours(tmp_path):
    rng = np.random.default_rng(0)
    tensors = {"w": rng.standard_normal(100_000).astype(ml_dtypes.bfloat16)}
    first = publish.stage(1, tensors, "delta", tmp_path)
    assert first.delta is None
    tensors["w"].view(np.uint16)[::50] += 1
    second = publish.stage(2, tensors, "delta", tmp_path, first)
    assert second.delta.num_bytes < 0.03 * second.num_bytes
    assert second.delta.crc32 == publish.checksum(second.delta.path)
    assert second.delta.fits(first)
    assert not second.delta.fits(second)
    assert not second.delta.fits(None)
    by_path = publish.stage(1, tensors, "path", tmp_path)
    noise = rng.integers(0, 1 << 16, 100_000, np.uint16).view(ml_dtypes.bfloat16)
    for source, method, base in (
        (tensors, "stream", first),  # not asked for
        (tensors, "delta", by_path),  # which no server keeps
        (second.path, "delta", first),  # a user's file may change under us
        ({"w": tensors["w"][:-1]}, "delta", first),  # another size
        ({"w": noise}, "delta", first),  # everything, by anything
    ):
        third = publish.stage(3, source, method, tmp_path, base)
        assert third.delta is None
        third.close()
    for weights in (by_path, second, first):
        weights.close()
    assert os.listdir(tmp_path) == []
