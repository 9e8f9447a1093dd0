r"""The final answer of a free text, and one way to write what can be written in many.

    completion ─ final_answers ─▶ `\dfrac12\text{ cm}.` ─ tidy ─▶ `\frac{1}{2}\text{ cm}`

All of it is linear in the text, and nothing raises on any text.
"""

import re
from typing import Any

from rlx.rewards import numbers

MAX_LENGTH = 1000  # characters of a final answer; a longer one is compared as it stands
_TAIL = 4000  # characters at a text's end in which an answer without a box is looked for
_WHOLE = 100  # characters up to which a text may be nothing but its answer

_OPEN_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_JOINT = re.compile(  # between boxes that make one answer: `\boxed{2} and \boxed{3}`
    r"[\s$.\\()\[\]]*(?:,|;|\band\b|\bor\b|\\text\s*\{\s*,?\s*(?:and|or)\s*\})"
    r"(?:[\s$,.\\()\[\]]|\bx\s*=|\band\b|\bor\b)*",
    re.IGNORECASE,
)
_PHRASE = re.compile(
    r"(?:\banswer\b[\s*_]*(?:is|:|=)|^[*_]*A[*_]*:)[\s*_:]*(?:the\s+)?",
    re.IGNORECASE | re.MULTILINE,
)
_ANNOTATION = re.compile(r"<<[^<>\n]{0,200}>>")  # a calculator's, between a sum and its result
_SENTENCE_END = re.compile(r"[.!?](?:\s|$)|\n")
# `$…$`, `$$…$$`, `\(…\)`, `\[…\]`; not the two signs of `$5 and $7` or `$3*5=$15`
_MATH = re.compile(
    r"(?<!\\)\$\$(?P<a>[^$]{1,1000})\$\$"
    r"|(?<![\\\d])\$(?!\s)(?P<b>(?:[^$\\]|\\.){1,1000})(?<![\s=+*/(-])\$(?!\.?\d)"
    r"|\\\((?P<c>(?:(?!\\\().){1,1000}?)\\\)|\\\[(?P<d>(?:(?!\\\[).){1,1000}?)\\\]",
    re.DOTALL,
)
_TEXT = re.compile(r"\\text\s*\{[^{}]*\}")
_ONLY_WORDS = re.compile(r"[^\W\d_]{2,}(?:\s+[^\W\d_]+)*")
_ASIDE = re.compile(r",\s|\b(?:because|since|as|for|so|which|and not|not)\b")
_PROSE = re.compile(r"(?<![\\A-Za-z{])[A-Za-z]{3,}\s+[A-Za-z]{2,}")

_CHARACTERS = {
    **{chr(0xFF01 + i): chr(0x21 + i) for i in range(94)},  # full-width forms
    **dict.fromkeys("\u2212\u2013\u2012\u2010\u2011\ufe63", "-"),
    **dict.fromkeys("\u00a0\u2009\u202f\u2002\u2003\u200a\u3000\u2005", " "),
    **dict.fromkeys("\u200b\u200c\u200d\ufeff\u2060", ""),
    **dict.fromkeys("\u2018\u2019\u02bc", "'"), **dict.fromkeys("\u201c\u201d", '"'),
    "×": "\\times ", "·": "\\cdot ", "⋅": "\\cdot ", "÷": "/", "⁄": "/", "∕": "/", "π": "\\pi ",
    "∞": "\\infty ", "≤": "\\le ", "≥": "\\ge ", "≠": "\\ne ", "°": "^\\circ ", "∪": "\\cup ",
    "∩": "\\cap ", "∈": "\\in ", "±": "\\pm ", "∅": "\\emptyset ", "θ": "\\theta ",
    "α": "\\alpha ", "β": "\\beta ", "λ": "\\lambda ", "ℝ": "\\mathbb{R}", "∗": "*",
}  # fmt: skip
_TRANSLATION = str.maketrans(_CHARACTERS)
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
_POWER = re.compile("[⁰¹²³⁴-⁹⁻⁺]+")
_REWRITES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"√\s*([0-9]+|[A-Za-z])", r"\\sqrt{\1}"),
        (r"√", r"\\sqrt "),
        (r"(?<=[0-9])\s?(?=[½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞])", " "),
        (r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|limits|rm)(?![A-Za-z])", ""),
        (r"^\s*(?:\\(?:approx|sim)(?![A-Za-z])|≈)", ""),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"\\(?:boxed|fbox)\s*(?=\{)", ""),
        (
            r"\\(?:text(?:bf|it|rm|normal)|math(?:rm|bf|it|sf)|mbox|operatorname)\*?\s*\{",
            r"\\text{",
        ),
        (r"\\text\s*\{\s*\}", ""),
        (r"(?<=[0-9])(?:\{,\}|\\[,!;: ]|\{\\[,!]\})\s?(?=[0-9]{3}(?![0-9]))", ","),
        (r"(?<=[0-9]),\\!(?=[0-9])", ","),
        (r"(?<!\\)\\[,!;: ]|\\q?quad(?![A-Za-z])|~", " "),
        (r"\\([$%#&_])", r"\1"),
        (r"\\frac\s*([0-9])\s*([0-9])", r"\\frac{\1}{\2}"),
        (r"\\frac\s*([0-9])\s*\{", r"\\frac{\1}{"),
        (r"(\\frac\s*\{[^{}]*\})\s*([0-9])", r"\1{\2}"),
        (r"\\?(?<![A-Za-z])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"\\sqrt\s*([0-9])", r"\\sqrt{\1}"),
        (r"\\leq(?:slant)?(?![A-Za-z])", r"\\le"),
        (r"\\geq(?:slant)?(?![A-Za-z])", r"\\ge"),
        (r"\\neq(?![A-Za-z])", r"\\ne"),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"\\varnothing(?![A-Za-z])|\\\{\s*\\\}", r"\\emptyset"),
        (r"\^\s*\{\s*\\circ\s*\}|\\degree(?![A-Za-z])", r"^\\circ"),
        (r"(?<![\w}\])])\+\s*\\infty", r"\\infty"),
        (r"(?<![\\A-Za-z])(sqrt|pi|sin|cos|tan|log|ln|infty)(?![A-Za-z])", r"\\\1"),
        (r"(?<![\\A-Za-z])infinity(?![A-Za-z])", r"\\infty"),
    )
)
_EDGES = " \t\r\n*`.,;:"
_PAIRS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))


def final_answers(text: str) -> tuple[str, ...]:
    r"""The text's final answer, as it is written; several readings where no rule tells, else none.

    The last closed box (boxes joined by a comma, "and" or "or" are one answer); else what follows
    the last `####`; else the last "answer is" or line with "A:" in front; else the last `$…$`, or
    the last number on a line behind it; else the whole text where it is short, or its last
    number. A text whose only box is still open was cut off: no answer.
    """
    text = _ANNOTATION.sub("", text)
    box = _joined_boxes(text)
    if box is not None:
        return (box,)
    if _OPEN_BOX.search(text):
        return ()
    if "####" in text:
        line = text.rpartition("####")[2].strip()[: MAX_LENGTH + 1].split("\n", 1)[0]
        if line.strip():
            return (line,)
    tail = text[-_TAIL:]
    stated = _stated(tail)
    if stated and not _ONLY_WORDS.fullmatch(stated[0]):
        return stated
    formula, behind = _last_formula(tail)
    if formula:
        later = numbers.last_number(behind.partition("\n")[2])  # on a line of its own
        return (*stated, later or formula)
    if stated:
        return stated
    whole = (tail,) if len(text.strip()) <= _WHOLE and text.strip() else ()
    number = numbers.last_number(tail)
    return (*whole, number) if number else whole


def reference(answer: Any, solution: Any = None) -> str | None:
    r"""The answer a dataset row asks for, as it is written; None where the row has none.

    Args:
      answer: the expression alone, a list of expressions, or a solution with a `\boxed{…}`, a
        `####` or, if it is long, a `$…$` in it. Empty or None: `solution` is read.
      solution: a text with a `\boxed{…}`.
    """
    if isinstance(answer, list | tuple):
        answer = ", ".join(str(part) for part in answer)
    text = "" if answer is None else str(answer).strip()
    if not text:
        return None if solution is None else (_joined_boxes(str(solution)) or "").strip() or None
    box = _joined_boxes(text)
    if box is not None:
        return box.strip() or None
    if "####" in text:
        return text.rpartition("####")[2].strip() or None
    return (_PROSE.search(text) and _last_formula(text[-_TAIL:])[0]) or text


def tidy(text: str) -> str:
    r"""`text` with one spelling for each thing: no `\left`, `\dfrac`, `$`, odd spaces, ending dot.

    A text above MAX_LENGTH characters is only stripped.
    """
    if len(text) > MAX_LENGTH:
        return text.strip()
    text = _POWER.sub(lambda power: f"^{{{power[0].translate(_SUPERSCRIPTS)}}}", _bare(text))
    text = text.translate(_TRANSLATION)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    return _bare(text.translate(numbers.VULGAR))


def compact(text: str) -> str:
    """`text` without spaces and without braces around a single argument, for comparing as text."""
    text = re.sub(r"([_^])\{(-?\w+)\}(?!\w)", r"\1\2", "".join(text.split()))
    return re.sub(r"\\text\{([^{}]*)\}", r"\1", text)


def _bare(text: str) -> str:
    """Without edges that say nothing: spaces, emphasis, dollars, braces around the whole."""
    for _ in range(8):
        before = text
        text = text.strip().lstrip("*`,;: ").rstrip(_EDGES)
        if text.endswith("\\"):  # what is left of a `\ ` or `\,`
            text = text[:-1]
        for opening, closing in _PAIRS:
            inner = text[len(opening) : -len(closing)]
            if text.startswith(opening) and text.endswith(closing) and opening not in inner:
                text = inner
                break
        if text.startswith("{") and closes(text, 0) == len(text) - 1:
            text = text[1:-1]
        if text == before:
            break
    return text


def closes(text: str, at: int) -> int:
    r"""Where the bracket that opens at `text[at]` closes, any of `)]}` and `\}` alike; −1: never.

    Half-open intervals close otherwise than they open.
    """
    depth = 0
    while at < len(text):
        if text[at] == "\\" and at + 1 < len(text) and text[at + 1] not in "{}":
            at += 2
            continue
        depth += (text[at] in "([{") - (text[at] in ")]}")
        if depth == 0 and text[at] in ")]}":
            return at
        at += 1
    return -1


def _joined_boxes(text: str) -> str | None:
    found = numbers.boxes(text)
    if not found:
        return numbers.last_box(text)
    start, first, end = found[-1]
    parts = [text[first:end]]
    for earlier, content, stop in reversed(found[-16:-1]):
        if stop >= start:  # a box inside
            continue
        if start - stop > 40 or not _JOINT.fullmatch(text, stop + 1, start):
            break
        parts.append(text[content:stop])
        start = earlier
    return ", ".join(reversed(parts)) if len(set(parts)) > 1 else parts[0]


def _stated(text: str) -> tuple[str, ...]:
    """What follows the last "answer is" or "answer:", to the end of its sentence."""
    found = None
    for match in _PHRASE.finditer(text):
        found = match
    if not found:
        return ()
    rest = text[found.end() :]
    formula = _MATH.match(rest)
    if formula:
        return (formula[formula.lastgroup or 0],)
    end = _SENTENCE_END.search(rest)
    sentence = (rest[: end.start()] if end else rest)[: MAX_LENGTH + 1].strip()
    if not _PROSE.search(sentence):
        return (sentence,) if sentence else ()
    claim = _ASIDE.split(sentence, maxsplit=1)[0]
    inner = _last_formula(claim)[0] or numbers.last_number(claim)
    return (sentence, inner) if inner else (sentence,) if len(sentence) <= _WHOLE else ()


def _last_formula(text: str) -> tuple[str, str]:
    """The last formula that is no prose, and what stands behind it; both empty if there is none."""
    found = "", ""
    for match in _MATH.finditer(text):
        content = match[match.lastgroup or 0].strip()
        if content and not _PROSE.search(_TEXT.sub("", content)):
            found = content, text[match.end() :]
    return found
