"""The three steps of debugging an agent: the server, one run, many runs at once.

Results are shown as they come, and returned as one JSON-able report.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from typing import Any

from rlx.agents.workflow import with_messages
from rlx.base import UserError
from rlx.cli.text import duration
from rlx.debugger import preflight
from rlx.debugger.concurrent_runs import AgentRun, ConcurrentRuns
from rlx.debugger.debug_findings import DebugFinding, Evidence, bad, findings
from rlx.debugger.recorder import ModelCall, Recorder, shorten
from rlx.observe.progress_bar import ProgressBar
from rlx.rewards.worker_process import ending_children
from rlx.rollout import arithmetic, data

_SAMPLE_TEXT = "What is 12 + 30? Answer with a number."
SAMPLE = {"question": _SAMPLE_TEXT, "answer": "42"}
_TEXT = 400  # characters of a message that are shown
_GENERATED = 4096  # rows of a config whose data is generated
# What one run cannot show: others beside it, and a loop that its first imports hold up.
_OF_MANY = ("rewards", "concurrency", "event loop", "blocked by", "kept busy by")


@dataclass(frozen=True, slots=True)
class Debugger:
    """What is to be done, and where results are shown.

    Attributes:
      make: gives an instance of the agent's class, a new one for each run.
      rows: (index in the data, row as agents get it).
      model: of the server; "": agents' own names are kept.
      batch, group: different rows at once, and runs of each.
      timeout: seconds of a run; 0: no limit.
      section: called with a title and its findings.
      text: called with lines as they are.
    """

    make: Callable[[], Any]
    rows: Sequence[tuple[int, Mapping[str, Any]]]
    base_url: str
    api_key: str
    model: str
    batch: int
    group: int
    timeout: float
    section: Callable[[str, Sequence[DebugFinding]], None]
    text: Callable[[str], None]

    def __post_init__(self) -> None:
        if min(self.batch, self.group) < 1:
            raise UserError(f"--batch={self.batch} and --group={self.group} must be 1 or more")

    def run(self, steps: str) -> dict[str, Any]:
        """Take the steps; a run alone that has a problem ends them.

        Args:
          steps: `1` (one run), `2` (many at once), or `1,2`.

        Returns:
          The report; `ok` says whether nothing was a problem.

        Raises:
          UserError: the server does not answer as it should.
        """
        if not set(steps.replace(" ", "").split(",")) <= {"1", "2"}:
            raise UserError(f"--steps={steps} is neither 1, 2 nor 1,2; give one of them")
        base_url = preflight.check_url(self.base_url)
        models = preflight.check(base_url, self.api_key, self.model)
        report: dict[str, Any] = {"base_url": base_url, "models": models, "ok": True}
        names = ", ".join(models[:4]) or "it lists no models"
        self.section("server", [DebugFinding("server", "ok", f"{base_url} answers: {names}")])
        alone = None
        with ending_children(), Recorder(base_url, self.api_key, self.model) as recorder:
            if "1" in steps:
                report["one"], alone = self._one(recorder)
                report["ok"] = not report["one"].pop("bad")
            if "2" in steps and not report["ok"]:
                self.text("\nmany runs come once this one has no problem (or give --steps=2)")
            elif "2" in steps:
                report["many"] = self._many(recorder, alone)
                report["ok"] = not report["many"].pop("bad")
        return report

    def _one(self, recorder: Recorder) -> tuple[dict[str, Any], tuple[float, float] | None]:
        """Return the record of one run, and (its seconds, those of waiting for the server)."""
        index, row = self.rows[0]
        self.text(f"\nrow {index}: {shorten(repr(dict(row)), _TEXT)}")
        run = AgentRun(0, index, row)
        evidence, calls = self._gather([run], recorder, "one run", None)
        for line in _transcript(calls, run.begin):
            self.text(line)
        if run.end == "raised":
            self.text("\n  ".join([run.error, *map(str, run.places)]))
        alone = None
        if run.end == "returned":
            alone = run.seconds, evidence.waiting(run)
            self.text(
                f"returned {shorten(repr(run.value), 120)} after {duration(alone[0])}, "
                f"{duration(alone[1])} of it for the server"
            )
        found = [f for f in findings(evidence) if f.name not in _OF_MANY or f.level == "problem"]
        found = [f._replace(found=f.found.removeprefix("1 × ")) for f in found]
        return self._shown("one run", evidence, found) | {"calls": list(map(asdict, calls))}, alone

    def _many(self, recorder: Recorder, alone: tuple[float, float] | None) -> dict[str, Any]:
        rows = [pair for pair in islice(cycle(self.rows), self.batch) for _ in range(self.group)]
        self.text(f"\n{self.batch} rows at once, {self.group} runs of each")
        runs = [AgentRun(number, index, row) for number, (index, row) in enumerate(rows, 1)]
        evidence, _ = self._gather(runs, recorder, "runs", alone)
        self.text(evidence.table())
        return self._shown(f"{len(runs)} runs", evidence, findings(evidence))

    def _gather(
        self,
        runs: Sequence[AgentRun],
        recorder: Recorder,
        what: str,
        alone: tuple[float, float] | None,
    ) -> tuple[Evidence, list[ModelCall]]:
        with ProgressBar() as bar:
            seen = ConcurrentRuns(
                self.make, runs, recorder, self.timeout,
                lambda done, wanted: bar.show(what, done, wanted), self.text,
            ).run()  # fmt: skip
        calls = recorder.calls()
        return Evidence(seen, calls, alone), calls

    def _shown(
        self, title: str, evidence: Evidence, found: Sequence[DebugFinding]
    ) -> dict[str, Any]:
        self.section(title, found)
        remarks = [finding._asdict() for finding in found]
        return {**evidence.record(), "remarks": remarks, "bad": bad(found)}


def chosen(rows: Sequence[Mapping[str, Any]], text: str) -> list[tuple[int, Mapping[str, Any]]]:
    """Return (index, row) of the rows that `--rows` names: `7`, `7:20`, `7:`; all when empty.

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
    """Return rows of a file, or those that a config trains on, or one that is made up.

    As in training, a row with a question and no `messages` gets them.

    Raises:
      UserError: as rlx.rollout.data.
    """
    key, system, answer = "question", "", "answer"
    if config is not None:
        key, system = config.data.question_key, config.data.system_prompt
        answer = config.data.answer_key
    rows: Sequence[Mapping[str, Any]] = [SAMPLE]
    names = [(path, 1.0)] if path else data.named_sources(config.data) if config else []
    if names:
        answer = "" if answer == "answer" else answer
        rows = [row for name, _ in names for row in data.load(name, "", answer)]
    elif config is not None:
        rows = arithmetic.problems(config.seed, "train", _GENERATED)
    return [with_messages(row, key, system) for row in rows]


def _transcript(calls: Sequence[ModelCall], begin: float) -> Iterator[str]:
    """Yield the calls of a run that began at `begin` (seconds, monotonic) as lines."""
    for number, call in enumerate(calls, 1):
        facts = [f"at {duration(call.begin - begin)}"]
        facts += [f"took {duration(call.seconds)}"] if call.end else []
        if call.streamed and call.first:
            facts.append(f"first byte after {duration(call.first - call.begin)}")
        if call.prompt_tokens >= 0 and call.completion_tokens >= 0:
            facts.append(f"{call.prompt_tokens} → {call.completion_tokens} tokens")
        facts += [call.stop_reason] if call.stop_reason else []
        yield f"call {number}  {call.path}  {call.model}  {' · '.join(facts)}"
        said = list(call.messages)
        if call.error:
            said.append(["error", f"{call.status or 'no answer'}: {call.error}"])
        elif call.generates:
            said.append(["answer", call.answer or ("(empty)" if call.end else "(none yet)")])
        for role, text in said:
            lines = shorten(text, _TEXT).strip().split("\n")
            yield from (f"  {role if i == 0 else '':>9}  {line}" for i, line in enumerate(lines))
