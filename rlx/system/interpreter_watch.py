"""A program that reports a process whose interpreter is held, and kills it after a second signal.

    interpreter_watch.py PID WORKDIR LIBRARY…     stdin: a pipe from process PID

A call of C code that keeps the interpreter lock stops Python's threads and signal handlers. Python
writes a zero byte to the pipe each second. Its C signal handler writes the number of each signal
(signal.set_wakeup_fd). If zero bytes stop, faulthandler's C thread writes all stacks.
"""

import os
import re
import select
import signal
import sys
import time

_LAST_SECONDS = 5.0  # without a zero byte, after which two signals end the process


def main(pid: int, workdir: str, *libraries: str) -> None:
    """Watch until the pipe closes."""
    since, got, signals = b"", b"\0", 0  # bytes since the last zero, of the last read
    while got:
        if b"\0" in got:
            beat = time.monotonic()
        since = (since + got).rpartition(b"\0")[2]
        signals += bool({signal.SIGINT, signal.SIGTERM} & {*got})
        while not select.select([0], [], [], 1.0)[0]:
            if text := since.partition(b"Timeout (")[2]:
                since = b""
                _report(text.decode(errors="replace"), workdir, libraries)
            if signals > 1 and time.monotonic() - beat > _LAST_SECONDS:
                os.kill(pid, signal.SIGKILL)
        got = os.read(0, 1 << 16)


def _report(text: str, workdir: str, libraries: tuple[str, ...]) -> None:
    places = re.findall(r'File "(.*)", line (\d+) in (.*)', text)  # innermost first
    own = [place for place in places if not any(part in place[0] for part in libraries)]
    line = "{}:{} {} holds the interpreter, so nothing else runs".format(*(own or places)[0])
    os.makedirs(workdir, exist_ok=True)
    with open(f"{workdir}/stacks.txt", "a") as file:
        file.write(f"{time.ctime()}: {line}\n({text}")
    print(f"{line}; {workdir}/stacks.txt has the stacks of all threads", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
