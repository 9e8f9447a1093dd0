"""The zygote, a warm interpreter that runs a Sandbox's programs, one per socket.

For each socket the zygote forks a keeper. The keeper reads the request, forks the program, ends it
at its limits or if the caller disconnects, and answers.
"""

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import site
import socket
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Mapping
from typing import Any, NoReturn

from rlx.sandbox.layers import Layers

_FILES, _ERRORS = 1024, 4096  # upper bound of descriptors; bytes of standard error kept
_CPU_SLACK = 0.2  # seconds; the kernel counts differently


def main(number: str, level: str, preload: str) -> None:
    """Serve calls until the other end of socket `number` closes."""
    # Programs do not need rlx; an installed one is where all other packages are.
    if (home := os.environ.pop("PYTHONPATH")) not in site.getsitepackages():
        sys.path.remove(home)
    layers: Layers | OSError
    try:
        layers = Layers(level)
    except OSError as error:
        layers = error
    for name in filter(None, preload.split(",")):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers are not waited for
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=int(number)) as control:
        while descriptors := socket.recv_fds(control, 16, 1)[1]:
            with socket.socket(fileno=descriptors[0]) as call:
                if os.fork() == 0:
                    control.close()
                    _keep(call, layers)


def _keep(call: socket.socket, layers: Layers | OSError) -> NoReturn:
    answer: dict[str, Any] = {"status": "lost", "text": "", "error": "", "seconds": 0.0}
    try:
        with call.makefile("rb") as stream:
            request = json.load(stream)
        if isinstance(layers, OSError):
            raise layers
        answer = _Keeper(call, layers, **request).answer()
    except OSError as error:  # out of processes or memory
        answer["error"] = str(error.strerror)
    finally:
        with contextlib.suppress(OSError):
            call.sendall(json.dumps(answer).encode())
        os._exit(0)


class _Output:
    """The first and last bytes of a stream, at most `most`."""

    def __init__(self, most: int):
        self._half, self._most, self._kept, self.total = most // 2, most, bytearray(), 0

    def add(self, data: bytes) -> None:
        self._kept += data
        self.total += len(data)
        del self._kept[self._half : self._half + max(0, len(self._kept) - self._most)]

    def text(self) -> str:
        cut = self.total - len(self._kept)
        mark = f"\n[{cut} bytes cut]\n".encode() if cut else b""
        return (self._kept[: self._half] + mark + self._kept[self._half :]).decode(errors="replace")


class _Keeper:
    """Runs the program of one call and ends it at its limits."""

    def __init__(self, call: socket.socket, layers: Layers, code: str, limits: Mapping[str, Any]):
        self._call, self._layers, self._code, self._limits = call, layers, code, limits
        self._out, self._errors = _Output(limits["output_bytes"]), _Output(_ERRORS)

    def answer(self) -> dict[str, Any]:
        """Run the program to its end; return the fields of its Outcome."""
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        out, errors = os.pipe(), os.pipe()
        directory = self._layers.enter(self._limits)
        try:
            start = time.monotonic()
            if (child := os.fork()) == 0:
                self._program(directory, out[1], errors[1])
            os.close(out[1])
            os.close(errors[1])
            streams = {out[0]: self._out, errors[0]: self._errors}
            cause = self._watch(child, streams, start + self._limits["wall_seconds"])
            code, cpu = _end_all(child)
            seconds = time.monotonic() - start
            for descriptor, stream in streams.items():
                while data := os.read(descriptor, 1 << 16):
                    stream.add(data)
        finally:
            self._layers.leave(directory)
        status, error = self._result(cause, code, cpu)
        return {"status": status, "text": self._out.text(), "error": error, "seconds": seconds}

    def _watch(self, child: int, streams: dict[int, _Output], until: float) -> str:
        """Read the program's output; return the reason to end it, or "" when it has ended."""
        poll, end = select.poll(), os.pidfd_open(child)
        for descriptor in (end, *streams):
            poll.register(descriptor, select.POLLIN)
        poll.register(self._call, 0)  # reports that the caller hung up
        while (left := until - time.monotonic()) > 0:
            for descriptor, _ in poll.poll(left * 1000):
                if descriptor not in streams:
                    return "" if descriptor == end else "gone"
                if data := os.read(descriptor, 1 << 16):
                    streams[descriptor].add(data)
                else:
                    poll.unregister(descriptor)
            if sum(s.total for s in streams.values()) > self._limits["output_mb"] << 20:
                return "output"
        return "timeout"

    def _result(self, cause: str, code: int, cpu: float) -> tuple[str, str]:
        """Return status and error of the Outcome."""
        limits, words = self._limits, self._errors.text().strip().rpartition("\n")[2]
        if cause:
            most = {"timeout": f"{limits['wall_seconds']:g} s", "output": "it printed too much"}
            return cause, f"ended: {most.get(cause, 'the caller is gone')}"
        if code == -signal.SIGKILL and cpu > limits["cpu_seconds"] - _CPU_SLACK:
            return "cpu", f"ended: {limits['cpu_seconds']:g} s of CPU"
        if code < 0:
            names = {each.value: each.name for each in signal.Signals}  # few real-time ones
            return "error", f"ended by {names.get(-code, f'signal {-code}')}"
        kind = "memory" if words.startswith("MemoryError") else "error"
        return (kind, words or f"exit status {code}") if code else ("ok", "")

    def _program(self, directory: str, out: int, errors: int) -> NoReturn:
        """Confine this process, run the code in it as Python runs a program, and exit."""
        status, module = 1, types.ModuleType("__main__")
        try:
            os.setsid()
            for number, end in enumerate((os.open(os.devnull, os.O_RDONLY), out, errors)):
                os.dup2(end, number)
            os.environ.update(HOME=directory, TMPDIR=directory)
            tempfile.tempdir = None
            os.chdir(directory)
            self._layers.confine(self._limits, directory)
            os.closerange(3, _FILES)
            sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
            if "numpy.random" in sys.modules:  # unlike `random`, it does not reseed after a fork
                sys.modules["numpy.random"].seed()
            sys.modules["__main__"], sys.argv = module, [""]
            exec(compile(self._code, "<code>", "exec"), module.__dict__)
            status = 0
        except SystemExit as error:
            if isinstance(error.code, str):
                print(error.code, file=sys.stderr)
            status = error.code & 0xFF if isinstance(error.code, int) else error.code is not None
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(BaseException):
                threading._shutdown()  # type: ignore[attr-defined]  # wait for threads
                sys.stdout.flush()
            os._exit(status)


def _end_all(child: int) -> tuple[int, float]:
    """Kill the program and all it started; return its exit code and CPU seconds."""
    os.kill(child, signal.SIGKILL)  # before waiting: its id is not reused
    _, status, usage = os.wait4(child, 0)
    with contextlib.suppress(ChildProcessError):
        while True:  # its orphans are our children
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
            with open(f"/proc/self/task/{os.getpid()}/children") as children:
                for pid in children.read().split():
                    os.kill(int(pid), signal.SIGKILL)
    return os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main(*sys.argv[1:])
