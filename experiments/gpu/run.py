r"""One hour on a GPU: is the trainer correct and fast there, and is the memory estimate right?

    python -m experiments.gpu.run                            # every part, on one H100 or H200
    python -m experiments.gpu.run --parts=attention,step_4k  # some of them
    python -m experiments.gpu.run --platform=cpu --tiny      # every part, tiny, on any machine
    python -m experiments.gpu.run --trainer=torch            # attention, step_*, task with torch

| part | question |
|---|---|
| attention | does packed attention equal a plain one, forward and backward, with grouped heads? |
| step_4k, step_16k, step_32k | how fast is a train step of 1.5B with rows of that length? reports model FLOP utilisation, each part against its roofline, estimated and peak memory |
| task | does the embedded task learn, with trainer and JAX engine on the same GPU? |
| decode | how many tokens per second does the JAX engine make of 1.5B? |

Each part is a process of its own, which is ended after --minutes (8). If one fails, it is reported
and the others continue. After each part the results are written to one JSON file (--out) and
printed as one table. No network is needed; models are random except for the embedded one. The exit
status is 1 if a part failed or the attentions differ.

rlx runs from its source here; the table names missing modules. JAX's image usually lacks
ml-collections. The task also needs math-verify, latex2sympy2-extended, antlr4-python3-runtime,
grpcio and protobuf. Without a network, unpack wheels for its Python into a folder:

    pip install --target=wheels --no-deps --only-binary=:all: --python-version=3.12 \
        --platform=manylinux_2_28_x86_64 --platform=manylinux2014_x86_64 ml-collections ...
    PYTHONPATH=wheels python -m experiments.gpu.run
"""  # noqa: E501

import argparse
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rlx.launch import xla_flags

KERNEL = ("jax", "numpy")
STEP = (*KERNEL, "absl", "ml_collections", "yaml", "flax", "msgpack", "rich", "optax")
DECODE = (*STEP, "safetensors")
TASK = (*DECODE, "transformers", "jinja2", "grpc", "google.protobuf", "prometheus_client",
        "orbax.checkpoint", "math_verify")  # fmt: skip
PARTS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {  # module, options, what it needs
    "attention": ("attention", {"length": 4096, "heads": 12, "width": 128}, KERNEL),
    "step_4k": ("step", {"rows": 8, "length": 4096}, STEP),
    "step_16k": ("step", {"rows": 2, "length": 16_384}, STEP),
    "step_32k": ("step", {"rows": 1, "length": 32_768}, STEP),
    "task": ("task", {"steps": 100, "questions": 200}, TASK),
    "decode": ("decode", {"batches": (1, 8, 64, 256), "new": 256}, DECODE),
}
OF_TORCH = {"attention": "torch_attention", "step": "torch_step"}  # module → the trainer's own
TORCH = ("torch", "transformers", "safetensors", "numpy", "absl", "ml_collections", "yaml")
TINY: dict[str, dict[str, Any]] = {
    "attention": {"length": 192, "heads": 4, "width": 16},
    "step_4k": {"rows": 2, "length": 64},
    "step_16k": {"rows": 1, "length": 128},
    "step_32k": {"rows": 1, "length": 256},
    "task": {"steps": 2, "questions": 8},
    "decode": {"batches": (1, 4), "new": 16},
}


def main() -> int:
    """Run the parts; return the exit status."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--parts", default=",".join(PARTS), help="some of them")
    parser.add_argument("--platform", default="", help="cpu, or what JAX finds")
    parser.add_argument("--trainer", default="jax", choices=("jax", "torch"))
    parser.add_argument("--tiny", action="store_true", help="tiny shapes")
    parser.add_argument("--remat", default="attention", help="model.remat of the step parts")
    parser.add_argument("--chunk", type=int, default=4096, help="model.logprob_chunk of them")
    parser.add_argument("--minutes", type=float, default=8.0, help="of each part")
    parser.add_argument("--out", default="runs/gpu.json")
    parser.add_argument("--part", default="", help=argparse.SUPPRESS)  # in a process of its own
    a = parser.parse_args()
    if a.part:
        print(json.dumps(_part(a)), flush=True)
        return 0
    if unknown := set(a.parts.split(",")) - PARTS.keys():
        parser.error(f"--parts={','.join(unknown)}: there are {', '.join(PARTS)}")
    report: dict[str, Any] = {"command": sys.argv, "time": time.time(), "parts": {}}
    out = Path(a.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    for name in a.parts.split(","):
        if name == "decode" and a.trainer == "torch":
            continue  # which is the JAX engine's
        print(f"{name} …", file=sys.stderr, flush=True)
        report["parts"][name] = _in_process(name, a)
        out.write_text(json.dumps(report, indent=1) + "\n")
    print("\n".join(table(report)))
    print(f"written to {out}")
    parts = report["parts"].values()
    return int(not all(p["status"] == "ok" and p["result"].get("equal", True) for p in parts))


def _part(a: argparse.Namespace) -> dict[str, Any]:
    """Return one part's result, computed in this process."""
    options = PARTS[a.part][1]
    if a.tiny:
        options = TINY[a.part]
    if a.trainer == "torch":
        from experiments.gpu.torch_step import device
    else:
        xla_flags.add(os.environ)  # as a run has them, and before JAX makes its backends
        from experiments.gpu.measure import device
    part = importlib.import_module(_module(a.part, a.trainer))
    more = {"tiny": a.tiny, "remat": a.remat, "chunk": a.chunk, "trainer": a.trainer}
    return {"device": device(), **part.run({**more, **options})}


def _module(name: str, trainer: str) -> str:
    module = PARTS[name][0]
    return f"experiments.gpu.{OF_TORCH.get(module, module) if trainer == 'torch' else module}"


def _in_process(name: str, a: argparse.Namespace) -> dict[str, Any]:
    """Run one part as a process; return status (ok | failed | late | missing), seconds, result."""
    needed = (*PARTS[name][2], *TORCH) if name == "task" else TORCH
    needed = needed if a.trainer == "torch" else PARTS[name][2]
    missing = [module for module in needed if not _there(module)]
    if missing:
        return {"status": "missing", "error": f"not installed: {', '.join(missing)}"}
    command = [sys.executable, "-m", "experiments.gpu.run", f"--part={name}"]
    command += [
        f"--trainer={a.trainer}",
        f"--remat={a.remat}",
        f"--chunk={a.chunk}",
        *(["--tiny"] * a.tiny),
    ]
    environment = {**os.environ, **({"JAX_PLATFORMS": a.platform} if a.platform else {})}
    if a.platform == "cpu" and a.trainer == "torch":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    start = time.monotonic()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        start_new_session=True,
    )  # fmt: skip
    try:
        said, errors = process.communicate(timeout=60 * a.minutes)
        status = "failed" if process.returncode else "ok"
    except subprocess.TimeoutExpired:
        status = "late"
    finally:
        if process.poll() is None:  # its children are in its group
            os.killpg(process.pid, signal.SIGKILL)
    if status == "late":
        said, errors = process.communicate()
    took = {"status": status, "seconds": round(time.monotonic() - start, 1)}
    if status == "ok":
        return {**took, "result": {"trainer": a.trainer, **json.loads(said.splitlines()[-1])}}
    return {**took, "error": "\n".join(errors.splitlines()[-12:])}


def _there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package of the module is missing
        return False


def table(report: dict[str, Any]) -> list[str]:
    """Return the report's lines: each part's status and result."""
    lines = []
    for name, part in report["parts"].items():
        lines.append(f"{name:10} {part['status']:8}{part.get('seconds', 0):6.0f} s")
        if part["status"] == "ok":
            trainer = part["result"].get("trainer", "jax")
            module = importlib.import_module(_module(name, trainer))
            found = [part["result"]["device"]["kind"], *module.lines(part["result"])]
        else:
            found = part["error"].splitlines()[-3:]
        lines += [f"           {line}" for line in found]
    return lines


if __name__ == "__main__":
    sys.exit(main())
