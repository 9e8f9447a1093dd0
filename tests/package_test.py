"""What surrounds the package agrees with it: checks before a commit, the container."""

import re
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_pre_commit_runs_what_ci_runs():
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    hooks = [hook for repo in config["repos"] for hook in repo["hooks"]]
    ci = (ROOT / ".ci/run").read_text().splitlines()
    tools = tuple(hook["entry"].split()[0] for hook in hooks)
    assert [hook["entry"] for hook in hooks] == [x for x in ci if x.startswith(tools)]
    assert {"ruff", "mypy", "hadolint"} == set(tools)
    assert all(h["language"] == "system" and h["pass_filenames"] is False for h in hooks)


def test_the_container_installs_extras_that_there_are_from_files_that_there_are():
    stages = set(re.findall(r"^FROM .+ AS (\w+)$", DOCKERFILE, re.M))
    assert {"cpu", "cuda"} <= stages, "what ACCELERATOR may be"
    extras = re.findall(r"\$\{wheel\}\[([\w,-]+)\]", DOCKERFILE)
    assert len(extras) == 2
    named = {extra for group in extras for extra in group.split(",")}
    assert named <= set(PROJECT["optional-dependencies"])
    copied = re.findall(r"^COPY (.+) \S+$", DOCKERFILE, re.M)
    assert all((ROOT / name).exists() for line in copied for name in line.split())
    python = re.search(r"^FROM python:(3\.\d+)", DOCKERFILE, re.M)[1]
    assert f"Programming Language :: Python :: {python}" in PROJECT["classifiers"]
