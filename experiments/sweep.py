"""Many runs of rlx.main, one after the other, and the records of those that are finished.

An experiment says its variants as flags; `run` starts each with each seed as a user would, in
OUT/VARIANT/seed-N, and skips what is over already or under way elsewhere, so a sweep that was
stopped goes on, and several sweeps can share OUT.
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
    """Every variant with every seed that has no result yet, seeds outermost, pinned to `cores`.

    A run that ends with an error is a result too: its last lines go to failure.txt, and the sweep
    goes on. Of a finished run only its records are kept.
    """
    todo = [(name, seed) for seed in seeds for name in variants if not done(out, name, seed)]
    began = time.monotonic()
    for index, (name, seed) in enumerate(todo):
        lock = out / f"{name}-{seed}.lock"
        out.mkdir(parents=True, exist_ok=True)
        with lock.open("w") as claim:
            try:
                fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # a sweep beside this one has it
                continue
            if done(out, name, seed):
                continue
            spent = time.monotonic() - began
            left = f", {spent / index * (len(todo) - index) / 60:.0f} min left" if index else ""
            print(f"{index + 1}/{len(todo)} {name} seed {seed}{left}", flush=True)
            _one(place(out, name, seed), config, [*variants[name], f"--config.seed={seed}"], cores)
            lock.unlink()


def place(out: Path, name: str, seed: int) -> Path:
    """Where a run's records are."""
    return out / name / f"seed-{seed}"


def done(out: Path, name: str, seed: int) -> bool:
    """Whether a run is over, well or not."""
    return (place(out, name, seed) / "seconds.json").exists()


def keep(out: Path, variants: Mapping[str, Sequence[str]], target: Path) -> None:
    """Copies the evaluations of finished runs to TARGET/VARIANT-SEED.jsonl."""
    target.mkdir(exist_ok=True)
    for name in variants:
        for over in sorted((out / name).glob("seed-*/seconds.json")):
            source, seed = over.parent / "eval.jsonl", over.parent.name.removeprefix("seed-")
            if source.exists():
                shutil.copyfile(source, target / f"{name}-{seed}.jsonl")


def records(path: Path) -> list[dict]:
    """The objects of a .jsonl file; none where there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def _one(workdir: Path, config: str, flags: Sequence[str], cores: Sequence[int]) -> None:
    shutil.rmtree(workdir, ignore_errors=True)  # of a sweep that was stopped
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
