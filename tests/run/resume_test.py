"""How a run begins in its directory: which records are kept, and what is said."""

import json

import numpy as np
import pytest

from rlx import config as config_lib
from rlx.algorithms import presets
from rlx.base import Group, Trajectory, UserError
from rlx.journal.history import Recovered
from rlx.observe.metrics import MetricsWriter
from rlx.rollout.unfinished import Unfinished
from rlx.run import resume, run_records
from rlx.run.room_options import as_json


@pytest.fixture
def config():
    c = config_lib.default()
    c.model.path = "some/model"
    return c


def attempt(workdir, config, steps=3):
    """What a run of `config` leaves killed after `steps`, before a checkpoint."""
    workdir.mkdir(exist_ok=True)
    (workdir / "config.json").write_text(json.dumps(as_json(config)))
    writer = MetricsWriter(workdir)
    writer.write("gate.jsonl", {"step": 0})
    writer.write("eval.jsonl", {"step": 0})
    for step in range(1, steps + 1):
        writer.write("metrics.jsonl", {"step": step})
        writer.write_rollouts(step, [{"step": step}])
    (workdir / ".hf-abc").mkdir()
    (workdir / ".metrics.jsonl.12-34").touch()


def checkpoint_of(workdir, step, whole):
    path = workdir / "checkpoints" / f"step_{step:08d}"
    path.mkdir(parents=True)
    (path / "host.json").write_text("{}")
    if whole:
        from rlx.train import checkpoint

        (path / "manifest.json").write_text(json.dumps(checkpoint._manifest(path)))
    return path


def test_an_attempt_without_a_checkpoint_is_begun_anew(tmp_path, config):
    attempt(tmp_path, config)
    (line,) = resume.prepare_workdir(config, tmp_path)
    assert line == "starting again: the last attempt ended after step 3 without a checkpoint"
    kept = {"config.json", "environment.json", "rollouts", "starts.jsonl"}
    assert {p.name for p in tmp_path.iterdir()} == kept
    assert not list((tmp_path / "rollouts").iterdir())
    assert resume.prepare_workdir(config, tmp_path) == []


@pytest.mark.parametrize("spoil", ["", "null", "[]", '{"step": '])
def test_another_config_is_refused_and_its_own_or_a_fresh_directory_does(tmp_path, config, spoil):
    attempt(tmp_path, config)
    if spoil:
        (tmp_path / "config.json").write_text(spoil)
    else:
        config.sampling.temperature = 0.7
    before = (tmp_path / "metrics.jsonl").read_bytes()
    words = "of an unknown config" if spoil else "sampling.temperature 1.0 → 0.7"
    with pytest.raises(UserError, match=f"holds another run .{words}.* give a fresh --workdir"):
        resume.prepare_workdir(config, tmp_path)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    if not spoil:
        config.sampling.temperature = 1.0
        config.checkpoint.recover_mode = "off"
        config.total_steps += 1
        assert resume.prepare_workdir(config, tmp_path)[0].startswith("starting again")


def test_damaged_checkpoints_are_kept_aside_by_recover_mode_off(tmp_path, config):
    attempt(tmp_path, config)
    path = checkpoint_of(tmp_path, 2, whole=False)
    config.checkpoint.recover_mode = "off"
    said = resume.prepare_workdir(config, tmp_path)
    assert said[0].startswith("starting again")
    assert said[1] == f"{path} is damaged and is kept as damaged-step_00000002"
    assert [p.name for p in path.parent.iterdir()] == ["damaged-step_00000002"]


def test_a_whole_checkpoint_is_never_begun_anew(tmp_path, config):
    attempt(tmp_path, config)
    checkpoint_of(tmp_path, 2, whole=True)
    assert resume.prepare_workdir(config, tmp_path) == []
    config.checkpoint.recover_mode = "off"
    with pytest.raises(UserError, match="holds another run, with a checkpoint"):
        resume.prepare_workdir(config, tmp_path)
    config.checkpoint.recover_mode = "auto"
    before = (tmp_path / "config.json").read_bytes()
    config.fleet.num_servers, config.eval.every_steps = 2, 7
    assert resume.prepare_workdir(config, tmp_path) == []
    assert (tmp_path / "config.json").read_bytes() == before, "the settings of the first steps"


def test_settings_that_change_are_told_with_the_learning_rates_before_and_after(config):
    config.optimizer.schedule, config.total_steps, config.train.minibatches = "cosine", 6, 2
    before = as_json(config)
    assert list(resume.setting_changes(before, before, 6)) == []
    config.total_steps = 12
    first, rates = resume.setting_changes(before, as_json(config), 6)
    assert first == "settings change after step 6: total_steps 6 → 12"
    assert rates == "learning rate 1.7e-08 at the last update, 5e-07 at the next"
    config.optimizer.schedule, config.eval.every_steps = "constant", 3
    constant = as_json(config)
    config.total_steps = 24
    assert list(resume.setting_changes(constant, as_json(config), 6)) == [
        "settings change after step 6: total_steps 12 → 24"
    ]


def test_the_rates_that_are_told_know_of_steps_in_which_only_the_critic_learns(config):
    config.optimizer.schedule, config.total_steps, config.train.minibatches = "linear", 6, 2
    config.critic.warmup_steps = 2
    before = as_json(config)
    config.total_steps = 10
    _, rates = resume.setting_changes(before, as_json(config), 4)
    assert rates == "learning rate 6.25e-07 at the last update, 7.5e-07 at the next"


def test_a_run_that_has_all_its_steps_is_not_begun_again(tmp_path, config):
    config.total_steps = 3
    assert resume.finished_steps(config, tmp_path) == 0
    attempt(tmp_path, config)
    checkpoint_of(tmp_path, 3, whole=True)
    assert resume.finished_steps(config, tmp_path) == 0, "its last evaluation may be missing"
    MetricsWriter(tmp_path, first_step=4).note(3, ended="stopped")
    assert resume.finished_steps(config, tmp_path) == 0, "its last evaluation is missing"
    MetricsWriter(tmp_path, first_step=4).note(3, ended="finished")
    assert resume.finished_steps(config, tmp_path) == 3
    config.total_steps = 4
    assert resume.finished_steps(config, tmp_path) == 0


def test_what_is_done_again_and_what_goes_on_is_counted():
    host = {"step": 12, "pending": [[40, 0]], "admitted": 41}
    found, none = Recovered(host, [], {}, True), Unfinished(lambda *event: -1).counts()
    assert resume.continuation(found, {"step": 15, "admitted": 53}, none) == (
        "resuming after step 12; repeated: 3 steps, 13 prompts"
    )
    last = {"step": 12, "admitted": 53}
    assert resume.continuation(found, last, none).endswith("0 steps, 1 prompt")
    assert resume.continuation(found, {}, none).endswith("0 steps, 1 prompt")
    kept = none | {"prompts": 1, "samples": 4, "tokens": 300}
    assert resume.continuation(found, {}, kept).endswith(
        "nothing is repeated; continued: 300 tokens of 4 samples"
    )
    lost = resume.continuation(found, {}, kept | {"repeated_tokens": 20})
    assert lost.endswith("of 4 samples; 20 tokens are made again")
    host["pending"] = []
    assert resume.continuation(found, {"step": 12}, none).endswith("nothing is repeated")
    had = resume.continuation(found._replace(groups=[Group(1, ())] * 2), {"step": 12}, none)
    assert had.endswith("nothing is repeated; the journal had 2 finished groups")


def test_groups_of_another_algorithm_are_generated_again():
    """Else answers of the policy would be demonstrations, and a teacher's first batch an error."""

    def group(count, version=-1, logprob=0.0, scores=None):
        tokens, logprobs = np.arange(2, dtype=np.int32), np.float32([0, logprob])
        versions, mask = np.array([-1, version], np.int32), np.array([False, True])
        ends = 1.0, "stop", "0.0", None, scores
        return Group(0, (Trajectory(tokens, mask, logprobs, versions, *ends),) * count)

    rollout, scored = group(2, 3, -0.5), group(2, 3, -0.5, np.zeros(2, np.float32))
    without_versions, shown, pair = group(1, logprob=-0.5), group(1), group(2)
    groups = [rollout, scored, without_versions, shown, pair]
    usable = {
        "grpo": [rollout, scored, without_versions], "distill": [scored], "sft": [shown],
        "dpo": [pair],
    }  # fmt: skip
    for preset, wanted in usable.items():
        assert resume.usable(groups, presets.PRESETS[preset], most=4) == wanted
    assert resume.usable(groups, presets.PRESETS["dpo"], most=3) == []
    assert resume.usable(groups, presets.PRESETS["grpo"], most=1) == []


def test_another_place_is_told_once_and_the_same_not():
    here = {"trainer_cores": 1, "packages": {"jax": "1", "grpcio": "1"}, "command": "a"}
    there = {"trainer_cores": 2, "packages": {"jax": "2", "grpcio": "2"}, "command": "b"}
    assert resume.machine_warning(here, here) == resume.machine_warning({}, here) == ""
    assert resume.machine_warning(here, there) == (
        "another machine or layout, so results will differ in the last bits: trainer_cores 1 → 2; "
        "packages.jax 1 → 2"
    )


def test_no_statistic_of_a_user_takes_the_place_of_a_records_own_number():
    counted = {"n_valid_tokens": 3, "mine": 0.5, "step": 0.25, "version": 0.25}
    record = run_records.step_record(7, counted, 1.0, 4, version=6)
    assert (record["step"], record["version"], record["mine"]) == (7, 6, 0.5)


@pytest.mark.parametrize("name", ["rollouts", "checkpoints", "hf", "metrics.jsonl"])
def test_a_file_for_a_directory_and_the_reverse_are_refused_before_anything_starts(
    name, tmp_path, config
):
    (tmp_path / name).mkdir() if "." in name else (tmp_path / name).touch()
    wrong = "directory, not a file" if "." in name else "file, not a directory"
    with pytest.raises(UserError, match=f"{name} is a {wrong}; move it away"):
        resume.prepare_workdir(config, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]
