"""The diffs of CONTRIBUTING.md apply to the repository as it is, and do what they say."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
COPIED = ("rlx", "rlx_torch", "tests", "configs", "docs", "pyproject.toml", "README.md")
LOSSES = [f"tests/algorithms/{name}_test.py" for name in ("losses", "presets", "docs")]
# section → what a contributor then runs, the tests that the diff brings at least
CASES = {
    "A loss": (
        ["docs/algorithms.py"],
        ["-m", "pytest", *LOSSES, "-k", "gppo or what_cannot_work or page_is_current"],
    ),
    "A family of models": (["-m", "pytest", "tests/model/decoder_test.py", "-k", "[gemma]"],),
    "A workflow": (["-m", "pytest", "tests/rollout/brevity_test.py"],),
}


def section(title):
    return re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)[1]


def diff_of(title):
    (found,) = re.findall(r"^```diff\n(.*?)^```", section(title), re.DOTALL | re.MULTILINE)
    return found


def git(directory, *arguments, **options):
    done = subprocess.run(
        ["git", *arguments], cwd=directory, capture_output=True, text=True, **options
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture
def patched(tmp_path, request):
    """A copy of the repository with the diff of a section."""
    for name in COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    git(tmp_path, "init", "-q")
    git(tmp_path, "apply", "-", input=diff_of(request.param))
    return request.param, tmp_path


def test_every_diff_is_tested():
    assert [t for t in re.findall(r"^## (.+)$", PAGE, re.MULTILINE) if "```diff" in section(t)] == [
        *CASES
    ]


@pytest.mark.parametrize("title", CASES)
def test_a_diff_applies(title):
    git(ROOT, "apply", "--check", "-", input=diff_of(title))


# Its own tests compare the family with transformers on torch.
FAMILY = pytest.param("A family of models", marks=pytest.mark.torch)


@pytest.mark.slow
@pytest.mark.parametrize("patched", ["A loss", FAMILY, "A workflow"], indirect=True)
def test_what_a_diff_brings_passes(patched):
    title, copy = patched
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    changed = re.findall(r"^\+\+\+ b/(.+)$", diff_of(title), re.MULTILINE)
    for arguments in (
        *CASES[title],
        ["-m", "ruff", "check", *changed],
        ["-m", "ruff", "format", "--check", *changed],
    ):
        done = subprocess.run(
            [sys.executable, *arguments], cwd=copy, env=environment, capture_output=True, text=True,
            timeout=600,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
