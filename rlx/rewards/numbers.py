r"""Reading a final numeric answer out of free text, in time linear in its length.

Understands `#### 72`, `\boxed{72}` with nested braces, and plain numbers with sign, currency,
thousands separators, decimals, percent, units behind, `3/4`, `1 3/4`, `½`, `\frac{3}{4}`, `1e3`.
Values are exact fractions, so 72.00 = 72 and 0.75 = 3/4. Nothing here raises on any text.
"""

import re
from fractions import Fraction

_MAX_DIGITS = 400  # a longer number is not an answer, and int() refuses thousands of digits

# Every repetition is over disjoint characters, so no text makes these backtrack far.
_WHOLE = r"[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+"
_DECIMAL = rf"(?:(?:{_WHOLE})(?:\.[0-9]+)?|\.[0-9]+)"
_NUMBER = re.compile(
    rf"""
    (?<![A-Za-z_0-9\^])(?<![0-9]\.)(?<!\^[{{-])   # not inside a word or number, not an exponent
    (?P<sign>(?<![)\]%])[-+](?=[0-9.$£€¥]))?      # a sign, not a minus between two operands
    (?:[$£€¥]\ ?(?P<inner_sign>-)?)?
    (?:(?P<integer>[0-9]+)\ (?=[0-9]+/[0-9]))?    # the 1 of 1 3/4
    (?>(?P<numerator>{_DECIMAL})
      (?:[eE](?P<exponent>[-+]?[0-9]{{1,3}})(?![0-9A-Za-z])
      | \ ?/\ ?(?P<denominator>{_DECIMAL}) )? )
    (?!\s?(?:[√π⁰¹²³⁴-⁻]|\\pi|\^\s?[{{(]?\s?-?(?:[0-9]|[a-z]\b)))  # nor a factor or base
    """,
    re.VERBOSE,
)
_LEAD = re.compile(  # what may stand between #### and its number
    r"(?:[^\w\n.$£€¥+-]|\.(?![0-9])|\b(?:the|final|answer|result|is|boxed|text|total)\b){0,40}",
    re.IGNORECASE,
)
_HEADING = re.compile(r"[.):]\s*[^\W\d]")  # `#### 1. First we …` numbers a section
_BRACES = re.compile(r"\\(?:boxed|fbox)\s*\{|\\[{}]|\{|\}")
_SIMPLE_BOX = re.compile(r"\\boxed\s+([^\s{}\\$]+)")
_ONE_CHARACTER = "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"
_SPELLED = ("1/2", "1/3", "2/3", "1/4", "3/4", "1/5", "2/5", "3/5", "4/5", "1/6", "5/6", "1/8",
            "3/8", "5/8", "7/8")  # fmt: skip
VULGAR = str.maketrans(dict(zip(_ONE_CHARACTER, _SPELLED, strict=True)))
_LATEX = (
    (re.compile(r"(?:\\?sqrt\s?(?:\[[^]\n]{0,9}\])?|√)[\s{(]{0,9}[-+]?"), "√_"),  # holds no number
    (re.compile(rf"(?<=[0-9])\s?(?=[{_ONE_CHARACTER}])"), " "),
    (re.compile(r"\{,\}|\\[,!;: ](?=[0-9]{3}(?![0-9]))|[\u00a0\u2009\u202f](?=[0-9]{3})"), ","),
    (re.compile(r"(?<=[0-9])\s?\\[dt]?frac"), r" \\frac"),
    (re.compile(r"\\[dt]?frac\s?([0-9])\s?([0-9])(?![0-9])"), r"\1/\2"),
    (re.compile(r"\\[dt]?frac\s?\{\s?([^{}]{1,60})\}\s?\{\s?([^{}]{1,60})\}"), r"\1/\2"),
    (re.compile(r"\\(?:left|right|text|mathrm|mathbf|textbf|boxed|fbox)(?![A-Za-z])"), " "),
    (re.compile(r"\\\$"), "$"),
    (re.compile(r"\\[%,!;: ()\[\]]"), " "),
    (re.compile("[\u2212\u2013\u2012\ufe63\uff0d](?=[$£€¥]?[0-9.])"), "-"),
)


def read_answer(text: str) -> Fraction | None:
    r"""The final number of `text`: after its last `####`, else in its last box, else its last.

    A form that holds no number is passed over for the next. None when there is none at all.
    """
    for candidate in (_after_marker, _in_box, _last_number):
        value = candidate(text)
        if value is not None:
            return value
    return None


def last_box(text: str) -> str | None:
    r"""The content of the last closed `\boxed{…}` (or `\fbox`), nested braces and all."""
    found = boxes(text)
    if found:
        _, start, end = found[-1]
        return text[start:end]
    simple = _SIMPLE_BOX.findall(text)  # `\boxed 72`
    return simple[-1] if simple else None


def boxes(text: str) -> list[tuple[int, int, int]]:
    """All closed boxes: where each begins, its content begins and ends; in order of their ends."""
    stack: list[tuple[int, int]] = []  # of the content for a box, negative for any other brace
    found = []
    for match in _BRACES.finditer(text):
        token = match.group()
        if token == "}":
            opened, start = stack.pop() if stack else (-1, -1)
            if start >= 0:
                found.append((opened, start, match.start()))
        elif token == "{":
            stack.append((-1, -1))
        elif token[-1] == "{" and len(token) > 2:
            stack.append(match.span())
    return found


def _after_marker(text: str) -> Fraction | None:
    for part in reversed(text.split("####")[1:]):
        line = _plain(part[: 2 * _MAX_DIGITS].split("\n", 1)[0])
        lead = _LEAD.match(line)
        number = _NUMBER.match(line, lead.end() if lead else 0)
        if number and not _HEADING.match(line, number.end()):
            value = _value(number)
            if value is not None:
                return value
    return None


def _in_box(text: str) -> Fraction | None:
    box = last_box(text)
    if box is None:
        return None
    plain = _plain(box)
    for part in (plain.rpartition("=")[2], plain):  # `x = 72` means 72
        for match in _NUMBER.finditer(part):
            if (value := _value(match)) is not None:
                return value
    return None


def last_number(text: str) -> str | None:
    """The last number of `text` as it is written, LaTeX made plain; None when there is none."""
    found = None
    for match in _NUMBER.finditer(_plain(text)):
        found = match.group()
    return found


def _last_number(text: str) -> Fraction | None:
    value = None
    for match in _NUMBER.finditer(_plain(text)):
        found = _value(match)
        value = value if found is None else found
    return value


def _plain(text: str) -> str:
    for pattern, replacement in _LATEX:
        text = pattern.sub(replacement, text)
    return text.translate(VULGAR)


def _value(match: re.Match[str]) -> Fraction | None:
    """The matched number; None when it has too many digits or divides by zero."""
    if match.end() - match.start() > _MAX_DIGITS:
        return None
    value = _fraction(match["numerator"])
    if match["denominator"]:
        denominator = _fraction(match["denominator"])
        if denominator == 0:
            return None
        value /= denominator
    if match["exponent"]:
        if abs(int(match["exponent"])) > _MAX_DIGITS:
            return None
        value *= Fraction(10) ** int(match["exponent"])
    if match["integer"]:
        value += int(match["integer"])
    negative = (match["sign"] == "-") != bool(match["inner_sign"])
    return -value if negative else value


def _fraction(digits: str) -> Fraction:
    return Fraction(digits.replace(",", ""))
