"""The word problems: read again as English, and held-out ones foreign in numbers and sentences."""

import functools
import itertools
import re
from collections import Counter
from pathlib import Path

import pytest

from configs.data import word_problems
from configs.data.word_problems import LARGEST_VALUE, LEVELS
from rlx.base import UserError
from rlx.rewards import rewards
from rlx.rollout.arithmetic import SPLITS

N = 600

ASKS = ("ask", "ask_friend", "ask_both", "ask_one")

# What a sentence does to the number so far, from its kind alone.
DOES = {
    "start": lambda value, n, k: n,
    "packs": lambda value, n, k: n * k,
    "add": lambda value, n, k: value + n,
    "take": lambda value, n, k: value - n,
    "times": lambda value, n, k: value * n,
    "share": lambda value, n, k: value / n,
    "more": lambda value, n, k: value + n,
    "fewer": lambda value, n, k: value - n,
    "together": lambda value, n, k: value + n,
    **dict.fromkeys(("aside", *ASKS), lambda value, n, k: value),
}


@pytest.fixture(scope="module", params=SPLITS)
def split(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def rows(split) -> list[dict]:
    return word_problems.problems(0, split, N)


@functools.cache
def patterns(split: str, name: str) -> dict[str, re.Pattern]:
    """Each kind's sentences of a story about `name` as one expression of words and numbers."""
    known = {"name": name, "things": "[a-z]+", "friend": f"(?!{name})[A-Z]\\w+"}
    found = {}
    for kind, phrases in word_problems.phrases(split).items():
        groups = []
        for index, phrase in enumerate(phrases):
            text = re.sub(r"[.?]", r"\\\g<0>", phrase).replace("[", "(?:").replace("]", ")")
            for word, group in known.items():
                text = text.replace("{" + word + "}", group)
            text = text.replace("{n}", rf"(?P<n{index}>\d+)")
            groups.append(text.replace("{k}", rf"(?P<k{index}>\d+)"))
        found[kind] = re.compile("|".join(groups))
    return found


def read(question: str, split: str) -> tuple[float, list[int], list[str]]:
    """The answer, the numbers and the kinds of a story, sentence for sentence."""
    (name,) = re.findall("|".join(word_problems.NAMES), question)[:1]  # whose things they are
    known, value, kinds, rest = patterns(split, name), 0.0, [], question
    while rest:
        found = {kind: m for kind, pattern in known.items() if (m := pattern.match(rest))}
        longest = max(m.end() for m in found.values())
        (kind,) = [kind for kind, m in found.items() if m.end() == longest]
        named = {key[0]: int(x) for key, x in found[kind].groupdict().items() if x}
        value = DOES[kind](value, named.get("n", 0), named.get("k", 0))
        kinds.append(kind)
        rest = rest[longest:].lstrip()
    return value, [int(x) for x in re.findall(r"\d+", question)], kinds


def test_the_answer_is_what_the_story_says(rows, split):
    for row in rows:
        value, numbers, kinds = read(row["question"], split)
        assert row["answer"] == str(int(value))
        assert value == int(value)
        assert word_problems.split_of(numbers) == split
        level = LEVELS[row["level"]]
        steps = [k for k in kinds if k not in ("start", "aside", *ASKS)]
        assert len(steps) == level.steps
        assert set(steps) <= set(level.kinds)
        assert kinds.count("aside") == level.asides
        assert kinds[-1] in ASKS
        assert (kinds[-1] == "ask") == (steps[-1] not in word_problems.LAST)
        assert kinds[0] in ("start", "packs")


def test_solutions_hold_step_by_step_and_are_rewarded(rows):
    for row in rows:
        *said, last = re.split(r"(?<=\.) ", row["solution"])
        equations = [sentence for sentence in said if " = " in sentence]
        assert len(said) - len(equations) == LEVELS[row["level"]].asides
        assert len(equations) == LEVELS[row["level"]].steps
        value = None
        for equation in equations:
            *terms, result = equation.removesuffix(".").split(" = ")
            assert len(terms) in (1, 2), "at once, or by tens and ones"
            assert all(re.fullmatch(r"\d+ [-+*/] \d+", term) for term in terms)
            assert {eval(term) for term in terms} == {int(result)}
            if "*" not in terms[0]:
                assert not re.search(r"\d[1-9]$", terms[-1]), "one digit at last, or no ones"
            assert value in (None, terms[0].split()[0]), "goes on with the result before"
            assert 2 <= int(result) <= LARGEST_VALUE
            value = result
        named = [int(words.split()[0]) for words in said if words.endswith(" does not matter.")]
        assert not Counter(named) - Counter(map(int, re.findall(r"\d+", row["question"])))
        assert last == f"The answer is {row['answer']}."
        assert value == row["answer"]
        assert rewards.gsm8k("", row["solution"], [], [], answer=row["answer"]) == 1.0


def test_held_out_numbers_are_in_no_problem_for_training():
    def numbers(seeds, split):
        rows = [r for seed in seeds for r in word_problems.problems(seed, split, N)]
        return {tuple(sorted(re.findall(r"\d+", r["question"]))) for r in rows}

    assert not numbers(range(3), "train") & numbers((0, 7), "held_out")


def test_no_held_out_sentence_is_in_a_problem_for_training():
    """Not even where another kind says it of another person."""

    def said(split):
        for sentence in itertools.chain(*word_problems.phrases(split).values()):
            text = re.sub(r"\{(name|friend|things)\}", "_", sentence)
            for whole in word_problems.alternatives(text, "[]"):
                yield from re.split(r"(?<=[.?]) ", whole)

    train, held_out = map(set, map(said, SPLITS))
    assert not train & held_out
    assert 0.1 < len(held_out) / len(train | held_out) < 0.3


def test_a_held_out_sentence_is_of_a_held_out_frame_or_has_a_word_that_training_has_not():
    ours, theirs = map(word_problems.phrases, SPLITS)
    train = " | ".join(itertools.chain(*ours.values()))
    text = Path(word_problems.__file__).with_suffix(".txt").read_text()
    lines = [line for line in text.splitlines() if line.startswith(" ")]
    wordings = {w for x in lines for part in re.findall("<(.*?)>", x) for w in part.split("|")}
    foreign = {w for w in wordings if not re.search(rf"\b{re.escape(w)}(?!\w)", train)}
    assert 0.1 < len(foreign) / len(wordings) < 0.3
    for kind, sentences in theirs.items():
        assert len(sentences) >= 2, kind
        frames = [set(word_problems.alternatives(line.strip(), "<>")) for line in lines]
        whole = set().union(*(frame for frame in frames if frame <= set(sentences)))
        for sentence in set(sentences) - whole:
            assert any(re.search(rf"\b{re.escape(w)}(?!\w)", sentence) for w in foreign), sentence


def test_a_seed_gives_the_same_stream_and_a_longer_list_extends_it(split):
    short = word_problems.problems(3, split, 20)
    assert short == word_problems.problems(3, split, 50)[:20]
    assert short != word_problems.problems(4, split, 20)
    assert word_problems.problems(3, split, 0) == []


def test_levels_come_in_turns_and_no_problem_twice(rows, split):
    assert Counter(row["level"] for row in rows) == dict.fromkeys(LEVELS, N // len(LEVELS))
    assert len({row["question"] for row in rows}) == N
    read_kinds = Counter(kind for row in rows for kind in read(row["question"], split)[2])
    assert set(read_kinds) == set(word_problems.phrases(split))
    assert min(read_kinds.values()) >= 5


def test_unknown_split_suggests_the_nearest():
    with pytest.raises(UserError, match="did you mean 'held_out'"):
        next(word_problems.stream(0, "heldout"))
