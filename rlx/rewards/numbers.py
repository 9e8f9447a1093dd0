r"""Read numbers as people and models write them, as exact fractions.

`find` reads the numbers in free text. `read` reads a text that is one number with its unit, such as
`-1,000.50`, `3/4`, `1½`, `\frac{3}{4}`, `2.5 \times 10^{-4}`, `0.1\overline{6}`, `$5`, `50%` or
`5 \text{ cm}^2`. Time is linear in the text, and no text raises.
"""

import re
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

MAX_LENGTH = 400  # characters of a number; int() refuses thousands of digits
_LAST_PLACE = Fraction(1, 10**6)  # up to which a rounded decimal counts as its fraction
_NONE = Fraction(0)

# Every repetition is over disjoint characters, so no text makes these backtrack far.
_WHOLE = r"[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+"
_DECIMAL = rf"(?:(?:{_WHOLE})(?:\.[0-9]+)?|\.[0-9]+)"
NUMBER = re.compile(
    rf"""
    (?<![A-Za-z_0-9\^])(?<![0-9]\.)(?<!\^[{{-])   # not inside a word or number, not an exponent
    (?P<sign>(?<![)\]%])[-+](?=[0-9.$£€¥]))?      # a sign, not a minus between two operands
    (?:(?P<currency>[$£€¥])\ ?(?P<inner_sign>-)?)?
    (?:(?P<integer>[0-9]+)\ (?=[0-9]+/[0-9]))?    # the 1 of 1 3/4
    (?>(?P<numerator>{_DECIMAL})
      (?:[eE](?P<exponent>[-+]?[0-9]{{1,3}})(?![0-9A-Za-z])
      | \ ?/\ ?(?P<denominator>{_DECIMAL}) )? )
    (?!\s?(?:[√π]|\\pi|\^\s?[{{(]?\s?-?(?:[0-9]|[a-z]\b)))  # nor a factor or base
    """,
    re.VERBOSE,
)

_Rules = Iterable[tuple[re.Pattern[str], Any]]  # what to find, and what to put there
_CHARACTERS = str.maketrans({
    **{chr(code): unicodedata.normalize("NFKC", chr(code)).replace("\u2044", "/")  # ½, full-width
       for code in (*range(0xBC, 0xBF), *range(0x2150, 0x215F), *range(0xFF01, 0xFF5F))},
    **dict.fromkeys("\u2212\u2013\u2012\u2010\u2011\ufe63\uff0d", "-"),
    **dict.fromkeys("\u00a0\u2009\u202f\u2002\u2003\u200a\u3000\u2005", " "),
    **dict.fromkeys("\u200b\u200c\u200d\ufeff\u2060", ""),
    **dict.fromkeys("\u2018\u2019\u02bc", "'"), **dict.fromkeys("\u201c\u201d", '"'),
    "×": "\\times ", "·": "\\cdot ", "⋅": "\\cdot ", "÷": "/", "⁄": "/", "∕": "/", "π": "\\pi ",
    "∞": "\\infty ", "≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ", "°": "^\\circ ", "∪": "\\cup ",
    "≡": "\\equiv ", "∩": "\\cap ", "∈": "\\in ", "±": "\\pm ", "∅": "\\emptyset ", "θ": "\\theta ",
    "α": "\\alpha ", "β": "\\beta ", "λ": "\\lambda ", "ℝ": "\\mathbb{R}", "∗": "*",
})  # fmt: skip
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
_SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9}
_DIGITS: _Rules = (
    (re.compile(r"(?<=[0-9])(?:,\\!\s?|\{,\}|\\[,!;: ]|[\u00a0\u2009\u202f])(?=[0-9]{3}(?![0-9]))"),
     ","),
    (re.compile("(?<=[0-9])\\s?(?=[¼-¾⅐-⅞])"), " "),
    (re.compile("[⁰¹²³⁴-⁹⁻⁺]+"), lambda match: f"^{{{match[0].translate(_SUPERSCRIPTS)}}}"),
)  # fmt: skip
_SPELLINGS: _Rules = (
    (re.compile(r"(?<=[0-9])(\s*(?:\\text\s*\{\s*)?)(hundred|thousand|million|billion)s?\b", re.I),
     lambda match: f"e{_SCALES[match[2].lower()]}{match[1]}"),
    (re.compile(r"(^|[=:({\[,])\s*([-+])\s+(?=[0-9.$£€¥])"), r"\1 \2"),  # no minus
    (re.compile(r"(?:\\?sqrt\s?(?:\[[^]\n]{0,9}\])?|√)[\s{(]{0,9}[-+]?"), "√_"),  # holds no number
    (re.compile(r"(?<=[0-9])\s?\\[dt]?frac"), r" \\frac"),
    (re.compile(r"\\[dt]?frac\s?([0-9])\s?([0-9])(?![0-9])"), r"\1/\2"),
    (re.compile(r"\\[dt]?frac\s?\{\s?([^{}]{1,60})\}\s?\{\s?([^{}]{1,60})\}"), r"\1/\2"),
    (re.compile(r"(?<=[0-9])\s?(?:\\times|\\cdot|[*x])\s?10\s?(?:\^|\*\*)\s?"
                r"(?:\{\s?([-+]?[0-9]{1,3})\s?\}|([-+]?[0-9]{1,3})(?![0-9]))"), r"e\1\2"),
    (re.compile(r"(?<![0-9])([0-9]{0,50})\.([0-9]{0,50})\\(?:overline|bar)\s?\{([0-9]{1,50})\}"),
     lambda match: str(_repeating(*match.groups()))),
)  # fmt: skip
_MARKUP: _Rules = (
    (re.compile(r"\\(?:left|right|text|mathrm|mathbf|textbf|boxed|fbox)(?![A-Za-z])"), " "),
    (re.compile(r"\\\$"), "$"),
    (re.compile(r"\\[%,!;: ()\[\]]"), " "),
)

_PERCENT = re.compile(r"\s*(?:%|\\text\s*\{\s*(?:%|per\s?cent)\s*\}|per\s?cent\b)", re.IGNORECASE)
_DEGREES = re.compile(r"\^\s*(?:\\circ|\{\s*\\circ\s*\})|\\degree")
_EXPONENT = re.compile(r"\s*\^\s*(?:[1-4]|\{\s*-?[1-4]\s*\})")
_IN_TEXT = re.compile(r"(?:\s*(?:\\text\s*\{[^{}]*\}|\\frac|[{}]))+\s*[CFK]?[\s.]*")
_BARE = re.compile(r"\s?[A-Za-z]{2}[A-Za-z./ -]{0,60}")
_NAMES = {  # of a unit; two known units that differ are a contradiction
    "m": "m meter metre", "cm": "cm centimeter centimetre", "mm": "mm millimeter millimetre",
    "km": "km kilometer kilometre", "in": "in inch inche", "ft": "ft feet foot", "yd": "yd yard",
    "mi": "mi mile", "g": "g gram", "kg": "kg kilogram", "mg": "mg milligram", "lb": "lb pound £",
    "oz": "oz ounce", "s": "s sec second", "min": "min minute", "h": "h hr hour", "d": "d day",
    "w": "week", "month": "month", "y": "yr year", "l": "l liter litre", "ml": "ml milliliter",
    "°": "deg degree", "rad": "rad radian", "dollar": "dollar usd $", "cent": "cent",
    "euro": "euro €", "yen": "yen ¥", "h mi": "mph", "h km": "kph kmh", "°C": "c celsius",
    "°F": "f fahrenheit", "2": "2 square sq squared", "3": "3 cubic cubed",
}  # fmt: skip
_UNITS = {name: unit for unit, names in _NAMES.items() for name in names.split()}
_UNITS |= {f"{name}s": unit for name, unit in _UNITS.items() if len(name) > 1}
_NOT_UNITS = {"and", "or", "to", "if", "when", "mod", "over", "not", "is", "are", "plus", "minus",
              "times", "than", "at", "dozen", "factorial", "remainder", "halves", "thirds",
              "fourths", "fifths", "sixths", "sevenths", "eighths", "ninths", "tenths",
              "hundredths", "thousandths", "tens"}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number as written."""

    value: Fraction  # as if there were no percent sign
    percent: bool
    unit: str  # a key of _NAMES; "" for none or an unknown one
    rounding: Fraction | None  # largest difference to what a plain decimal rounds; None for others
    error: Fraction  # largest error of a text that a float64 or float32 prints; 0 for others


def find(text: str) -> Iterator[re.Match[str]]:
    """Yield the match of each number in a `plain` text that has a value."""
    return (match for match in NUMBER.finditer(text) if value(match) is not None)


def value(match: re.Match[str]) -> Fraction | None:
    """Return the value of a match of NUMBER; None if it is too long or divides by zero."""
    exponent = int(match["exponent"] or 0)
    if match.end() - match.start() > MAX_LENGTH or abs(exponent) > MAX_LENGTH:
        return None
    top, bottom = (match[name] or "1" for name in ("numerator", "denominator"))
    divisor = Fraction(bottom.replace(",", ""))
    if divisor == 0:
        return None
    fraction = Fraction(top.replace(",", "")) / divisor * Fraction(10) ** exponent
    negative = (match["sign"] == "-") != bool(match["inner_sign"])
    return (-1 if negative else 1) * (int(match["integer"] or 0) + fraction)


def plain(text: str) -> str:
    """Return free text without the LaTeX that would hide its numbers."""
    return _rewrite(tidy(text), _SPELLINGS, _MARKUP)


def tidy(text: str) -> str:
    r"""Return the text with ASCII or LaTeX for what is neither: `5^{2}` for 5², `1 1/2` for 1½."""
    text = _rewrite(text, _DIGITS)
    return text if text.isascii() else text.translate(_CHARACTERS)


def read(text: str) -> Quantity | None:
    """Return the quantity that is the whole of a text made tidy by `answers.tidy`, else None."""
    text = _rewrite(tidy(text.strip()), _SPELLINGS) if len(text) <= MAX_LENGTH else ""
    match = NUMBER.match(text)
    number = value(match) if match else None
    if not match or number is None:
        return None
    percent = _PERCENT.match(text, match.end())
    rest = text[percent.end() if percent else match.end() :]
    unit = unit_of(rest) if rest.strip(" .") else ""
    if unit is None:
        return None
    numerator, size, rounding, error = match["numerator"].lstrip("0.,"), abs(number), None, _NONE
    digits = len(re.sub("[.,]", "", numerator)) if "." in match["numerator"] else 0
    if digits and not match["exponent"] and not match["denominator"]:
        last = Fraction(1, 10 ** len(match["numerator"].partition(".")[2]))
        rounding = last / 2 if last <= _LAST_PLACE and size >= 1000 * last else _NONE
    if 15 <= digits <= 17:
        error = min(_LAST_PLACE / 2, size / 10**5)
    if digits >= 10 and 1 <= size < 2**24 and Fraction(float(size)).numerator < 2**24:
        error = max(error, size / 2**24)
    unit = _UNITS.get(match["currency"] or "", unit)
    return Quantity(number, bool(percent), unit, rounding, error)


def tolerance(gold: Quantity | None, answer: Quantity | None) -> Fraction:
    """Return by how much a gold and an answer may differ; None stands for a formula."""
    # A gold that went through a float compares to 6 places, or a float32's. A decimal with at least
    # 6 places, 4 of them significant, equals all that it rounds except another decimal.
    if gold and gold.error:
        return gold.error
    decimals = [side.rounding for side in (gold, answer) if side and side.rounding is not None]
    return decimals[0] if len(decimals) == 1 else _NONE


def same(gold: Quantity, answer: Quantity) -> bool:
    """Return whether both are the same number in the same unit, as far as units are known."""
    if gold.unit and answer.unit and gold.unit != answer.unit:
        return False
    if gold.percent == answer.percent:
        return abs(gold.value - answer.value) <= tolerance(gold, answer)
    # 50% equals 1/2, and also the 50 of "what percent".
    share, other = (gold, answer) if gold.percent else (answer, gold)
    literal = other.value == share.value and abs(share.value) >= 1
    return literal or other.value == share.value / 100


def _rewrite(text: str, *tables: _Rules) -> str:
    for table in tables:
        for pattern, replacement in table:
            text = pattern.sub(replacement, text)
    return text


def _repeating(integer: str, fixed: str, cycle: str) -> Fraction:
    nines = 10 ** len(cycle) - 1
    return Fraction(int(f"0{integer}{fixed}") * nines + int(cycle), nines * 10 ** len(fixed))


def unit_of(text: str) -> str | None:
    """Return the unit that is the whole of `text`, "" for an unknown one; None if it is no unit."""
    text = _DEGREES.sub(r"\\text{degree}", text).rstrip(" .")
    words = re.findall("[a-z]+|[23]", re.sub(r"\\(?:text|frac)", " ", text.lower()))
    text = _EXPONENT.sub("", text)
    bare = _BARE.fullmatch(text) and (words[0] in _UNITS or re.match(r"\s\w{3}", text))
    if not bare and not _IN_TEXT.fullmatch(text):  # bare letters are known, or a word
        return None
    if not _NOT_UNITS.isdisjoint(words) or words in (["squared"], ["cubed"]):
        return None
    units = {_UNITS[word] for word in words if word in _UNITS}
    if len(units) > 1:
        units.discard("°")  # of °C
    known = units - {"2", "3"} and len(set(words) - _UNITS.keys() - {"per"}) < 2
    return " ".join(sorted(units)) if known else ""  # "" for apples per box
