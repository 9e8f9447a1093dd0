r"""Decide whether two final answers are the same, however they are written.

Cheap and exact ways come first; each decides or passes on:

    same text ─▶ choice (A) ─▶ words ─▶ numbers with units ─▶ lists of such ─▶ math-verify

Lists are compared item by item, first without, then with math-verify. math-verify reads a list as a
set, and does not read `and`, `or`, or the two values of `1 \pm \sqrt{5}`. It also reads `5t` as 5,
5 cents as 5 dollars, and choices and words as products. Nothing here raises. math-verify is stopped
after `symbolic.CPU_SECONDS` of processor time, and the rest takes less.
"""

import re
from collections.abc import Callable
from fractions import Fraction

from rlx.rewards import numbers, symbolic
from rlx.rewards.answers import MAX_LENGTH, TEXT, compact, tidy

_Verify = Callable[[str, str, Fraction], bool] | None

_MAX_DEPTH = 4  # of tuples in sets in lists
_MAX_ITEMS = 16  # of a list; a longer one is compared as text

# A choice stands in front, another one anywhere before what explains the first.
_CHOICE = re.compile(
    r"(?:^(?i:choice|option|answer)?|(?<=[\s,;/&.:)]))\s*"
    r"(?:\(([A-Ja-j])\)(?![\w(^/+-])|([A-J])(?=[.):]|$))"
)
_EXPLAINED = re.compile(r"\b(?:because|since|as|for|so|which|not|both|n?either|none|all)\b")
_NAME = re.compile(
    r"((?:[A-Za-z]|\\[A-Za-z]+)(?:\s*_\s*(?:\w|\{[^{}]{1,9}\})|'|\s*\([A-Za-z]\))?)"
    r"\s*(?:=|\\in(?![A-Za-z]))\s*(?=[^=])(?!.*=)"
)
_ALL_TEXT = re.compile(rf"^{TEXT.pattern}$")
_WORDS = re.compile(r"[^\W\d_]+(?:[\s,'-]+[^\W\d_]+)*")
_OPPOSITES = {"yes": "no", "true": "false", "even": "odd", "none": "both"}
_OPPOSITES |= {opposite: word for word, opposite in _OPPOSITES.items()}
_SPACED = re.compile(r",\s|;|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])")
_THOUSANDS = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:,[0-9]{3})+(?![0-9]|,[0-9])")
_AND = re.compile(
    r"^(?:either|both)\s|(?<![A-Za-z\\])(?:,\s*)?(?:and|or)(?![A-Za-z])"
    r"|(?:,\s*)?\\text\s*\{\s*,?\s*(?:and|or)\s*\}"
)
_PLUS_MINUS = re.compile(r"\\pm(?![A-Za-z])\s*")
_MARK = re.compile(r"\\[{}]|[][(){},;]")
_BRACKETS = re.compile(r"(\\\{|[(\[])(.*)(\\\}|[)\]])", re.DOTALL)
_POWER_OF_TEN = re.compile(r"^([-+]?[0-9][0-9.,]*)[eE]([-+]?[0-9]+)$")
_TRIGONOMETRY = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
_DEGREES = re.compile(r"([0-9.]+)\s*\^\s*(?:\\circ(?![a-z])|\{\s*\\circ\s*\})")
_UNIT_BEHIND = re.compile(
    r"(?<=[^\s{(\[,])(\s*\\text\s*\{[^{}]*\}(?:\s*\^\s*\{?[1-4]\}?)?|\^\\circ)$"
)


def equal(gold: str, answer: str) -> bool:
    """Return whether `answer` equals `gold`; False too if that takes too long to find out."""
    if len(gold) > 4 * MAX_LENGTH or len(answer) > 4 * MAX_LENGTH:
        return gold.strip() == answer.strip() != ""
    gold, answer = tidy(gold), tidy(answer)
    if (verdict := _decide(gold, answer)) is not None:
        return verdict
    symbolic.warm()
    return symbolic.limited(lambda: bool(_decide(gold, answer, symbolic.equal)))


def _decide(gold: str, answer: str, verify: _Verify = None, depth: int = 0) -> bool | None:
    """Return whether two tidy answers are the same; None if only `verify` could decide."""
    if not gold or not answer:
        return False
    if compact(gold) == compact(answer):
        return True
    if len(gold) > MAX_LENGTH or len(answer) > MAX_LENGTH:
        return False
    if letter := _choice(gold):
        return _choice(answer) == letter
    gold, answer = _without_names(gold, answer)
    if words := _words(gold):
        return words == _words(answer) or (words in _OPPOSITES and _says(words, answer))
    gold, answer = (_ALL_TEXT.sub(r"\1", text).strip() for text in (gold, answer))
    left, right = numbers.read(gold), numbers.read(answer)
    if left and right:
        return numbers.same(left, right)
    verdict = None if depth == _MAX_DEPTH else _decide_lists(gold, answer, verify, depth + 1)
    if verdict is None and verify:
        behind = [_UNIT_BEHIND.search(text) for text in (gold, answer)]
        units = {numbers.unit_of(match[0]) for match in behind if match} - {""}
        if None in units or len(units) > 1:
            return False
        return verify(_plain(gold), _plain(answer), numbers.tolerance(left, right))
    return verdict


def _plain(text: str) -> str:
    """Return the text without units and signs of currency, which math-verify reads as factors."""
    if _TRIGONOMETRY.search(text):
        text = _DEGREES.sub(r"{(\\pi\\cdot \1/180)}", text)
    text = _UNIT_BEHIND.sub("", text).lstrip("$£€¥ ").replace(";", ",")
    return _POWER_OF_TEN.sub(r"\1 \\cdot 10^{\2}", text)


def _choice(text: str) -> str:
    """Return the letter of a multiple choice answer: `A`, `(a)`, `A.`, `(A) 42`; else ""."""
    text = _EXPLAINED.split(TEXT.sub(r"\1", text).strip(), maxsplit=1)[0].rstrip()
    letters = {(one or other).upper() for one, other in _CHOICE.findall(text)}
    return letters.pop() if len(letters) == 1 and _CHOICE.match(text) else ""


def _says(word: str, text: str) -> bool:
    """Return whether a text begins with a key of `_OPPOSITES`, without "or" or its opposite."""
    words = re.findall(r"[^\W\d_]+", TEXT.sub(r"\1", text).casefold())
    return words[:1] == [word] and {_OPPOSITES[word], "or"}.isdisjoint(words)


def _without_names(gold: str, answer: str) -> tuple[str, str]:
    """Return both answers without an `x =` in front, unless they name two variables."""
    matches = [_NAME.match(text) for text in (gold, answer)]
    letters = {m[1] for m in matches if m and (len(m[1]) == 1 or m[1].endswith(")"))}
    equation = any("=" in text and not m for text, m in zip((gold, answer), matches, strict=True))
    if equation or len(letters) > 1:
        return gold, answer
    return _NAME.sub("", gold, count=1), _NAME.sub("", answer, count=1)


def _words(text: str) -> str:
    """Return the text as lower-case words, if it is words and no formula; else ""."""
    inner = TEXT.sub(r"\1", text).strip(" .,;:!\"'()")
    words = re.findall(r"[^\W\d_]+", inner.casefold())
    known = {*words} - {"and", "or"} if "\\text" in text else _OPPOSITES
    # A word has four letters, stands in `\text`, or is one of a few short ones.
    sure = any(len(word) > 3 or (len(word) > 1 and word in known) for word in words)
    if not sure or not _WORDS.fullmatch(inner):
        return ""
    return " ".join(word for word in words if word not in ("the", "a", "an"))


def _decide_lists(gold: str, answer: str, verify: _Verify, depth: int) -> bool | None:
    """Return whether two tuples, sets or lists agree, item by item; None as `_decide`."""
    (kind, items), (other, rivals) = _items(gold), _items(answer)
    if len(items) == 1 and (kind == "()" or not rivals):
        return _decide(items[0], answer, verify, depth)
    if len(rivals) == 1 and (other == "()" or not items):
        return _decide(gold, rivals[0], verify, depth)
    if not items or not rivals:
        return None
    kinds = {kind, other}
    unordered = kinds <= {"", r"\{\}"}
    if len(items) != len(rivals) or not (unordered or len(kinds) == 1 or kinds == {"", "()"}):
        return False
    for item in items:
        verdict: bool | None = False
        for place, rival in enumerate(rivals if unordered else rivals[:1]):
            same = _decide(item, rival, verify, depth)
            if same:
                del rivals[place]
                break
            verdict = None if same is None else verdict
        else:
            return verdict
    return True


def _items(text: str) -> tuple[str, list[str]]:
    r"""Return the brackets and the items of a tuple, set or list, where `1 \pm 2` counts as two."""
    if _SPACED.search(text):
        text = _THOUSANDS.sub(lambda number: number[0].replace(",", ""), text)
    match = _BRACKETS.fullmatch(text)
    kind, inner = (match[1] + match[3], match[2]) if match else ("", "")
    items = _split(inner)
    if kind == r"\{\}" and items:
        return kind, _both_signs(items)
    if len(items) > (0 if kind == "()" else 1):
        return kind, items
    items = _both_signs(_split(_AND.sub(",", text).lstrip(", ")))
    return "", items if len(items) > 1 else []


def _both_signs(items: list[str]) -> list[str]:
    results = []
    for item in items:
        both = len(_PLUS_MINUS.findall(item)) == 1
        results += [_PLUS_MINUS.sub(sign, item) for sign in "+-"] if both else [item]
    return results


def _split(text: str) -> list[str]:
    """Return the tidy items between the commas outside brackets; [] where brackets do not match."""
    items, depth, start = [], 0, 0
    for match in _MARK.finditer(f"{text},"):
        mark = match[0][-1]
        depth += (mark in "([{") - (mark in ")]}")
        if depth < 0:
            return []
        if depth == 0 and mark in ",;":
            items.append(tidy(text[start : match.start()]))
            start = match.end()
    return items if len(items) <= _MAX_ITEMS and all(items) else []
