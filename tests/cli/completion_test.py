"""Bash completes commands and keys by the script that `rlx completion` prints."""

import subprocess
import sys

import pytest

from rlx.__main__ import COMMANDS


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["re"], {name for name in COMMANDS if name.startswith("re")}),
        (["train", "--config.checkpoint.k"], {"--config.checkpoint.keep="}),
        (["train", "--wor"], {"--workdir="}),
        (["train", "READ"], {"README.md"}),
    ],
)
def test_bash_completes_what_was_begun(words, found, tmp_path):
    (tmp_path / "README.md").touch()
    printed = subprocess.check_output([sys.executable, "-m", "rlx", "completion"], text=True)
    script = f"""{printed}
COMP_WORDS=(rlx {" ".join(words)}) COMP_CWORD={len(words)}
_rlx
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert set(done.stdout.split()) == found
