"""Pure functions from the records of a journal to the state and the batches of a run."""

import itertools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from rlx.base import Group
from rlx.journal.journal import Place
from rlx.journal.records import Record

_STARTS_AT_ZERO = (0, -1)  # position of a run without a checkpoint
_ENDS = ("group", "reject", "skip", "fail")  # kinds of records that end an attempt


class Piece(NamedTuple):
    """Tokens of a sample that came together; `end` counts all up to its last one."""

    columns: dict[str, Any]  # of a Chunk: tokens, logprobs, versions, and masks if there are any
    stop_reason: str | None  # None: the sample goes on
    end: int


Samples = dict[tuple[int, int], list[Piece]]  # of one attempt, by call and index


class Recovered(NamedTuple):
    """The state of an executor that was killed."""

    host: dict[str, Any]  # in the form of `Executor.state`, with the events since
    groups: list[Group]  # the finished groups that `host` names
    samples: dict[int, Samples]  # group_id → unfinished samples
    complete: bool  # whether the records follow the position of `host` without a gap


def position(host: Mapping[str, Any] | None) -> tuple[int, int] | None:
    """Return the first record that a checkpoint needs and its last; None without a journal."""
    if host is None:  # there is no checkpoint
        return _STARTS_AT_ZERO
    return tuple(host["journal"]) if host.get("journal") else None


def recover(
    host: Mapping[str, Any], at: tuple[int, int] | None, records: Iterable[Record]
) -> Recovered:
    """Return the state `host`, whose `position` is `at`, after the events in `records`."""
    state, prior = _State(host), set(host.get("buffered", ())) | set().union(*host.get("order", ()))
    complete, due, last = at is not None, at[1] + 1 if at else 0, -1
    packed: dict[int, Record] = {}
    samples: dict[int, Samples] = {}
    for record in records if at else ():
        fields, last = record.fields, record.number
        if record.kind == "tokens":
            _extend(samples, record)
        elif record.kind in _ENDS or (record.kind == "admit" and not fields.get("kept")):
            samples.pop(fields["group_id"], None)
        if record.kind == "group" and (record.number >= due or fields["group_id"] in prior):
            packed[fields["group_id"]] = record
        if record.number < due:
            continue
        complete = complete and record.number == due
        due = record.number + 1
        if record.kind == "start" and not fields["whole"]:
            # It follows another checkpoint if that was damaged since.
            state, complete = _State(host), fields.get("step", host["step"]) == host["step"]
        if record.kind == "start" and at == _STARTS_AT_ZERO:  # no checkpoint refuses other rows
            complete = complete and fields["rows"] == host["cursor"]["digest"]
        if complete:
            state.after(record.kind, fields)
    complete = complete and last + 1 >= due  # a power cut may have lost records of the checkpoint
    new_host = {**(state if complete else _State(host)).host(), "journal": at}
    group_ids = {*new_host["buffered"], *(g for ids in new_host["order"] for g in ids)}
    samples = {g: samples[g] for g, _ in new_host["pending"] if g in samples}
    groups = [packed[g].group() for g in sorted(group_ids & packed.keys())]
    return Recovered(new_host, groups, samples, complete)


def _extend(samples: dict[int, Samples], record: Record) -> None:
    """Append a record's tokens to their samples, unless tokens before them are lost."""
    (t,), begin = record.group().trajectories, 0
    sizes = np.zeros(len(t.tokens), int) if t.kept_sizes is None else t.kept_sizes
    ends = np.append(0, np.cumsum(sizes))
    for group_id, call, index, at, count, stop_reason in record.fields["pieces"]:
        part = slice(begin, end := begin + count)
        columns: dict[str, Any] = {
            "tokens": t.tokens[part], "logprobs": t.behaviour_logprobs[part],
            "versions": t.versions[part],
        }  # fmt: skip
        if t.kept is not None:
            masks = t.kept[ends[begin] : ends[end]].tobytes()
            columns |= {"kept_sizes": sizes[part], "kept": masks}
        begin = end
        reason = None if stop_reason == "abort" else stop_reason  # it ends a request only
        pieces = samples.setdefault(group_id, {})
        before = pieces.get((call, index), []) if at else []
        if at == (before[-1].end if before else 0):
            pieces[call, index] = [*before, Piece(columns, reason, at + count)]


class _State:
    """An executor's state by the events of its journal."""

    def __init__(self, host: Mapping[str, Any]):
        self._host = {**host, "cursor": dict(host["cursor"])}
        self._step, self._best = host["step"], host.get("best_reward")
        self._waiting = dict(host["pending"])
        self._versions = dict(host.get("admitted_at", ()))
        self._order = dict(enumerate(host.get("order", ()), self._step))
        # Groups of batches that a later start cannot repeat are buffered again.
        self._finished = dict.fromkeys(
            itertools.chain(*self._order.values(), host.get("buffered", ()))
        )

    def after(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Change the state by one event; ignore an unknown one."""
        group: Any = fields.get("group_id")
        if kind == "start":
            self._order = {k: ids for k, ids in self._order.items() if k < fields["order"]}
        elif kind == "admit":
            cursor = self._host["cursor"]
            cursor["position"] = max(cursor["position"], group + 1)
            cursor["place"] = max(cursor.get("place", 0), fields.get("place", group + 1))
            if "row" in fields:
                cursor["drawn"] = [*cursor.get("drawn", ()), [group, fields["row"]]]
            self._waiting[group], self._versions[group] = fields["attempt"], fields["version"]
            self._finished.pop(group, None)
            self._host["admitted"] += 1
        elif kind == "take":
            self._order[fields["step"]] = fields["groups"]
        elif kind == "concurrency":
            self._host["concurrency"] = fields["prompts"]
        elif kind in _ENDS:
            self._waiting.pop(group, None)
            self._versions.pop(group, None)
            if kind == "group":
                self._finished[group] = None
            elif kind == "fail":
                self._waiting[group] = fields["attempt"]
            else:
                self._host["rejected" if kind == "reject" else "skipped"] += 1
            if "pool" in fields:
                row, pool = fields["pool"]
                pools = {**dict(self._host["cursor"].get("pools", ())), row: pool}
                self._host["cursor"]["pools"] = [[r, p] for r, p in pools.items() if p]
            self._host["failed"] += kind in ("fail", "skip")
            self._best = fields.get("best", self._best)

    def host(self) -> dict[str, Any]:
        """Return the state in the form of `Executor.state`."""
        steps = itertools.takewhile(self._order.__contains__, itertools.count(self._step))
        order = [list(self._order[step]) for step in steps]
        taken = {g for ids in order for g in ids}
        return {
            **self._host, "order": order, "best_reward": self._best,
            "pending": sorted([g, a] for g, a in self._waiting.items() if g not in taken),
            "admitted_at": [[g, v] for g, v in self._versions.items() if g not in taken],
            "buffered": [g for g in self._finished if g not in taken],
        }  # fmt: skip


class Batches(NamedTuple):
    """The batches that a run trained on, and its weights."""

    groups: dict[int, list[Place]]  # step, from 0 → place of each group of its batch
    weights: dict[int, Mapping[str, Any]]  # version → fields of its last record of kind `weights`
    attempts: dict[int, int]  # group_id → the attempt that made it, if the journal has it


def batches(records: Iterable[tuple[Record, Place]]) -> Batches:
    """Return the batches that the last process to do a step trained on; incomplete ones go."""
    places: dict[int, Place] = {}
    result = Batches({}, {}, {})
    for record, place in records:
        fields = record.fields
        if record.kind == "admit":
            result.attempts[fields["group_id"]] = fields["attempt"]
        elif record.kind == "group":
            places[fields["group_id"]] = place
        elif record.kind == "take":
            result.groups.pop(fields["step"], None)
            if all(g in places for g in fields["groups"]):
                result.groups[fields["step"]] = [places[g] for g in fields["groups"]]
        elif record.kind == "weights":
            result.weights[fields["version"]] = fields
        elif record.kind == "start":
            for step in [k for k in result.groups if k >= fields["order"]]:
                del result.groups[step]
            for version in [v for v in result.weights if v > fields["order"]]:
                del result.weights[version]
    return result
