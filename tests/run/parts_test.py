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


def test_draws_that_are_truncated_are_reported_at_the_start():
    def said(**sampling):
        config, lines = default(), []
        config.sampling.update(sampling)
        parts._warn_truncated(config, lines.append)
        return lines

    assert said() == []
    assert said(temperature=0.7, max_new_tokens=9) == []
    for name, value in (("top_p", 0.9), ("top_k", 20), ("min_new_tokens", 4)):
        (line,) = said(**{name: value})
        assert f"{name}={value} in config.sampling: some tokens are never drawn" in line
    config, lines = default(), []
    config.sampling.top_p, config.fleet.num_servers = 0.5, 0
    parts._warn_truncated(config, lines.append)
    assert not lines, "without servers nothing is drawn"
