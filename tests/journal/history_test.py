"""Journals of killed runs: a start continues only from records on its own rows."""

import pytest

from rlx.journal import history, records


def noted(*events):
    """Records of (kind, fields), numbered from 0."""
    data = (records.encode(n, kind, fields) for n, (kind, fields) in enumerate(events))
    return list(records.scan(b"".join(data)))


@pytest.mark.parametrize(("rows", "position"), [("a", 0), ("b", 1)])
def test_a_start_on_other_rows_is_not_continued_even_if_it_kept_nothing(rows, position):
    """Else prompts of rows `b` would count as trained on by a run of rows `a`."""
    begun = {"start": 1, "step": 0, "order": 0, "rows": "a", "whole": True}
    events = noted(
        ("start", begun), ("start", {**begun, "rows": "b", "whole": False}),
        ("admit", {"group_id": 0, "attempt": 0, "version": 0}),
    )  # fmt: skip
    host = {"step": 0, "pending": [], "admitted": 0, "cursor": {"position": 0, "digest": rows}}
    found = history.recover(host, history.position(None), events)
    assert found.host["cursor"]["position"] == position
    assert found.complete == (rows == "b")


def test_groups_of_a_batch_that_a_start_could_not_repeat_are_not_lost():
    """A checkpoint had a batch to repeat, and the next start smaller ones; it was killed too."""
    host = {
        "step": 2, "pending": [], "admitted": 8, "buffered": [7], "order": [[4, 5, 6]],
        "cursor": {"position": 8}, "journal": [0, -1],
    }  # fmt: skip
    events = noted(
        ("start", {"step": 2, "order": 2, "whole": True, "rows": ""}),
        ("take", {"step": 2, "groups": [4]}),
        ("admit", {"group_id": 6, "attempt": 0, "version": 3}),
    )
    found = history.recover(host, (1, -1), events).host
    assert (found["order"], found["buffered"]) == ([[4]], [5, 7])
    assert found["pending"] == [[6, 0]]
    whole = history.recover(host, (1, -1), ()).host
    assert (whole["order"], whole["buffered"]) == ([[4, 5, 6]], [7])
