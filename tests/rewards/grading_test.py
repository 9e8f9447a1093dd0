r"""What the graders say of answers as people and models write them, and of every other text."""

import contextlib
import threading
import time
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlx.base import UserError
from rlx.rewards import answers, equality, rewards, symbolic

# Hypothesis watches the garbage collector; an end that comes in its callback is reported and lost,
# and the timer ends the grade 50 ms later.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

# Seconds of this thread's processor time, where no end means minutes or for ever. One answer is
# given CPU_SECONDS; a collection of what a worker's other tests left takes seconds more.
ENDS = 10


GRADED = Path(__file__).with_name("graded_answers.txt")


@pytest.fixture(scope="module", autouse=True)
def warmed():
    symbolic.warm()


def math(completion, prompt="", **row):
    return rewards.math(prompt, completion, [], [], question="q", **row)


def _graded():
    kind = ""
    for line in GRADED.read_text(encoding="utf-8").splitlines():
        if line.startswith("== "):
            kind = line[3:]
        elif line and not line.startswith("# "):
            gold, answer, right, *reason = line.replace("⏎", "\n").split(" | ")
            completion = answer if kind.endswith(", text") else rf"so \boxed{{{answer}}}."
            named = f"{gold} ← {answer}: {reason or kind}"
            yield pytest.param(gold, completion, float(right), id=named)


@pytest.mark.parametrize(("answer", "completion", "expected"), list(_graded()))
def test_answers_and_the_grade_they_deserve(answer, completion, expected):
    assert math(completion, answer=answer) == expected


UNFINISHED = [
    # completion, prompt's end, the grade of 5, and where unfinished thoughts count
    (r"<think>so \boxed{5}, or", "", 0, 1),
    (r"so \boxed{5}, or", "<think>\n", 0, 1),
    (r"so \boxed{5}", "", 1, 1),
    (r"<think>\boxed{5}</think>The answer is 6.", "", 0, 0),
    (r"<think>\boxed{6}</think>The answer is 5.", "", 1, 1),
    (r"\boxed{6}</think>The answer is 5.", "<think>", 1, 1),
    (r"\boxed{5} <think> or \boxed{6}", "", 1, 0),
]


@pytest.mark.parametrize(("completion", "prompt", "graded", "unfinished"), UNFINISHED)
def test_unfinished_thoughts_count_where_they_are_asked_for(completion, prompt, graded, unfinished):
    for name, expected in (("", graded), ("_unfinished", unfinished)):
        for reward in ("math", "gsm8k"):
            function = rewards.resolve(f"{reward}{name}")
            assert function(prompt, completion, [], [], answer="5") == expected, reward
    assert rewards.arithmetic(prompt, completion, [], [], answer="5") == (
        graded if "answer is" not in completion else 0.0
    )


def test_a_box_in_the_prompt_is_not_the_completions():
    assert math("I think so.", prompt=r"Is it \boxed{5}?", answer="5") == 0.0


ROWS = [
    ({"answer": "5"}, 1), ({"answer": 5}, 1), ({"answer": 5.0}, 1), ({"answer": r"$5$"}, 1),
    ({"answer": r"Since 2+3 = \boxed{5}, done with 7."}, 1), ({"answer": "2 + 3 = 5\n#### 5"}, 1),
    ({"answer": "We add the numbers and so find $5$ at last."}, 1), ({"answer": ["5"]}, 1),
    ({"solution": r"Since 2+3 = \boxed{5}."}, 1), ({"answer": "", "solution": r"\boxed{5}"}, 1),
    ({"answer": None, "solution": r"\boxed{5}"}, 1), ({"solution": "no box, 5"}, 0),
    ({"answer": "6", "solution": r"\boxed{5}"}, 0), ({}, 0),
]  # fmt: skip


@pytest.mark.parametrize(("row", "expected"), ROWS)
def test_where_a_row_keeps_its_answer(row, expected):
    assert math(r"\boxed{5}", **row) == expected


def test_rows_without_an_answer_are_found_before_the_run():
    rewards.check_rows("math", [{"answer": "x"}, {"solution": r"\boxed{1}"}, {"answer": 0}])
    for row in ({"answer": " "}, {"solution": "no box"}, {"answer": r"so \boxed{}"}):
        with pytest.raises(UserError, match="row 2 has no answer"):
            rewards.check_rows("math", [{"answer": "x"}, row])
    for name in ("arithmetic", "exact"):
        for answer in (None, " \n"):
            with pytest.raises(UserError, match="row 2 has no answer"):
                rewards.check_rows(name, [{"answer": 0}, {"answer": answer}])
    right = (
        "assert f() == 1",
        ["import math", "assert f() == 1"],
        "def g(f): f()\ng(f)",
        "ok = g(f)",
    )
    definition = "LARGEST = 3\ndef check(f):\n    assert f() == 1"  # as HumanEval has it, uncalled
    wrong = (
        None,
        "",
        " \n",
        [],
        [""],
        ["assert f() == 1", 2],
        {"f()": 1},
        3,
        "f == 1",
        "f(",
        definition,
    )
    for answer in wrong:  # all programs would be right, or none
        with pytest.raises(UserError, match="row 5 has no tests that a program could fail"):
            rewards.check_rows("code", [{"answer": tests} for tests in (*right, answer)])
    rewards.check_rows("reasoning_gym", [{"answer": ""}])


@settings(max_examples=300, deadline=None)
@given(st.text(min_size=1, max_size=80))
def test_whatever_row_passes_the_check_its_own_answer_is_right(text):
    wanted = answers.reference(text)
    if wanted is not None and equality.tidy(wanted):
        assert equality.equal(wanted, wanted)


# Any text


_WRITTEN = r"""
    \boxed{ \frac{ \frac \sqrt{ \sqrt[ \text{ \left( \right) \{ \} { } ( ) [ ] ^{ ^ _ _{ \pm
    \cup \in \infty \pi \cdot \times \begin{pmatrix} \end{pmatrix} \\ & \binom{ \log \sin \int
    \sum \overline{ \% % \$ $ $$ \( \) \[ \] #### answer is and or = < > \le | ! ' " , . ; : +
    - * / 0 1 7 99 0.5 1,000 1e9 e i x y A (A) cm yes ½ ² √ π ∞ ٣ 𝟛 ⁄ － é \ ~ ` ** true
    \mathbb{R} \bmod \lfloor \rfloor \degree \bar{ \rm \, \! \; \operatorname{
""".split()  # noqa: SIM905
_PIECES = st.sampled_from(
    [*_WRITTEN, " ", "\n", "\x00", "\ud800", "9" * 60, "x^{99}", "\\boxed{5}"]
)
_LATEX = st.lists(_PIECES, max_size=25).map("".join)


@settings(max_examples=25, deadline=None)
@example([("\\()$", 1)])
@given(
    st.lists(
        st.tuples(st.one_of(st.text(min_size=1), _LATEX), st.integers(1, 2000)),
        min_size=1,
        max_size=5,
    )
)
def test_texts_of_100_kilobytes_are_read_in_linear_time(pieces):
    text = "x" + "".join(piece * count for piece, count in pieces)
    text = (text * (100_000 // len(text) + 1))[:100_000]
    started = time.thread_time()
    assert math(text, answer="85") in (0.0, 1.0)
    assert time.thread_time() - started < ENDS


def _nested_sets(shared, last):
    """Sets that differ in their last element alone, so that many pairs are compared to the end."""
    inner = (r"\{" + ",".join(map(str, [*shared, k])) + r"\}" for k in last)
    return r"\{" + ",".join(inner) + r"\}"


# What math-verify itself spends all of its seconds on, or could.
WORST = {
    "tower": r"9^{9^{9^9}}",
    "tower without braces": "9^9^9^9",
    "stars": "9**9**9",
    "factorials": "((9!)!)!",
    "factorial": "100000!",
    "binomial": r"\binom{10^9}{5\cdot10^8}",
    "powers of powers": "((2^{9999})^{9999})^{9999}",
    "power of a product": r"2^{99 \cdot 99 \cdot 99 \cdot 99 \cdot 99}",
    "power of a sum": "(2+x-x)^{99999999999}",
    "expansion": r"(x+y+z+1)^{200}(x-y)^{200}",
    "absolute values": "|" * 30 + "x" + "|" * 30,
    "parentheses": "(" * 200 + "x" + ")" * 200,
    "brackets": "[" * 11 + "1" + "]" * 11,
    "fractions": r"\frac{1}{" * 60 + "x" + "}" * 60,
    "functions": r"\sin(\cos(\tan(x^{17}+y^{13})))^{40}+\cos(x)^{40}",
    "subscripts": "x_" * 100 + "x",
    "slashes": "/".join(["3"] * 140),
    "minuses": "-" * 290 + "1",
    "digits": "9" * 100_000,
    "letters": "x" * 290,
    "sum": r"\sum_{i=1}^{100000000} \frac{1}{i^2}",
    "integral": r"\int_0^1 e^{x^2} \sin(x) dx",
    "unions": r"\cup".join(["(1,2)"] * 40),
    "roots": r"\{" + ",".join(rf"\sqrt{{{i}}}" for i in range(2, 18)) + r"\}",
    "half a million of characters": "x+" * 250_000,
    "nested sets": _nested_sets(range(14, -1, -1), [*range(35, 20, -1), 99]),
}
GOLD = {
    "roots": r"\{" + ",".join(rf"\sqrt{{{i}+1}}" for i in range(20, 36)) + r"\}",
    "nested sets": _nested_sets(range(15), range(20, 36)),
}


@pytest.mark.parametrize("name", WORST)
def test_the_worst_inputs_end_in_time(name):
    started = time.thread_time()
    assert math(rf"\boxed{{{WORST[name]}}}", answer=GOLD.get(name, "85")) == 0.0
    assert time.thread_time() - started < ENDS


@pytest.mark.parametrize(
    "piece",
    [r"\boxed{", r"\boxed{1}", r"\boxed{1},", "answer is ", "answer is (", "$", "$5 ", r"\(", r"\[",
     r"\text{", r"\left(", "{", "}", "(", "½", "####", "#### 1\n", r"\frac1", ", and ", "\\"],
)  # fmt: skip
def test_100_kilobytes_of_one_thing(piece):
    started = time.thread_time()
    assert math(piece * (100_000 // len(piece)), answer="85") == 0.0
    assert time.thread_time() - started < ENDS


def _slow(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass
    return True


def _stubborn():
    """Swallows the first end, as sympy might."""
    with contextlib.suppress(BaseException):
        _slow(5)
    return _slow(5)


@pytest.fixture(params=["main thread", "another thread"])
def run(request):
    """Return how to call a function; the call returns its result and its processor seconds."""

    def timed(function, found):
        started = time.thread_time()
        found += [function(), time.thread_time() - started]

    def call(function):
        found = []
        if request.param == "main thread":
            timed(function, found)
        else:
            thread = threading.Thread(target=timed, args=(function, found))
            thread.start()
            thread.join()
        return found

    return call


def test_the_limit_holds_in_every_thread(run):
    result, spent = run(lambda: symbolic.limited(_slow, 5.0, seconds=0.2))
    assert result is False
    assert spent < 4.0
    assert run(lambda: symbolic.limited(_slow, 0.01, seconds=1.0))[0] is True


def test_an_end_that_is_swallowed_comes_again(run):
    result, spent = run(lambda: symbolic.limited(_stubborn, seconds=0.1))
    assert result is False
    assert spent < 4.0


def test_sympy_is_stopped_in_every_thread(run):
    """It swallows an end here and there: of a trace function's single one nothing was left."""
    # Without an end it takes minutes. On a crowded machine a step of Python between two takes long.
    assert run(lambda: math(rf"\boxed{{{WORST['expansion']}}}", answer="85"))[1] < ENDS


def test_a_grade_leaves_nothing_behind(run):
    """An end that comes as the work is done may not be raised later, in other code."""

    def grades():
        for _ in range(40):
            symbolic.limited(_slow, 0.05, seconds=0.05)
            _slow(0.002)
        return "finished"

    assert run(grades)[0] == "finished"
    assert "rlx-grade-limit" not in {thread.name for thread in threading.enumerate()}


@given(st.integers(0, 10**6), st.integers(1, 999), st.booleans())
def test_dresses_of_one_fraction(top, bottom, negative):
    sign = "-" if negative else ""
    plain = rf"{sign}\frac{{{top}}}{{{bottom}}}"
    whole, rest = divmod(top, bottom)
    for other in (
        f"{sign}{top}/{bottom}",
        rf"x = {sign}\dfrac{{{top}}}{{{bottom}}}",
        rf"{sign}{whole}\frac{{{rest}}}{{{bottom}}}",
        rf"{sign}\frac{{{3 * top:,}}}{{{3 * bottom}}} \text{{ apples}}",
        rf"\frac{{{sign}{100 * top}}}{{{bottom}}}\%",
        f"$ {sign}{top} / {bottom} $.",
    ):
        assert equality.equal(plain, other), other
    assert not equality.equal(plain, rf"{sign}\frac{{{top + 1}}}{{{bottom}}}")


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 9), st.integers(2, 400), st.integers(0, 99), st.integers(-9, 9))
def test_a_part_beyond_every_float_decides(base, power, whole, other):
    small = rf"\frac{{1}}{{{base}^{{{power}}}}}"
    gold = rf"{whole}+{small}"
    assert equality.equal(gold, rf"\frac{{{whole * base**power + 1}}}{{{base}^{{{power}}}}}") or (
        whole * base**power > 10**50  # longer than sympy is shown
    )
    assert equality.equal(gold, rf"{small} + {whole}")
    assert equality.equal(gold, rf"{whole} + {other} \cdot {small}") == (other == 1)


def test_what_sympy_is_shown():
    shown = ("(1,2]", r"\sqrt{12}", "2^{100}", "x^{99}+x^{98}", "10^{2000}", "20!", r"\frac{a}{c}")
    refused = ("10^{30000}", "(2^{999})^{99}", "2^{3}^{4}", "3000!", "(2", "2)", "hello", "1" * 51,
               "x+" * 150 + "x", "{" * 13 + "x" + "}" * 13)  # fmt: skip
    assert [text for text in shown if symbolic.size(text) > symbolic.MAX_BITS] == []
    assert [text for text in refused if symbolic.size(text) <= symbolic.MAX_BITS] == []
