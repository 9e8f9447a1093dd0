"""Make rows of the tasks of `reasoning-gym`, and grade answers by a task's own function.

An entry of a task is a function of name, settings, seed and index, which a row holds. The grader
makes the entry again, because tasks keep objects in it that JSON cannot hold.
"""

import ast
import copy
import dataclasses
import functools
import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import parse_qsl

from rlx.base import UserError, nearest, packages_of, seed_of, unknown

_HELD_OUT_SHARE = 5  # 1 question in 5, by a hash of its text
SIZES = (200, 5_000)  # held out, to train on, without a `size`; some tasks take 0.1 s for a row
_MOST_MISSES = 2_000  # questions in a row that belong to the other split


def rows(names: str, split: str = "train") -> Iterator[dict[str, Any]]:
    """Yield the rows of a split, of several tasks in turns.

    No question of split `train` is in another split, whatever the seeds. `names` are `TASK` or
    `TASK?SETTING=VALUE&…`, with commas between several. Settings are the task's, and `size` and
    `seed` of its rows. UserError without such a package, task or setting, or if a task refuses it.
    """
    streams = [_stream(text, split) for text in names.split(",")]
    return itertools.chain.from_iterable(zip(*streams, strict=False))  # the shortest ends it


def score(answer: str, question: str, task: Mapping[str, Any]) -> float:
    """Return what a row's task gives an answer, 0 to 1; UserError if it makes another question."""
    data, entry = _entry(json.dumps(task))
    if entry["question"] != question:
        problem = f"reasoning-gym makes another question of {task}"
        raise UserError(f"{problem}; install the version that made the row")
    try:
        return float(data.score_answer(answer, copy.deepcopy(entry)))
    except Exception:  # some tasks raise for answers that they cannot read
        data.score_answer(entry["answer"], entry)  # raises if the task fails for any answer
        return 0.0


def tasks() -> Mapping[str, tuple[type, ...]]:
    """Return name → classes of all tasks; raise UserError without the package."""
    with packages_of("reasoning-gym", "tasks of reasoning-gym need packages"):
        from reasoning_gym.factory import DATASETS
    return {name: parts for name, parts in DATASETS.items() if name != "composite"}


def _stream(text: str, split: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of one task."""
    name, _, query = text.strip().partition("?")
    settings = {key: setting(value) for key, value in parse_qsl(query)}
    size = settings.pop("size", SIZES[split == "train"])
    if not isinstance(size, int) or size < 1:  # it would have no end
        raise UserError(f"reasoning_gym:{text} has size={size!r}; give a number of rows, from 1")
    seed = seed_of(f"{name} {settings.pop('seed', 0)} {split}".encode())  # tasks add the index
    data, count, misses = _data_set(name, json.dumps(settings), seed), 0, 0
    for index in itertools.count():
        if count == size:
            return
        entry = data[index]
        question = str(entry["question"])
        if in_split(question, split):
            task = {"name": name, "settings": settings, "seed": seed, "index": index}
            yield {"question": question, "answer": str(entry["answer"]), "task": task}
            count, misses = count + 1, 0
        elif (misses := misses + 1) == _MOST_MISSES:
            raise UserError(f"reasoning_gym:{text} has too few different questions for two splits")


def in_split(text: str, split: str) -> bool:
    """Return whether a question belongs to a split, by a hash of its text."""
    return (seed_of(text.encode()) % _HELD_OUT_SHARE > 0) == (split == "train")


def setting(text: str) -> Any:
    """Return a number, truth value or list that a text spells, else the text."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


@functools.lru_cache(64)  # of a batch: each grades several answers
def _entry(task: str) -> tuple[Any, dict[str, Any]]:
    record = json.loads(task)
    data = _data_set(record["name"], json.dumps(record["settings"]), record["seed"])
    return data, data[record["index"]]


@functools.lru_cache(64)
def _data_set(name: str, settings: str, seed: int) -> Any:
    """Return the package's data set of a task; raise UserError as `rows`."""
    if name not in (known := tasks()):
        near = nearest(name, known)
        hint = f"did you mean {near!r}?" if near else "its GALLERY.md lists all of them"
        raise UserError(f"reasoning-gym has no task {name!r}; {hint}")
    data, config = known[name][:2]
    values, fields = json.loads(settings), [field.name for field in dataclasses.fields(config)]
    for key in values:
        if key not in fields:
            raise unknown(f"setting of {name}", key, fields)
    try:
        return data(config(**values, seed=seed))
    except Exception as error:
        raise UserError(f"{name} refuses {settings} ({error!r:.200}); correct them") from error
