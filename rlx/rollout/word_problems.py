"""Make word problems in plain English: seeded stories of one to four steps, with solutions. No I/O.

A story begins with some things that somebody has, things happen to them, and a question ends it:
"Ana has 9 books. Then Ana sells 5 of them. How many books does Ana have now?". Its solution is an
equation for each step: "9 - 5 = 4. The answer is 4." Tens come before ones, as a small model cannot
carry at sight: "43 + 18 = 53 + 8 = 61." From level 3 on there are products, quotients, comparisons
and sums of two people; from level 4 on one number does not matter.

Held-out problems are told in sentences of their own (`PHRASES`), and their numbers, in whatever
order, are those of no problem for training: that is a hash of the numbers alone.
"""

import itertools
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

from rlx.rollout import arithmetic

NAMES = ("Ana", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Henry", "Iris", "Jack")
THINGS = (
    "apples", "books", "marbles", "stickers", "coins", "pencils", "cards", "shells", "stamps",
    "cookies",
)  # fmt: skip
LARGEST_VALUE = 100  # of every intermediate value; the smallest is 2
_HELD_OUT_SHARE = 5  # one set of numbers in this many
_SIGNS = {"packs": "*", "add": "+", "take": "-", "times": "*", "share": "/",
          "more": "+", "fewer": "-", "together": "+"}  # fmt: skip
LAST = ("share", "more", "fewer", "together")  # they ask a question of their own

PHRASES: dict[str, dict[str, tuple[str, ...]]] = {
    "train": {
        "start": ("{name} has {n} {things}.", "At first {name} has {n} {things}.",
                  "There are {n} {things} in {name}'s bag.", "{name} owns {n} {things}.",
                  "{name} starts with {n} {things}.", "{n} {things} lie on {name}'s desk.",
                  "In the morning {name} counts {n} {things}.",
                  "{name}'s collection consists of {n} {things}.",
                  "{n} {things} are what {name} owns.", "{name} brought along {n} {things}.",
                  "So far {name} possesses {n} {things}."),
        "packs": ("{name} has {n} boxes with {k} {things} in each box.",
                  "{name} buys {n} bags of {k} {things} each.",
                  "There are {n} shelves in {name}'s room, and each shelf holds {k} {things}.",
                  "{name} owns {n} jars, every one of them with {k} {things} inside.",
                  "{k} {things} come in a packet, and {name} opens {n} packets.",
                  "On each of {n} mornings {name} collects {k} {things}.",
                  "Each tray carries {k} {things}, and {name} has {n} trays.",
                  "{name} arranges {n} rows of {k} {things}.",
                  "For {n} weeks {name} saves {k} {things} a week."),
        "add": ("{name} gets {n} more {things}.", "Then {name} buys {n} {things}.",
                "{friend} gives {name} {n} {things}.", "Later {name} finds {n} other {things}.",
                "{n} new {things} arrive for {name} in the mail.",
                "{name} wins {n} {things} in a game.",
                "{friend} hands over {n} {things} to {name}.",
                "Another {n} {things} come on top.", "{name} picks up {n} further {things}.",
                "From a neighbour {name} gets {n} {things} as a gift.",
                "{name}'s uncle puts {n} {things} into the bag.",
                "The number of {things} goes up by {n}."),
        "take": ("{name} loses {n} {things}.", "{name} gives {n} {things} to {friend}.",
                 "Then {name} sells {n} of them.", "After that {n} of the {things} break.",
                 "{name} uses up {n} {things}.", "A thief steals {n} {things}.",
                 "{n} {things} fall out of {name}'s bag.",
                 "{friend} takes away {n} of the {things}.",
                 "{n} of them get lost.", "{name} throws away {n} old {things}.",
                 "{friend} asks for {n} {things} and gets them.", "{name} returns {n} of them.",
                 "Rain ruins {n} of {name}'s {things}.", "{name} pays {n} {things} for a ticket.",
                 "{name} lends {n} {things} to {friend}.", "{name} forgets {n} {things} at school.",
                 "The number of {things} goes down by {n}."),
        "times": ("A week later {name} has {n} times as many {things}.",
                  "Then the number of {things} becomes {n} times as large.",
                  "{name} trades them for {n} times as many {things}.",
                  "By some luck the amount is multiplied by {n}.",
                  "Over the summer it grows {n} times bigger.",
                  "For each of these {name} gets {n} in return, and gives it away.",
                  "By and by the pile of {things} is {n} times what it was."),
        "share": ("{name} shares all of them equally among {n} friends. "
                  "How many {things} does each friend get?",
                  "{name} puts all the {things} into {n} equal piles. "
                  "How many {things} are in each pile?",
                  "{n} cousins divide everything fairly. What does each of them receive?",
                  "{name} splits the {things} evenly between {n} boxes. "
                  "Find how many go into one box.",
                  "All {things} are dealt out to {n} players, the same to each. "
                  "How many does one player hold?",
                  "They are spread over {n} plates with no difference between the plates. "
                  "What is the number on a single plate?"),
        "more": ("{friend} has {n} more {things} than {name}. "
                 "How many {things} does {friend} have?",
                 "{friend} owns {n} {things} beyond what {name} has. "
                 "What number of {things} is that?",
                 "{name} has {n} {things} less than {friend}. "
                 "How many {things} belong to {friend}?",
                 "To have as many as {friend}, {name} would need {n} extra. "
                 "Find the {things} of {friend}."),
        "fewer": ("{friend} has {n} {things} fewer than {name}. "
                  "How many {things} does {friend} have?",
                  "{friend} owns {n} {things} less. What does {friend} own?",
                  "{name} has {n} {things} more than {friend}. "
                  "How many {things} belong to {friend}?",
                  "{friend} would need another {n} to have as many as {name}. "
                  "Find the {things} of {friend}."),
        "together": ("{friend} has {n} {things}. "
                     "How many {things} do {name} and {friend} have together?",
                     "{friend} owns {n} {things} too. What is the sum of both?",
                     "{friend} comes with {n} {things}, and they are put in one box. "
                     "How many {things} does the box hold?",
                     "With {friend}'s {n} {things} counted in, find the total.",
                     "{n} {things} are in {friend}'s bag. "
                     "How many do the two of them have in all?"),
        "ask": ("How many {things} does {name} have now?",
                "How many {things} does {name} have in the end?",
                "How many {things} are there now?", "How many {things} remain?",
                "Find the number of {things}.", "What is {name}'s number of {things} then?",
                "With how many {things} does {name} end up?", "How many are left for {name}?",
                "How many {things} does {name} own after all this?",
                "What does {name} count in the end?", "Say how many {things} {name} has by then.",
                "Work out how many {things} are {name}'s.", "Give the final number of {things}.",
                "Tell us what is in {name}'s hands at last.", "State the size of the collection.",
                "Compute how many {things} that makes.", "Add up what {name} still has.",
                "Write down how many {things} there are in all.", "So how many {things} is that?",
                "{friend} wants to know how many {things} {name} has. What is the answer?"),
        "aside": ("{name} is {n} years old.", "The way to school takes {n} minutes.",
                  "{friend} lives in house number {n}.", "The bus has {n} seats.",
                  "It is {n} minutes past four.", "{friend}'s book has {n} pages.",
                  "The street is {n} metres long.", "{name} once ran {n} kilometres.",
                  "A cat sleeps for {n} minutes.", "{name}'s shoes are of size {n}.",
                  "{friend} waits {n} seconds for the lift.", "A lamp costs {n} euros.",
                  "Line {n} of the tram stops here.", "{name} sits in row {n} of the theatre.",
                  "It has rained for {n} days.", "The church tower has {n} steps.",
                  "{name} opens the newspaper at page {n}.", "{n} birds sit on a roof.",
                  "{friend}'s grandmother turns {n} today.", "The soup cooks for {n} minutes."),
    },
    "held_out": {
        "start": ("{n} {things} belong to {name}.", "{name} begins the day with {n} {things}.",
                  "{name} has collected {n} {things} so far."),
        "packs": ("{k} {things} fit into one basket, and {name} fills {n} baskets.",
                  "For each of the {n} days of a trip {name} packs {k} {things}."),
        "add": ("A parcel brings {n} additional {things} for {name}.",
                "As a present {name} receives {n} {things} from {friend}.",
                "{name}'s aunt adds {n} {things}."),
        "take": ("Sadly, {n} {things} go missing.", "{friend} borrows {n} {things} from {name}.",
                 "{name} leaves {n} {things} behind on the bus."),
        "times": ("With luck {name} turns this into {n} times the amount.",
                  "By spring the collection has grown to {n} times its size."),
        "share": ("If {n} children split what {name} has evenly, "
                  "what is the number of {things} for one child?",
                  "Now everything goes into {n} bowls with the same number in every bowl. "
                  "Find the number of {things} in one bowl."),
        "more": ("Compared with {name}, {friend} owns {n} {things} extra. "
                 "What is the number of {things} that {friend} owns?",),
        "fewer": ("Compared with {name}, {friend} is short of {n} {things}. "
                  "What is the number of {things} that {friend} owns?",),
        "together": ("Meanwhile {friend} has saved up {n} {things}. "
                     "If both put their {things} on one table, what is the total?",),
        "ask": ("What is the number of {things} that {name} is left with?",
                "Count the {things} that {name} can call their own at this point."),
        "aside": ("Outside it is {n} degrees warm.", "The family's dog weighs {n} pounds.",
                  "{name} wears a shirt with the number {n} on it."),
    },
}  # fmt: skip


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
        return rng.choice(PHRASES[split][kind]).format(n=n, k=k, **words)

    begins_packed = steps[0].kind == "packs"
    begin = told("packs", first, steps[0].n) if begins_packed else told("start", first)
    sentences = [begin, *(told(step.kind, step.n) for step in steps[begins_packed:])]
    if steps[-1].kind not in LAST:
        sentences.append(told("ask"))
    for n in asides:  # not after the last, which asks
        sentences.insert(rng.randint(1, len(sentences) - 1), told("aside", n))
    answer = str(steps[-1].result)
    solution = " ".join([*(step.equation for step in steps), f"The answer is {answer}."])
    question = " ".join(sentences)
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
        n = rng.randint(2, 9 if kind in ("packs", "share") else 4 if kind == "times" else 30)
        result = {"+": value + n, "-": value - n, "*": value * n, "/": value // n}[_SIGNS[kind]]
        steps.append(Change(kind, value, n, result))
        value = result
    return first, steps


def _works(step: Change) -> bool:
    """Return whether the result is within bounds, and a share leaves nothing over."""
    whole = step.kind != "share" or step.value == step.result * step.n
    return whole and 2 <= step.result <= LARGEST_VALUE
