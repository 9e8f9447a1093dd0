"""Every notebook from its first cell to its last in a real kernel, shortened; and kernels that end.

Kernels run with the compiled programs that other tests leave, and in a directory of their own.
"""

import json
import os
import queue
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import psutil
import pytest
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient

from tests.fixtures.commands import ended, path_without_torch

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "experiments" / "notebooks").glob("*.ipynb"))
PATIENCE = 600  # seconds, of a busy machine

SHORT = {  # lines after those of the cell tagged `parameters`
    "agent_with_tool": "STEPS, PROMPTS, SAMPLES, QUESTIONS = 2, 2, 2, 4",
    "compare_checkpoints": "STEPS, PROMPTS, SAMPLES, QUESTIONS, ANSWERS = 2, 2, 2, 6, 2",
    "custom_loss": "BATCHES, PROMPTS, SAMPLES, EPOCHS, QUESTIONS = 2, 4, 2, 1, 6",
    "embedded_task": "STEPS, PROMPTS, SAMPLES, QUESTIONS = 2, 2, 2, 4",
    "gsm8k_one_gpu": "",  # short by itself where there is no GPU
}
SAYS = {  # what a cell must have said, by its id
    "agent_with_tool": {"transcripts": "--- last step, reward "},
    "compare_checkpoints": {"paired": "95 % [", "ask": "greedy_acc"},
    "custom_loss": {"generate": "8 groups of 2"},
    "embedded_task": {"left": "groups thrown away: 0; oldest tokens"},
    "gsm8k_one_gpu": {"look": "a tiny random model", "run": "a tiny random model, LoRA"},
}
PICTURES = {
    "agent_with_tool": ["curves"], "compare_checkpoints": ["intervals"], "custom_loss": ["compare"],
    "embedded_task": ["run"], "gsm8k_one_gpu": ["memory-picture"],
}  # fmt: skip


def read(path):
    return nbformat.read(path, as_version=nbformat.NO_CONVERT)


def said(cell):
    """What a cell printed, and the text of what it displayed."""
    texts = [output.get("text", "") for output in cell.outputs]
    return "".join(texts + [o.get("data", {}).get("text/html", "") for o in cell.outputs])


@pytest.fixture
def environment(monkeypatch):
    """Kernels import this code, by this interpreter, and see no GPU and no torch."""
    monkeypatch.setenv("PYTHONPATH", path_without_torch(ROOT, environment={}))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_outputs_and_begins_as_all_do(path):
    notebook, first = read(path), read(NOTEBOOKS[0])
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
    assert len({cell.id for cell in notebook.cells}) == len(notebook.cells)
    assert [cell.id for cell in code[:2]] == ["install", "parameters"]
    assert code[1].metadata.tags == ["parameters"]

    def shared(cell):  # but for what else is installed
        return [line for line in cell.source.splitlines() if not line.startswith("EXTRAS")]

    assert shared(code[0]) == shared(next(c for c in first.cells if c.id == "install"))
    assert path.stem in (ROOT / "docs" / "notebooks.md").read_text(), "docs/notebooks.md shows it"


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path, environment):
    notebook = read(path)
    cells = {cell.id: cell for cell in notebook.cells}
    cells["parameters"].source += f"\n{SHORT[path.stem]}"
    where = {"metadata": {"path": str(tmp_path)}}
    client = NotebookClient(notebook, timeout=PATIENCE, kernel_name="python3", resources=where)
    client.execute()  # raises with the cell and its traceback
    for name, words in SAYS[path.stem].items():
        assert words in said(cells[name]), said(cells[name])
    pictured = [
        cell.id
        for cell in notebook.cells
        if any("image/png" in output.get("data", {}) for output in cell.get("outputs", []))
    ]
    assert pictured == PICTURES[path.stem]
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any("\x1b[" in said(cell) for cell in code), "a cell is no terminal"
    if "run" in cells:
        assert " finished </span>" in said(cells["run"]), "the panel was updated to the end"


RUN = """
import rlx
from rlx.config import default
config = default()
config.model.path, config.data.kind = "rlx:arithmetic", "arithmetic"
config.reward.name = "arithmetic"
config.data.max_prompt_tokens, config.sampling.max_new_tokens = 64, 24
config.rollout.batch_prompts, config.sampling.n_samples, config.fleet.slots = 2, 2, 8
config.train.row_buckets, config.train.max_tokens_per_microbatch = (192,), 1536
config.eval.num_questions, config.gate.enabled, config.observe.writers = 2, False, ()
config.model.compute_dtype = "float32"
class Says:
    def on_step(self, step, record): print("step", step, flush=True)
def run(steps):
    config.total_steps = steps
    return rlx.run(config, "run", callbacks=[Says()])
"""


class Kernel:
    """A kernel in `directory`: what it says, and the processes that it has started."""

    def __init__(self, directory):
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(cwd=str(directory))
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=PATIENCE)
        self.process = psutil.Process(self.manager.provisioner.pid)

    def execute(self, code, until=None):
        """Run a cell to its end, or until it prints `until`; gives all that it said."""
        self.client.execute(code)
        return self.listen(until)

    def listen(self, until=None):
        text, deadline = "", time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            try:
                message = self.client.get_iopub_msg(timeout=1)
            except queue.Empty:
                continue
            content = message["content"]
            text += content.get("text", "") + content.get("data", {}).get("text/plain", "")
            text += content.get("ename", "")
            idle = message["msg_type"] == "status" and content["execution_state"] == "idle"
            if until and until in text:
                return text
            if idle and message["parent_header"].get("msg_type") == "execute_request":
                assert not until, text
                return text
        raise AssertionError(f"the kernel says nothing more: {text}")

    def end(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture
def kernel(tmp_path, environment):
    made = Kernel(tmp_path)
    yield made
    made.end()


@pytest.mark.slow
def test_an_interrupted_cell_saves_the_kernel_goes_on_and_killed_it_leaves_nothing(kernel):
    kernel.execute(RUN)
    kernel.execute("result = run(1000)", until="step 2\n")
    processes = kernel.process.children(recursive=True)
    assert any("rlx.serve" in process.cmdline() for process in processes)
    kernel.manager.interrupt_kernel()
    assert "stopped after step" in kernel.listen()
    assert "False True" in kernel.execute(
        "print(result.complete, len(result.metrics) == result.step)"
    )
    _, left = psutil.wait_procs(processes, PATIENCE)
    assert not left, "a call's processes end with it"
    text = kernel.execute("result = run(result.step + 1); print('complete', result.complete)")
    assert "resuming after step" in text, text
    assert "complete True" in text, text

    kernel.execute("run(1000)", until="step ")
    processes = kernel.process.children(recursive=True)
    assert any("rlx.serve" in process.cmdline() for process in processes)
    os.kill(kernel.process.pid, signal.SIGKILL)
    left = [process for process in processes if not ended(process, PATIENCE)]
    assert not left, [process.cmdline() for process in left]


def test_the_first_cell_installs_a_wheel_or_a_clone_and_else_says_what_to_do(tmp_path):
    """With pip replaced: which of the two it finds, and that a directory called rlx is none."""
    cell = next(cell for cell in read(NOTEBOOKS[0]).cells if cell.id == "install")
    program = f"""
import importlib.metadata, os, subprocess, sys
sys.path[:] = [p for p in sys.path if p and not os.path.exists(p + "/rlx/config.py")]
sys.meta_path = [f for f in sys.meta_path if "editable" not in str(f).lower()]
subprocess.run = lambda command, check: print("pip", command[5])
importlib.metadata.version = lambda name: "?"
exec({json.dumps(cell.source)})
"""

    def run():
        done = subprocess.run(
            [sys.executable, "-I", "-c", program], cwd=tmp_path, capture_output=True, text=True,
            timeout=PATIENCE,
        )  # fmt: skip
        return done.stdout + done.stderr

    assert "no rlx here: upload its wheel" in run()
    (tmp_path / "rlx" / "rlx").mkdir(parents=True)
    (tmp_path / "rlx" / "pyproject.toml").touch()
    (tmp_path / "rlx" / "rlx" / "config.py").touch()
    assert f"pip {tmp_path}/rlx[agents]" in run(), "a clone, which Colab has as /content/rlx"
    (tmp_path / "rlx-0.1.0-py3-none-any.whl").touch()
    assert f"pip {tmp_path}/rlx-0.1.0-py3-none-any.whl[agents]" in run()
