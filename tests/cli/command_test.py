"""How a command ends: its status, its last words, and nothing after them."""

import os
import pty
import re
import subprocess
import sys
import time

import pytest

SCRIPT = """
import atexit
from rlx.cli import command
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
    "raise KeyboardInterrupt": (130, "interrupted"),
    "from concurrent.futures import ThreadPoolExecutor as P\n    import threading\n"
    "    P().submit(threading.Event().wait); raise KeyboardInterrupt": (130, "interrupted"),
    "raise RuntimeError('a bug')": (1, "RuntimeError: a bug"),
}


@pytest.mark.parametrize("body", CASES)
@pytest.mark.parametrize("teardown", [True, False])
def test_a_command_ends_with_its_status_and_its_last_words(body, teardown):
    script = SCRIPT.format(body=body, teardown=teardown)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    status, error = CASES[body]
    assert done.returncode == status
    cleared = teardown and status != 130
    assert done.stdout.splitlines() == ["working", *["clearing up"] * cleared]
    assert (done.stderr.splitlines() or [""])[-1] == error


BLOCKS = {
    "a thread": "import threading; threading.Thread(target=threading.Event().wait).start()",
    "a pool": "from concurrent.futures import ThreadPoolExecutor as P; import threading\n"
    "    P().submit(threading.Event().wait)",
    "a library": "import threading; atexit.register(threading.Event().wait)",
}


@pytest.mark.parametrize("what", BLOCKS)
def test_a_command_that_failed_is_gone_soon_after_its_line(what):
    script = SCRIPT.format(
        body=f"{BLOCKS[what]}\n    raise UserError('got, wanted')", teardown=True
    )
    with subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE) as process:
        assert process.stderr.readline() == b"error: got, wanted\n"
        begun = time.monotonic()
        assert process.wait(60) == 2
        assert time.monotonic() - begun < 6.0


def test_sigterm_ends_a_command_with_a_line_and_its_status(tmp_path):
    script = SCRIPT.format(body="import time; time.sleep(60)", teardown=True)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-u", "-c", script], **pipes) as process:
        assert process.stdout.readline() == b"working\n"
        process.terminate()
        assert (process.wait(20), process.stderr.read()) == (130, b"interrupted\n")


INSIDE = """
import threading, time
import jax, jax.numpy as jnp
from rlx.cli import command

def main():
    f, x = jax.jit(lambda x: x @ x @ x), jnp.ones((700, 700))
    f(x).block_until_ready()
    def work():
        while True:
            f(x).block_until_ready()
    threading.Thread(target=work, daemon=True).start()
    time.sleep(0.3)

command.run(main)
"""


@pytest.mark.slow
def test_a_thread_inside_cpp_does_not_abort_the_end_of_a_command():
    """Python would cancel it while it ends: "FATAL: exception not rethrown", in two of three."""
    for _ in range(5):
        done = subprocess.run([sys.executable, "-c", INSIDE], capture_output=True, timeout=100)
        assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("asked", [True, False])
def test_a_mistake_keeps_its_traceback_where_it_is_asked_for(asked):
    script = SCRIPT.format(body="raise UserError('got, wanted')", teardown=True)
    command = [sys.executable, "-c", script, *["--traceback"] * asked]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == "error: got, wanted"
    assert ("Traceback" in done.stderr) == asked


HOSTILE = (
    "\x1b]0;stolen\x07\x1b[2Jx\x9b2J\x1bc\u202ey\rz"  # a title, twice a clear, a reset, a turn
)
SPEAKERS = {
    "user's mistake": "command.run(lambda: (_ for _ in ()).throw(UserError(TEXT)))",
    "user's exception": "command.run(lambda: (_ for _ in ()).throw(ValueError(TEXT)))",
    "no teardown": "command.run(lambda: (_ for _ in ()).throw(ValueError(TEXT)), teardown=False)",
    "failure with a remedy": "command.run(lambda: open('/proc/self/mem').seek(0) or "
    "(_ for _ in ()).throw(OSError(28, TEXT)), explain=failures.explain)",
    "result": "command.say(TEXT)",
    "progress": "from rlx.observe.progress import Progress\n"
    "with Progress(3, title=TEXT) as progress:\n    progress.message(TEXT)\n"
    "    print('panel' if progress._panel else 'lines')",
    "counting": "from rlx.observe.progress import ProgressBar\n"
    "with ProgressBar() as bar:\n    bar.show('[red]' + TEXT, 1, 2)",
    "findings": "from rlx.cli import findings\n"
    "findings.show([findings.Finding(TEXT, TEXT, 'problem', TEXT, TEXT)])",
}


def _on_a_terminal(script, term):
    """What a process writes to the terminal that it has for stdout and stderr."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": term, "COLUMNS": "200", "PYTHONUTF8": "1"}
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    said = b""
    while True:
        try:
            block = os.read(ours, 65536)
        except OSError:  # EIO: the other side is closed
            break
        if not block:
            break
        said += block
    process.wait()
    os.close(ours)
    return said.decode()


@pytest.mark.parametrize("term", ["xterm-256color", "dumb"])
@pytest.mark.parametrize("speaker", SPEAKERS)
def test_nothing_that_is_shown_commands_the_terminal(speaker, term):
    script = (
        "from rlx.base import UserError\n"
        "from rlx.cli import command\n"
        "from rlx.doctor import failures\n"
        f"TEXT = {HOSTILE!r}\n"
        f"{SPEAKERS[speaker]}"
    )
    said = _on_a_terminal(script, term)
    assert "stolen" in said
    for order in ("\x1b]", "\x07", "\x1b[2J", "\x9b", "\x1bc", "\u202e", "y\rz"):
        assert order not in said


def test_a_command_may_open_as_many_files_as_the_user_may(tmp_path):
    """A soft limit of 1,024, which is usual, is less than the connections of a run's agents."""
    code = (
        "import resource as r; most = r.getrlimit(r.RLIMIT_NOFILE)[1];"
        "r.setrlimit(r.RLIMIT_NOFILE, (200, most)); from rlx.cli import command;"
        "command.run(lambda: print(r.getrlimit(r.RLIMIT_NOFILE) == (most, most)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "True\n"


@pytest.mark.parametrize(
    "words",
    [
        "rlx.sweep seed=1,2 --random=-1", "rlx.sweep seed=1,2 --halve=-1",
        f"rlx.sweep seed=1,2 --random={10**30}", "rlx.replay run --generation=-2",
        "rlx.compare --model=m --count=-1", "rlx.compare --model=m --max-new-tokens=0",
        "rlx.compare --model=m --temperature=nan", "rlx.compare --model=m --temperature=inf",
        "rlx.cluster up --hosts=a --port=99999999", "rlx.cluster up --hosts=a --servers=-1",
        "rlx.gateway --model=m --port=65536", "rlx.gateway --model=m --idle-seconds=nan",
        "rlx.gateway --model=m --port=abc", "rlx.compare --model=m --count=1.5",
        "rlx.compare --model=m --top-p=nan",
        "rlx.compare --model=m --top-p=0", "rlx.compare --model=m --top-k=-1",
        "rlx.compare --model=m --max-delta=-1", "rlx.compare --model=m --mean-delta=nan",
        "rlx.tinker --model=m --adapters=-1", "rlx.tinker --model=m --budget=-1",
    ],
)  # fmt: skip
def test_a_number_out_of_range_is_one_line(words):
    done = subprocess.run(
        [sys.executable, "-m", *words.split()], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert re.search("is not a (whole )?number from", done.stderr), done.stderr
