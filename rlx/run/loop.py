"""Run a config: collect a batch, train, publish, record, save.

    executor thread   admit ─▶ generate (gRPC) ─▶ reward ─▶ buffer       publish ─▶ set_version
                                                     │                      ▲
    this thread       collect ◀──────────────────────┘ ─▶ update ─▶ weights ┘ ─▶ record, save
    device                                                  computing n … n + 1 …

The loop waits for the device only to record a step: after the next one is dispatched, or while no
batch is ready. At most one publish and one save run in the background. Each collected batch is
dispatched at once, so a checkpoint covers all batches taken from the executor.

Training on a dataset (SFT, pairs) uses the same loop: the executor makes groups of rows, and
versions are published for evaluations only.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from os import PathLike
from pathlib import Path
from threading import Event
from typing import Any

from ml_collections import ConfigDict

from rlx.base import Group, UserError
from rlx.cli.command import say
from rlx.cli.user_code import forget_edited
from rlx.config import check, with_environment
from rlx.doctor import failures
from rlx.engines.engine import SLEEPS
from rlx.fleet.client import Fleet, NoFleet
from rlx.observe import environment, writers
from rlx.observe.hooks import Hooks
from rlx.rollout.executor import Exhausted
from rlx.run import resume, run_records, trainer_metrics, trainers
from rlx.run.allocate import apply_allocation, gpu_environment
from rlx.run.export import computed
from rlx.run.inputs import prepare
from rlx.run.parts import Parts, build, early_servers
from rlx.run.remote_copies import RemoteCopies
from rlx.run.room_options import sizes_of
from rlx.run.saves import Saves
from rlx.run.turns import CACHE
from rlx.run.watchdog import watchdog
from rlx.system.jsonl import jsonable, read_jsonl
from rlx.system.process_settings import keep_freed_memory
from rlx.system.threads import in_thread
from rlx.system.workdir_lock import lock_workdir
from rlx.train import conductor
from rlx.train.contract import State

LAST_SECONDS = 60.0  # how long a stopped run waits for its current evaluation
COLLECT_SECONDS = 0.2  # how often a waiting trainer looks for Ctrl-C
_ENDLESS = 1 << 62  # rows of an online run
FRUITLESS = 5  # consecutive steps without learning that end a run
SPAN_SECONDS = 10.0  # timeout of the servers' spans for the timeline
BUSY_SECONDS = 0.01  # how often the loop looks for a batch while the device computes


@dataclass(frozen=True)
class RunResult:
    """How a run ended."""

    workdir: Path
    step: int  # completed train batches, including those of earlier processes
    complete: bool  # `total_steps` are done, or no useful prompt is left
    metrics: list[dict[str, Any]] = field(repr=False)  # records of steps in `workdir`
    evals: list[dict[str, Any]] = field(repr=False)  # records of evaluations there


def run(
    config: ConfigDict,
    workdir: str | PathLike[str],
    callbacks: Sequence[Any] = (),  # hooks, called after those of observe.writers
    stop: Event | None = None,  # ends the run after a saved step; set it in a hook or a thread
) -> RunResult:
    """Run `config` in `workdir`; resume its last checkpoint if one exists.

    Can be called repeatedly, in any thread, and while an event loop runs. In the main thread the
    first Ctrl-C (or notebook interrupt) finishes the step and saves; the second ends at once.

    UserError if the config, inputs, servers or storage cannot work. The failure that exhausted the
    rollouts' budget is raised unchanged.
    """
    config = with_environment(config.copy_and_resolve_references())
    workdir = Path(workdir)
    config = apply_allocation(config, workdir=workdir)
    check(config)
    forget_edited()
    keep_freed_memory()
    stop, laps = stop or Event(), {"": time.monotonic_ns()}
    with (
        early_servers(config) as early,  # before the trainer's library, which takes seconds
        gpu_environment(config) as gpus,
        trainers.join_processes(config, stop) as hosts,
        watchdog(workdir) as watch,
    ):
        if hosts.index:
            return RunResult(workdir, *trainers.follow(config, hosts), [], [])
        if step := resume.finished_steps(config, workdir):
            say(f"all {step} steps are done; raise --config.total_steps to train on in {workdir}")
            conductor.stop(hosts, step=step, complete=True)
            return _result(workdir, step, True)
        laps["library"] = time.monotonic_ns()
        copies = list[RemoteCopies]()
        if config.checkpoint.copy_to:
            copies = [RemoteCopies(config, workdir, lambda text: hooks.say(text))]
        hooks = Hooks(writers.load(config.observe.writers, [*callbacks, *copies]))
        inputs = prepare(config)
        laps["inputs"] = time.monotonic_ns()
        with failures.friendly_errors(), ExitStack() as stack:
            killed = stack.enter_context(lock_workdir(workdir))
            for each in copies:
                each.fetch()
                stack.callback(each.close)
            parts = Parts(
                config=config, workdir=workdir, inputs=inputs, hooks=hooks, stop=stop, laps=laps,
                sizes=sizes_of(config, inputs.model_config),
            )  # fmt: skip
            advice = partial(parts.advice, started=False)
            if config.observe.metrics_port:
                stack.enter_context(trainer_metrics.serve_metrics(parts))
            with failures.friendly_errors(advice, "before the first step"):
                start = build(parts, stack, killed, hosts, gpus, early)
            watch(parts)
            loop = _Loop(parts, *start)
            stack.push(loop.close)
            with loop.save_on_failure():
                for groups in loop.batches():
                    loop.train(groups)
            step, complete = loop.finish()
        conductor.stop(hosts, step=step, complete=complete)
    return _result(workdir, step, complete)


def _result(workdir: Path, step: int, complete: bool) -> RunResult:
    records = (list(read_jsonl(workdir / name)) for name in ("metrics.jsonl", "eval.jsonl"))
    return RunResult(workdir, step, complete, *records)


class _Loop:
    """The train state of a run, its step, and its background publishes and saves."""

    def __init__(self, parts: Parts, state: State, step: int):
        self.parts, self.config, self.state = parts, parts.config, state
        self.step = step  # batches dispatched to the device, all contained in `state`
        options, self.data = parts.inputs.options, parts.inputs.algorithm.data
        self.executor, self.fleet, self.gate = parts.executor, parts.fleet, parts.gate
        self.progress, self.timeline, self.writer = parts.progress, parts.timeline, parts.writer
        self.held_out = parts.held_out
        self.recorded_at, self.computed_at = time.monotonic(), 0.0  # of the last step
        self.now = parts.initial  # position of `step`
        self.rows = _ENDLESS if options.online else max(1, len(parts.inputs.train_rows))  # an epoch
        self.served, self.generated = options.served, 0  # tokens generated up to the last record
        self.fruitless = 0  # consecutive recorded steps without learning
        # False if the device may have failed to compute `state`, or an earlier step has no record.
        self.saveable = True
        self.solved = False  # whether no useful prompt is left
        # True until the first step has compiled.
        self.compiles = self.config.trainer == "jax" or self.config.train.compile
        self.seconds: dict[str, float] = {}  # of each phase since the last record
        self.published: dict[str, float] = {}  # metrics of the last publish
        self.publishing: Future | None = None
        self.turns = parts.turns
        # The dispatched step without a record, its groups, and its metrics.
        self.under_way: tuple[int, list[Group], Future[Mapping[str, Any]]] | None = None
        self.device, self.saves = ThreadPoolExecutor(1, "device"), Saves(parts, step, self._phase)

    def close(self, kind: type[BaseException] | None, *_: object) -> None:
        """Wait for the threads; after an interrupt (`kind`), cancel what has not begun."""
        interrupted = kind is KeyboardInterrupt  # a half-written save never replaces a good one
        for pool in (self.device, self.saves.disk):
            pool.shutdown(wait=not interrupted, cancel_futures=interrupted)

    @contextmanager
    def save_on_failure(self) -> Iterator[None]:
        """Save the completed steps if the block raises an exception."""
        try:
            yield
        except Exception:
            if self.saveable:
                self.saves.end()  # a full disk must not hide the exception
                if self.step != self.saves.step:
                    self._save_if_it_fits()
                    self.saves.end()
            raise

    def batches(self) -> Iterator[list[Group]]:
        """Yield batches until the last step or a signal; save and export between them."""
        self._ask_servers()
        self._measure()
        self.held_out.begin(self.step, self.executor)
        self._export_if_due()  # the last process was perhaps killed before it
        self._give_turn()
        while self.step < self.config.total_steps and not self.parts.stop.is_set():
            self._check_newcomers()
            groups = self._collect()
            if groups is None:
                break
            yield groups
            self.saves.end_if_written()
            if self._save_due():
                self._save_if_it_fits()
            self._export_if_due()
            self._give_turn()

    def _take_turn(self, level: int = CACHE) -> None:
        """Let servers on the trainer's device sleep."""
        if self.turns:
            with self._phase("sleep"):
                self.turns.take(level)

    def _give_turn(self) -> None:
        """Wake servers on the trainer's device when it has computed and published its step."""
        if not self.turns:
            return
        self._record()
        if publishing := self.publishing:
            with self._phase("publish", version=self.step):
                publishing.result()
            self.publishing = None
        with self._phase("wake"):
            self.state = self.turns.give(self.state, published=publishing is not None)

    def _collect(self) -> list[Group] | None:
        """Return the next batch; None after a signal, or when no useful prompt is left."""
        try:
            if self.under_way:
                step, _, metrics = self.under_way
                with self._phase("train", step=step):
                    # An update may compute synchronously, so a completed step is recorded first.
                    while not (wait([metrics], BUSY_SECONDS).done or self.parts.stop.is_set()):
                        if groups := self._take(0.0):
                            return groups
                self._record()  # the device has completed the step before a batch is ready
            while not self.parts.stop.is_set():
                self._check_newcomers()  # the batch may need these servers
                with self._phase("wait"):
                    while not (self.parts.stop.is_set() or (self.gate and self.gate.newcomers)):
                        if groups := self._take(COLLECT_SECONDS):
                            return groups
        except Exhausted as error:
            self.progress.message(f"run complete at step {self.step}: {error}")
            self.solved = True
        return None

    def _take(self, seconds: float) -> list[Group] | None:
        if self.publishing and self.publishing.done():
            self.publishing.result()  # raises the error of a failed publish
        self.parts.journal.check()
        return self.executor.collect(timeout=seconds)

    def train(self, groups: list[Group]) -> None:
        """Dispatch one batch, record the step before it, publish the new weights."""
        self._take_turn(SLEEPS.index(self.config.fleet.sleep))
        start = time.monotonic()
        with (
            self._phase("train", step=self.step + 1),
            self.timeline.span("trainer", "pack and dispatch", step=self.step + 1),
        ):
            self.saveable = False
            self.state, metrics = self.parts.update.update(self.state, groups)
            self.step += 1
        self.now = self.now.after(groups[-1].group_id + 1, self.rows, self.parts.elapsed())
        if self.saves.due("eval", self.now):
            self.held_out.add(self.step)
        self._record()
        future = self.device.submit(self._read, self.step, metrics, start)
        self.under_way, self.saveable = (self.step, groups, future), True
        self._measure()
        self._publish()

    def _read(self, step: int, metrics: Mapping[str, Any], start: float) -> Mapping[str, Any]:
        """Wait in the device thread until a step is computed; return its metrics and speed."""
        with self.timeline.span("trainer", "compute", track="device", step=step):
            values = dict(metrics)
        # A step that is dispatched early computes only after the step before it.
        last, self.computed_at = self.computed_at, time.monotonic()
        return values | self.parts.precision.speed(values, self.computed_at - max(start, last))

    def _publish(self) -> None:
        """Begin to publish the new weights; wait only for the previous publish."""
        if self.data != "rollouts":
            self.executor.set_version(self.step)  # rows do not wait for a publish
            if not (self._gate_due() or self.held_out.due(self.step)):
                return
        with self._phase("publish", version=self.step):
            while self.publishing and not wait([self.publishing], COLLECT_SECONDS).done:
                if self.parts.stop.is_set() and self.step < self.config.total_steps:
                    return  # a resumed run publishes the saved weights
            if self.publishing:
                self.publishing.result()
            if self.served:
                self.publishing = self.parts.export.publish(self.state, self._send)
            else:
                self.publishing = self._send(None)
        if self._gate_due():
            self._ask_servers()

    def _ask_servers(self) -> None:
        """Begin the gate's check of the servers; the next update waits for it."""
        if self.gate:
            self.gate.ask(self.step, self.publishing)

    def _check_newcomers(self) -> None:
        """Check servers that joined, and wait for any check, before sending them requests."""
        if self.gate and self.gate.newcomers and not self.gate.asked:
            self._ask_servers()
        if self.gate and self.gate.asked:
            self._record()
            with self._phase("gate", version=self.step):
                self.gate.verdict(self.parts.update, self.state, self.parts.stop.is_set)

    def _send(self, weights: Any) -> Future:
        return self.parts.loop.submit(self._deliver(self.step, weights))

    async def _deliver(self, version: int, weights: Any) -> None:
        """Publish `version`; make it current once every live server has acknowledged it."""
        if self.served:
            weights = await in_thread(computed, weights)  # a publish begins after the update
            with self.timeline.span("publish", "publish", version=version):
                report = await self.fleet.publish(version, weights, self.config.fleet.publish)
            self.published = {  # bytes by the trainer, 0 by path; the longest pause of a server
                "publish_bytes": report.sent_bytes, "publish_seconds": report.seconds,
                "publish_stall_seconds": report.stall_seconds,
            }  # fmt: skip
            adapters = self.config.fleet.publish == "adapter"
            weights = {"version": version, "sums": report.sums, "adapters": adapters}
            self.parts.journal.append("weights", weights)
        if self.data == "rollouts":
            self.executor.set_version(version)
        self.held_out.begin(version, self.executor)

    def _record(self) -> None:
        """Wait for the current step, if any; write and show its record."""
        if not self.under_way:
            return
        step, groups, future = self.under_way
        with self._phase("train", step=step):
            saveable, self.saveable, self.under_way = self.saveable, False, None
            metrics = future.result()
        now = time.monotonic()
        counters = self.executor.counters()
        generated = int(counters.pop("generated_tokens"))
        busy = {"server_busy_seconds": self._drain_engine_spans("server", self.fleet)}
        if teachers := self.parts.teacher_fleet:
            busy["teacher_busy_seconds"] = self._drain_engine_spans("teacher", teachers)
        seconds = now - self.recorded_at
        if not self.config.rollout.max_concurrent_rollouts:  # auto
            queued = -1  # unknown; questions of an evaluation wait at the servers as well
            if isinstance(self.fleet, Fleet) and not self.held_out.under_way:
                queued = self.fleet.drain_queue()
            waited = self.seconds.get("wait", 0.0) / seconds
            counters["max_concurrent_rollouts"] = self.executor.tune(waited, queued)
        record = run_records.step_record(
            step, metrics, seconds, generated - self.generated, self.data,
            epoch=groups[-1].group_id // self.rows, version=self.executor.version,
            elapsed_seconds=self.parts.elapsed(), seconds=self.seconds, start=self.writer.start,
            **counters, **self.published, **busy,
        )  # fmt: skip
        self.recorded_at, self.generated, self.seconds, self.compiles = now, generated, {}, False
        self.writer.write("metrics.jsonl", record)
        why = run_records.fruitless(record, self.config.train.minibatches)
        self.fruitless = self.fruitless + 1 if why else 0
        if self.fruitless >= min(FRUITLESS, self.config.total_steps):
            what = f"the last {self.fruitless} steps, up to {step}, taught nothing: {why}"
            remedy = "lower optimizer.learning_rate, or check the data and the model's weights"
            raise UserError(f"{what}; {remedy}")
        count = self.config.observe.transcripts_per_step
        self.writer.write_rollouts(step, run_records.transcripts(step, groups, count))
        self.saveable = saveable  # a checkpoint without its step's records would lose them
        self.progress.update(record)
        for span in self.parts.inputs.reward_pool.drain_spans():
            self.timeline.add("rewards", "worker", "reward", span.start_ns, span.end_ns)
        self._record_evaluations()

    def _drain_engine_spans(self, process: str, fleet: Fleet | NoFleet) -> float:
        """Add the engines' spans since the last record to the timeline; return seconds of work."""
        try:
            spans = list(self.parts.loop.run(fleet.drain_spans(), SPAN_SECONDS).values())
        except TimeoutError:  # the watchdog reports a blocked event loop
            spans = []
        busy = 0
        for index, server in enumerate(spans):
            for text, start, end in server:
                # One name, so that viewers can sum its spans.
                name, _, version = text.partition(" version ")
                busy += (end - start) * (name in run_records.BUSY)
                args = {"version": int(version)} if version else {}
                self.timeline.add(f"{process} {index}", "engine", name, start, end, **args)
        return busy / 1e9 / max(1, len(spans))

    def _measure(self) -> None:
        """Compute the loss on the held-out rows of a dataset, if an evaluation is due."""
        if self.parts.inputs.held_out and self.held_out.due(self.step):
            self._record()
            with self._phase("eval", step=self.step):
                evaluate = partial(self.parts.update.evaluate, self.state)
                self.held_out.measure(self.step, evaluate)

    def _record_evaluations(self, seconds: float | None = 0.0) -> None:
        """Write the evaluations that finish within `seconds`, in order; None: wait for all."""
        for record in self.held_out.take(seconds):
            self.writer.write("eval.jsonl", record)
            self.parts.journal.append("evaluation", jsonable(record))
            self.progress.evaluation(record)

    def _gate_due(self) -> bool:
        every = self.config.gate.every_steps if self.gate else 0
        return every > 0 and self.step % every == 0 and self.step < self.config.total_steps

    def _save_due(self) -> bool:
        if self.step >= self.config.total_steps:  # `finish` saves
            return False
        due = self.saves.due("checkpoint", self.now)
        return due or self.step == self.config.checkpoint.first_step

    def _save(self) -> None:
        self._record()
        self.saves.save(self.state, self.now)

    def _save_if_it_fits(self) -> None:
        with self.saves.report_full_disk():
            self._save()

    def _export_if_due(self) -> None:
        if self.saves.due("export", self.now):
            self._record()
            self.saves.export(self.state, self.now)

    def finish(self) -> tuple[int, bool]:
        """Save, evaluate and report; return completed steps, and whether the run is complete."""
        say = self.progress.message
        self.executor.stop_admitting()
        self._take_turn()
        self._save()
        self._give_turn()
        self.saves.end_or_fail()
        self.parts.journal.check()
        self.saves.end_export()
        complete = self.solved or self.step >= self.config.total_steps
        if complete:
            self.held_out.add(self.step)
            self.progress.phase("final evaluation")
            if self.publishing:
                self.publishing.result()
            self.held_out.begin(self.step, self.executor)
        elif under_way := self.held_out.under_way:
            self.progress.phase("evaluation")
            what = f"waiting up to {LAST_SECONDS:g} s for the evaluation of step {under_way[0]}"
            say(f"checkpoint saved; {what}; press Ctrl-C again to stop at once")
        while complete and self.held_out.under_way:
            self._check_newcomers()  # a restarted server may be the only one left
            self._record_evaluations(COLLECT_SECONDS)
        self._record_evaluations(0.0 if complete else LAST_SECONDS)
        for late in self.held_out.under_way:
            say(f"evaluation of step {late} timed out; a resumed run evaluates step {self.step}")
        if report := self.saves.show():
            say(f"report: {report}")
        again = environment.resume_command(self.parts.workdir)
        if not complete:
            say(f"stopped after step {self.step}; to resume: {again}")
        if missing := complete and self.held_out.due(self.step):
            say(f"the last evaluation is missing; to make it: {again}")
        self.writer.note(self.step, ended="finished" if complete and not missing else "stopped")
        self.parts.hooks.end("finished" if complete else "stopped")
        return self.step, complete

    @contextmanager
    def _phase(self, name: str, **args) -> Iterator[None]:
        """Time a phase of this thread for the record, the timeline and the terminal."""
        self.progress.phase("train, compiling" if name == "train" and self.compiles else name)
        start = time.monotonic()
        doing = " ".join([name, *(f"{key} {value}" for key, value in args.items())])
        try:
            with (
                self.timeline.span("trainer", name, **args),
                failures.friendly_errors(self.parts.advice, doing),
            ):
                yield
        finally:
            spent = time.monotonic() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + spent
