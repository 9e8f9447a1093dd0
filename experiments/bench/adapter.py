"""Compare publishing LoRA as adapters, which servers add to their base, with merged weights.

    python -m experiments.bench.adapter                 # Qwen2.5-0.5B's shapes, about two minutes
    python -m experiments.bench.adapter --dry           # the smallest sizes

The base is a bf16 directory of random weights. All matrices have adapters, with B not zero. `make`
is the trainer's part: merge and copy all weights to the host, or copy only the adapters. `publish`
runs from the arrays to the acknowledgement of a server whose engine loads nothing. By adapter it
includes the server's work: W + scale·B·A of every matrix in float32, cast and written. The first
publish by adapter also computes the base's digest and is listed separately. The trainer has the
first of `--cores`, the server the second. Figures are medians [quartiles].
"""

import argparse
import asyncio
import dataclasses
import itertools
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from experiments.bench.delta import Loading, _plan, timed
from experiments.bench.process import cores_of, median_spread
from rlx import serve
from rlx.fleet import adapter
from rlx.fleet.publish import Adapter
from rlx.launch.local import LocalServers
from rlx.model.lora_config import LoraConfig


async def compare(local: LocalServers, base: Path, rank: int, rounds: int) -> None:
    """Print a row of the table for each way."""
    import jax

    from rlx.model import hf, lora, peft

    config, params = hf.load(base, None)
    settings = LoraConfig(rank, 2.0 * rank)
    adapters = lora.init(config, settings, jax.random.key(1))
    adapters = jax.tree.map(lambda leaf: leaf + 1e-3, adapters)
    print(f"{lora.count(config, settings) / 1e6:.1f} M numbers in adapters of rank {rank}")
    digest_s, digest = timed(lambda: adapter.digest(base))
    print(f"digest of the base: {digest_s:.2f} s")

    def merged():
        return hf.to_hf(lora.merge(params, adapters, settings), config)

    def alone():
        tensors = peft.to_peft(adapters, config, settings).arrays()
        return Adapter(tensors, settings.scale, "bfloat16", digest)

    fleet = await asyncio.to_thread(local.fleet)
    await fleet.connect()
    versions, rows = itertools.count(1), {}
    first = await fleet.publish(next(versions), alone(), "adapter")
    print(f"the first publish by adapter: {first.seconds:.2f} s")
    for round_, (method, make) in itertools.product(
        range(rounds + 1), (("path", merged), ("stream", merged), ("adapter", alone))
    ):
        start = time.perf_counter()
        source = make()
        made = time.perf_counter() - start
        report = await fleet.publish(next(versions), source, method)
        assert report.deliveries[0].method == method
        if round_:  # the first one compiles and allocates memory
            mb = report.sent_bytes / 1e6
            rows.setdefault(method, []).append((mb, made, report.seconds))
    await fleet.close()
    print("\n| way | sent, MB | make, s | publish, s |\n|---|---|---|---|")
    for method, values in rows.items():
        columns = " | ".join(median_spread(column) for column in zip(*values, strict=True))
        print(f"| {method} | {columns} |", flush=True)


def make_base(path: Path, dry: bool) -> None:
    """Write an HF directory with random bf16 weights of the 0.5B shape."""
    import jax
    import jax.numpy as jnp

    from experiments.bench.train_step_workers import MODELS
    from rlx.model import hf
    from rlx.model import params as parameters

    config = MODELS["0.5b"]
    if dry:
        config = dataclasses.replace(config, num_layers=1, vocab_size=4096)
    hf.save(path, config, parameters.init(config, jax.random.key(0), jnp.bfloat16))
    print(f"{parameters.count(config) / 1e6:.0f} M parameters in the base")


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:
        return serve.main(sys.argv[2:], {"loading": lambda args: Loading()})
    p = argparse.ArgumentParser(allow_abbrev=False)
    p.add_argument("--cores", default="0,1", help="trainer, server")
    p.add_argument("--rank", type=int, default=16)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--room", default="/dev/shm")
    p.add_argument("--dry", action="store_true", help="figures mean nothing")
    args = p.parse_args()
    cores = cores_of(args.cores)
    os.sched_setaffinity(0, cores[:1])
    print(f"load average {os.getloadavg()[0]:.1f}, numpy {np.__version__}")
    with tempfile.TemporaryDirectory(dir=args.room) as room:
        base = Path(room) / "base"
        make_base(base, args.dry)
        command = (sys.executable, "-m", "experiments.bench.adapter", "--serve")
        options = {"plan": _plan(cores), "command": command, "publish_dir": room}
        with LocalServers(base, workdir=room, **options) as local:  # type: ignore[arg-type]
            rounds = 1 if args.dry else args.rounds
            asyncio.run(compare(local, base, args.rank, rounds))
    print(f"\nload average at the end {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
