"""Rows that an agent is run on, and the steps in which that is done."""

import re
from collections.abc import Mapping, Sequence
from itertools import cycle, islice
from typing import Any

from rlx.agents.workflow import with_messages
from rlx.base import UserError
from rlx.rollout import data

SAMPLE = {"question": "What is 12 + 30? Answer with a number.", "answer": "42"}
_GENERATED = 4096  # rows of a config whose data is generated
Row = tuple[int, Mapping[str, Any]]  # index in the data, row as agents get it


def steps(steps: str, rows: Sequence[Row], batch: int, group: int) -> dict[str, list[Row]]:
    """Return the rows of each step: `one`, the first, and `many`, `batch` rows `group` times.

    Args:
      steps: `1`, `2` or `1,2`, as --steps has it.

    Raises:
      UserError: it is none of them, or batch or group is below 1.
    """
    if steps not in ("1", "2", "1,2"):
        raise UserError(f"--steps={steps} is neither 1, 2 nor 1,2; give one of them")
    if min(batch, group) < 1:
        raise UserError(f"--batch={batch} and --group={group} must be 1 or more")
    found = {"1": ("one", [rows[0]]), "2": ("many", [*islice(cycle(rows), batch)] * group)}
    return dict(found[step] for step in steps.split(","))


def load(path: str, wanted: str = "", config: Any = None) -> list[Row]:
    """Return rows of a file, or of what a config trains on, or one that is made up.

    As in training, a row with a question and no `messages` gets them.

    Args:
      wanted: `7`, `7:20`, `7:`, as --rows has it; "": all.

    Raises:
      UserError: there is no such row, or as rlx.rollout.data.
    """
    key, system, answer, rows = "question", "", "", [SAMPLE]
    names = [path] if path else []
    if config is not None:
        key, system = config.data.question_key, config.data.system_prompt
        answer = config.data.answer_key if config.data.answer_key != "answer" else ""
        names = names or [name for name, _ in data.named_sources(config.data)]
        if not names:
            rows = data.GENERATED[config.data.kind](config.seed, "train", _GENERATED)
    if names:
        rows = [row for name in names for row in data.load(name, "", answer)]
    bounds = re.fullmatch(r"(\d*)(:?)(\d*)", wanted)
    if not bounds:
        raise UserError(f"--rows={wanted!r} is no range; write 7, 7:20 or 7:")
    first = int(bounds[1] or 0)
    last = first + 1 if bounds[1] and not bounds[2] else int(bounds[3] or len(rows))
    if not rows[first:last]:
        raise UserError(f"--rows={wanted} names no row of {len(rows)}; they count from 0")
    return [(i, with_messages(rows[i], key, system)) for i in range(len(rows))[first:last]]
