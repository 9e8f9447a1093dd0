r"""Final answers as people and models write them, and every other text."""

import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlx.rewards.answers import final_number, last_box


@pytest.mark.parametrize(
    ("text", "value"),
    [
        # plain, signs
        ("72", 72),
        ("The answer is 72.", 72),
        ("so it is -3", -3),
        ("so it is \u22123", -3),
        ("10-3", 3),
        ("5 - 3 = 2", 2),
        ("between 5-10", 10),
        ("(5)-3", 3),
        ("+7", 7),
        # thousands, decimals
        ("1,080", 1080),
        ("1,234,567.50 in total", Fraction("1234567.5")),
        ("1{,}080", 1080),
        (r"1\,080", 1080),
        ("1\u00a0080", 1080),
        ("72.00", 72),
        (".5", Fraction(1, 2)),
        ("the numbers 5,7", 7),
        # currency, percent, units
        ("$72", 72),
        ("$ 72.50", Fraction("72.5")),
        ("-$5", -5),
        ("$-5", -5),
        (r"\$18", 18),
        ("Total: $1,000.", 1000),
        ("20%", 20),
        (r"20\%", 20),
        ("72 dollars a day", 72),
        ("72km", 72),
        ("£3 each", 3),
        ("Rs.72", 72),
        ("it is 72 cm^2", 72),
        ("it is 72 cm^{2}", 72),
        ("72 m\u00b2 of CO2", 72),
        ("**72**", 72),
        ("$72$", 72),
        (r"\(72\)", 72),
        # fractions
        ("3/4", Fraction(3, 4)),
        ("1 3/4 cups", Fraction(7, 4)),
        (r"\frac{3}{4}", Fraction(3, 4)),
        (r"-\dfrac{3}{4}", Fraction(-3, 4)),
        (r"1\frac{1}{2}", Fraction(3, 2)),
        (r"\frac12", Fraction(1, 2)),
        ("½", Fraction(1, 2)),
        ("1½ cups", Fraction(3, 2)),
        # powers of ten
        ("1e3", 1000),
        ("2.5E-1 of it", Fraction(1, 4)),
        ("1e999", None),
        ("3 eggs", 3),
        ("3em", 3),
        ("60/2 = 30", 30),
        ("5 and then 3/0", 5),
        # the marker
        ("1 + 1 = 2\n#### 72", 72),
        ("#### 72\nHope this helps in 2024!", 72),
        ("####72", 72),
        ("#### $1,080.50", Fraction("1080.5")),
        ("#### -3", -3),
        ("#### **72**", 72),
        ("#### 72 dollars", 72),
        (r"#### \boxed{72}", 72),
        (r"#### $\boxed{-72}$", -72),
        ("#### The answer is: 72", 72),
        ("#### 1 \n #### 2", 2),
        (r"#### 72 but \boxed{5} and 6", 72),
        # a sum has a result, a sign may stand apart
        ("#### 5 + 7 = 12", 12),
        ("#### 12 = 5 + 7", 12),
        ("#### 3 * 12 = 36 apples", 36),
        ("#### $5 + $7 = $12", 12),
        (r"#### 5 \times 7 = 35", 35),
        ("#### - 3", -3),
        ("#### \u2212 3", -3),
        ("#### - $3", -3),
        (r"\boxed{- 3}", -3),
        ("10 - 3", 3),
        # several numbers are no number
        ("#### 5 + 7", None),
        ("#### 3 or 4", None),
        ("#### 3, 4", None),
        ("#### 3 and 4", None),
        (r"\boxed{3 \text{ or } 4}", None),
        (r"\boxed{1, 2, 3}", None),
        (r"\boxed{18 - 3}", None),
        ("It is either 3 or 4.", None),
        ("It is 3, or maybe 4.", None),
        ("He needs 3 or more, so 5.", 5),
        # markdown headings are not markers
        (r"#### Step 2: add" + "\n" + r"so \boxed{7}", 7),
        (r"#### 1. First add" + "\n" + r"so \boxed{7}", 7),
        # boxes
        (r"\boxed{72}", 72),
        (r"\boxed{72} is right, see page 9", 72),
        (r"\boxed{1} or rather \boxed{2}", 2),
        (r"\boxed{\text{72 apples}}", 72),
        (r"\boxed{\frac{3}{4}}", Fraction(3, 4)),
        (r"\boxed{\boxed{72}}", 72),
        (r"\boxed{x = 72}", 72),
        (r"\boxed{\$1{,}080.00}", 1080),
        (r"\boxed{20\%}", 20),
        (r"\boxed {72} 9", 72),
        (r"\boxed 72 and 9", 72),
        (r"\fbox{72} 9", 72),
        (r"\boxed{{72}} 9", 72),
        (r"\boxed{72^\circ} 9", 72),
        (r"the set \{1, 2\} gives \boxed{72} 9", 72),
        (r"\boxed{72", 72),  # cut off: the last number
        (r"\boxed{\text{none}} after 5", 5),
        # powers, roots and multiples of them are no numbers
        ("\\boxed{5²³⁴⁵⁶⁷⁸⁹}", None),
        ("\\boxed{1,000²}", None),
        ("\\boxed{3/4²}", None),
        (r"\boxed{5^2}", None),
        (r"\boxed{5^{x}}", None),
        (r"\sqrt{2}", None),
        (r"\boxed{\sqrt{\sqrt{2}}}", None),
        (r"\boxed{\sqrt[3]{8}}", None),
        ("√2", None),
        (r"2\sqrt{2}", None),
        (r"2\pi", None),
        ("√16 = 4", 4),
        ("5^2 = 25", 25),
        ("the 5^{th} one", 5),
        # nothing
        ("", None),
        ("no idea", None),
        ("H2O and x_1", None),
        ("####", None),
        ("1/0", None),
        ("9" * 5000, None),
    ],
)
def test_reads(text, value):
    assert final_number(text) == value


@given(st.integers(-(10**9), 10**9), st.integers(0, 99), st.booleans())
def test_formats_of_one_number(whole, cents, negative):
    value = Fraction(whole) + Fraction(cents, 100) * (-1 if whole < 0 else 1)
    sign, digits = "-" if value < 0 else "", f"{abs(whole)}.{cents:02d}"
    grouped = f"{abs(whole):,}.{cents:02d}"
    for number in (digits, grouped, f"${grouped}", f"{digits}0 apples", f"{grouped}%"):
        for text in (
            f"so 5 + 5 = {sign}{number}",
            f"{sign}{number}",
            f"17 things\n#### {sign}{number}\n",
            rf"17 \boxed{{{sign}{number}}} 18",
            f"the answer is **{sign}{number}**.",
        ):
            assert final_number(text) == value, text


_PIECES = st.sampled_from(
    ["####", "\\boxed{", "\\frac{", "}", "{", "\\", "$", "-", ",", ".", "/", " ", "\n", "0", "7",
     "1,000", "1 ", "^", "%", "\u00b2", "\u0663", "\U0001d7db", "\u00a0", "the ", "answer", "e9"]
)  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(st.one_of(st.text(), st.lists(_PIECES, max_size=40).map("".join)))
def test_never_raises(text):
    value = final_number(text)
    assert value is None or isinstance(value, Fraction)


@pytest.mark.parametrize("piece", ["####", "\\boxed{", "\\boxed{}", "{", "}", "1,111,", "1", "1 ",
    "1/", "-", "$", "#### 1. a", "####\n", "\\frac{", "\\frac{1}{", "\\frac", " ", "the ", ".",
    "\\boxed ", "####the ", "1 1/", ",000", "\\", "$ -"])  # fmt: skip
def test_takes_time_linear_in_the_text(piece):
    """Four times the text may not take 16 times as long (or for ever)."""
    times = []
    for length in (50_000, 200_000):
        text = piece * (length // len(piece))
        started = time.thread_time()
        final_number(text)
        times.append(time.thread_time() - started)
    assert times[1] < 10 * times[0] + 2


def test_last_box_keeps_nested_braces():
    assert last_box(r"a \boxed{1} b \boxed{\frac{1}{\sqrt{2}}} c") == r"\frac{1}{\sqrt{2}}"
    assert last_box("no box") is None
    assert last_box(r"\boxed{open") is None
