"""Ten faults in a real run: nothing is lost, doubled or left behind, and a replay has its bits."""

import json
import random
import subprocess
import sys
import time

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
    rows = [json.loads(line) for line in first.read_text().splitlines()]
    row, others = rows[0], {row["group_id"] for row in rows} - {rows[0]["group_id"]}
    second.write_text(second.read_text() + json.dumps({**row, "step": 2}) + "\n")
    found = oracle.facts(tmp_path / "run", batch=2, bound=0)
    assert found["doubled"] == [row["group_id"]]
    assert found["batches of another size"] == [2]
    assert found["tokens beyond the bound"] > 0
    first.unlink()
    assert set(oracle.facts(tmp_path / "run", batch=2, bound=2)["lost"]) == others != set()


def test_the_wall_clock_of_a_process_jumps_and_its_monotonic_one_does_not(tmp_path):
    if not campaign.make_wall_clock(tmp_path):
        pytest.skip("there is no C compiler")
    campaign.set_clock(clock := tmp_path / "clock", 0.0)
    program = (
        "import sys, time\nfor _ in sys.stdin: print(time.time(), time.monotonic(), flush=True)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        bufsize=1, env=campaign.environment(tmp_path, clock),
    ) as process:  # fmt: skip
        for jump in (0.0, 3600.0, -7200.0):
            campaign.set_clock(clock, jump)
            process.stdin.write("\n")
            wall, steady = map(float, process.stdout.readline().split())
            assert wall - time.time() == pytest.approx(jump, abs=5.0)
            assert steady == pytest.approx(time.monotonic(), abs=5.0)
        process.stdin.close()


def test_shared_memory_that_a_process_leaves_is_named(tmp_path):
    made = campaign.Campaign.__new__(campaign.Campaign)
    made.root, made.servers, made.problems, made.kill = tmp_path, [], [], lambda: None
    for name in ("publish", "shm", "stage", "tmp"):
        (tmp_path / name).mkdir()
    made.close()
    assert made.problems == []
    mount = ["mount", "-t", "tmpfs", "tmpfs", str(tmp_path / "shm")]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root has a /dev/shm of its own")
    try:
        program = "open('/dev/shm/left', 'w')"
        log, clock = tmp_path / "log", tmp_path / "clock"
        assert campaign.start_program(["-c", program], log, tmp_path, clock).wait(60) == 0
        made.close()
        assert made.problems == [f"left behind: ['{tmp_path}/shm/left']"]
    finally:
        subprocess.run(["umount", str(tmp_path / "shm")], check=True)


def test_it_is_the_newest_checkpoint_that_is_damaged(tmp_path):
    made = campaign.Campaign.__new__(campaign.Campaign)
    made.workdir, made.draw, made.kill = tmp_path, random.Random(0), lambda: None
    for step in (9, 10):
        (tmp_path / f"checkpoints/step_{step:08d}").mkdir(parents=True)
        (tmp_path / f"checkpoints/step_{step:08d}/host.json").write_bytes(b"0" * 99)
    made.damage_checkpoint()
    old, new = (p.read_bytes() for p in sorted(tmp_path.rglob("host.json")))
    assert old == b"0" * 99 != new


def test_a_curve_is_compared_with_those_of_undisturbed_runs():
    others = [[[0, 0.3], [10, 0.5 + d], [20, 0.7 + d], [30, 0.8]] for d in (-0.03, 0.0, 0.03)]
    same = oracle.apart([[0, 0.0], [10, 0.5], [15, 0.62], [40, 0.0]], others)
    assert same["to step"] == 30
    assert same["own"] == pytest.approx(0.56)
    assert same["others"] == pytest.approx(0.55)
    assert same["apart"] < 1 < oracle.FAR < oracle.apart([[10, 0.3], [20, 0.4]], others)["apart"]


def test_a_row_of_the_table_has_the_times_of_a_kind_of_fault():
    rows = [("disk full", 1.0, ""), ("disk full", 4.0, "no step"), ("disk full", 2.0, "")]
    table = ["| disk full | 3 | 2.0 | 4.0 | 1 |", "| all | 3 | 2.0 | 4.0 | 1 |"]
    assert chaos.table(rows).splitlines()[2:] == table
    assert {kind for kind, (ends, _) in campaign.FAULTS.items() if ends} == {
        "trainer killed", "trainer ended by SIGTERM", "disk full", "journal cut",
        "journal flipped", "checkpoint flipped",
    }  # fmt: skip
