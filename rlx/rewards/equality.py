r"""Whether two final answers are the same, whatever their dress.

Cheap and exact ways come first, each of which knows when it is not its turn:

    same text ─▶ choice (A) ─▶ numbers ─▶ words ─▶ matrices, tuples, intervals, sets, lists
    (their elements by the same steps) ─▶ math-verify, within bounds

Nothing here raises, and all of it ends within `symbolic.CPU_SECONDS` of processor time.
"""

import re
from typing import NamedTuple

from rlx.rewards import quantity, symbolic
from rlx.rewards.answers import MAX_LENGTH, closes, compact, tidy

_MAX_DEPTH = 4  # of tuples in sets in lists
_MAX_ITEMS = 16  # more than that is compared as text

_CHOICE = re.compile(
    r"(?i:choice|option|answer)?\s*(?:\(([A-Ja-j])\)(?![\w(^/+-])|([A-J])(?=[.):]|$))(.*)",
    re.DOTALL,
)
_NAME = re.compile(
    r"((?:[A-Za-z]|\\[A-Za-z]+)(?:\s*_\s*(?:\w|\{[^{}]{1,9}\})|'|\s*\([A-Za-z]\))?)"
    r"\s*(?:=|\\in(?![A-Za-z]))\s*(?=[^=])"
)
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_WORDS = re.compile(r"[^\W\d_]+(?:[\s,'-]+[^\W\d_]+)*")
_SHORT_WORDS = {"yes", "no", "true", "false", "even", "odd", "none", "both"}
_AND = re.compile(
    r"(?<![A-Za-z\\])(?:,\s*)?(?:and|or)(?![A-Za-z])|(?:,\s*)?\\text\s*\{\s*,?\s*(?:and|or)\s*\}"
)
_PLUS_MINUS = re.compile(r"\\pm(?![A-Za-z])")
_MATRIX = re.compile(
    r"\\begin\s*\{([pbBvV]?matrix|array)\}(?:\s*\{[lcr| ]*\})?(.*)\\end\s*\{\1\}", re.DOTALL
)
_UNIT_BEHIND = re.compile(
    r"(?<=[^\s{(\[,])(\s*\\text\s*\{[^{}]*\}(?:\s*\^\s*\{?[1-4]\}?)?|\^\\circ)$"
)


class _Parts(NamedTuple):
    """A composed answer: kind is its brackets, "list" or "union"; a matrix's kind has its shape."""

    kind: str
    items: tuple[str, ...]


def equal(gold: str, got: str) -> bool:
    """Whether `got` says what `gold` says; False too where that cannot be found out in time."""
    if len(gold) > 4 * MAX_LENGTH or len(got) > 4 * MAX_LENGTH:
        return gold.strip() == got.strip() != ""
    return symbolic.limited(_same, tidy(gold), tidy(got), 0)


def _same(gold: str, got: str, depth: int) -> bool:
    if not gold or not got:
        return False
    if compact(gold) == compact(got):
        return True
    if len(gold) > MAX_LENGTH or len(got) > MAX_LENGTH:
        return False
    letter = _choice(gold)
    if letter:
        return _choice(got) == letter
    (name, value), (got_name, got_value) = _split_name(gold), _split_name(got)
    if len(name) == len(got_name) == 1 and name != got_name:  # y = 5 is not x = 5
        return False
    if (name or "=" not in gold) and (got_name or "=" not in got):  # else equations
        gold, got = value, got_value
    words, other = _words(gold), _words(got)
    if words:
        return words == other or (words in _SHORT_WORDS and other.split(" ")[0] == words)
    gold, got = (_TEXT.sub(r"\1", t).strip() if _TEXT.fullmatch(t) else t for t in (gold, got))
    wanted, found = quantity.read(gold), quantity.read(got)
    if wanted and found:
        return quantity.same(wanted, found)
    if depth < _MAX_DEPTH:
        verdict = _same_parts(gold, got, depth)
        if verdict is not None:
            return verdict
    return _symbolic(gold, got)


def _symbolic(gold: str, got: str) -> bool:
    """Without units and currency, which are not math-verify's to judge."""
    plain = [_UNIT_BEHIND.sub("", text).lstrip("$£€¥ ") for text in (gold, got)]
    return symbolic.equal(*plain)


def _choice(text: str) -> str:
    """The letter of a multiple choice answer: `A`, `(a)`, `A.`, `(A) 42`; else empty."""
    match = _CHOICE.fullmatch(_unwrapped(text))
    return (match[1] or match[2]).upper() if match else ""


def _unwrapped(text: str) -> str:
    return _TEXT.sub(r"\1", text).strip()


def _split_name(text: str) -> tuple[str, str]:
    """`x = 5` as (`x`, `5`); without a single name in front, ("", text)."""
    match = _NAME.match(text)
    if not match or "=" in text[match.end() :]:
        return "", text
    return compact(match[1]), text[match.end() :].strip()


def _words(text: str) -> str:
    r"""The text as lower-case words, where it is words and no formula; else empty.

    It is, if some of it stands in `\text`, has four letters, or is one of a few short words.
    """
    inner = _unwrapped(text).strip(" .,;:!\"'()")
    if not _WORDS.fullmatch(inner):
        return ""
    words = re.findall(r"[^\W\d_]+", inner.casefold())
    sure = "\\text" in text or any(len(word) > 3 or word in _SHORT_WORDS for word in words)
    return " ".join(word for word in words if word not in ("the", "a", "an")) if sure else ""


def _same_parts(gold: str, got: str, depth: int) -> bool | None:
    """Element by element; None where it takes more than that to know."""
    wanted, found = _parts(gold), _parts(got)
    if wanted is None and found is None:
        return None
    if wanted and wanted.kind == "()" and len(wanted.items) == 1:
        return _same(tidy(wanted.items[0]), got, depth + 1)
    if found and found.kind == "()" and len(found.items) == 1:
        return _same(gold, tidy(found.items[0]), depth + 1)
    if wanted is None or found is None:
        single = wanted or found
        if single and single.kind == "{}" and len(single.items) == 1:
            return _same(
                tidy(single.items[0]) if wanted else gold,
                tidy(single.items[0]) if found else got,
                depth + 1,
            )
        return None
    ordered = _ordered(wanted, found)
    if ordered is None or len(wanted.items) != len(found.items):
        return False
    left, right = ([tidy(item) for item in parts.items] for parts in (wanted, found))
    if ordered:
        return all(_same(a, b, depth + 1) for a, b in zip(left, right, strict=True))
    return _same_unordered(left, right, depth + 1)


def _ordered(gold: _Parts, got: _Parts) -> bool | None:
    """Whether the order counts; None where the two are different things."""
    kinds = {gold.kind, got.kind}
    if kinds <= {"list", "{}"}:
        return False
    if kinds == {"union"}:
        return False
    if gold.kind == got.kind or kinds == {"list", "()"}:
        return True
    return None


def _same_unordered(gold: list[str], got: list[str], depth: int) -> bool:
    left = list(got)
    for item in gold:
        for index, other in enumerate(left):
            if _same(item, other, depth):
                del left[index]
                break
        else:
            return False
    return True


def _parts(text: str) -> _Parts | None:
    """What the text is composed of; None for a single expression."""
    matrix = _MATRIX.fullmatch(text)
    if matrix:
        return _matrix(matrix[1], matrix[2])
    union = _split(text, ("\\cup",))
    if len(union) > 1:
        return _Parts("union", tuple(union)) if len(union) <= _MAX_ITEMS else None
    opening = next((b for b in ("\\{", "(", "[") if text.startswith(b)), "")
    if opening and closes(text, 0) == len(text) - 1:
        braces = opening == "\\{"
        if braces != text.endswith("\\}"):
            return None
        inner = text[len(opening) : -2 if braces else -1]
        items = _split(inner, (",", ";"))
        if len(items) > _MAX_ITEMS or not all(items) or (len(items) == 1 and opening == "["):
            return None
        return _Parts("{}" if braces else opening + text[-1], tuple(items))
    items = _plus_minus(_split(_AND.sub(",", text), (",", ";")))
    if len(items) < 2 or len(items) > _MAX_ITEMS or not all(items):
        return None
    return _Parts("list", tuple(items))


def _plus_minus(items: list[str]) -> list[str]:
    r"""With `1 \pm 2` as `1 + 2` and `1 - 2`."""
    result = []
    for item in items:
        if len(_PLUS_MINUS.findall(item)) == 1:
            _, value = _split_name(item)
            result += [_PLUS_MINUS.sub(sign, value) for sign in "+-"]
        else:
            result.append(item)
    return result


def _matrix(kind: str, body: str) -> _Parts | None:
    rows = [row for row in re.split(r"\\\\(?:\s*\[[^\]]*\])?", body) if row.strip()]
    cells = [[cell.strip() for cell in row.split("&")] for row in rows]
    items = [cell for row in cells for cell in row]
    if not cells or len({len(row) for row in cells}) > 1 or len(items) > 4 * _MAX_ITEMS:
        return None
    name = "determinant" if kind[0] in "vV" and kind != "matrix" else "matrix"
    return _Parts(f"{name} {len(cells)}x{len(cells[0])}", tuple(items))


def _split(text: str, separators: tuple[str, ...]) -> list[str]:
    """`text` at those separators that stand in no brackets; stripped."""
    parts, depth, start, at = [], 0, 0, 0
    while at < len(text):
        found = depth == 0 and next((s for s in separators if text.startswith(s, at)), None)
        if found:
            parts.append(text[start:at].strip())
            at += len(found)
            start = at
            continue
        if text[at] == "\\" and text[at + 1 : at + 2] not in ("{", "}"):
            at += 2
            continue
        depth += (text[at] in "([{") - (text[at] in ")]}")
        at += 1
    parts.append(text[start:].strip())
    return parts
