"""The edge every `python -m rlx.X` shares: UserError becomes one line and exit status 2."""

import os
import sys
import traceback
from collections.abc import Callable
from typing import TextIO

from rlx.base import UserError
from rlx.cli.text import plain
from rlx.doctor import failures


def say(text: object, file: TextIO | None = None) -> None:
    """Prints `text` at once, to stdout unless told otherwise; it cannot command the terminal."""
    print(plain(str(text)), file=file, flush=True)


def run(main: Callable[[], int | None], *, teardown: bool = True) -> None:
    """Calls `main` and exits with its status: 0 done, 2 a user's mistake, 130 interrupted.

    With --traceback on the command line a mistake keeps its traceback in front of its line.
    A full disk, memory or the like is told as what it is (rlx.doctor.failures). Any other exception
    is a bug of ours and keeps its traceback (status 1).

    Args:
      teardown: whether Python clears up behind itself. With torch and vLLM that takes seconds, in
        which a dead server could have been started again.
    """
    trace = "--traceback" in sys.argv
    sys.argv[:] = [argument for argument in sys.argv if argument != "--traceback"]
    try:
        status = main() or 0
    except UserError as error:
        if trace:
            say(traceback.format_exc().rstrip(), sys.stderr)
        say(f"error: {error}", sys.stderr)
        status = 2
    except KeyboardInterrupt:
        status = 130
    except BrokenPipeError:  # the reader of a pipe left, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    except Exception as error:
        known = failures.explain(error)
        say(f"error: {known}" if known else traceback.format_exc().rstrip(), sys.stderr)
        status = 2 if known else 1
    if not teardown:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
