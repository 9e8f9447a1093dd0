"""Build the parts of a run in the order of their dependencies, and end them in reverse.

servers start ─▶ trainer is built ─▶ records open ─▶ fleet connects ─▶ executor admits
"""

import itertools
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from subprocess import Popen
from threading import TIMEOUT_MAX, Event
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from rlx.agents.online_workflow import OnlineWorkflow, RunContext
from rlx.base import UserError
from rlx.cli.command import INTERRUPTED
from rlx.cli.text import size
from rlx.cli.user_code import own_files
from rlx.doctor import memory
from rlx.doctor.machine import Devices
from rlx.evaluation.held_out import HeldOut
from rlx.fleet import cast, wire
from rlx.fleet.client import Fleet, NoFleet
from rlx.fleet.tls import client_tls, is_loopback
from rlx.journal import history
from rlx.journal import journal as journals
from rlx.launch import local, teacher
from rlx.mismatch import measure
from rlx.mismatch.gate import Gate
from rlx.model import directory
from rlx.observe import environment
from rlx.observe.hooks import Hooks
from rlx.observe.metrics import MetricsWriter, note_failure
from rlx.observe.progress import Progress
from rlx.observe.rundir import gaps
from rlx.observe.timeline import Timeline
from rlx.observe.traces import tracing
from rlx.rollout import attempts
from rlx.rollout.data import Cursor
from rlx.rollout.executor import Executor
from rlx.rollout.teacher_scores import JudgeRewarded, TeacherScored
from rlx.run import flags, resume, trainers
from rlx.run.auto_values import Fit, Precision, decide_dtypes, decide_microbatches
from rlx.run.export import Export, held_bytes, require_base
from rlx.run.frequency import Position, from_host
from rlx.run.inputs import INITIAL, Inputs
from rlx.run.room_options import RunOptions, as_json, joining_of, limits_of, served_dtype, sizes_of
from rlx.run.turns import CACHE, Turns, in_turns, rests
from rlx.system import available_memory
from rlx.system.jsonl import append_jsonl, read_json, read_jsonl, read_last
from rlx.system.signals import IS_COMMAND, interrupts
from rlx.system.threads import CLOSE_SECONDS, LoopThread
from rlx.system.workdir_lock import Killed
from rlx.train import checkpoint, conductor
from rlx.train.contract import State, Update
from rlx.train.hosts import Cluster, Hosts

END_SECONDS = 20.0  # of the grace period, for servers and a requeue, at most a quarter of it
POLICY = "policy"  # name of the fleet that generates
SKIPS_SHOWN = 5  # skipped rows shown in the terminal; skipped.jsonl has all


@dataclass(eq=False, kw_only=True)
class Parts:
    """A run's parts, connected and started by `build`."""

    config: ConfigDict
    workdir: Path
    inputs: Inputs
    sizes: memory.RunSizes
    stop: Event  # set by the first Ctrl-C or SIGTERM, a hook, or another thread
    laps: dict[str, int]  # parts of the start → their ends, ns
    hooks: Hooks
    precision: Precision = field(init=False)  # dtypes, which `build` writes into `config`
    fit: Fit = field(init=False)  # remat and microbatches, in `config` too
    decided: dict[str, Any] = field(init=False)  # those of both that every trainer process needs
    in_turns: bool = False  # whether trainer and servers share a device in turns
    elapsed: Callable[[], float] = field(init=False)  # the run's seconds, earlier processes' too
    progress: Progress = field(init=False)
    timeline: Timeline = field(init=False)
    update: Update = field(init=False)
    export: Export = field(init=False)
    journal: journals.Journal = field(init=False)
    writer: MetricsWriter = field(init=False)
    held_out: HeldOut = field(init=False)
    loop: LoopThread = field(init=False)  # thread of rollouts, publishes and evaluations
    executor: Executor = field(init=False)
    fleet: Fleet | NoFleet = field(init=False)
    teacher_fleet: Fleet | None = None  # of the teacher that scores rollouts
    fleets: Mapping[str, Fleet] = field(init=False)  # policy, teacher, reward model: those it has
    gate: Gate | None = None
    turns: Turns | None = None
    tracer: Any = None  # of rollouts' spans
    note_skip: Callable[[dict[str, Any]], None] = field(init=False)  # records a skipped row
    initial: Position = field(init=False)  # at the start
    last: Mapping[str, Position] = field(init=False)  # kind of `frequency.KINDS` → its last one

    def advice(self, started: bool = True) -> str:
        """Return the remedy when out of memory."""
        return memory.advice(self.sizes, trainers.library(self.config).devices, started=started)


class _Initial(NamedTuple):
    """The train state that a run starts from, and how far the run was."""

    state: State
    restored: checkpoint.Restored | None  # the checkpoint that it is from, if any
    last_record: Mapping[str, Any]  # of a step, perhaps after the checkpoint's; or {}
    step: int = 0
    seconds: float = 0.0  # of earlier processes


def build(
    parts: Parts,
    stack: ExitStack,
    killed: Killed | None,  # the killed process that used the workdir before, if any
    hosts: Hosts,  # the trainer's processes; this one is number 0
    gpus: Sequence[Sequence[str]],  # of each local server; empty: servers see all
    early: Sequence[Popen],  # from `early_servers`
) -> tuple[State, int]:  # the train state, which the first update donates, and its step
    """Build and start everything; `stack` ends it in reverse order. UserError if a part fails."""
    start, laps, cores = time.monotonic(), parts.laps, sorted(os.sched_getaffinity(0))
    num_servers = sum(each.num_local for each in parts.inputs.options.scorers)
    plan = _cpu_plan(parts.config, cores, num_servers + _num_policy_servers(parts.config))
    os.sched_setaffinity(0, plan.trainer)  # before JAX makes its threads
    stack.callback(os.sched_setaffinity, 0, cores)
    _decide(parts, hosts.count)
    laps["precision"] = time.monotonic_ns()
    _show_progress(parts, stack, killed)
    model_dir = _first_weights(parts)
    servers, scoring = _start_servers(parts, stack, model_dir, plan, gpus, early)
    initial = _make_trainer(parts, hosts, model_dir)
    earlier = initial.seconds  # by itself: `initial` would keep the first state for the whole run
    parts.elapsed = lambda: earlier + time.monotonic() - start
    laps["trainer"] = time.monotonic_ns()
    _open_records(parts, stack, initial, cores, plan)
    laps["records"] = time.monotonic_ns()
    _make_fleets(parts, servers, scoring)
    _make_executor(parts, initial)
    _connect(parts, stack, initial)
    if isinstance(parts.fleet, Fleet) and parts.config.gate.enabled:
        parts.gate = _gate(parts, parts.fleet, model_dir)
    laps["servers"] = time.monotonic_ns()
    for (_, begin), (name, end) in itertools.pairwise(laps.items()):
        parts.timeline.add("trainer", "main", f"start: {name}", begin, end)
    return initial.state, initial.step


def _num_policy_servers(config: ConfigDict) -> int:
    return 0 if config.fleet.addresses else config.fleet.num_servers


def _decide(parts: Parts, num_hosts: int) -> None:
    """Choose what the config leaves open (dtypes, microbatches), and write it into config."""
    config, inputs = parts.config, parts.inputs
    library, images = trainers.library(config), parts.workdir / "images"
    before = dict(flags.leaves(read_json(parts.workdir / "config.json")))
    parts.precision = decide_dtypes(
        config, inputs.model_config, library.devices(), before.get("model.compute_dtype", ""),
        num_hosts,
    )  # fmt: skip
    config.model.update(parts.precision.dtypes)
    sizes = sizes_of(config, inputs.model_config)
    before = before if checkpoint.checkpoints(parts.workdir / "checkpoints") else {}
    parts.fit = decide_microbatches(config, sizes, library.devices(), library.planned, before)
    config.update_from_flattened_dict(parts.fit.keys)
    parts.in_turns = in_turns(config, num_hosts, library.devices())
    if parts.in_turns:
        config.fleet.kv_on_update = "recompute"  # as servers do after a sleep, for replays
    parts.sizes = sizes = sizes_of(config, inputs.model_config)
    inputs.images.move(images)
    parts.decided = {
        **parts.precision.dtypes, "remat": sizes.train.remat,
        "token_budget": sizes.train.token_budget, "image_dir": str(images),
    }  # fmt: skip
    inputs.train = replace(inputs.train, **parts.decided)
    inputs.options = RunOptions.of(config)


def _show_progress(parts: Parts, stack: ExitStack, killed: Killed | None) -> None:
    """Open terminal and timeline, show what was decided, and take signals."""
    config, workdir, devices = parts.config, parts.workdir, trainers.library(parts.config).devices()
    messages = [parts.precision.message, parts.fit.message]
    messages += resume.prepare_workdir(config, workdir)
    parts.timeline = timeline = Timeline(earlier=workdir / "timeline.json")
    stack.callback(lambda: timeline.save(workdir / "timeline.json"))
    stack.push(partial(note_failure, workdir))
    log = workdir / "console.log"
    parts.progress = Progress(config.total_steps, title=workdir.name, log=log)
    parts.hooks.say = say = stack.enter_context(parts.progress).message
    warnings = _warnings(parts, killed, devices.platform)
    for text in filter(None, itertools.chain(messages, [parts.inputs.notes], warnings)):
        say(text)

    def stop_after_step() -> None:
        parts.stop.set()
        say("finishing this step, then saving; press Ctrl-C again to stop at once")

    parts.tracer = stack.enter_context(tracing(config.observe.traces, "rlx-trainer"))
    grace = config.scheduler.grace_seconds
    limit = grace - min(END_SECONDS, grace / 4) if IS_COMMAND.get() else TIMEOUT_MAX
    late = partial(_end_late, parts)
    stack.enter_context(interrupts(stop_after_step, lambda: parts.hooks.under_way, late, limit))


def _first_weights(parts: Parts) -> Path:
    """Return the HF directory of the weights without a checkpoint; make random ones if asked."""
    library, directory = trainers.library(parts.config), parts.inputs.model_dir
    library.check_devices(parts.inputs)
    if parts.config.model.random_init:
        directory = parts.workdir / INITIAL
        library.random_weights(parts.inputs, directory)
    return directory


def _start_servers(
    parts: Parts,
    stack: ExitStack,
    model_dir: Path,  # of the policy
    plan: local.CpuPlan,
    gpus: Sequence[Sequence[str]],
    early: Sequence[Popen],
) -> tuple[local.LocalServers | local.RunningServers | None, dict[str, Any]]:
    """Start local servers, which load and compile while the trainer is built.

    Return the policy's, None if the algorithm needs none, and those that score, by their names.
    """
    config, options = parts.config, parts.inputs.options
    devices, o = trainers.library(config).devices(), config.observe
    say = parts.progress.message
    token = wire.take_token(os.environ)
    if token:  # for the next run in this process
        stack.callback(os.environ.__setitem__, wire.TOKEN_VARIABLE, token)
    # Servers' listeners are on loopback, where Prometheus must be then.
    end = 1 << 16 if o.metrics_port and is_loopback(o.metrics_host) else 0
    common: dict[str, Any] = {
        **options.servers, "token": token, "tls": client_tls(**config.fleet.tls),
        "workdir": parts.workdir, "on_message": say,
        "metrics_ports": iter(range(o.metrics_port + 1, end)),
    }  # fmt: skip
    if options.served:
        if config.fleet.publish in cast.BACKENDS:
            cast.require(config.fleet.publish)
        common["publish_dir"] = publish_dir(config, parts.sizes, parts.workdir, say)
    cores = iter(plan.servers)
    policy_cores = tuple(itertools.islice(cores, _num_policy_servers(config)))
    scoring = dict[str, Any]()
    for each in options.scorers:
        places = tuple(itertools.islice(cores, each.num_local))
        scoring[each.name] = stack.enter_context(teacher.servers(each, places, **common))
    servers: Any = None
    if options.served:
        servers = stack.enter_context(local.servers_of(
            config.fleet.addresses, model_dir, plan=replace(plan, servers=policy_cores),
            gpus=gpus, early=early, joining=joining_of(config),
            **{**common, "sleep": config.fleet.sleep},
        ))  # fmt: skip
        if parts.in_turns and isinstance(servers, local.LocalServers) and devices.platform == "gpu":
            servers.wait()  # asleep: they measure free memory at their start
    stack.callback(parts.inputs.reward_pool.close)
    if options.served:
        parts.inputs.reward_pool.start()
    return servers, scoring


def _make_trainer(parts: Parts, hosts: Hosts, model_dir: Path) -> _Initial:
    """Make the trainer and its export; return the last checkpoint's state, or the first one."""
    config, inputs, workdir = parts.config, parts.inputs, parts.workdir
    make = partial(trainers.library(config).make, inputs.train, inputs.options.context)
    update = conductor.driver(hosts, make, path=str(model_dir), **parts.decided)
    template = inputs.prompts.tokenizer.chat_template if config.data.chat_template else ""
    parts.update = update
    parts.export = Export(
        inputs.train, config.fleet.publish, update, model_dir, inputs.model_dir, template
    )
    last_record, restored = read_last(workdir / "metrics.jsonl"), None
    if config.checkpoint.recover_mode == "auto":
        restore = partial(_restore, update, config.trainer)
        say = parts.progress.message
        restored = checkpoint.restore_latest(workdir / "checkpoints", restore, say)
    if not restored:
        return _Initial(update.init(), None, last_record)
    require_base(restored.host, parts.export.base_digest, model_dir)
    step, seconds = restored.host["step"], restored.host["elapsed_seconds"]
    return _Initial(restored.state, restored, last_record, step, seconds)


def _open_records(
    parts: Parts, stack: ExitStack, initial: _Initial, cores: Sequence[int], plan: local.CpuPlan
) -> None:
    """Open the run's records, its journal and its evaluations after the initial step."""
    config, workdir, inputs, hooks = parts.config, parts.workdir, parts.inputs, parts.hooks
    restored, step = initial.restored, initial.step
    place = {
        "cores": len(cores), "trainer_cores": len(plan.trainer),
        "server_cores": len(plan.servers[0]) if _num_policy_servers(config) else "",
        "devices": parts.update.devices, "precision": parts.precision.message,
        "memory": parts.fit.message, "peak_flops": parts.precision.peak,
        "servers": len(config.fleet.addresses) or config.fleet.num_servers,
    }  # fmt: skip
    parts.writer = _records(parts, step, place, restored)
    parts.journal = _journal(parts, restored)
    stack.callback(parts.journal.close)
    stack.push(lambda kind, *_: hooks.end("stopped" if kind is KeyboardInterrupt else "failed"))
    hooks.begin(as_json(config), workdir, step)
    parts.note_skip = _skip_notes(workdir / "skipped.jsonl", hooks.say)
    positions = restored.host.get("positions", {}) if restored else {}
    begin = Position(step=step, seconds=initial.seconds)
    parts.initial, parts.last = from_host(positions, begin)
    earlier = {"epoch": parts.initial.epoch, "elapsed_seconds": begin.seconds}
    parts.progress.begin = {"step": step, "version": step, **earlier}
    options = inputs.options
    parts.held_out = HeldOut(
        rows=inputs.eval_rows, groups=inputs.held_out, sets=inputs.eval_sets,
        sampling=options.evaluation if options.served else None,
        random_sampling=replace(options.sampling, return_masks=False, seed=config.seed),
        n_samples=config.eval.samples, total_steps=config.total_steps, start=step,
        done={record["step"] for record in read_jsonl(workdir / "eval.jsonl")},
        owed=parts.last["eval"].step, patience=options.patience,
        timeout=options.limits.request, timeline=parts.timeline, elapsed=parts.elapsed,
        on_skip=parts.note_skip, say=hooks.say,
    )  # fmt: skip


def _make_fleets(parts: Parts, servers: Any, scoring: Mapping[str, Any]) -> None:
    """Make the clients of all servers, not yet connected, and the turns with the policy's."""
    config, options, say = parts.config, parts.inputs.options, parts.hooks.say
    images, devices = parts.inputs.images.get, trainers.library(config).devices()
    parts.loop, parts.fleet, fleets = LoopThread("executor"), NoFleet(), dict[str, Fleet]()
    for name, scorer in scoring.items():
        fleets[name] = teacher.fleet(scorer, options.limits, say, name, images)
    parts.teacher_fleet = fleets.get(options.teacher.name)
    if options.served:
        parts.fleet = fleets[POLICY] = servers.fleet(
            limits=options.limits, kv_on_update=config.fleet.kv_on_update, on_message=say,
            sleep=CACHE if parts.in_turns else None, image=images,
        )  # fmt: skip
        if parts.in_turns:
            must_rest = rests(parts.update.state_bytes, devices, config.fleet.gpu_memory)
            rest = getattr(parts.update, "rest", None)  # of JAX, the only one that takes turns
            parts.turns = Turns(fleets[POLICY], parts.loop, rest if must_rest else None)
    parts.fleets = fleets


def _make_executor(parts: Parts, initial: _Initial) -> None:
    """Make the executor, and restore it from the checkpoint and the journal."""
    config, workdir, inputs = parts.config, parts.workdir, parts.inputs
    longest = min(inputs.train.row_budget, max(inputs.train.row_buckets))
    reward_fleet = parts.fleets.get(inputs.options.reward_model.name)
    parts.executor = executor = _executor(parts, reward_fleet, longest)
    recovered = _recover(parts, initial)
    if isinstance(inputs.workflow, OnlineWorkflow):

        def oldest() -> int:  # version whose tokens a resumed run may need
            steps = map(checkpoint.step_of, checkpoint.checkpoints(workdir / "checkpoints"))
            return min(steps, default=0) - config.rollout.max_staleness

        first, say = recovered.host["cursor"]["position"], parts.hooks.say
        inputs.workflow.context = RunContext(
            workdir / "sessions", first, lambda: executor.version, oldest, longest, say
        )


def _connect(parts: Parts, stack: ExitStack, initial: _Initial) -> None:
    """Connect to all servers; publish the initial weights to those that may have others."""
    config, loop, fleet, step = parts.config, parts.loop, parts.fleet, initial.step
    scoring = {name: each for name, each in parts.fleets.items() if name != POLICY}
    loop.start()
    stack.callback(loop.close)
    for each in (fleet, *scoring.values()):
        stack.callback(_close, loop, each)
    stack.callback(parts.executor.close)  # first: agents would fail when a fleet closes
    for name, each in scoring.items():
        loop.run(teacher.connect(each, name))
    loop.run(fleet.connect())
    # Local servers have just loaded the first weights.
    if initial.restored or config.fleet.addresses or config.fleet.join:
        method = config.fleet.publish
        publish = parts.export.publish
        publish(initial.state, lambda w: loop.submit(fleet.publish(step, w, method))).result()
    parts.executor.set_version(step)


@contextmanager
def early_servers(config: ConfigDict) -> Iterator[list[Popen]]:
    """Start the run's servers before its inputs are read, where these do not change the engine."""
    fleet, model, options = config.fleet, config.model, RunOptions.of(config)
    elsewhere = fleet.addresses or fleet.join or Cluster.of(os.environ, **config.cluster).count > 1
    unfit = fleet.engine != "jax" or model.random_init or config.allocation_mode
    cores, place = sorted(os.sched_getaffinity(0)), directory.at_hand(model.path)
    likely = "bfloat16" if Devices().has_bfloat16 else "float32"  # what `auto` will be
    settings = {**options.servers, "dtype": served_dtype(config, likely)}
    servers = list[Popen]()
    with ExitStack() as stack:
        if place and not (elsewhere or unfit or options.teacher or options.reward_model):
            for i, cpus in enumerate(_cpu_plan(config, cores, fleet.num_servers).servers):
                servers.append(local.start_early(place, cpus, config.seed + i, settings))
                stack.enter_context(servers[-1])
                stack.callback(servers[-1].kill)  # if it was not taken
        yield servers


def _cpu_plan(config: ConfigDict, cores: Sequence[int], servers: int) -> local.CpuPlan:
    # XLA's threads sleep while they wait; OpenMP's spin, and would hold up the other process.
    sharing = config.trainer == config.fleet.engine == "jax"
    return local.cpu_plan(cores, servers, config.fleet.threads, sharing)


def _restore(update: Update, trainer: str, path: Path) -> State:
    """Return the train state of a checkpoint; raise UserError if another trainer wrote it."""
    before = checkpoint.read_host(path).get("config", {}).get("trainer", trainer)
    if before != trainer:
        raise UserError(
            f"{path} was written by trainer={before}, got trainer={trainer}; resume with "
            f"--config.trainer={before}, or convert it with `python -m rlx.convert` and start in a "
            "new workdir with its weights"
        )
    return update.restore(path)


def _warnings(parts: Parts, killed: Killed | None, platform: str) -> Iterator[str]:
    """Yield warnings about this run's samples, memory and disk; empty ones do not matter."""
    options = parts.inputs.options
    if options.teacher and (cut := options.sampling.truncation):
        reason = "the policy's over those drawn from, which biases the KL; leave it out"
        yield f"{cut} in config.sampling: the teacher's logprobs are over all tokens, {reason}"
    yield str(killed or "")
    if platform == "cpu":
        always = bool(killed and killed.for_memory)
        yield memory.low_memory_warning(parts.sizes, available_memory.memory(), always=always)
    yield disk_warning(parts.sizes, parts.workdir)  # last: a full disk raises


def disk_warning(sizes: memory.RunSizes, workdir: Path) -> str:
    """Return a warning about disk space for checkpoints; raise DiskFull if none fits."""
    return memory.full_disk_warning(sizes, shutil.disk_usage(workdir).free, held_bytes(workdir))


def publish_dir(
    config: ConfigDict, sizes: memory.RunSizes, workdir: Path, say: Callable[[str], None]
) -> str:
    """Return the directory of published weights: `fleet.publish_dir`, or `workdir` if that is full.

    UserError if neither has space, or running servers can read `fleet.publish_dir` only.
    """
    fleet, needed = config.fleet, memory.in_publish_dir(sizes)
    try:
        free = shutil.disk_usage(fleet.publish_dir).free
    except OSError:  # reported by `Scratch`
        return fleet.publish_dir
    if needed <= free:
        return fleet.publish_dir
    need = f"and two versions of the weights need {size(needed)}"
    what = f"fleet.publish_dir={fleet.publish_dir} has {size(free)} free, {need}"
    same_host = not (fleet.addresses or fleet.join)
    if (same_host or fleet.publish != "path") and needed <= shutil.disk_usage(workdir).free:
        say(f"{what}; using the slower {workdir}; in Docker set --shm-size=8g")
        return str(workdir.absolute())
    raise UserError(f"{what}; in Docker set --shm-size=8g, or set it to a disk with space")


def _gate(parts: Parts, fleet: Fleet, first: Path) -> Gate:
    """Return the run's gate; its prompts are evenly spread training rows."""
    config, inputs = parts.config, parts.inputs
    rows, count = inputs.train_rows, min(config.gate.prompts, len(inputs.train_rows))
    chosen = [rows[i * len(rows) // count] for i in range(count)]
    prompts = [inputs.prompts.ids(row) for row in chosen]
    training, model = inputs.options.sampling, config.model
    budget = min(config.gate.max_new_tokens, training.max_new_tokens)
    exact = model.compute_dtype == model.publish_dtype == "float32"
    fewest = min(training.min_new_tokens, budget)
    sampling = replace(training, max_new_tokens=budget, min_new_tokens=fewest, stop=())
    scorer = measure.TrainerScorer(
        inputs.model_config, temperature=training.temperature,
        row_length=measure.row_length(max(map(len, prompts)) + budget),
        compute_dtype=model.compute_dtype, chunk=model.logprob_chunk,
    )  # fmt: skip
    limits = measure.tolerance(exact, config.gate.max_delta, config.gate.mean_delta)
    # A server may still have these HF directories, which need not exist.
    earlier = {"the run's first weights": first, "the last checkpoint": parts.workdir / "hf"}
    write, say = partial(parts.writer.write, "gate.jsonl"), parts.progress.message
    return Gate(
        fleet, parts.loop, prompts, sampling, scorer, limits, config.seed, earlier, model.dtype,
        write, say,
    )  # fmt: skip


def _records(
    parts: Parts, step: int, place: dict[str, Any], restored: checkpoint.Restored | None
) -> MetricsWriter:
    """Open the run's records after `step`; show what a resumed run repeats or changes."""
    config, workdir, say = parts.config, parts.workdir, parts.progress.message
    now = as_json(config)
    before = restored.host.get("config", now) if restored else now
    changed = list(resume.differences(before, now))
    writer = MetricsWriter(workdir, parts.hooks, step + 1, place, now, changed)
    files = [*own_files(), flags.config_file(sys.argv), Path(config.data.chat_template)]
    environment.keep(workdir / "code" / f"start-{writer.start}", files)
    if writer.unreadable:
        moved = f"were moved to {workdir}/*.unreadable"
        say(f"{writer.unreadable} corrupt lines of the run's records {moved}")
    if restored:
        holes = gaps(read_jsonl(workdir / "metrics.jsonl"), step)
        missing = f"metrics.jsonl has no records of {holes}; charts omit them" * bool(holes)
        elsewhere = resume.machine_warning(writer.before, writer.environment)
        for text in filter(None, [*resume.setting_changes(before, now, step), elsewhere, missing]):
            say(text)
    return writer


def _journal(parts: Parts, restored: checkpoint.Restored | None) -> journals.Journal:
    """Return the journal of the run, without what is damaged."""
    place = parts.workdir / "journal"
    first, last = history.position(restored.host["executor"] if restored else None) or (0, -1)
    removed, number = journals.cut(place, first)
    if removed:
        parts.progress.message(f"{place}: {removed} damaged or incomplete bytes were removed")
    return journals.Journal(place, max(number, last + 1), parts.config.journal.keep)


def _recover(parts: Parts, initial: _Initial) -> history.Recovered:
    """Restore the executor from the checkpoint and the journal; show what is repeated."""
    executor, place, say = parts.executor, parts.workdir / "journal", parts.progress.message
    restored = initial.restored
    saved = restored.host["executor"] if restored else executor.state()
    at = history.position(saved if restored else None)
    records = (record for record, _ in journals.read(place, at[0] if at else 0))
    recovery = history.recover(saved, at, records)
    inputs = parts.inputs
    groups = resume.usable(recovery.groups, inputs.algorithm, inputs.train.row_budget)
    recovery = recovery._replace(groups=groups)  # others are generated again
    allow = parts.config.data.allow_change
    if changed := executor.restore(recovery.host, recovery.groups, allow, recovery.samples):
        say(f"{changed}; continuing, because data.allow_change is set")
    counts = executor.unfinished.counts()
    if any(counts.values()):
        parts.writer.note(recovery.host["step"], continued=counts)
    if restored or recovery.groups or any(counts.values()):
        say(resume.continuation(recovery, initial.last_record, counts))
    if not parts.config.journal.keep:
        shutil.rmtree(place, ignore_errors=True)
    step, rows = recovery.host["step"], recovery.host["cursor"]["digest"]
    about = {"start": parts.writer.start, "step": step, "order": step + executor.num_repeated}
    parts.journal.append("start", {**about, "whole": recovery.complete, "rows": rows})
    return recovery


def _executor(parts: Parts, reward_fleet: Fleet | None, longest: int) -> Executor:
    """Return the executor of the run's workflow; `parts.loop` need not run yet."""
    c, inputs = parts.config, parts.inputs
    workflow, online = inputs.workflow, isinstance(inputs.workflow, OnlineWorkflow)
    drop = workflow.drop if isinstance(workflow, OnlineWorkflow) else lambda *_: None
    mix = [(len(source.rows), source.weight) for source in inputs.sources]
    if parts.teacher_fleet:
        workflow = TeacherScored(workflow, parts.teacher_fleet, c.sampling.temperature)
    if reward_fleet and inputs.model_rewarded:
        workflow = inputs.model_rewarded(workflow, reward_fleet)
    if inputs.judge:
        judge, weight = inputs.judge
        judge.keep(parts.workdir / "judge.sqlite3")
        workflow = JudgeRewarded(workflow, judge, weight, c.data.question_key)
    r, shares = c.rollout, {"easy": c.data.easy_share, "hard": c.data.hard_share}
    cursor = Cursor(inputs.train_rows, c.seed, c.data.shuffle, mix, shares)
    return Executor(
        workflow, cursor, limits_of(c, c.total_steps), parts.fleet, loop=parts.loop, seed=c.seed,
        force_staleness=r.force_staleness, patience=inputs.options.patience, max_tokens=longest,
        request_timeout=None if online else r.request_timeout_seconds,
        drop_equal_rewards=inputs.algorithm.drop_equal_rewards,
        running_mean=inputs.algorithm.running_mean,
        keep_tokens=c.journal.keep > 0 and not online,
        note=parts.journal.append, on_drop=drop, say=parts.progress.message, tracer=parts.tracer,
        on_skip=lambda skipped: parts.note_skip(skipped.record("train")),
    )  # fmt: skip


def _end_late(parts: Parts) -> None:
    """End this process before it is killed, with the last checkpoint and the journal."""
    grace, saved = parts.config.scheduler.grace_seconds, parts.workdir / "checkpoints"
    step = max(map(checkpoint.step_of, checkpoint.checkpoints(saved)), default=0)
    what = f"the step does not end within scheduler.grace_seconds={grace}"
    left = f"the checkpoint of step {step} and the journal, which has the groups since"
    parts.progress.message(f"{what}; ending with {left}")
    try:
        parts.executor.close()
        parts.journal.close()
        parts.writer.note(step, ended="stopped")
    finally:
        os._exit(INTERRUPTED)


def _close(loop: LoopThread, fleet: Fleet | NoFleet) -> None:
    with suppress(RuntimeError, TimeoutError):  # the thread has ended or is blocked
        loop.run(fleet.close(), CLOSE_SECONDS)


def _skip_notes(path: Path, say: Callable[[str], None]) -> Callable[[dict[str, Any]], None]:
    """Return a function of any thread that records a skipped row, and shows the first ones."""
    count = itertools.count(1)

    def note(record: dict[str, Any]) -> None:
        append_jsonl(path, {**record, "time": time.time()})
        if (number := next(count)) <= SKIPS_SHOWN:
            more = "; skipped.jsonl has the next ones" * (number == SKIPS_SHOWN)
            say(attempts.sentence(record) + more)

    return note
