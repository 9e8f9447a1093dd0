"""What more than one file of the run's tests uses."""

import sys

import pytest

from rlx import main
from rlx.cli import command
from rlx.doctor import failures


@pytest.fixture
def refused(monkeypatch, capsys):
    """refused(*arguments) → the one line that `python -m rlx.main` exits with, with status 2.

    In this process: a new one imports for seconds before it looks at its arguments.
    """

    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["rlx.main", *arguments])
        monkeypatch.setattr(command, "leave", lambda status, teardown: sys.exit(status))
        with pytest.raises(SystemExit) as end:
            command.run(main.main, explain=failures.explain)
        out, errors = capsys.readouterr()
        assert end.value.code == 2, out + errors
        (line,) = [line for line in (out + errors).splitlines() if line.strip()]
        assert line.startswith("error: ")
        return line

    return run
