"""Read and check the rows that a run trains on, and those held out."""

from collections.abc import Callable, Mapping
from typing import Any

from ml_collections import ConfigDict

from rlx.algorithms.algorithm import Algorithm
from rlx.base import UserError
from rlx.rewards import rewards
from rlx.rollout import arithmetic, data, shapes
from rlx.rollout.data import Source
from rlx.rollout.images import RowImages
from rlx.rollout.workflows import Overlong
from rlx.run.room_options import RunOptions
from rlx.run.tokenizer_files import QUESTION
from rlx.system.image_store import ImageStore

TRAIN_PROBLEMS = 20_000  # generated training problems of an epoch
# Training data → keys of config.data that name columns of answers.
ANSWERS = {"demonstrations": ("completion_key",), "pairs": ("chosen_key", "rejected_key")}


def rows(
    config: ConfigDict, algorithm: Algorithm, weights: Mapping[str, float], options: RunOptions,
    images: ImageStore,
) -> list[Source]:  # fmt: skip
    """Return the sources of training rows, held-out rows, and `eval.sets`; UserError if unfit."""
    keys, kind, n = config.data, config.data.kind, config.eval.num_questions
    names = ANSWERS.get(algorithm.data, ())
    sources = [] if options.online else data.named_sources(keys)
    texts = {keys[name]: f"data.{name}" for name in names}
    pictures = RowImages(images, keys.image_key, keys.image_hosts)

    def load(source: str, rewarded: bool, split: str, most: int | None = None) -> list[dict]:
        graded = weights if rewarded else ()
        needed = set().union(*map(rewards.columns, graded)) - {"answer"}
        answer = rewards.answer_key(graded, keys.answer_key) if rewarded else ""
        return data.load(
            source, keys.question_key, answer, texts=texts, needed=needed, split=split, most=most,
            images=pictures,
        )  # fmt: skip

    def solved(rows: list[dict]) -> Source:
        right, wrong = _SOLUTIONS[kind]
        solutions = {keys[name]: wrong if name == "rejected_key" else right for name in names}
        return Source(kind, [row | {key: of(row) for key, of in solutions.items()} for row in rows])

    if not sources and kind in data.GENERATED:
        if keys.eval:
            what = f"data.eval={keys.eval} is unused, because data.kind={kind} generates rows"
            raise UserError(f"{what}; set data.kind=jsonl, or eval.sets for further questions")
        train = [solved(data.generated_rows(kind, config.seed, "train", TRAIN_PROBLEMS, pictures))]
        held_out = solved(data.generated_rows(kind, 0, "held_out", n, pictures) if n else [])
    else:
        train = [Source(name, load(name, not names, "train"), weight) for name, weight in sources]
        origin = keys.dataset if keys.dataset and data.takes_split(keys.dataset) else keys.eval
        held_out = Source(origin, load(origin, options.served, "test", n) if origin and n else [])
    sets = [Source(name, load(place, True, "test", n)) for name, place in config.eval.sets if n]
    graded = [held_out, *sets] if options.served else []
    if options.online:  # one row, for the gate
        train = [Source("applications", [{keys.question_key: QUESTION}])]
    elif algorithm.data == "rollouts":
        graded = [*train, *graded]
    for source in graded:
        for name in weights:
            rewards.check_rows(name, source.rows)
    return [*train, held_out, *sets]


_SOLUTIONS: dict[str, tuple[Callable[[Any], str], Callable[[Any], str]]] = {  # right, wrong
    "arithmetic": (lambda row: arithmetic.careful_solution(row["question"]),
                   lambda row: arithmetic.wrong_solution(row["question"])),
    "shapes": (lambda row: row["answer"], shapes.wrong_answer),
}  # fmt: skip


def fitting(
    rows: list[dict], name: str, check: Callable[[dict, str], None], overlong: str
) -> list[dict]:
    """Return the rows that pass `check`, which takes a row and its name; UserError for others."""
    valid: list[dict] = []
    for index, row in enumerate(rows):
        try:
            check(row, f"row {index + 1} of {name}")
            valid.append(row)
        except Overlong as error:
            if overlong != "skip":  # which leaves them out, if any row is left
                raise
            if index + 1 == len(rows) and not valid:
                raise UserError(f"data.overlong=skip leaves no row of {name}: {error}") from None
    return valid
