"""Find question sets by name: their place on the hub, and how their answers are graded."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlx.base import UserError, unknown
from rlx.rewards import rewards
from rlx.rollout import data
from rlx.rollout.images import RowImages

_TASKS = "reasoning_gym:"


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A question set, and the keys of its rows."""

    name: str  # in the table
    source: str  # for `data.load`; empty for generated problems
    reward: str  # for `rewards.resolve`
    question_key: str = "question"
    answer_key: str = "answer"
    workflow: str = ""  # the only one that grades it; "": any


_TABLE = (
    Benchmark("arithmetic", "", "arithmetic"),
    Benchmark("shapes", "", "exact"),
    Benchmark("gsm8k", "openai/gsm8k:main:test", "gsm8k"),
    Benchmark("math_500", "HuggingFaceH4/MATH-500:test", "math", "problem"),
    Benchmark("math", "DigitalLearningGmbH/MATH-lighteval:test", "math", "problem", "solution"),
    Benchmark("train_amc_aime", "AI-MO/aimo-validation-amc:train", "math", "problem"),
    Benchmark("aime24", "HuggingFaceH4/aime_2024:train", "math", "problem"),
    Benchmark("amc23", "math-ai/amc23:test", "math"),
)
BENCHMARKS = {each.name: each for each in _TABLE}


def find(
    text: str, reward: str, question_key: str = "question", answer_key: str = "answer"
) -> Benchmark:
    """Return the set that an entry of --datasets names, a path or NAME=PATH too; else UserError."""
    if text in BENCHMARKS:
        return BENCHMARKS[text]
    if text.startswith(_TASKS):
        return Benchmark(text, text, "reasoning_gym")
    for player in data.PLAYERS:
        if text.startswith(player.SCHEME):
            return Benchmark(text, text, reward, workflow=player.AGENT)
    name, _, path = text.rpartition("=")
    if name and "/" not in name:  # a/b=c.jsonl is a path
        reward = BENCHMARKS[name].reward if name in BENCHMARKS else reward
    elif text.endswith(data.FORMATS) or data.is_code(text):
        name, path = Path(text).stem, text
    else:
        raise unknown("dataset", text, BENCHMARKS)
    return Benchmark(name, path, reward, question_key, answer_key)


def rows(
    benchmark: Benchmark, limit: int = 0, images: RowImages | None = None
) -> list[dict[str, Any]]:
    """Return the set's first `limit` rows, 0: all, with `question` and `answer`; or UserError."""
    if not 0 <= limit <= data.MOST_ROWS:
        most_rows = f"{data.MOST_ROWS:,}, or 0 for all questions"
        raise UserError(f"--limit={limit} is out of range; give a number up to {most_rows}")
    if not benchmark.source:
        return data.generated_rows(benchmark.name, 0, "held_out", limit or 200, images)
    if benchmark.reward == rewards.MODEL:
        what = "reward.name=model: an evaluation has no reward model"
        raise UserError(f"{what}; set reward.name to a function that grades answers, or to judge")
    graders = [] if benchmark.reward == rewards.JUDGE else [benchmark.reward]
    keys = benchmark.question_key, rewards.answer_key(graders, benchmark.answer_key)
    loaded = data.load(benchmark.source, *keys, split="test", most=limit or None, images=images)
    return [{**row, "question": row[benchmark.question_key]} for row in loaded]


def load_sets(
    text: str, reward: str, limit: int, question_key: str = "question", answer_key: str = "answer",
    images: RowImages | None = None,
) -> list[tuple[Benchmark, list[dict[str, Any]]]]:  # fmt: skip
    """Return the sets of `--datasets` with their rows; UserError for none, or a name twice."""
    parts = list[str]()
    for part in map(str.strip, text.split(",")):
        task = part.partition("?")[0]
        last = parts[-1] if parts and task.isidentifier() and task not in BENCHMARKS else ""
        if last.startswith(_TASKS):
            parts[-1] += f",{part}"  # `reasoning_gym:a,b` is one set of two tasks
        else:
            parts.append(part)
    sets = [find(part, reward, question_key, answer_key) for part in parts if part]
    if not sets:
        raise UserError(f"--datasets={text!r} names none; give gsm8k,math_500 or a .jsonl path")
    if twice := [name for name, n in Counter(one.name for one in sets).items() if n > 1]:
        raise UserError(f"--datasets names {twice[0]} twice; rename one of the files")
    return [(benchmark, rows(benchmark, limit, images)) for benchmark in sets]
