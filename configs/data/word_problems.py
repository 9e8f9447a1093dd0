"""Make word problems in plain English: seeded stories of one to four steps, with solutions. No I/O.

A story is "Ana has 9 books. Then Ana sells 5 of them. How many books does Ana have now?". Its
solution has an equation per step: "9 - 5 = 4. The answer is 4." Equations treat tens before ones,
because small models cannot carry: "43 + 18 = 53 + 8 = 61." Level 3 adds products, quotients,
comparisons and sums of two people. Level 4 adds an irrelevant number: "12 does not matter."

A hash of each sentence, wording and set of numbers holds some of them out: training problems
share none with held-out ones. The sentences are in `word_problems.txt`.
`rows` is for `data.dataset`.
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
LARGEST_VALUE = 100  # intermediate values lie between 2 and this
NUM_TRAIN, NUM_HELD_OUT = 20_000, 1_000
_HELD_OUT_SHARE = 5  # 1 set of numbers in 5
_WORDS_SHARE = 13  # 1 sentence, and 1 wording, in 13: a fifth of all sentences
_LONGEST_COMMON_WORD = 4  # letters; "has" and "gets" are never held out
_SIGNS = {"packs": "*", "add": "+", "take": "-", "times": "*", "share": "/",
          "more": "+", "fewer": "-", "together": "+"}  # fmt: skip
_QUESTIONS = {"share": "ask_one", "more": "ask_friend", "fewer": "ask_friend",
              "together": "ask_both"}  # fmt: skip
LAST = tuple(_QUESTIONS)  # steps that end a story


class Level(NamedTuple):
    """A difficulty: the numbers of equations and irrelevant sentences, and the kinds of steps."""

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


def rows(split: str) -> Iterator[dict[str, Any]]:
    """Yield the problems of `train` or of `test`; the same each time."""
    wanted, count = {"train": ("train", NUM_TRAIN), "test": ("held_out", NUM_HELD_OUT)}[split]
    yield from itertools.islice(stream(0, wanted), count)


def problems(seed: int, split: str, n: int) -> list[dict[str, Any]]:
    """Return the first `n` rows of `stream`: question, answer, solution and level (1 to 5)."""
    return list(itertools.islice(stream(seed, split), n))


def stream(seed: int, split: str) -> Iterator[dict[str, Any]]:
    """Yield distinct problems of all levels in turn; UserError if there is no such split."""
    levels = list(LEVELS)
    return arithmetic.distinct(
        "word problems", seed, split,
        lambda rng, before: _draw(rng, split, levels[before % len(levels)]),
    )  # fmt: skip


def split_of(numbers: list[int]) -> str:
    """Return the split of a story's numbers, in any order."""
    return arithmetic.split_of(repr(sorted(numbers)), _HELD_OUT_SHARE)


@functools.cache
def phrases(split: str) -> dict[str, tuple[str, ...]]:
    """Return the sentences of a split by kind, one for each wording in `<…|…>`."""
    text = Path(__file__).with_suffix(".txt").read_text()
    lines = [line for line in text.splitlines() if line and line[0] != "#"]
    drawn = [w for line in lines for part in re.findall("<(.*?)>", line) for w in part.split("|")]
    foreign = sorted(w for w in drawn if len(w) > _LONGEST_COMMON_WORD and _held_out(w))
    held_out = re.compile(rf"\b({'|'.join(map(re.escape, foreign))})(?!\w)")
    found: dict[str, list[str]] = {}
    for line in lines:
        if line[0] != " ":
            kind = line
        else:
            for sentence in alternatives(line.strip(), "<>"):
                left_out = _held_out(line.strip()) or held_out.search(sentence)
                if bool(left_out) == (split != "train"):
                    found.setdefault(kind, []).append(sentence)
    return {kind: tuple(sentences) for kind, sentences in found.items()}


def alternatives(sentence: str, brackets: str) -> Iterator[str]:
    """Yield a sentence with each combination of its alternatives in brackets, as `<this|that>`."""
    parts = re.split(rf"\{brackets[0]}(.*?)\{brackets[1]}", sentence)
    return map("".join, itertools.product(*(
        part.split("|") if index % 2 else [part] for index, part in enumerate(parts)
    )))  # fmt: skip


def _held_out(words: str) -> bool:
    """Return whether the hash of a sentence or wording holds it out; names do not matter."""
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
    """Return one row; None if its numbers belong to the other split or do not work out."""
    first, steps = _plot(rng, LEVELS[level])
    asides = [rng.randint(3, 60) for _ in range(LEVELS[level].asides)]
    numbers = [first, *(step.n for step in steps), *asides]
    whole = all(step.kind != "share" or step.value == step.result * step.n for step in steps)
    bounded = all(2 <= step.result <= LARGEST_VALUE for step in steps)
    if not whole or not bounded or split_of(numbers) != split:
        return None
    name, friend = rng.sample(NAMES, 2)
    words = {"name": name, "friend": friend, "things": rng.choice(THINGS)}

    def sentence_of(kind: str, n: int = 0, k: int = 0) -> str:
        phrase = rng.choice(phrases(split)[kind])
        chosen = re.sub(r"\[(.*?)\]", lambda choice: rng.choice(choice[1].split("|")), phrase)
        return chosen.format(n=n, k=k, **words)

    packed = steps[0].kind == "packs"
    begin = sentence_of("packs", first, steps[0].n) if packed else sentence_of("start", first)
    story = [(begin, steps[0].equation if packed else "")]
    story += [(sentence_of(step.kind, step.n), step.equation) for step in steps[packed:]]
    story.append((sentence_of(_QUESTIONS.get(steps[-1].kind, "ask")), ""))
    for n in asides:  # not after the question
        story.insert(
            rng.randint(1, len(story) - 1), (sentence_of("aside", n), f"{n} does not matter.")
        )
    answer = str(steps[-1].result)
    question = " ".join(sentence for sentence, _ in story)
    equations = filter(None, (equation for _, equation in story))
    solution = " ".join([*equations, f"The answer is {answer}."])
    return {"question": question, "answer": answer, "solution": solution, "level": level}


def _plot(rng: random.Random, level: Level) -> tuple[int, list[Change]]:
    """Return the first number and the steps; packs may only come first, and LAST kinds last."""
    middle = [kind for kind in level.kinds if kind not in LAST and kind != "packs"]
    kinds = [rng.choice(middle) for _ in range(level.steps)]
    if "share" in level.kinds:
        kinds[-1] = rng.choice(level.kinds[1:])
        kinds[0] = "packs" if rng.random() < 0.4 else kinds[0]
    first = value = rng.randint(2, 9) if kinds[0] == "packs" else rng.randint(4, 60)
    steps = []
    for kind in kinds:
        n = rng.randint(2, 9 if kind == "packs" else 4 if kind == "times" else 30)
        if kind == "share":  # a divisor, since most numbers leave a remainder
            n = rng.choice([k for k in range(2, 10) if value % k == 0] or [2])
        result = {"+": value + n, "-": value - n, "*": value * n, "/": value // n}[_SIGNS[kind]]
        steps.append(Change(kind, value, n, result))
        value = result
    return first, steps
