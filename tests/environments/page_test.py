"""docs/environments.md does what it says: its files are written and its commands run."""

import sys
from pathlib import Path

import pytest

from tests.run.extend_test import blocks, commands, run, sections

ROOT = Path(__file__).parents[2]
SECTIONS = sections("docs/environments.md")
# What each run of a section leaves in every step's record, and the package that it wants.
RECORDED = {
    "MCP tools": ("mcp", "tools/calls"),
    "reasoning-gym": ("reasoning_gym", "reward/reasoning_gym"),
    "verifiers": ("verifiers", "reward/exact"),
}


@pytest.mark.slow
@pytest.mark.witnesses
@pytest.mark.parametrize("title", [title for title, text in SECTIONS.items() if commands(text)])
def test_a_section_s_commands_run_with_its_files(title, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")  # of `python`
    package, metric = RECORDED[title]
    pytest.importorskip(package, reason=f"{package} is not installed")
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    for block in blocks(SECTIONS[title], "python"):
        (tmp_path / block.partition("\n")[0].removeprefix("# ")).write_text(block)
    for number, words in enumerate(commands(SECTIONS[title])):
        assert all(metric in step for step in run(words, tmp_path, f"run{number}"))
