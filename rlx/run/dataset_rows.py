"""Read and check the rows that a run trains on, and those held out."""

from collections.abc import Callable

from ml_collections import ConfigDict

from rlx.algorithms.algorithm import Algorithm
from rlx.base import UserError
from rlx.rewards import rewards
from rlx.rollout import arithmetic, data
from rlx.rollout.data import Source
from rlx.rollout.workflows import Overlong
from rlx.run.room_options import check_reward, has_servers, is_online
from rlx.run.tokenizer_files import QUESTION

TRAIN_PROBLEMS = 20_000  # generated training problems of an epoch
# Training data → keys of config.data that name columns of answers.
_ANSWERS = {"demonstrations": ("completion_key",), "pairs": ("chosen_key", "rejected_key")}


def rows(config: ConfigDict, algorithm: Algorithm) -> list[Source]:
    """Return the sources of training rows, then the held-out rows.

    Raises:
      UserError: a row lacks a column or cannot be rewarded; the message names it.
    """
    *train, held_out = _read_rows(config, algorithm)
    if is_online(config):  # one row, for the gate
        train = [Source("applications", [{config.data.question_key: QUESTION}])]
    elif algorithm.data == "rollouts":
        for source in train:
            _check_answers(config, source.rows)
    if has_servers(config):
        _check_answers(config, held_out.rows)
    return [*train, held_out]


def _check_answers(config: ConfigDict, rows: list[dict]) -> None:
    for name in check_reward(config):
        rewards.check_rows(name, rows)


def _read_rows(config: ConfigDict, algorithm: Algorithm) -> list[Source]:
    n, names = config.eval.num_questions, _ANSWERS.get(algorithm.data, ())
    named = [] if is_online(config) else data.named_sources(config.data)
    texts = {config.data[name]: f"data.{name}" for name in names}
    kind = config.data.kind
    if not named and kind in data.GENERATED:
        held_out = data.GENERATED[kind](0, "held_out", n) if n else []
        train = data.GENERATED[kind](config.seed, "train", TRAIN_PROBLEMS)
        return [Source(kind, _solved(each, config, names)) for each in (train, held_out)]

    def load(source: str, rewarded: bool, split: str) -> list[dict]:
        question, graded = config.data.question_key, check_reward(config) if rewarded else ()
        needed = {key for name in graded for key in rewards.columns(name)} - {"answer"}
        answer = rewards.answer_key(graded, config.data.answer_key) if rewarded else ""
        return data.load(source, question, answer, texts=texts, needed=needed, split=split)

    found = [Source(name, load(name, not names, "train"), weight) for name, weight in named]
    own, held_out = config.data.dataset, config.data.eval
    if own and data.takes_split(own):
        held_out = own
    rows = load(held_out, has_servers(config), "test")[:n] if held_out else []
    return [*found, Source(held_out, rows)]


_SOLUTIONS: dict[str, dict[str, Callable[[dict], str]]] = {  # of generated rows
    "arithmetic": {
        "completion_key": lambda row: arithmetic.careful_solution(row["question"]),
        "chosen_key": lambda row: arithmetic.careful_solution(row["question"]),
        "rejected_key": lambda row: arithmetic.wrong_solution(row["question"]),
    },
    "word_problems": {"completion_key": lambda row: row["solution"]},
}


def _solved(rows: list[dict], config: ConfigDict, names: tuple[str, ...]) -> list[dict]:
    """Return generated problems with the answer columns in `names`."""
    solutions = _SOLUTIONS[config.data.kind]
    if not solutions.keys() >= set(names):
        raise UserError(f"data.kind={config.data.kind} has no wrong answers; give pairs in a file")
    return [{**row, **{config.data[name]: solutions[name](row) for name in names}} for row in rows]


def fitting(
    rows: list[dict], name: str, check: Callable[[dict, str], None], overlong: str
) -> list[dict]:
    """Return the rows that pass `check`, which takes a row and its name.

    Args:
      overlong: "error" raises for a row that is too long; "skip" leaves it out.

    Raises:
      UserError: a row does not pass; with "skip", all rows are too long.
    """
    found: list[dict] = []
    for index, row in enumerate(rows):
        try:
            check(row, f"row {index + 1} of {name}")
            found.append(row)
        except Overlong as error:
            if overlong != "skip":
                raise
            if index + 1 == len(rows) and not found:
                raise UserError(f"data.overlong=skip leaves no row of {name}: {error}") from None
    return found
