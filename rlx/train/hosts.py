"""The trainer's processes on many hosts: discovery, connections and failure detection.

    process 0    listens, waits for the others, sends them each call (rlx/train/conductor.py)
    the others   connect, send their identity (config, code), repeat each call

Plain TCP without JAX or torch, whose collectives would wait for a lost process forever. If a
process disconnects, falls silent, or does not begin or finish a call in time, all processes exit
and name it.
"""

import json
import math
import os
import queue
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rlx.base import UserError, explained
from rlx.cli.user_code import words
from rlx.system.host_port import bracketed, connect, split_address

# Kinds of messages.
_CALL, _BEGUN, _DONE, _STOP, _ALIVE = b"C", b"B", b"D", b"S", b"A"
_FAILED, _UNSAVED, _ENDED = b"F", b"U", b"E"
_HELLO_SECONDS, _HELLO_BYTES = 10.0, 1 << 20  # limits of the first message of a connection
_CONNECT_SECONDS = 5.0
_MOST_STRANGERS = 256  # connections that may be about to send it
_ALIKE_SECONDS = 5.0  # within which failures of two processes count as the same failure
_NEWS_SECONDS = 2.0  # within which all connections of a dead process close
_SLURM = ("SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID")
_SINGLE = "--config.cluster.processes=1"
_RANKS = ("MASTER_ADDR", "WORLD_SIZE", "RANK")  # Ray's, torchrun's


@dataclass(frozen=True)
class Cluster:
    """The place of this process among those of the run, and the limits of waiting, in seconds."""

    coordinator: str = ""  # host:port on which process 0 listens; "" for a single process
    count: int = 1  # count, index: number of processes, and this one's index from 0
    index: int = 0
    timeout: float = 60.0  # of silence, and of a call after process 0 has finished it
    join: float = 300.0  # of start-up, and on top for the first call of a kind, which may compile
    call: float = 1800.0  # of a call that process 0 has not finished either
    source: str = ""  # the environment variables that gave this, as `NAME=value, …`; "": the config

    @classmethod
    def of(
        cls,
        environ: Mapping[str, str],  # environment variables
        coordinator: str,  # host:port of process 0; "" leaves it to the environment
        processes: int,  # 0 leaves their number to the environment, 1 ignores that
        process: int,  # index of this one; −1 leaves it to the environment
        timeout_seconds: float,  # these three are the fields `timeout`, `join`, `call`
        join_seconds: float,
        call_seconds: float,
    ) -> "Cluster":
        """Return the place by config.cluster, else by Slurm, Ray or torchrun; else UserError."""
        env = ("", 1, -1, "") if processes == 1 else _by_environment(environ)
        coordinator, count = coordinator or env[0], processes or env[1]
        index = env[2] if process < 0 else process
        if count == 1 and not coordinator and index <= 0:
            return cls()
        text = f"cluster.coordinator={coordinator!r}, processes={count}, process={index}"
        port = re.fullmatch(r".+:(\d{1,5})", coordinator)
        if not port or int(port[1]) >= 1 << 16 or count < 2 or index < 0:
            raise UserError(
                f"{text}: wanted host:port of process 0, 2 processes or more, and a number for "
                "each; give every process all three keys of config.cluster, or start it by srun"
            )
        if index >= count:
            raise UserError(f"{text}: processes are numbered from 0 to {count - 1}")
        source = "" if processes else env[3]
        return cls(coordinator, count, index, timeout_seconds, join_seconds, call_seconds, source)

    @staticmethod
    def is_one_of_several(environ: Mapping[str, str]) -> bool:
        """Return whether Slurm, Ray or torchrun started this process as one of several."""
        return _by_environment(environ)[1] > 1

    def __str__(self) -> str:
        return f"process {self.index} of {self.count} on {socket.gethostname()}, pid {os.getpid()}"


def _by_environment(environ: Mapping[str, str]) -> tuple[str, int, int, str]:
    """Return coordinator, count, index, source by the environment, else ("", 1, −1, "")."""

    def number(name: str, unset: str = "") -> int:
        text = environ.get(name) or unset
        if not re.fullmatch("[0-9]+", text):
            raise UserError(
                f"{name}={text!r} is no number, and Slurm's or torchrun's variables name several "
                f"processes; unset it, or for a single process give {_SINGLE}"
            )
        return int(text)

    for names in (_SLURM, _RANKS):
        if not all(environ.get(name) for name in names):
            continue
        first, count = environ[names[0]], number(names[1])
        if count < 2:
            break
        index, source = number(names[2]), ", ".join(f"{name}={environ[name]}" for name in names)
        if names is _SLURM:
            first = re.sub(r"\[(\w+).*", r"\1", re.split(r",(?![^\[]*\])", first)[0])
            port = 20_000 + number("SLURM_JOB_ID", "0") % 10_000
        else:
            port = number("MASTER_PORT", "29400") + 1  # the launcher may listen on its own
        return f"{first}:{port}", count, index, source
    return "", 1, -1, ""


@dataclass
class _Call:
    """A call that some process has not made yet; times are monotonic."""

    name: str
    sent: float  # by process 0
    finished_at: float = math.inf  # by process 0 itself


@dataclass(eq=False)
class _Peer:
    """Another process, and the calls that it has made."""

    link: Connection
    name: str = "process 0"
    local: str = ""  # our address, on process 0
    last_seen: float = 0.0  # monotonic
    started: int = 0  # calls
    done: int = 0
    error: str = ""  # of the last call
    place: str = ""  # in the code, at its last heartbeat
    ended: float = 0.0  # when the last call was done; monotonic
    longest: dict[str, float] = field(default_factory=dict)  # call → seconds that it took at most
    lock: Any = field(default_factory=threading.Lock)

    @classmethod
    def at(cls, connection: socket.socket) -> "_Peer":
        connection.setblocking(True)
        return cls(Connection(connection.detach()))

    def send(self, kind: bytes, payload: bytes = b"") -> None:
        with self.lock:
            self.link.send_bytes(kind + payload)

    def first_message(self, seconds: float) -> tuple[bytes, Any]:
        """Return kind and JSON of the first message; OSError, EOFError, ValueError without one."""
        if not self.link.poll(seconds):
            raise TimeoutError(f"no answer in {seconds:g} s")
        cut = threading.Timer(seconds, self.cut)  # for a peer that sends half a message
        cut.daemon = True
        cut.start()
        try:
            message = self.link.recv_bytes(_HELLO_BYTES)
        finally:
            cut.cancel()
        return message[:1], json.loads(message[1:])

    def cut(self) -> None:
        """Close the connection while another thread reads from it."""
        with suppress(OSError), socket.socket(fileno=os.dup(self.link.fileno())) as copy:
            copy.shutdown(socket.SHUT_RDWR)


def _end_process(text: str) -> None:
    print(f"error: {text}", file=sys.stderr, flush=True)
    os._exit(2)


class Hosts:
    """The connections of one process to the others; made by `join`."""

    def __init__(
        self,
        cluster: Cluster,
        peers: list[_Peer],  # on process 0 all others, on the others process 0
        # host:port of the trainer's own library; on process 0 one to listen at, which others reach.
        service: str = "",
        end: Callable[[str], None] = _end_process,  # gets a line when another process is lost
    ):
        self.index, self.count, self.service = cluster.index, cluster.count, service
        self.on_stop: Callable[[], None] = lambda: None  # called on process 0 to end the run
        # Called with (name, call, error) when another process could not write its part.
        self.on_unsaved: Callable[[str, int, str], None] = lambda name, call, error: None
        self.sent = 0  # calls that process 0 has sent, or that this one has received
        self._peers, self._end, self.cluster = peers, end, cluster
        self._calls: queue.Queue[bytes] = queue.Queue()
        self._open: dict[int, _Call] = {}
        self._failed, self._news = set[int](), threading.Condition()
        self._closing, self._ending = threading.Event(), threading.Lock()
        self._ended = threading.Event()
        self._sign = _ALIVE
        self._caller = 0  # the thread that makes the calls
        for peer in peers:
            peer.last_seen = time.monotonic()
            threading.Thread(target=self._listen, args=(peer,), daemon=True).start()
        if peers:
            threading.Thread(target=self._watch, daemon=True).start()

    def send(self, message: bytes, name: str = "") -> None:
        """Send a call from process 0 to all others."""
        self.sent, self._caller = self.sent + 1, threading.get_ident()
        self._open[self.sent] = call = _Call(name, time.monotonic())
        self._send_all(_CALL, message)
        call.sent = time.monotonic()  # a batch takes a while

    def finished(self) -> None:
        """Note that process 0 has finished the last call itself."""
        with self._news:
            if call := self._open.get(self.sent):
                call.finished_at = time.monotonic()

    def receive(self) -> bytes:
        """Return process 0's next call; waits for it."""
        self._caller = threading.get_ident()
        message = self._calls.get()
        self.sent += 1
        with suppress(OSError):  # process 0 may have exited after its last call
            self._peers[0].send(_BEGUN)
        return message

    def done(self, error: str = "") -> None:
        """Report the result of the last call to process 0: its error, or "" for success."""
        self._send_all(_DONE, error.encode())

    def unsaved(self, call: int, error: str) -> None:
        """Report to process 0 that this process could not write the save begun by `call`."""
        self._send_all(_UNSAVED, json.dumps([call, error]).encode())

    def failed(self) -> None:
        """Note a local failure of the last call; wait briefly in case a lost process caused it."""
        self._failed.add(self.sent)
        if self._closing.wait(_NEWS_SECONDS):
            self._ended.wait(_NEWS_SECONDS)

    def outcome(self) -> str:
        """Wait until all have made the last call; return the processes it failed on and why."""
        with self._news:
            self._news.wait_for(lambda: all(peer.done == self.sent for peer in self._peers))
        return "; ".join(f"{peer.name}: {peer.error}" for peer in self._peers if peer.error)

    def stop(self) -> None:
        """Ask process 0 to end the run, see `on_stop`; safe in a signal handler."""
        self._sign = _STOP  # the heartbeat thread sends it: the interrupted one may be sending

    def close(self, error: str = "") -> None:
        """Leave the run; with an `error`, end the other processes too, which print it."""
        self._closing.set()
        self._send_all(_FAILED if error else _ENDED, error.encode())

    def _send_all(self, kind: bytes, payload: bytes = b"") -> None:
        for peer in self._peers:
            try:
                peer.send(kind, payload)
            except OSError as error:
                self._lose(f"{peer.name} is lost: {error.strerror or error}")

    def _listen(self, peer: _Peer) -> None:
        take = {
            _CALL: lambda payload: self._calls.put(payload),
            _BEGUN: lambda payload: setattr(peer, "started", peer.started + 1),
            _DONE: lambda payload: self._end_call(peer, payload.decode()),
            _STOP: lambda payload: self.on_stop(),
            _ALIVE: lambda payload: setattr(peer, "place", payload.decode()),
            _UNSAVED: lambda payload: self.on_unsaved(peer.name, *json.loads(payload)),
            _ENDED: lambda payload: self._closing.set(),  # all its calls are in the queue
            _FAILED: lambda payload: self._lose(f"{peer.name} ended: {payload.decode()}"),
        }
        try:
            while True:  # until the peer closes, so that it can read everything that was sent
                message = peer.link.recv_bytes()
                peer.last_seen = time.monotonic()
                take[message[:1]](message[1:])
        except (OSError, EOFError) as error:
            self._lose(f"{peer.name} is lost: {str(error) or 'its connection has closed'}")

    def _end_call(self, peer: _Peer, error: str) -> None:
        """Record that a peer has made its next call; end the run if only that peer failed in it."""
        now = time.monotonic()
        with self._news:
            peer.done, peer.error = peer.done + 1, error
            call = self._open[peer.done]
            seconds = now - max(call.sent, peer.ended)
            peer.ended = now
            peer.longest[call.name] = max(seconds, peer.longest.get(call.name, 0.0))
            if all(other.done >= peer.done for other in self._peers):
                del self._open[peer.done]
            self._news.notify_all()
        if error:
            timer = threading.Timer(_ALIKE_SECONDS, self._unless_alike, (peer, peer.done, error))
            timer.daemon = True
            timer.start()

    def _unless_alike(self, peer: _Peer, call: int, error: str) -> None:
        if call not in self._failed:
            self._lose(f"{peer.name} failed: {error}")

    def _watch(self) -> None:
        """Send heartbeats; end the run when another process is silent or hangs."""
        timeout = self.cluster.timeout
        while not self._closing.wait(min(1.0, timeout / 4)):
            for peer in self._peers:
                if (silent := time.monotonic() - peer.last_seen) > timeout:
                    self._lose(f"{peer.name} is lost: no sign of life for {silent:.0f} s")
                elif text := self._hangs(peer):
                    self._lose(text)
            sign = (self._sign, self._place().encode())
            try:
                threading.Thread(target=self._send_all, args=sign, daemon=True).start()
            except RuntimeError:
                if threading.main_thread().is_alive():
                    raise
                return  # the interpreter is ending

    def _place(self) -> str:
        """Return the innermost frames of the call, at most three: `file.py:12 function > …`."""
        frame, frames = sys._current_frames().get(self._caller), list[str]()
        while frame and len(frames) < 3:
            name = Path(frame.f_code.co_filename).name
            if name == "conductor.py":
                break
            frames.insert(0, f"{name}:{frame.f_lineno} {frame.f_code.co_name}")
            frame = frame.f_back
        return " > ".join(frames)

    def _hangs(self, peer: _Peer) -> str:
        """Return the message about a process that is stuck in a call; "" while it is in time."""
        # After process 0 has finished the call, another may still compile, for as long as its
        # longest such call, or `join` for the first. Before, process 0 may wait for it.
        limits, here = self.cluster, ""
        with self._news:
            if not (call := self._open.get(peer.done + 1)):
                return ""
            longest, key = peer.longest.get(call.name), "timeout_seconds"
            since, inside = max(call.sent, peer.ended), peer.started > peer.done
            if not inside:
                limit = limits.timeout + (0.0 if peer.started else limits.join)
            elif call.finished_at < math.inf:
                since = max(call.finished_at, peer.ended)
                limit = limits.timeout + (limits.join if longest is None else longest)
            else:
                limit, key = max(limits.call, 2 * (longest or 0.0)), "call_seconds"
                here = self._place()
        if (late := time.monotonic() - since) < limit:
            return ""
        hung, where = [peer], ""
        if here:  # those that wait for the one that hangs are where process 0 is
            late_ones = [other for other in self._peers if other.done == peer.done]
            hung = [other for other in late_ones if other.place != here] or late_ones
            where = f" (at {', at '.join(p.place for p in hung)}; process 0, in it too, at {here})"
        who, what = ", ".join(p.name for p in hung), "finished" if inside else "begun"
        return (
            f"{who} hangs: it has not {what} the call {call.name!r} in {late:.0f} s{where}; raise "
            f"cluster.{key} if it was at work"
        )

    def _lose(self, text: str) -> None:
        """End all processes because one is lost."""
        if self._closing.is_set() or not self._ending.acquire(blocking=False):
            return  # already ending
        self._closing.set()
        tell = threading.Thread(target=self._send_all, args=(_FAILED, text.encode()), daemon=True)
        tell.start()
        tell.join(1.0)  # one that hangs reads nothing
        self._end(f"{text}; run the same command again to resume from the last checkpoint")
        self._ended.set()


def join(cluster: Cluster, identity: Mapping[str, Any], end: Any = _end_process) -> Hosts:
    """Connect to the run's other processes, if there are any.

    UserError, on all of them, if one does not connect in time or belongs to another run. Everything
    in `identity` must be equal on all of them, as JSON: the config, the code.
    """
    if cluster.count == 1:
        return Hosts(cluster, [])
    role = _connect if cluster.index else _accept
    identity = {**identity, "processes": cluster.count}
    peers, service = role(cluster, {name: json.dumps(identity[name]) for name in identity})
    return Hosts(cluster, peers, service, end)


def _accept(cluster: Cluster, identity: Mapping[str, str]) -> tuple[list[_Peer], str]:
    """Wait for all others on process 0; refuse all of them if one does not fit."""
    deadline, peers = time.monotonic() + cluster.join, dict[int, _Peer]()
    host, port = split_address(cluster.coordinator)
    bind = host if host in ("localhost", "127.0.0.1", "::1") else ""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    problem = f"cannot listen on cluster.coordinator={cluster.coordinator}"
    with explained(problem, "give the host of process 0 and a port of it that is free"):
        listener = socket.create_server((bind, int(port)), family=family, backlog=_MOST_STRANGERS)
    hint = f"for a single process give {_SINGLE} ({cluster.source})" if cluster.source else ""
    print(
        f"waiting up to {cluster.join:g} s for the other {cluster.count - 1} processes at "
        f"{cluster.coordinator}{hint and '; '}{hint}", file=sys.stderr, flush=True,
    )  # fmt: skip
    hellos: queue.SimpleQueue[tuple[_Peer, bytes, Any]] = queue.SimpleQueue()
    threading.Thread(target=_read_hellos, args=(listener, hellos), daemon=True).start()
    try:
        while len(peers) < cluster.count - 1:
            try:
                peer, kind, hello = hellos.get(timeout=max(1e-3, deadline - time.monotonic()))
            except queue.Empty:
                late = ", ".join(str(n) for n in range(1, cluster.count) if n not in peers)
                how = "start each with the same command and its own cluster.process"
                _refuse(peers, f"process {late} of {cluster.count} did not come to "
                        f"{cluster.coordinator} in {cluster.join:g} s; {hint or how}")  # fmt: skip
            with suppress(ValueError, KeyError, TypeError):  # not a process of rlx
                _admit(peer, kind, hello, identity, peers)
    finally:
        with listener, suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
    with socket.create_server((bind, 0), family=family) as free:
        port = free.getsockname()[1]
    for peer in peers.values():
        reply = {"service": bracketed(host, port), "name": str(cluster)}
        peer.send(_CALL, json.dumps(reply).encode())
    reached = {peer.local for peer in peers.values()}  # several, if they know us by several names
    here = reached.pop() if len(reached) == 1 else "::" if ":" in host else "0.0.0.0"
    return [peers[index] for index in sorted(peers)], bracketed(here, port)


def _read_hellos(listener: socket.socket, hellos: queue.SimpleQueue) -> None:
    """Put the first message of each connection into `hellos`; silent ones block no others."""
    free = threading.Semaphore(_MOST_STRANGERS)

    def read(peer: _Peer) -> None:
        with suppress(OSError, EOFError, ValueError):
            hellos.put((peer, *peer.first_message(_HELLO_SECONDS)))
        free.release()

    with suppress(OSError):  # until it is shut down
        while free.acquire():
            connection, _ = listener.accept()
            local, *_ = connection.getsockname()
            peer = _Peer.at(connection)
            peer.local = local
            threading.Thread(target=read, args=(peer,), daemon=True).start()


def _admit(
    peer: _Peer, kind: bytes, hello: Any, identity: Mapping[str, str], peers: dict[int, _Peer]
) -> None:
    """Add a connected process to `peers`; refuse all if it belongs to another run."""
    if kind == _FAILED:
        _refuse(peers, str(hello))
    index, peer.name, remote = int(hello["index"]), str(hello["name"]), dict(hello["identity"])
    wrong = [
        f"{name}: {remote.get(name)} there, {identity.get(name)} on process 0"
        for name in sorted({*identity, *remote})
        if identity.get(name) != remote.get(name)
    ]
    if index in peers:
        wrong.insert(0, f"cluster.process={index}, as {peers[index].name} has")
    peers[-1 if wrong else index] = peer
    if wrong:
        more = f" (and {len(wrong) - 1} more)" * (len(wrong) > 1)
        _refuse(peers, f"{peer.name} belongs to another run: {wrong[0]}{more}; start each process "
                "with the same code and flags, except cluster.process")  # fmt: skip


def _refuse(peers: Mapping[int, _Peer], why: str) -> None:
    """Raise UserError here and on the connected processes."""
    for peer in peers.values():
        with suppress(OSError):
            peer.send(_FAILED, json.dumps(why).encode())
    raise UserError(why)


def report_end(coordinator: str, why: str, done: threading.Event) -> None:
    """Report to a process 0 that still waits for others that one has ended; retry until `done`."""
    while not done.wait(0.1):
        with suppress(OSError):
            peer = _Peer.at(connect(coordinator, _CONNECT_SECONDS))
            peer.send(_FAILED, json.dumps(why).encode())
            done.wait(_HELLO_SECONDS)


def _connect(cluster: Cluster, identity: Mapping[str, str]) -> tuple[list[_Peer], str]:
    """Connect to process 0, which may begin to listen later."""
    deadline, refused = time.monotonic() + cluster.join, ""
    hello = {"index": cluster.index, "name": str(cluster), "identity": identity}
    while time.monotonic() < deadline:
        try:
            peer = _Peer.at(connect(cluster.coordinator, _CONNECT_SECONDS))
            peer.send(_CALL, json.dumps(hello).encode())
            kind, answer = peer.first_message(cluster.join + _HELLO_SECONDS)  # once all have come
        except (OSError, EOFError, ValueError) as error:
            refused = getattr(error, "strerror", "") or words(error)
            time.sleep(min(0.5, cluster.join / 10))
            continue
        if kind == _FAILED:
            raise UserError(answer)
        peer.name = answer["name"]
        return [peer], relay(answer["service"])
    raise UserError(
        f"no process 0 at cluster.coordinator={cluster.coordinator} within {cluster.join:g} s "
        f"({refused}); start it there, with cluster.process=0"
    )


def relay(target: str) -> str:
    """Forward a loopback port to `target`, host:port; return its address."""
    # A connection that `target` closes stays open on this side, because JAX's client would abort
    # with a stack trace when process 0 is gone.
    listener = socket.create_server(("127.0.0.1", 0))

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)

    def serve() -> None:
        while True:
            near, _ = listener.accept()
            try:
                far = connect(target, _CONNECT_SECONDS)
            except OSError:  # not listening yet: the client tries again
                near.close()
                continue
            far.settimeout(None)
            for pair in ((near, far), (far, near)):
                threading.Thread(target=pump, args=pair, daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    return f"127.0.0.1:{listener.getsockname()[1]}"
