"""The three steps of debugging an agent: the server, one run, many runs at once.

Results are shown as they come, and returned as one JSON-able report.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import cycle, islice
from typing import TYPE_CHECKING, Any

from rlx.agents.workflow import with_messages
from rlx.base import UserError, install
from rlx.cli.text import duration
from rlx.debugger import preflight
from rlx.debugger.concurrent_runs import AgentRun, ConcurrentRuns
from rlx.debugger.debug_findings import Evidence, findings
from rlx.debugger.model_call import ModelCall, shorten
from rlx.doctor.findings import Finding, problems
from rlx.observe.progress_bar import ProgressBar
from rlx.rollout import arithmetic, data
from rlx.workers.worker_process import ending_children

if TYPE_CHECKING:
    from rlx.debugger.recorder import Recorder

SAMPLE = {"question": "What is 12 + 30? Answer with a number.", "answer": "42"}
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
      section: called with a title and its findings; `text`: with lines as they are.
    """

    make: Callable[[], Any]
    rows: Sequence[tuple[int, Mapping[str, Any]]]
    base_url: str
    api_key: str
    model: str
    batch: int
    group: int
    timeout: float
    section: Callable[[str, Sequence[Finding]], None]
    text: Callable[[str], None]

    def run(self, steps: str) -> dict[str, Any]:
        """Take the steps; a run alone that has a problem ends them.

        Args:
          steps: `1` (one run), `2` (many at once), or `1,2`.

        Returns:
          The report; `ok` says whether nothing was a problem.

        Raises:
          UserError: the server does not answer as it should.
        """
        if steps not in ("1", "2", "1,2"):
            raise UserError(f"--steps={steps} is neither 1, 2 nor 1,2; give one of them")
        if min(self.batch, self.group) < 1:
            raise UserError(f"--batch={self.batch} and --group={self.group} must be 1 or more")
        try:
            from rlx.debugger.recorder import Recorder
        except ImportError as error:
            raise UserError(f"debugging needs the extra: {install('agents')} ({error})") from None
        base_url = self.base_url.rstrip("/")
        models = preflight.check(base_url, self.api_key, self.model)
        report: dict[str, Any] = {"base_url": base_url, "models": models, "ok": True}
        names = ", ".join(models[:4]) or "it lists no models"
        self.section("server", [Finding("server", "server", "ok", f"{base_url} answers: {names}")])
        with ending_children(), Recorder(base_url, self.api_key, self.model) as recorder:
            if "1" in steps:
                index, row = self.rows[0]
                self.text(f"\nrow {index}: {shorten(repr(dict(row)), _TEXT)}")
                self._take("one", [AgentRun(0, index, row)], recorder, report)
            if "2" in steps and not report["ok"]:
                self.text("\nmany runs come once this one has no problem (or give --steps=2)")
            elif "2" in steps:
                self.text(f"\n{self.batch} rows at once, {self.group} runs of each")
                rows = [
                    row for row in islice(cycle(self.rows), self.batch) for _ in range(self.group)
                ]
                runs = [AgentRun(number, *row) for number, row in enumerate(rows, 1)]
                self._take("many", runs, recorder, report)
        return report

    def _take(
        self, step: str, runs: Sequence[AgentRun], recorder: "Recorder", report: dict[str, Any]
    ) -> None:
        """Take one step, show what it found and put it into the report."""
        title = "one run" if step == "one" else f"{len(runs)} runs"
        with ProgressBar() as bar:
            show = partial(bar.show, title)
            seen = ConcurrentRuns(self.make, runs, recorder, self.timeout, show, self.text).run()
        calls = list(recorder.calls)
        evidence = Evidence(seen, calls)
        record, found = evidence.record(), findings(evidence, title)
        if step == "one":
            self.text("\n".join(_transcript(runs[0], calls)))
            found = [f for f in found if f.name not in _OF_MANY or f.level == "problem"]
            record["calls"] = list(map(asdict, calls))
        else:
            self.text(evidence.table())
        self.section(title, found)
        report["ok"] = not problems(found)
        report[step] = {**record, "remarks": list(map(asdict, found))}


def load_rows(path: str, wanted: str = "", config: Any = None) -> list[tuple[int, Any]]:
    """Return (index, row) of a file, or of what a config trains on, or of one row made up.

    As in training, a row with a question and no `messages` gets them.

    Args:
      wanted: `7`, `7:20`, `7:`, as --rows has it; "": all.

    Raises:
      UserError: there is no such row, or as rlx.rollout.data.
    """
    key, system, answer = "question", "", ""
    names, rows = [path] if path else [], [SAMPLE]
    if config is not None:
        key, system = config.data.question_key, config.data.system_prompt
        answer = config.data.answer_key
        names = names or [name for name, _ in data.named_sources(config.data)]
        rows = [] if names else arithmetic.problems(config.seed, "train", _GENERATED)
    if names:
        answer = "" if answer == "answer" else answer
        rows = [row for name in names for row in data.load(name, "", answer)]
    bounds = re.fullmatch(r"(\d*)(:?)(\d*)", wanted)
    if not bounds:
        raise UserError(f"--rows={wanted!r} is no range; write 7, 7:20 or 7:")
    first = int(bounds[1] or 0)
    last = first + 1 if bounds[1] and not bounds[2] else int(bounds[3] or len(rows))
    if not rows[first:last]:
        raise UserError(f"--rows={wanted} names no row of {len(rows)}; they count from 0")
    return [(i, with_messages(rows[i], key, system)) for i in range(len(rows))[first:last]]


def _transcript(run: AgentRun, calls: Sequence[ModelCall]) -> Iterator[str]:
    """Yield the calls of a run and its end, as lines."""
    for number, call in enumerate(calls, 1):
        facts = [f"at {duration(call.begin - run.begin)}"]
        facts += [f"took {duration(call.seconds)}"] if call.end else []
        if call.streamed and call.first:
            facts.append(f"first byte after {duration(call.first - call.begin)}")
        if call.completion_tokens >= 0:
            facts.append(f"{call.prompt_tokens} → {call.completion_tokens} tokens")
        facts += [call.stop_reason] if call.stop_reason else []
        yield f"call {number}  {call.path}  {call.model}  {' · '.join(facts)}"
        said = [
            *call.messages,
            ["answer", call.answer or ("(empty)" if call.end else "(none yet)")],
        ]
        if call.error:
            said[-1] = ["error", f"{call.status or 'no answer'}: {call.error}"]
        for role, text in said if call.generates or call.error else []:
            lines = shorten(text, _TEXT).strip().split("\n")
            yield from (f"  {role if i == 0 else '':>9}  {line}" for i, line in enumerate(lines))
    if run.end == "raised":
        yield "\n  ".join([run.error, *map(str, run.places)])
    if run.end == "returned":
        spent = f"after {duration(run.seconds)}, {duration(run.waiting)} of it for the server"
        yield f"returned {shorten(repr(run.value), 120)} {spent}"
