"""The name that somebody meant, for each lookup of names."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from rlx.algorithms.presets import PRESETS
from rlx.base import Trajectory, info_means, joined_masks, malformed, nearest
from rlx.cli.key_names import nearest_key
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


def test_a_run_of_several_trajectories_counts_once_in_means():
    one = Trajectory(*4 * [np.zeros(2)], 0.0, "stop", "3.0", info={"reward/a": 1.0, "b": 0.0})
    parts = [replace(one, trajectory_id=f"3.1.{i}", info={"reward/a": 0.0}) for i in range(3)]
    assert info_means([one, *parts]) == {"reward/a": 0.5, "info/b": 0.0}


def test_every_key_is_found_with_two_of_its_letters_swapped():
    for key in OPTIONS:
        section, dot, last = key.rpartition(".")
        swapped = last[:-2] + last[-1] + last[-2]
        if len(last) > 3:
            assert nearest_key(section + dot + swapped, OPTIONS) == key


def test_names_are_looked_up_in_one_way():
    for path in Path("rlx").rglob("*.py"):
        assert "difflib" not in path.read_text(), path


def trajectory(size=2, **fields):
    return Trajectory(
        np.arange(size, dtype=np.int32), np.arange(size) > 0, np.zeros(size, np.float32),
        np.zeros(size, np.int32), 0.0, "stop", "0.0", **fields,
    )  # fmt: skip


def test_masks_are_joined_with_parts_that_have_none():
    codes, sizes = np.array([7, 8, 9], np.uint8), np.array([0, 3], np.int32)
    plain, masked = trajectory(3), trajectory(kept=codes, kept_sizes=sizes)
    assert joined_masks([]) == joined_masks([plain, plain]) == {}
    found = joined_masks([plain, masked, plain, masked])
    assert found["kept_sizes"].tolist() == [0, 0, 0, 0, 3, 0, 0, 0, 0, 3]
    assert found["kept"].tolist() == [7, 8, 9] * 2
    assert (found["kept_sizes"].dtype, found["kept"].dtype) == (np.int32, np.uint8)


def test_masks_that_do_not_add_up_are_malformed():
    codes, sizes = np.array([7, 8, 9], np.uint8), np.array([0, 3], np.int32)
    assert malformed(trajectory(kept=codes, kept_sizes=sizes)) is None
    assert "add up" in malformed(trajectory(kept=codes[:2], kept_sizes=sizes))
    assert "add up" in malformed(trajectory(kept_sizes=sizes))
    assert "lengths" in malformed(trajectory(kept=codes, kept_sizes=np.append(sizes, 0)))
