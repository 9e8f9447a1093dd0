"""A small training run in real processes, disturbed again and again.

trainer (gateway, workers of rewards and agents) ─▶ proxies ─▶ servers

After each fault the campaign waits until the run has made two more steps. A trainer that ends is
started again by the same command. The gateway is part of the trainer, so it ends and stops with it.
"""

import math
import os
import random
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from experiments.chaos.proxy import Proxy
from rlx.journal import journal
from rlx.model.directory import resolve
from rlx.system.jsonl import read_last
from rlx.train import checkpoint

HERE = Path(__file__).parent
# Without torch, which transformers would import for a tokenizer: a third of the time of a start.
_RUN = (
    "import runpy, sys; sys.modules['torch'] = None; "
    "runpy.run_module({!r}, run_name='__main__', alter_sys=True)"
)
# Gives each process a /dev/shm of the run's own.
_SHARED_MEMORY = ["unshare", "--mount", "sh", "-c", 'mount --bind "$0" /dev/shm && exec "$@"']
SETTINGS = {
    "total_steps": 1_000_000, "rollout.batch_prompts": 2, "sampling.n_samples": 4,
    "sampling.max_new_tokens": 48, "rollout.max_staleness": 2, "rollout.workflow":
    f"{HERE}/mixed.py:Mixed", "rollout.max_concurrent_rollouts": 8, "fleet.slots": 8,
    "fleet.publish": "delta", "fleet.kv_on_update": "recompute", "fleet.hang_seconds": 1.0,
    "fleet.probe_seconds": 0.3, "fleet.publish_timeout_seconds": 5.0, "eval.num_questions": 32,
    "eval.every_steps": 10, "gate.enabled": False, "observe.writers": "()",
    "observe.transcripts_per_step": 64, "checkpoint.first_step": 1, "checkpoint.every_steps": 10,
    "model.compute_dtype": "float32", "optimizer.learning_rate": 1e-4,
    "rollout.request_timeout_seconds": 20.0, "train.row_buckets": "(192,)",
    "train.max_tokens_per_microbatch": 768, "journal.keep": 8 << 20,
}  # fmt: skip
VLLM = {
    "fleet.hang_seconds": 5.0, "fleet.publish_timeout_seconds": 30.0,
    "rollout.request_timeout_seconds": 60.0, "fleet.connect_seconds": 300.0,
}  # fmt: skip
LIMIT = 300.0  # seconds to recover, then the run counts as hung
_DISK = 512 << 20


def wait_until(condition: Callable[[], Any], seconds: float) -> bool:
    """Return whether `condition()` becomes true in time."""
    end = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < end:
        time.sleep(0.1)
    return bool(met)


def environment(root: Path, clock: Path | None = None) -> dict[str, str]:
    """Return the variables of a run and of its replay, with a file that shifts the wall clock."""
    home = os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    fast = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "OMP_NUM_THREADS": "1"}
    fast |= {"TORCHINDUCTOR_CACHE_DIR": f"{root}/cache"}
    if clock and (library := root / "wall_clock.so").exists():
        fast |= {"LD_PRELOAD": str(library), "WALL_CLOCK": str(clock)}
    return {**os.environ, **fast, "PYTHONPATH": home, "TMPDIR": f"{root}/tmp"}


def start_program(words: list[str], log: Path, root: Path, clock: Path) -> subprocess.Popen:
    """Start Python with these arguments, in a session of its own."""
    private = [*_SHARED_MEMORY, str(root / "shm")] if os.path.ismount(root / "shm") else []
    with open(log, "ab") as file:
        return subprocess.Popen(
            [*private, sys.executable, *words], stdout=file, stderr=file,
            env=environment(root, clock), start_new_session=True,
        )  # fmt: skip


def make_wall_clock(root: Path) -> bool:
    """Compile the library that shifts clocks; return whether there is a compiler."""
    if compiler := shutil.which("cc"):
        make = [compiler, "-shared", "-fPIC", "-O2", "-o", root / "wall_clock.so"]
        subprocess.run([*make, HERE / "wall_clock.c", "-ldl"], check=True)
    return bool(compiler)


def set_clock(clock: Path, seconds: float) -> None:
    """Shift the wall clock of the processes that have this file."""
    with open(clock, "r+b" if clock.exists() else "wb", buffering=0) as file:
        file.write(struct.pack("q", int(seconds * 1e9)))


class Server:
    """A rollout server and the proxy in front of it; `children` are its processes, if any."""

    def __init__(self, root: Path, engine: str):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._root, self._engine, self.proxy = root, engine, Proxy(self.port)
        self.clock, self.children = root / f"clock-{self.port}", set[psutil.Process]()
        set_clock(self.clock, 0.0)
        self.start()

    def start(self) -> None:
        """Start the process."""
        flags = [f"--model={resolve('rlx:arithmetic')}", f"--port={self.port}", "--slots=8",
                 "--max-model-len=192", f"--stage-dir={self._root}/stage",
                 f"--engine={self._engine}"]  # fmt: skip
        run = ["-c", _RUN.format("rlx.serve")] if self._engine == "jax" else ["-m", "rlx.serve"]
        log = self._root / f"server-{self.port}.log"
        self.process = start_program([*run, *flags], log, self._root, self.clock)

    def look(self) -> None:
        """Note the processes that it has started."""
        with suppress(psutil.Error):
            self.children.update(psutil.Process(self.process.pid).children(recursive=True))

    @property
    def ready(self) -> bool:
        """Whether it has a port."""
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0):
            return self.process.poll() is None
        return False


class Campaign:
    """One run and what has been done to it.

    Attributes:
      rows: kind, seconds to recover, and what was wrong, of each fault.
      problems: what outlived its process.
      left_out: kinds of faults that the machine or the engine does not have.
    """

    def __init__(
        self, root: Path, seed: int, say: Callable[[str], None] = print, engine: str = "jax"
    ):
        self.root, self.seed, self.draw, self._say = root, seed, random.Random(seed), say
        self._engine, self.clock = engine, root / "clock"
        self.disk, self.workdir = root / "disk", root / "disk" / "run"
        self.rows, self.problems = list[tuple[str, float, str]](), list[str]()
        for name in ("disk", "shm", "publish", "stage", "tmp"):
            (root / name).mkdir()
        self.mounted = [name for name in ("disk", "shm") if not subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={_DISK}", "tmpfs", str(root / name)],
            capture_output=True).returncode]  # fmt: skip
        set_clock(self.clock, 0.0)
        self.left_out = ["disk full"] * ("disk" not in self.mounted)
        self.left_out += ["clock jumped"] * (not make_wall_clock(root))
        self.left_out += ["engine killed", "engine stopped"] * (engine == "jax")
        self.servers = [Server(root, engine) for _ in range(2)]
        self.children = set[psutil.Process]()  # of the trainer
        self.start()

    def start(self) -> None:
        """Start the trainer by the same command as before."""
        addresses = tuple(f"127.0.0.1:{server.proxy.port}" for server in self.servers)
        settings = {"seed": self.seed, "fleet.publish_dir": f"{self.root}/publish", **SETTINGS}
        settings |= {**(VLLM if self._engine == "vllm" else {}), "fleet.addresses": repr(addresses)}
        flags = ["--config=rlx:arithmetic", f"--workdir={self.workdir}"]
        flags += [f"--config.{key}={value}" for key, value in settings.items()]
        words = ["-c", _RUN.format("rlx.main"), *flags]
        self.trainer = start_program(words, self.root / "trainer.log", self.root, self.clock)

    def step(self) -> tuple[int, int]:
        """Return the start and the step of the newest record."""
        record = read_last(self.workdir / "metrics.jsonl")
        return record.get("start", 0), record.get("step", 0)

    def look(self) -> None:
        """Note the trainer's processes; start it again if it has ended."""
        if self.trainer.poll() is None:
            with suppress(psutil.Error):
                self.children.update(psutil.Process(self.trainer.pid).children(recursive=True))
            return
        self.require_gone(self.children)
        self.start()

    def require_gone(self, children: set[psutil.Process]) -> None:
        """Wait for an ended process's children; note and kill those that live on."""
        if not wait_until(lambda: not any(map(words_of, children)), 10.0):
            for process in filter(words_of, children):
                self.problems.append(f"lives on: {words_of(process)[:200]}")
                process.kill()
        children.clear()

    # What faults are made of.

    def kill(self) -> None:
        """End the trainer with SIGKILL."""
        self.trainer.kill()
        self.trainer.wait()

    def stop(self, *processes: psutil.Process | subprocess.Popen) -> None:
        """Stop processes for a while."""
        stopped = [psutil.Process(process.pid) for process in processes]
        for process in stopped:
            process.suspend()
        time.sleep(self.draw.uniform(0.5, 4.0))
        for process in stopped:
            process.resume()

    def server(self) -> Server:
        """Return a server that runs, if one does."""
        return self.draw.choice([s for s in self.servers if s.ready] or self.servers)

    def kill_server(self) -> None:
        """End a server with SIGKILL and start it again."""
        (server := self.server()).look()
        server.process.kill()
        self.restart(server)

    def restart(self, server: Server) -> None:
        """Start a server again that ends now."""
        if not wait_until(lambda: server.process.poll() is not None, 60.0):
            self.problems.append("a server outlives its engine")
            server.process.kill()
        server.process.wait()
        self.require_gone(server.children)
        server.start()

    def engine(self) -> tuple[Server, psutil.Process]:
        """Return a server and its EngineCore, which is the largest process that it has started."""
        wait_until(lambda: any(server.ready for server in self.servers), LIMIT)
        (server := self.server()).look()
        return server, max(filter(words_of, server.children), key=lambda p: p.memory_info().rss)

    def kill_engine(self) -> None:
        """End an EngineCore with SIGKILL, and start its server again, which must end too."""
        server, engine = self.engine()
        engine.kill()
        self.restart(server)

    def jump_clocks(self) -> None:
        """Set wall clocks to other times: the trainer's with its workers, and each server's."""
        for clock in (self.clock, *(server.clock for server in self.servers)):
            set_clock(clock, self.draw.choice((-1, 1)) * 10 ** self.draw.uniform(0, 4.5))

    def worker(self, name: str) -> psutil.Process:
        """Return a process of the trainer's that runs rewards or agents."""

        found = list[psutil.Process]()

        def look() -> list[psutil.Process]:
            self.look()
            found[:] = [child for child in self.children if name in words_of(child)]
            return found

        wait_until(look, LIMIT)  # one that was killed just now is started again
        return self.draw.choice(found)

    def set_proxy(self, name: str, *values: Any) -> None:
        """Give a proxy one of the values for a while, then its first one back."""
        proxy = self.server().proxy
        before = getattr(proxy, name)
        setattr(proxy, name, self.draw.choice(values))
        time.sleep(self.draw.uniform(0.5, 3.0))
        setattr(proxy, name, before)
        if name == "swallow":  # bytes are missing in its connections
            proxy.cut()

    def fill_disk(self) -> None:
        """Fill the disk of the run until it ends, or for some seconds."""
        path = self.disk / "ballast"
        with suppress(OSError), open(path, "wb", buffering=0) as ballast:
            while ballast.write(bytes(1 << 20)):
                pass
        wait_until(lambda: self.trainer.poll() is not None, 6.0)
        path.unlink()

    def damage_journal(self, flipped: bool) -> None:
        """Kill the trainer and cut its newest records, or flip a bit in them."""
        self.kill()
        saved = checkpoint.checkpoints(self.workdir / "checkpoints")
        marks = [checkpoint.read_host(path)["executor"]["journal"][1] for path in saved]
        path = max((self.workdir / "journal").glob("*.records"))
        places = [place.begin for record, place in journal.read(self.workdir / "journal")
                  if place.path == path and record.number > max(marks, default=-1)]  # fmt: skip
        if places and flipped:
            self.flip(path, places[0])
        elif places:
            os.truncate(path, self.draw.randint(places[0], path.stat().st_size))

    def damage_checkpoint(self) -> None:
        """Kill the trainer and flip a bit of its newest checkpoint, if it has another one."""
        self.kill()
        saved = checkpoint.checkpoints(self.workdir / "checkpoints")
        if len(saved) > 1:
            files = sorted(p for p in saved[-1].rglob("*") if p.is_file() and p.stat().st_size)
            self.flip(self.draw.choice(files), 0)

    def flip(self, path: Path, first: int) -> None:
        """Change one bit of a file, from byte `first` on."""
        data = bytearray(path.read_bytes())
        data[self.draw.randrange(first, len(data))] ^= 1 << self.draw.randrange(8)
        path.write_bytes(data)

    # The campaign.

    def disturb(self, kinds: list[str]) -> None:
        """Do what `kinds` name, one right after another; wait until two more steps are made.

        Those that end the trainer come last, so that the others meet a run that works.
        """
        begun, before, process = time.monotonic(), self.step(), self.trainer
        kinds = sorted(kinds, key=lambda kind: FAULTS[kind][0])
        for kind in kinds:
            FAULTS[kind][1](self)
        ends = FAULTS[kinds[-1]][0]
        seen = {self.step()} if self.trainer.poll() is None else set()

        def recovered() -> bool:
            self.look()
            same, now = self.trainer is process, self.step()
            if now > before and (same or now[0] > before[0]):
                seen.add(now)
            return len(seen) > 2 - (not same)

        good = wait_until(recovered, LIMIT)
        seconds, wrong = time.monotonic() - begun, "" if good else f"no step for {LIMIT:g} s"
        if self.trainer is not process and not ends:
            wrong = f"the trainer ended: {self.last_error()}"
        if not good:
            self.kill()
        self.rows += [(kind, seconds, wrong) for kind in kinds]
        names = ", ".join(kinds)
        self._say(f"{len(self.rows):4} {names:24} {seconds:6.1f} s  step {self.step()[1]} {wrong}")

    def last_error(self) -> str:
        """Return the last error in the trainer's log."""
        lines = (self.root / "trainer.log").read_text(errors="replace").splitlines()
        return ([line for line in lines if "error" in line.lower()] or lines or [""])[-1][:300]

    def run(self, faults: int, seconds: float, steps: int, together: int = 1) -> None:
        """Disturb the run by `faults`, `together` at a time, within `seconds`.

        After `steps` steps SIGTERM ends it.
        """
        wait_until(lambda: self.step()[1] > 1 or self.trainer.poll() is not None, LIMIT)
        if self.step()[1] < 2:
            raise RuntimeError(f"the run does not start: {self.last_error()}")
        end, kinds = time.monotonic() + seconds, list[str]()
        while len(self.rows) < faults and time.monotonic() < end:
            known = [kind for kind in FAULTS if kind not in self.left_out]
            kinds = kinds if len(kinds) >= together else self.draw.sample(known, len(known))
            self.disturb([kinds.pop() for _ in range(min(together, faults - len(self.rows)))])
            time.sleep(self.draw.uniform(0.0, 0.5))
        wait_until(lambda: self.look() or self.step()[1] >= steps, math.inf)
        self.trainer.terminate()
        if not wait_until(lambda: self.trainer.poll() is not None, LIMIT):
            self.problems.append("SIGTERM does not end the trainer")
        self.kill()
        self.require_gone(self.children)

    def close(self) -> None:
        """End all processes; note the files and sockets that are left."""
        self.kill()
        for server in self.servers:
            wait_until(lambda server=server: server.ready, LIMIT)  # it removes a killed one's files
            server.look()
            server.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                server.process.wait(20)
            server.process.kill()
            server.proxy.close()
            self.require_gone(server.children)
        left = [str(path) for name in ("publish", "shm", "stage", "tmp")
                for path in (self.root / name).rglob("*")]  # fmt: skip
        ports = {port for server in self.servers for port in (server.port, server.proxy.port)}
        left += [f"port {c.laddr.port}" for c in psutil.net_connections("tcp")
                 if c.status == "LISTEN" and c.laddr.port in ports]  # fmt: skip
        self.problems += [f"left behind: {left}"] if left else []

    def keep(self) -> None:
        """Move the run's directory to ROOT/run, and remove its disk."""
        shutil.copytree(self.workdir, self.root / "run")
        for name in self.mounted:
            subprocess.run(["umount", str(self.root / name)], check=True)


def words_of(process: psutil.Process) -> str:
    """Return a process's command, "" if it has ended."""
    with suppress(psutil.Error):
        return " ".join(process.cmdline())  # a zombie has none
    return ""


# Kind → whether it ends the trainer, and what it does.
FAULTS: dict[str, tuple[bool, Callable[[Campaign], None]]] = {
    "trainer killed": (True, Campaign.kill),
    "trainer ended by SIGTERM": (True, lambda c: (c.trainer.terminate(), c.trainer.wait(LIMIT))),
    "trainer stopped": (False, lambda c: c.stop(c.trainer)),
    "server killed": (False, Campaign.kill_server),
    "server stopped": (False, lambda c: c.stop(c.server().process)),
    "engine killed": (False, Campaign.kill_engine),
    "engine stopped": (False, lambda c: c.stop(c.engine()[1])),
    "all servers stopped": (False, lambda c: c.stop(*(s.process for s in c.servers))),
    "reward worker killed": (False, lambda c: c.worker("reward").kill()),
    "reward worker stopped": (False, lambda c: c.stop(c.worker("reward"))),
    "agent worker killed": (False, lambda c: c.worker("agent").kill()),
    "agent worker stopped": (False, lambda c: c.stop(c.worker("agent"))),
    "connections cut": (False, lambda c: [s.proxy.cut() for s in c.servers]),
    "connections truncated": (False, lambda c: c.set_proxy("left", 10, 1000, 100_000)),
    "connections delayed": (False, lambda c: c.set_proxy("delay", 0.05, 0.3, 1.5)),
    "connections swallowed": (False, lambda c: c.set_proxy("swallow", True)),
    "clock jumped": (False, Campaign.jump_clocks),
    "disk full": (True, Campaign.fill_disk),
    "journal cut": (True, lambda c: c.damage_journal(False)),
    "journal flipped": (True, lambda c: c.damage_journal(True)),
    "checkpoint flipped": (True, Campaign.damage_checkpoint),
}
