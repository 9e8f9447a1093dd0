"""Describe a run's environment: machine, interpreter, package versions, commit.

It has no host name, no user, and only those variables that change speed or devices.
"""

import contextlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
PACKAGES = (
    "rlx", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "transformers",
    "safetensors", "math-verify", "grpcio", "torch", "vllm",
)  # fmt: skip
VARIABLES = (
    "JAX_PLATFORMS", "XLA_FLAGS", "XLA_PYTHON_CLIENT_MEM_FRACTION", "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS", "JAX_COMPILATION_CACHE_DIR",
)  # fmt: skip
SAME = (  # facts that decide a run's bits, as dotted names
    "platform", "processor", "trainer_cores", "server_cores", "compute_threads", "devices",
    "servers", "variables.XLA_FLAGS",
    *(f"packages.{name}" for name in ("rlx", "jax", "jaxlib", "optax", "torch", "vllm")),
)  # fmt: skip


def resume_command(workdir: Path) -> str:
    """Return the shell command that continues a run in `workdir`."""
    flags = {word.partition("=")[0] for word in sys.orig_argv}
    if "--config" not in flags:
        return f"rlx.run with the same config and workdir={str(workdir)!r}"
    return shlex.join([*sys.orig_argv, *[f"--workdir={workdir}"] * ("--workdir" not in flags)])


def describe(place: Mapping[str, Any]) -> dict[str, Any]:
    """Return the known facts as a JSON-able dict; those of `place` come from the caller."""
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    description = {
        "command": shlex.join(sys.orig_argv), "python": platform.python_version(),
        "platform": platform.platform(), "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "commit": _commit(), "compute_threads": _compute_threads(),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "packages": versions, **place,
    }  # fmt: skip
    return {name: value for name, value in description.items() if value not in ("", {})}


def keep(place: Path, files: Iterable[Path]) -> None:
    """Copy a user's files to `place`, with the uncommitted changes there and in rlx."""
    here = Path.cwd()
    for file in (file.absolute() for file in files if file.is_file()):
        copy = place / (file.relative_to(here) if file.is_relative_to(here) else file.name)
        with contextlib.suppress(OSError):  # a run does not end for a copy
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)
    tops = [_git(directory, "rev-parse", "--show-toplevel") for directory in (here, _HERE)]
    for top in filter(None, dict.fromkeys(tops)):
        if diff := _git(Path(top), "diff", "HEAD"):
            with contextlib.suppress(OSError):
                place.mkdir(parents=True, exist_ok=True)
                (place / f"{Path(top).name}.diff").write_text(f"{diff}\n", errors="replace")


def _compute_threads() -> int | str:
    """Return the number of XLA's threads on the CPU, which decides the order of its sums; or ""."""
    count = 0
    for task in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # it has ended
            count += task.read_text().startswith("tf_XLAEigen")
    return count or ""


def _processor() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()


def _commit() -> str:
    """Return the commit of the checkout this package runs from, with `+` if files differ."""
    if not _git(_HERE, "ls-files", "--error-unmatch", Path(__file__).name):
        return ""  # installed, or inside somebody else's repository
    commit = _git(_HERE, "rev-parse", "--short=12", "HEAD")
    return commit + ("+" if _git(_HERE, "status", "--porcelain", "-uno") else "")


def _git(directory: Path, *arguments: str) -> str:
    command = ["git", "-C", str(directory), *arguments]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.check_output(
            command, stderr=subprocess.DEVNULL, text=True, errors="replace", timeout=5
        ).rstrip("\n")
    return ""
