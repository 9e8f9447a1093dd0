"""Judges a run by its own records: what was lost, doubled, too old, or carries a wrong version.

python -m experiments.chaos.oracle WORKDIR BOUND   trains the recorded batches again (rlx.replay)
and scores each token by the weights of the version that it carries
"""

import json
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from rlx.journal import history, journal
from rlx.run import replay_run
from rlx.system.jsonl import read_jsonl
from rlx.train import checkpoint

MOST = 1e-4  # nats between logprobs of engine and trainer in float32; of 40,000 one had 4e-5
FAR = 3.0  # spreads of undisturbed runs, from their mean
LEAST = 0.02  # of a spread; a few seeds may agree by chance
Curve = Sequence[Sequence[float]]  # step and greedy accuracy of each evaluation


def facts(workdir: Path, batch: int, bound: int) -> dict[str, Any]:
    """Return by name what the records of an undisturbed run would not have; empty: nothing."""
    metrics = list(read_jsonl(workdir / "metrics.jsonl"))
    versions = [(record["start"], record["version"]) for record in metrics]
    rows = {(row["step"], row["group_id"]) for path in (workdir / "rollouts").iterdir()
            for row in read_jsonl(path)}  # fmt: skip
    trained = Counter(group for _, group in rows)
    sizes = Counter(step for step, _ in rows)
    host = checkpoint.read_host(checkpoint.checkpoints(workdir / "checkpoints")[-1])["executor"]
    known = {*trained, *host["buffered"], *(group for group, _ in host["pending"])}
    known |= {group for groups in host["order"] for group in groups}
    known |= {record["group_id"] for record in read_jsonl(workdir / "skipped.jsonl")}
    records = list(journal.read(workdir / "journal"))
    finished = Counter(r.fields["group_id"] for r, _ in records if r.kind == "group")
    taken: dict[int, set[tuple[int, ...]]] = {}
    for fields in (record.fields for record, _ in records if record.kind == "take"):
        taken.setdefault(fields["step"], set()).add(tuple(fields["groups"]))
    ages = [step - t.versions[t.versions >= 0]
            for step, places in history.batches(records).groups.items()
            for place in places for t in place.read().group().trajectories]  # fmt: skip
    return {
        "lost": sorted({*range(host["cursor"]["position"])} - known),
        "doubled": [group for group, count in trained.items() if count > 1],
        "generated again": [group for group, count in finished.items() if count > 1],
        "wrong steps": [r["step"] for k, r in enumerate(metrics, 1) if k != r["step"]],
        "versions that fall": [b for a, b in pairwise(versions) if b < a],
        "batches of another size": [step for step, size in sizes.items() if size != batch],
        "batches taken otherwise again": [step for step, each in taken.items() if len(each) > 1],
        "tokens beyond the bound": sum(int(((age > bound) | (age < 0)).sum()) for age in ages),
        "files left behind": [path.name for place in (workdir, workdir / "checkpoints")
                              for path in place.glob(".*")],
    }  # fmt: skip


def held_out(workdir: Path) -> Curve:
    """Return the run's curve, without questions that faults left unanswered."""
    return [[r["step"], round(r["greedy_acc"] * r["num_questions"] / answered, 4)]
            for r in read_jsonl(workdir / "eval.jsonl")
            if (answered := r["num_questions"] - r["failed"])]  # fmt: skip


def apart(own: Curve, others: Sequence[Curve]) -> dict[str, float]:
    """Return mean accuracies of a run and of others at its steps, and their distance in spreads."""
    last = min(curve[-1][0] for curve in others)
    steps, found = np.transpose([point for point in own if 0 < point[0] <= last])
    means = [np.interp(steps, *np.transpose(curve)).mean() for curve in others]
    spread = max(float(np.std(means, ddof=1)), LEAST)
    far = float(abs(found.mean() - np.mean(means)) / spread)
    return {"to step": last, "own": float(found.mean()), "others": float(np.mean(means)),
            "spread": spread, "apart": far}  # fmt: skip


def good(record: dict[str, Any]) -> bool:
    """Return whether nothing is wrong with a campaign."""
    replay, wrong = record["replay"], [text for *_, text in record["rows"] if text]
    scored = isinstance(replay, dict) and replay["bitwise"] and not replay["wrong_versions"]
    learns = record.get("learning", {}).get("apart", 0.0) <= FAR
    return scored and learns and not (wrong or record["problems"] or any(record["facts"].values()))


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
