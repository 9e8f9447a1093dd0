r"""Find the final answer in a free text, and write it in one of its many spellings.

    completion ─ final_answers ─▶ `\dfrac12\text{ cm}.` ─ tidy ─▶ `\dfrac12\text{ cm}`

math-verify's own extraction misses answers such as `(B)` and `A: B`, and joins boxes of which the
last corrects the one before. Time is linear in the text, and no text raises.
"""

import re
from fractions import Fraction
from typing import Any

from rlx.rewards import numbers

MAX_LENGTH = 1000  # characters of a final answer; a longer one is compared as it stands
_TAIL = 4000  # characters at a text's end in which an answer without a box is looked for
_WHOLE = 100  # characters up to which a text may be nothing but its answer

_BRACES = re.compile(r"(?P<box>\\(?:boxed|fbox)\s*\{)|\\[{}]|\{|\}")
_SIMPLE_BOX = re.compile(r"\\boxed\s+([^\s{}\\$]+)")
_JOINT = re.compile(  # between boxes that make one answer: `\boxed{2} and \boxed{3}`
    r"[\s$.\\()\[\]]*(?:,|;|\band\b|\bor\b|\\text\s*\{\s*,?\s*(?:and|or)\s*\})"
    r"(?:[\s$,.\\()\[\]]|\bx\s*=|\b(?:and|or|maybe|perhaps|possibly|else)\b)*",
    re.IGNORECASE,
)
_THOUGHT = r"(?:think(?:ing)?|thought|reasoning)>"
_ADVERBS = (  # of "the answer is therefore", "the answer must then be"
    r"(?:(?:(?-i:[a-z]+ly)(?=[\s*_:,]+[^\s*_:,.])|therefore|thus|hence|so|then|just|about|around"
    r"|quite|indeed|now|equal\s+to|given\s+by|(?:found|known)\s+to\s+be)\b[\s*_:,]*)*"
)
_PHRASE = re.compile(
    rf"(?:\banswers?\b[\s*_,]*{_ADVERBS}"
    rf"(?:is|are|:|=|equals\b|(?:should|must|would|will)\s+{_ADVERBS}be\b)|^[*_]*A[*_]*:|<answer>)[\s*_:,]*{_ADVERBS}(?:the\s+)?",
    re.IGNORECASE | re.MULTILINE,
)
_SUM = re.compile(r"[0-9)}%]\s*(?:[-+*/×÷]|\\times|\\cdot|\\div)\s*[-$£€(\\0-9]")
# A number is one of several by what stands behind it, or before it.
_MORE = re.compile(
    r"\s*(?:[,;*/×÷+-]|and\b|\\(?:times|cdot|div))\s*[-+$£€(]?[0-9]"
    r"|[^\n0-9]{0,30}?\bor\b[^\n0-9]{0,30}[0-9]"
)
_OR = re.compile(
    r"[0-9)}$*]\s*(?:[a-z]{1,12}\s*)?,?\s*or\s+(?:(?:maybe|perhaps|possibly|else|it|is)\s+)*"
    r"[$\\(]*(?:[a-z]\s*=\s*)?[\s$\\(*]*$",
    re.IGNORECASE,
)
_MARKER_LEAD = re.compile(  # what may stand between #### and its number
    r"(?:[^\w\n.$£€¥+-]|\.(?![0-9])|\b(?:the|final|answer|result|is|boxed|text|total)\b){0,40}",
    re.IGNORECASE,
)
_HEADING = re.compile(r"[.):]\s*[^\W\d]")  # `#### 1. First we …` numbers a section
_ANNOTATION = re.compile(r"<<[^<>\n]{0,200}>>")  # a calculator's, between a sum and its result
_SENTENCE_END = re.compile(r"[.!?](?:\s|$)|\n")
# `$…$`, `$$…$$`, `\(…\)`, `\[…\]`; not the two signs of `$5 and $7` or `$3*5=$15`
_MATH = re.compile(
    r"(?<!\\)\$\$(?P<a>[^$]{1,1000})\$\$"
    r"|(?<![\\\d])\$(?!\s)(?P<b>(?:[^$\\]|\\.){1,1000})(?<![\s=+*/(-])\$(?!\.?\d)"
    r"|\\\((?P<c>(?:(?!\\\().){1,1000}?)\\\)|\\\[(?P<d>(?:(?!\\\[).){1,1000}?)\\\]",
    re.DOTALL,
)
TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_ONLY_WORDS = re.compile(r"[^\W\d_]{2,}(?:\s+[^\W\d_]+)*")
_REASON = re.compile(r",?\s*\b(?:because|since|as|for|so|which|and not|not)\b")
_ASIDE = re.compile(rf",\s(?!(?:or|and)\b)|{_REASON.pattern}")
_LISTED = re.compile(r"\s*(?:,|,?\s*(?:or|and)\b(?:\s+(?:maybe|perhaps|possibly))?)\s*")
_FORMULA = re.compile(rf"[A-Za-z\\^=<>]|{_SUM.pattern}")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")
_PROSE = re.compile(r"(?<![\\A-Za-z{])[A-Za-z]{3,}\s+[A-Za-z]{2,}")

_REWRITES = tuple(  # for `equality`, before math-verify with rules of its own
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"(?:\\?(?<![A-Za-z])sqrt|√)\s*\(([^()]*)\)"
         r"|(?:(?<![\\A-Za-z])sqrt|√)\s*([0-9]+|[A-Za-z])", r"\\sqrt{\1\2}"),
        (r"√", r"\\sqrt "),
        (r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|limits|rm)(?![A-Za-z])", ""),
        (r"^\s*(?:\\(?:approx|sim)(?![A-Za-z])|≈)|\\(?:boxed|fbox)\s*(?=\{)"
         r"|\\(?:text)?color\s*\{\w*\}|</?answer>", ""),
        (r"\\(?:text(?:bf|it|rm|normal)|math(?:rm|bf|it|sf)|mbox|bm|boldsymbol|operatorname)\*?\s*\{",
         r"\\text{"),
        (r"(?:^|(?<=\\text\{))\s*(?:about|approximately|roughly|exactly)\s+"
         r"|\\text\{\s*(?:about|approximately|roughly|exactly)\s*\}", ""),
        (r"\\text\{\s*([ei])\s*\}", r"\1 "),
        (r"\\text\{\s*((?:arc)?(?:sin|cos|tan|cot|sec|csc)h?|ln|log|exp|gcd|lcm|max|min|det)\s*\}",
         r"\\\1 "),
        (r"(?<!\\)\\[,!;: ]|\\q?quad(?![A-Za-z])|~", " "),
        (r"\\([$%#&_])", r"\1"),
        (r"(?<![\\A-Za-z])(pi|sin|cos|tan|cot|log|ln|exp|infty)(?![A-Za-z])", r"\\\1"),
        (r"(?<![\\A-Za-z])infinity(?![A-Za-z])", r"\\infty"),
        (r"\\lbrace(?![A-Za-z])", r"\\{"),
        (r"\\rbrace(?![A-Za-z])", r"\\}"),
        (r"\\varnothing(?![A-Za-z])|\\\{\s*\\\}", r"\\emptyset"),
        (r"\\(begin|end)\s*\{array\}\s*(?:\{[lcr| ]*\})?", r"\\\1{matrix}"),
    )
)  # fmt: skip
_TIME = re.compile(
    r"(?<![0-9:.,])(1?[0-9]|0[1-9])(?::([0-5][0-9]))?\s*(\\text\{\s*)?([ap])\.?\s?m\b\.?(?(3)\s*\})",
    re.IGNORECASE,
)
_CLASS = re.compile(
    r"\\equiv\s*(-?[0-9]+)\s*\(?\s*\\?(?:text\{\s*\(?)?[pb]?mod\s*\{?\s*([1-9][0-9]*)\s*\)?\}?\)?"
)
_GROUP = re.compile(r"^\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)(?<!\\)\}$")  # one group, no more
_PAIRS = (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))


def outside_thoughts(prompt: str, completion: str, unfinished: bool = False) -> str:
    """Return the text behind the last closed thought; unless `unfinished`, before an open one."""
    text = "<think>" * prompt.rstrip().endswith("<think>") + completion  # opened by the prompt
    text = re.split(f"</{_THOUGHT}", text)[-1]
    return text if unfinished else re.split(f"<{_THOUGHT}", text, maxsplit=1)[0]


def final_answers(text: str) -> tuple[str, ...]:
    r"""Return a text's final answer as written; several readings where no rule decides.

    The last closed box (boxes joined by a comma, "and" or "or" are one answer); else what follows
    the last `####`; else the last "answer is" or line with "A:" in front; else the last `$…$`, or
    the last number on a line behind it; else the whole text where it is short, or its last
    number, unless "or" stands before it. A text whose only box is open was cut off: no answer.
    """
    text = _ANNOTATION.sub("", text)
    if (box := _joined_boxes(text)) is not None:
        return (box,)
    if any(match["box"] for match in _BRACES.finditer(text)):
        return ()
    if "####" in text:
        line = text.rpartition("####")[2].strip()[: MAX_LENGTH + 1].split("\n", 1)[0]
        if line.strip():
            return _after_answer_is(line) or (_result(line),)
    tail = text[-_TAIL:]
    stated = _after_answer_is(tail)
    if stated and not _ONLY_WORDS.fullmatch(stated[0]):
        return stated
    formula, behind = _last_formula(tail)
    if formula:
        return (*stated, _last_number(behind.partition("\n")[2]) or formula)
    if stated:
        return stated
    readings = (tail,) if 0 < len(text.strip()) <= _WHOLE else ()
    if readings and not _WORD.search(tail) and _FORMULA.search(tail):
        return readings
    return (*readings, number) if (number := _last_number(tail)) else readings


def final_number(text: str) -> Fraction | None:
    r"""Return the final number of a text: after its last `####`, else in its last box, else last.

    None when there is no number, or several: a list, a choice or a sum without its result.
    """
    for part in reversed(text.split("####")[1:]):
        line = numbers.plain(_result(part[: 2 * numbers.MAX_LENGTH].split("\n", 1)[0]))
        lead = _MARKER_LEAD.match(line)
        match = numbers.NUMBER.match(line, lead.end() if lead else 0)
        value = numbers.value(match) if match else None
        if match and value is not None and not _HEADING.match(line, match.end()):
            return None if _MORE.match(line, match.end()) else value
    box = numbers.plain(last_box(text) or "")
    for part in (box.rpartition("=")[2], box, _last_number(text) or ""):  # `x = 72` means 72
        for number in numbers.find(part):
            return None if _MORE.match(part, number.end()) else numbers.value(number)
    return None


def reference(answer: Any, solution: Any = None) -> str | None:
    r"""Return the answer of a dataset row as written; None where the row has none.

    The answer is an expression, a list of them, or a solution with a `\boxed{…}`, a `####` or, if
    it is long, a `$…$`. Empty or None: `solution` counts, a text with a `\boxed{…}`.
    """
    if isinstance(answer, list | tuple):
        answer = ", ".join(str(part) for part in answer)
    text = "" if answer is None else str(answer).strip()
    if not text:
        return None if solution is None else (_joined_boxes(str(solution)) or "").strip() or None
    if (box := _joined_boxes(text)) is not None:
        return box.strip() or None
    if "####" in text:
        return _result(text.rpartition("####")[2]).strip() or None
    return (_PROSE.search(text) and _last_formula(text[-_TAIL:])[0]) or text


def last_box(text: str) -> str | None:
    r"""Return the content of the last closed `\boxed{…}` or `\fbox{…}`, with nested braces."""
    for _, start, end in _boxes(text)[-1:]:
        return text[start:end]
    simple = _SIMPLE_BOX.findall(text)  # `\boxed 72`
    return simple[-1] if simple else None


def tidy(text: str) -> str:
    r"""Return `text` with one spelling for each thing: no `\left`, `$` or ending dot."""
    if len(text) > MAX_LENGTH:
        return text.strip()
    text = numbers.tidy(_bare(text))
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = _TIME.sub(lambda m: f"{int(m[1]) % 12 + 12 * (m[4] in 'pP')}:{m[2] or '00'}", text)
    return _bare(_CLASS.sub(lambda m: rf"\equiv {int(m[1]) % int(m[2])} \pmod{m[2]}", text))


def compact(text: str) -> str:
    """Return `text` without spaces and braces around one argument, for comparing as text."""
    text = re.sub(r"(?<=[0-9])\s+(?!\s|[0-9]{3}(?![0-9]))(?=[0-9])", ":", text)  # 1 1/2 is not 11/2
    text = re.sub(r"([_^]|mod)\{(-?\w+)\}(?!\w)", r"\1\2", "".join(text.split()))
    return re.sub(r"\\text\{([^{}]*)\}", r"\1", text)


def _bare(text: str) -> str:
    """Return `text` without spaces, emphasis, dollars and braces around the whole."""
    for _ in range(8):
        before = text
        text = text.strip().lstrip('*`",;: ').rstrip(' \t\r\n*`".,;:')
        if text.endswith("\\"):  # what is left of a `\ ` or `\,`
            text = text[:-1]
        for opening, closing in _PAIRS:
            inner = text[len(opening) : -len(closing)]
            if text.startswith(opening) and text.endswith(closing) and opening not in inner:
                text = inner
                break
        text = _GROUP.sub(r"\1", text)
        if text == before:
            break
    return text


def _boxes(text: str) -> list[tuple[int, int, int]]:
    """Return begin, content's begin and end of all closed boxes, in order of their ends."""
    stack: list[tuple[int, int] | None] = []  # a box's begin and its content's; None: other braces
    boxes = []
    for match in _BRACES.finditer(text):
        if match[0] == "}":
            opened = stack.pop() if stack else None
            if opened:
                boxes.append((*opened, match.start()))
        elif match["box"] or match[0] == "{":
            stack.append(match.span() if match["box"] else None)
    return boxes


def _joined_boxes(text: str) -> str | None:
    if not (boxes := _boxes(text)):
        return last_box(text)
    start, first, end = boxes[-1]
    parts = [text[first:end]]
    for earlier, content, stop in reversed(boxes[-16:-1]):
        if stop >= start:  # a box inside
            continue
        if start - stop > 40 or not _JOINT.fullmatch(text, stop + 1, start):
            break
        parts.append(text[content:stop])
        start = earlier
    return ", ".join(reversed(parts)) if len(set(parts)) > 1 else parts[0]


def _after_answer_is(text: str) -> tuple[str, ...]:
    """Return what follows the last "answer is" or "answer:", to the end of its sentence."""
    if not (phrases := list(_PHRASE.finditer(text))):
        return ()
    rest = text[phrases[-1].end() :]
    match = _MATH.match(rest)
    if match and not re.match(r"\s*(?:,?\s*or\b|(?:[,/]|and\b)\s*\$)", rest[match.end() :]):
        return (match[match.lastgroup or 0],)
    sentence = _SENTENCE_END.split(rest, maxsplit=1)[0][: MAX_LENGTH + 1].strip()
    if not _PROSE.search(sentence):
        return tuple(filter(None, dict.fromkeys((sentence, _REASON.split(sentence)[0]))))
    claim = _ASIDE.split(sentence, maxsplit=1)[0]
    formula, behind = ("", "") if re.search(r"\bor\b", claim) else _last_formula(claim)
    inner = formula if formula and " is " not in behind else _last_number(behind)
    return (sentence, inner) if inner else (sentence,) if len(sentence) <= _WHOLE else ()


def _last_formula(text: str) -> tuple[str, str]:
    """Return the last formula that is no prose, with others of its list, and the text behind it."""
    formula, end = "", 0
    for match in _MATH.finditer(text):
        content = match[match.lastgroup or 0].strip()
        if content and not _PROSE.search(TEXT.sub("", content)):
            listed = formula and _LISTED.fullmatch(text, end, match.start())
            formula, end = f"{formula}, {content}" if listed else content, match.end()
    return formula, text[end:]


def _last_number(text: str) -> str | None:
    """Return the last number of `text` as it is written, LaTeX made plain; None behind "or"."""
    text = numbers.plain(text)
    for last in list(numbers.find(text))[-1:]:
        if not _OR.search(text[max(0, last.start() - 60) : last.start()]):
            return last[0]
    return None


def _result(line: str) -> str:
    """Return what follows the last `=` of a line if it follows a sum and is none, else the line."""
    head, equals, tail = line.rpartition("=")
    done = equals and _SUM.search(head) and not _SUM.search(tail) and not _ASIDE.search(head)
    return tail if done else line
