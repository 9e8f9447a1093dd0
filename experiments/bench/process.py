"""Run one side of a comparison as a process, pinned to given cores."""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def environment() -> dict[str, str]:
    """Return the variables of this process for one that starts as a user's does."""
    # With it Python compiles every module at each start, which takes 3 s.
    return {name: v for name, v in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def pinned(
    arguments: Sequence[str],
    cores: Sequence[int],
    timeout: float = 1800,
    python: str = sys.executable,
) -> str:
    """Run `PYTHON ARGUMENTS` with affinity `cores`; return stdout, or raise with stderr."""
    done = subprocess.run(
        [python, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
        env={**environment(), "OMP_NUM_THREADS": str(len(cores)), "TQDM_DISABLE": "1"},
    )
    if done.returncode:
        raise SystemExit(
            f"{' '.join(arguments)} failed ({done.returncode}):\n{done.stderr[-3000:]}"
        )
    return done.stdout


def rlx_run(
    config: str,
    workdir: Path,
    cores: Sequence[int],
    *overrides: str,
    python: str = sys.executable,
) -> list[dict]:
    """Run `rlx.main` once; return the records of its metrics.jsonl."""
    command = ["-m", "rlx.main", f"--config={config}", f"--workdir={workdir}", *overrides]
    pinned(command, cores, python=python)
    with open(workdir / "metrics.jsonl") as file:
        return [json.loads(line) for line in file]


def cores_of(text: str) -> list[int]:
    """Return [0, 1] for `"0,1"`."""
    return [int(part) for part in text.split(",")]


def median_spread(values: Sequence[float]) -> str:
    """Return the median and the range of the middle half."""
    if len(values) < 4:
        return f"{statistics.median(values):.3f} [{min(values):.3f}, {max(values):.3f}]"
    low, _, high = statistics.quantiles(values, n=4)
    return f"{statistics.median(values):.3f} [{low:.3f}, {high:.3f}]"
