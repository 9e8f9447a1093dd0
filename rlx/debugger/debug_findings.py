"""Says what runs of an agent showed: figures, what is wrong, and what to change. Pure."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np

from rlx.agents import returns
from rlx.cli.text import duration
from rlx.debugger.concurrent_runs import SLOW_SECONDS, AgentRun, Blocker, Observed
from rlx.debugger.recorder import ModelCall

_BLOCKS = 0.02  # share of the time that waiting inside the loop may take before it is a problem
_COMPUTES = 0.5  # seconds of one computation that hold all other runs up
_BUSY = 0.75  # share of the time that the loop's thread may compute
_FEW = 4  # calls at once below which nothing is said of turns
_MOST = 8  # kinds of failures that are shown
_OWN_CLIENT = (
    "make the client in `run`, of its base_url and api_key; keep none in self, a global or a "
    "cache: training could not tell the runs apart"
)
_LEFT = {
    "tasks": "await or cancel what a run starts",
    "threads": "close executors and clients at the end of a run",
    "connections": "close clients: `async with AsyncOpenAI(…)`, or pass http_client on",
}


class DebugFinding(NamedTuple):
    """One finding: level is ok | warning | problem."""

    name: str
    level: str
    found: str
    remedy: str = ""


class Evidence:
    """Runs and the calls that they made, counted.

    Args:
      calls: of the recorder; it may know those of an earlier session as well.
      alone: (seconds, those of them spent waiting for the server) of a run without others.
    """

    def __init__(
        self,
        seen: Observed,
        calls: Sequence[ModelCall],
        alone: tuple[float, float] | None = None,
    ):
        self.seen, self.runs = seen, seen.runs
        self.seconds = max(seen.end - seen.begin, 1e-9)
        own = {run.number for run in seen.runs}
        # A call by the address of an earlier run is an agent's that kept its client.
        later = [c for c in calls if c.begin >= seen.begin and c.generates]
        self.unanswered = {c.run for c in later if not c.end or "hung up" in c.error}
        self.calls = [c for c in later if c.run in own and c.end]
        self.strays = [c for c in later if c.run not in own and c.end]
        self.ids: dict[int, list[str]] = defaultdict(list)
        for call in self.calls:
            if call.completion_id and call.ok:
                self.ids[call.run].append(call.completion_id)
        self.returned = [run for run in seen.runs if run.end == "returned"]
        self.mistakes = {
            run.number: wrong
            for run in self.returned
            if (wrong := returns.mistake(run.value, self.ids[run.number]))
        }
        self.good = [run for run in self.returned if run.number not in self.mistakes]
        runs = [(r.begin, r.begin + r.seconds) for r in self.runs if r.seconds]
        self.runs_most, self.runs_mean = _at_once(runs)
        calls_seen = [(c.begin, c.end) for c in [*self.calls, *self.strays]]
        self.calls_most, self.calls_mean = _at_once(calls_seen)
        # A process's first run imports and warms up; the fastest of many does not.
        asked = [run for run in self.returned if self.ids[run.number]]
        fastest = min(asked, key=lambda run: run.seconds, default=None)
        known = [alone, (fastest.seconds, self.waiting(fastest)) if fastest else None]
        self.alone = min(filter(None, known), default=None)

    @property
    def speed_up(self) -> float | None:
        """Return runs a second over those one after another; None where unknown."""
        if self.alone is None or not self.good or self.seen.gave_up:
            return None
        return len(self.good) * self.alone[0] / self.seconds

    @property
    def blockers(self) -> list[Blocker]:
        """Lines that blocked the loop, worst first."""
        return sorted(self.seen.blockers.values(), key=lambda blocker: -blocker.seconds)

    def waiting(self, run: AgentRun) -> float:
        """Return the seconds in which a run had a call under way; overlapping ones count once."""
        waiting = until = 0.0
        for call in self.calls:
            if call.run == run.number:
                waiting += max(call.end - max(call.begin, until), 0.0)
                until = max(until, call.end)
        return waiting

    def latencies(self) -> dict[str, dict[str, float]]:
        """Return quantiles by name, of what there is: seconds of runs, of calls, … ."""
        counts = Counter(call.run for call in self.calls)
        calls = [call for call in self.calls if call.ok]
        found: dict[str, list[float]] = {
            "run_seconds": [run.seconds for run in self.good],
            "call_seconds": [call.seconds for call in calls],
            "first_byte_seconds": [call.first - call.begin for call in calls if call.streamed],
            "calls_per_run": [float(counts[run.number]) for run in self.returned],
        }
        names, levels = ("p50", "p90", "p99", "max"), (0.5, 0.9, 0.99, 1.0)
        return {
            key: dict(zip(names, np.quantile(values, levels).tolist(), strict=True))
            for key, values in found.items()
            if values
        }

    def record(self) -> dict[str, Any]:
        """Return all of it, JSON-able."""
        return {
            "seconds": self.seconds,
            "runs": dict(Counter(run.end for run in self.runs)) | {"ok": len(self.good)},
            "gave_up": self.seen.gave_up,
            **self.latencies(),
            "completion_tokens": sum(max(call.completion_tokens, 0) for call in self.calls),
            "prompt_tokens": sum(max(call.prompt_tokens, 0) for call in self.calls),
            "concurrency": {
                "runs_most": self.runs_most, "runs_mean": self.runs_mean,
                "calls_most": self.calls_most, "calls_mean": self.calls_mean,
                "speed_up": self.speed_up, "loop_busy": self.seen.busy_seconds / self.seconds,
            },
            "stalls": {
                "count": len(self.seen.slow), "seconds": sum(self.seen.slow),
                "longest": max(self.seen.slow, default=0.0),
                "causes": [
                    {"at": b.stack[0], **asdict(b), "remedy": b.remedy} for b in self.blockers
                ],
            },
            "left": {kind: dict(names) for kind, names in self.seen.left.items()},
            "outcomes": [
                {
                    "run": run.number, "row": run.index, "end": run.end, "seconds": run.seconds,
                    "completions": self.ids[run.number], "error": run.error,
                    "traceback": list(map(str, run.places)),
                    "mistake": self.mistakes.get(run.number, ""),
                    "reward": returns.plain(run.value) if run in self.good else None,
                }
                for run in self.runs
            ],
        }  # fmt: skip

    def table(self) -> str:
        """Return the latencies as aligned text."""
        lines = [f"{'':18}" + "".join(f"{name:>9}" for name in ("p50", "p90", "p99", "max"))]
        for key, found in self.latencies().items():
            show: Callable = duration if key.endswith("seconds") else "{:.0f}".format
            lines.append(f"{key:18}" + "".join(f"{show(value):>9}" for value in found.values()))
        return "\n".join(lines)


def findings(evidence: Evidence) -> list[DebugFinding]:
    """Return every finding, in the order of a run's life."""
    parts = (_runs, _rewards, _failures, _addresses, _calls, _concurrency, _loop, _left)
    return [finding for part in parts for finding in part(evidence)]


def bad(found: Iterable[DebugFinding]) -> bool:
    """Return whether one of them is a problem."""
    return any(finding.level == "problem" for finding in found)


def _runs(e: Evidence) -> Iterator[DebugFinding]:
    ends = Counter(run.end for run in e.runs if run.end != "returned")
    parts = [f"{len(e.good)} of {len(e.runs)} ok", *(f"{n} {end}" for end, n in ends.items())]
    parts += [f"{len(e.mistakes)} returned no reward"] if e.mistakes else []
    why = f": {e.seen.gave_up}" if e.seen.gave_up else ""
    level = "ok" if len(e.good) == len(e.runs) else "problem"
    yield DebugFinding("runs", level, f"{', '.join(parts)}, in {duration(e.seconds)}{why}")
    for words, count in e.seen.background.most_common(3):
        found = f"{count} × a task in the background failed: {words}"
        yield DebugFinding("tasks", "warning", found, "await the tasks that run starts")


def _rewards(e: Evidence) -> Iterator[DebugFinding]:
    of_row = defaultdict(list)
    for run in e.good:
        reward = returns.plain(run.value)
        many = list(reward.values()) if isinstance(reward, dict) else [reward]
        of_row[run.index].append(float(np.mean(many)))
    if not of_row:
        return
    every = [reward for rewards in of_row.values() for reward in rewards]
    found = f"mean {np.mean(every):.3g}, from {min(every):.3g} to {max(every):.3g}"
    several = [rewards for rewards in of_row.values() if len(rewards) > 1]
    if equal := sum(len(set(rewards)) == 1 for rewards in several):
        found += f"; all runs of a row are equal in {equal} of {len(several)} rows: no signal there"
    yield DebugFinding("rewards", "ok", found)


def _failures(e: Evidence) -> Iterator[DebugFinding]:
    failed = [(run, _failure(e, run)) for run in e.runs if run not in e.good and run.end != "lost"]
    groups = _alike(failed, lambda pair: (pair[1].name, _pattern(pair[1].found)))
    for same in groups[:_MOST]:
        name, level, found, remedy = same[0][1]
        rows = sorted({run.index for run, _ in same})
        more = f" and {len(rows) - 4} more" if len(rows) > 4 else ""
        where = f"row{'s' if len(rows) > 1 else ''} {', '.join(map(str, rows[:4]))}{more}"
        yield DebugFinding(name, level, f"{len(same)} × {found} ({where})", remedy)
    if len(groups) > _MOST:
        yield DebugFinding("runs", "problem", f"and {len(groups) - _MOST} other kinds of failures")


def _failure(e: Evidence, run: AgentRun) -> DebugFinding:
    """Return what is wrong with one run."""
    if run.end == "returned":
        found, _, remedy = e.mistakes[run.number].rpartition("; ")
        return DebugFinding("returned", "problem", found, remedy)
    own = [place for place in run.places if place.owner == "user"] or run.places
    where = f" at {own[-1]}" if own else " in a framework"
    if run.end == "raised":
        remedy = f"look at one alone: --steps=1 --rows={run.index}"
        return DebugFinding("exception", "problem", run.error + where, remedy)
    what = "; it had asked the server" if run.number in e.unanswered else ""
    remedy = "raise --timeout if it only is slow"
    if run.end == "stuck":
        remedy = "it catches CancelledError and goes on: let it pass (`raise`)"
    return DebugFinding("timeout", "problem", f"waited{where}{what}", remedy)


def _addresses(e: Evidence) -> Iterator[DebugFinding]:
    runs = {run.number for run in e.returned}
    silent = runs - {call.run for call in e.calls}
    if e.strays:
        found = f"{len(e.strays)} calls went to the base_url of an earlier run"
        yield DebugFinding("base_url", "problem", found, _OWN_CLIENT)
    elif len(silent) > len(runs) / 2 and e.calls:
        _, most = Counter(call.run for call in e.calls).most_common(1)[0]
        found = f"{len(silent)} runs made no call of their own, and one made {most}"
        yield DebugFinding("base_url", "problem", found, _OWN_CLIENT)
    elif silent:
        found = f"{len(silent)} of {len(runs)} runs made no call by kwargs['base_url']"
        remedy = "use it, not an address of your own; a run without a completion teaches nothing"
        yield DebugFinding("base_url", "problem", found, remedy)


def _calls(e: Evidence) -> Iterator[DebugFinding]:
    every = [*e.calls, *e.strays]
    failed = [call for call in every if not call.ok]
    for same in _alike(failed, lambda call: (call.status, _pattern(call.error)))[:_MOST]:
        status, error = same[0].status, same[0].error
        remedies = {
            0: "look at the server's log and its limits",
            401: "pass kwargs['api_key'] on to the client",
            404: f"the agent asks for {same[0].model!r}; --model=NAME sends its calls to another",
            429: "the server is at its limit: --batch or --group smaller, or retry with a pause",
            500: "look at the server's log",
        }
        remedy = remedies.get(min(status, 500), "mend the request as the server says")
        what = f"answered {status}" if status else "not answered"
        yield DebugFinding("calls", "warning", f"{len(same)} × {what}: {error}", remedy)
    if every and not failed:
        yield DebugFinding("calls", "ok", f"{len(every)} of {len(every)} answered")


def _concurrency(e: Evidence) -> Iterator[DebugFinding]:
    most = f"{e.calls_most} call{'' if e.calls_most == 1 else 's'}"
    found = f"at most {most} at once, {e.calls_mean:.1f} on average, of {e.runs_most} runs"
    if e.speed_up is not None:
        found += f"; {e.speed_up:.1f} times as fast as one run after another"
    # All runs under way, each waiting for the share of its time that a run alone waits.
    expected = e.runs_most * min(e.alone[1] / e.alone[0], 1.0) if e.alone else 0.0
    busy = e.seen.busy_seconds / e.seconds
    if busy > _BUSY:
        each = 1000 * e.seen.busy_seconds / max(len(e.runs), 1)
        found += f"; Python computed {100 * busy:.0f} % of the time, {each:.0f} ms a run"
        remedy = "share a client's set-up (http_client), compute less; half of it may be debug mode"
        yield DebugFinding("concurrency", "warning", found, remedy)
    elif not e.calls_most or expected < _FEW or e.calls_most > expected / 2:
        yield DebugFinding("concurrency", "ok", found)
    else:
        remedy = f"look for a semaphore or a pool of {e.calls_most} (max_connections, max_workers)"
        if e.calls_most == 1:
            remedy = "look for a lock, or a client or framework that handles one call at a time"
        if sum(e.seen.slow) > 0.3 * e.seconds:
            remedy = "the loop is blocked: mend what is named below"
        yield DebugFinding("concurrency", "problem", f"the runs take turns: {found}", remedy)


def _loop(e: Evidence) -> Iterator[DebugFinding]:
    slow = e.seen.slow
    if not slow:
        yield DebugFinding("event loop", "ok", f"never blocked for {SLOW_SECONDS:g} s")
        return
    levels = [_level(blocker, e.seconds) for blocker in e.blockers]
    share = f"{duration(sum(slow))} in all, {100 * sum(slow) / e.seconds:.0f} % of the time"
    found = f"blocked {_times(len(slow))}, {share}, {duration(max(slow))} at most"
    yield DebugFinding("event loop", "problem" if "problem" in levels else "warning", found)
    for blocker, level in list(zip(e.blockers, levels, strict=True))[:5]:
        name = "kept busy by" if blocker.computes else "blocked by"
        inside = f", in {blocker.stack[-1]}" if len(blocker.stack) > 1 else ""
        once = f"{_times(blocker.stalls)}; {duration(blocker.longest)} at most in one go"
        found = f"{duration(blocker.seconds)} at {blocker.stack[0]}{inside} ({once})"
        yield DebugFinding(name, level, found, blocker.remedy)


def _level(blocker: Blocker, seconds: float) -> str:
    """Return the level of a line: a call that waits is a problem, short computations add up."""
    if any("importlib" in line for line in blocker.stack):  # once in a process
        return "warning"
    limit = max(_BLOCKS * seconds, 0.25)
    wrong = blocker.longest > _COMPUTES if blocker.computes else blocker.seconds > limit
    return "problem" if wrong else "warning"


def _left(e: Evidence) -> Iterator[DebugFinding]:
    many = max(_FEW, len(e.runs) // 8)
    for kind, remedy in _LEFT.items():
        names = e.seen.left.get(kind, Counter())
        if names.total() >= (1 if kind == "tasks" else many):
            found = ", ".join(f"{count} × {name}" for name, count in names.most_common(4))
            yield DebugFinding("left behind", "warning", f"{kind}: {found}", remedy)


def _at_once(spans: Sequence[tuple[float, float]]) -> tuple[int, float]:
    """Return how many (begin, end) spans, in seconds, overlap at most and on average."""
    if not spans:
        return 0, 0.0
    edges = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
    whole = max(edges[-1][0] - edges[0][0], 1e-9)
    most = int(np.cumsum([step for _, step in edges]).max())
    return most, sum(end - begin for begin, end in spans) / whole


def _alike(found: Iterable[Any], key: Callable[[Any], Any]) -> list[list[Any]]:
    """Return groups of the same key, the largest first."""
    groups = defaultdict(list)
    for one in found:
        groups[key(one)].append(one)
    return sorted(groups.values(), key=len, reverse=True)


def _pattern(text: str) -> str:
    """Return a message without what differs from run to run: numbers, ids and quoted texts."""
    return re.sub(r"[0-9a-f]{8,}|\d+|(?<=-)[\w-]{6,}|'[^']{24,}'", "#", text)[:160]


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
