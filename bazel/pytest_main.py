"""Run the fast tests of the file that Bazel names, in one process, under pytest."""

import sys

import pytest

# Markers to leave out, also where their extras are installed.
OTHERS = ("slow", "ray", "slurm", "vllm", "witnesses", "docs")

if __name__ == "__main__":
    fast = " and ".join(f"not {marker}" for marker in OTHERS)
    status = pytest.main(["-p", "no:cacheprovider", "-m", fast, *sys.argv[1:]])
    # A file may have only slow tests or tests of these markers.
    sys.exit(0 if status == pytest.ExitCode.NO_TESTS_COLLECTED else status)
