"""Location and options of JAX's persistent compilation cache. No JAX here.

Compiling takes seconds, loading a fraction of one. There is one directory per processor and jaxlib:
code for a newer processor must not run on an older one.
"""

import atexit
import hashlib
import importlib.util
import json
import os
import platform
import time
import zlib
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

_INDEX = "checksums.json"
_DAY = 86_400.0  # seconds


def directory() -> str | None:
    """Return the cache directory, created if need be; None where none can be written."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = base / "rlx" / f"xla-{_machine()}"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return str(path) if os.access(path, os.W_OK) else None


def options() -> dict[str, str | int | float]:
    """Return the jax.config values that enable the cache; {} if the user set one or none works."""
    path = directory()
    if path is None or os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return {}
    if _due(Path(path, _INDEX)):
        check()
        atexit.register(check, only_new=True)
    return {
        "jax_compilation_cache_dir": path,
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }


def check(only_new: bool = False) -> None:
    """Remove cache entries whose checksum has changed; `only_new`: record those of new ones."""
    # JAX runs whatever it loads. With zstd, which has no checksum, a flipped bit ends every start
    # by SIGSEGV. With zlib it is a warning, and the program is compiled again.
    path = Path(directory() or os.devnull)
    index, known, sums = path / _INDEX, dict[str, int](), dict[str, int]()
    with suppress(OSError, ValueError):
        known = json.loads(index.read_text())
    for entry in path.glob("*-cache"):
        with suppress(OSError):  # another process has removed it
            # With the time: another process may have written half of it when it was recorded.
            name = f"{entry.name} {entry.stat().st_mtime_ns}"
            crc = known.get(name)
            sums[name] = crc if only_new and crc is not None else zlib.crc32(entry.read_bytes())
            if crc not in (None, sums[name]):
                entry.unlink()
                del sums[name]
    with suppress(OSError):  # a full disk: it is written another time
        file = index.with_suffix(f".{os.getpid()}")
        file.write_text(json.dumps(sums))
        file.replace(index)


def _due(index: Path) -> bool:
    """Return whether to check now: at each start with zstd, which JAX prefers, else once a day."""
    if any(map(importlib.util.find_spec, ("zstandard", "compression"))):
        return True
    # A file from the future was written before the clock was set back.
    return not index.exists() or not 0 <= time.time() - index.stat().st_mtime <= _DAY


def cpu_flags() -> str:
    """Return Linux's line of the processor's instruction sets; "" without one."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return ""


def _machine() -> str:
    text = f"{platform.machine()} {platform.processor()} {cpu_flags()} {version('jaxlib')}"
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
