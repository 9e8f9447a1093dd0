"""A run's environment for (bug) reports: machine, interpreter, package versions, commit.

Nothing private is recorded: no host name, no user, and only those environment variables that change
speed or devices.
"""

import contextlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from rlx.observe.jsonl import write_atomically

PACKAGES = (
    "rlx", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "transformers",
    "safetensors", "math-verify", "grpcio", "torch", "vllm",
)  # fmt: skip
VARIABLES = (
    "JAX_PLATFORMS", "XLA_FLAGS", "XLA_PYTHON_CLIENT_MEM_FRACTION", "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS", "JAX_COMPILATION_CACHE_DIR",
)  # fmt: skip
SAME = (  # facts, as dotted names, that decide a run's bits
    "platform", "processor", "trainer_cores", "devices", "servers", "variables.XLA_FLAGS",
    *(f"packages.{name}" for name in ("rlx", "jax", "jaxlib", "optax", "vllm")),
)  # fmt: skip


def describe(place: Mapping[str, Any]) -> dict[str, Any]:
    """Return the environment as a JSON-able dict, without what cannot be found out.

    Args:
      place: facts that the caller knows better; they replace or extend those found here.
    """
    description = {
        "command": " ".join(["python", *sys.orig_argv[1:]]),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "commit": _commit(),
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "packages": _packages(),
        **place,
    }
    return {name: value for name, value in description.items() if value not in ("", {})}


def write(workdir: str | os.PathLike, place: Mapping[str, Any]) -> None:
    """Write WORKDIR/environment.json."""
    text = json.dumps(describe(place), indent=2) + "\n"
    write_atomically(Path(workdir) / "environment.json", text.encode())


def _packages() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def _processor() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as file:
        for line in file:
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()


def _commit() -> str:
    """Return the commit of the checkout this package runs from, with `+` if files differ."""
    here = Path(__file__).parent
    if not _git(here, "ls-files", "--error-unmatch", Path(__file__).name):
        return ""  # installed, or inside somebody else's repository
    commit = _git(here, "rev-parse", "--short=12", "HEAD")
    return commit + ("+" if _git(here, "status", "--porcelain", "-uno") else "")


def _git(directory: Path, *arguments: str) -> str:
    command = ["git", "-C", str(directory), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
