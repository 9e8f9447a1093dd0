"""Build the parts of a run in the order of their dependencies, and end them in reverse.

servers start ─▶ trainer is built ─▶ records open ─▶ fleet connects ─▶ executor admits
"""

import dataclasses
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Event, current_thread, main_thread
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from rlx.agents.online_workflow import OnlineWorkflow, RunContext
from rlx.base import UserError
from rlx.cli.text import size
from rlx.cli.user_code import own_files
from rlx.doctor import memory
from rlx.doctor.memory import RunSizes
from rlx.evaluation.held_out import HeldOut, HeldOutOptions
from rlx.fleet import wire
from rlx.fleet.client import Fleet, NoFleet, Timeouts
from rlx.fleet.requests import TRUNCATED
from rlx.fleet.tls import client_tls
from rlx.launch import teacher
from rlx.launch.local import CpuPlan, cpu_plan, servers_of
from rlx.launch.teacher import ScorerOptions
from rlx.mismatch import measure
from rlx.mismatch.gate import Gate
from rlx.observe import environment
from rlx.observe.hooks import Hooks
from rlx.observe.metrics import MetricsWriter
from rlx.observe.progress import Progress
from rlx.observe.rundir import gaps
from rlx.observe.timeline import Timeline
from rlx.option import read_options
from rlx.rollout import attempts
from rlx.rollout.data import Cursor
from rlx.rollout.executor import Executor
from rlx.rollout.staleness import Limits
from rlx.rollout.teacher_scores import TeacherScored
from rlx.run import flags, resume, trainers
from rlx.run.export import Export, require_base
from rlx.run.frequency import Position, from_host
from rlx.run.inputs import Inputs
from rlx.run.room_options import (
    as_json,
    evaluation_sampling,
    has_servers,
    joining_of,
    patience,
    server_options,
    sizes_of,
    training_sampling,
)
from rlx.system import available_memory
from rlx.system.jsonl import append_jsonl, read_jsonl
from rlx.system.loop_thread import CLOSE_SECONDS, LoopThread
from rlx.system.signals import interrupts
from rlx.system.workdir_lock import Killed
from rlx.train import checkpoint, conductor
from rlx.train.contract import State, Update
from rlx.train.hosts import Hosts
from rlx.train.train_options import TrainOptions

SKIPS_SHOWN = 5  # skipped rows shown in the terminal; skipped.jsonl has all


@dataclass(eq=False, kw_only=True)
class Parts:
    """A run's parts, connected and started by `build`.

    Attributes:
      loop: thread of rollouts, publishes and evaluations.
      stop: set by the first Ctrl-C or SIGTERM, a hook, or another thread.
      elapsed: returns the seconds of the run, including earlier processes.
      teacher_fleet: fleet of the teacher that scores rollouts, if there is one.
      advice: returns the remedy when out of memory.
      begun: position at the start. last: kind of `frequency.KINDS` → its last position.
    """

    config: ConfigDict
    workdir: Path
    inputs: Inputs
    stop: Event
    hooks: Hooks
    elapsed: Callable[[], float] = field(init=False)
    progress: Progress = field(init=False)
    timeline: Timeline = field(init=False)
    update: Update = field(init=False)
    export: Export = field(init=False)
    writer: MetricsWriter = field(init=False)
    held_out: HeldOut = field(init=False)
    loop: LoopThread = field(init=False)
    executor: Executor = field(init=False)
    fleet: Fleet | NoFleet = field(init=False)
    teacher_fleet: Fleet | None = None
    gate: Gate | None = None
    advice: Callable[[], str] = field(init=False)
    begun: Position = field(init=False)
    last: Mapping[str, Position] = field(init=False)


def _restore(update: Any, trainer: str, path: Path) -> Any:
    """Return the train state of a checkpoint; raise UserError if another trainer wrote it."""
    before = checkpoint.read_host(path).get("config", {}).get("trainer", trainer)
    if before != trainer:
        raise UserError(
            f"{path} was written by trainer={before}, got trainer={trainer}; resume with "
            f"--config.trainer={before}, or convert it with `python -m rlx.convert` and start in a "
            "new workdir with its weights"
        )
    return update.restore(path)


def build(
    parts: Parts,
    stack: ExitStack,
    killed: Killed | None,
    messages: Sequence[str],
    hosts: Hosts,
    gpus: Sequence[Sequence[str]],
) -> tuple[State, int]:
    """Build and start everything; `stack` ends it in reverse order.

    Args:
      killed: the killed process that used the workdir before, if any.
      messages: result of `resume.prepare_workdir`, for the terminal.
      hosts: the trainer's processes; this one is number 0.
      gpus: names of each local server's GPUs; empty: servers see all.

    Returns:
      train state, which the first update donates, and its step.

    Raises:
      UserError: servers, teacher, checkpoint or storage cannot work.
    """
    config, workdir, inputs, hooks = parts.config, parts.workdir, parts.inputs, parts.hooks
    begun, served = time.monotonic(), has_servers(config)
    parts.timeline = timeline = Timeline(earlier=workdir / "timeline.json")
    stack.callback(lambda: timeline.save(workdir / "timeline.json"))
    log = workdir / "console.log"
    progress = stack.enter_context(Progress(config.total_steps, title=workdir.name, log=log))
    parts.progress = progress
    for text in filter(None, [*messages, inputs.notes]):
        progress.message(text)
    _warn_truncated(config, progress.message)
    _warn_low_memory(config, workdir, inputs, killed, progress.message)

    def stop_after_step() -> None:
        parts.stop.set()
        progress.message("finishing this step, then saving; press Ctrl-C again to stop at once")

    if current_thread() is main_thread():  # signals reach no other
        stack.enter_context(interrupts(stop_after_step, lambda: hooks.under_way))
    cores = sorted(os.sched_getaffinity(0))
    token = wire.take_token(os.environ)
    if token:  # for the next run in this process
        stack.callback(os.environ.__setitem__, wire.TOKEN_VARIABLE, token)
    own = 0 if config.fleet.addresses else config.fleet.num_servers
    teacher_options = ScorerOptions.of_teacher(config)
    reward_options = ScorerOptions.of_reward_model(config)
    first_reward = own + teacher_options.num_local
    plan = cpu_plan(cores, first_reward + reward_options.num_local, config.fleet.threads)
    os.sched_setaffinity(0, plan.trainer)  # before JAX makes its threads
    stack.callback(os.sched_setaffinity, 0, cores)
    trainers.library(config).check_devices(config)
    model_dir = trainers.first_weights(config, workdir, inputs)
    given: dict[str, Any] = {"token": token, "tls": client_tls(**config.fleet.tls)}
    started: dict[str, Any] = {"workdir": workdir, "on_message": progress.message}
    started |= server_options(config)
    if served:
        sizes = sizes_of(config, inputs.model_config)
        started["publish_dir"] = publish_dir(config, sizes, workdir, progress.message)
    scorers = {
        teacher_options: plan.servers[own:first_reward],
        reward_options: plan.servers[first_reward:],
    }
    scoring: dict[str, Any] = {  # local ones load and compile while the trainer is built
        options.name: stack.enter_context(teacher.servers(options, cores, **given, **started))
        for options, cores in scorers.items()
        if options
    }
    if served:
        own_plan = CpuPlan(plan.trainer, plan.servers[:own])
        addresses = config.fleet.addresses
        servers = servers_of(
            addresses, model_dir, plan=own_plan, gpus=gpus, joining=joining_of(config), **given,
            **started,
        )  # fmt: skip
        stack.enter_context(servers)
    stack.callback(inputs.reward_pool.close)
    if served:
        inputs.reward_pool.start()

    make = partial(trainers.library(config).make, config)
    parts.update = update = conductor.driver(hosts, make, path=str(model_dir))
    template = inputs.prompts.tokenizer.chat_template if config.data.chat_template else ""
    parts.export = export = Export(config, update, model_dir, inputs.model_dir, template)
    restored = None
    if config.checkpoint.recover_mode == "auto":
        checkpoints = workdir / "checkpoints"
        restore = partial(_restore, update, config.trainer)
        restored = checkpoint.restore_latest(checkpoints, restore, progress.message)
    if restored:
        require_base(restored.host, export.base, model_dir)
        state, step = restored.state, restored.host["step"]
        earlier = restored.host["elapsed_seconds"]
    else:
        state, step, earlier = update.init(), 0, 0.0

    parts.elapsed = lambda: earlier + time.monotonic() - begun
    hooks.say = progress.message
    place = {
        "cores": len(cores),
        "trainer_cores": len(plan.trainer),
        "devices": update.devices,
        "servers": len(config.fleet.addresses) or config.fleet.num_servers,
    }
    parts.writer = _records(parts, step, place, restored)
    stack.push(lambda kind, *_: hooks.end("stopped" if kind is KeyboardInterrupt else "failed"))
    hooks.begin(as_json(config), workdir, step)
    note_skip = _Skips(workdir / "skipped.jsonl", progress.message)
    evaluated = (record["step"] for record in read_jsonl(workdir / "eval.jsonl"))
    questions = HeldOutOptions(
        inputs.eval_rows,
        inputs.held_out,
        sampling=evaluation_sampling(config) if served else None,
        total_steps=config.total_steps,
        patience=patience(config),
        timeout=config.rollout.request_timeout_seconds,
    )
    positions = restored.host.get("positions", {}) if restored else {}
    parts.begun, parts.last = from_host(positions, Position(step=step, seconds=earlier))
    parts.held_out = HeldOut(
        questions, evaluated, step, parts.last["eval"].step, timeline, parts.elapsed, note_skip,
        progress.message,
    )  # fmt: skip
    fleet: Fleet | NoFleet = NoFleet()
    limits = read_options(Timeouts, config.fleet, request=config.rollout.request_timeout_seconds)
    if served:
        fleet = servers.fleet(
            limits=limits, kv_on_update=config.fleet.kv_on_update, on_message=progress.message
        )
    fleets = {name: teacher.fleet(servers, limits, progress.message, name)
              for name, servers in scoring.items()}  # fmt: skip
    parts.fleet, parts.teacher_fleet = fleet, fleets.get(teacher_options.name)
    reward_fleet = fleets.get(reward_options.name)
    longest = min(TrainOptions.of(config).row_budget, max(config.train.row_buckets))
    parts.loop = loop = LoopThread("executor")
    parts.executor = executor = _executor(parts, reward_fleet, longest, note_skip)
    if isinstance(inputs.workflow, OnlineWorkflow):
        needed = partial(_oldest_needed, workdir / "checkpoints", config.rollout.max_staleness)
        first = restored.host["executor"]["cursor"]["position"] if restored else 0
        inputs.workflow.context = RunContext(
            workdir / "sessions", first, lambda: executor.version, needed, longest, progress.message
        )  # fmt: skip
    loop.start()
    stack.callback(loop.close)
    stack.callback(executor.close)
    stack.callback(_close, loop, fleet)
    for name, scorer in fleets.items():
        stack.callback(_close, loop, scorer)
        loop.run(teacher.connect(scorer, name))
    loop.run(fleet.connect())
    if restored:
        saved = restored.host["executor"]
        if changed := executor.restore(saved, restored.groups, config.data.allow_change):
            progress.message(f"{changed}; continuing, because data.allow_change is set")
    # Local servers have just loaded the first weights.
    if restored or config.fleet.addresses or config.fleet.join:
        method = config.fleet.publish
        export.publish(state, lambda w: loop.submit(fleet.publish(step, w, method))).result()
    executor.set_version(step)
    if served and config.gate.enabled:
        parts.gate = _gate(config, inputs, model_dir, workdir / "hf")
    devices = trainers.library(config).devices
    parts.advice = partial(memory.advice, sizes_of(config, inputs.model_config), devices)
    return state, step


def disk_warning(config: ConfigDict, workdir: Path, inputs: Inputs) -> str:
    """Return a warning about disk space for checkpoints; raise DiskFull if none fits."""
    there = [workdir / "checkpoints", workdir / "hf"]
    files = [path for place in there for path in place.rglob("*") if path.is_file()]
    return memory.full_disk_warning(
        sizes_of(config, inputs.model_config),
        shutil.disk_usage(workdir).free,
        sum(path.stat().st_size for path in files),
    )


def _warn_truncated(config: ConfigDict, say: Callable[[str], None]) -> None:
    cut = training_sampling(config).truncation
    if cut and has_servers(config):
        say(f"{cut} in config.sampling: {TRUNCATED}")


def publish_dir(
    config: ConfigDict, sizes: RunSizes, workdir: Path, say: Callable[[str], None]
) -> str:
    """Return the directory of published weights: `fleet.publish_dir`, or `workdir` if that is full.

    Raises:
      UserError: neither has space, or running servers can read `fleet.publish_dir` only.
    """
    fleet, needed = config.fleet, memory.in_publish_dir(sizes)
    try:
        free = shutil.disk_usage(fleet.publish_dir).free
    except OSError:  # reported by `Scratch`
        return fleet.publish_dir
    if needed <= free:
        return fleet.publish_dir
    what = (
        f"fleet.publish_dir={fleet.publish_dir} has {size(free)} free, and two versions of the "
        f"weights need {size(needed)}"
    )
    own = not (fleet.addresses or fleet.join)
    if (own or fleet.publish != "path") and needed <= shutil.disk_usage(workdir).free:
        say(f"{what}; using the slower {workdir}; in Docker set --shm-size=8g")
        return str(workdir.absolute())
    raise UserError(f"{what}; in Docker set --shm-size=8g, or set it to a disk with space")


def _warn_low_memory(
    config: ConfigDict,
    workdir: Path,
    inputs: Inputs,
    killed: Killed | None,
    say: Callable[[str], None],
) -> None:
    """Warn before step 1 if this run may be OOM-killed or fill its disk."""
    if killed:
        say(str(killed))
    for_memory = bool(killed and killed.for_memory)
    there, sizes = available_memory.memory(), sizes_of(config, inputs.model_config)
    on_cpu = trainers.library(config).devices().platform == "cpu"
    if on_cpu and (text := memory.low_memory_warning(sizes, there, always=for_memory)):
        say(text)
    if text := disk_warning(config, workdir, inputs):  # last: a full disk raises
        say(text)


def _gate(config: ConfigDict, inputs: Inputs, first: Path, saved: Path) -> Gate:
    """Return the run's gate; its prompts are evenly spread training rows.

    Args:
      first, saved: HF directories of the run's first weights and of its last checkpoint, which a
        server may still have; they need not exist.
    """
    rows, count = inputs.train_rows, min(config.gate.prompts, len(inputs.train_rows))
    chosen = [rows[i * len(rows) // count] for i in range(count)]
    prompts = [np.array(inputs.prompts.ids(row), np.int32) for row in chosen]
    training, model = training_sampling(config), config.model
    budget = min(config.gate.max_new_tokens, training.max_new_tokens)
    exact = model.compute_dtype == model.publish_dtype == "float32"
    return Gate(
        prompts,
        dataclasses.replace(
            training,
            max_new_tokens=budget,
            min_new_tokens=min(training.min_new_tokens, budget),
            stop=(),
        ),
        measure.TrainerScorer(
            inputs.model_config,
            temperature=training.temperature,
            row_length=measure.row_length(max(map(len, prompts)) + budget),
            compute_dtype=model.compute_dtype,
            chunk=model.logprob_chunk,
        ),
        measure.tolerance(exact, config.gate.max_delta, config.gate.mean_delta),
        seed=config.seed,
        earlier={"the run's first weights": first, "the last checkpoint": saved},
        dtype=model.dtype,
    )


def _records(
    parts: Parts, step: int, place: dict[str, Any], restored: checkpoint.Restored | None
) -> MetricsWriter:
    """Open the run's records after `step`; show what a resumed run repeats or changes."""
    config, workdir, say = parts.config, parts.workdir, parts.progress.message
    last, now = resume.last_step(workdir), as_json(config)
    before = restored.host.get("config", now) if restored else now
    changed = list(resume.differences(before, now))
    writer = MetricsWriter(workdir, parts.hooks, step + 1, place, now, changed)
    own = [*own_files(), flags.config_file(sys.argv), Path(config.data.chat_template)]
    environment.keep(workdir / "code" / f"start-{writer.start}", own)
    if writer.unreadable:
        say(
            f"{writer.unreadable} corrupt lines of the run's records were moved to "
            f"{workdir}/*.unreadable"
        )
    if restored:
        say(resume.continuation(restored.host, last))
        for text in resume.setting_changes(before, now, step):
            say(text)
        if text := resume.machine_warning(writer.before, writer.environment):
            say(text)
        if holes := gaps(read_jsonl(workdir / "metrics.jsonl"), step):
            say(f"metrics.jsonl has no records of {holes}; charts omit them")
    return writer


def _executor(
    parts: Parts,
    reward_fleet: Fleet | None,
    longest: int,
    note_skip: Callable[[dict[str, Any]], None],
) -> Executor:
    """Return the executor of the run's workflow; `parts.loop` need not run yet."""
    c, inputs = parts.config, parts.inputs
    workflow, online = inputs.workflow, isinstance(inputs.workflow, OnlineWorkflow)
    mix = [(len(source.rows), source.weight) for source in inputs.sources]
    if parts.teacher_fleet:
        workflow = TeacherScored(workflow, parts.teacher_fleet, c.sampling.temperature)
    if reward_fleet and inputs.model_rewarded:
        workflow = inputs.model_rewarded(workflow, reward_fleet)
    r = c.rollout
    return Executor(
        workflow,
        Cursor(inputs.train_rows, c.seed, c.data.shuffle, mix),
        Limits(r.batch_prompts, r.max_staleness, r.max_concurrent_rollouts, c.total_steps),
        parts.fleet,
        seed=c.seed,
        force_staleness=r.force_staleness,
        patience=patience(c),
        max_tokens=longest,
        on_skip=lambda skipped: note_skip(skipped.record("train")),
        say=parts.progress.message,
        loop=parts.loop,
        drop_equal_rewards=inputs.algorithm.drop_equal_rewards,
        running_mean=inputs.algorithm.running_mean,
        request_timeout=None if online else r.request_timeout_seconds,
        keep_versions=online,
    )


def _oldest_needed(checkpoints: Path, max_staleness: int) -> int:
    """Return the oldest version whose tokens a run resumed from a checkpoint may need."""
    steps = map(checkpoint.step_of, checkpoint.checkpoints(checkpoints))
    return min(steps, default=0) - max_staleness


def _close(loop: LoopThread, fleet: Fleet | NoFleet) -> None:
    with suppress(RuntimeError, TimeoutError):  # the thread has ended or is blocked
        loop.run(fleet.close(), CLOSE_SECONDS)


class _Skips:
    """Record skipped rows in skipped.jsonl and show the first ones, from any thread."""

    def __init__(self, path: Path, say: Callable[[str], None]):
        self._path, self._say, self._count = path, say, 0

    def __call__(self, record: dict[str, Any]) -> None:
        append_jsonl(self._path, {**record, "time": time.time()})
        self._count += 1
        if self._count <= SKIPS_SHOWN:
            last = self._count == SKIPS_SHOWN
            more = "; skipped.jsonl has the next ones" if last else ""
            self._say(attempts.sentence(record) + more)
