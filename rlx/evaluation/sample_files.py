"""Write and read the directory of an evaluation.

OUT/settings.json              settings; an evaluation with others does not continue here
OUT/MODEL/SET.jsonl            every sample; failed ones are generated again
OUT/MODEL/hf                   the HF directory that a checkpoint was converted to
OUT/results.json, table.txt    the table; results.json has intervals of 95 %
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlx.agents import trajectories
from rlx.agents.named_workflow import RLVR_NAME
from rlx.base import Group, UserError, refuse
from rlx.evaluation import statistics
from rlx.rollout.images import RowImages
from rlx.system.image_store import ImageStore
from rlx.system.jsonl import append_jsonl, read_json, read_jsonl, write_atomically

CHUNK = 8  # samples a request: what an interruption may cost of a question
GREEDY = -1  # the sample number of the answer at temperature 0


@dataclass(frozen=True, slots=True)
class QuestionOptions:
    """How questions are asked, and the columns of the table."""

    temperature: float = 0.6  # of the sampled answers
    top_p: float = 0.95
    workflow: str = RLVR_NAME  # a class, as in `named_workflow.build`
    workflow_kwargs: Mapping[str, Any] = field(default_factory=dict)
    n_samples: int = 32  # for each question; 0: the greedy answer only
    pass_at: tuple[int, ...] = (8, 16)  # each k of a column
    maj_at: tuple[int, ...] = ()
    # Of the questions.
    images: RowImages = field(default_factory=lambda: RowImages(ImageStore(), "images"))

    def __post_init__(self) -> None:
        limits = (("temperature", 0, 100), ("top_p", 1e-6, 1), ("n_samples", 0, 1 << 16))
        refuse((not least <= (value := getattr(self, name)) <= most,
                f"--{name}={value:g} is not from {least:g} to {most}; give a number in that range")
               for name, least, most in limits)  # fmt: skip

    @property
    def columns(self) -> tuple[str, ...]:
        """The table's columns after `dataset` and `num_questions`."""
        varying = (*(f"pass@{k}" for k in self.pass_at), *(f"maj@{k}" for k in self.maj_at))
        return ("greedy_length", "sample_length", "greedy_acc", "sample_pass@1", *varying)


@dataclass(frozen=True, slots=True)
class SampleRange:
    """Samples `first` … `first + count − 1` of a question, or its greedy answer: one request."""

    index: int
    first: int
    count: int


def is_sample(record: Mapping[str, Any]) -> bool:
    """Return whether a line of a samples file has all values that the table needs."""
    complete = all(isinstance(record.get(key), int) for key in ("index", "sample", "tokens"))
    answered = isinstance(record.get("answer", 0), str | None)
    return complete and answered and isinstance(record.get("reward"), int | float)


def pending(path: Path, questions: int, n_samples: int) -> list[SampleRange]:
    """Return the requests for samples that a file does not have yet."""
    done = {(r["index"], r["sample"]) for r in read_jsonl(path) if "error" not in r}
    starts = range(0, n_samples, CHUNK)
    chunks = [(GREEDY, 1), *((first, min(CHUNK, n_samples - first)) for first in starts)]
    return [
        SampleRange(index, first, count)
        for index in range(questions) for first, count in chunks
        if any((index, first + i) not in done for i in range(count))
    ]  # fmt: skip


def keep(
    path: Path, samples: SampleRange, row: Mapping[str, Any], group: Group | BaseException,
    tokenizer: Any,
) -> None:  # fmt: skip
    """Append the samples of a group, or of the failure in its place."""
    if isinstance(group, Group):
        parts = trajectories.samples(group, samples.count)
        records = [trajectories.record(each, tokenizer) for each in parts]
        answers = [statistics.ballot(each["completion"]) for each in records]
    else:
        error = f"{type(group).__name__}: {group}"
        nothing = {"completion": "", "reward": 0.0, "tokens": 0, "error": error}
        records, answers = [nothing] * samples.count, [None] * samples.count
    for number, (record, answer) in enumerate(zip(records, answers, strict=True), samples.first):
        head = {"index": samples.index, "sample": number, "question": row["question"],
                "answer_key": row.get("answer"), "answer": answer}  # fmt: skip
        append_jsonl(path, {**head, **record})


def summary(name: str, path: Path, questions: int, how: QuestionOptions) -> dict[str, Any]:
    """Return the table's row of a samples file, and how many questions have a failed sample."""
    samples: dict[int, dict[int, dict]] = {}
    # The first record of a sample counts, a failure only without another record.
    for record in sorted(read_jsonl(path), key=lambda record: "error" in record):
        if record["sample"] < how.n_samples:
            samples.setdefault(record["index"], {}).setdefault(record["sample"], record)
    results, failed = [], 0
    for index in range(questions):
        by_number = samples.get(index, {})
        failed += any("error" in record for record in by_number.values())
        greedy, ordered = by_number.pop(GREEDY, None), [by_number[i] for i in sorted(by_number)]
        results.append(statistics.per_question(greedy, ordered, how.pass_at, how.maj_at))
    return {**statistics.row(name, results, how.columns), "failed": failed}


def write_table(out: Path, rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    """Write results.json and table.txt."""
    write_atomically(out / "results.json", json.dumps(list(rows), indent=2).encode())
    write_atomically(out / "table.txt", (statistics.text_table(rows, names) + "\n").encode())


def shortfall(rows: Sequence[Mapping[str, Any]], out: Path) -> list[str]:
    """Return a line for each row of the table with failed questions."""
    return [
        f"{row['failed']} of {row['num_questions']} questions failed and count as wrong: see error "
        f"in {out / row['model'] / row['dataset']}.jsonl; the same command asks them again"
        for row in rows
        if row["failed"]
    ]


def settings(
    how: QuestionOptions,
    models: Mapping[str, str],  # name → path
    datasets: Mapping[str, list],  # name → [source, number of rows, reward]
    further: Mapping[str, Any],  # other settings that change the samples
    out: Path,
) -> dict[str, Any]:
    """Return the object of settings.json; raise UserError if OUT has samples of other settings."""
    values = {
        **further, "temperature": how.temperature, "top_p": how.top_p,
        "workflow": None if how.workflow == RLVR_NAME else how.workflow,
        "workflow_kwargs": dict(how.workflow_kwargs) or None,
    }  # fmt: skip
    before, path = {}, out / "settings.json"
    # An evaluation that failed before it wrote anything claims nothing.
    if path.exists() and any((*out.rglob("*.jsonl"), *out.glob("*/hf"))):  # a set may have a URL
        before = read_json(path)
        for key, value in values.items():
            if before.get(key) != value:
                problem = f"{out} holds an evaluation with {key}={before.get(key)!r}"
                raise UserError(f"{problem}, this one has {value!r}; give another --output")
    weights = {name: _written(Path(path)) for name, path in models.items()}
    for key, entries in (("models", models), ("datasets", datasets), ("weights", weights)):
        values[key] = before.get(key, {})
        for name, value in entries.items():
            if values[key].setdefault(name, value) != value:
                problem = f"{out} holds {name} of {values[key][name]}, this one is {value}"
                raise UserError(f"{problem}; give another --output")
    return values


def _written(model: Path) -> str:
    """Return when an HF directory's weights, or a checkpoint, were written; a copy's may differ."""
    files = (*model.glob("*.safetensors"), *model.glob("manifest.json"))
    newest = max((file.stat().st_mtime for file in files), default=0.0)
    return f"weights written {time.asctime(time.gmtime(newest))} UTC"
