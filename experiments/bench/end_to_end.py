r"""Compare steps per second of the whole system with TRL's synchronous GRPOTrainer.

    python -m experiments.bench.end_to_end --cores=0,1 [--steps=30] [--rounds=3] \
        [--jax-python=PATH]                                                           (extra: trl)
    python -m experiments.bench.end_to_end --model=rlx:smollm2 --steps=8 --rounds=1 --bf16 \
        --config.trainer=torch --config.model.compute_dtype=bfloat16 \
        --config.model.publish_dtype=bfloat16 --config.fleet.engine=vllm

8 prompts x 8 samples x 64 new tokens. The model is a random 3.7M-parameter Qwen2 in fp32, or one of
yours. With yours the prompts are word problems, and TRL trains in microbatches of 8. Flags of the
config go to rlx; `--bf16` gives TRL autocast. `--jax-python` runs rlx by another interpreter, and
so by another JAX. Both sides get the same two cores, in alternating rounds. The first quarter of
each run's steps is left out, because it compiles and fills the pipeline. The last lines say where
rlx's seconds go; its trainer and its server work at the same time.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

from experiments.bench import workload
from experiments.bench.process import cores_of, median_spread, pinned, rlx_run

REAL = [  # prompts of word problems in a chat template have 40 to 110 tokens
    "--config.data.max_prompt_tokens=128",
    "--config.train.row_buckets=(192,)",
    "--config.train.max_tokens_per_microbatch=1024",
]


def main() -> None:
    """Print one row per round and the ratio of the medians."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cores", type=cores_of, default=[0, 1])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default="", help="HF directory or rlx:NAME; else 3.7M, random")
    parser.add_argument("--bf16", action="store_true", help="TRL in bfloat16")
    parser.add_argument("--jax-python", default=sys.executable, help="interpreter of rlx's side")
    a, flags = parser.parse_known_args()
    flags += REAL if a.model else []
    ours, theirs, kept = [], [], []
    with tempfile.TemporaryDirectory() as scratch:
        directory = workload.make(Path(scratch), a.model)
        config = f"experiments/bench/workload.py:{directory}"
        for n in range(a.rounds):
            steps = f"--config.total_steps={a.steps}"
            place = directory / f"run{n}"
            records = rlx_run(config, place, a.cores, steps, *flags, python=a.jax_python)
            kept += records[a.steps // 4 :]
            ours = [r["step_seconds"] for r in kept]
            trl = ["-m", "experiments.bench.end_to_end_trl", str(directory), str(a.steps // 2)]
            trl += [f"--microbatch={8 if a.model else 64}", *["--bf16"] * a.bf16]
            seconds = json.loads(pinned(trl, a.cores).splitlines()[-1])["seconds"]
            theirs += seconds[a.steps // 8 :]
            print(
                f"round {n}: rlx {median_spread(ours)} s/step, TRL {median_spread(theirs)} s/step"
            )
    mean = [sum(side) / len(side) for side in (ours, theirs)]
    print(
        f"seconds a step, median [quartiles]: rlx {median_spread(ours)}, "
        f"TRL {median_spread(theirs)}; "
        f"mean {mean[0]:.3f} and {mean[1]:.3f}; rlx is {mean[1] / mean[0]:.2f} times as fast "
        f"(means); dropped trajectories: {max(r['dropped'] for r in kept)}"
    )
    phases = {f"trainer: {name}": 0.0 for r in kept for name in r["seconds"]} | {"server busy": 0.0}
    for record in kept:
        phases["server busy"] += record["server_busy_seconds"] / len(kept)
        for name, seconds in record["seconds"].items():
            phases[f"trainer: {name}"] += seconds / len(kept)
    for name, seconds in phases.items():
        print(f"{name:>20}  {seconds:.3f} s a step  {seconds / mean[0]:.0%}")


if __name__ == "__main__":
    main()
