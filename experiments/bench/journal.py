"""Measure the cost of the journal: the same run with and without it, in turns.

    python -m experiments.bench.journal --cores=0,1 [--steps=40] [--pairs=5]

Seconds per step need idle cores. CPU seconds of the journal's thread, and of the event loop where
it collects new tokens (`Unfinished.write`), hold on a busy machine too.
"""

import argparse
import json
import statistics
import tempfile
import threading
import time
from pathlib import Path

from experiments.bench.process import cores_of, median_spread, rlx_run
from rlx.rollout import unfinished

KEEP = {"with": 10**9, "without": 0}


class Clock:
    """A run's hook: writes the CPU seconds that the journal has taken so far."""

    def on_begin(self, config, workdir, step):
        """Count the time of `Unfinished.write`, on the thread of the loop."""
        self._file, self._loop, write = workdir / "cpu.jsonl", 0.0, unfinished.Unfinished.write

        def timed(own):
            begun = time.thread_time()
            write(own)
            self._loop += time.thread_time() - begun

        unfinished.Unfinished.write = timed

    def on_step(self, step, record):
        """Write the times."""
        threads = {thread.name: thread.ident for thread in threading.enumerate()}
        own = time.pthread_getcpuclockid(threads["journal"]) if "journal" in threads else 0
        thread = time.clock_gettime(own) if own else 0.0
        with open(self._file, "a") as file:
            print(json.dumps([thread, self._loop]), file=file)


def main() -> None:
    """Print seconds per step of each, and the share of the journal's CPU seconds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cores", type=cores_of, default=[0, 1])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--pairs", type=int, default=5)
    a = parser.parse_args()
    seconds: dict[str, list[float]] = {name: [] for name in KEEP}
    shares, first = [], a.steps // 4
    with tempfile.TemporaryDirectory() as scratch:
        for pair in range(a.pairs):
            for name in sorted(KEEP, reverse=pair % 2 > 0):
                place = Path(scratch) / f"{name}-{pair}"
                records = rlx_run(
                    "configs/arithmetic.py", place, a.cores, f"--config.total_steps={a.steps}",
                    "--config.eval.num_questions=0", f"--config.journal.keep={KEEP[name]}",
                    f"--config.observe.writers=('{__file__}:Clock',)",
                )  # fmt: skip
                seconds[name].append(statistics.mean(r["step_seconds"] for r in records[first:]))
                spent = [*map(json.loads, (place / "cpu.jsonl").read_text().splitlines())]
                own = [b - a for a, b in zip(spent[first - 1], spent[-1], strict=True)]
                total = sum(record["step_seconds"] for record in records[first:])
                if name == "with":
                    shares.append([each / total for each in own])
                print(f"{name:>8}: {seconds[name][-1]:.4f} s/step", flush=True)
    ratios = [w / o for w, o in zip(seconds["with"], seconds["without"], strict=True)]
    for name, found in seconds.items():
        print(f"{name:>8} the journal: {median_spread(found)} s/step")
    print(f"ratio of each pair: {median_spread(ratios)}")
    thread, loop = (statistics.median(each) for each in zip(*shares, strict=True))
    print(
        f"CPU of the journal's thread {thread:.2%} of a step, of its notes on the loop {loop:.2%}"
    )


if __name__ == "__main__":
    main()
