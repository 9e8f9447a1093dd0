"""Command line of `python -m rlx.serve`: its flags, and the options they become."""

import argparse
import json
import os
import secrets
import sys
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any

from rlx.base import refuse
from rlx.cli import command
from rlx.engines.engine import SLEEPS, EngineOptions
from rlx.fleet import tls, wire

_SHARED_MEMORY, _HANG, _DRAIN = "/dev/shm", 60.0, 30.0


def _engine(module: str, name: str, options: str, args: argparse.Namespace) -> Any:
    if args.gpu_memory:  # read when JAX first looks for devices
        os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{args.gpu_memory:g}"
    values = {option: getattr(args, option) for option in f"{_COMMON} {options}".split()}
    return getattr(import_module(module), name)(args.model, **values)


_COMMON, _VLLM = (
    "seed slots max_model_len dtype",
    "tensor_parallel gpu_memory engine_args hang_seconds sleep",
)
ENGINES: Mapping[str, Callable[[argparse.Namespace], Any]] = {
    "jax": partial(_engine, "rlx.engines.jax.jax_engine", "JaxEngine", "decode_steps"),
    "vllm": partial(_engine, "rlx.engines.vllm.vllm_engine", "VllmEngine", _VLLM),
}


def parser(engines: Mapping[str, Callable] = ENGINES) -> argparse.ArgumentParser:
    """Return the parser; `rlx.launch.local` makes command lines for the servers of a run."""
    seconds = command.number(0, float)
    p = command.Parser("rlx.serve", description="Start a rollout server.", allow_abbrev=False)
    p.add_argument("--model", required=True, help="HF directory")
    p.add_argument("--engine", default=next(iter(engines)), choices=sorted(engines))
    p.add_options(EngineOptions)
    p.add_argument("--max-queue", type=command.number(1), default=16384, help="samples at one time")
    p.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    seed = secrets.randbelow(1 << 31)  # servers with one seed on GPUs would draw alike
    p.add_argument("--seed", type=int, default=seed, help="of draws without one; default: random")
    p.add_argument("--hang-seconds", type=seconds, default=_HANG, help="silence that ends vLLM")
    p.add_argument("--host", default="127.0.0.1", help="any but loopback needs a token and TLS")
    p.add_argument("--port", type=int, default=0, help="0: any")
    p.add_argument("--token", default="", help="bearer token; better in $RLX_FLEET_TOKEN")
    p.add_argument("--tls-cert", default="", help="PEM file: certificate")
    p.add_argument("--tls-key", default="", help="PEM file: its key")
    p.add_argument("--tls-client-ca", default="", help="callers need a certificate signed by it")
    p.add_argument("--metrics-port", type=int, default=0, help="port for Prometheus; 0: off")
    p.add_argument("--metrics-host", default="127.0.0.1", help="not loopback: set --tls-client-ca")
    p.add_argument("--traces", default="", help="place of spans, as config.observe.traces")
    p.add_argument("--weight-root", action="append", help="directory to read weights from")
    p.add_argument("--stage-dir", default=_SHARED_MEMORY, help="directory for streamed weights")
    p.add_argument("--join", default="", help="directory of address files, see docs/fleet.md")
    p.add_argument("--drain-seconds", type=seconds, default=_DRAIN, help="with --join, for calls")
    p.add_argument("--early", action="store_true", help="read all flags later, from stdin")
    p.add_argument("--parent-pid", type=int, default=0, help="end when this process ends")
    return p


def early_flags() -> list[str]:
    """Wait on stdin for the flags of an early server, and write to its log from then on."""
    if not (line := sys.stdin.readline()):  # it is not needed
        os._exit(0)
    log, os.environ[wire.TOKEN_VARIABLE], *flags = json.loads(line)
    with open(log, "ab") as file:
        os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)
    return flags


def server_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `engines.server.serve`; UserError for half of a pair of flags."""
    refuse((
        ((args.tensor_parallel > 1 and args.engine != "vllm") or args.tensor_parallel < 1,
         f"--tensor-parallel={args.tensor_parallel} and --engine={args.engine}: only vLLM cuts "
         "a model, into 1 or more; use --engine=vllm, or drop the flag"),
        (args.engine_args and args.engine != "vllm",
         f"--engine-args={args.engine_args} and --engine={args.engine}: these are arguments of "
         "vLLM; use --engine=vllm, or drop the flag"),
        (args.hang_seconds != _HANG and args.engine != "vllm",
         f"--hang-seconds={args.hang_seconds:g} is for vLLM; use --engine=vllm, or drop the flag"),
        (args.drain_seconds != _DRAIN and not args.join,
         f"--drain-seconds={args.drain_seconds:g} without --join; give both, or drop the flag"),
    ))  # fmt: skip
    local, token = tls.is_loopback(args.host), wire.take_token(os.environ)
    same = "host port join drain_seconds metrics_host metrics_port stage_dir max_queue traces"
    return {
        **{name: getattr(args, name) for name in same.split()},
        "token": args.token or token,
        "tls": tls.server_tls(args.tls_cert, args.tls_key, args.tls_client_ca),
        "weight_roots": args.weight_root or ([_SHARED_MEMORY] if local else []),
        "model_dir": args.model,
        "kv": args.kv_on_update,
        "asleep": args.sleep != SLEEPS[0],
    }
