"""Ten faults in a real run: nothing is lost, doubled or left behind, and a replay has its bits."""

import json

import pytest

pytest.importorskip("openai", reason="the agent needs the extra agents")

from experiments.chaos import __main__ as chaos
from experiments.chaos import campaign, oracle


@pytest.mark.slow
def test_ten_faults(tmp_path):
    try:
        record = chaos.disturb(tmp_path, 10, seed=5)
    finally:
        chaos_log = (tmp_path / "trainer.log").read_text(errors="replace")[-2000:]
    assert record["good"], f"{record}\n{chaos_log}"
    assert len(record["rows"]) == 10
    assert record["replay"]["wrong_by_one"] > 0, "the scores of another version differ"

    rollouts = tmp_path / "run" / "rollouts"
    first, second = sorted(rollouts.iterdir())[:2]
    row = json.loads(first.read_text().splitlines()[0])
    second.write_text(second.read_text() + json.dumps({**row, "step": 2}) + "\n")
    found = "; ".join(oracle.facts(tmp_path / "run", batch=2, bound=0))
    for what in (f"doubled: groups [{row['group_id']}]", "another size", "older than the bound"):
        assert what in found
    first.unlink()
    assert "lost: groups" in "; ".join(oracle.facts(tmp_path / "run", batch=2, bound=2))


def test_a_row_of_the_table_has_the_times_of_a_kind_of_fault():
    rows = [("disk full", 1.0, ""), ("disk full", 4.0, "no step"), ("disk full", 2.0, "")]
    assert chaos.table(rows).splitlines()[-1] == "| disk full | 3 | 2.0 | 4.0 | 1 |"
    assert {kind for kind, (ends, _) in campaign.FAULTS.items() if ends} == {
        "trainer killed", "disk full", "journal cut", "journal flipped", "checkpoint flipped",
    }  # fmt: skip
