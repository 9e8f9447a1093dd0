"""Time `import rlx`, and the command up to the first trained step.

    python -m experiments.bench.startup [--cores=0,1] [--repeats=5]

Targets on two cores: 0.5 s, and 20 s with an empty compilation cache, 6 s with a full one. The
command runs as a user's would, from a new process. The first step ends when its record is in
metrics.jsonl. The parts are those of the run's timeline, up to that record.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from experiments.bench import process
from rlx.observe import timeline

COMMAND = ("-m", "rlx.main", "--config=configs/arithmetic.py")
PATIENCE = 300.0  # seconds for the steps before the benchmark gives up
STEPS = 40  # of the run that fills the cache: batches have a few shapes


def import_seconds(cores: list[int], repeats: int) -> tuple[list[float], list[float]]:
    """Return seconds of `python -c "import rlx"` and of `python -c ""`, alternating."""
    taken: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for program, seconds in zip(("import rlx", ""), taken, strict=True):
            start = time.perf_counter()
            process.pinned(["-c", program], cores)
            seconds.append(time.perf_counter() - start)
    return taken


def first_step(cores: list[int], workdir: Path, cache: Path, steps: int = 1) -> dict[str, float]:
    """Return seconds from the command to its first record, of which parts, and CPU seconds.

    The run is interrupted after `steps` records, like by Ctrl-C.
    """
    log = workdir.with_suffix(".log")
    start = time.monotonic()
    with open(log, "w") as out:
        run = subprocess.Popen(
            [sys.executable, *COMMAND, f"--workdir={workdir}"],
            stdout=out,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
            env={**process.environment(), "XDG_CACHE_HOME": str(cache)},
        )
    try:
        while _records(workdir / "metrics.jsonl") < steps:
            waited = time.monotonic() - start
            if run.poll() is not None or waited > PATIENCE:
                raise SystemExit(f"no step after {waited:.0f} s:\n{log.read_text()[-3000:]}")
            time.sleep(0.02)
        end, own = time.monotonic(), psutil.Process(run.pid)
        used = [sum(each.cpu_times()[:2]) for each in (own, *own.children(recursive=True))]
    finally:
        if run.poll() is None:
            run.send_signal(signal.SIGINT)
        try:
            run.wait(120)
        except subprocess.TimeoutExpired:
            run.kill()
    found = {"command to first trained step": end - start, "CPU seconds": sum(used)}
    return found | _parts(workdir / "timeline.json", start, end)


def _parts(trace: Path, start: float, end: float) -> dict[str, float]:
    """Return the seconds of each part of the trainer's main thread, and those of the server."""
    spans = [
        (span, span.start_ns / 1e9, min(span.end_ns / 1e9, end))
        for span in timeline.read(json.loads(trace.read_text()))
        if span.start_ns / 1e9 < end
    ]
    main = [each for each in spans if each[0][:2] == ("trainer", "main")]
    parts = {"python, imports, config": min(a for _, a, _ in main) - start}
    for span, a, b in main:
        parts[span.name] = parts.get(span.name, 0.0) + b - a
    for span, a, b in spans:
        if span.name == "load and compile":
            parts |= {"server: begins to load at": a - start, "server: has compiled at": b - start}
    return parts


def _records(path: Path) -> int:
    return path.read_text().count("\n") if path.exists() else 0


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
        place = Path(scratch)
        # Python's own compilation of all modules belongs to the installation.
        first_step(cores, place / "first", place / "another cache")
        cold = first_step(cores, place / "cold", place / "cache")
        first_step(cores, place / "filling", place / "cache", STEPS)
        warm = [first_step(cores, place / str(i), place / "cache") for i in range(args.repeats)]
    whole = [each["command to first trained step"] for each in warm]
    print(f"| command to first trained step | {cold['command to first trained step']:.1f} | 20 |")
    print(f"| the same again | {statistics.median(whole):.1f} | 6 |")
    print("\n| what | cold | warm, median | warm, all |\n|---|---|---|---|")
    for part in cold:
        taken = [each.get(part, 0.0) for each in warm]
        each = " ".join(f"{seconds:.1f}" for seconds in taken)
        print(f"| {part} | {cold[part]:.2f} | {statistics.median(taken):.2f} | {each} |")


if __name__ == "__main__":
    main()
