"""Both ends of a cast (rlx/fleet/cast.py), with torch.distributed and without vLLM.

    python -m rlx.engines.vllm.vllm_cast BACKEND      one job a line, as JSON, from the trainer

    sender: TCPStore ─▶ ready servers ─▶ "go" ─▶ group ─▶ buckets, each with its sum ─▶ "got"

vLLM's own engines load each bucket into the live model, so a sender that dies leaves mixed weights.
Their store also unpickles what anyone sends to its port. Here weights are staged, then exchanged.
"""

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rlx.fleet.cast import (
    PATIENCE_SECONDS,
    READY_SECONDS,
    Broke,
    Bucket,
    Came,
    CastProgress,
    Went,
    after,
    buckets,
    head_of,
    own_host,
)
from rlx.fleet.rollout_pb2 import PublishCast
from rlx.system.host_port import bracketed
from rlx.system.process_settings import end_with_parent

_POLL_SECONDS = 0.002
_PATIENCE = timedelta(seconds=PATIENCE_SECONDS)
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32,
}  # fmt: skip


def missing(backend: str) -> str:
    """Return why this process cannot use `backend`; "" if it can."""
    if backend == "gloo" or (torch.cuda.is_available() and dist.is_nccl_available()):
        return ""
    return f"torch {torch.__version__} has no GPU or no NCCL here"


def receive(
    cast: PublishCast, device: torch.device, move: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Take part in a cast; return HF name → what `move` makes of the tensor that came.

    `move` gets a tensor of its own on `device`. ValueError, which says why, if it broke.
    """
    plan, tensors = buckets(cast.head), dict[str, torch.Tensor]()
    state, group = CastProgress(cast.place, len(plan)), None
    try:
        store = dist.TCPStore(cast.host, cast.port, None, False, timeout=_PATIENCE)
        store.set(f"ready{cast.place}", "")
        store.wait(["go"], _PATIENCE)
        places = json.loads(store.get("go"))
        state = after(state, Went(tuple(places)))
        if state.started:
            rank = 1 + places.index(cast.place)
            group = _group(cast.backend, store, rank, 1 + len(places))
        while state.started and not (state.done or state.reason):
            bucket = plan[state.came]
            words = _words(bucket, device)
            _broadcast(group, store, words)
            state = after(state, Came(state.came, bool(~words[:-1].sum() == words[-1])))
            for entry in bucket if not state.reason else ():
                part = words.view(torch.uint8)[entry.start : entry.end].clone()
                tensors[entry.name] = move(part.view(_DTYPES[entry.dtype]).view(entry.shape))
        if state.done:
            store.set(f"got{cast.place}", "")
    except (RuntimeError, OSError) as error:  # of torch's store and groups as well
        state = after(state, Broke(str(error).split("\n")[0][:200]))
    finally:
        if group:
            group.abort()
    if not state.done:
        raise ValueError(f"the cast of the weights broke: {state.reason}")
    return tensors


def _send(
    backend: str, say: Callable[[dict[str, Any]], None], path: str, count: int, host: str
) -> dict[str, Any]:
    """Send the file at `path` to at most `count` servers; return the places that have it."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family)
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        host, port, None, True, wait_for_workers=False, timeout=_PATIENCE,
        master_listen_fd=listener.detach(),
    )  # fmt: skip
    say({"port": port})
    places = _until(store, "ready", range(count), READY_SECONDS)
    store.set("go", json.dumps(places))
    device = torch.device("cuda" if backend == "nccl" else "cpu")
    with ExitStack() as stack:
        file = stack.enter_context(open(path, "rb", buffering=0))
        plan = buckets(head_of(file))
        group = _group(backend, store, 0, 1 + len(places)) if places else None
        if group:
            stack.callback(group.abort)
        for bucket in plan if group else ():
            words = _words(bucket, torch.device("cpu"), pin_memory=backend == "nccl")
            data: Any = words.view(torch.uint8).numpy()
            left = memoryview(data)[: bucket[-1].end]
            while left:
                if not (size := file.readinto(left)):
                    raise OSError(f"{path} is too short")
                left = left[size:]
            words = words.to(device)
            words[-1] = ~words[:-1].sum()  # zeros, where nothing came, are wrong
            _broadcast(group, store, words)
        return {"sent": _until(store, "got", places, PATIENCE_SECONDS)}


def _until(store: Any, what: str, places: Any, seconds: float) -> list[int]:
    """Wait for a key of each place; return those that have set it in time."""
    end, left = time.monotonic() + seconds, set(places)
    while left and time.monotonic() < end:
        left -= {place for place in left if store.check([f"{what}{place}"])}
        time.sleep(_POLL_SECONDS)
    return sorted({*places} - left)


def _words(bucket: Bucket, device: torch.device, **how: Any) -> torch.Tensor:
    """Return room for a bucket and for the sum of its 64-bit words, padded with zeros."""
    return torch.zeros(-(-bucket[-1].end // 8) + 1, dtype=torch.int64, device=device, **how)


def _group(backend: str, store: Any, rank: int, size: int) -> Any:
    """Join the group of this cast; each cast has a store and a group of its own."""
    host = own_host(bracketed(store.host, store.port))
    store = dist.PrefixStore("group", store)
    if backend == "nccl":
        # A failure then raises from `wait`; torch's own watchdog would end the server.
        os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = 10 * _PATIENCE  # `_broadcast` gives up first; NCCL's ends the process
        return dist.ProcessGroupNCCL(store, rank, size, options)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = _PATIENCE
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    return dist.ProcessGroupGloo(store, rank, size, options)


def _broadcast(group: Any, store: Any, words: torch.Tensor) -> None:
    """Broadcast from rank 0; RuntimeError if the sender has died or nothing comes."""
    options, end = dist.BroadcastOptions(), time.monotonic() + PATIENCE_SECONDS
    options.rootRank = options.rootTensor = 0
    work = group.broadcast([words], options)
    while not work.is_completed():
        if time.monotonic() > end:
            raise RuntimeError(f"nothing came for {PATIENCE_SECONDS:g} s")
        store.check(["go"])  # raises once the sender is dead
        time.sleep(_POLL_SECONDS)
    work.wait()


def main(backend: str) -> None:
    """Do the jobs on stdin, each a line of JSON; end with the first that fails."""
    end_with_parent(os.getppid())
    stdout = os.dup(1)
    os.dup2(2, 1)  # libraries may print, as NCCL does with NCCL_DEBUG

    def say(reply: dict[str, Any]) -> None:
        os.write(stdout, json.dumps(reply).encode() + b"\n")

    reason = missing(backend)
    for line in sys.stdin:
        say({"refusal": reason} if reason else _send(backend, say, **json.loads(line)))


if __name__ == "__main__":
    main(sys.argv[1])
