"""What many runs did, in numbers: latencies, calls at once, mistakes, causes of stalls. Pure."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlx.agents import returned
from rlx.agents.crowd import Outcome, Session
from rlx.agents.exchange import Call
from rlx.agents.stalls import Cause, causes
from rlx.cli.text import duration


@dataclass(frozen=True, slots=True)
class Alone:
    """A run without company: its seconds, and those of them that it waited for the server."""

    seconds: float
    waiting: float


@dataclass(frozen=True, slots=True)
class Flight:
    """How many were under way at one time, and on average from the first to the last."""

    most: int
    mean: float


def flight(spans: Sequence[tuple[float, float]]) -> Flight:
    """Of (begin, end) spans, in seconds."""
    if not spans:
        return Flight(0, 0.0)
    edges = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
    now = most = 0
    for _, step in edges:
        now += step
        most = max(most, now)
    whole = max(end for _, end in spans) - min(begin for begin, _ in spans)
    return Flight(most, sum(end - begin for begin, end in spans) / whole if whole > 0 else 1.0)


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """p50, p90, p99 and max; empty for nothing."""
    if not values:
        return {}
    found = np.quantile(values, (0.5, 0.9, 0.99, 1.0))
    return dict(zip(("p50", "p90", "p99", "max"), map(float, found), strict=True))


def alone(outcome: Outcome, calls: Sequence[Call]) -> Alone:
    """Of a run that had the machine for itself; overlapping calls count once."""
    spans = sorted((c.begin, c.end) for c in calls if c.run == outcome.job.run and c.generates)
    waiting, until = 0.0, 0.0
    for begin, end in spans:
        waiting += max(end - max(begin, until), 0.0)
        until = max(until, end)
    return Alone(outcome.seconds, waiting)


class Facts:
    """A session, its calls, and what follows.

    Args:
      calls: finished ones of any run; `unanswered` those that were open at the end.
      single: a run alone, if there was one; the fastest of the session stands for it otherwise, or
        where it was faster.
    """

    def __init__(
        self,
        session: Session,
        calls: Sequence[Call],
        unanswered: Sequence[Call],
        single: Alone | None,
    ):
        self.session = session
        own = {outcome.job.run for outcome in session.outcomes}
        # Also calls at an address of an earlier run: an agent that kept its client sends those.
        later = [c for c in calls if c.begin >= session.begin]
        self.calls = [c for c in later if c.run in own and c.generates]
        self.strays = [c for c in later if c.run not in own and c.generates]
        self.unanswered = [c for c in unanswered if c.generates]
        self.ids: dict[int, list[str]] = defaultdict(list)
        for call in self.calls:
            if call.completion_id and call.ok:
                self.ids[call.run].append(call.completion_id)
        self.mistakes = {
            o.job.run: wrong
            for o in session.outcomes
            if o.end == "returned" and (wrong := returned.mistake(o.value, self.ids[o.job.run]))
        }
        self.causes, self.idle = causes(session.stalls)
        ended = [o for o in session.outcomes if o.end == "returned" and self.ids[o.job.run]]
        fastest = min(ended, key=lambda o: o.seconds, default=None)
        # A process's first run imports and warms up; the fastest of many does not.
        runs = [single, alone(fastest, self.calls) if fastest else None]
        self.single = min(filter(None, runs), key=lambda run: run.seconds, default=None)

    @property
    def good(self) -> list[Outcome]:
        """Runs that returned what they should."""
        return [
            o
            for o in self.session.outcomes
            if o.end == "returned" and o.job.run not in self.mistakes
        ]

    @property
    def seconds(self) -> float:
        """Of all runs together, by the clock."""
        return max(self.session.end - self.session.begin, 1e-9)

    def flights(self) -> tuple[Flight, Flight]:
        """(runs, calls of models) at once."""
        runs = [(o.begin, o.begin + o.seconds) for o in self.session.outcomes if o.seconds]
        return flight(runs), flight([(c.begin, c.end) for c in [*self.calls, *self.strays]])

    def speed_up(self) -> float | None:
        """How many times as many runs a second as one after another."""
        if self.single is None or not self.good or self.session.gave_up:
            return None
        return len(self.good) * self.single.seconds / self.seconds

    def takes_turns(self, few: int) -> bool:
        """Whether fewer calls were under way at once than half of what a run alone lets expect.

        Args:
          few: below so many expected at once nothing is said.
        """
        runs, calls = self.flights()
        share = min(self.single.waiting / self.single.seconds, 1.0) if self.single else 0.0
        return bool(calls.most) and runs.most * share >= few and calls.most <= runs.most * share / 2

    def record(self) -> dict[str, Any]:
        """JSON-able: all of it."""
        runs, calls = self.flights()
        return {
            "seconds": self.seconds,
            "runs": dict(Counter(o.end for o in self.session.outcomes)) | {"ok": len(self.good)},
            "gave_up": self.session.gave_up,
            "run_seconds": quantiles([o.seconds for o in self.good]),
            "call_seconds": quantiles([c.seconds for c in self.calls if c.ok]),
            "first_byte_seconds": quantiles(
                [c.first - c.begin for c in self.calls if c.ok and c.streamed]
            ),
            "calls_per_run": quantiles(self._calls_per_run()),
            "completion_tokens": sum(max(c.completion_tokens, 0) for c in self.calls),
            "prompt_tokens": sum(max(c.prompt_tokens, 0) for c in self.calls),
            "concurrency": {
                "runs_most": runs.most, "runs_mean": runs.mean, "calls_most": calls.most,
                "calls_mean": calls.mean, "speed_up": self.speed_up(),
                "loop_busy": self.session.busy_seconds / self.seconds,
                "loop_queued": self.session.queued_seconds / self.seconds,
            },
            "stalls": {
                "count": len(self.session.stalls),
                "seconds": sum(stall.seconds for stall in self.session.stalls),
                "longest": max((s.seconds for s in self.session.stalls), default=0.0),
                "waiting_for_the_interpreter": self.idle,
                "causes": [_cause_record(cause) for cause in self.causes],
            },
            "left": {
                "tasks": dict(self.session.left.tasks), "threads": dict(self.session.left.threads),
                "sockets": self.session.left.sockets,
            },
            "outcomes": [self._outcome_record(o) for o in self.session.outcomes],
        }  # fmt: skip

    def table(self) -> str:
        """Latencies as aligned text."""
        found = self.record()
        rows: list[tuple[str, ...]] = [("", "p50", "p90", "p99", "max")]
        for name, key, show in (
            ("seconds of a run", "run_seconds", duration),
            ("seconds of a call", "call_seconds", duration),
            ("to the first byte", "first_byte_seconds", duration),
            ("calls of a run", "calls_per_run", lambda value: f"{value:.0f}"),
        ):
            if found[key]:
                rows.append((name, *(show(value) for value in found[key].values())))
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        lines = [
            "  ".join([row[0].ljust(widths[0]), *(c.rjust(max(w, 7)) for c, w in
                                                  zip(row[1:], widths[1:], strict=True))])
            for row in rows
        ]  # fmt: skip
        return "\n".join(lines)

    def _calls_per_run(self) -> list[float]:
        counts = Counter(c.run for c in self.calls)
        return [counts[o.job.run] for o in self.session.outcomes if o.end == "returned"]

    def _outcome_record(self, outcome: Outcome) -> dict[str, Any]:
        out: dict[str, Any] = {
            "run": outcome.job.run, "row": outcome.job.index, "end": outcome.end,
            "seconds": outcome.seconds, "completions": self.ids[outcome.job.run],
        }  # fmt: skip
        if wrong := self.mistakes.get(outcome.job.run):
            out["mistake"] = wrong
        elif outcome.end == "returned":
            out["reward"] = _plain(outcome.value)
        if outcome.failure:
            out["error"] = f"{outcome.failure.kind}: {outcome.failure.message}"
            out["traceback"] = [f"{place}: {place.call}" for place in outcome.failure.places]
        return out


def _cause_record(cause: Cause) -> dict[str, Any]:
    return {
        "at": str(cause.blocking), "file": cause.blocking.file, "call": cause.blocking.call,
        "seconds": cause.seconds, "computing_seconds": cause.ran,
        "queued_seconds": cause.queued, "longest": cause.longest,
        "stalls": cause.stalls,
        "tasks": len(cause.tasks), "stack": cause.lines, "remedy": cause.remedy,
    }  # fmt: skip


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): float(reward) for key, reward in value.items()}
    return float(value)
