"""Where compiled programs are kept, and when they are not."""

import importlib.util
import os
import time
from pathlib import Path

import pytest

from rlx.model import compile_cache


def test_one_directory_per_processor_in_the_users_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    path = compile_cache.options()["jax_compilation_cache_dir"]
    assert path.startswith(str(tmp_path / "rlx" / "xla-"))
    assert compile_cache.directory() == path


def test_the_users_own_choice_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/somewhere")
    assert compile_cache.options() == {}


def test_no_cache_where_none_can_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    assert compile_cache.options() == {}


def test_a_damaged_entry_is_compiled_again(tmp_path, monkeypatch):
    """A flipped bit of machine code ended every start by SIGSEGV."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    path = Path(compile_cache.options()["jax_compilation_cache_dir"])
    good, bad = path / "jit_a-1-cache", path / "jit_b-2-cache"
    for entry in (good, bad):
        entry.write_bytes(b"\x28\xb5\x2f\xfd" + bytes(100))
    compile_cache.check(only_new=True)  # at the end of the process that wrote them
    written = bad.stat().st_mtime_ns
    bad.write_bytes(bad.read_bytes()[:-1] + b"\x01")
    os.utime(bad, ns=(written, written))  # a damaged disk changes no time
    good.write_bytes(good.read_bytes() + b"\x02")  # half of it was written when it was recorded
    os.utime(good, ns=(written + 1, written + 1))
    index = path / "checksums.json"
    os.utime(index, (0, 0))  # with zlib, whose entries have a checksum, it looks once a day
    compile_cache.options()
    assert [entry.name for entry in path.glob("*-cache")] == [good.name]
    index.write_text("{")  # half of an index forgets, and that is all
    compile_cache.options()
    assert good.exists()


@pytest.mark.parametrize("codec", ["zstd", "zlib"])
def test_all_entries_are_read_at_each_start_only_where_a_damaged_one_can_crash(
    codec, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: codec == "zstd" or None)
    checks = []
    monkeypatch.setattr(compile_cache, "check", lambda *_, **__: checks.append(1))
    path = Path(compile_cache.options()["jax_compilation_cache_dir"])
    (path / "checksums.json").write_text("{}")
    compile_cache.options()
    assert len(checks) == (2 if codec == "zstd" else 1)
    ahead = time.time() + 7200  # the clock was set back
    os.utime(path / "checksums.json", (ahead, ahead))
    compile_cache.options()
    assert len(checks) == (3 if codec == "zstd" else 2)
