"""docs/extend.md does what it says: the files of each section are written and its commands run."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rlx.system.jsonl import read_jsonl
from tests.fixtures.commands import FLOAT32, RLX_MAIN

ROOT = Path(__file__).parents[2]


def sections(page):
    """Title → text of each section of a page; `#` → what comes before the first."""
    text = "## #\n" + (ROOT / page).read_text()
    return dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE))


SECTIONS, AGENTS = sections("docs/extend.md"), sections("docs/agents.md")
SECTIONS["Training an agent"] = AGENTS["#"] + AGENTS["Training"]
SECTIONS |= {
    title: text for title, text in sections("docs/tools.md").items() if title != "An agent"
}
# What each run of a section leaves in every step's record.
RECORDED: dict[str, list[str]] = {
    "Loss": ["ratio_square", "actor_clip_ratio"],
    "Workflow": ["info/same", "reward/arithmetic"],
    "Training an agent": ["info/interactions"],
    "#": ["tools/calls", "reward/arithmetic"],
    "Your own tool": ["tools/calls"],
    "Several turns": ["info/turns"],
    "Reward": ["reward/arithmetic", "reward/brevity", "reward/polite", "reward/unlike"],
}
SHORT = [
    "--config.total_steps=2", "--config.rollout.batch_prompts=2", "--config.sampling.n_samples=2",
    "--config.sampling.max_new_tokens=48", "--config.eval.num_questions=4",
    "--config.fleet.slots=8", "--config.gate.prompts=1", FLOAT32,
]  # fmt: skip


@pytest.fixture(scope="module")
def server():
    """A server of the embedded model; a run that finds it there gives it its own weights first."""
    command = [sys.executable, "-m", "rlx.serve", "--model=rlx:arithmetic", "--slots=16",
               "--max-model-len=512", "--port=0"]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield f"127.0.0.1:{json.loads(process.stdout.readline())['port']}"
        process.kill()


def blocks(section, language):
    return re.findall(rf"^```{language}\n(.*?)^```", section, re.DOTALL | re.MULTILINE)


def commands(section):
    """The lines of a section's shell blocks, continued lines joined."""
    text = "".join(blocks(section, "sh")).replace("\\\n", " ")
    return [shlex.split(line, comments=True) for line in text.splitlines() if line.strip()]


def test_what_runs_record_is_of_sections_that_exist():
    assert SECTIONS.keys() >= RECORDED.keys()


@pytest.mark.slow
@pytest.mark.parametrize("title", [title for title, text in SECTIONS.items() if commands(text)])
def test_a_section_s_commands_run_with_its_files(title, server, tmp_path):
    section = SECTIONS[title]
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    for language in ("python", "json", "text"):
        for block in blocks(section, language):
            name = re.match(r"# ([\w./]+)\n", block)
            assert name, f"a block of {title} does not begin with the name of its file"
            (tmp_path / name[1]).write_text(block if language == "python" else block[name.end() :])
    for number, words in enumerate(commands(section)):
        steps = run(words, tmp_path, f"run{number}", server)
        for name in RECORDED.get(title, []) if steps else []:
            assert all(name in step for step in steps), (name, sorted(steps[0]))


def run(words, directory, workdir, server=""):
    """The steps of a command that is run in a directory; a run is shortened to two.

    With a server, runs of configs/arithmetic.py start none of their own.
    """
    program, *arguments = words
    assert program == "python"
    trains, command = arguments[:2] == ["-m", "rlx.main"], [sys.executable, *arguments]
    if trains:
        text = " ".join(arguments)
        main = [sys.executable, "-m", "rlx.main"] if "trainer=torch" in text else RLX_MAIN
        short = [flag for flag in SHORT if "max_new" not in flag or "_sft" not in text]
        command = [*main, f"--workdir={workdir}", *arguments[2:], *short]
        if server and "configs/arithmetic.py" in text:
            command.append(f"--config.fleet.addresses=('{server}',)")
    done = subprocess.run(
        command, cwd=directory, capture_output=True, text=True, timeout=600,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, f"{arguments}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    if not trains:
        return []
    workdir = next((w.split("=")[1] for w in words if w.startswith("--workdir=")), workdir)
    steps = list(read_jsonl(directory / workdir / "metrics.jsonl"))
    assert [step["step"] for step in steps] == [1, 2]
    return steps


def embedded(page):
    """A page's runs of the model that comes with rlx, but those that others run."""
    begin = ["python", "-m", "rlx.main"]
    for words in commands((ROOT / page).read_text()):
        text = " ".join(words)
        others = any(part in text for part in ("scheduler.type", "engine=vllm", "pip install"))
        if words[:3] == begin and "configs/arithmetic" in text and len(words) > 3 and not others:
            yield words


TORCH = pytest.param("docs/torch.md", marks=pytest.mark.torch)


@pytest.mark.slow
@pytest.mark.parametrize("page", ["README.md", "docs/running.md", TORCH])
def test_a_page_s_runs_of_the_embedded_model_run_in_its_order(page, tmp_path):
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    for block in blocks((ROOT / page).read_text(), "python"):
        if name := re.match(r"# ([\w./]+)\n", block):
            (tmp_path / name[1]).write_text(block)
    found = [run(words, tmp_path, f"run{i}") for i, words in enumerate(embedded(page))]
    assert len(found) == {"README.md": 1, "docs/running.md": 3, "docs/torch.md": 1}[page]
    assert page != "README.md" or "reward/brevity" in found[0][0]
