"""Generation of a run replayed: a real one with kills, and records that somebody changed."""

import re
import shutil
import subprocess
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from rlx.base import Group, Trajectory, UserError
from rlx.config import default
from rlx.fleet.requests import Sampling
from rlx.fleet.sample import Completion
from rlx.journal import journal, records
from rlx.run.replay_generation import Generation, compare_samples, count, recordings
from rlx.run.replay_run import Plan
from tests.fixtures.commands import without_torch
from tests.run.kill_test import LONG, kill_at, last_lines, start, under_way
from tests.run.kill_test import records as lines

SECONDS, STEPS = 300, 6
PLAN = Plan(None, 0, 1, 1)


def trajectory(index=0, prompt=3, versions=(0, 0, 1)):
    size = prompt + len(versions)
    sampled = np.arange(size) >= prompt
    return Trajectory(
        np.arange(size, dtype=np.int32), sampled, np.where(sampled, -0.5, 0).astype(np.float32),
        np.array([-1] * prompt + list(versions), np.int32), 1.0, "stop", f"4.{index}",
    )  # fmt: skip


def test_a_group_is_one_request_with_a_sample_for_each_trajectory():
    group = Group(4, (trajectory(0), trajectory(1, prompt=2)))
    first, second = recordings(group, Sampling(seed=7))
    assert (second.request.request_id, second.request.first_index) == ("4.1", 1)
    assert second.request.prompt_tokens.tolist() == [0, 1]
    assert second.completion.tokens.tolist() == [2, 3, 4]
    assert (first.request.sampling.seed, first.calls(2)) == (7, [0, 1])


def changed(column, at, value):
    """A sample whose number `at` of a column is made as `value`."""
    (own,) = recordings(Group(4, (trajectory(),)), Sampling(seed=7))
    array = getattr(own.completion, column).copy()
    array[at] = value
    return own, replace(own.completion, **{column: array})


@pytest.mark.parametrize(
    ("column", "at", "value"), [("tokens", 1, 9), ("versions", 2, 0), ("logprobs", 0, -0.50001)]
)
def test_the_first_difference_is_named_with_both_numbers(column, at, value):
    own, made = changed(column, at, value)
    found = compare_samples(own, made, 0.0)
    assert (found.same, found.differs) == (at, True)
    assert str(found).startswith(f"sample 4.0 differs at token {at} of 3: recorded ")
    assert f"{value:.7g}" in str(found).partition("made ")[2]
    assert count([compare_samples(own, own.completion, 0.0), found]) == {
        "samples": 2, "tokens": 6, "as recorded": 3 + at, "samples with several versions": 2,
        "samples continued after a prefill": 0, "logprobs with other last bits": 0,
        "samples that differ": 1,
    }  # fmt: skip


def test_rounding_is_counted_within_the_bound_and_an_early_end_is_a_difference():
    own, made = changed("logprobs", 0, -0.50001)
    assert not (found := compare_samples(own, made, 1e-4)).differs
    assert count([found])["logprobs with other last bits"] == 1
    assert found.gaps.max() == pytest.approx(1e-5, rel=0.01)
    cut = Completion(made.tokens[:2], own.completion.logprobs[:2], made.versions[:2], "stop")
    assert compare_samples(own, cut, 0.0).differs
    assert str(compare_samples(own, cut, 0.0)).endswith("made no token")


@pytest.mark.parametrize(
    ("section", "key", "value"), [("fleet", "engine", "vllm"), ("rollout", "workflow", "tools")]
)
def test_a_run_that_cannot_be_made_again_is_refused_in_one_line(section, key, value):
    config = default()
    config[section][key] = value
    recorded = SimpleNamespace(config=lambda step: config)
    with pytest.raises(UserError, match=rf"{section}.{key}={value}: .*; leave it out"):
        Generation(recorded, PLAN, 1, print)


def replay(place, *flags, status=0):
    command = [*without_torch("rlx.replay"), str(place), "--generation", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def rewritten(workdir, target, change):
    """A copy of a run, with one changed sample, the first that `change` returns; its name."""
    shutil.copytree(workdir, target)
    found = [record for record, _ in journal.read(target / "journal")]
    for path in (target / "journal").iterdir():
        path.unlink()
    data, name = b"", ""
    for record in found:
        packed = record.packed
        if record.kind == "group" and not name:
            trajectories = list(record.group().trajectories)
            for i, t in enumerate(trajectories):
                if other := change(t):
                    trajectories[i], name = other, t.trajectory_id
                    break
            packed = records.pack(replace(record.group(), trajectories=tuple(trajectories)))
        data += records.encode(record.number, record.kind, record.fields, packed)
    (target / "journal" / f"{found[0].number:020d}.records").write_bytes(data)
    assert name
    return name


def other_token(t):
    tokens, at = t.tokens.copy(), int(np.argmax(t.versions >= 0)) + 5
    tokens[at] += 1
    return replace(t, tokens=tokens)


def late_switch(t):
    """Weights that are switched one token late."""
    own = np.flatnonzero(t.versions >= 0)
    switch = own[1:][np.diff(t.versions[own]) > 0]
    if not len(switch):
        return None
    versions = t.versions.copy()
    versions[switch[0]] -= 1
    return replace(t, versions=versions)


@pytest.mark.slow
def test_an_asynchronous_run_is_made_again_over_its_kill_and_a_changed_token_is_found(tmp_path):
    workdir = tmp_path / "run" / "run"
    workdir.parent.mkdir()

    def reached():
        steps = len(lines(workdir / "metrics.jsonl"))
        return steps >= 1 and sum(map(len, under_way(workdir).values())) > 2

    slow = (*LONG, "--config.fleet.slots=2")  # so that updates find samples under way
    assert kill_at(start(workdir, STEPS, 2, *slow), reached), last_lines(workdir)
    process = start(workdir, STEPS, 2, *slow)
    kill_at(process, lambda: False)
    assert process.returncode == 0, last_lines(workdir)

    said = replay(workdir)
    total = re.search(r"made again: 48 samples, (\d+) tokens, (\d+) as recorded, .*", said)
    assert total, said
    assert total[1] == total[2]
    assert "samples continued after a prefill" in total[0], said
    assert total[0].endswith("; logprobs compared bit for bit")

    name = rewritten(workdir, tmp_path / "token", other_token)
    assert f"sample {name} differs at token 5 of " in replay(
        tmp_path / "token", "--until=3", status=1
    )
    if "samples with several versions" in total[0]:  # a fast machine may have none
        name = rewritten(workdir, tmp_path / "late", late_switch)
        assert f"sample {name} differs at token " in replay(tmp_path / "late", status=1)
