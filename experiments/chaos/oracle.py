"""Judges a run by its own records: what was lost, doubled, too old, or carries a wrong version.

python -m experiments.chaos.oracle WORKDIR BOUND   trains the recorded batches again (rlx.replay)
and scores each token by the weights of the version that it carries
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from rlx.journal import history, journal
from rlx.run import replay_run
from rlx.system.jsonl import read_jsonl
from rlx.train import checkpoint

MOST = 2e-5  # nats between an engine's logprob and the trainer's, in float32


def facts(workdir: Path, batch: int, bound: int) -> Iterator[str]:
    """Yield what the records say that those of an undisturbed run would not say."""
    metrics = list(read_jsonl(workdir / "metrics.jsonl"))
    if [record["step"] for record in metrics] != list(range(1, len(metrics) + 1)):
        yield f"metrics.jsonl has {len(metrics)} steps, the last {metrics[-1]['step']}"
    if (versions := [(r["start"], r["version"]) for r in metrics]) != sorted(versions):
        yield f"versions fall: {versions}"
    rows = {(row["step"], row["group_id"]) for path in (workdir / "rollouts").iterdir()
            for row in read_jsonl(path)}  # fmt: skip
    trained = Counter(group for _, group in rows)
    if doubled := [group for group, count in trained.items() if count > 1]:
        yield f"doubled: groups {doubled}"
    if any(count != batch for count in Counter(step for step, _ in rows).values()):
        yield "a batch has another size"
    host = checkpoint.read_host(checkpoint.checkpoints(workdir / "checkpoints")[0])["executor"]
    known = {*trained, *host["buffered"], *(group for group, _ in host["pending"])}
    known |= {record["group_id"] for record in read_jsonl(workdir / "skipped.jsonl")}
    if lost := {*range(host["cursor"]["position"])} - known:
        yield f"lost: groups {sorted(lost)}"
    records = list(journal.read(workdir / "journal"))
    finished = Counter(r.fields["group_id"] for r, _ in records if r.kind == "group")
    if again := [group for group, count in finished.items() if count > 1]:
        yield f"generated again: groups {again}"
    taken: dict[int, list[int]] = {}
    for fields in (record.fields for record, _ in records if record.kind == "take"):
        if (before := taken.setdefault(fields["step"], fields["groups"])) != fields["groups"]:
            yield f"batch {fields['step']} was {before}, then {fields['groups']}"
    batches = history.batches(records).groups
    ages = [step - t.versions[t.versions >= 0] for step, places in batches.items()
            for place in places for t in place.read().group().trajectories]  # fmt: skip
    if wrong := sum(int(((age > bound) | (age < 0)).sum()) for age in ages):
        yield f"{wrong} trained tokens are older than the bound, or newer than their batch"
    left = [path.name for place in (workdir, workdir / "checkpoints") for path in place.glob(".*")]
    if left:
        yield f"left behind: {left}"


def rewards(workdir: Path, parts: int = 5) -> list[float]:
    """Return the mean reward in each fifth of the steps."""
    found = [record["task_reward"] for record in read_jsonl(workdir / "metrics.jsonl")]
    return [round(float(np.mean(part)), 3) for part in np.array_split(found, parts)]


def good(record: dict[str, Any]) -> bool:
    """Return whether nothing is wrong with a campaign."""
    replay, wrong = record["replay"], [text for *_, text in record["rows"] if text]
    scored = isinstance(replay, dict) and replay["bitwise"] and not replay["wrong_versions"]
    return scored and not (wrong or record["problems"])


class Scores:
    """Scores tokens by the weights of the version that they carry.

    Attributes:
      own: differences from the engine's logprobs, nats, of all tokens. other: of the tokens of the
        version before, as if their label were wrong by one.
    """

    def __init__(self, recorded: replay_run.Recorded, bound: int):
        self.own, self.other = list[np.ndarray](), list[np.ndarray]()
        self._recorded, self._bound = recorded, bound
        self._difference = replay_run.difference

    def __call__(self, made: Any, record: Any, sums: Any, update: Any, state: Any) -> str:
        """Take the place of `replay_run.difference`, which sees each version's weights."""
        version, known = record.get("step", -1), self._recorded.batches.groups
        steps = [k for k in range(version, version + 1 + self._bound) if k in known]
        groups = [group for k in steps for group in self._recorded.groups(k + 1)]
        scored = update.logprobs(state, groups) if groups else []
        for t, found in zip((t for g in groups for t in g.trajectories), scored, strict=True):
            far = np.abs(found - t.behaviour_logprobs)
            self.own.append(far[t.loss_mask & (t.versions == version)])
            self.other.append(far[t.loss_mask & (t.versions == version - 1)])
        return self._difference(made, record, sums, update, state)


def replayed(workdir: Path, bound: int) -> dict[str, Any]:
    """Return what a replay with scores finds; `wrong_by_one` is its power, a share of tokens."""
    recorded, lines = replay_run.Recorded(workdir), list[str]()
    scores = Scores(recorded, bound)
    with mock.patch.object(replay_run, "difference", scores):
        same = replay_run.replay(recorded, replay_run.plan(recorded), {}, lines.append)
    own, other = np.concatenate(scores.own), np.concatenate(scores.other)
    return {
        "bitwise": same, "says": lines[1:], "scored": len(own), "largest": float(own.max()),
        "wrong_versions": int((own > MOST).sum()), "wrong_by_one": float((other > MOST).mean()),
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(replayed(Path(sys.argv[1]), int(sys.argv[2]))))
