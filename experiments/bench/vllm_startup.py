"""Time `python -m rlx.serve --engine=vllm` up to its ready line, on one core.

    python -m experiments.bench.vllm_startup [--core=1] [--repeats=5] [--model=rlx:arithmetic]

Target: 8 s for the tiny model. The first start reads vLLM from the disk and is listed separately.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time


def ready_seconds(model: str, core: int) -> float:
    """Return the seconds of one start; the server is stopped when it is ready."""
    start = time.perf_counter()
    server = subprocess.Popen(
        [sys.executable, "-m", "rlx.serve", "--engine=vllm", f"--model={model}",
         f"--parent-pid={os.getpid()}"],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: os.sched_setaffinity(0, [core]),
    )  # fmt: skip
    assert server.stdout
    try:
        for line in server.stdout:
            if line.startswith('{"port"'):
                return time.perf_counter() - start
        raise SystemExit(f"the server ended with {server.wait()} before it was ready")
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        server.stdout.close()


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--core", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--model", default="rlx:arithmetic")
    args = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.1f}")
    first, *warm = (ready_seconds(args.model, args.core) for _ in range(args.repeats + 1))
    print("| what | seconds | target |\n|---|---|---|")
    print(f"| first start | {first:.1f} | |")
    spread = f"{statistics.median(warm):.2f} [{min(warm):.2f}, {max(warm):.2f}]"
    print(f"| {args.repeats} later starts | {spread} | 8 |")
    print(f"load average {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
