r"""Compare the train step with the same step in PyTorch; on a GPU, print model FLOP utilisation.

    python -m experiments.bench.train_step [--cores=0,1] [--threads=1,2] [--steps=15] \
        [--trainers=jax[:bfloat16[:compile]],trainer_torch,trainer_torch:bfloat16[:compile]] \
        [--rival=torch[:bfloat16]|trl] [--jax-python=PATH]
    python -m experiments.bench.train_step --platform=cuda      # 1.5B shape, bf16, utilisation

One GRPO update: forward, backward and AdamW. rlx's side is the trainer's update with packing, in
microbatches of `--microbatch` tokens per core. The rival `torch` is a transformers model with the
same loss on one padded batch of the same sequences, prepared beforehand; microbatches do not change
its time. With bfloat16 it runs under autocast. The rival `trl` uses TRL's own step. `even`
sequences need no padding, so there only the kernels differ. Both sides are processes pinned to the
same cores, and step in turns. Each pair of neighbouring steps gives a ratio. Medians and quartiles
of these are printed, for wall and CPU time. `--jax-python` runs the trainer `jax` by another
interpreter, and so by another JAX.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys

from experiments.bench.process import cores_of, median_spread
from experiments.bench.train_step_workers import MODELS, make_lengths
from rlx.doctor.gpu_cards import peak_flops
from rlx.model.params import forward_flops

SEQUENCES = {"tiny": 64, "25m": 32, "135m": 16}


class Worker:
    """One side's process, whose module reads and writes JSON lines as train_step_workers does."""

    def __init__(
        self,
        options: dict,
        cores: list[int],
        module: str = "experiments.bench.train_step_workers",
        python: str = sys.executable,
    ):
        threads = str(options["threads"])
        self.process = subprocess.Popen(
            [python, "-m", module, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=(lambda: os.sched_setaffinity(0, cores)) if cores else None,
            env={**os.environ, "OMP_NUM_THREADS": threads} if cores else None,
        )
        self.facts = self._read()

    def step(self) -> dict:
        """Run one step; return seconds."""
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End the process."""
        self.process.stdin.close()
        self.process.wait(60)

    def _read(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"worker died with {self.process.wait()}; its error is above")
        return json.loads(line)


def compare(
    model: str, lengths: str, threads: int, cores: list[int], steps: int, rival: str, side: str,
    dtype: str, compiled: bool, python: str, microbatch: int,
) -> dict:  # fmt: skip
    """Return one row of the table: the trainer of that side and the rival in turns."""
    options = {
        "model": model, "lengths": lengths, "threads": threads, "platform": "cpu",
        "sequences": SEQUENCES[model], "budget": microbatch * threads, "chunk": 8192,
        "remat": "none", "row_buckets": (96, 128, 192, 256, 384, 512), "compile": compiled,
    }  # fmt: skip
    rival, rival_dtype = f"{rival}:float32".split(":")[:2]
    dtypes = {side: dtype, rival: rival_dtype}
    with contextlib.ExitStack() as stack:
        sides = {}
        for name, kind in dtypes.items():
            given = {**options, "side": name, "compute_dtype": kind}
            sides[name] = Worker(given, cores, python=python if name == "jax" else sys.executable)
            stack.callback(sides[name].close)
        taken = {name: [] for name in sides}
        for _ in range(steps):
            for name, worker in sides.items():
                taken[name].append(worker.step())
    tokens = int(make_lengths(lengths, options["sequences"]).sum())
    ratios = {
        clock: [t[clock] / j[clock] for j, t in zip(taken[side], taken[rival], strict=True)]
        for clock in ("wall", "cpu")
    }
    wall = {name: [s["wall"] for s in rows] for name, rows in taken.items()}
    return {
        "trainer": side,
        "compute_dtype": dtype,
        f"{rival}_dtype": rival_dtype,
        "compiled": compiled,
        "model": model,
        "lengths": lengths,
        "threads": threads,
        "tokens": tokens,
        "rlx_device": sides[side].facts["device"],
        "rlx_rows": sides[side].facts["rows"],
        f"{rival}_rows": sides[rival].facts["rows"],
        "rlx_tokens_per_second": round(tokens / statistics.median(wall[side])),
        f"{rival}_tokens_per_second": round(tokens / statistics.median(wall[rival])),
        "wall_ratio": median_spread(ratios["wall"]),
        "cpu_ratio": median_spread(ratios["cpu"]),
    }


def utilisation(a: argparse.Namespace) -> dict:
    """Return tokens per second and model FLOP utilisation of rlx's step on one accelerator."""
    model = a.models.split(",")[0]
    options = {
        "side": "jax", "model": model, "lengths": a.lengths.split(",")[0], "threads": 0,
        "platform": a.platform, "sequences": a.sequences, "budget": a.budget, "chunk": a.chunk,
        "remat": a.remat, "compute_dtype": "bfloat16",
        "row_buckets": tuple(1024 * 2**n for n in range(6) if 1024 * 2**n <= a.budget),
    }  # fmt: skip
    worker = Worker(options, [])
    seconds = [worker.step()["wall"] for _ in range(a.steps)]
    worker.close()
    lengths = make_lengths(options["lengths"], a.sequences)
    flops, took = 3 * forward_flops(MODELS[model], lengths.sum(1)), statistics.median(seconds)
    device = worker.facts["device"]
    peak = peak_flops(device, "bfloat16")
    return {
        "device": device,
        "model": model,
        "rows": worker.facts["rows"],
        "remat": a.remat,
        "tokens": int(lengths.sum()),
        "seconds": median_spread(seconds),
        "tokens_per_second": round(lengths.sum() / took),
        "model_flops_per_second": f"{flops / took:.4g}",
        "utilisation": round(flops / took / peak, 4) if peak else f"unknown peak of {device}",
    }


def main() -> None:
    """Print one JSON object per row."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--platform", default="cpu", help="cpu (beside torch) | cuda")
    parser.add_argument("--models", default="", help="of tiny,25m,135m,0.5b,1.5b")
    parser.add_argument("--lengths", default="", help="of even,uneven,gsm8k")
    parser.add_argument("--trainers", default="jax,trainer_torch,trainer_torch:bfloat16")
    parser.add_argument("--rival", default="torch", choices=("torch", "torch:bfloat16", "trl"))
    parser.add_argument("--jax-python", default=sys.executable, help="interpreter of trainer jax")
    parser.add_argument("--microbatch", type=int, default=1536, help="tokens per core")
    parser.add_argument("--cores", type=cores_of, default=[0, 1])
    parser.add_argument("--threads", type=cores_of, default=[1, 2])
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--sequences", type=int, default=400, help="GPU: trajectories a step")
    parser.add_argument("--budget", type=int, default=32_768, help="GPU: tokens a microbatch")
    parser.add_argument("--chunk", type=int, default=4096, help="GPU: tokens with logits at once")
    parser.add_argument("--remat", default="full", help="GPU: none | dots | attention | full")
    parser.add_argument("--dry-run", action="store_true", help="GPU's code path on a CPU, tiny")
    a = parser.parse_args()
    print(f"# python -m experiments.bench.train_step {' '.join(sys.argv[1:])}", flush=True)
    if a.dry_run:
        a.platform, a.models, a.sequences, a.budget = "cpu", "tiny", 8, 2048
    if a.platform != "cpu" or a.dry_run:
        a.models, a.lengths = a.models or "1.5b", a.lengths or "gsm8k"
        print(json.dumps(utilisation(a)))
        return
    for model in (a.models or "tiny,25m").split(","):
        for lengths in (a.lengths or "even,uneven").split(","):
            for threads in a.threads:
                for side in a.trainers.split(","):
                    side, dtype, compiled = f"{side}::".split(":")[:3]
                    kind = dtype or "float32", bool(compiled)
                    given = a.cores[:threads], a.steps, a.rival, side, *kind
                    given = *given, a.jax_python, a.microbatch
                    print(json.dumps(compare(model, lengths, threads, *given)), flush=True)


if __name__ == "__main__":
    main()
