"""Say what runs of an agent showed: figures, what is wrong, and what to change. Pure."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from rlx.agents import returns
from rlx.cli.text import duration
from rlx.debugger.concurrent_runs import SLOW_SECONDS, AgentRun, Blocker, Observed
from rlx.debugger.model_call import ModelCall
from rlx.doctor.findings import Finding

_Found = tuple[str, ...]  # name, level, found, and the remedy where there is one
_BLOCKS = 0.02  # share of the time that waiting inside the loop may take before it is a problem
_COMPUTES = 0.5  # seconds of one computation that hold all other runs up
_BUSY = 0.75  # share of the time that the loop's thread may compute
_FEW = 4  # calls at once below which nothing is said of turns
_MOST = 8  # kinds of failures that are shown
_LEVELS = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}  # quantiles
_OWN_CLIENT = (
    "make the client in `run`, of its base_url and api_key; keep none in self, a global or a "
    "cache: training could not tell the runs apart"
)
_CALLED = {  # status, or 500 for all above it → remedy
    0: "look at the server's log and its limits",
    401: "pass kwargs['api_key'] on to the client",
    404: "the agent asks for {model!r}; --model=NAME sends its calls to another",
    429: "the server is at its limit: --batch or --group smaller, or retry with a pause",
    500: "look at the server's log",
}
_LEFT = {
    "tasks": "await or cancel what a run starts",
    "threads": "close executors and clients at the end of a run",
    "connections": "close clients: `async with AsyncOpenAI(…)`, or pass http_client on",
}


class Evidence:
    """Runs and the calls that they made, counted.

    Args:
      calls: of the recorder; it may know those of an earlier session as well.
    """

    def __init__(self, seen: Observed, calls: Sequence[ModelCall]):
        self.seen, self.runs = seen, seen.runs
        self.seconds = max(seen.end - seen.begin, 1e-9)
        numbers = {run.number: run for run in seen.runs}
        later = [call for call in calls if call.begin >= seen.begin and call.generates]
        self.answered = [call for call in later if call.end]
        self.unanswered = {call.run for call in later if not call.end or "hung up" in call.error}
        # A call by the address of an earlier run is an agent's that kept its client.
        self.strays = sum(call.run not in numbers for call in self.answered)
        for call in self.answered:
            if call.run in numbers:
                numbers[call.run].calls.append(call)
        self.calls = [call for run in seen.runs for call in run.calls]
        self.returned = [run for run in seen.runs if run.end == "returned"]
        self.good = [run for run in self.returned if not run.mistake]
        runs = [(r.begin, r.begin + r.seconds) for r in self.runs if r.seconds]
        self.runs_most, self.runs_mean = _at_once(runs)
        self.calls_most, self.calls_mean = _at_once([(c.begin, c.end) for c in self.answered])
        # The fastest of many stands for a run without others: the first imports and warms up.
        asked = [run for run in self.returned if run.completions]
        self.fastest = min(asked, key=lambda run: run.seconds, default=None)
        self.speed_up = None  # runs a second over those one after another
        if self.fastest and self.good and not seen.gave_up:
            self.speed_up = len(self.good) * self.fastest.seconds / self.seconds
        self.left: dict[str, dict[str, int]] = {kind: {} for kind in _LEFT}
        for (kind, name), count in seen.left.items():
            self.left[kind][name] = count
        self.blockers = sorted(seen.blockers.values(), key=lambda found: -found.seconds)

    def latencies(self) -> dict[str, dict[str, float]]:
        """Return quantiles by name, of what there is: seconds of runs, of calls, … ."""
        calls = [call for call in self.calls if call.ok]
        found: dict[str, list[float]] = {
            "run_seconds": [run.seconds for run in self.good],
            "call_seconds": [call.seconds for call in calls],
            "first_byte_seconds": [call.first - call.begin for call in calls if call.streamed],
            "calls_per_run": [float(len(run.calls)) for run in self.returned],
        }
        return {
            key: dict(zip(_LEVELS, np.quantile(values, [*_LEVELS.values()]).tolist(), strict=True))
            for key, values in found.items()
            if values
        }

    def record(self) -> dict[str, Any]:
        """Return all of it, JSON-able."""
        seen = self.seen
        return {
            "seconds": self.seconds,
            "runs": dict(Counter(run.end for run in self.runs)) | {"ok": len(self.good)},
            "gave_up": seen.gave_up,
            **self.latencies(),
            "completion_tokens": sum(max(call.completion_tokens, 0) for call in self.calls),
            "prompt_tokens": sum(max(call.prompt_tokens, 0) for call in self.calls),
            "concurrency": {
                "runs_most": self.runs_most, "runs_mean": self.runs_mean,
                "calls_most": self.calls_most, "calls_mean": self.calls_mean,
                "speed_up": self.speed_up, "loop_busy": seen.busy_seconds / self.seconds,
            },
            "stalls": {
                "count": len(seen.slow), "seconds": sum(seen.slow),
                "longest": max(seen.slow, default=0.0),
                "causes": [{"at": b.stack[0], **asdict(b)} for b in self.blockers],
            },
            "left": self.left,
            "outcomes": [
                {
                    "run": run.number, "row": run.index, "end": run.end, "seconds": run.seconds,
                    "completions": run.completions, "error": run.error,
                    "traceback": list(map(str, run.places)),
                    "mistake": run.mistake,
                    "reward": returns.plain(run.value) if run in self.good else None,
                }
                for run in self.runs
            ],
        }  # fmt: skip

    def table(self) -> str:
        """Return the latencies as aligned text."""
        lines = [f"{'':18}" + "".join(f"{name:>9}" for name in _LEVELS)]
        for key, found in self.latencies().items():
            show: Callable = duration if key.endswith("seconds") else "{:.0f}".format
            lines.append(f"{key:18}" + "".join(f"{show(value):>9}" for value in found.values()))
        return "\n".join(lines)


def findings(evidence: Evidence, area: str) -> list[Finding]:
    """Return every finding, in the order of a run's life."""
    parts = (_runs, _rewards, _failures, _addresses, _calls, _concurrency, _loop, _left)
    return [Finding(area, *found) for part in parts for found in part(evidence)]


def _runs(e: Evidence) -> Iterator[_Found]:
    ends = Counter(run.end for run in e.runs if run.end != "returned")
    parts = [f"{len(e.good)} of {len(e.runs)} ok", *(f"{n} {end}" for end, n in ends.items())]
    mistakes = len(e.returned) - len(e.good)
    parts += [f"{mistakes} returned no reward"] if mistakes else []
    why = f": {e.seen.gave_up}" if e.seen.gave_up else ""
    level = "ok" if len(e.good) == len(e.runs) else "problem"
    yield "runs", level, f"{', '.join(parts)}, in {duration(e.seconds)}{why}"
    for words, count in e.seen.background.most_common(3):
        found = f"{count} × a task in the background failed: {words}"
        yield "tasks", "warning", found, "await the tasks that run starts"


def _rewards(e: Evidence) -> Iterator[_Found]:
    of_row = defaultdict(list)
    for run in e.good:
        reward = returns.plain(run.value)
        many = list(reward.values()) if isinstance(reward, dict) else [reward]
        of_row[run.index].append(float(np.mean(many)))
    every = [reward for rewards in of_row.values() for reward in rewards]
    if not every:
        return
    found = f"mean {np.mean(every):.3g}, from {min(every):.3g} to {max(every):.3g}"
    several = [rewards for rewards in of_row.values() if len(rewards) > 1]
    if equal := sum(len(set(rewards)) == 1 for rewards in several):
        found += f"; all runs of a row are equal in {equal} of {len(several)} rows: no signal there"
    yield "rewards", "ok", found


def _failures(e: Evidence) -> Iterator[_Found]:
    failed = [(run, _failure(e, run)) for run in e.runs if run not in e.good and run.end != "lost"]
    for same in _alike(failed, lambda pair: (pair[1][0], _pattern(pair[1][1]))):
        name, found, remedy = same[0][1]
        rows = sorted({run.index for run, _ in same})
        more = f" and {len(rows) - 4} more" if len(rows) > 4 else ""
        where = f"row{'s' if len(rows) > 1 else ''} {', '.join(map(str, rows[:4]))}{more}"
        yield name, "problem", f"{len(same)} × {found} ({where})", remedy


def _failure(e: Evidence, run: AgentRun) -> tuple[str, str, str]:
    """Return name, words and remedy of what is wrong with one run."""
    if run.end == "returned":
        found, _, remedy = run.mistake.rpartition("; ")
        return "returned", found, remedy
    own = [place for place in run.places if place.owner == "user"] or run.places
    where = f" at {own[-1]}" if own else " in a framework"
    if run.end == "raised":
        alone = f"look at one alone: --steps=1 --rows={run.index}"
        return "exception", run.error + where, alone
    asked = "; it had asked the server" if run.number in e.unanswered else ""
    slow = "raise --timeout if it only is slow"
    deaf = "it catches CancelledError and goes on: let it pass (`raise`)"
    return "timeout", f"waited{where}{asked}", deaf if run.end == "stuck" else slow


def _addresses(e: Evidence) -> Iterator[_Found]:
    counts, remedy = [len(run.calls) for run in e.returned], _OWN_CLIENT
    runs, silent = len(counts), counts.count(0)
    if e.strays:
        found = f"{e.strays} calls went to the base_url of an earlier run"
    elif silent > runs / 2 and any(counts):
        found = f"{silent} runs made no call of their own, and one made {max(counts)}"
    elif silent:
        found = f"{silent} of {runs} runs made no call by kwargs['base_url']"
        remedy = "use it, not an address of your own; a run without a completion teaches nothing"
    else:
        return
    yield "base_url", "problem", found, remedy


def _calls(e: Evidence) -> Iterator[_Found]:
    failed = [call for call in e.answered if not call.ok]
    for same in _alike(failed, lambda call: (call.status, _pattern(call.error))):
        status, model = same[0].status, same[0].model
        remedy = _CALLED.get(min(status, 500), "mend the request as the server says")
        what = f"answered {status}" if status else "not answered"
        found = f"{len(same)} × {what}: {same[0].error}"
        yield "calls", "warning", found, remedy.format(model=model)
    if e.answered and not failed:
        yield "calls", "ok", f"{len(e.answered)} of {len(e.answered)} answered"


def _concurrency(e: Evidence) -> Iterator[_Found]:
    most = f"{e.calls_most} call{'' if e.calls_most == 1 else 's'}"
    found = f"at most {most} at once, {e.calls_mean:.1f} on average, of {e.runs_most} runs"
    if e.speed_up is not None:
        found += f"; {e.speed_up:.1f} times as fast as one run after another"
    # All runs under way, each waiting for the share of its time that a run alone waits.
    expected = e.runs_most * min(e.fastest.waiting / e.fastest.seconds, 1.0) if e.fastest else 0
    busy = e.seen.busy_seconds / e.seconds
    if busy > _BUSY:
        each = 1000 * e.seen.busy_seconds / max(len(e.runs), 1)
        found += f"; Python computed {100 * busy:.0f} % of the time, {each:.0f} ms a run"
        remedy = "share a client's set-up (http_client), compute less; half of it may be debug mode"
        yield "concurrency", "warning", found, remedy
    elif not e.calls_most or expected < _FEW or e.calls_most > expected / 2:
        yield "concurrency", "ok", found
    else:
        remedy = f"look for a semaphore or a pool of {e.calls_most} (max_connections, max_workers)"
        if e.calls_most == 1:
            remedy = "look for a lock, or a client or framework that handles one call at a time"
        if sum(e.seen.slow) > 0.3 * e.seconds:
            remedy = "the loop is blocked: mend what is named below"
        yield "concurrency", "problem", f"the runs take turns: {found}", remedy


def _loop(e: Evidence) -> Iterator[_Found]:
    slow = e.seen.slow
    if not slow:
        yield "event loop", "ok", f"never blocked for {SLOW_SECONDS:g} s"
        return
    levels = [_level(blocker, e.seconds) for blocker in e.blockers]
    share = f"{duration(sum(slow))} in all, {100 * sum(slow) / e.seconds:.0f} % of the time"
    found = f"blocked {len(slow)} ×, {share}, {duration(max(slow))} at most"
    yield "event loop", "problem" if "problem" in levels else "warning", found
    for blocker, level in list(zip(e.blockers, levels, strict=True))[:5]:
        name = "kept busy by" if blocker.computes else "blocked by"
        inside = f", in {blocker.stack[-1]}" if len(blocker.stack) > 1 else ""
        once = f"{blocker.stalls} ×; {duration(blocker.longest)} at most in one go"
        found = f"{duration(blocker.seconds)} at {blocker.stack[0]}{inside} ({once})"
        yield name, level, found, blocker.remedy


def _level(blocker: Blocker, seconds: float) -> str:
    """Return the level of a line: a call that waits is a problem, short computations add up."""
    limit = max(_BLOCKS * seconds, 0.25)
    wrong = blocker.longest > _COMPUTES if blocker.computes else blocker.seconds > limit
    imports = any("importlib" in line for line in blocker.stack)  # once in a process
    return "problem" if wrong and not imports else "warning"


def _left(e: Evidence) -> Iterator[_Found]:
    many = max(_FEW, len(e.runs) // 8)
    for kind, names in e.left.items():
        if sum(names.values()) >= (1 if kind == "tasks" else many):
            most = sorted(names.items(), key=lambda pair: -pair[1])[:4]
            found = ", ".join(f"{count} × {name}" for name, count in most)
            yield "left behind", "warning", f"{kind}: {found}", _LEFT[kind]


def _at_once(spans: Sequence[tuple[float, float]]) -> tuple[int, float]:
    """Return how many (begin, end) spans, in seconds, overlap at most and on average."""
    if not spans:
        return 0, 0.0
    edges = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
    whole = max(edges[-1][0] - edges[0][0], 1e-9)
    most = int(np.cumsum([step for _, step in edges]).max())
    return most, sum(end - begin for begin, end in spans) / whole


def _alike(found: Iterable[Any], key: Callable[[Any], Any]) -> list[list[Any]]:
    """Return the _MOST largest groups of the same key, the largest first."""
    groups = defaultdict(list)
    for one in found:
        groups[key(one)].append(one)
    return sorted(groups.values(), key=len, reverse=True)[:_MOST]


def _pattern(text: str) -> str:
    """Return a message without what differs from run to run: numbers, ids and quoted texts."""
    return re.sub(r"[0-9a-f]{8,}|\d+|(?<=-)[\w-]{6,}|'[^']{24,}'", "#", text)[:160]
