"""Docstrings, comments, messages and pages are in plain English, by rules that a program can check.

AGENTS.md has the rules. Code, formulas and tables are left out: their words are not sentences.
"""

import ast
import io
import re
import runpy
import tokenize
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(
    p for room in ("rlx", "rlx_torch") for p in (ROOT / room).rglob("*.py") if "_pb2" not in p.name
)
NAMED = ("README.md", "AGENTS.md", "CONTRIBUTING.md")
PAGES = sorted([*(ROOT / name for name in NAMED), *(ROOT / "docs").rglob("*.md")])
WORDS, COLONS = 25, 1  # at most, in a sentence
OPENINGS = ("What", "Who", "Whose", "That", "Those", "Nobody")
BANNED = re.compile(
    r"\b(told|dealt|is said|are said|is of|are of|in words|comes? of it|for want of|so many|beside"
    r"|tutors?|what is more|of old|hear of|lets? go of|ask(ed|s)? of|alone)\b",
    re.I,
)


class Text(NamedTuple):
    """Prose, and the line at which it begins."""

    line: int
    words: str


def of_python(source: str) -> list[Text]:
    """Return the docstrings, comments and messages of errors of a file."""
    texts = []
    for node in ast.walk(ast.parse(source)):
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        if isinstance(node, documented) and (doc := ast.get_docstring(node)):
            texts.append(Text(node.body[0].lineno, doc))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("UserError", "say"):
            texts += [Text(node.lineno, message(a).replace("\n", "\n\n")) for a in node.args]
    comments: list[Text] = []
    end = 0  # the line of the last comment that stands by itself
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or re.match(r"# ?(fmt|type|noqa|pragma|!)", token.string):
            continue
        row, words = token.start[0], token.string.lstrip("# ")
        by_itself = not token.line[: token.start[1]].strip()
        if by_itself and end == row - 1:
            comments[-1] = Text(comments[-1].line, f"{comments[-1].words}\n{words}")
        else:
            comments.append(Text(row, words))
        end = row if by_itself else 0
    return texts + comments


def message(node: ast.expr) -> str:
    """Return the text of a string or f-string, its values as `x`."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(
            message(part) if isinstance(part, ast.Constant) else "x" for part in node.values
        )
    return ""


def of_page(source: str) -> list[Text]:
    """Return the paragraphs of a page in Markdown, without code, tables and headings."""
    source = re.sub(r"^```.*?^```$", lambda m: re.sub(r".", "", m[0]), source, flags=re.S | re.M)
    line, texts = 1, []
    for block in re.split(r"(?<=\n)\s*\n", source):
        kept = [w for w in block.splitlines() if not re.match(r"\s*(\||#|!\[|<|    )", w)]
        texts.append(Text(line, "\n".join(kept)))
        line += block.count("\n") + 1
    return texts


def sentences(text: str) -> list[str]:
    """Return the sentences of a text; an item of a list or of `Args` is one or more of its own."""
    text = re.sub(r"``?[^`]*``?", "x", text)  # code
    text = re.sub(r"\]\([^)]*\)", "]", text)
    text = re.sub(r"\b(e\.g|i\.e|et al|eq|Eq|sec|Sec|Fig|vs|cf)\.", r"\1", text)
    found = []
    for block in re.split(r"\n\s*\n", text):
        indent = [len(w) - len(w.lstrip()) for w in block.splitlines() if w.strip()]
        if indent and min(indent) >= 4:  # a formula or an example
            continue
        block = re.sub(r"^\s*(?:[-*•]|\d+\.)\s+", "\x00", block, flags=re.M)
        block = re.sub(r"^(Args|Returns|Raises|Yields|Attributes):", "\x00", block, flags=re.M)
        block = re.sub(r"^ {2}[\w*, ]+:(?= )", "\x00", block, flags=re.M)
        block = re.sub(r"(?<=[.;]) [\w, ]{1,40}: ", "\x00", block)  # `a: …; b: …`
        for part in block.split("\x00"):
            found += re.split(r"(?<=[.;!?])[\"')*]*\s+", " ".join(part.split()))
    return [s for s in found if s]


def faults(text: str) -> list[str]:
    """Return how a text breaks the rules."""
    found = []
    for sentence in sentences(text):
        words = len(re.findall(r"[A-Za-z][\w'’-]*", sentence))
        if words > WORDS:
            found.append(f"{words} words: {sentence}")
        if len(re.findall(r":(?=\s)", sentence)) > COLONS:
            found.append(f"two colons: {sentence}")
        if sentence.startswith(tuple(f"{word} " for word in OPENINGS)):
            found.append(f"begins with {sentence.split()[0]}: {sentence}")
        if banned := BANNED.search(sentence):
            found.append(f"{banned[0]!r}: {sentence}")
    return found


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("What a user sees.", "begins with What"),
        ("Servers that the file tells of are dealt over hosts.", "'dealt'"),
        ("Weights: of two kinds: sent, and kept.", "two colons"),
        ("One " + "very " * 25 + "long sentence.", "28 words"),
        ("Fine. Whose key it is stands there.", "begins with Whose"),
    ],
)
def test_a_fault_is_seen(text, fault):
    assert [found.partition(":")[0] for found in faults(text)] == [fault]
    assert faults("Return the sum.\n\nArgs:\n  x: [B, T] float32, nats.\n\n    E = m: c: d\n") == []


@pytest.mark.parametrize("path", [*SOURCES, *PAGES], ids=lambda p: p.relative_to(ROOT).as_posix())
def test_prose_is_plain(path):
    texts = (of_page if path.suffix == ".md" else of_python)(path.read_text())
    wrong = [f"{path.name}:{text.line}: {fault}" for text in texts for fault in faults(text.words)]
    assert not wrong, "\n".join(wrong)


def test_the_generated_reference_of_the_config_is_plain():
    page = runpy.run_path(str(ROOT / "docs/config_page.py"))["page"]()
    assert [fault for text in of_page(page) for fault in faults(text.words)] == []
