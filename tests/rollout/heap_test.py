"""The persistent heap against sorted lists."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlx.rollout import heap


def drain(node):
    out = []
    while node is not None:
        key, value, node = heap.pop(node)
        out.append((key, value))
    return out


@given(st.lists(st.integers(), unique=True))
def test_pops_in_order_and_old_heaps_stay_valid(keys):
    heaps = [None]
    for key in keys:
        heaps.append(heap.push(heaps[-1], key, -key))
    for n, node in enumerate(heaps):
        assert drain(node) == [(k, -k) for k in sorted(keys[:n])]
        assert sorted(heap.values(node)) == sorted(-k for k in keys[:n])


def test_ascending_and_descending_input_do_not_recurse_deeply():
    for keys in (range(50_000), range(50_000, 0, -1)):
        node = None
        for key in keys:
            node = heap.push(node, key, None)
        assert [key for key, _ in drain(node)] == sorted(keys)


def test_pop_of_nothing():
    with pytest.raises(IndexError, match="empty"):
        heap.pop(None)
