"""Compiled programs in files: a later start of the same code on the same CPU only loads them.

JAX's own cache saves compiling. Tracing and lowering, which are Python, take 0.3 to 1 s for each
program of an update, and come before that cache is asked.
"""

import hashlib
import os
import pickle
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import numpy as np
from jax.experimental import serialize_executable

import rlx
from rlx.model.compile_cache import cpu_flags
from rlx.model.ops import on_cpu
from rlx.system.jsonl import write_atomically

_DIGEST = 16  # bytes before a file's content
_TRACED = ("rlx.algorithms.", "rlx.model.", "rlx.train.")  # modules that make programs
_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "numpy")  # that make programs
_OTHERS = ("orbax", "safetensors", "tokenizers", "torch")  # that these modules import as well


class KeptPrograms:
    """The programs that one object compiles, by name and arguments.

    Args:
      folder: of files, which later processes load; None: there are none.
      about: everything that a program depends on besides rlx, its libraries and the device. Nothing
        is kept if its text shows an object's address, as of a user's function.
    """

    def __init__(self, folder: str | None, *about: Any):
        self._folder = Path(folder or "")
        versions = [sys.version, *map(version, _LIBRARIES)]
        flags = os.environ.get("XLA_FLAGS")
        self._machine = f"{versions} {cpu_flags()} {jax.devices()} {flags} {jax.config.values}"
        self._source = f"{about} {_SOURCES!r}"
        self._keeps = bool(folder) and on_cpu() and jax.device_count() == 1

    def jit(self, function: Callable, name: str = "", **options: Any) -> Any:
        """Return jax.jit(function), whose arguments are arrays, with its compiled programs kept.

        `name` tells it from other functions of its name, or from those that have none.
        """
        name += getattr(function, "__name__", "")
        jitted, programs = jax.jit(function, **options), dict[Any, Callable]()

        def call(*arguments: Any) -> Any:
            leaves, tree = jax.tree.flatten(arguments)
            shapes = tree, *map(_shape, leaves)
            if shapes not in programs:
                programs[shapes] = self._program(f"{name} {shapes}", jitted, arguments)
            return programs[shapes](*arguments)

        return call if self._keeps else jitted

    def _program(self, shapes: str, jitted: Any, arguments: tuple) -> Callable:
        if " at 0x" in shapes + self._source or _patched():
            return jitted
        link = self._file(shapes, self._source)
        with suppress(Exception):  # missing or damaged
            return _load(self._folder / _read(link).decode())
        traced = jitted.trace(*arguments)
        lowered = traced.lower()
        # Other sources and options often make the same program. Its text lacks the arguments that
        # it does not use, so that the jaxpr has to say which ones it has.
        jaxpr = re.sub("0x[0-9a-f]+", "", str(traced.jaxpr))
        file = self._file(shapes, lowered.out_tree, lowered.as_text(), jaxpr)
        with suppress(Exception):
            program = _load(file)
            _write(link, file.name.encode())
            return program
        with _events() as events:
            compiled = lowered.compile()
        # Only what JAX has compiled now, and written, is kept. One that it had in its caches, on
        # disk or in memory, may not run when it is loaded from here.
        if any(event.endswith("/cache_misses") for event in events):
            with suppress(Exception):  # a program that has no such form, a full disk
                _write(file, pickle.dumps(serialize_executable.serialize(compiled)))
                _write(link, file.name.encode())
        return compiled

    def _file(self, *about: Any) -> Path:
        digest = _digest(f"{about} {self._machine}".encode())
        return self._folder / f"{digest.hex()}-kept"


def _shape(leaf: Any) -> tuple:
    names = ("dtype", "weak_type", "sharding")
    return type(leaf).__name__, np.shape(leaf), *(getattr(leaf, name, None) for name in names)


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST).digest()


def _write(file: Path, content: bytes) -> None:
    write_atomically(file, _digest(content) + content)


def _read(file: Path) -> bytes:
    content = file.read_bytes()
    if _digest(content[_DIGEST:]) != content[:_DIGEST]:
        raise ValueError(f"{file} is damaged")
    return content[_DIGEST:]


def _load(file: Path) -> Callable:
    return serialize_executable.deserialize_and_load(*pickle.loads(_read(file)))


@contextmanager
def _events() -> Iterator[list[str]]:
    """Collect the names of what JAX reports meanwhile in this thread."""
    names, thread = list[str](), threading.get_ident()

    def note(event: str, **_: str | int) -> None:
        if threading.get_ident() == thread:
            names.append(event)

    jax.monitoring.register_event_listener(note)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_listener(note)


# When this is imported: files that change later are not the code of this process.
_SOURCES = _digest(b"".join(f.read_bytes() for f in sorted(Path(rlx.__path__[0]).rglob("*.py"))))


def _patched() -> bool:
    """Return whether a function of rlx that programs are traced from was replaced by another."""
    modules = [module for name, module in sys.modules.copy().items() if name.startswith(_TRACED)]
    origins = {str(f.__module__).partition(".")[0] for m in modules for f in _callables(m)}
    return not origins <= {"rlx", *_LIBRARIES, *_OTHERS, *sys.stdlib_module_names}


def _callables(module: ModuleType) -> Iterator[Any]:
    """Yield what can be called of a module, of its classes and of its tables."""
    for name, value in list(vars(module).items()):
        members = [value]
        if name == "__builtins__":
            continue
        if isinstance(value, type) and value.__module__ == module.__name__:
            members += vars(value).values()
        elif isinstance(value, dict):
            members += value.values()
        yield from (x for x in members if callable(x) and hasattr(x, "__module__"))
