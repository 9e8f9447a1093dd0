"""Runs the file of tests that Bazel names, in one process, as `pytest FILE` does in a clone."""

import sys

import pytest

if __name__ == "__main__":
    status = pytest.main(["-p", "no:cacheprovider", *sys.argv[1:]])
    # A file may have none but slow tests, which run where they are asked for.
    sys.exit(0 if status == pytest.ExitCode.NO_TESTS_COLLECTED else status)
