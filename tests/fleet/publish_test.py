"""Weight files: readable by safetensors, checksummed, and never left behind."""

import json
import os
import signal
import subprocess
import sys
import zlib
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from rlx.base import UserError
from rlx.fleet import publish


def tensors(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "model.a": rng.standard_normal((3, 5)).astype(np.float32),
        "model.b": rng.standard_normal((4, 2, 2)).astype(ml_dtypes.bfloat16),
        "model.half": rng.standard_normal(7).astype(np.float16),
        "model.transposed": rng.standard_normal((6, 4)).astype(np.float32).T,
        "model.scalar": np.asarray(2.5, np.float32),
        "model.empty": np.zeros((0, 3), np.float32),
    }


def test_safetensors_reads_what_is_written(tmp_path):
    path = tmp_path / "w.safetensors"
    crc = publish.write_weights(tensors(), path)
    read = load_file(path)
    assert set(read) == set(tensors())
    for name, tensor in tensors().items():
        assert read[name].dtype == tensor.dtype
        np.testing.assert_array_equal(read[name], tensor)
    assert crc == zlib.crc32(path.read_bytes()) == publish.checksum(path)
    length = int.from_bytes(path.read_bytes()[:8], "little")
    assert (8 + length) % 8 == 0  # tensors begin aligned
    assert json.loads(path.read_bytes()[8 : 8 + length])["__metadata__"] == {"format": "pt"}


def test_checksum_runs_over_block_borders(tmp_path, monkeypatch):
    path = tmp_path / "w"
    path.write_bytes(os.urandom(1000))
    whole = publish.checksum(path)
    monkeypatch.setattr(publish, "_BLOCK", 64)
    assert publish.checksum(path) == whole == zlib.crc32(path.read_bytes())
    assert publish.write_weights(tensors(), tmp_path / "x") == publish.checksum(tmp_path / "x")


def test_a_room_that_goes_away_while_weights_are_staged(tmp_path, monkeypatch):
    room = tmp_path / "room"
    room.mkdir()
    write = publish.write_sums

    def write_and_lose(source, path):
        crc = write(source, path)
        Path(path).unlink()
        room.rmdir()
        return crc

    monkeypatch.setattr(publish, "write_sums", write_and_lose)
    with pytest.raises(UserError, match=r"cannot write weights to .*fleet\.publish_dir"):
        publish.stage(1, tensors(), "path", room)


def test_checksum_of_nothing(tmp_path):
    (tmp_path / "empty").touch()
    assert publish.checksum(tmp_path / "empty") == 0 == zlib.crc32(b"")


@pytest.mark.parametrize("size", [1, 7, 100, 10_000])
def test_chunks_make_the_file_again(tmp_path, size):
    path = tmp_path / "w"
    data = os.urandom(1234)
    path.write_bytes(data)
    parts = list(publish.chunks(path, size))
    assert b"".join(part for _, part in parts) == data
    assert [offset for offset, _ in parts] == list(range(0, 1234, size))


def test_dtype_that_files_do_not_have(tmp_path):
    with pytest.raises(ValueError, match=r"model\.c is complex64"):
        publish.write_weights({"model.c": np.zeros(2, np.complex64)}, tmp_path / "w")


def test_no_room_is_one_line_and_leaves_nothing(tmp_path, monkeypatch):
    usage = publish.shutil.disk_usage(tmp_path)._replace(free=10)
    monkeypatch.setattr(publish.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(UserError, match="no space"):
        publish.stage(1, tensors(), "path", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_disk_that_fills_while_writing(tmp_path):
    with pytest.raises(UserError, match="no space"):
        publish.write_weights(tensors(), "/dev/full")


def test_missing_directory():
    with pytest.raises(UserError, match="publish_dir"):
        publish.stage(1, tensors(), "path", "/nonexistent")


def test_stage_takes_arrays_a_file_or_a_directory(tmp_path):
    made = publish.stage(3, tensors(), "stream", tmp_path)
    assert made.crc32 == publish.checksum(made.path)
    assert made.num_bytes == os.path.getsize(made.path)
    hf = tmp_path / "hf"
    hf.mkdir()
    publish.write_weights(tensors(), hf / "model.safetensors")
    for source in (hf, hf / "model.safetensors", str(hf)):
        given = publish.stage(4, source, "path", tmp_path)
        assert given.path == str(hf / "model.safetensors")
        assert given.crc32 == made.crc32
        given.close()
    assert (hf / "model.safetensors").exists(), "a file that is not ours was removed"
    made.close()
    assert not Path(made.path).exists()
    with pytest.raises(UserError, match="no weights at"):
        publish.stage(5, hf / "other.safetensors", "path", tmp_path)
    with pytest.raises(UserError, match="method"):
        publish.stage(5, hf, "carrier-pigeon", tmp_path)


def test_a_directory_of_several_files_is_published_as_one(tmp_path):
    hf, given = tmp_path / "hf", tensors()
    hf.mkdir()
    places = {name: f"{number}.safetensors" for number, name in enumerate(given)}
    for name, place in places.items():
        publish.write_weights({name: given[name]}, hf / place)
    (hf / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    weights = publish.stage(0, hf, "stream", tmp_path)
    found = load_file(weights.path)
    weights.close()
    assert found.keys() == given.keys()
    assert all(np.array_equal(found[name], given[name]) for name in given)


def test_sweep_removes_what_a_killed_process_left_and_nothing_else(tmp_path):
    code = (
        "import sys, time; from rlx.fleet.publish import WeightFile\n"
        "f = WeightFile(sys.argv[1]); print(f.path, flush=True); time.sleep(100)"
    )
    left = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        theirs = left.stdout.readline().strip()
        ours = publish.WeightFile(tmp_path)
        other = tmp_path / "model.safetensors"
        other.touch()
        publish.sweep(tmp_path)
        assert Path(theirs).exists(), "a file in use was removed"
    finally:
        left.send_signal(signal.SIGKILL)
        left.communicate()
    assert Path(theirs).exists()
    publish.sweep(tmp_path)
    assert not Path(theirs).exists()
    assert Path(ours.path).exists()
    assert other.exists()
    ours.close()
    ours.close()
