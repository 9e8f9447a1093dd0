"""The loop of a run: collect a batch, train, publish, record, save. It calls; it does not compute.

    executor thread   admit ─▶ generate (gRPC) ─▶ reward ─▶ buffer       publish ─▶ set_version
                                                     │                      ▲
    this thread       collect ◀──────────────────────┘ ─▶ update ─▶ weights ┘ ─▶ record, save
    device                                                  computing n … n + 1 …

Nothing here waits for the device but a record, and that only when the step after it has been given
to the device, or no batch for one is ready. A publish and a save run beside what follows them, at
most one of each. A batch is never held: what `collect` gives is dispatched at once, so a checkpoint
is of all batches that were taken. A cluster runs this same file: a laptop has the same processes,
only fewer.

Training on a dataset (SFT, pairs) is the same loop: the executor makes groups of rows, and versions
are published only for evaluations; without servers there is nobody to publish to.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from os import PathLike
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from rlx.base import Group, UserError
from rlx.cli.command import say
from rlx.cli.user_code import forget_edited
from rlx.config import check
from rlx.doctor import failures, memory
from rlx.fleet.client import Fleet, NoFleet
from rlx.mismatch.gate import sentence
from rlx.observe import environment, writers
from rlx.observe.hooks import Hooks
from rlx.rollout.executor import Exhausted
from rlx.run import resume, run_records, trainers
from rlx.run.allocate import allocated, dealt
from rlx.run.inputs import prepare
from rlx.run.parts import Parts, build
from rlx.run.room_options import has_servers, is_online, sizes_of
from rlx.run.saves import Saves
from rlx.run.watchdog import watched
from rlx.system.jsonl import read_jsonl
from rlx.system.process_settings import keep_freed_memory
from rlx.system.workdir_lock import make_directory, occupied
from rlx.train import conductor
from rlx.train.contract import State

LAST_SECONDS = 60.0  # that a run which was stopped waits for an evaluation under way
COLLECT_SECONDS = 0.2  # how often a waiting trainer looks for Ctrl-C
_ENDLESS = 1 << 62  # rows, where applications ask
FRUITLESS = 5  # steps in a row that teach nothing and end a run
SPAN_SECONDS = 10.0  # that servers have to answer for the timeline
BUSY_SECONDS = 0.01  # how often it looks for a batch while the device computes


@dataclass(frozen=True)
class RunResult:
    """How a run ended.

    Attributes:
      step: train batches that are done, by all processes of the run.
      complete: `total_steps` are done, or no prompt is left that could teach anything.
      metrics, evals: the records in `workdir`, of steps and of evaluations.
    """

    workdir: Path
    step: int
    complete: bool
    metrics: list[dict[str, Any]] = field(repr=False)
    evals: list[dict[str, Any]] = field(repr=False)


def run(
    config: ConfigDict,
    workdir: str | PathLike[str],
    callbacks: Sequence[Any] = (),
    stop: Event | None = None,
) -> RunResult:
    """Run `config` in `workdir`, continuing its last checkpoint if there is one.

    It may be called again, in any thread, and while an event loop runs. In the main thread Ctrl-C,
    or an interrupt of a notebook's cell, ends the run after a saved step, a second one at once.

    Args:
      callbacks: hooks, as rlx/observe/hooks.py has them; told after those of observe.writers.
      stop: set it, in a hook or in another thread, to end the run after a saved step.

    Raises:
      UserError: a config, inputs, servers or storage that cannot work. The failure that exhausted
        the rollouts' budget is raised as it was, with its traceback.
    """
    config, workdir = allocated(config.copy_and_resolve_references()), Path(workdir)
    check(config)
    forget_edited()
    keep_freed_memory()
    trainers.library(config).set_up()
    stop = stop or Event()
    with dealt(config) as gpus, trainers.together(config, stop) as hosts, watched(workdir) as watch:
        if hosts.index:
            return RunResult(workdir, *trainers.follow(config, hosts), [], [])
        if step := resume.finished(config, workdir):
            say(f"all {step} steps are done; raise --config.total_steps to train on in {workdir}")
            conductor.stop(hosts, step=step, complete=True)
            return _result(workdir, step, True)
        hooks = Hooks(writers.load(config.observe.writers, callbacks))
        inputs = prepare(config)
        make_directory(workdir)
        with failures.explained(), ExitStack() as stack:
            killed = stack.enter_context(occupied(workdir))
            messages = resume.claim(config, workdir)
            parts = Parts(config=config, workdir=workdir, inputs=inputs, hooks=hooks, stop=stop)
            sizes = sizes_of(config, inputs.model_config)
            devices = trainers.library(config).devices
            advice = partial(memory.advice, sizes, devices, started=False)
            with failures.explained(advice, "before the first step"):
                built = build(parts, stack, killed, messages, hosts, gpus)
            watch(parts)
            step, complete = _Loop(parts, *built).main()
        conductor.stop(hosts, step=step, complete=complete)
    return _result(workdir, step, complete)


def _result(workdir: Path, step: int, complete: bool) -> RunResult:
    records = (list(read_jsonl(workdir / name)) for name in ("metrics.jsonl", "eval.jsonl"))
    return RunResult(workdir, step, complete, *records)


class _Step(NamedTuple):
    """A step that the device has been given, and is not recorded yet."""

    step: int
    groups: list[Group]
    metrics: Future[Mapping[str, Any]]


class _Loop:
    """Steps of one run: the train state, the step, and what is under way.

    Attributes:
      step: batches given to the device, as `state` has seen them.
      whole: False while `state` cannot be saved: the device may have failed to make it, or a step
        before it has no record.
      now: the position of `step`. rows: of an epoch.
      compiles: until the first step here is done, where its program has to be made.
      solved: no prompt is left that could teach anything.
      fruitless: how many steps up to the last record taught nothing.
      seconds: of each phase since the last record. published: record of the last publish.
      device: a thread that waits for one step after the other.
    """

    def __init__(self, parts: Parts, state: State, step: int):
        self.parts, self.config, self.state, self.step = parts, parts.config, state, step
        self.served, self.data = has_servers(parts.config), parts.inputs.algorithm.data
        self.executor, self.fleet, self.gate = parts.executor, parts.fleet, parts.gate
        self.progress, self.timeline, self.writer = parts.progress, parts.timeline, parts.writer
        self.held_out = parts.held_out
        self.last_record, self.now = time.monotonic(), parts.begun
        self.rows = _ENDLESS if is_online(parts.config) else max(1, len(parts.inputs.train_rows))
        self.generated, self.fruitless, self.whole, self.solved = 0, 0, True, False
        self.compiles = self.config.trainer == "jax" or self.config.train.compile
        self.seconds: dict[str, float] = {}
        self.published: dict[str, float] = {}
        self.publishing: Future | None = None
        self.under_way: _Step | None = None
        self.device, self.saves = ThreadPoolExecutor(1, "device"), Saves(parts, step, self._phase)

    def main(self) -> tuple[int, bool]:
        """Step until the last one or a signal; return the steps done, and whether that is all.

        An interrupt leaves a save under way, which takes its place when it is whole, or never.
        """
        patient = True
        try:
            return self._main()
        except KeyboardInterrupt:
            patient = False
            raise
        finally:
            for pool in (self.device, self.saves.disk):
                pool.shutdown(wait=patient, cancel_futures=not patient)

    def _main(self) -> tuple[int, bool]:
        self._ask_servers()
        self._measure()
        self.held_out.begin(self.step, self.executor)
        try:
            if self.saves.due("export", self.now):  # a kill has cut it off after its checkpoint
                self._export()
            while self.step < self.config.total_steps and not self.parts.stop.is_set():
                self._check_newcomers()
                groups = self._collect()
                if groups is None:
                    break
                self._train(groups)
                self.saves.end_if_written()
                if self._save_due():
                    self._save_if_it_fits()
                if self.saves.due("export", self.now):
                    self._export()
        except Exception:
            if self.whole:  # what ended the run must not cost its steps
                self.saves.end()  # a full disk must not hide what it was
                if self.step != self.saves.step:
                    self._save_if_it_fits()
                    self.saves.end()
            raise
        return self._finish()

    def _collect(self) -> list[Group] | None:
        """Return the next batch; None if a signal came while there was none, or none will come.

        The step under way is recorded where the device is done with it before a batch is ready.
        """
        try:
            if now := self.under_way:
                with self._phase("train", step=now.step):
                    # Its end first: who computes in `update` would else make the next one before.
                    while not (
                        futures.wait([now.metrics], BUSY_SECONDS).done or self.parts.stop.is_set()
                    ):
                        if groups := self._take(0.0):
                            return groups
                self._record()
            while not self.parts.stop.is_set():
                self._check_newcomers()  # it may be they that the batch waits for
                with self._phase("wait"):
                    while not (self.parts.stop.is_set() or self._newcomers()):
                        if groups := self._take(COLLECT_SECONDS):
                            return groups
        except Exhausted as error:
            self.progress.message(f"the run ends well at step {self.step}: {error}")
            self.solved = True
        return None

    def _take(self, seconds: float) -> list[Group] | None:
        """Return the next batch, if it is ready within `seconds`."""
        if self.publishing and self.publishing.done():
            self.publishing.result()  # raises what kept the weights from the fleet
        return self.executor.collect(timeout=seconds)

    def _train(self, groups: list[Group]) -> None:
        """Give the device one batch, record the step before, publish the new weights."""
        with (
            self._phase("train", step=self.step + 1),
            self.timeline.span("trainer", "pack and dispatch", step=self.step + 1),
        ):
            self.whole = False
            self.state, metrics = self.parts.update.update(self.state, groups)
            self.step, self.whole = self.step + 1, True
        self.now = self.now.after(groups[-1].group_id + 1, self.rows, self.parts.elapsed())
        if self.saves.due("eval", self.now):
            self.held_out.add(self.step)
        self._record()
        read = self.device.submit(self._read, self.step, metrics)
        self.under_way = _Step(self.step, groups, read)
        self._measure()
        self._publish()

    def _read(self, step: int, metrics: Mapping[str, Any]) -> Mapping[str, Any]:
        """Wait until the device has made a step; in a thread, which does so for one at a time."""
        with self.timeline.span("trainer", "compute", track="device", step=step):
            return dict(metrics)

    def _publish(self) -> None:
        """Hand the new weights to the fleet; wait only for the publish before this one."""
        if self.data != "rollouts":
            self.executor.set_version(self.step)  # rows do not wait for a publish
            if not self._wanted():
                return
        with self._phase("publish", version=self.step):
            while self.publishing and not futures.wait([self.publishing], COLLECT_SECONDS).done:
                if self.parts.stop.is_set():  # whoever goes on publishes what is saved
                    return
            if self.publishing:
                self.publishing.result()
            if self.served:
                self.publishing = self.parts.export.publish(self.state, self._send)
            else:
                self.publishing = self._send(None)
        if self._gate_due():
            self._ask_servers()

    def _wanted(self) -> bool:
        """Return whether a version that no rollout waits for is evaluated or checked."""
        checked = self.gate is not None and self._gate_due()
        return checked or self.held_out.due(self.step)

    def _ask_servers(self) -> None:
        """Begin a check of the servers' tokens, which the next update waits for."""
        if self.gate:
            assert isinstance(self.fleet, Fleet)
            self.gate.ask(self.executor, self.fleet, self.step, self.publishing)

    def _newcomers(self) -> bool:
        """Return whether servers wait for a check, which joined or were started again."""
        return isinstance(f := self.fleet, Fleet) and bool(self.gate and self.gate.newcomers(f))

    def _check_newcomers(self) -> None:
        """End a check under way, or check servers that joined, before any request of ours."""
        if self.gate and not self.gate.asked and self._newcomers():
            self._ask_servers()
        self._pass_gate()

    def _pass_gate(self) -> None:
        """End a check under way; raise UserError when servers and trainer disagree."""
        if not self.gate or not self.gate.asked:
            return
        self._record()
        with self._phase("gate", version=self.step):
            verdict = self.gate.verdict(
                partial(self.parts.update.logprobs, self.state),
                lambda: self.parts.update.weights(self.state).arrays(),
                self.parts.stop.is_set,
            )
        if verdict:
            self.writer.write("gate.jsonl", verdict.record)
            if verdict.error:
                raise verdict.error
            assert isinstance(self.fleet, Fleet)
            self.parts.loop.run(self.fleet.admit(self.gate.passed))
            for text in verdict.refused or (sentence(verdict.record),):
                self.progress.message(text)

    def _send(self, weights: Any) -> Future:
        return self.parts.loop.submit(self._deliver(self.step, weights))

    async def _deliver(self, version: int, weights: Any) -> None:
        """Publish `version`; its tokens count once every live server has acknowledged it."""
        if self.served:
            with self.timeline.span("publish", "publish", version=version):
                report = await self.fleet.publish(version, weights, self.config.fleet.publish)
            self.published = run_records.publish_record(report)
        if self.data == "rollouts":
            self.executor.set_version(version)
        self.held_out.begin(version, self.executor)

    def _record(self) -> None:
        """Wait for the step under way, if there is one; write and show its record."""
        if not self.under_way:
            return
        step, groups, read = self.under_way
        with self._phase("train", step=step):
            whole, self.whole, self.under_way = self.whole, False, None
            metrics = read.result()
        now = time.monotonic()
        counters = self.executor.counters()
        generated = int(counters.pop("generated_tokens"))
        busy = {"server_busy_seconds": self._engines("server", self.fleet)}
        if self.parts.tutor:
            busy["teacher_busy_seconds"] = self._engines("teacher", self.parts.tutor)
        record = run_records.step_record(
            step,
            metrics,
            self.seconds,
            {**counters, **self.published, **busy, "start": self.writer.start},
            version=self.executor.version,
            epoch=groups[-1].group_id // self.rows,
            step_seconds=now - self.last_record,
            elapsed_seconds=self.parts.elapsed(),
            generated_tokens=generated - self.generated,
            data=self.data,
        )
        self.last_record, self.generated, self.seconds = now, generated, {}
        self.compiles = False
        self.writer.write("metrics.jsonl", record)
        why = run_records.fruitless(record, self.config.train.minibatches)
        self.fruitless = self.fruitless + 1 if why else 0
        if self.fruitless >= min(FRUITLESS, self.config.total_steps):
            what = f"the last {self.fruitless} steps, up to {step}, taught nothing: {why}"
            remedy = "lower optimizer.learning_rate, or check the data and the model's weights"
            raise UserError(f"{what}; {remedy}")
        self.whole = whole  # a checkpoint after a step without a record would lose the record
        count = self.config.observe.transcripts_per_step
        self.writer.write_rollouts(step, run_records.transcripts(step, groups, count))
        self.progress.update(record)
        for span in self.parts.inputs.reward_pool.drain_spans():
            self.timeline.add("rewards", "worker", "reward", span.start_ns, span.end_ns)
        self._record_evaluations()

    def _engines(self, process: str, fleet: Fleet | NoFleet) -> float:
        """Add the engines' spans since the last record to the timeline; return busy seconds."""
        try:
            spans = list(self.parts.loop.run(fleet.drain_spans(), SPAN_SECONDS).values())
        except TimeoutError:  # something blocks the loop, which the watchdog reports
            spans = []
        for index, server in enumerate(spans):
            for text, start, end in server:
                name, _, version = text.partition(" version ")  # one name, so that a viewer can sum
                args = {"version": int(version)} if version else {}
                self.timeline.add(f"{process} {index}", "engine", name, start, end, **args)
        return run_records.busy_seconds(spans)

    # Held-out evaluation.

    def _measure(self) -> None:
        """Compute the held-out loss of this step, if it is due and there is one."""
        if self.parts.inputs.held_out and self.held_out.due(self.step):
            self._record()
            with self._phase("eval", step=self.step):
                self.held_out.measure(
                    self.step, lambda groups: self.parts.update.evaluate(self.state, groups)
                )

    def _record_evaluations(self, seconds: float | None = 0.0) -> None:
        """Write the evaluations that finish within `seconds`, in order; None: wait for all."""
        for record in self.held_out.take(seconds):
            self.writer.write("eval.jsonl", record)
            self.progress.evaluation(record)

    # Saving and ending.

    def _gate_due(self) -> bool:
        every = self.config.gate.every_steps
        return every > 0 and self.step % every == 0 and self.step < self.config.total_steps

    def _save_due(self) -> bool:
        if self.step >= self.config.total_steps:  # it is saved at once
            return False
        due = self.saves.due("checkpoint", self.now)
        return due or self.step == self.config.checkpoint.first_step

    def _save(self) -> None:
        self._record()
        self.saves.save(self.state, self.now)

    def _save_if_it_fits(self) -> None:
        with self.saves.told_if_full():
            self._save()

    def _export(self) -> None:
        self._record()
        self.saves.export(self.state, self.now)

    def _finish(self) -> tuple[int, bool]:
        """Save, score the final weights if the run is complete, and write the report."""
        self.executor.stop_admitting()
        self._save()
        self.saves.end_or_fail()
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
            self.progress.message(
                f"saved; waiting for the evaluation of step {under_way[0]}, {LAST_SECONDS:g} s at "
                "most; once more to stop at once"
            )
        while complete and self.held_out.under_way:
            self._check_newcomers()  # one started again may be the only one that could answer
            self._record_evaluations(COLLECT_SECONDS)
        self._record_evaluations(0.0 if complete else LAST_SECONDS)
        for late in self.held_out.under_way:
            self.progress.message(
                f"no evaluation of step {late}: it took longer; going on makes one of {self.step}"
            )
        if report := self.saves.show():
            self.progress.message(f"report: {report}")
        if not complete:
            again = environment.again(self.parts.workdir)
            self.progress.message(f"stopped after step {self.step}; to go on: {again}")
        if complete and self.held_out.due(self.step):
            self.progress.message("the last evaluation is missing; the same command makes it")
        elif complete:
            self.writer.end(self.step)
        self.parts.hooks.end("finished" if complete else "stopped")
        return self.step, complete

    @contextmanager
    def _phase(self, name: str, **args) -> Iterator[None]:
        """Time a phase of this thread for the record, the timeline and the terminal."""
        first = name == "train" and self.compiles
        self.progress.phase("train, compiling" if first else name)
        start = time.monotonic()
        doing = " ".join([name, *(f"{key} {value}" for key, value in args.items())])
        try:
            with (
                self.timeline.span("trainer", name, **args),
                failures.explained(self.parts.advice, doing),
            ):
                yield
        finally:
            spent = time.monotonic() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + spent
