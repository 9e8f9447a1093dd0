"""What many runs of an agent showed, in words: what is wrong, and what to change. Pure."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from rlx.agents import returned
from rlx.agents.crowd import Outcome
from rlx.agents.crowd_facts import Facts
from rlx.agents.exchange import Call
from rlx.agents.stalls import Cause
from rlx.cli.text import duration

_BLOCKS = 0.02  # share of the time that waiting inside the loop may take before it is a problem
_COMPUTES = 0.5  # seconds of one computation that hold all other runs up
_BUSY = 0.75  # share of the time that the loop's thread may compute
_FEW = 4  # calls at once below which nothing is said of turns
_ENDS = {
    "raised": "raised",
    "timeout": "timed out",
    "stuck": "timed out and could not be ended",
    "lost": "never ended",
}


class Remark(NamedTuple):
    """One finding: level is ok | absent | warning | problem."""

    name: str
    level: str
    found: str
    remedy: str = ""


def remarks(facts: Facts) -> list[Remark]:
    """Every finding, in the order of a run's life."""
    parts = (_runs, _background, _returns, _rewards, _raised, _late, _addresses, _calls,
             _concurrency, _loop, _left)  # fmt: skip
    return [remark for part in parts for remark in part(facts)]


def bad(found: Sequence[Remark]) -> bool:
    """Whether one of them is a problem."""
    return any(remark.level == "problem" for remark in found)


def _runs(facts: Facts) -> Iterator[Remark]:
    total, good = len(facts.session.outcomes), len(facts.good)
    counts = Counter(o.end for o in facts.session.outcomes)
    parts = [f"{good} of {total} ok"]
    parts += [f"{counts[end]} {word}" for end, word in _ENDS.items() if counts[end]]
    parts += [f"{len(facts.mistakes)} returned no reward"] if facts.mistakes else []
    found = f"{', '.join(parts)}, in {duration(facts.seconds)}"
    if facts.session.gave_up:
        found += f": {facts.session.gave_up}"
    yield Remark("runs", "ok" if good == total else "problem", found)


def _background(facts: Facts) -> Iterator[Remark]:
    for words, count in facts.session.background.most_common(3):
        found = f"{count} × a task in the background failed: {words}"
        yield Remark("tasks", "warning", found, "await the tasks that run starts")


def _returns(facts: Facts) -> Iterator[Remark]:
    groups: dict[str, list[int]] = defaultdict(list)
    for run, wrong in facts.mistakes.items():
        groups[_pattern(wrong)].append(run)
    rows = {o.job.run: o.job.index for o in facts.session.outcomes}
    for runs in sorted(groups.values(), key=len, reverse=True)[:5]:
        found, _, remedy = facts.mistakes[runs[0]].rpartition("; ")
        where = _rows([rows[run] for run in runs])
        yield Remark("returned", "problem", f"{len(runs)} × {found} ({where})", remedy)


def _rewards(facts: Facts) -> Iterator[Remark]:
    if not facts.good:
        return
    rewards = [returned.total(o.value) for o in facts.good]
    of_row = defaultdict(list)
    for outcome, reward in zip(facts.good, rewards, strict=True):
        of_row[outcome.job.index].append(reward)
    text = f"mean {np.mean(rewards):.3g}, from {min(rewards):.3g} to {max(rewards):.3g}"
    several = [found for found in of_row.values() if len(found) > 1]
    equal = sum(len(set(found)) == 1 for found in several)
    if equal:
        text += f"; all runs of a row are equal in {equal} of {len(several)} rows: no signal there"
    yield Remark("rewards", "ok", text)


def _raised(facts: Facts) -> Iterator[Remark]:
    groups: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for outcome in facts.session.outcomes:
        if outcome.end == "raised" and outcome.failure:
            groups[outcome.failure.kind, _pattern(outcome.failure.message)].append(outcome)
    for same in sorted(groups.values(), key=len, reverse=True)[:8]:
        failure = same[0].failure
        assert failure is not None
        own = [p for p in failure.places if p.owner == "user"] or failure.places[-1:]
        where = f" at {own[-1]}: {own[-1].call}" if own else ""
        rows = [o.job.index for o in same]
        found = f"{len(same)} × {failure.kind}: {failure.message}{where} ({_rows(rows)})"
        remedy = f"look at one alone: --steps=1 --rows={min(rows)}"
        yield Remark("exception", "problem", found, remedy)
    if len(groups) > 8:
        yield Remark("exception", "problem", f"and {len(groups) - 8} other kinds")


def _late(facts: Facts) -> Iterator[Remark]:
    groups: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for outcome in facts.session.outcomes:
        if outcome.end in ("timeout", "stuck"):
            places = outcome.failure.places if outcome.failure else ()
            where = f"at {places[-1]}: {places[-1].call}" if places else "in a framework"
            groups[where, outcome.end].append(outcome)
    unanswered = {c.run for c in facts.unanswered}
    unanswered |= {c.run for c in facts.calls if "hung up" in c.error}
    for (where, end), same in sorted(groups.items(), key=lambda item: -len(item[1])):
        asked = sum(o.job.run in unanswered for o in same)
        what = f"; {asked} of them for the server's answer" if asked else ""
        found = f"{len(same)} × waited {where}{what} ({_rows([o.job.index for o in same])})"
        remedy = "raise --timeout if it only is slow"
        if end == "stuck":
            remedy = "it catches CancelledError and goes on: let it pass (`raise`)"
        yield Remark("timeout", "problem", found, remedy)


def _addresses(facts: Facts) -> Iterator[Remark]:
    runs = {o.job.run for o in facts.session.outcomes if o.end == "returned"}
    silent = runs - {c.run for c in facts.calls}
    own_client = "make the client in `run`, of its base_url and api_key; keep none in self, a " \
        "global or a cache: training could not tell the runs apart"  # fmt: skip
    if facts.strays:
        found = f"{len(facts.strays)} calls went to the base_url of an earlier run"
        yield Remark("base_url", "problem", found, own_client)
    elif len(silent) > len(runs) / 2 and facts.calls:
        _, most = Counter(c.run for c in facts.calls).most_common(1)[0]
        found = f"{len(silent)} runs made no call of their own, and one made {most}"
        yield Remark("base_url", "problem", found, own_client)
    elif silent:
        found = f"{len(silent)} of {len(runs)} runs made no call by kwargs['base_url']"
        remedy = "use it, not an address of your own; a run without a completion teaches nothing"
        yield Remark("base_url", "problem", found, remedy)


def _calls(facts: Facts) -> Iterator[Remark]:
    every = [*facts.calls, *facts.strays]
    groups: dict[tuple[int, str], list[Call]] = defaultdict(list)
    for call in every:
        if not call.ok:
            groups[call.status, _pattern(call.error)].append(call)
    for (status, _), same in sorted(groups.items(), key=lambda item: -len(item[1]))[:6]:
        what = f"answered {status}" if status else "not answered"
        found = f"{len(same)} × {what}: {same[0].error}"
        yield Remark("calls", "warning", found, _call_remedy(status, same[0]))
    if every and not groups:
        yield Remark("calls", "ok", f"{len(every)} of {len(every)} answered")


def _concurrency(facts: Facts) -> Iterator[Remark]:
    runs, calls = facts.flights()
    up = facts.speed_up()
    most = "1 call" if calls.most == 1 else f"{calls.most} calls"
    found = f"at most {most} at once, {calls.mean:.1f} on average, of {runs.most} runs"
    if up is not None:
        found += f"; {up:.1f} times as fast as one run after another"
    busy = facts.session.busy_seconds / facts.seconds
    if busy > _BUSY:
        each = 1000 * facts.session.busy_seconds / max(len(facts.session.outcomes), 1)
        found += f"; Python computed {100 * busy:.0f} % of the time, {each:.0f} ms a run"
        remedy = "what a run computes is the limit: share a client's set-up (http_client), do less"
        yield Remark("concurrency", "warning", found, remedy)
    elif not facts.takes_turns(_FEW):
        yield Remark("concurrency", "ok", found)
    else:
        yield Remark("concurrency", "problem", f"the runs take turns: {found}", _turns(facts))


def _turns(facts: Facts) -> str:
    most = facts.flights()[1].most
    if sum(cause.seconds for cause in facts.causes) > 0.3 * facts.seconds:
        return "the loop is blocked: mend what is named below"
    if most == 1:
        return "look for a lock, or a client or framework that handles one call at a time"
    return f"look for a semaphore or a pool of {most} (max_connections, max_workers)"


def _loop(facts: Facts) -> Iterator[Remark]:
    if not facts.causes:
        yield Remark("event loop", "ok", "never blocked for 0.1 s")
    else:
        levels = {id(cause): _level(cause, facts.seconds) for cause in facts.causes}
        level = "problem" if "problem" in levels.values() else "warning"
        total = sum(cause.seconds for cause in facts.causes)
        longest = max(stall.seconds for stall in facts.session.stalls)
        share = 100 * total / facts.seconds
        found = f"stood still {_times(len(facts.session.stalls))}, {duration(total)} in all " \
            f"({share:.0f} % of the time), {duration(longest)} at most"  # fmt: skip
        yield Remark("event loop", level, found)
        for cause in facts.causes[:5]:
            if cause.seconds > 0.03 * total:
                name = "kept busy by" if cause.computes else "blocked by"
                yield Remark(name, levels[id(cause)], blocker(cause), cause.remedy)
    queued = facts.session.queued_seconds
    if queued > 0.3 * facts.seconds:
        found = f"for {duration(queued)} ({100 * queued / facts.seconds:.0f} %) no processor was " \
            "free for it: times are longer than they would be"  # fmt: skip
        yield Remark("machine", "warning", found, "end other programs, or believe half of it")
    elif facts.idle > 0.2 * facts.seconds:
        found = f"for {duration(facts.idle)} another thread kept it from turning"
        yield Remark("event loop", "warning", found, "move what threads compute to processes")


def _level(cause: Cause, seconds: float) -> str:
    """A call that waits is a problem; short computations of many runs only add up."""
    if cause.once:
        return "warning"
    if cause.computes:
        return "problem" if cause.longest_ran > _COMPUTES else "warning"
    return "problem" if cause.waited > max(_BLOCKS * seconds, 0.25) else "warning"


def blocker(cause: Cause) -> str:
    """`1.20 s at agent.py:14 Agent.run: time.sleep(0.5) (3 times; 0.50 s at most in one go)`."""
    text = f"{duration(cause.seconds)} at {cause.blocking}: {cause.blocking.call}"
    if cause.waiting:
        text += f", in {cause.waiting}"
    turns = f", of {len(cause.tasks)} runs in turn" if len(cause.tasks) > 1 else ""
    return f"{text} ({_times(cause.stalls)}{turns}; {duration(cause.longest)} at most in one go)"


def _left(facts: Facts) -> Iterator[Remark]:
    left, runs = facts.session.left, len(facts.session.outcomes)
    many = max(_FEW, runs // 8)
    tasks, threads = sum(left.tasks.values()), sum(left.threads.values())
    if tasks:
        remedy = "await or cancel what a run starts"
        yield Remark("left behind", "warning", f"tasks: {_named(left.tasks)}", remedy)
    if threads >= many:
        remedy = "close executors and clients at the end of a run"
        yield Remark("left behind", "warning", f"threads: {_named(left.threads)}", remedy)
    if left.sockets >= many:
        found = f"{left.sockets} open connections after {runs} runs"
        remedy = "close clients: `async with AsyncOpenAI(…)`, or pass http_client on"
        yield Remark("left behind", "warning", found, remedy)
    if not tasks and threads < many and left.sockets < many and not facts.session.gave_up:
        yield Remark("left behind", "ok", "no tasks, threads or connections")


def _call_remedy(status: int, call: Call) -> str:
    if status == 429:
        return "the server is at its limit: --batch or --group smaller, or retry with a pause"
    if status in (401, 403):
        return "pass kwargs['api_key'] on to the client"
    if status == 404 and "model" in call.error.lower():
        return f"the agent asks for {call.model!r}; --model=NAME sends all its calls to another"
    if "hung up" in call.error:
        return "the agent's own time limit, or a cancelled run"
    if not status:
        return "the server closed or refused the connection: look at its log and its limits"
    return "look at the server's log" if status >= 500 else "mend the request as the server says"


def _pattern(message: str) -> str:
    """A message without what differs from run to run: numbers, ids, quoted texts."""
    return re.sub(r"[0-9a-f]{8,}|\d+|(?<=-)[\w-]{6,}|'[^']{24,}'", "#", message)[:160]


def _rows(rows: Sequence[int]) -> str:
    unique = sorted(set(rows))
    some = ", ".join(map(str, unique[:4]))
    more = f" and {len(unique) - 4} more" if len(unique) > 4 else ""
    return f"row{'s' if len(unique) > 1 else ''} {some}{more}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _named(counts: Counter) -> str:
    return ", ".join(f"{count} × {name}" for name, count in counts.most_common(4))
