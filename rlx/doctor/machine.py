"""Check the machine: devices, cores, memory, sandbox, disks."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rlx.base import UserError, install
from rlx.cli.findings import Finding, advised
from rlx.cli.text import size
from rlx.model.compile_cache import cpu_flags
from rlx.sandbox.sandbox import Outcome, Sandbox, SandboxLost
from rlx.system import available_memory
from rlx.system.workdir_lock import existing

DEVICE_SECONDS = 120.0
_DEVICES = """
import json, jax
devices = jax.devices()
stats = [d.memory_stats() or {} for d in devices]
print(json.dumps({"platform": jax.default_backend(), "kind": devices[0].device_kind,
    "count": len(devices), "memory": min(s.get("bytes_limit", 0) for s in stats),
    "capability": str(getattr(devices[0], "compute_capability", ""))}))
"""
BFLOAT16 = frozenset({"amx_bf16", "avx512_bf16", "bf16"})  # CPUs' flags


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices that JAX has, all alike."""

    platform: str = "cpu"  # cpu | gpu | tpu
    kind: str = ""  # name
    count: int = 1
    memory: int = 0  # bytes of each; 0: unknown
    capability: str = ""  # compute capability of an NVIDIA GPU, such as "9.0"

    @property
    def has_bfloat16(self) -> bool:
        """Whether the device has instructions that multiply bfloat16."""
        if self.platform == "cpu":
            return not BFLOAT16.isdisjoint(cpu_flags().split())
        return self.capability.split(".")[0] not in ("5", "6", "7")  # before Ampere


def devices(seconds: float = DEVICE_SECONDS) -> Devices | str:
    """Return JAX's devices, or the error of a process that looks for them."""
    # In another process, because a broken driver can hang JAX.
    command = [sys.executable, "-c", _DEVICES]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return f"no answer after {seconds:g} s"
    lines = done.stdout.splitlines() or [""]
    try:
        return Devices(**json.loads(lines[-1]))
    except (ValueError, TypeError):
        return (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1][:300]


def nvidia_gpus() -> int:
    """Return the number of GPUs that NVIDIA's kernel driver lists; JAX may see fewer."""
    listed = list(Path("/proc/driver/nvidia/gpus").glob("*"))
    return len(listed or list(Path("/dev").glob("nvidia[0-9]*")))


def judge_devices(jax_devices: Devices | str, gpus: int, environment: Mapping[str, str]) -> Finding:
    """Return the row of the devices; `gpus` is the number that the driver lists."""
    if isinstance(jax_devices, str):
        remedy = "repair the driver, or set JAX_PLATFORMS=cpu"
        return Finding("machine", "devices", "problem", f"JAX finds none: {jax_devices}", remedy)
    memory = f", {jax_devices.memory / 1e9:.1f} GB each" if jax_devices.memory else ""
    what = f"{jax_devices.count} × {jax_devices.platform} ({jax_devices.kind}){memory}"
    if gpus and jax_devices.platform == "cpu":
        platforms = environment.get("JAX_PLATFORMS", "")
        why = f"JAX_PLATFORMS={platforms}" if platforms else "JAX has no CUDA"
        remedy = "unset JAX_PLATFORMS" if platforms else f"{install('cuda')} (Python 3.12 or newer)"
        what += f", though there are {gpus} NVIDIA GPUs: {why}"
        return Finding("machine", "devices", "warning", what, remedy)
    return Finding("machine", "devices", "ok", what)


def gpus_in_use() -> list[tuple[int, int]]:
    """Return (MiB in use, MiB in total) of each NVIDIA GPU; [] if nvidia-smi fails."""
    with suppress(ValueError):
        return [(int(used), int(most)) for used, most in _nvidia_smi("memory.used,memory.total")]
    return []


def gpu_kind() -> str:
    """Return the name of the first NVIDIA GPU; "" if nvidia-smi fails."""
    return next((name for (name,) in _nvidia_smi("name")), "")


def _nvidia_smi(query: str) -> list[list[str]]:
    """Return the values of a query for each GPU; [] if nvidia-smi fails."""
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=20.0, check=True)
        return [line.split(",") for line in done.stdout.splitlines()]
    return []


def judge_gpus_in_use(use: Sequence[tuple[int, int]]) -> Finding | None:
    """Return the row of GPU memory that other programs hold; None without a GPU."""
    if not use:
        return None
    busy = [f"GPU {index}: {used / 1024:.1f} of {total / 1024:.1f} GiB"
            for index, (used, total) in enumerate(use) if used > 0.05 * total]  # fmt: skip
    what = f"in use already: {', '.join(busy)}" if busy else f"unused on all of {len(use)} GPUs"
    remedy = "end the processes that nvidia-smi lists, or hide the GPU with CUDA_VISIBLE_DEVICES"
    return advised("machine", "GPU memory", what, remedy if busy else "")


async def check_sandbox() -> Finding:
    """Run a program in the sandbox of tools; return the row of its confinement."""
    try:
        async with Sandbox(workers=1, require="none") as sandbox:
            outcome = await sandbox.run("print(6 * 7)")
    except (UserError, SandboxLost) as error:
        return Finding("machine", "sandbox", "problem", str(error), "repair it as described")
    return judge_sandbox(sandbox.level, sandbox.notes, outcome)


def judge_sandbox(level: str, notes: Mapping[str, str], outcome: Outcome) -> Finding:
    """Return the row of a sandbox; `notes` has the reason why each stronger layer is missing."""
    why = "".join(f"; no {name}: {note}" for name, note in notes.items())
    if outcome.text != "42\n":
        return Finding("machine", "sandbox", "problem", f"{level}: a program failed: {outcome}",
                       "allow more memory and processes")  # fmt: skip
    remedy = "allow a stronger layer, or run tools elsewhere (sandbox.kind)"
    weak = level in ("none", "seccomp")
    what = f"programs of tools are confined by {level}{why}"
    return advised("machine", "sandbox", what, remedy if weak else "")


def judge_address(address: str, error: str, key: str = "fleet.addresses") -> Finding:
    """Return the row of a running server; `error` is empty if it answers."""
    if not error:
        return Finding("machine", key, "ok", f"{address} accepts connections")
    return Finding("machine", key, "problem", f"{address}: {error}",
                   f"start it (python -m rlx.serve), or correct {key}")  # fmt: skip


def judge_workdir(directory: Path, free: int, writable: bool) -> Finding:
    """Return the row of the workdir's disk; `free` is in bytes."""
    what = f"{directory}: {free / 1e9:.1f} GB free"
    if not writable:
        return Finding("machine", "workdir", "problem", f"{directory} cannot be written to",
                       "give another --workdir")  # fmt: skip
    remedy = "free some, or give a --workdir on another disk"
    return advised("machine", "workdir", what, remedy if free < 1 << 30 else "")


def check(workdir: Path, jax_devices: Devices | str) -> Iterator[Finding]:
    """Yield the rows that need no config."""
    yield judge_devices(jax_devices, nvidia_gpus(), os.environ)
    if row := judge_gpus_in_use(gpus_in_use()):
        yield row
    usable, present = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    few = "give the process two cores or more: trainer and server take turns" * (usable < 2)
    yield advised("machine", "cores", f"{usable} of {present}, load {os.getloadavg()[0]:.1f}", few)
    yield Finding("machine", "memory", "ok", str(available_memory.memory()))
    yield asyncio.run(check_sandbox())
    place = existing(workdir)
    yield judge_workdir(place, shutil.disk_usage(place).free, os.access(place, os.W_OK))


def check_publish_dir(place: str, needed: int, workdir: int = 0) -> Finding:
    """Return the row of the file system where weights are published.

    Bytes: `needed`, and those free in the `workdir` if weights may be published there too.
    """
    grow = "docker run --shm-size=8g, or set fleet.publish_dir to a disk"
    try:
        usage = shutil.disk_usage(place)
    except OSError as error:
        return Finding("memory", "publishing", "problem", f"{place}: {error.strerror}", grow)
    free = f"{place}: {size(usage.free)} of {size(usage.total)} free"
    what = f"{free}; two versions of the weights need {size(needed)}"
    if needed <= usage.free:
        return Finding("memory", "publishing", "ok", what)
    if needed <= workdir:
        return Finding("memory", "publishing", "warning", f"{what}; the workdir is slower", grow)
    return Finding("memory", "publishing", "problem", what, grow)
