"""What is said while a run's parts are built."""

import math
import subprocess
from types import SimpleNamespace

import pytest

from rlx.base import DiskFull, UserError
from rlx.config import default
from rlx.model.directory import load_config, resolve
from rlx.run import parts
from rlx.run.room_options import RunOptions, sizes_of
from rlx.system.workdir_lock import Killed


def given(config, workdir):
    """Parts of a run as far as its warnings need them."""
    inputs = SimpleNamespace(options=RunOptions.of(config))
    return SimpleNamespace(inputs=inputs, sizes=None, workdir=workdir)


def test_a_full_disk_does_not_hide_why_the_run_before_was_killed(monkeypatch, tmp_path):
    def full(*_):
        raise DiskFull("no disk space for a checkpoint")

    monkeypatch.setattr(parts, "disk_warning", full)
    monkeypatch.setattr(parts.memory, "low_memory_warning", lambda *_, always: "little memory")
    said, killed = [], Killed(pid=7, for_memory=True)
    with pytest.raises(DiskFull):
        said.extend(parts._warnings(given(default(), tmp_path), killed, "cpu"))
    assert said == [str(killed), "little memory"]


@pytest.mark.parametrize(
    ("changes", "started"),
    [
        ({}, 1), ({"fleet.num_servers": 2}, 2), ({"fleet.addresses": ("a:1",)}, 0),
        ({"model.compute_dtype": "float32"}, 1),
        ({"fleet.engine": "vllm"}, 0), ({"model.random_init": True}, 0),
        ({"model.path": "someone/model"}, 0), ({"teacher.path": "rlx:arithmetic"}, 0),
        ({"allocation_mode": "vllm:d1+jax:f1"}, 0), ({"fleet.join": "shared"}, 0),
    ],
)  # fmt: skip
def test_only_servers_whose_engine_the_config_decides_start_early(changes, started, monkeypatch):
    config, found = default(), []

    def start(model, cpus, seed, options):
        found.append((str(model), seed, options["slots"], options["dtype"]))
        return subprocess.Popen("sleep 60", shell=True, start_new_session=True)

    monkeypatch.setattr(parts.local, "start_early", start)
    config.update_from_flattened_dict({"model.path": "rlx:arithmetic", "seed": 5, **changes})
    monkeypatch.setattr(parts.Devices, "has_bfloat16", True)
    with parts.early_servers(config) as servers:
        assert [each.poll() for each in servers] == [None] * started
    model = str(resolve("rlx:arithmetic"))
    dtype = changes.get("model.compute_dtype", "bfloat16")
    assert found == [(model, 5 + i, config.fleet.slots, dtype) for i in range(started)]
    assert all(each.poll() is not None for each in servers), "they end with the run"


def test_truncated_draws_with_a_teacher_are_reported_at_the_start(monkeypatch, tmp_path):
    monkeypatch.setattr(parts, "disk_warning", lambda *_: "")

    def said(teacher="", **sampling):
        config = default()
        config.sampling.update(sampling)
        config.teacher.path = teacher
        return list(filter(None, parts._warnings(given(config, tmp_path), None, "gpu")))

    assert said(top_p=0.9) == said("rlx:arithmetic") == []
    for name, value in (("top_p", 0.9), ("top_k", 20), ("min_new_tokens", 4)):
        (line,) = said("rlx:arithmetic", **{name: value})
        assert f"{name}={value} in config.sampling: the teacher's logprobs" in line


def test_a_rollout_without_a_deadline_has_one_that_grpc_takes():
    config = default()
    config.rollout.request_timeout_seconds = math.inf
    assert 1e8 < RunOptions.of(config).limits.request < math.inf


def test_a_run_asks_for_masks_where_its_draws_are_truncated():
    for name, value in (("temperature", 0.7), ("top_p", 0.9), ("top_k", 20), ("min_new_tokens", 4)):
        config = default()
        config.sampling[name] = value
        options = RunOptions.of(config)
        assert options.sampling.return_masks == (name != "temperature")
        assert not options.evaluation.return_masks


@pytest.mark.parametrize(
    ("changes", "shm", "disk", "wanted"),
    [
        ({}, 8 << 30, 0, "/dev/shm"),
        ({}, 64 << 10, 8 << 30, "workdir"),
        ({"fleet.publish": "delta"}, 64 << 10, 8 << 30, "workdir"),
        ({"fleet.addresses": ("a:1",), "fleet.publish": "stream"}, 64 << 10, 8 << 30, "workdir"),
        ({"fleet.addresses": ("a:1",)}, 64 << 10, 8 << 30, "--shm-size"),  # it reads that place
        ({}, 64 << 10, 64 << 10, "--shm-size"),
    ],
)
def test_weights_go_to_a_disk_where_shared_memory_is_too_small(
    monkeypatch, tmp_path, changes, shm, disk, wanted
):
    """It is checked before the first step; Docker gives 64 MB."""
    config, said = default(), []
    config.model.path = "rlx:arithmetic"
    for key, value in changes.items():
        config.update_from_flattened_dict({key: value})
    free = {"/dev/shm": shm, tmp_path: disk}
    monkeypatch.setattr(parts.shutil, "disk_usage", lambda place: SimpleNamespace(free=free[place]))
    sizes = sizes_of(config, load_config(resolve("rlx:arithmetic")))
    if wanted.startswith("--"):
        with pytest.raises(UserError, match=f"66 kB free, and two versions .*{wanted}"):
            parts.publish_dir(config, sizes, tmp_path, said.append)
    else:
        found = parts.publish_dir(config, sizes, tmp_path, said.append)
        assert found == {"workdir": str(tmp_path)}.get(wanted, wanted)
        assert len(said) == (wanted == "workdir")
