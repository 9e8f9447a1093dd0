"""What is said while a run's parts are built."""

from types import SimpleNamespace

import pytest

from rlx.base import DiskFull
from rlx.config import default
from rlx.launch.workdir_lock import Killed
from rlx.run import parts


def test_a_full_disk_does_not_hide_why_the_run_before_was_killed(monkeypatch, tmp_path):
    def full(*_):
        raise DiskFull("not one checkpoint will fit")

    monkeypatch.setattr(parts, "sizes_of", lambda config, model: None)
    monkeypatch.setattr(parts, "disk_warning", full)
    monkeypatch.setattr(parts.memory, "low_memory_warning", lambda *_, always: "little memory")
    said = []
    killed, inputs = Killed(pid=7, for_memory=True), SimpleNamespace(model_config=None)
    with pytest.raises(DiskFull):
        parts._warn_low_memory(default(), tmp_path, inputs, killed, said.append)
    assert said == [str(killed), "little memory"]
