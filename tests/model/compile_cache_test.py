"""Where compiled programs are kept, and when they are not."""

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
