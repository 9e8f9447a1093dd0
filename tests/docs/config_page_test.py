"""The reference of the config names every key, with its help."""

import importlib.util
from pathlib import Path

import pytest

from rlx import config as module
from rlx.option import option
from rlx.run.flags import leaves

SCRIPT = Path(__file__).parents[2] / "docs" / "config_page.py"
spec = importlib.util.spec_from_file_location("config_page", SCRIPT)
docs = importlib.util.module_from_spec(spec)
spec.loader.exec_module(docs)


def test_every_key_has_a_row_in_its_part():
    page, rows = docs.page(), {}
    for part in page.split("\n## "):
        head = part.split("\n")[0] + "." if not part.startswith("# ") else ""
        rows |= {head + line.split("`")[1]: line for line in part.split("\n") if line[:3] == "| `"}
    assert set(rows) == set(dict(leaves(module.default())))
    assert "| `max_staleness` | `2` | ≥ 0 | η: versions; 0: synchronous training |" in page
    assert "| `top_p` | `1.0` | 0 … 1, 0 excluded |" in rows["sampling.top_p"]
    assert "| `b1` | `0.9` | 0 … 1, 1 excluded |" in rows["optimizer.b1"]
    assert "| `clip_low` | `0.2` | 0 … 1 |" in rows["algorithm.clip_low"]


def test_a_key_without_help_is_named(monkeypatch):
    monkeypatch.setitem(module.SECTIONS, "lora", ("adapters", {"rank": option(0, "")}))
    with pytest.raises(ValueError, match=r"lora.rank has no help"):
        docs.page()
