"""The name that somebody meant, for each lookup of names."""

import ast
from pathlib import Path

import pytest

from rlx.algorithms.presets import PRESETS
from rlx.base import nearest
from rlx.cli.key_names import meant
from rlx.config import OPTIONS


@pytest.mark.parametrize(
    ("name", "choices", "found"),
    [
        ("gpro", PRESETS, "grpo"),  # swapped, where gspo has two others
        ("GRPPO", PRESETS, "grpo"),
        ("temp", ["temperature", "top_p"], "temperature"),
        ("top", ["top_k", "top_p"], "top_k"),  # two begin so; both miss two characters
        ("debug-workflwo", ["debug_workflow"], "debug_workflow"),
        ("lr", ["b1", "b2", "eps"], ""),
        ("ab", ["ba"], ""),
        ("", ["a"], ""),
    ],
)
def test_a_name_is_near_by_its_mistakes_and_its_beginning(name, choices, found):
    assert nearest(name, choices) == found


def test_every_key_is_found_with_two_of_its_letters_swapped():
    for key in OPTIONS:
        section, dot, last = key.rpartition(".")
        swapped = last[:-2] + last[-1] + last[-2]
        if len(last) > 3:
            assert meant(section + dot + swapped, OPTIONS) == key


def test_names_are_looked_up_in_one_way():
    for path in Path("rlx").rglob("*.py"):
        tree = ast.walk(ast.parse(path.read_text()))
        assert "difflib" not in {a.name for n in tree if isinstance(n, ast.Import) for a in n.names}
