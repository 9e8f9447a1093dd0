r"""One number and nothing else: its value, percent sign and unit.

Understands what tidied answers (`answers.tidy`) hold: `-1,000.50`, `\frac{3}{4}`, `3/4`,
`1 \frac{3}{4}`, `1e3`, `2.5 \times 10^{-4}`, `0.1\overline{6}`, `$5`, `50%`, `5 \text{ cm}^2`.
Values are exact fractions. Time is linear in the text; nothing raises.
"""

import re
from dataclasses import dataclass
from fractions import Fraction

_MAX_LENGTH = 400  # characters; int() refuses thousands of digits
_MIN_PLACES = 6  # decimal places that make a rounded decimal count as its fraction

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_DECIMAL = rf"(?:{_DIGITS}(?:\.[0-9]*)?|\.[0-9]+)"
_NUMBER = re.compile(
    rf"""
    (?P<sign>[-+]?)\s*
    (?P<currency>[$£€¥])?\s*
    (?P<inner>-?)\s*
    (?:
      (?:(?P<whole>[0-9]+)\s*)?\\frac\s*
        \{{\s*(?P<top>-?{_DECIMAL})\s*\}}\s*\{{\s*(?P<bottom>-?{_DECIMAL})\s*\}}
    | (?:(?P<whole2>[0-9]+)\s+)?(?P<top2>{_DECIMAL})\s*/\s*(?P<bottom2>{_DECIMAL})
    | (?P<head>[0-9]*\.[0-9]*)\\(?:overline|bar)\s*\{{(?P<cycle>[0-9]{{1,50}})\}}
    | (?P<decimal>{_DECIMAL})
      (?: [eE](?P<e>[+-]?[0-9]{{1,3}})(?![0-9])
      | \s*(?:\\times|\\cdot|\*|x)\s*10\s*(?:\^|\*\*)\s*
        (?:\{{\s*(?P<e2>[+-]?[0-9]{{1,3}})\s*\}}|(?P<e3>[+-]?[0-9]{{1,3}})(?![0-9])) )?
    )
    """,
    re.VERBOSE,
)
_PERCENT = re.compile(r"\s*(?:%|\\text\s*\{\s*(?:%|per\s?cent)\s*\}|per\s?cent\b)", re.IGNORECASE)
_UNIT = re.compile(
    r"""\s*(?:
      \\text\s*\{(?P<text>[^{}]{0,60})\}
    | \\frac\s*\{\s*\\text\s*\{[^{}]{0,30}\}\s*\}\s*\{\s*\\text\s*\{[^{}]{0,30}\}\s*\}
    | \^\s*\\circ\s*(?:\\text\s*\{)?\s*(?P<scale>[CFK]?)\s*\}?
    | (?P<bare>\s?[A-Za-z][A-Za-z./ -]{0,60}?)
    )\s*(?:\^\s*(?:[1-4]|\{\s*-?[1-4]\s*\}))?\s*\.?\s*""",
    re.VERBOSE,
)
_NAMES = {  # what a unit is also called; two that are known and differ are a contradiction
    "m": "m meter metre", "cm": "cm centimeter centimetre", "mm": "mm millimeter millimetre",
    "km": "km kilometer kilometre", "in": "in inch inche", "ft": "ft feet foot", "yd": "yd yard",
    "mi": "mi mile", "g": "g gram", "kg": "kg kilogram", "mg": "mg milligram", "lb": "lb lbs pound",
    "oz": "oz ounce", "s": "sec second", "min": "min minute", "h": "h hr hour", "d": "day",
    "w": "week", "month": "month", "y": "yr year", "l": "l liter litre", "ml": "ml milliliter",
    "°": "deg degree", "rad": "rad radian", "dollar": "dollar usd $", "cent": "cent",
    "euro": "euro €", "mph": "mph", "kph": "kph kmh",
}  # fmt: skip
_UNITS = {name: unit for unit, names in _NAMES.items() for name in names.split()}
_LETTERS = {"m", "g", "s", "h", "d", "l"}  # units that are variables unless in \text
_NOT_UNITS = {
    "and", "or", "to", "if", "when", "mod", "over", "not", "is", "are", "plus", "minus", "times",
    "than", "pi", "sqrt", "sin", "cos", "tan", "cot", "sec", "csc", "log", "ln", "exp", "arcsin",
    "arccos", "arctan", "infty", "infinity",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Quantity:
    """A number as written.

    value: without regard to the percent sign. places: decimal places, −1 unless written as a
    plain decimal. unit: canonical where known, "" where none or unknown.
    """

    value: Fraction
    percent: bool
    unit: str
    places: int


def read(text: str) -> Quantity | None:
    """The quantity that is the whole of `text`, else None."""
    text = text.strip()
    if not text or len(text) > _MAX_LENGTH:
        return None
    match = _NUMBER.match(text)
    if not match:
        return None
    value = _value(match)
    if value is None:
        return None
    rest, end = text, match.end()
    percent = _PERCENT.match(rest, end)
    if percent:
        end = percent.end()
    unit = _UNITS.get(match["currency"] or "", "")
    if rest[end:].strip(" ."):
        found = read_unit(rest[end:])
        if found is None:
            return None
        unit = unit or found
    decimal = match["decimal"]
    plain = decimal and "." in decimal and not (match["e"] or match["e2"] or match["e3"])
    return Quantity(value, bool(percent), unit, len(decimal.split(".")[1]) if plain else -1)


def read_unit(text: str) -> str | None:
    """The unit that is the whole of `text`: canonical, or "" if unknown; None if it is no unit."""
    match = _UNIT.fullmatch(text)
    if not match:
        return None
    words = re.findall(r"[A-Za-z]+", (match["text"] or match["bare"] or "").lower())
    if any(word in _NOT_UNITS for word in words) and not match["text"]:
        return None
    if match["text"] is not None and words and words[0] in ("and", "or"):
        return None
    if match["bare"]:
        first = words[0]
        known = _UNITS.get(_singular(first)) or _UNITS.get(first)
        spaced = text[0].isspace() and len(first) >= 3
        if first in _LETTERS or not (known or spaced):
            return None
    if match["scale"] is not None:
        return match["scale"] or "°"
    units = [_UNITS.get(_singular(word)) or _UNITS.get(word) for word in words]
    known_units = [unit for unit in units if unit]
    return known_units[0] if len(known_units) == 1 and len(words) <= 2 else ""  # not miles per hour


def same(gold: Quantity, got: Quantity) -> bool:
    """Whether both are one number, given the ways people write one.

    50% equals 1/2, and also the 50 of "what percent"; a decimal with at least 6 places equals
    a fraction it is the rounding of; two known units must be the same.
    """
    if gold.unit and got.unit and gold.unit != got.unit:
        return False
    if gold.percent == got.percent:
        return gold.value == got.value or _rounded(gold, got) or _rounded(got, gold)
    share, other = (gold, got) if gold.percent else (got, gold)
    if other.value == share.value / 100:
        return True
    return other.value == share.value and abs(share.value) >= 1


def _rounded(exact: Quantity, decimal: Quantity) -> bool:
    """Whether `decimal` is `exact`, which has no finite decimal form, rounded."""
    if decimal.places < _MIN_PLACES or exact.places >= 0:
        return False
    return round(exact.value, decimal.places) == decimal.value


def _value(match: re.Match[str]) -> Fraction | None:
    """The matched number; None for a division by zero."""
    if match["cycle"]:
        value = _repeating(match["head"], match["cycle"])
    elif match["decimal"]:
        exponent = int(match["e"] or match["e2"] or match["e3"] or 0)
        if abs(exponent) > _MAX_LENGTH:
            return None
        value = _fraction(match["decimal"]) * Fraction(10) ** exponent
    else:
        bottom = _fraction(match["bottom"] or match["bottom2"])
        if bottom == 0:
            return None
        whole = int(match["whole"] or match["whole2"] or 0)
        value = whole + _fraction(match["top"] or match["top2"]) / bottom
    return -value if (match["sign"] == "-") != (match["inner"] == "-") else value


def _fraction(digits: str) -> Fraction:
    return Fraction(digits.replace(",", "").rstrip(".") or "0")


def _repeating(head: str, cycle: str) -> Fraction:
    whole, _, fixed = head.partition(".")
    tail = Fraction(int(cycle), 10 ** len(cycle) - 1) / 10 ** len(fixed)
    return Fraction(int(whole + fixed or "0"), 10 ** len(fixed)) + tail


def _singular(word: str) -> str:
    return word[:-1] if word.endswith("s") and len(word) > 2 else word
