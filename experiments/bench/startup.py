"""Time `import rlx`, and the command up to the first trained step.

    python -m experiments.bench.startup [--cores=0,1] [--repeats=5]

Targets: 0.5 s and 30 s on two cores. The command runs as a user's would, from a new process. The
first step ends when its record is in metrics.jsonl.
"""

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from experiments.bench import process

COMMAND = ("-m", "rlx.main", "--config=configs/arithmetic.py")
PATIENCE = 300.0  # seconds for a first step before the benchmark gives up


def import_seconds(cores: list[int], repeats: int) -> tuple[list[float], list[float]]:
    """Return seconds of `python -c "import rlx"` and of `python -c ""`, alternating."""
    taken: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for program, seconds in zip(("import rlx", ""), taken, strict=True):
            start = time.perf_counter()
            process.pinned(["-c", program], cores)
            seconds.append(time.perf_counter() - start)
    return taken


def first_step_seconds(cores: list[int], workdir: Path) -> float:
    """Return seconds from the command to its first record, then interrupt the run like Ctrl-C."""
    log = workdir.with_suffix(".log")
    start = time.perf_counter()
    with open(log, "w") as out:
        run = subprocess.Popen(
            [sys.executable, *COMMAND, f"--workdir={workdir}"],
            stdout=out,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
    try:
        while not _has_record(workdir / "metrics.jsonl"):
            waited = time.perf_counter() - start
            if run.poll() is not None or waited > PATIENCE:
                raise SystemExit(f"no step after {waited:.0f} s:\n{log.read_text()[-3000:]}")
            time.sleep(0.02)
        return time.perf_counter() - start
    finally:
        if run.poll() is None:
            run.send_signal(signal.SIGINT)
        try:
            run.wait(60)
        except subprocess.TimeoutExpired:
            run.kill()


def _has_record(path: Path) -> bool:
    return path.exists() and path.read_text().endswith("\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cores", default="0,1")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    cores = process.cores_of(args.cores)
    whole, bare = import_seconds(cores, args.repeats)
    print("| what | seconds | target |\n|---|---|---|")
    print(f"| python -c 'import rlx' | {statistics.median(whole):.2f} | 0.5 |")
    print(f"| of which python itself | {statistics.median(bare):.2f} | |")
    with tempfile.TemporaryDirectory() as scratch:
        steps = [first_step_seconds(cores, Path(scratch) / str(i)) for i in range(2)]
    print(f"| command to first trained step | {steps[0]:.1f} | 30 |")
    print(f"| the same again | {steps[1]:.1f} | 30 |")


if __name__ == "__main__":
    main()
