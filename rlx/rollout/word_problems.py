"""Make word problems in plain English: seeded stories of one to four steps, with solutions. No I/O.

A story begins with some things that somebody has, things happen to them, and a question ends it:
"Ana has 9 books. Then Ana sells 5 of them. How many books does Ana have now?". Its solution is an
equation for each step: "9 - 5 = 4. The answer is 4." Tens come before ones, as a small model cannot
carry at sight: "43 + 18 = 53 + 8 = 61." From level 3 on there are products, quotients, comparisons
and sums of two people; from level 4 on one number is beside the point: "12 does not matter."

Held-out problems are told in sentences of their own, with verbs and words that no problem for
training has, and their numbers, in whatever order, are those of none: a hash decides about each
sentence, wording and set of numbers. The sentences are in `word_problems.txt`.
"""

import functools
import itertools
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rlx.rollout import arithmetic

NAMES = ("Ana", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Henry", "Iris", "Jack")
THINGS = (
    "apples", "books", "marbles", "stickers", "coins", "pencils", "cards", "shells", "stamps",
    "cookies",
)  # fmt: skip
LARGEST_VALUE = 100  # of every intermediate value; the smallest is 2
_HELD_OUT_SHARE = 5  # one set of numbers in this many
_WORDS_SHARE = 13  # one sentence, and one wording, in this many: a fifth of what can be said
_LONGEST_COMMON_WORD = 4  # "has", "gets": in training always, as nobody speaks without them
_SIGNS = {"packs": "*", "add": "+", "take": "-", "times": "*", "share": "/",
          "more": "+", "fewer": "-", "together": "+"}  # fmt: skip
_QUESTIONS = {"share": "ask_one", "more": "ask_friend", "fewer": "ask_friend",
              "together": "ask_both"}  # fmt: skip
LAST = tuple(_QUESTIONS)  # nothing happens after them


class Level(NamedTuple):
    """How hard stories are: equations, what may happen, and sentences that do not matter."""

    steps: int
    kinds: tuple[str, ...]
    asides: int


_ALL = ("add", "take", "times", *LAST)
LEVELS = {
    1: Level(1, ("add", "take"), 0),
    2: Level(2, ("add", "take"), 0),
    3: Level(2, ("packs", *_ALL), 0),
    4: Level(3, ("packs", *_ALL), 1),
    5: Level(4, ("packs", *_ALL), 1),
}


def problems(seed: int, split: str, n: int) -> list[dict[str, Any]]:
    """Return the first `n` distinct problems of a seed's stream, as dataset rows.

    Args:
      seed: any integer; a longer list of the same seed starts with the shorter one.
      split: `train` or `held_out`; they share no set of numbers and no sentence.
      n: ≥ 0; levels 1 to 5 come in turns.

    Returns:
      Rows `{"question", "answer", "solution", "level"}`, all but the last of text.

    Raises:
      UserError: `split` is neither.
    """
    return list(itertools.islice(stream(seed, split), n))


def stream(seed: int, split: str) -> Iterator[dict[str, Any]]:
    """Yield distinct problems of a seed and split without end, as `problems` lists them."""
    levels = list(LEVELS)

    def draw(rng: random.Random, before: int) -> dict[str, Any] | None:
        return _draw(rng, split, levels[before % len(levels)])

    return arithmetic.distinct("word problems", seed, split, draw)


def split_of(numbers: list[int]) -> str:
    """Return the split that a story's numbers belong to, whatever their order."""
    return arithmetic.split_of(repr(sorted(numbers)), _HELD_OUT_SHARE)


@functools.cache
def phrases(split: str) -> dict[str, tuple[str, ...]]:
    """Return the sentences of a split, by kind, with one wording of each `<…>` and `[…|…]` left.

    A sentence is held out where the lot falls on it or on a wording that it holds, wherever that
    stands: a held-out wording is in no sentence for training.
    """
    text = Path(__file__).with_suffix(".txt").read_text()
    lines = [line for line in text.splitlines() if line and line[0] != "#"]
    drawn = [w for line in lines for part in re.findall("<(.*?)>", line) for w in part.split("|")]
    foreign = sorted(w for w in drawn if len(w) > _LONGEST_COMMON_WORD and _by_lot(w))
    held_out = re.compile(rf"\b({'|'.join(map(re.escape, foreign))})(?!\w)")
    found: dict[str, list[str]] = {}
    for line in lines:
        if line[0] != " ":
            kind = line
        else:
            for sentence in alternatives(line.strip(), "<>"):
                left = _by_lot(line.strip()) or held_out.search(sentence)
                if bool(left) == (split != "train"):
                    found.setdefault(kind, []).append(sentence)
    return {kind: tuple(sentences) for kind, sentences in found.items()}


def alternatives(sentence: str, brackets: str) -> Iterator[str]:
    """Yield a sentence with each choice of what stands between brackets: `<this|that>`."""
    parts = re.split(rf"\{brackets[0]}(.*?)\{brackets[1]}", sentence)
    return map("".join, itertools.product(*(
        part.split("|") if index % 2 else [part] for index, part in enumerate(parts)
    )))  # fmt: skip


def _by_lot(words: str) -> bool:
    """Return whether the lot holds a sentence or a wording out.

    It does not look at names and choices: who gives and who gets is told in the same words.
    """
    bare = re.sub(r"\[.*?\]|<.*?>", "", words).replace("{friend}", "{name}")
    return arithmetic.split_of(bare, _WORDS_SHARE) != "train"


class Change(NamedTuple):
    """One step of a story: `value` becomes `result` by `n`; all are whole."""

    kind: str
    value: int
    n: int
    result: int

    @property
    def equation(self) -> str:
        """Return the step as a solution writes it: `9 + 18 = 19 + 8 = 27.`."""
        sign, value, n = _SIGNS[self.kind], self.value, self.n
        between = ""
        if sign in "+-" and n > 10 and n % 10:
            tens = n - n % 10
            between = f"{value + tens if sign == '+' else value - tens} {sign} {n % 10} = "
        elif sign == "*" and value > 10 and value % 10:
            between = f"{(value - value % 10) * n} + {value % 10 * n} = "
        return f"{value} {sign} {n} = {between}{self.result}."


def _draw(rng: random.Random, split: str, level: int) -> dict[str, Any] | None:
    """Return one row; None where the numbers drawn are the other split's or do not work out."""
    first, steps = _plot(rng, LEVELS[level])
    asides = [rng.randint(3, 60) for _ in range(LEVELS[level].asides)]
    numbers = [first, *(step.n for step in steps), *asides]
    if not all(_works(step) for step in steps) or split_of(numbers) != split:
        return None
    name, friend = rng.sample(NAMES, 2)
    words = {"name": name, "friend": friend, "things": rng.choice(THINGS)}

    def told(kind: str, n: int = 0, k: int = 0) -> str:
        phrase = rng.choice(phrases(split)[kind])
        chosen = re.sub(r"\[(.*?)\]", lambda choice: rng.choice(choice[1].split("|")), phrase)
        return chosen.format(n=n, k=k, **words)

    packed = steps[0].kind == "packs"
    begin = told("packs", first, steps[0].n) if packed else told("start", first)
    story = [(begin, steps[0].equation if packed else "")]
    story += [(told(step.kind, step.n), step.equation) for step in steps[packed:]]
    story.append((told(_QUESTIONS.get(steps[-1].kind, "ask")), ""))
    for n in asides:  # not after the question
        story.insert(rng.randint(1, len(story) - 1), (told("aside", n), f"{n} does not matter."))
    answer = str(steps[-1].result)
    question = " ".join(sentence for sentence, _ in story)
    solution = " ".join([*filter(None, (said for _, said in story)), f"The answer is {answer}."])
    return {"question": question, "answer": answer, "solution": solution, "level": level}


def _plot(rng: random.Random, level: Level) -> tuple[int, list[Change]]:
    """Return the first number and the steps; the last kinds come last, packs first alone."""
    middle = [kind for kind in level.kinds if kind not in LAST and kind != "packs"]
    kinds = [rng.choice(middle) for _ in range(level.steps)]
    if "share" in level.kinds:
        kinds[-1] = rng.choice(level.kinds[1:])
        kinds[0] = "packs" if rng.random() < 0.4 else kinds[0]
    first = value = rng.randint(2, 9) if kinds[0] == "packs" else rng.randint(4, 60)
    steps = []
    for kind in kinds:
        n = rng.randint(2, 9 if kind == "packs" else 4 if kind == "times" else 30)
        if kind == "share":  # else a share would be rare, as most numbers leave something over
            n = rng.choice([k for k in range(2, 10) if value % k == 0] or [2])
        result = {"+": value + n, "-": value - n, "*": value * n, "/": value // n}[_SIGNS[kind]]
        steps.append(Change(kind, value, n, result))
        value = result
    return first, steps


def _works(step: Change) -> bool:
    """Return whether the result is within bounds, and a share leaves nothing over."""
    whole = step.kind != "share" or step.value == step.result * step.n
    return whole and 2 <= step.result <= LARGEST_VALUE
