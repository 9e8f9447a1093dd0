"""What is said of runs that were made up: every mistake of an agent by its name. No clock runs."""

from collections import Counter

import pytest

from rlx.agents.loop_watch import Place
from rlx.debugger.concurrent_runs import AgentRun, Blocker, ConcurrentRuns, Observed
from rlx.debugger.debug_findings import Evidence, findings
from rlx.debugger.model_call import ModelCall

BEGIN = 100.0
HERE = Place(__file__, 1, "Agent.run")


def runs(count, seconds=1.0, **more):
    """That many runs at once, two of each row."""
    numbered = range(1, count + 1)
    return [
        AgentRun(n, (n - 1) // 2, {}, **{"end": "returned", "value": 1.0} | more, begin=BEGIN,
                 seconds=seconds) for n in numbered
    ]  # fmt: skip


def call(run, begin=0.0, end=1.0, **more):
    """A call of a run, answered unless said otherwise; seconds after BEGIN."""
    found = {"status": 200, "completion_id": f"{run}-{begin}"} | more
    return ModelCall(run, "/chat/completions", BEGIN + begin, BEGIN + end, **found)


def said(found, name, level=None):
    """(what was found, remedy) of the findings of a name."""
    found = [f for f in found if f.name == name and level in (None, f.level)]
    return [(f.found, f.remedy) for f in found]


def look(of, calls, seconds=1.0, **more):
    """The findings of runs and their calls."""
    seen = Observed(of, BEGIN, BEGIN + seconds, **more)
    return findings(Evidence(seen, calls), "runs")


def test_runs_that_are_well_have_no_problem():
    found = look(runs(8), [call(n) for n in range(1, 9)])
    assert {f.level for f in found} == {"ok"}
    assert said(found, "calls") == [("8 of 8 answered", "")]
    assert said(found, "event loop") == [("never blocked for 0.1 s", "")]
    expected = "at most 8 calls at once, 8.0 on average, of 8 runs; 8.0 times as fast as one run"
    assert said(found, "concurrency")[0][0].startswith(expected)


def test_rewards_without_a_signal_are_counted():
    of = runs(4)
    of[0].value = {"1-0.0": 0.0}
    found = look(of, [call(n) for n in range(1, 5)])
    ((words, _),) = said(found, "rewards")
    assert words == (
        "mean 0.75, from 0 to 1; all runs of a row are equal in 1 of 2 rows: no signal there"
    )


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        ([call(1, n, n + 1) for n in range(4)], "3 runs made no call of their own, and one made 4"),
        ([call(9), call(1)], "1 calls went to the base_url of an earlier run"),
        ([call(1), call(2)], "2 of 4 runs made no call by kwargs['base_url']"),
    ],
)
def test_calls_that_cannot_be_told_apart_are_a_problem(calls, words):
    ((found, _),) = said(look(runs(4), calls), "base_url", "problem")
    assert found == words


@pytest.mark.parametrize(("pool", "remedy"), [(1, "a lock"), (2, "a pool of 2")])
def test_runs_that_take_turns_are_seen(pool, remedy):
    calls = [call(n + 1, n // pool, n // pool + 1) for n in range(8)]
    of = runs(8, 8 / pool)
    of[0].seconds = 1.0  # as if it were alone
    ((found, instead),) = said(look(of, calls, 8 / pool), "concurrency", "problem")
    assert found.startswith(f"the runs take turns: at most {pool} call")
    assert f"; {pool}.0 times as fast" in found
    assert remedy in instead
    blocked = look(of, calls, 8 / pool, slow=[3.0])
    assert said(blocked, "concurrency")[0][1].startswith("the loop is blocked")


def test_a_loop_that_computes_all_the_time_is_named():
    found = look(runs(4), [call(n) for n in range(1, 5)], busy_seconds=0.9)
    ((words, _),) = said(found, "concurrency", "warning")
    assert "Python computed 90 % of the time, 225 ms a run" in words


def test_refusals_are_grouped_by_status():
    calls = [
        call(1, status=429, error="refused, request 17"),
        call(2, status=429, error="refused, request 4"),
        call(3, status=0, error="ServerDisconnectedError"),
        call(4, status=404, error="no such model", model="default"), call(4),
    ]  # fmt: skip
    found = dict(said(look(runs(4), calls), "calls", "warning"))
    assert found["2 × answered 429: refused, request 17"].startswith("the server is at its limit")
    assert "server's log" in found["1 × not answered: ServerDisconnectedError"]
    assert "'default'; --model=NAME" in found["1 × answered 404: no such model"]


def test_failures_are_counted_at_the_users_line_and_by_row():
    of = runs(4, end="raised", error="ValueError: 12", places=(HERE, Place("/x", 1, "f")))
    of[1].error = "ValueError: 7"
    of[2].end, of[3].end = "timeout", "stuck"
    found = look(of, [call(3, end=-BEGIN)])
    ((words, remedy),) = said(found, "exception")
    assert words.startswith("2 × ValueError: 12 at ")
    assert words.endswith("(row 0)")
    assert remedy == "look at one alone: --steps=1 --rows=0"
    timeouts = dict(said(found, "timeout"))
    asked = next(words for words in timeouts if "it had asked the server" in words)
    assert "--timeout" in timeouts.pop(asked)
    assert ["catches CancelledError" in remedy for remedy in timeouts.values()] == [True]
    ((words, _),) = said(found, "runs", "problem")
    assert words == "0 of 4 ok, 2 raised, 1 timeout, 1 stuck, in 1.00 s"


def test_what_is_left_behind_is_counted():
    left = Counter({("tasks", "sleep"): 1, ("threads", "lost"): 8, ("connections", "open"): 1})
    found = look(runs(2), [call(1), call(2)], left=left, background=Counter({"KeyError: 1": 2}))
    assert [words for words, _ in said(found, "left behind")] == [
        "tasks: 1 × sleep", "threads: 8 × lost",
    ]  # fmt: skip
    assert said(found, "tasks")[0][0] == "2 × a task in the background failed: KeyError: 1"


@pytest.mark.parametrize(
    ("stack", "computes", "seconds", "level"),
    [
        (["a.py:1 f: time.sleep(1)"], False, 0.3, "problem"),
        (["a.py:1 f: time.sleep(.1)"], False, 0.2, "warning"),
        (["a.py:1 f: json.loads(x)", "json/decoder.py:3 d: scan"], True, 0.6, "problem"),
        (["a.py:1 f: json.loads(x)"], True, 0.4, "warning"),
        (["a.py:1 f: import x", "<frozen importlib._bootstrap>:1 f:"], True, 9.0, "warning"),
    ],
)
def test_a_line_that_blocks_is_a_problem_where_it_costs(stack, computes, seconds, level):
    blockers = {stack[0]: Blocker(stack, computes, "mend it", seconds, seconds, 1)}
    found = look(runs(2), [call(1), call(2)], 10.0, blockers=blockers, slow=[seconds])
    name = "kept busy by" if computes else "blocked by"
    ((words, remedy),) = said(found, name, level)
    assert f" at {stack[0]}" in words
    assert (f", in {stack[-1]}" in words) == (len(stack) > 1)
    assert remedy == "mend it"
    assert said(found, "event loop", level)


def test_overlapping_calls_are_waited_for_once():
    run = AgentRun(1, 0, {}, calls=[call(1, 0, 2), call(1, 1, 3), call(1, 5, 6)])
    assert run.waiting == 4.0


def test_a_slow_callback_is_put_down_to_the_line_that_most_looks_found():
    watched = ConcurrentRuns(None, [], None, 0.0, tell=pytest.fail)
    other, pdb = Place(__file__, 2, "Agent.tool"), Place("/lib/pdb.py", 3, "interaction")
    for place in (other, HERE, HERE):
        watched._late(0.05, 0.04, [place])
    watched._slow("<Task>", 0.5)
    (blocker,) = watched.observed.blockers.values()
    assert (blocker.stack, blocker.computes, blocker.seconds) == ([str(HERE)], True, 0.5)
    watched._late(0.05, 0.0, [HERE, pdb])  # someone looks at it step by step
    watched._slow("<Task>", 60.0)
    assert watched.observed.slow == [0.5]
    watched._slow("<Task never looked at>", 0.2)
    assert watched.observed.blockers["<Task never looked at>"].remedy == "look at it with py-spy"


def test_a_loop_that_is_blocked_is_told_once_while_it_is():
    told = []
    watched = ConcurrentRuns(None, [], None, 0.0, tell=told.append)
    for seconds in (1.0, 6.0, 7.0, 1.0, 8.0):
        watched._late(seconds, 0.0, [HERE])
    assert [line.partition(" by now")[0] for line in told] == [
        "the event loop is blocked, for 6 s", "the event loop is blocked, for 8 s",
    ]  # fmt: skip
