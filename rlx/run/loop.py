"""The run: admit, collect, step, publish, checkpoint, evaluate. It calls; it does not compute.

    executor thread   admit ─▶ generate (gRPC) ─▶ reward ─▶ buffer       publish ─▶ set_version
                                                     │                      ▲
    this thread       collect ◀──────────────────────┘ ─▶ update ─▶ to_hf ──┘ ─▶ record, save

`collect` blocks only while no batch is ready. A publish runs beside what follows it, and at most
one is under way. A cluster runs this same file: a laptop has the same processes, only fewer.

Training on a dataset (SFT, pairs) is the same loop: the executor makes groups of rows, and versions
are published only for evaluations; without servers there is nobody to publish to.
"""

import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from rlx.base import DiskFull, Group, UserError
from rlx.cli.signals import interrupts
from rlx.doctor import failures, memory
from rlx.evaluation.held_out import HeldOut
from rlx.fleet import wire
from rlx.fleet.client import Fleet
from rlx.fleet.client import Limits as FleetLimits
from rlx.fleet.no_fleet import Nobody
from rlx.fleet.scratch import Scratch
from rlx.fleet.tls import client_tls
from rlx.launch import available_memory, teacher
from rlx.launch.local import CpuPlan, LocalServers, cpu_plan
from rlx.launch.teacher import Teacher
from rlx.launch.workdir_lock import Killed, make_directory, occupied
from rlx.mismatch.gate import Gate, sentence
from rlx.model import compile_cache, hf
from rlx.model import params as parameters
from rlx.observe.jsonl import append_jsonl, read_json, read_jsonl
from rlx.observe.metrics import MetricsWriter
from rlx.observe.progress import Progress
from rlx.observe.report import write_report
from rlx.observe.timeline import Timeline
from rlx.rollout import attempts
from rlx.rollout.data import Cursor
from rlx.rollout.executor import Executor, Exhausted
from rlx.rollout.staleness import Limits
from rlx.rollout.teacher_scores import Taught
from rlx.rollout.workflows import Workflow
from rlx.run import resume, run_records
from rlx.run.export import Export
from rlx.run.inputs import (
    INITIAL,
    Inputs,
    as_json,
    has_servers,
    patience,
    prepare,
    server_options,
)
from rlx.train import checkpoint
from rlx.train.update import make_update

INTERRUPTED = 130
LAST_SECONDS = 60.0  # that a run which was stopped waits for an evaluation under way
SKIPS_TOLD = 5  # in the terminal
COLLECT_SECONDS = 0.2  # how often a waiting trainer looks for Ctrl-C


def run(config: ConfigDict, workdir: Path) -> int:
    """Runs `config` in `workdir`, continuing its last checkpoint if there is one.

    Returns:
      0 when `total_steps` are done; 130 when a signal ended the run after a finished, saved step.

    Raises:
      UserError: inputs, servers or storage that cannot work. The failure that exhausted the
        rollouts' budget is raised as it was, with its traceback.
    """
    for name, value in compile_cache.options().items():
        jax.config.update(name, value)
    inputs = prepare(config)
    make_directory(workdir)
    with failures.explained(), ExitStack() as stack:
        killed = stack.enter_context(occupied(workdir))
        said = resume.claim(config, workdir)
        advice = partial(memory.advice, config, inputs.model_config, started=False)
        with failures.explained(advice, "before the first step"):
            parts = _Run(config, workdir, inputs, stack, killed, said)
        return parts.main()


class _Run:
    """One run's parts, and the few facts that change: state, step, what is under way."""

    def __init__(
        self,
        config: ConfigDict,
        workdir: Path,
        inputs: Inputs,
        stack: ExitStack,
        killed: Killed | None = None,
        said: Sequence[str] = (),
    ):
        self.config, self.workdir, self.inputs = config, workdir, inputs
        self.served, self.data = has_servers(config), inputs.algorithm.data
        self.begun = self.last_record = self.last_save = time.monotonic()
        self.generated, self.stopping, self.whole, self.saved = 0, False, True, -1
        self.skips, self.solved = 0, False
        self.seconds: dict[str, float] = {}
        self.published: dict[str, float] = {}
        self.advice = partial(memory.advice, config, inputs.model_config)
        self.publishing: Future | None = None
        self.teacher: Teacher | None = None
        self.tutor: Fleet | None = None  # in front of it
        self.fleet: Fleet | Nobody
        self.timeline = Timeline()
        stack.callback(lambda: self.timeline.save(workdir / "timeline.json"))
        self.progress = stack.enter_context(Progress(config.total_steps, title=workdir.name))
        for text in said:
            self.progress.message(text)
        self._foresee(killed)
        stack.enter_context(interrupts(self._stop))
        cores = sorted(os.sched_getaffinity(0))
        token = wire.take_token(os.environ)
        servers = self._start_servers(stack, cores, token)
        stack.callback(inputs.reward_pool.close)
        if self.served:
            inputs.reward_pool.start()  # its imports go on beside everything else
        self._build_trainer()
        self.writer = stack.enter_context(self._records(cores))
        done = (record["step"] for record in read_jsonl(workdir / "eval.jsonl"))
        self.held_out = HeldOut(
            config,
            inputs,
            done,
            self.step,
            self.timeline,
            self._elapsed,
            self._note_skip,
            self.progress.message,
        )
        self.fleet = self._fleet(stack, servers, token) if self.served else Nobody()
        self.gate = None
        if config.gate.enabled and self.served:
            self.gate = Gate(config, inputs, self.model_dir, workdir / "hf")
        self._start_executor(stack)

    # Setting up.

    def _foresee(self, killed: Killed | None) -> None:
        """Says what nobody could afterwards: whom the kernel kills for memory has no last word."""
        if killed:
            self.progress.message(str(killed))
        text = memory.foresight(
            self.config,
            self.inputs.model_config,
            available_memory.memory(),
            always=bool(killed and killed.for_memory),
        )
        if text:
            self.progress.message(text)
        if text := self._disk():
            self.progress.message(text)

    def _disk(self) -> str:
        """Return the warning about disk space for checkpoints; raise DiskFull where none fits."""
        there = [self.workdir / "checkpoints", self.workdir / "hf"]
        files = [path for place in there for path in place.rglob("*") if path.is_file()]
        return memory.disk_foresight(
            self.config,
            self.inputs.model_config,
            shutil.disk_usage(self.workdir).free,
            sum(path.stat().st_size for path in files),
        )

    def _start_servers(
        self, stack: ExitStack, cores: list[int], token: str | None
    ) -> LocalServers | None:
        """Begins to start local servers, on cores of their own, while the trainer compiles."""
        fleet, inputs = self.config.fleet, self.inputs
        own = 0 if fleet.addresses else fleet.num_servers
        plan = cpu_plan(cores, own + teacher.num_local(self.config), fleet.threads)
        os.sched_setaffinity(0, plan.trainer)  # before JAX makes its threads
        stack.callback(os.sched_setaffinity, 0, cores)
        self.model_dir = inputs.model_dir
        if self.config.model.random_init:
            self.model_dir = self.workdir / INITIAL
            key = jax.random.key(self.config.seed)
            weights = parameters.init(inputs.model_config, key, self.config.model.dtype)
            hf.save(
                self.model_dir, inputs.model_config, weights, self.config.model.publish_dtype,
                source=inputs.model_dir,
            )  # fmt: skip
        if teacher.has_teacher(self.config):
            options, say = server_options(self.config), self.progress.message
            beside = Teacher(self.config, self.workdir, plan.servers[own:], options, say, token)
            self.teacher = stack.enter_context(beside)
        if fleet.addresses or not self.served:
            return None
        servers = LocalServers(
            self.model_dir,
            workdir=self.workdir,
            plan=CpuPlan(plan.trainer, plan.servers[:own]),
            on_message=self.progress.message,
            **server_options(self.config),
        )
        return stack.enter_context(servers)

    def _build_trainer(self) -> None:
        """The train state: the checkpoint's, or that of the model directory."""

        def first() -> parameters.Params:
            """The policy the run began with; KL terms and LoRA's adapters begin there too."""
            return hf.load(self.model_dir, self.config.model.dtype)[1]

        self.update = make_update(
            self.inputs.model_config, self.config, reference_params=first, base_params=first
        )
        self.export = Export(self.config, self.update, self.model_dir, self.inputs.model_dir)
        self.restored, self.step, self.earlier = None, 0, 0.0
        if self.config.checkpoint.recover_mode == "auto":
            self.restored = checkpoint.restore_latest(
                self.workdir / "checkpoints", self.update.abstract_state, self.progress.message
            )
        if self.restored:
            self.state, host = self.restored.state, self.restored.host
            self.export.require_base(host)
            self.step, self.earlier = host["step"], host["elapsed_seconds"]
        else:
            self.state = self.update.init({} if self.update.lora else first())

    def _records(self, cores: list[int]) -> MetricsWriter:
        """The run's records, without what is done again; says what that is, and where."""
        c, path = self.config, self.workdir / "environment.json"
        before, last = read_json(path), resume.last_step(self.workdir)
        place = {
            "cores": len(cores),
            "trainer_cores": len(os.sched_getaffinity(0)),
            "devices": f"{jax.device_count()} × {jax.devices()[0].device_kind}",
            "servers": len(c.fleet.addresses) or c.fleet.num_servers,
        }
        writer = MetricsWriter(self.workdir, c.observe.tensorboard, self.step + 1, place)
        if writer.unreadable:
            self.progress.message(
                f"{writer.unreadable} lines of the run's records could not be read; they are kept "
                f"in {self.workdir}/*.unreadable"
            )
        if self.restored:
            self.progress.message(resume.done_again(self.restored.host, last))
            if text := resume.moved(before, read_json(path)):
                self.progress.message(text)
        return writer

    def _start_executor(self, stack: ExitStack) -> None:
        """Connects the fleet, gives it the state's version, and begins to admit prompts."""
        c = self.config
        workflow: Workflow = self.inputs.workflow
        if self.teacher:
            self.tutor = self.teacher.fleet()
            workflow = Taught(workflow, self.tutor, c.sampling.temperature)
        self.executor = Executor(
            workflow,
            Cursor(self.inputs.train_rows, c.seed, c.data.shuffle),
            Limits(
                c.rollout.batch_prompts,
                c.rollout.max_staleness,
                c.rollout.max_concurrent_rollouts,
                c.total_steps,
            ),
            self.fleet,
            seed=c.seed,
            force_staleness=c.rollout.force_staleness,
            patience=patience(c),
            max_tokens=min(c.train.max_tokens_per_microbatch, max(c.train.row_buckets)),
            on_skip=self._note_skip,
            drop_equal_rewards=self.inputs.algorithm.drop_equal_rewards,
            request_timeout=c.rollout.request_timeout_seconds,
        )
        self.executor.start()
        stack.callback(self._stop_executor)
        if self.tutor:
            stack.callback(self._let_go, self.tutor)
            self.executor.run(teacher.connect(self.tutor))
        self.executor.run(self.fleet.connect())
        if self.restored:
            changed = self.executor.restore(
                self.restored.host["executor"], self.restored.groups, c.data.allow_change
            )
            if changed:
                self.progress.message(f"{changed}; going on, as data.allow_change is set")
        if self.restored or c.fleet.addresses:  # local servers have just read these very weights
            weights = self.export.weights(self.state.params)
            self.executor.run(self.fleet.publish(self.step, weights, c.fleet.publish))
        self.executor.set_version(self.step)

    def _fleet(self, stack: ExitStack, servers: LocalServers | None, token: str | None) -> Fleet:
        """The fleet, not connected yet: our own servers, or those at the addresses of `token`."""
        c = self.config
        options: dict[str, Any] = {
            "limits": FleetLimits.of(c.fleet, c.rollout.request_timeout_seconds),
            "kv_on_update": c.fleet.kv_on_update,
            "on_message": self.progress.message,
        }
        if servers:
            return servers.fleet(**options)
        directory = stack.enter_context(Scratch(c.fleet.publish_dir)).directory
        options |= {"token": token, "tls": client_tls(**c.fleet.tls), "publish_dir": directory}
        return Fleet(c.fleet.addresses, **options)

    def _stop_executor(self) -> None:
        self._let_go(self.fleet)
        self.executor.close()

    def _let_go(self, fleet: Fleet | Nobody) -> None:
        with suppress(RuntimeError):  # the executor's thread has ended
            self.executor.run(fleet.close())

    # The loop.

    def main(self) -> int:
        """Steps until the last one or a signal; returns the exit status."""
        self.saved = self.step  # what is not trained on cannot be lost
        self._ask_servers()
        self._measure()
        self.held_out.begin(self.step, self.executor)
        try:
            while self.step < self.config.total_steps and not self.stopping:
                self._pass_gate()
                groups = self._collect()
                if groups is None:
                    break
                self._check_newcomers()
                self._train(groups)
                if self._save_due():
                    self._save_if_it_fits()
                    with suppress(OSError, UserError):  # a page must not end a run
                        self._show()
        except Exception:
            if self.whole and self.step != self.saved:  # what ended the run must not cost its steps
                self._save()
            raise
        return self._finish()

    def _collect(self) -> list[Group] | None:
        """The next batch; None when a signal came while there was none, or none will come."""
        with self._phase("wait"):
            while not self.stopping:
                if self.publishing and self.publishing.done():
                    self.publishing.result()  # raises what kept the weights from the fleet
                try:
                    groups = self.executor.collect(timeout=COLLECT_SECONDS)
                except Exhausted as error:
                    self.progress.message(f"the run ends well at step {self.step}: {error}")
                    self.solved = True
                    return None
                if groups is not None:
                    return groups
        return None

    def _train(self, groups: list[Group]) -> None:
        """One batch: update, publish, record."""
        with self._phase("train", step=self.step + 1):
            self.whole = False
            with self.timeline.span("trainer", "pack and dispatch", step=self.step + 1):
                self.state, metrics = self.update.update(self.state, groups)
            with self.timeline.span("trainer", "compute", step=self.step + 1):
                jax.block_until_ready(self.state.step)
            self.step, self.whole = self.step + 1, True
        self._measure()
        self._publish()
        self._record(groups, metrics)

    def _publish(self) -> None:
        """Hands the new weights to the fleet; waits only for the publish before it."""
        if self.data != "rollouts":
            self.executor.set_version(self.step)  # rows do not wait for a publish
            if not self._wanted():
                return
        with self._phase("publish", version=self.step):
            if self.publishing:
                self.publishing.result()
            weights = self.export.weights(self.state.params) if self.served else {}
        self.publishing = self.executor.submit(self._deliver(self.step, weights))
        if self._due(self.config.gate.every_steps):
            self._ask_servers()

    def _wanted(self) -> bool:
        """Whether a version that no rollout waits for is evaluated or checked."""
        checked = self.gate is not None and self._due(self.config.gate.every_steps)
        return checked or self.held_out.due(self.step)

    def _ask_servers(self) -> None:
        """Begins a check of the servers' tokens, which the next update waits for."""
        if self.gate:
            assert isinstance(self.fleet, Fleet)
            self.gate.ask(self.executor, self.fleet, self.step, self.publishing)

    def _check_newcomers(self) -> None:
        """Check servers that joined since the last check, before their tokens are trained on."""
        if self.gate and isinstance(self.fleet, Fleet) and self.gate.newcomers(self.fleet):
            self._ask_servers()
            self._pass_gate()

    def _pass_gate(self) -> None:
        """Ends a check under way; raises UserError when servers and trainer disagree."""
        if not self.gate or not self.gate.asked:
            return
        with self._phase("gate", version=self.step):
            whole = self.update.whole(self.state.params)
            verdict = self.gate.verdict(whole, lambda: self.stopping)
        if verdict:
            self.writer.write_gate(verdict.record)
            if verdict.error:
                raise verdict.error
            self.progress.message(sentence(verdict.record))

    async def _deliver(self, version: int, weights: Any) -> None:
        """Publishes `version`; its tokens count once every live server has acknowledged it."""
        if self.served:
            with self.timeline.span("publish", "publish", version=version):
                report = await self.fleet.publish(version, weights, self.config.fleet.publish)
            self.published = run_records.publish_record(report)
        if self.data == "rollouts":
            self.executor.set_version(version)
        self.held_out.begin(version, self.executor)

    def _record(self, groups: list[Group], metrics: Mapping[str, Any]) -> None:
        """Writes and shows the step."""
        now = time.monotonic()
        counters = self.executor.counters()
        generated = int(counters.pop("generated_tokens"))
        busy = {"server_busy_seconds": self._engines("server", self.fleet)}
        if self.tutor:
            busy["teacher_busy_seconds"] = self._engines("teacher", self.tutor)
        record = run_records.step_record(
            self.step,
            metrics,
            self.seconds,
            {**counters, **self.published, **busy},
            version=self.executor.version,
            epoch=groups[-1].group_id // len(self.inputs.train_rows),
            step_seconds=now - self.last_record,
            elapsed_seconds=self._elapsed(),
            generated_tokens=generated - self.generated,
            data=self.data,
        )
        self.last_record, self.generated, self.seconds = now, generated, {}
        self.writer.write(record)
        count = self.config.observe.transcripts_per_step
        self.writer.write_rollouts(self.step, run_records.transcripts(self.step, groups, count))
        self.progress.update(record)
        for name, start, end in self.executor.drain_spans():
            self.timeline.add("rewards", "worker", name, start, end)
        self._record_evaluations()

    def _engines(self, process: str, fleet: Fleet | Nobody) -> float:
        """Puts what a fleet's engines did since the last record on the timeline; busy seconds."""
        spans = list(self.executor.run(fleet.drain_spans()).values())
        for index, server in enumerate(spans):
            for text, start, end in server:
                name, _, version = text.partition(" version ")  # one name, so that a viewer can sum
                args = {"version": int(version)} if version else {}
                self.timeline.add(f"{process} {index}", "engine", name, start, end, **args)
        return run_records.busy_seconds(spans)

    # Held-out evaluation.

    def _measure(self) -> None:
        """The held-out loss of this step, if it is due and there is one."""
        if self.inputs.held_out and self.held_out.due(self.step):
            with self._phase("eval", step=self.step):
                self.held_out.measure(
                    self.step, lambda groups: self.update.evaluate(self.state, groups)
                )

    def _record_evaluations(self, seconds: float | None = 0.0) -> None:
        """Writes those that are finished within `seconds`, in order; None: all of them."""
        for record in self.held_out.take(seconds):
            self.writer.write_eval(record)
            self.progress.evaluation(record)

    # Saving and ending.

    def _due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0 and self.step < self.config.total_steps

    def _save_due(self) -> bool:
        c = self.config.checkpoint
        seconds = time.monotonic() - self.last_save
        first = self.step == c.first_step < self.config.total_steps
        due = first or self._due(c.every_steps)
        return due or (c.every_seconds > 0 and seconds > c.every_seconds)

    def _save_if_it_fits(self) -> None:
        """A checkpoint on the way: where it does not fit, that is said and training goes on."""
        try:
            self._save()
            text = self._disk()
        except DiskFull as error:
            text, self.last_save = (
                f"{error}; training goes on until the next is due",
                time.monotonic(),
            )
        if text:
            self.progress.message(text)

    def _save(self) -> None:
        """A checkpoint of everything, and the exported HF directory."""
        with self._phase("checkpoint", step=self.step):
            host, groups = self.executor.state()
            checkpoint.save(
                self.workdir / "checkpoints",
                self.step,
                self.state,
                {
                    "step": self.step,
                    "elapsed_seconds": self._elapsed(),
                    "executor": host,
                    "config": as_json(self.config),
                    "model": self.update.model.to_hf(),
                    "lora_base": self.export.base.hex(),
                },
                groups,
                keep=self.config.checkpoint.keep,
                beside=memory.exported(self.config, self.inputs.model_config),
            )
            self.export.save(self.workdir, self.state.params)
        self.saved = self.step
        self.last_save = time.monotonic()

    def _show(self) -> Path | None:
        """Write the timeline and the report of what there is; return the report's path."""
        self.timeline.save(self.workdir / "timeline.json")
        return write_report(self.workdir) if self.step else None

    def _finish(self) -> int:
        """Saves, scores the final weights if the run is complete, and writes the report."""
        self.executor.stop_admitting()
        self._save()
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
        self._record_evaluations(None if complete else LAST_SECONDS)
        for late in self.held_out.under_way:
            self.progress.message(
                f"no evaluation of step {late}: it took longer; going on makes one of {self.step}"
            )
        if report := self._show():
            self.progress.message(f"report: {report}")
        if not complete:
            again = f"python -m rlx.main with the same --config and --workdir={self.workdir}"
            self.progress.message(f"stopped after step {self.step}; to go on: {again}")
        if complete and self.held_out.due(self.step):
            self.progress.message("the last evaluation is missing; the same command makes it")
        return 0 if complete else INTERRUPTED

    # Small things.

    def _note_skip(self, record: dict[str, Any]) -> None:
        """Names a skipped row in skipped.jsonl, the first ones in the terminal too. Any thread."""
        append_jsonl(self.workdir / "skipped.jsonl", {**record, "time": time.time()})
        self.skips += 1
        if self.skips <= SKIPS_TOLD:
            more = "; further ones in skipped.jsonl alone" if self.skips == SKIPS_TOLD else ""
            self.progress.message(attempts.sentence(record) + more)

    def _elapsed(self) -> float:
        """Seconds of the run, with those of the processes that it continues."""
        return self.earlier + time.monotonic() - self.begun

    @contextmanager
    def _phase(self, name: str, **args) -> Iterator[None]:
        """Times a phase of this thread for the record, the timeline and the terminal."""
        self.progress.phase(name)
        start = time.monotonic()
        doing = " ".join([name, *(f"{key} {value}" for key, value in args.items())])
        try:
            with (
                self.timeline.span("trainer", name, **args),
                failures.explained(self.advice, doing),
            ):
                yield
        finally:
            spent = time.monotonic() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + spent

    def _stop(self) -> None:
        self.stopping = True
        self.progress.message("finishing this step, then saving; once more to stop at once")
