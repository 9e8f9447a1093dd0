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
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rlx.fleet import cast
from rlx.fleet.rollout_pb2 import PublishCast
from rlx.model.tensors import DTYPES
from rlx.system.host_port import bracketed
from rlx.system.process_settings import end_with_parent

_POLL_SECONDS = 0.002
_BROKE = "the cast of the weights broke"
_PATIENCE = timedelta(seconds=cast.PATIENCE_SECONDS)
_DTYPES = {short: getattr(torch, name) for name, short in DTYPES.items()}


def missing(backend: str) -> str:
    """Return why this process cannot use `backend`; "" if it can."""
    if backend == "gloo" or (torch.cuda.is_available() and dist.is_nccl_available()):
        return ""
    return f"torch {torch.__version__} has no GPU or no NCCL here"


def receive(
    offer: PublishCast, device: torch.device, place: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Take part in a cast; return HF name → what `place` makes of the tensor that came.

    `place` gets a tensor of its own on `device`. ValueError, which says why, if it broke.
    """
    due, found = cast.buckets(offer.head), dict[str, torch.Tensor]()
    came, group = 0, None
    try:
        store = dist.TCPStore(offer.host, offer.port, None, False, timeout=_PATIENCE)
        store.set(f"ready{offer.place}", "")
        store.wait(["go"], _PATIENCE)
        places = json.loads(store.get("go"))
        if offer.place not in places:
            raise ValueError(f"{_BROKE}: the sender began without this server")
        group = _group(offer.backend, store, 1 + places.index(offer.place), 1 + len(places))
        for bucket in due:
            words = _words(bucket, device)
            _broadcast(group, store, words)
            if ~words[:-1].sum() != words[-1]:
                raise ValueError(f"{_BROKE}: bucket {came} was damaged")
            came += 1
            for entry in bucket:
                part = words.view(torch.uint8)[entry.start : entry.end].clone()
                found[entry.name] = place(part.view(_DTYPES[entry.dtype]).view(entry.shape))
        with suppress(RuntimeError, OSError):  # all came, even if the sender is gone
            store.set(f"got{offer.place}", "")
    except (RuntimeError, OSError) as error:  # of torch's store and groups as well
        reason = str(error).split("\n")[0][:200]
        raise ValueError(f"{_BROKE}: {reason} after {came} of {len(due)} buckets") from error
    finally:
        if group:
            group.abort()
    return found


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
    places = _until(store, "ready", range(count), cast.READY_SECONDS)
    store.set("go", json.dumps(places))
    device = torch.device("cuda" if backend == "nccl" else "cpu")
    with ExitStack() as stack:
        file = stack.enter_context(open(path, "rb", buffering=0))
        due = cast.buckets(cast.head_of(file))
        group = _group(backend, store, 0, 1 + len(places)) if places else None
        if group:
            stack.callback(group.abort)
        for bucket in due if group else ():
            words = _words(bucket, torch.device("cpu"), pin_memory=backend == "nccl")
            own: Any = words.view(torch.uint8).numpy()
            left = memoryview(own)[: bucket[-1].end]
            while left:
                if not (taken := file.readinto(left)):
                    raise OSError(f"{path} is too short")
                left = left[taken:]
            words = words.to(device)
            words[-1] = ~words[:-1].sum()  # zeros, where nothing came, are wrong
            _broadcast(group, store, words)
        return {"sent": _until(store, "got", places, cast.PATIENCE_SECONDS)}


def _until(store: Any, what: str, places: Any, seconds: float) -> list[int]:
    """Wait for a key of each place; return those that have set it in time."""
    end, left = time.monotonic() + seconds, set(places)
    while left and time.monotonic() < end:
        left -= {place for place in left if store.check([f"{what}{place}"])}
        time.sleep(_POLL_SECONDS)
    return sorted({*places} - left)


def _words(bucket: cast.Bucket, device: torch.device, **how: Any) -> torch.Tensor:
    """Return room for a bucket and for the sum of its 64-bit words, padded with zeros."""
    return torch.zeros(-(-bucket[-1].end // 8) + 1, dtype=torch.int64, device=device, **how)


def _group(backend: str, store: Any, rank: int, size: int) -> Any:
    """Join the group of this cast; each cast has a store and a group of its own."""
    own = cast.own_host(bracketed(store.host, store.port))
    store = dist.PrefixStore("group", store)
    if backend == "nccl":
        # A failure then raises from `wait`; torch's own watchdog would end the server.
        os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = 10 * _PATIENCE  # `_broadcast` gives up first; NCCL's ends the process
        return dist.ProcessGroupNCCL(store, rank, size, options)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = _PATIENCE
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=own)]
    return dist.ProcessGroupGloo(store, rank, size, options)


def _broadcast(group: Any, store: Any, words: torch.Tensor) -> None:
    """Broadcast from rank 0; RuntimeError if the sender has died or nothing comes."""
    options, end = dist.BroadcastOptions(), time.monotonic() + cast.PATIENCE_SECONDS
    options.rootRank = options.rootTensor = 0
    work = group.broadcast([words], options)
    while not work.is_completed():
        if time.monotonic() > end:
            raise RuntimeError(f"nothing came for {cast.PATIENCE_SECONDS:g} s")
        store.check(["go"])  # raises once the sender is dead
        time.sleep(_POLL_SECONDS)
    work.wait()


def main(backend: str) -> None:
    """Do the jobs on stdin, each a line of JSON; end with the first that fails."""
    end_with_parent(os.getppid())
    own = os.dup(1)
    os.dup2(2, 1)  # libraries may print, as NCCL does with NCCL_DEBUG

    def say(reply: dict[str, Any]) -> None:
        os.write(own, json.dumps(reply).encode() + b"\n")

    reason = missing(backend)
    for line in sys.stdin:
        say({"refusal": reason} if reason else _send(backend, say, **json.loads(line)))


if __name__ == "__main__":
    main(sys.argv[1])
