"""Show where a run of another process stands, from the files of its WORKDIR."""

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from rlx.base import UserError
from rlx.cli.text import duration, plain
from rlx.observe.progress import Progress
from rlx.observe.run_table import find, summary
from rlx.observe.rundir import finite, load
from rlx.system.jsonl import read_json
from rlx.system.workdir_lock import holder

STATUS = "status.json"  # which the run writes every few seconds
_MESSAGES = 8
_LATE = 30.0  # age of STATUS, in seconds, at which its writer seems to hang


def status(workdir: Path, now: float) -> Iterator[RenderableType]:
    """Yield panel and lines about a run at `now`, seconds since the epoch; UserError for no run."""
    (pid, lives), report = holder(workdir) or (0, False), read_json(workdir / STATUS)
    if not pid and find([workdir]) != [workdir]:
        raise UserError(f"{workdir} holds no run; give its WORKDIR")
    row, run = summary(workdir, {}), load(workdir, samples=False)
    live = report if lives and report.get("pid") == pid else {}
    report_time = finite(live.get("time")) or now
    phase = str(live.get("phase") or ("starting" if lives else row["state"]))
    since = (finite(live.get("phase_seconds")) or 0.0) + now - report_time
    age = max(0.0, now - run.ended_at) if run.metrics else 0.0
    progress = Progress(int(run.total or 0), title=str(workdir))
    yield progress.panel(run.metrics, run.evals, phase, since, age)
    lines = [f"{row['state']}: {row['note']}".removesuffix(": ")]
    lines += [f"last step {duration(age)} ago"] * bool(run.metrics)
    lines += _parts(live) if live else []
    if now - report_time > _LATE:
        lines.append(f"no sign of life for {duration(now - report_time)}; see {workdir}/stacks.txt")
    with suppress(OSError), open(workdir / "console.log", "rb") as file:
        lines += [line.decode(errors="replace").rstrip() for line in deque(file, _MESSAGES)]
    yield Text(plain("\n".join(lines)))


def _parts(live: Mapping[str, Any]) -> Iterator[str]:
    """Yield what rollouts, evaluations and servers do, by STATUS."""
    names = ("running", "buffered", "failed", "skipped")
    yield f"groups: {', '.join(f'{live.get(name)} {name}' for name in names)}"
    if steps := live.get("evaluations"):
        yield f"evaluation of step {', '.join(map(str, steps))} under way"
    states = live.get("servers") or {}
    down = [f"{address} ({why})" for address, why in states.items() if why]
    yield "; ".join([f"servers: {len(states) - len(down)} of {len(states)} alive", *down])
