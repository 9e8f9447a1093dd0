r"""Decide whether two final answers are the same, however they are written.

Cheap and exact ways come first; each decides or passes on:

    same text ─▶ choice (A) ─▶ words ─▶ numbers with units ─▶ lists of such ─▶ math-verify

math-verify alone reads `5t` as 5, 1e-7 as 2e-7, 5 cents as 5 dollars and `\{1, 1, 2\}` as
`\{1, 2, 2\}`; of choices and words it makes products of letters, and a tuple takes it 100 times as
long. Nothing here raises; math-verify is stopped after `symbolic.CPU_SECONDS` of processor time,
and the rest takes less, whatever the text.
"""

import re

from rlx.rewards import numbers, symbolic
from rlx.rewards.answers import MAX_LENGTH, compact, tidy

_MAX_DEPTH = 4  # of tuples in sets in lists
_MAX_ITEMS = 16  # of a list; a longer one is compared as text

_CHOICE = re.compile(
    r"(?i:choice|option|answer)?\s*(?:\(([A-Ja-j])\)(?![\w(^/+-])|([A-J])(?=[.):]|$)).*",
    re.DOTALL,
)
_NAME = re.compile(
    r"((?:[A-Za-z]|\\[A-Za-z]+)(?:\s*_\s*(?:\w|\{[^{}]{1,9}\})|'|\s*\([A-Za-z]\))?)"
    r"\s*(?:=|\\in(?![A-Za-z]))\s*(?=[^=])(?!.*=)"
)
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_WORDS = re.compile(r"[^\W\d_]+(?:[\s,'-]+[^\W\d_]+)*")
_SHORT_WORDS = {"yes", "no", "true", "false", "even", "odd", "none", "both"}
_AND = re.compile(
    r"(?<![A-Za-z\\])(?:,\s*)?(?:and|or)(?![A-Za-z])|(?:,\s*)?\\text\s*\{\s*,?\s*(?:and|or)\s*\}"
)
_MARK = re.compile(r"\\[{}]|[][(){},;]")
_BRACKETS = re.compile(r"(\\\{|[(\[])(.*)(\\\}|[)\]])", re.DOTALL)
_UNIT_BEHIND = re.compile(
    r"(?<=[^\s{(\[,])(\s*\\text\s*\{[^{}]*\}(?:\s*\^\s*\{?[1-4]\}?)?|\^\\circ)$"
)


def equal(gold: str, got: str) -> bool:
    """Return whether `got` says what `gold` says; False too if that takes too long to find out."""
    if len(gold) > 4 * MAX_LENGTH or len(got) > 4 * MAX_LENGTH:
        return gold.strip() == got.strip() != ""
    gold, got = tidy(gold), tidy(got)
    verdict = _decide(gold, got)
    if verdict is not None:
        return verdict
    (kind, items), (other, others) = _items(gold), _items(got)
    if items and others and {kind, other} == {"", "()"}:  # else a list is a set to math-verify
        gold, got = gold if kind else f"({gold})", got if other else f"({got})"
    return symbolic.equal(_plain(gold), _plain(got))


def _decide(gold: str, got: str, depth: int = 0) -> bool | None:
    """Return whether two tidy answers are the same, None if it takes math-verify to know."""
    if not gold or not got:
        return False
    if compact(gold) == compact(got):
        return True
    if len(gold) > MAX_LENGTH or len(got) > MAX_LENGTH:
        return False
    if letter := _choice(gold):
        return _choice(got) == letter
    gold, got = _without_names(gold, got)
    words, other = _words(gold), _words(got)
    if words:
        return words == other or (words in _SHORT_WORDS and other.split(" ")[0] == words)
    gold, got = _unwrapped(gold), _unwrapped(got)
    wanted, found = numbers.read(gold), numbers.read(got)
    if wanted and found:
        return numbers.same(wanted, found)
    return _decide_lists(gold, got, depth)


def _unwrapped(text: str) -> str:
    return _TEXT.sub(r"\1", text).strip() if _TEXT.fullmatch(text) else text


def _plain(text: str) -> str:
    """Return the text without a unit or a sign of currency, of which math-verify makes factors."""
    return _UNIT_BEHIND.sub("", _unwrapped(text)).lstrip("$£€¥ ")


def _choice(text: str) -> str:
    """Return the letter of a multiple choice answer: `A`, `(a)`, `A.`, `(A) 42`; else ""."""
    match = _CHOICE.fullmatch(_TEXT.sub(r"\1", text).strip())
    return (match[1] or match[2]).upper() if match else ""


def _without_names(gold: str, got: str) -> tuple[str, str]:
    """Return both answers without an `x =` in front, unless they name two variables."""
    matches = [_NAME.match(text) for text in (gold, got)]
    letters = {match[1] for match in matches if match and len(match[1]) == 1}
    equation = any("=" in text and not m for text, m in zip((gold, got), matches, strict=True))
    if equation or len(letters) > 1:
        return gold, got
    return _NAME.sub("", gold, count=1), _NAME.sub("", got, count=1)


def _words(text: str) -> str:
    r"""Return the text as lower-case words, if it is words and no formula; else "".

    It is, if some of it stands in `\text`, has four letters, or is one of a few short words.
    """
    inner = _TEXT.sub(r"\1", text).strip(" .,;:!\"'()")
    words = re.findall(r"[^\W\d_]+", inner.casefold())
    sure = "\\text" in text or any(len(word) > 3 or word in _SHORT_WORDS for word in words)
    if not sure or not _WORDS.fullmatch(inner):
        return ""
    return " ".join(word for word in words if word not in ("the", "a", "an"))


def _decide_lists(gold: str, got: str, depth: int) -> bool | None:
    """Return whether two tuples, sets or lists agree, item by item; None as `_decide`."""
    (kind, wanted), (other, found) = _items(gold), _items(got)
    if not wanted or not found or depth == _MAX_DEPTH or "\\pm" in gold + got:
        return None
    kinds = {kind, other}
    unordered = kinds <= {"", r"\{\}"}
    if len(wanted) != len(found) or not (unordered or len(kinds) == 1 or kinds == {"", "()"}):
        return False
    for item in wanted:
        rivals = found if unordered else found[:1]
        verdicts = [_decide(item, rival, depth + 1) for rival in rivals]
        if True not in verdicts:
            return None if None in verdicts else False
        del found[verdicts.index(True)]
    return True


def _items(text: str) -> tuple[str, list[str]]:
    """Return the brackets and the items of a tuple, set or list; no items for anything else."""
    match = _BRACKETS.fullmatch(text)
    inner = _split(match[2]) if match else []
    if match and inner:
        return match[1] + match[3], inner
    return "", _split(_AND.sub(",", text))


def _split(text: str) -> list[str]:
    """Return the tidy items between the commas outside brackets; [] if fewer than two."""
    items, depth, start = [], 0, 0
    for match in _MARK.finditer(f"{text},"):
        mark = match[0][-1]
        depth += (mark in "([{") - (mark in ")]}")
        if depth < 0:
            return []
        if depth == 0 and mark in ",;":
            items.append(tidy(text[start : match.start()]))
            start = match.end()
    return items if 1 < len(items) <= _MAX_ITEMS and all(items) else []
