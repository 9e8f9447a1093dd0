"""Run a command's `main`: a UserError becomes one line on stderr and exit status 2."""

import argparse
import atexit
import logging
import os
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn, TextIO

from rlx.base import UserError
from rlx.cli.text import plain
from rlx.option import options_of
from rlx.system.signals import IS_COMMAND, end_soon, interrupt

INTERRUPTED = 130  # exit status
_LAST_SECONDS = 4.0  # from the last line of a command that failed to its end


def say(text: object, file: TextIO | None = None) -> None:
    """Print `text` to stdout or `file` and flush; control characters are written out."""
    print(plain(str(text)), file=file, flush=True)


def number(least: float, kind: type = int, most: float = 1e9) -> Callable[[str], Any]:
    """Return the `type` of a flag whose number is in [least, most]."""

    def checked(text: str) -> Any:
        with suppress(ValueError):
            if least <= (value := kind(text)) <= most:
                return value
        what = "whole number" if kind is int else "number"
        raise argparse.ArgumentTypeError(f"{text} is not a {what} from {least:g} to {most:g}")

    return checked


class Parser(argparse.ArgumentParser):
    """Reads a command line; a mistake in it is one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; python -m {self.prog} --help lists the flags")

    def add_options(self, room: type, *names: str) -> None:
        """Add a flag for each option of a dataclass, or for those of `names` where some are given.

        Whoever uses the option checks its range.
        """
        for name, field in options_of(room).items():
            doc, values = field.metadata["doc"], field.metadata["values"]
            if not names or name in names:
                self.add_argument(
                    f"--{name.replace('_', '-')}", type=type(field.default), default=field.default,
                    choices=values if isinstance(values, tuple) else None, help=doc,
                )  # fmt: skip


def run(
    main: Callable[[], int | None],
    *,
    # Returns the UserError for a full disk, memory or the like (rlx.doctor.failures).
    explain: Callable[[BaseException], UserError | None] = lambda error: None,
    # Whether to wait for threads and call atexit's functions, except after a signal. With torch and
    # vLLM that takes seconds, in which a dead server could start again.
    teardown: bool = True,
) -> None:
    """Call `main` and exit with its status: 0 done, 2 a user's mistake, 130 a signal.

    With --traceback on the command line a UserError keeps its traceback in front of its line. Any
    exception that `explain` does not know is a bug of rlx and keeps its traceback (status 1).
    """
    with suppress(ValueError, OSError):  # sockets of agents, mapped files; by default 1,024
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    trace = "--traceback" in sys.argv
    if trace:  # also of what a run says in one line and survives, as of a hook that fails
        logging.getLogger("rlx").addHandler(logging.StreamHandler())
        logging.getLogger("rlx").setLevel(logging.DEBUG)
    sys.argv[:] = [argument for argument in sys.argv if argument != "--traceback"]
    token, before = IS_COMMAND.set(True), signal.signal(signal.SIGTERM, interrupt)
    try:
        status = main() or 0
    except KeyboardInterrupt:
        say("interrupted", sys.stderr)
        status, teardown = INTERRUPTED, False  # which would wait for a save under way
    except BrokenPipeError:  # the reader of a pipe left, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    except Exception as error:
        user_error = error if isinstance(error, UserError) else explain(error)
        if trace or not user_error:
            say(traceback.format_exc().rstrip(), sys.stderr)
        if user_error:
            say(f"error: {user_error}", sys.stderr)
        status = 2 if user_error else 1
    signal.signal(signal.SIGTERM, before)
    try:
        leave(status, teardown)
    finally:
        IS_COMMAND.reset(token)


def leave(status: int, teardown: bool) -> NoReturn:
    """Exit, first waiting for threads and calling atexit's functions if `teardown`."""
    if status:
        end_soon(status, _LAST_SECONDS)  # a thread or a library's atexit may not end
    # Not sys.exit: while Python ends, it cancels threads inside C++, which may abort the process.
    try:
        if teardown:
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)
