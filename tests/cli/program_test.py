"""The program `rlx` runs each command as `python -m` would, and is what the package installs."""

import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import rlx
from rlx import base
from rlx.__main__ import COMMANDS, main

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["tran"], 2, ["error: unknown command 'tran'; did you mean 'train'?\n"]),
        (["--hlep"], 2, ["error: unknown command '--hlep'; choose one of areal, cluster, "]),
        (["train"], 2, ["error: no --config=FILE given; try --config=rlx:arithmetic\n"]),
        (["train", "--config=rlx:arithmetik", "--traceback"], 2,
         ["Traceback", "rlx:arithmetik; did you mean rlx:arithmetic?\n"]),
        (["--version"], 0, [f"rlx {rlx.__version__}\n"]),
        (["-h"], 0, ["usage: rlx COMMAND", *(f"\n  {name} " for name in COMMANDS)]),
        ([], 0, ["usage: rlx COMMAND"]),
        (["report", "--help"], 0, ["usage: rlx.report", "workdir"]),
        (["report"], 2, ["error: the following arguments are required: workdir; python -m"]),
        (["serve", "--modl=x"], 2, ["error: the following arguments are required: --model; "]),
        (["convert", "--zz"], 2, ["error: unrecognized arguments: --zz; python -m"]),
        (["keys", "optimizer"], 0, ["optimizer.b2=0.999  (in [0, 1))  share"]),
        (["keys", "optimizer.lr"], 2, ["did you mean 'optimizer.learning_rate'?\n"]),
        (["keys", "nope"], 2, ["did you mean 'scheduler.nodes'?\n"]),
        (["configs"], 0, ["rlx:arithmetic ", "GRPO on chains", "rlx:cluster:math_7b_n4 "]),
    ],
)  # fmt: skip
def test_it_runs_the_command_named_first(arguments, status, words, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "rlx", *arguments], capture_output=True, text=True, timeout=120,
        cwd=tmp_path, env={"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == status, done.stderr
    for word in words:
        assert word in (done.stderr if status else done.stdout)
    assert status == 0 or "--traceback" in arguments or len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_sees_the_arguments_that_follow_its_name(name, monkeypatch):
    seen = []
    monkeypatch.setattr(runpy, "run_module", lambda *module, **how: seen.append((*module, how)))
    monkeypatch.setattr("rlx.cli.command.run", lambda main: None)
    monkeypatch.setattr(sys, "argv", ["rlx", name, "--flag", name])
    main()
    assert seen == [(COMMANDS[name][0], {"run_name": "__main__", "alter_sys": True})]
    assert sys.argv == ["rlx", "--flag", name]


def test_an_extra_of_a_wheel_is_installed_from_the_wheel(monkeypatch):
    assert base.install("vllm") == "pip install -e '.[vllm]'"
    monkeypatch.setattr(base, "__file__", "/venv/lib/python3.11/site-packages/rlx/base.py")
    assert base.install("vllm") == "pip install 'FILE.whl[vllm]'"


def test_the_package_installs_it():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"rlx": "rlx.__main__:main"}
    assert "version" in project["dynamic"], "it is rlx.__version__ and stands there alone"
