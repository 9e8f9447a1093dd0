"""rlx.run beside a running event loop as in a notebook, in a thread, again, and interrupted."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import rlx
from rlx.base import UserError
from rlx.config import default
from tests.fixtures.commands import path_without_torch

ROOT = Path(__file__).parents[2]
HEAD = """
import asyncio, os, signal, sys, threading
import rlx
assert not {"jax", "numpy", "ml_collections"} & set(sys.modules), "import rlx is light"
from configs import arithmetic

def config(steps):
    c = arithmetic.get_config()
    c.total_steps, c.rollout.batch_prompts, c.sampling.n_samples = steps, 2, 2
    c.sampling.max_new_tokens, c.fleet.slots, c.model.compute_dtype = 24, 8, "float32"
    c.eval.num_questions, c.gate.enabled, c.checkpoint.first_step = 2, False, 0
    return c

class Notes:
    def __init__(self): self.told = []
    def on_begin(self, config, workdir, step): self.told.append(["begin", config["seed"], step])
    def on_step(self, step, record):
        self.told.append(["step", step, type(record["entropy"]).__name__])
    def on_eval(self, step, record): self.told.append(["eval", step])
    def on_checkpoint(self, step, directory): self.told.append(["saved", directory.name])
    def on_end(self, reason): self.told.append(["end", reason])

def servers():
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = open(f"/proc/{pid}/cmdline").read().split("\\0")
            if "rlx.serve" in words and f"--parent-pid={os.getpid()}" in words: found.append(pid)
        except OSError: pass
    return found

handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
notes = Notes()
"""
TAIL = """
assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
assert not servers()
print(notes.told)
"""


def told(program, tmp_path):
    """What the hooks of a program were told; it runs as a user's would, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", HEAD + program + TAIL], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": path_without_torch(ROOT)}, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return ast.literal_eval(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_cell_of_a_notebook_runs_and_runs_again(tmp_path):
    program = """
async def cell():  # a notebook's cell: the event loop of the main thread runs
    return rlx.run(config(1), "run", callbacks=[notes])

result = asyncio.run(cell())
assert (result.step, result.complete, len(result.metrics)) == (1, True, 1), result
assert [record["step"] for record in result.evals] == [0, 1]
stop = threading.Event()
class Stops:
    def on_step(self, step, record): stop.set()
results = []
def thread(): results.append(rlx.run(config(9), "run", callbacks=[notes, Stops()], stop=stop))
running = threading.Thread(target=thread); running.start(); running.join()
assert results[0].step in (2, 3), "at step 2 it was told, and step 3 may have begun"
assert not results[0].complete, results
"""
    first = [["begin", 0, 0], ["step", 1, "float"], ["saved", "step_00000001"], ["end", "finished"]]
    found = told(program, tmp_path)
    assert ["eval", 0] in found
    last = 3 if ["step", 3, "float"] in found else 2
    steps = [["step", n, "float"] for n in range(2, last + 1)]
    then = [["begin", 0, 1], *steps, ["saved", f"step_0000000{last}"], ["end", "stopped"]]
    assert [each for each in found if each[0] != "eval"] == first + then


@pytest.mark.slow
def test_an_interrupted_cell_leaves_no_server(tmp_path):
    program = """
class Interrupts:  # twice: at once
    def on_step(self, step, record):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
try:
    rlx.run(config(9), "run", callbacks=[notes, Interrupts()])
except KeyboardInterrupt:
    pass
else:
    raise SystemExit("it went on")
"""
    assert told(program, tmp_path)[-1] == ["end", "stopped"]


def test_a_misspelt_key_and_a_wrong_callback_are_told_before_anything_starts(tmp_path):
    config = default()
    with pytest.raises(AttributeError, match='Did you mean "total_steps"'):
        config.total_stpes = 3
    with pytest.raises(UserError, match=r"model\.path is empty"):
        rlx.run(config, tmp_path / "run")
    config.model.path = "rlx:arithmetic"
    with pytest.raises(
        UserError, match=r"callbacks\[0\] \(str\) is no hook; give it some of on_begin"
    ):
        rlx.run(config, tmp_path / "run", callbacks=["mine"])
    assert not (tmp_path / "run").exists()
    assert not hasattr(rlx, "rnu")
