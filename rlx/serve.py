"""`python -m rlx.serve --model=DIR`: one rollout server process.

Prints one JSON line, {"port": …, "pid": …}, once it answers calls.
"""

import argparse
import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence

from rlx import command
from rlx.fleet.child import end_with_parent
from rlx.fleet.engine import KV_POLICIES


def _jax(args: argparse.Namespace):
    from rlx.fleet.engine_jax import JaxEngine

    options = ("seed", "slots", "max_model_len", "decode_steps", "dtype")
    return JaxEngine(args.model, **{name: getattr(args, name) for name in options})


def _vllm(args: argparse.Namespace):
    from rlx.fleet.engine_vllm import VllmEngine

    options = ("seed", "slots", "max_model_len", "dtype")
    return VllmEngine(args.model, **{name: getattr(args, name) for name in options})


ENGINES: Mapping[str, Callable] = {"jax": _jax, "vllm": _vllm}


def parser(engines: Mapping[str, Callable] = ENGINES) -> argparse.ArgumentParser:
    """The flags; `rlx.launch.local` fills them in for the servers of a run."""
    p = argparse.ArgumentParser("rlx.serve", allow_abbrev=False)
    p.add_argument("--model", required=True, help="HF directory")
    p.add_argument("--engine", default=next(iter(engines)), choices=sorted(engines))
    p.add_argument("--host", default="127.0.0.1", help="any but loopback needs a token")
    p.add_argument("--port", type=int, default=0, help="0: any")
    p.add_argument("--slots", type=int, default=64, help="sequences decoded together")
    p.add_argument("--max-model-len", type=int, default=0, help="tokens; 0: the model's context")
    p.add_argument("--decode-steps", type=int, default=8, help="tokens a sequence per decode call")
    p.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--kv-on-update", default="keep", choices=KV_POLICIES)
    p.add_argument("--weight-root", action="append", help="of published files; loopback: /dev/shm")
    p.add_argument("--stage-dir", default="/dev/shm", help="for streamed weights")
    p.add_argument("--token", default="", help="bearer token; better in $RLX_FLEET_TOKEN")
    p.add_argument("--parent-pid", type=int, default=0, help="end when this process ends")
    return p


def main(argv: Sequence[str], engines: Mapping[str, Callable] = ENGINES) -> None:
    """Serves until SIGTERM or SIGINT."""
    args = parser(engines).parse_args(argv)
    if args.parent_pid:
        end_with_parent(args.parent_pid)
    asyncio.run(_serve(args, engines[args.engine]))


async def _serve(args: argparse.Namespace, engine: Callable) -> None:
    from rlx.fleet import server, wire

    stop = asyncio.Event()

    def ready(port: int) -> None:  # until here the signals' own effect, a quick end, is right
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        print(json.dumps({"port": port, "pid": os.getpid()}), flush=True)

    await server.serve(
        lambda: engine(args),
        on_ready=ready,
        stop=stop,
        host=args.host,
        port=args.port,
        token=args.token or os.environ.get(wire.TOKEN_VARIABLE),
        weight_roots=args.weight_root or (["/dev/shm"] if args.host in wire.LOOPBACK else []),
        stage_dir=args.stage_dir,
        kv=args.kv_on_update,
    )


if __name__ == "__main__":
    command.run(lambda: main(sys.argv[1:]))
