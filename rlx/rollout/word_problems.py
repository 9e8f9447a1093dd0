"""Make word problems in plain English: seeded stories of one to four steps, with solutions. No I/O.

A story begins with some things that somebody has, things happen to them, and a question ends it:
"Ana has 9 books. Then Ana sells 5 of them. How many books does Ana have now?". Its solution is an
equation for each step: "9 - 5 = 4. The answer is 4." Tens come before ones, as a small model cannot
carry at sight: "43 + 18 = 53 + 8 = 61." From level 3 on there are products, quotients, comparisons
and sums of two people; from level 4 on one number is beside the point: "12 does not matter."

Held-out problems are told in sentences of their own (`PHRASES`), and their numbers, in whatever
order, are those of no problem for training: that is a hash of the numbers alone.
"""

import itertools
import random
import re
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

_FRIENDS = (
    "[How many {things} does {friend} have?|How many {things} belong to {friend}?|"
    "Find the {things} of {friend}.|What does {friend} own?|What amount is that?]"
)
_BOTH = (
    "[How many {things} do {name} and {friend} have together?|What is the sum of both?|"
    "How many do the two of them have in all?|Find out what they own as a pair.]"
)
# Kind → sentences. Of [this|that] one is said: there are more than a model learns by heart.
PHRASES: dict[str, dict[str, tuple[str, ...]]] = {
    "train": {
        "start": (
            "{name} [has|owns|keeps|holds] {n} {things}[| at home| in a box| in a drawer].",
            "[At first|In the morning|On Monday|One day] {name} [has|counts|owns] {n} {things}.",
            "There are {n} {things} [in {name}'s bag|on {name}'s desk|under {name}'s bed].",
            "{name} [starts with|arrives with|was given|brought along] {n} {things}.",
            "{n} {things} [lie on {name}'s desk|are what {name} owns|are in {name}'s pocket].",
            "{name}'s [collection|supply|stock] [consists of|is|holds] {n} {things}.",
            "{n} {things} belong to {name}.", "{name} begins the day with {n} {things}.",
            "{name} has [collected|gathered] {n} {things} so far.",
            "{name} came to school with {n} {things}.",
            "Inside {name}'s suitcase there were {n} {things}.",
            "All that {name} had saved up by Friday was {n} {things}."),
        "packs": (
            "{name} [brings|gets|opens] {n} [bags|jars|tins] of {k} {things} each.",
            "There are {n} [shelves|drawers|tables] in {name}'s [room|house|shop], and each "
            "[shelf|one] [holds|carries] {k} {things}.",
            "{name} owns {n} [jars|chests], every one of them with {k} {things} inside.",
            "On each of {n} [mornings|walks] {name} [collects|finds|puts aside] {k} {things}.",
            "Each [tray|stack|page] [carries|has] {k} {things}, and {name} has {n} [such|of "
            "them].",
            "{name} [arranges|lays out] {n} rows of {k} {things}.",
            "{name} goes out {n} times and [comes back with|finds] {k} {things} each time.",
            "For {n} weeks {name} [saves|makes] {k} {things} a week.",
            "{k} {things} fit into one [basket|crate], and {name} fills {n} [baskets|of those].",
            "For each of the {n} days of a [trip|holiday] {name} packs {k} {things}.",
            "{name} loads {n} wagons, and every wagon takes {k} {things}.",
            "{name} earns {k} {things} per lesson and went to {n} lessons.",
            "In {n} corners of the garden {name} buried {k} {things} apiece."),
        "add": (
            "[|Then |Later |After that ]{name} [gets|buys|wins|makes] {n} [|more |new ]{things}.",
            "[|Then |At noon ]{name} [finds|picks up|earns] {n} [other|further] {things}[| at "
            "school| in the park| on the way home].",
            "[|Then |Soon ]{friend} [gives|sends|brings] {name} {n} {things}[| for a birthday].",
            "{n} [new|more|other] {things} [arrive for {name} in the mail|come in|turn up].",
            "{friend} hands over {n} {things} to {name}.", "Another {n} {things} come on top.",
            "From [a neighbour|a teacher|grandfather] {name} gets {n} {things}[| as a gift].",
            "{name}'s [uncle|mother|teacher] [puts|places] {n} {things} into the bag.",
            "The number of {things} [goes up|rises] by {n}.",
            "As a [present|reward] {name} receives {n} {things} from {friend}.",
            "{name}'s [aunt|sister] adds {n} {things}.",
            "Digging in the sand, {name} uncovers {n} {things}.",
            "{name} wins a bet and is rewarded with {n} {things}.",
            "The shopkeeper lets {name} have {n} {things} for free.",
            "{friend} no longer wants {n} {things}, so {name} keeps those."),
        "take": (
            "[|Then |Later |After that ]{name} [loses|sells|breaks|drops] {n} [of them|{things}].",
            "[|Then |At noon ]{name} [uses up|throws away|returns] {n} [|old |of the ]{things}.",
            "[|Then |Soon ]{name} [gives|lends|sends|sells] {n} {things} to {friend}.",
            "[|Then |Later ]{friend} [takes away|wins|carries off] {n} of [the|{name}'s] "
            "{things}.",
            "{n} of [them|the {things}] [break|get lost|disappear|are stolen|are spoilt].",
            "A [thief|stranger|dog] [steals|carries away] {n} {things}.",
            "{n} {things} fall out of {name}'s bag.",
            "The number of {things} [goes down|falls] by {n}.",
            "{friend} asks for {n} {things} and gets them.",
            "[Rain|Fire|A storm] [ruins|destroys] {n} of {name}'s {things}.",
            "{name} forgets {n} {things} [at school|in a shop|in the garden].",
            "{friend} borrows {n} {things} from {name}.",
            "{name} leaves {n} {things} behind on the [bus|beach].",
            "On the walk home {n} {things} slip through a hole in {name}'s pocket.",
            "{friend} begs for {n} {things}, and {name} cannot say no.",
            "{name} swaps {n} {things} for a kite.", "A magpie flies off with {n} {things}.",
            "{name} sets {n} of the {things} out on the street for whoever wants them."),
        "times": (
            "[A week later|After a while|Next year] {name} has {n} times as many {things}.",
            "Then the number of {things} [becomes|is made] {n} times as large.",
            "[By some trick|In a game] the [amount|number|pile] is multiplied by {n}.",
            "For each of these {name} gets {n} in return, and gives it away.",
            "By and by the pile of {things} is {n} times what it was.",
            "With luck {name} turns this into {n} times the amount.",
            "By spring the collection has grown to {n} times its size.",
            "After a good harvest {name} counts {n} times the old number.",
            "A fairy makes {n} {things} out of every single one.",
            "Within a year {name} manages to have {n} times what there was."),
        "share": (
            "{name} [shares|divides] [all of them|them all] [equally|fairly] among {n} "
            "[friends|cousins]. [How many {things} does each get?|What does each receive?]",
            "{name} [puts|sorts|packs] all the {things} into {n} equal [piles|bags|stacks]. [How "
            "many {things} are in each?|What is in one of them?|Say how many one holds.]",
            "{n} [cousins|neighbours] [divide|share] everything [fairly|equally]. [What does "
            "each of them receive?|How many {things} does one get?]",
            "They are spread over {n} plates with no difference between the plates. [What is the "
            "number on a single plate?|How many lie on one plate?]",
            "If {n} children split what {name} has evenly, what is the number of {things} for "
            "one child?",
            "Now everything goes into {n} bowls with the same number in every bowl. Find the "
            "number of {things} in one bowl.",
            "{name} hands everything out to {n} classmates so that nobody gets more than "
            "another. How many {things} go to each classmate?",
            "A machine fills {n} envelopes with all of these, the same in each. How many "
            "{things} will be found in a single envelope?",
            "{n} grandchildren inherit the {things} in equal parts. How large is one part?"),
        "more": (
            "{friend} [has|holds|counts] {n} more {things} than {name}. " + _FRIENDS,
            "{friend} [owns|has] {n} {things} beyond what {name} has. " + _FRIENDS,
            "{name} has {n} {things} less than {friend}. " + _FRIENDS,
            "To have as many as {friend}, {name} would need {n} [extra|more]. " + _FRIENDS,
            "{friend} is ahead of {name} by {n} {things}. " + _FRIENDS,
            "{friend} beats {name} by {n} {things}. How many {things} has {friend} got?"),
        "fewer": (
            "{friend} has {n} {things} fewer than {name}. " + _FRIENDS,
            "{friend} [has|holds|counts] {n} {things} less. " + _FRIENDS,
            "{name} has {n} {things} more than {friend}. " + _FRIENDS,
            "{friend} would need another {n} to have as many as {name}. " + _FRIENDS,
            "Compared with {name}, {friend} is short of {n} {things}. " + _FRIENDS,
            "{friend} lags {n} {things} behind {name}. How many {things} has {friend} got?"),
        "together": (
            "{friend} [has|owns|holds|counts] {n} {things}[| too| as well]. " + _BOTH,
            "With {friend}'s {n} {things} counted in, [find the total.|how many are there?|what "
            "do they make?]",
            "{n} {things} are in {friend}'s [bag|room|pocket]. " + _BOTH,
            "{friend} [joins in|helps] with {n} {things}. " + _BOTH,
            "{friend} empties a pocket with {n} {things} onto the same heap. How many {things} "
            "are in the heap?",
            "{friend}, a neighbour, owns {n} {things}. How large is the treasure of both?",
            "As partners they count {friend}'s {n} {things} as well. How many are theirs?"),
        "ask": (
            "[How|Now how] many {things} does {name} have[| now| in the end| then]?",
            "How many {things} [are there now|remain|are {name}'s in the end]?",
            "[Find|Give|Report] the [|final |last ]number of {things}.",
            "What is {name}'s number of {things} then?",
            "With how many {things} does {name} end up?", "How many are left for {name}?",
            "How many {things} does {name} own after all this?",
            "What does {name} [count|hold|own] in the end?", "Add up what {name} still has.",
            "[Say|Find|Tell us] how many {things} {name} has [by then|now|at last].",
            "Work out how many {things} are {name}'s.", "Compute how many {things} that makes.",
            "Tell us what is in {name}'s hands at last.",
            "Write down how many {things} there are[| in all| now].",
            "{friend} wants to know how many {things} {name} has. What is the answer?",
            "What is the number of {things} that {name} is left with?",
            "How many {things} can {name} show us now?",
            "Please tell how many {things} {name} goes to bed with.",
            "Calculate the {things} in {name}'s possession.",
            "When all is said and done, how many {things} belong to {name}?"),
        "aside": (
            "{name} is {n} years old.", "{friend}'s [book|diary|atlas] has {n} pages.",
            "[The way to school|A walk to the lake|The film] takes {n} minutes.",
            "{friend} lives in house number {n}.", "[The bus|A hall|The train] has {n} seats.",
            "It is {n} minutes past four.", "{name} [once ran|drives] {n} kilometres.",
            "A cat sleeps for {n} minutes.", "{name}'s [shoes|boots|gloves] are of size {n}.",
            "[A lamp|A coat|The bed] costs {n} euros.", "It has rained for {n} days.",
            "The [church tower|castle] has {n} [steps|windows].", "{n} birds sit on a roof.",
            "{name} opens the newspaper at page {n}.", "The soup cooks for {n} minutes.",
            "Outside it is {n} degrees [warm|cold].", "The family's dog weighs {n} pounds.",
            "{name} wears a shirt with the number {n} on it.",
            "The wind blows at {n} kilometres an hour.", "They meet in room {n}.",
            "{friend}'s telephone is {n} months old.", "{name} lives {n} miles from the sea.",
            "The radio plays a song from {n} years ago.", "A sandwich costs {n} cents.",
            "{name} reads chapter {n} of a novel.", "The ladder has {n} rungs."),
    },
    "held_out": {
        "start": (
            "So far {name} possesses {n} {things}.",
            "Yesterday {name} bought exactly {n} {things}.",
            "{name} looks after a hoard of {n} {things}."),
        "packs": (
            "{name} [has|buys|owns|finds] {n} [boxes|bags|cartons] with {k} {things} in each.",
            "{k} {things} [come in a packet|make a set], and {name} [opens|buys] {n} of these.",
            "Grandma knitted {n} pouches for {name} and slipped {k} {things} into every pouch."),
        "add": (
            "A [parcel|letter] brings {n} additional {things} for {name}.",
            "{friend} makes {name} a present of {n} {things}.",
            "Luckily {n} lost {things} come back to {name}.",
            "{name} fetches {n} spare {things} out of the cellar."),
        "take": (
            "{name} [pays|spends] {n} {things} for [a ticket|a ride|lunch].",
            "[Sadly, |]{n} {things} go missing.", "{name} donates {n} {things} to the museum.",
            "The little brother of {name} hides {n} {things} and nobody sees them again."),
        "times": (
            "{name} [trades|swaps] [them|everything] for {n} times as many[| {things}].",
            "Over the summer [it|the pile|this] [becomes|gets] {n} times [bigger|larger]."),
        "share": (
            "{name} splits the {things} [evenly|equally] between {n} [boxes|tins]. Find how many "
            "[go into one of them|each of them has].",
            "All {things} are dealt out to {n} players, the same to each. [How many does one "
            "player hold?|What does a player get?]"),
        "more": (
            "Compared with {name}, {friend} owns {n} {things} extra. "
            "What is the number of {things} that {friend} owns?",
            "{friend}'s pile is higher than {name}'s, by {n} {things}. How many {things} lie in "
            "{friend}'s pile?"),
        "fewer": (
            "{friend} is behind {name} by {n} {things}. "
            "What is the number of {things} that {friend} owns?",
            "{friend} has to find {n} {things} to catch up with {name}. How many {things} are "
            "{friend}'s?"),
        "together": (
            "{friend} comes with {n} {things}, and they are put in one box. [How many {things} "
            "does the box hold?|What is in the box then?]",
            "Meanwhile {friend} has saved up {n} {things}. If both put their {things} on one "
            "table, [what is the total?|how many are on it?]"),
        "ask": (
            "[So how|How] many {things} is that?", "State the size of the collection.",
            "Count the {things} that {name} can call their own at this point.",
            "How big is {name}'s heap of {things} by bedtime?",
            "{name} writes the number of {things} in a diary. Which number is it?"),
        "aside": (
            "[The street|A bridge] is {n} metres long.", "Line {n} of the tram stops here.",
            "{friend} waits {n} seconds for the lift.",
            "{name} sits in row {n} of the [theatre|cinema].",
            "{friend}'s [grandmother|neighbour] turns {n} today.", "A hen is {n} months old."),
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
        phrase = rng.choice(PHRASES[split][kind])
        chosen = re.sub(r"\[(.*?)\]", lambda choice: rng.choice(choice[1].split("|")), phrase)
        return chosen.format(n=n, k=k, **words)

    packed = steps[0].kind == "packs"
    begin = told("packs", first, steps[0].n) if packed else told("start", first)
    story = [(begin, steps[0].equation if packed else "")]
    story += [(told(step.kind, step.n), step.equation) for step in steps[packed:]]
    if steps[-1].kind not in LAST:
        story.append((told("ask"), ""))
    for n in asides:  # not after the last, which asks
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
