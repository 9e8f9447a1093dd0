"""Feed a run's recorded batches to its trainer again, and compare metrics and weights bit for bit.

journal ─▶ batches ─▶ update, from the nearest checkpoint ─▶ metrics.jsonl, sums of the weights

A bundle is a zip file of what replays some steps elsewhere. It unpacks to a directory like a run's.
"""

import itertools
import json
import os
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from rlx.algorithms.advantages import running_baselines
from rlx.base import Group, UserError
from rlx.config import check, default, leaves
from rlx.fleet import adapter
from rlx.journal import history, journal, records
from rlx.model import directory
from rlx.model.tensors import write_directory
from rlx.observe import environment
from rlx.observe.metrics import STARTS
from rlx.run import flags, resume, trainers
from rlx.run.allocate import changed_environment, gpu_environment
from rlx.run.export import require_base
from rlx.run.inputs import INITIAL, Inputs
from rlx.run.room_options import RunOptions, as_json
from rlx.system.jsonl import append_jsonl, has_step, jsonable, read_jsonl
from rlx.train import checkpoint, conductor
from rlx.train.contract import State, Update
from rlx.train.train_options import TrainOptions, lora_of

_SHOWN = 3  # metrics of the first step that differs
Changed = Mapping[str, Any]  # key → value of settings that replace those of the run
Make = Callable[[ConfigDict], Update]


class Recorded:
    """The steps of a run, from 1, as its directory has them."""

    def __init__(self, workdir: Path):
        self.workdir = workdir
        self.metrics = {r["step"]: r for r in read_jsonl(workdir / "metrics.jsonl") if has_step(r)}
        self.batches = history.batches(journal.read(workdir / "journal"))
        self._starts = {s["start"]: s for s in read_jsonl(workdir / STARTS) if "start" in s}
        if not self.batches.groups or not self._starts:
            remedy = "give the --workdir of a run whose journal.keep was above 0, or a bundle"
            what = f"{workdir}/journal is missing, damaged or without a complete batch"
            raise UserError(f"{what}; {remedy}")

    def start(self, step: int) -> Mapping[str, Any]:
        """Return the entry of starts.jsonl that made a step; the last one if that is unknown."""
        number = self.metrics.get(step, {}).get("start")
        return self._starts.get(number, self._starts[max(self._starts)])

    def config(self, step: int, changed: Changed | None = None) -> ConfigDict:
        """Return the settings of a step."""
        config = config_of(self.start(step)["config"])
        config.update_from_flattened_dict(changed or {})
        return config

    def model(self, config: ConfigDict) -> Path:
        """Return the HF directory of the first weights."""
        initial = self.workdir / INITIAL
        return initial if initial.is_dir() else directory.resolve(config.model.path)

    def groups(self, step: int) -> list[Group]:
        return [place.read().group() for place in self.batches.groups[step - 1]]


def config_of(values: Mapping[str, Any]) -> ConfigDict:
    """Return the config that `as_json` wrote."""
    config = default()
    config.update({key: value for key, value in values.items() if value is not None})
    return config


class Plan(NamedTuple):
    """Steps to compare, `first` to `last`, and the checkpoint to begin from, after step `begin`."""

    origin: Path | None  # None: the run's first weights
    begin: int
    first: int
    last: int


def plan(recorded: Recorded, first: int = 0, last: int = 0, generation: bool = False) -> Plan:
    """Return how to replay steps `first` to `last`; 0: as far as the records reach.

    UserError if the journal or the checkpoints do not reach these steps.
    """
    steps = {step + 1 for step in recorded.batches.groups}
    last = last or max(steps & recorded.metrics.keys(), default=0)
    paths = checkpoint.checkpoints(recorded.workdir / "checkpoints")
    checkpoints = [path for path in paths if checkpoint.verify(path) is None]
    origins = {0: None, **{checkpoint.step_of(path): path for path in checkpoints}}
    begins = [step for step in origins if step < last and set(range(step + 1, last + 1)) <= steps]
    begins = [step for step in begins if step < first <= last] if first else begins[:1]
    if generation and begins:  # begin before the versions of these steps' samples, if possible
        oldest = max(0, first - 1 - recorded.config(last).rollout.max_staleness)
        begins = [step for step in begins if step <= oldest] or [min(begins)]
    if not begins:
        has = f"the journal has steps {min(steps)} to {max(steps)}"
        what = f"cannot replay steps {first or 1} to {last}: {has}, and checkpoints are after steps"
        raise UserError(f"{what} {[*origins][1:]}; give other steps with --from and --until")
    return Plan(origins[max(begins)], max(begins), first or max(begins) + 1, last)


def replay(
    recorded: Recorded,
    plan: Plan,
    changed: Changed,
    say: Callable[[str], None],
    out: Path | None = None,  # new directory of the metrics and the final weights
    # Called before the first and after each step; returns whether it is like the run's.
    after: Callable[[int, Update, State], bool] = lambda *_: True,
) -> bool:
    """Train and compare; return whether all steps are bitwise those of the run."""
    config = recorded.config(plan.begin + 1, changed)
    check(config)
    run_env = recorded.start(plan.begin + 1).get("environment", {})
    with _as_in_the_run(run_env), gpu_environment(config):
        library = trainers.library(config)
        with trainers.join_processes(config, Event()) as hosts:
            if hosts.index:
                return trainers.follow(config, hosts)[1]
            model, inputs = recorded.model(config), Inputs()
            inputs.train, inputs.model_dir = TrainOptions.of(config), model
            library.check_devices(inputs)

            def make(config: ConfigDict) -> Update:
                options = TrainOptions.of(config), RunOptions.of(config).context
                paths = {"path": str(model), "image_dir": str(recorded.workdir / "images")}
                return conductor.driver(hosts, partial(library.make, *options), **paths)

            start, differing, compared, same = time.monotonic(), 0, Counter[str](), True
            origin = plan.origin or f"the first weights in {model}"
            say(f"replaying steps {plan.begin + 1} to {plan.last} from {origin}")
            for step, update, state, metrics in _steps(recorded, plan, changed, make, model):
                same = after(step, update, state) and same
                if out and step > plan.begin:
                    append_jsonl(out / "metrics.jsonl", {"step": step, **metrics})
                if step < plan.first:
                    continue
                record, sums = recorded.metrics.get(step), recorded.batches.weights.get(step)
                compared.update(steps=bool(record), versions=bool(sums))
                if text := difference(metrics, record or {}, sums, update, state):
                    differing += 1
                    if differing == 1:
                        say(f"step {step} differs: {text}")
            if out:
                write_directory(out / "hf", update.model, update.weights(state), source=model)
            steps = range(plan.begin + 1, plan.last + 1)
            trained = sum(recorded.metrics.get(s, {}).get("step_seconds", 0.0) for s in steps)
            times = f"in {time.monotonic() - start:.1f} s; the run took {trained:.1f} s for them"
            if differing:
                say(f"{differing} of {compared['steps']} steps differ, {times}")
            else:
                weights = f"the weights of {compared['versions']} versions"
                both = f"{compared['steps']} steps and {weights}"
                say(f"the metrics of {both} are bitwise those of the run, {times}")
            if differing or not same:
                why = [f"{key} is {value}" for key, value in changed.items()]
                why += filter(None, [elsewhere(run_env, update.devices)])
                say("; ".join(why) or "settings, machine and packages are those of the run")
            conductor.stop(hosts, step=plan.last, complete=True)
    return same and not differing


def _steps(
    recorded: Recorded, plan: Plan, changed: Changed, make: Make, model: Path
) -> Iterator[tuple[int, Update, State, dict[str, Any]]]:
    """Yield `plan.begin` and each step with the trainer, its state, and the metrics."""
    config, means = recorded.config(plan.begin + 1, changed), dict[str, float]()
    update = make(config)
    if plan.origin:
        host = checkpoint.read_host(plan.origin)
        require_base(host, adapter.digest(model) if lora_of(config.lora) else b"", model)
        state, means = update.restore(plan.origin), host["executor"].get("means", {})
    else:
        state = update.init()
    yield plan.begin, update, state, {}
    options = TrainOptions.of(config)
    for step in range(plan.begin + 1, plan.last + 1):
        now = recorded.config(step, changed)
        if TrainOptions.of(now) != options:  # a later start had other settings
            with tempfile.TemporaryDirectory() as place:
                update.save(Path(place), state).result()
                update = make(now)
                state, options = update.restore(Path(place)), TrainOptions.of(now)
        groups = recorded.groups(step)
        if decay := options.algorithm.running_mean:
            means, groups = running_baselines(means, groups, decay)
        state, metrics = update.update(state, groups)
        yield step, update, state, dict(metrics)


def difference(
    metrics: Mapping[str, Any], record: Mapping[str, Any], sums: Mapping[str, Any] | None,
    update: Update, state: State,
) -> str:  # fmt: skip
    """Return how metrics differ from a line of metrics.jsonl, or weights from the journal's."""
    texts = [
        f"{name} {record[name]} → {value}"
        for name, value in jsonable(metrics).items()
        if name in record and name not in _OF_THE_RUN and record[name] != value
    ]
    texts[_SHOWN:] = [f"{len(texts) - _SHOWN} more metrics"] * (len(texts) > _SHOWN)
    if sums:
        weights = update.weights(state, sums["adapters"])
        with open(os.devnull, "wb", buffering=0) as nothing:
            new_sums = weights.write(nothing)
        pairs = zip(["the header", *weights.tensors], new_sums, sums["sums"], strict=False)
        names = [name for name, new, old in pairs if new != old]  # each sum includes those before
        texts += [f"the first tensor that differs is {name}" for name in names[:1]]
    return "; ".join(texts)


# Facts of the run in metrics.jsonl, whose names a user's statistic may have too.
_OF_THE_RUN = (
    "step", "global_step", "epoch", "version", "step_seconds", "elapsed_seconds", "seconds",
    "generated_tokens_per_second", "consumed_tokens_per_second",
)  # fmt: skip


def elsewhere(run_env: Mapping[str, Any], devices: str) -> str:
    """Return how this process differs from the run's environment `run_env`, or ""."""
    place = {"trainer_cores": len(os.sched_getaffinity(0)), "devices": devices}
    return resume.machine_warning(run_env, environment.describe(place))


@contextmanager
def _as_in_the_run(run_env: Mapping[str, Any]) -> Iterator[None]:
    """Give this process the threads and XLA flags of the run's trainer, which decide its bits."""
    cores = sorted(os.sched_getaffinity(0))
    xla_flags = run_env.get("variables", {}).get("XLA_FLAGS") or ""
    # XLA takes the number of its threads from NPROC, torch from the cores.
    variables = {"NPROC": str(run_env.get("compute_threads", "")), "XLA_FLAGS": xla_flags}
    os.sched_setaffinity(0, cores[: run_env.get("trainer_cores", len(cores))])
    try:
        with changed_environment({k: v for k, v in variables.items() if v and k not in os.environ}):
            yield
    finally:
        os.sched_setaffinity(0, cores)


def as_flag(config: ConfigDict, place: Path) -> str:
    """Write a config as a file into a directory; return the flag that names it."""
    text, file = json.dumps(as_json(config)), place / "recorded.py"
    file.write_text(
        "import json\n\nfrom rlx.run.replay_run import config_of\n\n\n"
        f"def get_config():\n    return config_of(json.loads({text!r}))\n"
    )
    return f"--config={file}"


def changes(config: ConfigDict, settings: list[str]) -> dict[str, Any]:
    """Return key → value of what flags `--config.KEY=VALUE` change in a config."""
    after = flags.with_overrides(config_of(before := as_json(config)), settings)
    old, now = dict(leaves(before)), dict(leaves(after))
    return {key: now[key] for key, value in leaves(as_json(after)) if old.get(key) != value}


def write_bundle(path: Path, recorded: Recorded, plan: Plan) -> None:
    """Write the bundle of a plan's steps; UserError if it cannot be written."""
    workdir, config = recorded.workdir, recorded.config(plan.begin + 1)
    files = {name: workdir / name for name in ("config.json", STARTS, "metrics.jsonl")}
    files |= _below(workdir / "code", "code") | _below(recorded.model(config), INITIAL)
    for step in range(plan.begin + 1, plan.last + 1):
        trajectories = [t for group in recorded.groups(step) for t in group.trajectories]
        names = {name for t in trajectories for name in t.images}
        files |= {f"images/{name}": workdir / "images" / name for name in names}
    if plan.origin:
        files |= _below(plan.origin, f"checkpoints/{plan.origin.name}")
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with zipfile.ZipFile(scratch, "w", strict_timestamps=False) as file:
            for name, source in files.items():
                file.write(source, name)
            file.writestr(f"journal/{0:020d}.records", b"".join(_records(recorded, plan)))
        scratch.replace(path)
    except OSError as error:
        scratch.unlink(missing_ok=True)
        raise UserError(f"cannot write {path}: {error.strerror}; give another --bundle") from error


def _below(place: Path, name: str) -> dict[str, Path]:
    paths = sorted(path for path in place.rglob("*") if path.is_file())
    return {f"{name}/{path.relative_to(place)}": path for path in paths}


def _records(recorded: Recorded, plan: Plan) -> Iterator[bytes]:
    number, tried = itertools.count(), recorded.batches.attempts
    for step in range(plan.begin, plan.last):
        groups = [place.read() for place in recorded.batches.groups[step]]
        ids = [record.fields["group_id"] for record in groups]
        events = [(record.kind, record.fields, record.packed) for record in groups]
        events += [("admit", {"group_id": g, "attempt": tried.get(g, 0)}, b"") for g in ids]
        events.append(("take", {"step": step, "groups": ids}, b""))
        if step + 1 in recorded.batches.weights:
            events.append(("weights", recorded.batches.weights[step + 1], b""))
        for kind, fields, packed in events:
            yield records.encode(next(number), kind, fields, packed)


@contextmanager
def open_run(path: Path) -> Iterator[Path]:
    """Yield the directory of a run, or of an unpacked bundle; UserError if it is damaged."""
    if path.is_dir():
        yield path
        return
    if not path.exists():
        raise UserError(f"there is no {path}; give the --workdir of a run, or a bundle")
    with tempfile.TemporaryDirectory(prefix="rlx-replay-") as place:
        try:
            with zipfile.ZipFile(path) as file:
                file.extractall(place)  # checks every CRC-32
        except (OSError, zipfile.BadZipFile) as error:
            what = f"{path} is neither the directory of a run nor a whole bundle ({error})"
            raise UserError(f"{what}; get it again") from error
        yield Path(place)
