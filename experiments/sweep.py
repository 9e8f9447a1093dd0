"""Run rlx.main for many variants and seeds in sequence, and keep the records of finished runs.

An experiment gives its variants as flags. `run` starts each variant with each seed in
OUT/VARIANT/seed-N, and skips runs that are finished or under way in another process. A stopped
sweep can therefore be resumed, and several sweeps can share OUT.
"""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

KEPT = ("config.json", "eval.jsonl", "metrics.jsonl", "seconds.json", "failure.txt")


def run(
    out: Path,
    config: str,
    variants: Mapping[str, Sequence[str]],
    seeds: Sequence[int],
    cores: Sequence[int],
) -> None:
    """Run each variant and seed that has no result yet, pinned to `cores`; seeds are outermost.

    A failed run counts as a result. Its last lines go to failure.txt, and the sweep continues. Only
    the records of a finished run are kept.
    """
    todo = [(name, seed) for seed in seeds for name in variants if not done(out, name, seed)]
    began = time.monotonic()
    for index, (name, seed) in enumerate(todo):
        lock = out / f"{name}-{seed}.lock"
        out.mkdir(parents=True, exist_ok=True)
        with lock.open("w") as claim:
            try:
                fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # another sweep runs it
                continue
            if done(out, name, seed):
                continue
            spent = time.monotonic() - began
            left = f", {spent / index * (len(todo) - index) / 60:.0f} min left" if index else ""
            print(f"{index + 1}/{len(todo)} {name} seed {seed}{left}", flush=True)
            _one(place(out, name, seed), config, [*variants[name], f"--config.seed={seed}"], cores)
            lock.unlink()


def place(out: Path, name: str, seed: int) -> Path:
    """Return the directory of a run's records."""
    return out / name / f"seed-{seed}"


def done(out: Path, name: str, seed: int) -> bool:
    """Return whether a run has finished or failed."""
    return (place(out, name, seed) / "seconds.json").exists()


def keep(out: Path, variants: Mapping[str, Sequence[str]], target: Path) -> None:
    """Copy the evaluations of finished runs to TARGET/VARIANT-SEED.jsonl."""
    target.mkdir(exist_ok=True)
    for name in variants:
        for over in sorted((out / name).glob("seed-*/seconds.json")):
            source, seed = over.parent / "eval.jsonl", over.parent.name.removeprefix("seed-")
            if source.exists():
                shutil.copyfile(source, target / f"{name}-{seed}.jsonl")


def records(path: Path) -> list[dict]:
    """Return the objects of a .jsonl file; empty if there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def _one(workdir: Path, config: str, flags: Sequence[str], cores: Sequence[int]) -> None:
    shutil.rmtree(workdir, ignore_errors=True)  # from a stopped sweep
    start = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-m", "rlx.main", f"--config={config}", f"--workdir={workdir}", *flags],
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    workdir.mkdir(parents=True, exist_ok=True)
    if ended.returncode == 130:
        raise KeyboardInterrupt
    if ended.returncode:
        (workdir / "failure.txt").write_text("\n".join(ended.stdout.splitlines()[-30:]) + "\n")
    for entry in workdir.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        elif entry.name not in KEPT:
            entry.unlink()
    (workdir / "seconds.json").write_text(json.dumps(time.monotonic() - start))
