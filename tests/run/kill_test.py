"""A run is killed again and again, and the same command goes on: a checker reads its history.

The killer watches the run's files and sends SIGKILL to its process group at a named point: before
the first checkpoint, inside one, between it and the export, inside the export, inside a publish,
inside an evaluation; or at a seeded time. Nothing in the package helps it. A single kill is
in main_test.
"""

import itertools
import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from rlx.journal import journal
from rlx.journal.records import Record
from tests.fixtures.commands import RLX_MAIN, with_devices, without_torch

BATCH, EVAL_EVERY, CHECKPOINT_EVERY, STEPS_EACH = 2, 3, 4, 4
COMMAND = [
    *RLX_MAIN, "--config=configs/arithmetic.py",
    f"--config.rollout.batch_prompts={BATCH}", "--config.sampling.n_samples=4",
    "--config.sampling.max_new_tokens=24", "--config.fleet.slots=8",
    "--config.reward.name=reward_functions:length",
    f"--config.eval.every_steps={EVAL_EVERY}", "--config.eval.num_questions=2",
    f"--config.checkpoint.every_steps={CHECKPOINT_EVERY}", "--config.gate.every_steps=5",
    "--config.observe.transcripts_per_step=64", "--config.observe.writers=()",
    "--config.model.compute_dtype=float32",
]  # fmt: skip
SECONDS = 240.0  # until an attempt is given up
KILLS = int(os.environ.get("RLX_TEST_KILLS", "5"))  # of a run; with five the two reach every point


def start(workdir: Path, total_steps: int, max_staleness: int, *flags: str) -> subprocess.Popen:
    functions = Path(__file__).parents[1] / "rewards"
    with open(workdir.with_suffix(".log"), "ab") as log:
        return subprocess.Popen(
            [*COMMAND, f"--workdir={workdir}", f"--config.fleet.publish_dir={workdir.parent}",
             f"--config.total_steps={total_steps}",
             f"--config.rollout.max_staleness={max_staleness}", *flags],
            stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, "RLX_TEST_RUN": str(workdir),
                 "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '.')}:{functions}"},
        )  # fmt: skip


def records(path: Path) -> list[dict]:
    """Whole lines; of a file that is being written the last may be a part."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def entries(directory: Path) -> set[tuple[str, int]]:
    """Names below a directory, with inodes: what is made anew under an old name is another."""
    try:
        return {(entry.name, entry.inode()) for entry in os.scandir(directory)}
    except OSError:
        return set()


class Attempt:
    """What one process has changed in its directories since it began."""

    def __init__(self, workdir: Path, clock: Callable[[], float] = time.monotonic):
        self.workdir, self._clock, self._begun = workdir, clock, clock()
        self._places = {
            "run": workdir, "checkpoints": workdir / "checkpoints", "publish": workdir.parent
        }  # fmt: skip
        self._before = {place: entries(path) for place, path in self._places.items()}
        self._steps, self._first_step = len(records(workdir / "metrics.jsonl")), None
        self._first_change = self._changed()

    def _changed(self) -> int:
        """When somebody wrote to the steps, in nanoseconds; 0: there are none."""
        with suppress(OSError):
            return os.stat(self.workdir / "metrics.jsonl").st_mtime_ns
        return 0

    def training(self) -> bool:
        """Whether this process has come to its steps."""
        return self._changed() != self._first_change

    def new(self, place: str, prefix: str) -> bool:
        found = entries(self._places[place]) - self._before[place]
        return any(name.startswith(prefix) for name, _ in found)

    def published(self) -> bool:
        for place, below, names in os.walk(self.workdir.parent):  # what goes meanwhile is left out
            if place == str(self.workdir):
                below.clear()
                continue
            for name in names:
                with suppress(OSError):
                    if name.endswith(".safetensors") and os.stat(Path(place, name)).st_size:
                        return True
        return False

    def seconds(self) -> float:
        return self._clock() - self._begun

    def stepping(self) -> float:
        """Seconds since this process wrote its first step; negative before."""
        steps = records(self.workdir / "metrics.jsonl")
        if self._first_step is None and self.seconds() > 1 and len(steps) != self._steps:
            self._first_step = self._clock()
        return -1.0 if self._first_step is None else self._clock() - self._first_step

    def evaluating(self) -> bool:
        steps = [record["step"] for record in records(self.workdir / "metrics.jsonl")]
        done = [record["step"] for record in records(self.workdir / "eval.jsonl")]
        if self.stepping() < 0 or not steps:  # begun anew, it has forgotten them
            return False
        return steps[-1] % EVAL_EVERY == 0 and steps[-1] not in done


def before_checkpoint(attempt: Attempt) -> bool:
    return attempt.stepping() >= 0 and not list(attempt.workdir.glob("checkpoints/step_*"))


POINTS: dict[str, Callable[[Attempt], bool]] = {
    "in a checkpoint": lambda a: a.new("checkpoints", ".writing-"),
    "between checkpoint and export": lambda a: a.new("checkpoints", "step_"),
    "in the export": lambda a: a.new("run", ".hf-"),
    "when the export takes its place": lambda a: a.new("run", "hf"),
    "in a publish": Attempt.published,
    "in an evaluation": Attempt.evaluating,
}


def plan(kills: int, seed: int) -> Iterator[tuple[str, Callable[[Attempt], bool]]]:
    """The first kill comes before the first checkpoint; then every point in turn, and times."""
    draw, points = random.Random(seed), itertools.cycle(POINTS.items())
    for _ in range(seed // 2 * 3 % len(POINTS)):
        next(points)
    yield "before the first checkpoint", before_checkpoint
    for index in range(1, kills):
        if index % 3 == 0 and (index // 3 + seed // 2) % 2:
            after = draw.uniform(0.0, 0.6)
            yield f"{after:.2f} s after a step", lambda a, after=after: a.stepping() > after
        elif index % 3 == 0:
            after = draw.uniform(0.0, 8.0)
            yield f"after {after:.2f} s", lambda a, after=after: a.seconds() > after
        else:
            yield next(points)


def kill_at(
    process: subprocess.Popen, point: Callable[[], bool], soon: Callable[[], bool] = lambda: False
) -> bool:
    """Whether the point came and the process group was killed; False when it ended before.

    Looks seldom, and leaves the process its core, until the point may come `soon`.
    """
    deadline = time.monotonic() + SECONDS
    try:
        while process.poll() is None and time.monotonic() < deadline:
            if point():
                return True
            time.sleep(0.0005 if soon() else 0.02)
        return False
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def left_over(workdir: Path) -> list[int]:
    """Processes that the run has started and that still live."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if f"RLX_TEST_RUN={workdir}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def last_lines(workdir: Path) -> str:
    return workdir.with_suffix(".log").read_text(errors="replace")[-600:]


def campaign(root: Path, kills: int, max_staleness: int, seed: int) -> tuple[Path, list[str]]:
    """Kills a run `kills` times and lets it end; where it is, and all that went wrong.

    A run that cannot go on is left, and another is begun in its place.
    """
    total_steps, failures, runs = STEPS_EACH * (kills + 1), [], 0
    workdir = root / "run0" / "run"
    workdir.parent.mkdir(parents=True)
    for name, point in plan(kills, seed):
        had_export = (workdir / "hf").exists()
        attempt = Attempt(workdir)
        process = start(workdir, total_steps, max_staleness)
        # Weights are published before the first step, too.
        soon = attempt.training if name != "in a publish" else lambda: True
        reached = kill_at(process, lambda point=point, attempt=attempt: point(attempt), soon)
        if not reached:
            failures.append(f"{name}: status {process.returncode}: {last_lines(workdir)}")
            runs += 1
            workdir = root / f"run{runs}" / "run"
            workdir.parent.mkdir(parents=True)
            continue
        deadline = time.monotonic() + 30
        while left_over(workdir) and time.monotonic() < deadline:
            time.sleep(0.05)
        if processes := left_over(workdir):
            failures.append(f"{name}: processes {processes} live on")
        if had_export:
            try:
                load_file(workdir / "hf" / "model.safetensors")
            except Exception as error:
                failures.append(f"{name}: hf/ is not whole: {error}")
    process = start(workdir, total_steps, max_staleness)
    kill_at(process, lambda: False)
    if process.returncode != 0:
        failures.append(f"at the end: status {process.returncode}: {last_lines(workdir)}")
    failures += history(workdir, total_steps, max_staleness)
    return workdir, failures


def noted_twice(events: list[Record]) -> list[tuple[int, int, int]]:
    """Samples whose tokens in the journal overlap or have a hole."""
    ends, found = {}, []
    for pieces in (record.fields["pieces"] for record in events if record.kind == "tokens"):
        for group, call, index, at, count, _ in pieces:
            if ends.get((group, call, index), 0) != at:
                found.append((group, call, index))
            ends[group, call, index] = at + count
    return found


def history(workdir: Path, total_steps: int, max_staleness: int) -> Iterator[str]:
    """What a run's records say that a run without a kill would not say."""
    steps = records(workdir / "metrics.jsonl")
    if [record["step"] for record in steps] != list(range(1, total_steps + 1)):
        yield f"metrics.jsonl has steps {[record['step'] for record in steps]}"
    if any(record["dropped"] for record in steps):
        yield "groups were dropped"
    for name in ("eval", "gate"):  # an evaluation that was lost is made up for at a later step
        lines = records(workdir / f"{name}.jsonl")
        found = [record["step"] for record in lines]
        of = {(record["step"], *record.get("servers", ())) for record in lines}
        if found != sorted(found) or len(of) < len(lines):  # each newcomer has a check of its own
            yield f"{name}.jsonl has steps {found}"
    rows = [row for path in (workdir / "rollouts").iterdir() for row in records(path)]
    groups = {(row["step"], row["group_id"]) for row in rows}
    if twice := [g for g, n in Counter(group for _, group in groups).items() if n > 1]:
        yield f"groups {twice} were trained on twice"
    if any(n != BATCH for n in Counter(step for step, _ in groups).values()):
        yield "a batch is not of its size"
    if len({step for step, _ in groups}) != total_steps:
        yield f"there are rollouts of {len({step for step, _ in groups})} steps"
    events = [record for record, _ in journal.read(workdir / "journal")]
    finished = Counter(r.fields["group_id"] for r in events if r.kind == "group")
    if again := [group for group, n in finished.items() if n > 1]:
        yield f"groups {again} had finished and were generated again"
    if cut := [n for n in noted_twice(events) if max_staleness]:
        yield f"samples {cut} were continued from another token than their last one"
    batches: dict[int, list[int]] = {}
    for fields in (record.fields for record in events if record.kind == "take"):
        if batches.setdefault(fields["step"], fields["groups"]) != fields["groups"]:
            yield f"batch {fields['step']} was {batches[fields['step']]}, then {fields['groups']}"
    left = [name for name in os.listdir(workdir) if name.startswith(".") or name == "running.json"]
    left += [p.name for p in (workdir / "checkpoints").iterdir() if p.name.startswith(".")]
    left += [p.name for p in workdir.parent.rglob("*.safetensors") if workdir not in p.parents]
    if left:
        yield f"left behind: {left}"


def check(root: Path, kills: int, max_staleness: int, seed: int) -> None:
    workdir, failures = campaign(root / "killed", kills, max_staleness, seed)
    if max_staleness == 0:
        undisturbed = root / "whole" / "run"
        undisturbed.parent.mkdir()
        process = start(undisturbed, STEPS_EACH * (kills + 1), 0)
        kill_at(process, lambda: False)
        assert process.returncode == 0, last_lines(undisturbed)
        found = (workdir / "hf" / "model.safetensors").read_bytes()
        assert found != Path("rlx/assets/arithmetic/model.safetensors").read_bytes()
        if found != (undisturbed / "hf" / "model.safetensors").read_bytes():
            failures.append("the weights are not those of an undisturbed run")
    else:
        replay = [*without_torch("rlx.replay"), str(workdir)]
        done = subprocess.run(replay, capture_output=True, text=True, timeout=SECONDS)
        if done.returncode or "are bitwise those of the run" not in done.stdout:
            failures.append(f"replay: {done.stdout}{done.stderr}")
    assert not failures, "\n\n".join([f"{len(failures)} failures", *failures])


def test_five_kills_of_each_of_two_runs_reach_every_point():
    reached = {name for seed in (1, 3) for name, _ in plan(5, seed)}
    assert POINTS.keys() < reached
    assert any("after a step" in name for name in reached)


@pytest.mark.slow(seconds=120 * KILLS)
@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_run_killed_again_and_again_goes_on(tmp_path, max_staleness):
    check(tmp_path, KILLS, max_staleness, seed=1 + max_staleness)


LONG = (
    "--config.sampling.max_new_tokens=400", "--config.sampling.min_new_tokens=350",
    "--config.train.row_buckets=(512,)", "--config.fleet.max_model_len=480",
    "--config.eval.num_questions=0", "--config.gate.enabled=False",
    "--config.fleet.threads=1",  # a fast server would seldom have samples under way
)  # fmt: skip


def under_way(workdir: Path) -> dict[int, dict[int, list[int]]]:
    """Group → sample → tokens, of the samples that a run of single turns has not finished."""
    found: dict[int, dict[int, list[int]]] = {}
    for record, _ in journal.read(workdir / "journal"):
        if record.kind == "tokens":
            tokens = record.group().trajectories[0].tokens.tolist()
            for group, _, index, at, count, _ in record.fields["pieces"]:
                sample = found.setdefault(group, {}).setdefault(index, [])
                sample[at:], tokens = tokens[:count], tokens[count:]
        elif record.kind == "group":
            found.pop(record.fields["group_id"], None)
    return found


@pytest.mark.slow
def test_long_answers_go_on_after_kills_on_other_servers_and_another_mesh(tmp_path, monkeypatch):
    workdir, total = tmp_path / "run" / "run", 8
    workdir.parent.mkdir()
    had: dict[int, dict[int, list[int]]] = {}
    kills = 0  # that left samples: all may have finished by then
    for servers, step in ((1, 3), (2, 5)):

        def reached(step=step) -> bool:
            steps = len(records(workdir / "metrics.jsonl"))
            there = steps >= step and list(workdir.glob("checkpoints/step_*"))
            return bool(there) and sum(map(len, under_way(workdir).values())) > 2

        process = start(workdir, total, 2, *LONG, f"--config.fleet.num_servers={servers}")
        assert kill_at(process, reached), last_lines(workdir)
        kills += bool(left := under_way(workdir))
        for group, samples in left.items():
            had.setdefault(group, {}).update(samples)
    monkeypatch.setenv("XLA_FLAGS", with_devices(2)["XLA_FLAGS"])
    process = start(workdir, total, 2, *LONG, "--config.train.mesh=fsdp:2")
    kill_at(process, lambda: False)
    assert process.returncode == 0, last_lines(workdir)
    assert not list(history(workdir, total, 2))
    events = [record for record, _ in journal.read(workdir / "journal")]
    made = {r.fields["group_id"]: r.group().trajectories for r in events if r.kind == "group"}
    assert sum(map(len, had.values())) > 2
    for group, samples in had.items():
        for index, tokens in samples.items():
            t = made[group][index]
            assert t.tokens[t.versions >= 0][: len(tokens)].tolist() == tokens
    notes = [line["continued"] for line in records(workdir / "starts.jsonl") if "continued" in line]
    assert len(notes) == kills
    assert sum(note["tokens"] for note in notes) >= sum(
        len(t) for s in had.values() for t in s.values()
    )
    assert all(note["repeated_tokens"] == 0 for note in notes)
    assert "continued: " in workdir.with_suffix(".log").read_text()
    assert records(workdir / "metrics.jsonl")[-1]["continued_tokens"] == notes[-1]["tokens"]
