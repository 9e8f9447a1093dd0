"""Write metrics to the boards named in observe.writers, and to a user's own hooks.

No other module imports tensorboardX, wandb, trackio and mlflow.
"""

import importlib.util
import os
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlx.base import UserError, install
from rlx.cli import user_code
from rlx.system.jsonl import write_atomically

BOARD_ID = "board_id"  # file of a WORKDIR that names its run on W&B, trackio and MLflow
# The board's sections; a name that is not here goes under `other`.
SECTIONS = {
    "run": ("epoch", "global_step", "version", "elapsed_seconds", "start"),
    "reward": ("task_reward", "kl_reward", "final_reward", "advantage"),
    "loss": ("actor_loss", "actor_clip_ratio", "importance_weight", "ppo_approx_kl", "entropy",
             "grad_norm", "behaviour_weight", "behaviour_kl", "learning_rate"),
    "tokens": ("avg_seq_len", "avg_prompt_len", "n_seqs", "n_tokens", "n_shared_tokens",
               "n_valid_tokens", "no_eos_ratio", "pad_ratio", "continued_tokens",
               "repeated_tokens"),
    "staleness": ("staleness_min", "staleness_mean", "staleness_max", "staleness_histogram",
                  "tokens_per_version", "crossed_ratio"),
    "prompts": ("admitted", "accepted", "rejected", "failed", "dropped"),
    "speed": ("seconds", "step_seconds", "update_seconds", "generated_tokens_per_second",
              "consumed_tokens_per_second", "tokens_per_second_per_device", "mfu",
              "model_flops", "server_busy_seconds", "teacher_busy_seconds"),
}  # fmt: skip
_SECTION = {name: section for section, names in SECTIONS.items() for name in names}
Value = float | dict[float, float]  # a number, or counts by number


class Board:
    """A hook that passes the numbers of every record to `add(step, values)`, by tag."""

    add: Callable[[int, dict[str, Value]], None]

    def on_step(self, step: int, record: dict[str, Any]) -> None:
        self.add(step, values_of(record))

    def on_eval(self, step: int, record: dict[str, Any]) -> None:
        self.add(step, values_of(record, "eval"))

    def on_gate(self, step: int, record: dict[str, Any]) -> None:
        # Addresses differ between runs; boards get names that do not.
        servers = enumerate(record.get("servers", {}).values())
        by_name = {f"server_{index}": value for index, value in servers}
        self.add(step, values_of({**record, "servers": by_name}, "gate"))


class TensorBoard(Board):
    """Writes a file of events in WORKDIR/tensorboard for each process of the run."""

    # tensorboardX's own SummaryWriter has a thread behind a bounded queue. When the disk is full,
    # the thread dies and the next `add_scalar` blocks for ever. Its event writer raises instead.

    def on_begin(self, config: dict[str, Any], workdir: Path, step: int) -> None:
        torch = sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
        try:  # tensorboardX imports it where it is installed, which takes 2 s and 300 MB
            from tensorboardX import event_file_writer, summary
            from tensorboardX.proto import event_pb2
        finally:
            if torch is None:
                del sys.modules["torch"]
        self._summary, self._proto = summary, event_pb2
        place = workdir / "tensorboard" / "events"
        place.parent.mkdir(parents=True, exist_ok=True)
        # The name ends in nanoseconds: two starts within one second must not share a file.
        self._file = event_file_writer.EventsWriter(str(place), f".{time.time_ns()}")
        # Boards hide what earlier files say of these steps.
        self._write(step=step + 1, session_log={"status": "START"})

    def add(self, step: int, values: dict[str, Value]) -> None:
        """Write numbers as scalars, counts as histograms."""
        if values:
            every = [self._value(tag, value) for tag, value in values.items()]
            self._write(step=step, summary=self._summary.Summary(value=every))

    def on_end(self, reason: str) -> None:
        self._file.close()

    def _write(self, **fields: Any) -> None:
        self._file.write_event(self._proto.Event(wall_time=time.time(), **fields))
        self._file.flush()

    def _value(self, tag: str, value: Value) -> Any:
        if not isinstance(value, dict):
            return self._summary.Summary.Value(tag=tag, simple_value=value)
        keys = sorted(value)
        return self._summary.histogram_raw(
            tag, keys[0], keys[-1], sum(value.values()),
            sum(key * value[key] for key in keys), sum(key**2 * value[key] for key in keys),
            [key + 0.5 for key in keys], [value[key] for key in keys],
        ).value[0]  # fmt: skip


class WeightsAndBiases(Board):
    """Writes one run of W&B for a WORKDIR; wandb reads its own environment (WANDB_MODE, …)."""

    def __init__(self):
        self._wandb = _imported("wandb")
        online = self._wandb.setup().settings.mode == "online"
        if online and not self._wandb.login(prompt=False, verify=False):
            raise UserError("wandb has no API key; run `wandb login`, or set WANDB_MODE=offline")

    def on_begin(self, config: dict[str, Any], workdir: Path, step: int) -> None:
        self._run = self._wandb.init(
            id=board_id(workdir), resume="allow", dir=workdir, config=config,
            project=os.environ.get("WANDB_PROJECT", "rlx"),
            name=os.environ.get("WANDB_NAME", workdir.name),
            settings=self._wandb.Settings(console="off"),
        )  # fmt: skip
        # The x axis is our step: wandb's own cannot go back, and evaluations come late.
        self._run.define_metric("*", step_metric="step")

    def add(self, step: int, values: dict[str, Value]) -> None:
        self._run.log({"step": step, **scalars(values)})

    def on_end(self, reason: str) -> None:
        self._run.finish(exit_code=int(reason != "finished"))


class Trackio(Board):
    """Writes one run of trackio for a WORKDIR, where trackio's own environment says."""

    def __init__(self):
        self._trackio = _imported("trackio")

    def on_begin(self, config: dict[str, Any], workdir: Path, step: int) -> None:
        name = f"{workdir.name}-{board_id(workdir)}"
        self._run = self._trackio.init("rlx", name, resume="allow", config=config, embed=False)

    def add(self, step: int, values: dict[str, Value]) -> None:
        self._run.log(scalars(values), step=step)

    def on_end(self, reason: str) -> None:
        self._run.finish()


class MLflow(Board):
    """Writes one run of MLflow for a WORKDIR, where MLflow's own environment says."""

    def __init__(self):
        self._mlflow = _imported("mlflow")
        if not self._mlflow.is_tracking_uri_set() and not importlib.util.find_spec("sqlalchemy"):
            raise UserError("MLFLOW_TRACKING_URI is not set; give a server's URL")
        self._client = self._mlflow.MlflowClient()

    def on_begin(self, config: dict[str, Any], workdir: Path, step: int) -> None:
        from rlx.observe.run_report import flatten

        client, name = self._client, os.environ.get("MLFLOW_EXPERIMENT_NAME", "rlx")
        experiment, tag = client.get_experiment_by_name(name), board_id(workdir)
        place = experiment.experiment_id if experiment else client.create_experiment(name)
        runs = client.search_runs([place], f"tags.rlx = '{tag}'")
        run = runs[0] if runs else client.create_run(place, run_name=workdir.name)
        self._run = run.info.run_id
        settings = [] if runs else [self._mlflow.entities.Param(*each) for each in flatten(config)]
        for i in range(0, len(settings), 100):  # the most in one request
            client.log_batch(self._run, params=settings[i : i + 100])
        client.set_tag(self._run, "rlx", tag)
        client.update_run(self._run, "RUNNING")

    def add(self, step: int, values: dict[str, Value]) -> None:
        metrics = {re.sub(r"[^\w\-. /]", "_", tag): v for tag, v in scalars(values).items()}
        self._mlflow.log_metrics(metrics, step=step, run_id=self._run)

    def on_end(self, reason: str) -> None:
        ends = {"finished": "FINISHED", "stopped": "KILLED"}
        self._client.set_terminated(self._run, ends.get(reason, "FAILED"))


WRITERS = {
    "tensorboard": TensorBoard, "wandb": WeightsAndBiases, "trackio": Trackio, "mlflow": MLflow,
}  # fmt: skip


def load(names: Iterable[str], callbacks: Sequence[Any] = ()) -> list[tuple[str, Any]]:
    """Return (name, hook) of `names`, in WRITERS or a user's, and `callbacks`; or UserError."""
    hooks = []
    for entry in names:
        name, hook = f"observe.writers={entry!r}", user_code.find("observe.writers", entry, WRITERS)
        try:
            hooks.append((name, hook() if isinstance(hook, type) else hook))
        except Exception as error:
            raise UserError(f"{name} cannot be made: {user_code.where(error)}") from error
    pairs = enumerate(callbacks)
    return hooks + [(f"callbacks[{i}] ({type(hook).__name__})", hook) for i, hook in pairs]


def board_id(workdir: Path) -> str:
    """Return the id of WORKDIR's run on boards; the first call makes it."""
    path = workdir / BOARD_ID
    if not path.exists():
        write_atomically(path, secrets.token_hex(4).encode())
    return path.read_text()


def values_of(record: Mapping[str, Any], section: str = "") -> dict[str, Value]:
    """Return a record's numbers by tag, `section/name`; counts by number stay one value."""
    values: dict[str, Value] = {}
    for name, item in record.items():
        prefix = section or _SECTION.get(name, "" if "/" in name else "other")
        if name != "step":
            values |= _values(f"{prefix}/{name}" if prefix else name, item)
    return values


def _values(tag: str, item: Any) -> dict[str, Value]:
    if isinstance(item, int | float):
        return {tag: item}
    if not isinstance(item, Mapping):
        return {}
    if item and all(key.lstrip("-").isdigit() for key in item):
        return {tag: {int(key): count for key, count in item.items()}}
    return {name: v for key in item for name, v in _values(f"{tag}_{key}", item[key]).items()}


def scalars(values: Mapping[str, Value]) -> dict[str, float]:
    """Return the values that are one number."""
    return {tag: value for tag, value in values.items() if not isinstance(value, dict)}


def _imported(package: str) -> Any:
    if not importlib.util.find_spec(package):
        raise UserError(f"{package} is not installed; {install(package)}, or leave it out")
    return importlib.import_module(package)
