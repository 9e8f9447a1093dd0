"""A release is refused until the tree, the version, the changelog and the tag agree."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import rlx

ROOT = Path(__file__).parents[1]
GIT = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org"]


@pytest.fixture
def clone(tmp_path):
    """A commit of the files that the script reads first."""
    for name in (".ci/release", "rlx/__init__.py", "CHANGELOG.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    commit(tmp_path)
    return tmp_path


def commit(clone):
    for words in (["add", "-A"], ["commit", "-qm", "all"]):
        subprocess.run([*GIT, *words], cwd=clone, check=True)


def refused(clone, version):
    command = ["bash", ".ci/release", version]
    done = subprocess.run(command, cwd=clone, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, ""), done
    return done.stderr.removeprefix("no release: ").rstrip("\n")


def test_a_release_needs_one_version_everywhere(clone):
    new = "9.8.7"
    assert "has another version; set it to 9.8.7" in refused(clone, new)
    init = clone / "rlx/__init__.py"
    init.write_text(init.read_text().replace(f'"{rlx.__version__}"', f'"{new}"'))
    assert refused(clone, new) == "the tree has changes; commit them"
    commit(clone)
    assert "has no section 9.8.7" in refused(clone, new)
    log = clone / "CHANGELOG.md"
    log.write_text(re.sub("^## .*", f"## [{new}]", log.read_text(), count=1, flags=re.MULTILINE))
    commit(clone)
    assert refused(clone, new) == "v9.8.7 is not the last commit; git tag v9.8.7"
    subprocess.run([*GIT, "tag", "v9.8.7", "HEAD~1"], cwd=clone, check=True)
    assert "v9.8.7 is not the last commit" in refused(clone, new)
    subprocess.run([*GIT, "tag", "-f", "v9.8.7"], cwd=clone, check=True)
    (clone / "dist/9.8.7").mkdir(parents=True)
    assert refused(clone, new) == f"{clone}/dist/9.8.7 exists; remove it"
