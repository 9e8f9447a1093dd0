"""XLA's flags: known to the installed XLA, and never against the user's own."""

import os
import subprocess
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from rlx.launch import xla_flags

FIRST = xla_flags.FLAGS[0]
PROGRAM = "import jax, os; os.environ['XLA_FLAGS'] = {!r}; jax.devices()"


@pytest.fixture
def with_plugin(monkeypatch):
    monkeypatch.setattr(xla_flags, "find_spec", lambda name: name == "jax_cuda13_plugin")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, " ".join(xla_flags.FLAGS)),
        (
            {"JAX_PLATFORMS": "cuda,cpu", "XLA_FLAGS": "--a=1"},
            " ".join(["--a=1", *xla_flags.FLAGS]),
        ),
        ({"XLA_FLAGS": FIRST.replace("true", "false")}, None),
        ({"JAX_PLATFORMS": "cpu"}, ""),
    ],
)
def test_the_users_flags_win(with_plugin, before, after):
    environment = dict(before)
    xla_flags.add(environment)
    found = environment.get("XLA_FLAGS", "")
    if after is None:
        assert FIRST not in found
        assert found.count(FIRST.partition("=")[0]) == 1
    else:
        assert found == after


def test_without_cuda_nothing_is_set(monkeypatch):
    environment = {}
    xla_flags.add(environment)
    assert environment == {}


def parses(flags):
    """Whether XLA goes on with these flags, set after JAX was imported."""
    command = [sys.executable, "-c", PROGRAM.format(flags)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.run(command, env=environment, capture_output=True, check=False).returncode


def test_the_installed_xla_knows_every_flag():
    assert version("jaxlib").startswith(xla_flags.VERSIONS)
    assert parses(" ".join(xla_flags.FLAGS)) == 0
    assert parses(f"{FIRST} --xla_gpu_nonsense=true") != 0, "unknown flags no longer end a process"


def test_virtual_devices_of_tests_wait_for_each_other_on_a_busy_machine():
    """For longer than the 40 s after which XLA ends the process; tests/conftest.py sets it."""
    flag = "--xla_cpu_collective_call_terminate_timeout_seconds"
    assert f"{flag}=600" in os.environ["XLA_FLAGS"].split()
    assert parses(f"{flag}=600") == 0
    assert parses(f"{flag}s=600") != 0


def test_every_version_that_is_allowed_is_listed():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    [jax] = [r for r in map(Requirement, project["dependencies"]) if r.name == "jax"]
    allowed = {f"0.{minor}." for minor in range(40) if jax.specifier.contains(f"0.{minor}.99")}
    assert allowed == set(xla_flags.VERSIONS)
