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
