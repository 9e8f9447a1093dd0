"""How a command ends: its status, its last words, and nothing after them."""

import subprocess
import sys

import pytest

SCRIPT = """
import atexit
from rlx import command
from rlx.base import UserError

def main():
    print("working")
    {body}

atexit.register(print, "clearing up")
command.run(main, teardown={teardown})
"""

CASES = {
    "return None": (0, ""),
    "return 3": (3, ""),
    "raise UserError('got, wanted, remedy')": (2, "error: got, wanted, remedy"),
    "raise KeyboardInterrupt": (130, ""),
    "raise RuntimeError('a bug')": (1, "RuntimeError: a bug"),
}


@pytest.mark.parametrize("body", CASES)
@pytest.mark.parametrize("teardown", [True, False])
def test_a_command_ends_with_its_status_and_its_last_words(body, teardown):
    script = SCRIPT.format(body=body, teardown=teardown)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    status, error = CASES[body]
    assert done.returncode == status
    assert done.stdout.splitlines() == ["working", *["clearing up"] * teardown]
    assert (done.stderr.splitlines() or [""])[-1] == error
