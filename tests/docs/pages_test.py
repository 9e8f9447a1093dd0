"""What pages say can be done: every link leads somewhere, every block of code is one that works.

Commands are given to the parser of the program that they name, which knows its flags, and every key
of the config with its type; a run's config is checked besides. Python is compiled, and what it
imports of rlx is there. Pages that a reader follows from beginning to end are run by tests of their
own, beside the rooms they are about (RUN); of the other pages READ says of every command what runs
one like it, or why nothing here can.
"""

import argparse
import ast
import importlib
import inspect
import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from rlx.__main__ import COMMANDS
from rlx.algorithms import losses
from rlx.config import check, default, leaves
from rlx.observe import metrics, report_learning
from rlx.run import flags, run_records
from rlx.run.allocate import apply_allocation

ROOT = Path(__file__).parents[2]
PAGES = [p for p in (ROOT / "docs").glob("*.md") if "template" not in p.name]
PAGES += [p for p in (ROOT / "README.md", ROOT / "CONTRIBUTING.md") if p.exists()]
LINKED = [*PAGES, ROOT / "AGENTS.md", *sorted((ROOT / "experiments").glob("*/README.md"))]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FENCE = re.compile(r"^( *)(`{3,})(\w*)[^\n]*\n(.*?)^\1\2$", re.DOTALL | re.MULTILINE)
SHOWN = {"text", "", "diff", "yaml", "console"}  # nothing that runs
# Whose keys are other systems': only what stands in a row's first cell is ours.
FOREIGN = ("coming_from.md", "from_areal.md")
KEYS = dict(leaves(default()))
RUN = {  # page → the tests that run its blocks, all of them
    "docs/agents.md": ("agents/docs_test.py", "run/extend_test.py"),
    "docs/debugging.md": ("debugger/docs_test.py",),
    "docs/environments.md": ("environments/page_test.py",),
    "docs/extend.md": ("run/extend_test.py",),
    "docs/online.md": ("run/online_docs_test.py",),
    "docs/tools.md": ("agents/tools_page_test.py", "run/extend_test.py"),
}
# What a command of another page has → the test or the script that runs it, or one like it; or why
# none does. The first that fits counts.
READ = {
    "rlx.k8s": "tests/run/kubernetes_test.py",
    "rlx push": "tests/push_test.py",
    "configs/shapes": "tests/run/images_run_test.py",
    "rlx sweep": "tests/run/run_grid_test.py",
    "observe/monitoring": "tests/observe/monitoring_test.py",
    "prometheus --config.file": "tests/run/trainer_metrics_test.py",
    "rlx runs": "tests/observe/run_table_test.py",
    "rlx status": "tests/observe/run_table_test.py",
    "rlx report": "tests/observe/report_overlay_test.py",
    "--config.scheduler.type=slurm --config.scheduler.nodes=3": "tests/run/scheduler_test.py",
    "--config.scheduler.type=ray": "tests/run/on_ray_test.py",
    "RAY_ADDRESS": "tests/run/on_ray_test.py",
    "math_7b": "wants GPUs; tests/configs_test.py checks the config",
    "gpt-oss-20b": "wants GPUs",
    "Qwen3-30B-A3B": "wants GPUs",
    "smollm2": "wants 145 MB of PyPI; tests/model/gguf_files_test.py has a small one",
    "configs/gsm8k.py": "wants a model and rows of the hub; see tests/configs_test.py",
    "--gguf=": "tests/model/gguf_files_test.py",
    "rlx.convert": "tests/run/convert_test.py",
    "rlx.replay": "tests/run/replay_test.py",
    "fleet.engine=vllm": "tests/engines/vllm_engine_test.py",
    "configs/arithmetic": "tests/run/extend_test.py",
    "--cluster --hosts": "tests/launch/remote_servers_test.py",
    "rlx.cluster": "tests/launch/remote_servers_test.py",
    "rlx.serve": "tests/run/elastic_test.py",
    "--config=… ": "tests/run/elastic_test.py",
    "rlx.doctor": "tests/run/config_checks_test.py",
    "rlx.plan": "tests/plan/search_test.py",
    "rlx.tinker": "tests/tinker/client_test.py",
    "TINKER_": "tests/tinker/client_test.py",
    "rlx.debug_workflow": "tests/debugger/docs_test.py",
    "experiments.bench": "wants an idle machine",
    "experiments.gpu": "tests/experiments_gpu_test.py",
    "pre-commit": "installs hooks in a clone",
    "git clone": "wants the repository's address",
    "cd rlx": "goes into that clone",
    "pip install": ".ci/run",
    "pytest": ".ci/run",
}


def name(page):
    return page.relative_to(ROOT).as_posix()


def each(pages):
    return pytest.mark.parametrize("page", pages, ids=name)


def prose(page):
    """A page's text without its fenced blocks."""
    return FENCE.sub("", page.read_text())


def anchors(page):
    """The names that headings have, as GitHub and the site make them."""
    found = []
    for heading in re.findall(r"^#+ +(.*)$", prose(page), re.MULTILINE):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", words).strip().replace(" ", "-")
        found.append(slug + f"-{found.count(slug)}" * (slug in found))
    return found


@each(LINKED)
def test_every_link_leads_to_a_file_and_a_heading_of_it(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"https?:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name(page)} links to {link}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{name(page)} links to {link}: {anchors(target)}"
    for named in re.findall(
        r"`((?:docs|tests|configs|experiments|rlx)/[\w./-]+\.\w+)`", prose(page)
    ):
        pattern = re.sub(r"_[A-Z]+\b", "_*", named)  # configs/arithmetic_NAME.py
        assert any(ROOT.glob(pattern)), f"{name(page)} names {named}"


class Parsed(Exception):
    """A command's own parser has read its flags."""


@pytest.fixture
def read(monkeypatch):
    """Reads the flags of a command by its own parser; the config, where it has one."""
    arguments, config = argparse.ArgumentParser.parse_args, flags.parse

    def stop(parser):
        def parse(*given, **options):
            raise Parsed(parser(*given, **options))

        return parse

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop(arguments))
    monkeypatch.setattr(flags, "parse", stop(config))
    monkeypatch.chdir(ROOT)

    def parse(module, given):
        room = module in ("rlx.doctor", "rlx.areal", "rlx.plan", "rlx.tinker")
        program = importlib.import_module(f"{module}.__main__" if room else module)
        monkeypatch.setattr(sys, "argv", [module, *given])
        taken = inspect.signature(program.main).parameters.values()
        with pytest.raises(Parsed) as found:
            program.main(*[given] * any(p.default is p.empty for p in taken))
        answer = found.value.args[0]
        return answer[0] if isinstance(answer, tuple) else None

    return parse


def lines(text):
    """The commands of a shell block, continued lines joined, without comments."""
    for line in text.replace("\\\n", " ").splitlines():
        for part in re.split(r" (?:&&|\|\||;) ", line):
            if part.strip() and not part.strip().startswith("#"):
                yield part.strip()


def commands(page):
    """Every command of a page: of fenced blocks, and indented ones that begin with a program."""
    for *_, language, block in FENCE.findall(page.read_text()):
        if language in ("sh", "bash"):
            yield from lines(block)
    for block in re.findall(
        r"^    (?! )(.*?)(?=\n(?!      ?))", prose(page), re.DOTALL | re.MULTILINE
    ):
        if re.match(r"(python|pip|rlx|pytest|--config)[ .]", block):
            yield from lines(block)


@each(PAGES)
def test_every_command_is_one_that_its_program_takes(page, read):
    for line in commands(page):
        try:
            words = shlex.split(line, comments=True)
        except ValueError:
            continue  # a part of a quoted program: the block as a whole is read by bash, below
        while words and re.fullmatch(r"\w+=.*", words[0]):
            words = words[1:]
        words = words[words.index("|") + 1 :] if "|" in words else words
        if words[:1] == ["rlx"] and len(words) > 1:
            assert words[1].startswith("-") or words[1] in COMMANDS, line
            words = ["python", "-m", COMMANDS.get(words[1], ("",))[0], *words[2:]]
        if words and words[0].startswith("--config"):
            words = ["python", "-m", "rlx.main", *words]
        if "pip" in words[:2] and "install" in words:
            for extra in re.findall(r"\.\[([\w,-]+)\]", line):
                for each_one in extra.split(","):
                    assert each_one in PROJECT["project"]["optional-dependencies"], line
        elif words[:1] == ["pytest"] and "-m" in words:
            told = [m.split(":")[0] for m in PROJECT["tool"]["pytest"]["ini_options"]["markers"]]
            assert set(re.findall(r"\w+", words[words.index("-m") + 1])) - {"not", "or"} <= set(
                told
            )
        elif words[:2] == ["python", "-m"] and words[2].startswith("rlx."):
            run_flags(words[2], words[3:], read, line)
        elif words[:2] == ["python", "-m"] and words[2].startswith("experiments."):
            place = ROOT / words[2].replace(".", "/")
            assert place.is_dir() or place.with_suffix(".py").exists(), line
        elif words[:1] == ["python"] and "/" in (words[1:] or [""])[0]:
            assert (ROOT / words[1]).exists(), line


def test_of_every_command_that_is_only_read_it_is_said_why():
    given = {line for page in PAGES if name(page) not in RUN for line in commands(page)}
    used = set()
    for line in given:
        fits = [part for part in READ if part in " ".join(line.split())]
        assert fits, f"{line}: run it in a test, or say in READ why not"
        used.add(fits[0])
    assert used == set(READ), "READ names commands that no page has"
    places = [*(f"tests/{test}" for tests in RUN.values() for test in tests), *READ.values()]
    for place in re.findall(r"(?:tests|\.ci)/[\w./]+", " ".join(places)):
        assert (ROOT / place).exists(), place
    for page, tests in RUN.items():
        assert any(page in (ROOT / "tests" / test).read_text() for test in tests), page


def run_flags(module, given, read, line):
    """Read a command of rlx as it will be read, with a config in the place of one left open."""
    known = r"--config=(rlx:|configs/|experiments/)"
    files = [g for g in given if g.startswith("--config=")]
    if module == "rlx.main" or files:
        given = [g for g in given if not g.startswith("--config=") or re.match(known, g)]
        if not any(g.startswith("--config=") for g in given):
            given = ["--config=configs/arithmetic.py", *given]
    given = [g for g in given if g not in ("…", "&", ">")]
    try:
        config = read(module, [re.sub(r"\$\(.*|\$\w+", "1", g) for g in given])
        if module == "rlx.main":
            check(apply_allocation(config))
    except (SystemExit, Exception) as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        pytest.fail(f"{line}: {error}")


@each(PAGES)
def test_every_block_is_of_its_language(page):
    for *_, language, block in FENCE.findall(page.read_text()):
        block = inspect.cleandoc("\n" + block) if language == "python" else block
        if language in ("sh", "bash"):
            done = subprocess.run(["bash", "-n"], input=block, text=True, capture_output=True)
            assert done.returncode == 0, done.stderr + block
        elif language == "python":
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rlx"):
                    module = importlib.import_module(node.module)
                    missing = [a.name for a in node.names if not hasattr(module, a.name)]
                    assert not missing, f"{name(page)}: {node.module} has no {missing}"
        elif language == "json":
            json.loads(re.sub(r"\A# .*\n", "", block))
        elif language == "toml":
            tomllib.loads(block)
        else:
            assert language in SHOWN, f"{name(page)} has a block of {language}, which nothing reads"


@each(PAGES)
def test_every_key_that_a_page_names_is_one(page):
    text = prose(page)
    if page.name in FOREIGN:
        text = "\n".join(re.findall(r"^\| ([^|]*) \|", text, re.MULTILINE))
    parts = {".".join(key.split(".")[:i]) for key in KEYS for i in (1, 2, 3)}
    heads = {key.split(".")[0] for key in KEYS if "." in key}
    for words in re.findall(r"`([^`\n]+)`", text):
        for flag in re.findall(r"--config\.([\w.]+)", words):
            assert flag in KEYS, f"{name(page)} has --config.{flag}"
        key = re.match(r"(?:config\.)?([a-z_]+(?:\.[a-z_0-9]+)+)(?:=.*)?$", words)
        if key and key[1].split(".")[0] in heads - {"docs"}:
            assert key[1] in parts or elsewhere(key[1]), f"{name(page)} names {key[1]}"


def elsewhere(words):
    """Whether words with dots are a file, or a module of rlx or a name in one."""
    module = ROOT / "rlx" / "/".join(words.split("."))
    there = module.is_dir() or any(p.with_suffix(".py").exists() for p in (module, module.parent))
    return there or words.endswith((".json", ".jsonl", ".md", ".py", ".html"))


def test_the_page_of_metrics_has_every_key_that_code_names():
    told = set(re.findall(r"`([^`]+)`", (ROOT / "docs/metrics.md").read_text()))
    charts = [*report_learning.OPTIMISATION, *report_learning.ON_ROLLOUTS]
    keys = {*metrics.TRAINED, *run_records.OF_ROLLOUTS, *losses.LOSSES}
    keys |= {name for chart in charts for name, *_ in (*chart.trained, *chart.held_out)}
    assert keys - told == set()
    own = {key for key in told if "." in key and not key.endswith(".jsonl")}
    assert own <= KEYS.keys(), own - KEYS.keys()
