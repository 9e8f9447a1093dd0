"""The warm interpreter that a Sandbox forks its programs from, and what runs around each.

The zygote imports the preloaded modules once and forks a keeper for each socket that it is handed.
The keeper reads the request, forks the program, cuts its output while it reads it, ends it at its
limits or when the caller is gone, and answers. It imports the standard library alone.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Mapping
from typing import Any, NoReturn

from rlx.sandbox import layers

_SUBREAPER = 36  # of prctl
_FILES = 1024  # descriptors of the zygote
_ERRORS = 4096  # bytes of standard error that are kept
_CPU_SLACK = 0.2  # seconds: the kernel counts its own way


def main(number: str, options: str) -> None:
    """Serve calls until the other end of socket `number` closes."""
    asked = json.loads(options)
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (_FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    )
    for name in asked["preload"]:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    with socket.socket(fileno=int(number)) as control:
        control.send(json.dumps({"level": "none", "notes": {}}).encode())
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a keeper
        gc.collect()
        gc.freeze()
        while True:
            _, descriptors, _, _ = socket.recv_fds(control, 16, 1)
            if not descriptors:
                return
            if os.fork() == 0:
                _forked(control, socket.socket(fileno=descriptors[0]))
            os.close(descriptors[0])


def _forked(control: socket.socket, call: socket.socket) -> NoReturn:
    try:
        control.close()
        if request := _request(call):
            call.sendall(json.dumps(Keeper(call, **json.loads(request)).answer()).encode())
    except OSError as error:  # the caller is gone, or the machine has no more to give
        print(f"sandbox: {error}", file=sys.stderr, flush=True)
    finally:
        os._exit(0)


def _request(call: socket.socket) -> bytes:
    """Return what the caller asks; empty where it is gone."""
    with call.makefile("rb") as stream:
        length = int.from_bytes(stream.read(8))
        request = stream.read(length)
        return request if len(request) == length else b""


class Output:
    """The first and the last bytes of a stream, at most `most`."""

    def __init__(self, most: int):
        self._half, self._head, self._tail, self.total = most // 2, b"", b"", 0

    def add(self, data: bytes) -> None:
        """Take what was read."""
        self.total += len(data)
        room = self._half - len(self._head)
        self._head += data[:room]
        self._tail = (self._tail + data[room:])[-self._half :] if self._half else b""

    def text(self) -> str:
        """Return what is kept; between the halves, how much is not."""
        cut = self.total - len(self._head) - len(self._tail)
        mark = f"\n[{cut} bytes cut]\n".encode() if cut else b""
        return (self._head + mark + self._tail).decode(errors="replace")


class Keeper:
    """One call: its program, and what ends it."""

    def __init__(self, call: socket.socket, code: str, limits: Mapping[str, Any]):
        self._call, self._code, self._limits = call, code, limits
        self._out, self._errors = Output(limits["output_bytes"]), Output(_ERRORS)

    def answer(self) -> dict[str, Any]:
        """Run the program to its end; return the fields of its Outcome."""
        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
        wake, woken = os.pipe()
        os.set_blocking(woken, False)
        signal.set_wakeup_fd(woken)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        (out, out_end), (errors, errors_end) = os.pipe(), os.pipe()
        directory = tempfile.mkdtemp(prefix="rlx-sandbox-")
        try:
            begun = time.monotonic()
            self._child = os.fork()
            if self._child == 0:
                _program(self._code, self._limits, directory, out_end, errors_end)
            os.close(out_end)
            os.close(errors_end)
            streams = {out: self._out, errors: self._errors}
            ended = self._watch(wake, streams, begun + self._limits["wall_seconds"])
            status, cpu = self._end_all()
            seconds = time.monotonic() - begun
            for descriptor, stream in streams.items():
                while data := os.read(descriptor, 1 << 16):
                    stream.add(data)
        finally:
            _remove(directory)
        words = self._errors.text().strip().rpartition("\n")[2]
        return self._judged(ended, status, cpu, words) | {
            "text": self._out.text(), "seconds": seconds,
        }  # fmt: skip

    def _watch(self, wake: int, streams: dict[int, Output], until: float) -> str:
        """Read what the program prints; return what must end it, or "" when it has ended."""
        poll = select.poll()
        for descriptor in (wake, *streams):
            poll.register(descriptor, select.POLLIN)
        poll.register(self._call, select.POLLRDHUP)
        while (left := until - time.monotonic()) > 0:
            for descriptor, _ in poll.poll(left * 1000):
                if descriptor == self._call.fileno():
                    return "gone"
                data = os.read(descriptor, 1 << 16)
                if descriptor == wake:
                    if os.waitid(os.P_PID, self._child, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                        return ""
                elif data:
                    streams[descriptor].add(data)
                else:
                    poll.unregister(descriptor)
            if sum(s.total for s in streams.values()) > self._limits["output_mb"] << 20:
                return "output"
        return "timeout"

    def _end_all(self) -> tuple[int, float]:
        """Kill the program and all it started; return its wait status and CPU seconds."""
        os.kill(self._child, signal.SIGKILL)  # which it has not been waited for: the id is its own
        _, status, usage = os.wait4(self._child, 0)
        with contextlib.suppress(ChildProcessError):
            while True:  # what it left is ours, and so are their children once they die
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
                with open(f"/proc/self/task/{os.getpid()}/children") as children:
                    for pid in children.read().split():
                        os.kill(int(pid), signal.SIGKILL)
        return status, usage.ru_utime + usage.ru_stime

    def _judged(self, ended: str, status: int, cpu: float, words: str) -> dict[str, str]:
        """Return status and error of the Outcome."""
        limits, code = self._limits, os.waitstatus_to_exitcode(status)
        if ended == "timeout":
            return {"status": "timeout", "error": f"ended after {limits['wall_seconds']:g} s"}
        if ended == "output":
            return {"status": "output", "error": f"ended: it printed {limits['output_mb']} MiB"}
        if ended or code == 0:
            return {"status": "ok", "error": ""}
        if code == -signal.SIGKILL and cpu > limits["cpu_seconds"] - _CPU_SLACK:
            return {"status": "cpu", "error": f"ended after {limits['cpu_seconds']:g} s of CPU"}
        if words.startswith("MemoryError"):
            return {"status": "memory", "error": words}
        if code < 0:
            return {"status": "error", "error": f"ended by {signal.Signals(-code).name}"}
        return {"status": "error", "error": words or f"exit status {code}"}


def _program(
    code: str, limits: Mapping[str, Any], directory: str, out: int, errors: int
) -> NoReturn:
    """Confine this process, then run the code in it."""
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(out, 1)
        os.dup2(errors, 2)
        os.environ.update(HOME=directory, TMPDIR=directory)
        tempfile.tempdir = None
        os.chdir(directory)
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        os.closerange(3, _FILES)
        layers.set_limits(limits, used)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        status = _run(code)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
        with contextlib.suppress(BaseException):
            sys.stderr.flush()
        os._exit(status)


def _run(code: str) -> int:
    """Run `code` as Python runs a program; return its exit status."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"], sys.argv = module, [""]
    if "numpy.random" in sys.modules:  # which does not know of forks, as `random` does
        sys.modules["numpy.random"].seed()
    status = 0
    try:
        exec(compile(code, "<code>", "exec"), module.__dict__)
    except SystemExit as error:
        if error.code is not None and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
        status = error.code & 0xFF if isinstance(error.code, int) else int(error.code is not None)
    except BaseException as error:
        traceback.print_exception(
            error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)
        )
        status = 1
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    return status


def _remove(directory: str) -> None:
    """Remove a directory whatever its owner has done to it."""
    try:
        os.chmod(directory, 0o700)
        shutil.rmtree(directory)
    except (OSError, RecursionError):  # of modes without rights, or of a thousand levels
        for command in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
            subprocess.run([*command, "--", directory], check=False)
