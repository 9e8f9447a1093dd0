"""Bazel's files say what the rooms are; .ci/run builds with them where there is a Bazel."""

import ast
import runpy
from pathlib import Path

import pytest

from tests import rooms_test

ROOT = Path(__file__).parents[1]
WRITTEN = runpy.run_path(str(ROOT / "bazel/workspace.py"))["FILES"]
STARLARK = {  # its lists are Python's
    node.targets[0].id: ast.literal_eval(node.value)
    for node in ast.parse((ROOT / "bazel/rooms.bzl").read_text()).body
    if isinstance(node, ast.Assign)
}


@pytest.mark.parametrize("file", WRITTEN)
def test_the_files_for_both_bazels_are_in_step(file):
    assert (ROOT / file).read_text() == WRITTEN[file](), "run `python bazel/workspace.py`"


def test_its_rooms_and_commands_are_those_of_the_package():
    there = [room for room in rooms_test.ORDER if (ROOT / "rlx" / room).is_dir() and room]
    rooms = [room for room in STARLARK["ROOMS"] if room not in STARLARK["FILES"]]
    assert rooms == there
    assert [room for room in rooms_test.ORDER if room in STARLARK["ROOMS"]] == STARLARK["ROOMS"]
    assert set(STARLARK["COMMANDS"]) == set(rooms_test.COMMANDS) - {"__main__"}


@pytest.mark.parametrize("room", [r for r in STARLARK["ROOMS"] if r not in STARLARK["FILES"]])
def test_a_room_is_a_package_of_its_name(room):
    assert f'room(name = "{room}")' in (ROOT / "rlx" / room / "BUILD.bazel").read_text()
