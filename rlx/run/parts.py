"""The parts of a run, built in the order in which they need each other and ended in reverse.

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

from rlx.agents.online_workflow import OnlineWorkflow, RunPlace
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
from rlx.run.export import Export
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
from rlx.train import checkpoint
from rlx.train.contract import State, Update
from rlx.train.hosts import Hosts
from rlx.train.train_options import TrainOptions

SKIPS_SHOWN = 5  # skipped rows named in the terminal; skipped.jsonl has all


@dataclass(eq=False, kw_only=True)
class Parts:
    """A run's parts, connected and started by `build`; none is replaced while the run goes on.

    Attributes:
      loop: thread in which rollouts, publishes and evaluations run.
      stop: set by the first Ctrl-C or SIGTERM, or by whoever else has it.
      elapsed: seconds of the run, with those of the processes that it continues.
      tutor: the fleet in front of the teacher, where one scores rollouts.
      advice: which settings to lower when memory is short, in words.
      begun: the position to go on from. last: kind of `frequency.KINDS` → where it happened last.
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
    tutor: Fleet | None = None
    gate: Gate | None = None
    advice: Callable[[], str] = field(init=False)
    begun: Position = field(init=False)
    last: Mapping[str, Position] = field(init=False)


def _restore(update: Any, trainer: str, path: Path) -> Any:
    """Return the train state of a checkpoint; UserError where another trainer wrote it."""
    before = checkpoint.read_host(path).get("config", {}).get("trainer", trainer)
    if before != trainer:
        raise UserError(
            f"{path} was written by trainer={before}, got trainer={trainer}; resume with "
            f"--config.trainer={before}, or convert it by `python -m rlx.convert` and begin a new "
            "workdir with its weights"
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
    """Build and start everything; `stack` ends it, in reverse order.

    Args:
      killed: how the process before this one ended in the workdir, where it was killed.
      messages: of `resume.claim`, for the terminal.
      hosts: the processes of the trainer, of which this is number 0.
      gpus: names of those of each server that is started here; empty: all see what there is.

    Returns:
      the train state to go on with, which the first update donates, and the train batches it has
      seen.

    Raises:
      UserError: servers, teacher, checkpoint or storage that cannot work.
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

    def end_well() -> None:
        parts.stop.set()
        progress.message("finishing this step, then saving; once more to stop at once")

    if current_thread() is main_thread():  # signals reach no other
        stack.enter_context(interrupts(end_well, lambda: hooks.under_way))
    cores = sorted(os.sched_getaffinity(0))
    token = wire.take_token(os.environ)
    if token:  # whoever runs again in this process has it again
        stack.callback(os.environ.__setitem__, wire.TOKEN_VARIABLE, token)
    own = 0 if config.fleet.addresses else config.fleet.num_servers
    taught, judged = ScorerOptions.of_teacher(config), ScorerOptions.of_reward_model(config)
    first_judge = own + taught.num_local
    plan = cpu_plan(cores, first_judge + judged.num_local, config.fleet.threads)
    os.sched_setaffinity(0, plan.trainer)  # before JAX makes its threads
    stack.callback(os.sched_setaffinity, 0, cores)
    trainers.library(config).check_devices(config)
    model_dir = trainers.first_weights(config, workdir, inputs)
    given: dict[str, Any] = {"token": token, "tls": client_tls(**config.fleet.tls)}
    started: dict[str, Any] = {
        "workdir": workdir,
        "on_message": progress.message,
        **server_options(config),
    }
    if served:
        sizes = sizes_of(config, inputs.model_config)
        started["publish_dir"] = publish_dir(config, sizes, workdir, progress.message)
    scorers = {taught: plan.servers[own:first_judge], judged: plan.servers[first_judge:]}
    scoring: dict[str, Any] = {  # those started load and compile while the trainer is built
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

    parts.update = update = trainers.make(config, hosts, model_dir)
    template = inputs.prompts.tokenizer.chat_template if config.data.chat_template else ""
    parts.export = export = Export(config, update, model_dir, inputs.model_dir, template)
    restored = None
    if config.checkpoint.recover_mode == "auto":
        checkpoints = workdir / "checkpoints"
        restore = partial(_restore, update, config.trainer)
        restored = checkpoint.restore_latest(checkpoints, restore, progress.message)
    if restored:
        export.require_base(restored.host)
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
    questions = _held_out_options(config, inputs)
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
    parts.fleet, parts.tutor = fleet, fleets.get(taught.name)
    longest = min(TrainOptions.of(config).row_budget, max(config.train.row_buckets))
    parts.loop = loop = LoopThread("executor")
    parts.executor = executor = _executor(parts, fleets.get(judged.name), longest, note_skip)
    if isinstance(inputs.workflow, OnlineWorkflow):
        needed = partial(_oldest_needed, workdir / "checkpoints", config.rollout.max_staleness)
        dealt = restored.host["executor"]["cursor"]["position"] if restored else 0
        inputs.workflow.place = RunPlace(
            workdir / "sessions", dealt, lambda: executor.version, needed, longest, progress.message
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
        changed = executor.restore(
            restored.host["executor"], restored.groups, config.data.allow_change
        )
        if changed:
            progress.message(f"{changed}; going on, as data.allow_change is set")
    # Local servers have just read these very weights.
    if restored or config.fleet.addresses or config.fleet.join:
        export.publish(
            state,
            lambda weights: loop.submit(fleet.publish(step, weights, config.fleet.publish)),
        ).result()
    executor.set_version(step)
    if served and config.gate.enabled:
        parts.gate = _gate(config, inputs, model_dir, workdir / "hf")
    devices = trainers.library(config).devices
    parts.advice = partial(memory.advice, sizes_of(config, inputs.model_config), devices)
    return state, step


def disk_warning(config: ConfigDict, workdir: Path, inputs: Inputs) -> str:
    """Return the warning about disk space for checkpoints; raise DiskFull where none fits."""
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
    """Return where weights are published: `fleet.publish_dir`, or `workdir` if that has no room.

    Raises:
      UserError: neither has room, or running servers read files of `fleet.publish_dir` alone.
    """
    fleet, needed = config.fleet, memory.in_publish_dir(sizes)
    try:
        free = shutil.disk_usage(fleet.publish_dir).free
    except OSError:  # `Scratch` says what is wrong
        return fleet.publish_dir
    if needed <= free:
        return fleet.publish_dir
    what = (
        f"fleet.publish_dir={fleet.publish_dir} has {size(free)} free, and two versions of the "
        f"weights need {size(needed)}"
    )
    own = not (fleet.addresses or fleet.join)
    if (own or fleet.publish != "path") and needed <= shutil.disk_usage(workdir).free:
        say(f"{what}; they go to {workdir}, which is slower; in Docker give --shm-size=8g")
        return str(workdir.absolute())
    raise UserError(f"{what}; in Docker give --shm-size=8g, or set it to a disk with room")


def _warn_low_memory(
    config: ConfigDict,
    workdir: Path,
    inputs: Inputs,
    killed: Killed | None,
    say: Callable[[str], None],
) -> None:
    """Warn before step 1 if this run may be OOM-killed or fill its disk.

    SIGKILL leaves no traceback, so nothing can be said afterwards.
    """
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
    """Return the run's gate; its prompts are training rows, evenly spread.

    Args:
      first, saved: HF directories of the run's first weights and of its last checkpoint, which need
        not exist: what a server may still have.
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


def _held_out_options(config: ConfigDict, inputs: Inputs) -> HeldOutOptions:
    """Return what a run evaluates."""
    return HeldOutOptions(
        inputs.eval_rows,
        inputs.held_out,
        sampling=evaluation_sampling(config) if has_servers(config) else None,
        total_steps=config.total_steps,
        patience=patience(config),
        timeout=config.rollout.request_timeout_seconds,
    )


def _records(
    parts: Parts, step: int, place: dict[str, Any], restored: checkpoint.Restored | None
) -> MetricsWriter:
    """Open the run's records after `step`; say what a continued run does again, and where."""
    config, workdir, say = parts.config, parts.workdir, parts.progress.message
    last, now = resume.last_step(workdir), as_json(config)
    before = restored.host.get("config", now) if restored else now
    changed = list(resume.differences(before, now))
    writer = MetricsWriter(workdir, parts.hooks, step + 1, place, now, changed)
    own = [*own_files(), flags.config_file(sys.argv), Path(config.data.chat_template)]
    environment.keep(workdir / "code" / f"start-{writer.start}", own)
    if writer.unreadable:
        say(
            f"{writer.unreadable} lines of the run's records could not be read; they are kept in "
            f"{workdir}/*.unreadable"
        )
    if restored:
        say(resume.done_again(restored.host, last))
        for text in resume.told(before, now, step):
            say(text)
        if text := resume.moved(writer.before, writer.environment):
            say(text)
        if holes := gaps(read_jsonl(workdir / "metrics.jsonl"), step):
            say(f"metrics.jsonl has lost its records of {holes}; charts leave them out")
    return writer


def _executor(
    parts: Parts, judge: Fleet | None, longest: int, note_skip: Callable[[dict[str, Any]], None]
) -> Executor:
    """Return the executor of the run's workflow; `parts.loop` need not run yet."""
    c, inputs = parts.config, parts.inputs
    workflow, online = inputs.workflow, isinstance(inputs.workflow, OnlineWorkflow)
    mix = [(len(source.rows), source.weight) for source in inputs.sources]
    if parts.tutor:
        workflow = TeacherScored(workflow, parts.tutor, c.sampling.temperature)
    if judge and inputs.model_rewarded:
        workflow = inputs.model_rewarded(workflow, judge)
    return Executor(
        workflow,
        Cursor(inputs.train_rows, c.seed, c.data.shuffle, mix),
        Limits(
            c.rollout.batch_prompts,
            c.rollout.max_staleness,
            c.rollout.max_concurrent_rollouts,
            c.total_steps,
        ),
        parts.fleet,
        seed=c.seed,
        force_staleness=c.rollout.force_staleness,
        patience=patience(c),
        max_tokens=longest,
        on_skip=lambda skipped: note_skip(skipped.record("train")),
        say=parts.progress.message,
        loop=parts.loop,
        drop_equal_rewards=inputs.algorithm.drop_equal_rewards,
        running_mean=inputs.algorithm.running_mean,
        request_timeout=None if online else c.rollout.request_timeout_seconds,
        keep_versions=online,
    )


def _oldest_needed(checkpoints: Path, max_staleness: int) -> int:
    """Return the oldest version whose tokens a run that goes on from a checkpoint may need."""
    steps = map(checkpoint.step_of, checkpoint.checkpoints(checkpoints))
    return min(steps, default=0) - max_staleness


def _close(loop: LoopThread, fleet: Fleet | NoFleet) -> None:
    with suppress(RuntimeError, TimeoutError):  # the thread has ended, or is blocked
        loop.run(fleet.close(), CLOSE_SECONDS)


class _Skips:
    """Names each skipped row in skipped.jsonl, the first ones in the terminal too. Any thread."""

    def __init__(self, path: Path, say: Callable[[str], None]):
        self._path, self._say, self._count = path, say, 0

    def __call__(self, record: dict[str, Any]) -> None:
        append_jsonl(self._path, {**record, "time": time.time()})
        self._count += 1
        if self._count <= SKIPS_SHOWN:
            last = self._count == SKIPS_SHOWN
            more = "; further ones in skipped.jsonl alone" if last else ""
            self._say(attempts.sentence(record) + more)
