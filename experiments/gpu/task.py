"""Part `task`: the embedded task from start to end, trainer and JAX engine on one device.

With the torch trainer two libraries share the GPU. The server is started by hand, because servers
that a run starts compute on the CPU. It may take 15 % of the GPU's memory, and the trainer 60 %.
Products are in full float32: TF32 differs by 1e-3, which the run's gate would report.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
LENGTH = 64 + 128  # of the prompts and completions of configs/arithmetic.py


def _environment(share: float) -> dict[str, str]:
    return {**os.environ, "XLA_PYTHON_CLIENT_MEM_FRACTION": str(share),
            "JAX_DEFAULT_MATMUL_PRECISION": "highest"}  # fmt: skip


def run(o: dict[str, Any]) -> dict[str, Any]:
    """Return accuracy before and after, seconds of the steps, and the last steps' metrics."""
    model = ROOT / "rlx" / "assets" / "arithmetic"
    serve = [sys.executable, "-m", "rlx.serve", f"--model={model}", f"--max-model-len={LENGTH}"]
    with tempfile.TemporaryDirectory() as scratch, open(f"{scratch}/server.log", "w") as log:
        server = subprocess.Popen(
            [*serve, f"--parent-pid={os.getpid()}"], stdout=subprocess.PIPE, stderr=log,
            text=True, env=_environment(0.15),
        )  # fmt: skip
        try:
            lines = iter(server.stdout or ())
            port = next((json.loads(x)["port"] for x in lines if x.startswith('{"port"')), None)
            if port is None:
                raise RuntimeError(Path(log.name).read_text()[-2000:])
            trainer = [
                sys.executable, "-m", "rlx.main", "--config=configs/arithmetic.py",
                f"--workdir={scratch}/run", f"--config.total_steps={o['steps']}",
                f"--config.fleet.addresses=('127.0.0.1:{port}',)",
                f"--config.eval.num_questions={o['questions']}", "--config.observe.writers=()",
                "--config.checkpoint.first_step=0", f"--config.trainer={o['trainer']}",
            ]  # fmt: skip
            done = subprocess.run(trainer, cwd=ROOT, env=_environment(0.6), capture_output=True,
                                  text=True, check=False)  # fmt: skip
            if done.returncode:
                raise RuntimeError(done.stdout[-1500:] + done.stderr[-1500:])
            steps = _records(Path(scratch, "run", "metrics.jsonl"))
            evals = _records(Path(scratch, "run", "eval.jsonl"))
        finally:
            server.terminate()
            server.wait()
    warm = steps[len(steps) // 2 :]  # the first ones compile
    return {
        "accuracy": {record["step"]: record["greedy_acc"] for record in evals},
        "steps": len(steps),
        "steps_per_second": len(warm) / sum(record["step_seconds"] for record in warm),
        "last_step": {k: v for k, v in steps[-1].items() if isinstance(v, int | float)},
    }


def _records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def lines(result: dict[str, Any]) -> list[str]:
    """Return the lines of the table."""
    accuracy = list(result["accuracy"].values())
    return [
        f"accuracy {accuracy[0]:.3f} → {accuracy[-1]:.3f} in {result['steps']} steps, "
        f"{result['steps_per_second']:.2f} steps/s"
    ]
