"""Kept programs: loaded where nothing that they depend on has changed, and only there."""

import contextlib
import dataclasses
import gc
import importlib
import importlib.util
import pkgutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

import rlx.algorithms
import rlx.model
import rlx.train
from rlx.model import kept_programs, ops
from rlx.model.kept_programs import KeptPrograms
from rlx.train.train_options import TrainOptions
from rlx.train.update import JaxUpdate


@pytest.fixture
def folder(tmp_path):
    """A folder of programs, with a cache of JAX that has none yet."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path / "jax"))
    compilation_cache.reset_cache()
    place = tmp_path / "programs"
    place.mkdir()
    yield str(place)
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


class Doubled:
    """A function that counts how often it is traced."""

    def __init__(self, factor=2.0):
        self.factor, self.traced = factor, 0

    def double(self, x, unused):
        self.traced += 1
        return {"y": x["x"] * self.factor}


def use(folder, *about, factor=2.0, x=None):
    """Make, call twice; return the result and the number of traces."""
    function = Doubled(factor)
    program = KeptPrograms(folder, *about).jit(function.double)
    x = np.arange(3.0, dtype=np.float32) if x is None else x
    for _ in range(2):
        result = program({"x": x}, jnp.zeros(1))["y"]
    return np.asarray(result).tolist(), function.traced


def test_the_same_program_is_loaded_and_not_traced(folder):
    assert use(folder, "a") == ([0.0, 2.0, 4.0], 1)
    assert use(folder, "a") == ([0.0, 2.0, 4.0], 0)
    assert use(folder, "a", x=np.ones(2, np.float32)) == ([2.0, 2.0], 1)  # another shape
    assert use(folder, "a", x=np.ones(3, np.int32)) == ([2.0, 2.0, 2.0], 1)  # another dtype


def test_what_it_depends_on_decides(folder, monkeypatch):
    assert use(folder, 2.0) == ([0.0, 2.0, 4.0], 1)
    assert use(folder, 3.0, factor=3.0) == ([0.0, 3.0, 6.0], 1)
    assert use(folder, 2.0) == ([0.0, 2.0, 4.0], 0)
    thing = object()  # its text has an address, where another process has another object
    assert use(folder, thing) == use(folder, thing) == ([0.0, 2.0, 4.0], 1)
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")  # XLA has read it before
    assert use(folder, 2.0)[1] == 1
    monkeypatch.undo()
    monkeypatch.setattr(kept_programs, "_SOURCES", "edited")
    assert use(folder, 2.0)[1] == 1  # traced, and found by its text
    assert use(folder, 2.0)[1] == 0


def test_programs_of_another_processor_are_not_loaded(folder, monkeypatch):
    def older():
        return "flags: avx2"

    use(folder)
    older.__module__ = "rlx"  # a function of another module would be a replacement
    monkeypatch.setattr(kept_programs, "cpu_flags", older, raising=False)
    assert use(folder)[1] == 1


def test_the_source_is_that_of_the_import(monkeypatch, tmp_path):
    spec = kept_programs.__spec__
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    monkeypatch.setattr(rlx, "__path__", [str(tmp_path)])  # as if all files were edited
    assert fresh.KeptPrograms(None)._source == KeptPrograms(None)._source


def test_replaced_functions_of_rlx_are_used(folder, monkeypatch):
    use(folder)
    assert use(folder)[1] == 0
    monkeypatch.setattr(ops, "matmul", jax.jit(lambda a, b: a))
    assert use(folder)[1] == 1
    monkeypatch.undo()
    assert use(folder)[1] == 0
    monkeypatch.setattr(ops, "matmul", lambda a, b: a)
    assert use(folder)[1] == 1
    monkeypatch.undo()
    monkeypatch.setattr(TrainOptions, "of", lambda: 0)
    assert use(folder)[1] == 1


def test_equal_programs_of_other_arguments_stay_apart(folder):
    for number, function in enumerate([lambda a, b: a * 3, lambda a, b: b * 3]):
        program = KeptPrograms(folder, number).jit(function, name="pick")
        assert program(jnp.zeros(2), jnp.ones(2)).tolist() == [3.0 * number] * 2


def test_rlx_itself_is_not_taken_for_a_replacement():
    for package in (rlx.algorithms, rlx.model, rlx.train):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            with contextlib.suppress(ImportError):  # of torch, where it is not installed
                importlib.import_module(module.name)
    assert not kept_programs._patched()


def test_a_damaged_file_is_made_anew(folder, tmp_path):
    use(folder)
    for file in (tmp_path / "programs").iterdir():
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    with pytest.raises(ValueError, match="is damaged"):
        kept_programs._read(file)
    assert use(folder) == ([0.0, 2.0, 4.0], 1)


def test_what_jax_s_cache_had_is_not_written_again(folder, tmp_path):
    use(None)
    for _ in range(2):
        assert use(folder) == ([0.0, 2.0, 4.0], 1)
    assert not list((tmp_path / "programs").iterdir())


def tripled(x):
    return x * 3


def test_what_jax_has_in_memory_from_its_cache_is_not_written_either(folder, tmp_path):
    x = jnp.ones(3)
    for _ in range(2):
        jax.clear_caches()
        jax.jit(tripled)(x)
    for _ in range(2):
        assert KeptPrograms(folder).jit(tripled)(x).tolist() == [3.0] * 3
    assert not list((tmp_path / "programs").iterdir())


@dataclasses.dataclass(frozen=True)
class OwnLoss:
    """A user's loss, whose text has neither its code nor an address."""

    def __call__(self, inputs, algorithm):
        return -inputs.advantage * inputs.target, {}


@pytest.mark.parametrize("field", ["loss_function", "advantage_function"])
def test_programs_of_a_users_own_code_are_not_kept(
    folder, tmp_path, field, model_config, make_config
):
    options = TrainOptions.of(make_config())
    algorithm = dataclasses.replace(options.algorithm, **{field: OwnLoss()})
    options = dataclasses.replace(options, algorithm=algorithm)
    trainer = JaxUpdate(model_config, options, programs=folder)
    trainer._waits(jnp.int32(0))
    assert not list((tmp_path / "programs").iterdir())


def test_without_a_folder_it_is_jax_s_own():
    assert use(None) == use(None) == ([0.0, 2.0, 4.0], 1)
    assert isinstance(KeptPrograms(None).jit(Doubled().double), type(jax.jit(Doubled().double)))


def test_arguments_are_donated_by_loaded_programs(folder):
    for _ in range(2):
        program = KeptPrograms(folder).jit(lambda x: x + 1, name="add", donate_argnums=0)
        x = jax.device_put(jnp.ones(4))
        assert program(x).tolist() == [2.0] * 4
        assert x.is_deleted()


@pytest.mark.parametrize("changes", [{}, {"algorithm.preset": "ppo", "train.minibatches": 2}])
def test_loaded_updates_have_the_same_bits(
    folder, changes, model_config, make_config, params, make_groups, monkeypatch
):
    options = dataclasses.replace(TrainOptions.of(make_config(**changes)), image_dir="one")

    def train(**how):
        trainer = JaxUpdate(model_config, options, source=lambda _: params, **how)
        state = trainer.init(params)
        for seed in range(2):
            state, metrics = trainer.update(state, make_groups(seed=seed))
        return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)], dict(metrics)

    compiled = train(programs=folder)
    assert train() == compiled
    options = dataclasses.replace(options, image_dir="another", seed=1)  # are in no program
    monkeypatch.setattr(jax.stages.Traced, "lower", None)
    assert train(programs=folder) == compiled


def test_a_module_that_is_imported_meanwhile_ends_nothing(monkeypatch):
    """A collection of garbage let another thread import while the modules were listed."""
    for number in range(5000):  # more than the tuples that Python keeps
        monkeypatch.setitem(sys.modules, f"many{number}", sys)

    def collected(phase, info):
        if phase == "start" and sys.modules.pop("late", None) is None:
            sys.modules["late"] = sys

    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.callbacks.append(collected)
    gc.set_threshold(1)
    try:
        assert not kept_programs._patched()
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(collected)
        gc.unfreeze()
        sys.modules.pop("late", None)
