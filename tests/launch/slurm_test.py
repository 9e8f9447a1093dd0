"""What Slurm says of a job is read as what it is, also what is new to us."""

import os
import re
import subprocess
import time
from pathlib import Path

import pytest

from rlx.base import UserError
from rlx.launch import slurm

LINE = (
    "JobId=4 JobName=rlx-run UserId=root(0) Priority=1 QOS=(null) JobState={state} Reason={reason} "
    "Dependency=(null) Requeue=1 Restarts=2 ExitCode={code} NodeList={nodes} Command=/a=b/job.sh"
)


def read(state, reason="None", code="0:0", nodes="n[0-2]"):
    return slurm.parse_job(LINE.format(state=state, reason=reason, code=code, nodes=nodes))


@pytest.mark.parametrize(
    ("job", "ended", "words"),
    [
        (read("RUNNING"), False, "is RUNNING on n[0-2]"),
        (read("PENDING", "BeginTime", nodes="(null)"), False, "is PENDING (BeginTime)"),
        (read("COMPLETING"), False, "is COMPLETING"),
        (read("NODE_FAIL"), True, "is NODE_FAIL"),
        (read("OUT_OF_MEMORY", code="0:125"), True, "is OUT_OF_MEMORY"),
        (read("TIMEOUT", "TimeLimit"), True, "is TIMEOUT (TimeLimit)"),
        (read("MELTED"), False, "is MELTED"),
    ],
)
def test_each_state_is_what_it_is(job, ended, words):
    assert (job.ended, str(job)) == (ended, words)


def test_a_job_is_read_with_its_restarts_status_and_signal():
    job = read("FAILED", "NonZeroExitCode", "66:9")
    assert (job.restarts, job.status, job.nodes) == (2, 66, "n[0-2]")


def test_a_template_has_the_names_there_are():
    assert slurm.render("a <<x>> << y", {"x": "1"}, "t.sh") == "a 1 << y"
    with pytest.raises(UserError, match=r"t\.sh has <<z>>; use only x"):
        slurm.render("<<z>>", {"x": "1"}, "t.sh")


def test_a_job_waits_for_the_last_sign_of_life_of_another_node_alone(tmp_path):
    (held,) = re.findall(r"^held\(\).*?^}", slurm.TEMPLATE.read_text(), re.DOTALL | re.MULTILINE)
    (tmp_path / "slurm").mkdir()

    def waits():
        command = ["bash", "-c", f'root="$0"\n{held}\nheld', tmp_path / "slurm"]
        return subprocess.run(command).returncode == 0

    record = tmp_path / "running.json"
    assert not waits()
    record.write_text('{"machine": "n3 another-boot"}')
    assert waits()
    os.utime(record, (time.time() - 70,) * 2)
    assert not waits()
    record.write_text(Path("/proc/sys/kernel/random/boot_id").read_text())
    assert not waits()


def test_places_expand_in_words_that_are_quoted_otherwise():
    assert slurm.quoted(["--a=@n@:1", "b c", ""], {"@n@": '"$n"'}) == "--a=\"$n\":1 'b c' ''"
