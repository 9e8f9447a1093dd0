"""The three steps of debugging an agent: the server, one run, many runs at once.

Results go to callbacks as they come, and into one JSON-able report.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlx.agents import preflight
from rlx.agents.crowd import Crowd, Job, Session
from rlx.agents.crowd_facts import Alone, Facts, alone
from rlx.agents.exchange import Call, shorten
from rlx.agents.recorder import Recorder
from rlx.agents.remarks import Remark, bad, remarks
from rlx.base import UserError
from rlx.cli.text import duration
from rlx.observe.counting import Counting
from rlx.rewards.worker_process import nothing_left
from rlx.rollout import arithmetic, data

_SAMPLE_TEXT = "What is 12 + 30? Answer with a number."
SAMPLE = {
    "messages": [{"role": "user", "content": _SAMPLE_TEXT}],
    "question": _SAMPLE_TEXT,
    "answer": "42",
}
_TEXT = 400  # characters of a message that are shown
_GENERATED = 4096  # rows of a config whose data is generated
STEPS = ("1", "2")


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be done.

    Attributes:
      make: gives an instance of the agent's class, a new one for each run.
      rows: (index in the data, row as agents get it).
      model: of the server; "": its first, and agents' own names are kept.
      batch, group: different rows at once, and runs of each.
      timeout: seconds of a run; 0: none.
      steps: of STEPS.
    """

    make: Callable[[], Any]
    rows: Sequence[tuple[int, Mapping[str, Any]]]
    base_url: str
    api_key: str
    model: str
    batch: int
    group: int
    timeout: float
    steps: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Screen:
    """Where results go.

    Attributes:
      section: told a title and its remarks.
      text: told lines as they are.
    """

    section: Callable[[str, Sequence[Remark]], None]
    text: Callable[[str], None]


def run(plan: Plan, screen: Screen) -> dict[str, Any]:
    """Takes the steps; a run alone that fails ends them before the crowd's.

    Returns:
      The report; `ok` says whether nothing was a problem.

    Raises:
      UserError: the server does not answer as it should.
    """
    with nothing_left():
        return _run(plan, screen)


def _run(plan: Plan, screen: Screen) -> dict[str, Any]:
    base_url = preflight.check_url(plan.base_url)
    answers = preflight.check(base_url, plan.api_key, plan.model)
    found = f"{base_url} answers: {answers.model}, one token in {duration(answers.seconds)}"
    every = [Remark("server", "ok", found)]
    screen.section("server", every)
    report: dict[str, Any] = {
        "base_url": base_url, "model": answers.model, "models": list(answers.models),
        "first_token_seconds": answers.seconds,
    }  # fmt: skip
    single: Alone | None = None
    with Recorder(base_url, plan.api_key, plan.model) as recorder:
        if "1" in plan.steps:
            facts, calls = _one(plan, recorder, screen)
            single, found_here = facts.single, _one_remarks(facts)
            report["one"] = {**_record(facts, found_here), "calls": calls}
            screen.section("one run", found_here)
            every += found_here
        if "2" in plan.steps and bad(every):
            screen.text("\nmany runs come once this one has no problem (or give --steps=2)")
        elif "2" in plan.steps:
            facts = _many(plan, recorder, screen, single)
            found_here = remarks(facts)
            report["many"] = _record(facts, found_here)
            screen.text(facts.table())
            screen.section(f"{plan.batch * plan.group} runs", found_here)
            every += found_here
    report["ok"] = not bad(every)
    return report


def _record(facts: Facts, found: Sequence[Remark]) -> dict[str, Any]:
    return {**facts.record(), "remarks": [remark._asdict() for remark in found]}


def chosen(rows: Sequence[Mapping[str, Any]], text: str) -> list[tuple[int, Mapping[str, Any]]]:
    """(index, row) of the rows that `--rows` names: `7`, `7:20`, `7:`; all when empty.

    Raises:
      UserError: not such a text, or no row there.
    """
    begin, colon, end = text.partition(":")
    try:
        first = int(begin or 0)
        last = int(end) if end else len(rows) if colon or not text else first + 1
    except ValueError:
        raise UserError(f"--rows={text!r} is no range; write 7, 7:20 or 7:") from None
    numbered = list(enumerate(rows))[first:last] if first >= 0 else []
    if not numbered:
        raise UserError(f"--rows={text} names no row of {len(rows)}; they count from 0")
    return numbered


def load_rows(path: str, config: Any = None) -> list[Mapping[str, Any]]:
    """Rows of a file, or those that a config trains on, or one that is made up.

    As in training, a row with a question and no `messages` gets them.

    Raises:
      UserError: as rlx.rollout.data.
    """
    key, system = "question", ""
    if config is not None:
        key, system, path = (
            config.data.question_key, config.data.system_prompt, path or config.data.train
        )  # fmt: skip
    if path:
        return [_with_messages(row, key, system) for row in data.load(path, "", "")]
    if config is None:
        return [SAMPLE]
    if config.data.kind != "arithmetic":
        raise UserError("data.train of the config is empty; give --data=FILE.jsonl")
    rows = arithmetic.problems(config.seed, "train", _GENERATED)
    return [_with_messages(row, key, system) for row in rows]


def _with_messages(row: Mapping[str, Any], key: str, system: str) -> Mapping[str, Any]:
    if "messages" in row or key not in row:
        return row
    prompt = [{"role": "system", "content": system}] if system else []
    return {**row, "messages": [*prompt, {"role": "user", "content": str(row[key])}]}


def transcript(calls: Sequence[Call], begin: float) -> Iterator[str]:
    """The calls of a run as lines.

    Args:
      begin: seconds, monotonic, of the run.
    """
    for number, call in enumerate(sorted(calls, key=lambda c: c.begin), 1):
        facts = [f"at {duration(call.begin - begin)}", f"took {duration(call.seconds)}"]
        if call.streamed and call.first:
            facts.append(f"first byte after {duration(call.first - call.begin)}")
        if call.prompt_tokens >= 0 and call.completion_tokens >= 0:
            facts.append(f"{call.prompt_tokens} → {call.completion_tokens} tokens")
        facts += [call.stop_reason] if call.stop_reason else []
        yield f"call {number}  {call.path}  {call.model}  {' · '.join(facts)}"
        for role, text in call.messages:
            yield from _said(role, text)
        if call.error:
            yield from _said("error", f"{call.status or 'no answer'}: {call.error}")
        elif call.answer or call.generates:
            yield from _said("answer", call.answer or "(empty)")


def _said(role: str, text: str) -> Iterator[str]:
    lines = shorten(text, _TEXT).strip().split("\n")
    yield f"  {role:>9}  {lines[0]}"
    for line in lines[1:]:
        yield f"  {'':9}  {line}"


def _one(plan: Plan, recorder: Recorder, screen: Screen) -> tuple[Facts, list[dict[str, Any]]]:
    """(what the run alone showed, its calls)."""
    index, row = plan.rows[0]
    screen.text(f"\nrow {index}: {shorten(repr(dict(row)), _TEXT)}")
    session = _crowd(plan, recorder, [Job(0, index, row)], screen, "one run")
    calls, unanswered = recorder.calls()
    for line in transcript([*calls, *_cut(unanswered, session)], session.begin):
        screen.text(line)
    outcome = session.outcomes[0]
    if outcome.failure and outcome.end == "raised":
        screen.text(f"{outcome.failure.kind}: {outcome.failure.message}")
        for place in outcome.failure.places:
            screen.text(f"  {place}: {place.call}")
    if outcome.end == "returned":
        own = alone(outcome, calls)
        screen.text(
            f"returned {shorten(repr(outcome.value), 120)} after {duration(own.seconds)}, "
            f"{duration(own.waiting)} of it for the server"
        )
    return Facts(session, calls, unanswered, None), [dataclasses.asdict(call) for call in calls]


def _cut(unanswered: Sequence[Call], session: Session) -> list[Call]:
    """Calls without an answer, as if they had ended with the session."""
    note = "no answer yet"
    return [dataclasses.replace(c, end=session.end, error=note) for c in unanswered]


def _one_remarks(facts: Facts) -> list[Remark]:
    """What one run can show: concurrency says nothing yet, nor that first imports take a while."""
    found = [
        r._replace(found=r.found.removeprefix("1 × "))
        for r in remarks(facts)
        if r.name not in ("concurrency", "rewards")
    ]
    loop = ("event loop", "blocked by", "kept busy by", "machine")
    found = [r for r in found if r.name not in loop or r.level == "problem"]
    return [r._replace(remedy="") if r.name == "exception" else r for r in found]


def _many(plan: Plan, recorder: Recorder, screen: Screen, single: Alone | None) -> Facts:
    rows = itertools.islice(itertools.cycle(plan.rows), plan.batch)
    pairs = [(index, row) for index, row in rows for _ in range(plan.group)]
    jobs = [Job(run, index, row) for run, (index, row) in enumerate(pairs, 1)]
    screen.text(f"\n{plan.batch} rows at once, {plan.group} runs of each")
    session = _crowd(plan, recorder, jobs, screen, "runs")
    return Facts(session, *recorder.calls(), single)


def _crowd(
    plan: Plan, recorder: Recorder, jobs: Sequence[Job], screen: Screen, what: str
) -> Session:
    crowd = Crowd(plan.make, jobs, recorder.base_url, recorder.api_key, plan.timeout)
    with Counting() as counting:
        return crowd.run(lambda done, wanted: counting.show(what, done, wanted), screen.text)
