"""A persistent min-heap, so that the buffer can be a value and still be fast.

A leftist heap (Crane 1972; Okasaki, Purely Functional Data Structures, §3.1): push and pop
return a new heap in O(log n) and share the rest with the old one, which stays valid.
A heap is `None` (empty) or `(rank, key, value, left, right)`.
"""

from collections.abc import Iterator
from typing import Any

Heap = tuple[int, Any, Any, Any, Any] | None


def push(heap: Heap, key: Any, value: Any) -> Heap:
    """Return `heap` with `value` under `key`; keys must be distinct to be ordered."""
    return _merge((1, key, value, None, None), heap)


def pop(heap: Heap) -> tuple[Any, Any, Heap]:
    """Return (smallest key, its value, the rest); IndexError when empty."""
    if heap is None:
        raise IndexError("pop from an empty heap")
    _, key, value, left, right = heap
    return key, value, _merge(left, right)


def values(heap: Heap) -> Iterator[Any]:
    """Yield all values, in no particular order."""
    stack = [heap]
    while stack:
        node = stack.pop()
        if node is not None:
            yield node[2]
            stack += (node[3], node[4])


def _merge(a: Heap, b: Heap) -> Heap:
    """Merge two heaps along their right spines, at most log2(n + 1) long."""
    if a is None:
        return b
    if b is None:
        return a
    if b[1] < a[1]:
        a, b = b, a
    _, key, value, left, right = a
    right = _merge(right, b)
    if _rank(left) < _rank(right):
        left, right = right, left
    return _rank(right) + 1, key, value, left, right


def _rank(heap: Heap) -> int:
    """Return how many nodes the right spine has."""
    return heap[0] if heap else 0
