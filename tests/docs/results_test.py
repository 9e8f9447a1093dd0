"""docs/results.md comes from the records, docs/troubleshooting.md quotes messages of the code."""

import ast
import re
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "docs" / "results.py"


def test_the_page_is_written_from_the_records():
    module = runpy.run_path(str(SCRIPT))
    page = module["page"]()
    assert module["PAGE"].read_text() == page, "run: python docs/results.py"
    assert "| decoupled-2 | 2 | 0.340 | 0.825 to 0.875 | 0.825 to 0.875 |" in page


def literal(node: ast.AST) -> str:
    """Return the text of a string or f-string, a NUL for each of its values."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    return "".join(p.value if isinstance(p, ast.Constant) else "\0" for p in parts)


def test_quoted_messages_are_those_of_the_code():
    nodes = [n for p in (ROOT / "rlx").rglob("*.py") for n in ast.walk(ast.parse(p.read_text()))]
    texts = "\n".join(
        literal(n)
        for n in nodes
        if isinstance(n, ast.JoinedStr)
        or (isinstance(n, ast.Constant) and isinstance(n.value, str))
    )
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "docs/troubleshooting.md").read_text(), re.M)
    quoted = [words for row in rows for words in re.findall(r"`([^`]+)`", row)]
    assert len(quoted) > 15
    assert [words for words in quoted if words not in texts] == []
