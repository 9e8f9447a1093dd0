"""The word problems: read again as English, and held-out ones foreign in numbers and sentences."""

import itertools
import re
from collections import Counter

import pytest

from rlx.base import UserError
from rlx.rewards import rewards
from rlx.rollout import word_problems
from rlx.rollout.arithmetic import SPLITS
from rlx.rollout.word_problems import LARGEST_VALUE, LEVELS, PHRASES

N = 2000

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
    "ask": lambda value, n, k: value,
    "aside": lambda value, n, k: value,
}


@pytest.fixture(scope="module", params=SPLITS)
def split(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def rows(split) -> list[dict]:
    return word_problems.problems(0, split, N)


def patterns(split: str) -> dict[str, re.Pattern]:
    """Each kind's sentences as one expression of words and numbers, nobody's name known."""
    found = {}
    for kind, phrases in PHRASES[split].items():
        groups = []
        for index, phrase in enumerate(phrases):
            text = re.sub(r"[.?]", r"\\\g<0>", phrase).replace("[", "(?:").replace("]", ")")
            for word, group in {
                "name": r"[A-Z]\w+",
                "friend": r"[A-Z]\w+",
                "things": "[a-z]+",
            }.items():
                text = text.replace("{" + word + "}", group)
            text = text.replace("{n}", rf"(?P<n{index}>\d+)", 1).replace("{n}", r"\d+")
            groups.append(text.replace("{k}", rf"(?P<k{index}>\d+)"))
        found[kind] = re.compile("|".join(groups))
    return found


def read(question: str, split: str) -> tuple[float, list[int], list[str]]:
    """The answer, the numbers and the kinds of a story, sentence for sentence."""
    known, value, kinds, rest = patterns(split), 0.0, [], question
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
        steps = [k for k in kinds if k not in ("start", "ask", "aside")]
        assert len(steps) == level.steps
        assert set(steps) <= set(level.kinds)
        assert kinds.count("aside") == level.asides
        assert kinds[-1] in (*word_problems.LAST, "ask")
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


def test_held_out_sentences_and_numbers_are_in_no_problem_for_training():
    def parts(seeds, split):
        rows = [r for seed in seeds for r in word_problems.problems(seed, split, N)]
        numbers = {tuple(sorted(re.findall(r"\d+", r["question"]))) for r in rows}
        text = " ".join(r["question"] for r in rows)
        for word in (*word_problems.NAMES, *word_problems.THINGS):
            text = text.replace(word, "_")
        return numbers, set(re.split(r"(?<=[.?]) ", re.sub(r"\d+", "0", text)))

    numbers, sentences = parts(range(3), "train")
    own_numbers, own_sentences = parts((0, 7), "held_out")
    assert not numbers & own_numbers
    assert not sentences & own_sentences
    assert len(sentences) > 500
    assert len(own_sentences) > 18


def test_held_out_sentences_share_few_words_with_those_for_training():
    """No held-out sentence is one for training with a word or two changed."""

    def words(phrase):
        return set(re.findall(r"[a-z]+", re.sub(r"\{\w+\}|['.]", " ", phrase.lower())))

    def said(phrase):
        choices = re.split(r"\[(.*?)\]", phrase)  # every second one is of alternatives
        parts = [part.split("|") if i % 2 else [part] for i, part in enumerate(choices)]
        return map("".join, itertools.product(*parts))

    for kind, phrases in PHRASES["held_out"].items():
        for phrase in phrases:
            for other in itertools.chain(*map(said, PHRASES["train"][kind])):
                both = words(phrase) & words(other)
                assert len(both) <= len(words(phrase) | words(other)) / 2, (phrase, other)


def test_a_seed_gives_the_same_stream_and_a_longer_list_extends_it(split):
    short = word_problems.problems(3, split, 20)
    assert short == word_problems.problems(3, split, 50)[:20]
    assert short != word_problems.problems(4, split, 20)
    assert word_problems.problems(3, split, 0) == []


def test_levels_come_in_turns_and_no_problem_twice(rows, split):
    assert Counter(row["level"] for row in rows) == dict.fromkeys(LEVELS, N // len(LEVELS))
    assert len({row["question"] for row in rows}) == N
    read_kinds = Counter(kind for row in rows for kind in read(row["question"], split)[2])
    assert set(read_kinds) == set(PHRASES[split])
    assert min(read_kinds.values()) >= 15


def test_unknown_split_suggests_the_nearest():
    with pytest.raises(UserError, match="did you mean 'held_out'"):
        next(word_problems.stream(0, "heldout"))
