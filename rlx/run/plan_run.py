"""Plan a run from its config: what `python -m rlx.plan` prints."""

import json
import math
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from rlx.base import UserError
from rlx.cli.command import say
from rlx.cli.findings import Finding, advised
from rlx.cli.text import aligned, size
from rlx.doctor import gpu_cards
from rlx.doctor.gpu_cards import CARDS, CPU, Card
from rlx.doctor.memory import RunSizes
from rlx.launch import allocation
from rlx.model import directory
from rlx.observe.report_speed import measured_phases
from rlx.observe.timeline import Timeline
from rlx.plan import search
from rlx.plan.search import SplitPlan, Workload
from rlx.plan.simulate import Lengths
from rlx.plan.speeds import Calibration
from rlx.run.replay_run import Recorded, as_flag, changes
from rlx.run.room_options import RunOptions, limits_of, sizes_of
from rlx.system.jsonl import jsonable, read_jsonl, write_atomically
from rlx.train.train_options import AUTO

IDLE = 0.3  # of one side, above which another split is named
_STOP = 5.0  # × the median step; steps that work longer compile, save or evaluate
RECENT = 32  # batches of a run whose lengths are read
_PROBE_STEPS, _PROBE_SECONDS = 24, 110.0  # at most; the first ones compile
# Hours of a GPU between two failures: 419 in 54 days of 16,384, Llama 3 (arXiv 2407.21783, 3.3.4).
_FAILURE_HOURS = 50_700.0
_RESTART = 300.0  # seconds from a failure of the trainer to its first step again, assumed
# On a CPU a decode step of few sequences takes 0.5 ms, see experiments/2026-12-planner.
_ON_CPU = Calibration(step=5e-4)
_FASTER = 0.97  # seconds of a changed setting that is worth a line, for one of now
_HEADER = (
    "allocation_mode", "tokens/s/GPU", "trainer idle", "servers idle", "staleness", "memory/GPU",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class PlanRequest:
    """A config or a run, and the GPUs to plan for."""

    config: ConfigDict
    values: Any  # flags of the command
    card: Card
    gpus: int
    run: Recorded | None

    @classmethod
    def of(cls, config: ConfigDict, values: Any, workdir: Path | None) -> "PlanRequest":
        """Return a command's request; UserError if the run is unreadable, or GPUs are unknown."""
        if workdir is None:
            return cls(config, values, CARDS[values.gpu], int(values.gpus), None)
        run = Recorded(workdir)
        if not run.metrics:
            raise UserError(f"{workdir} has no record of a step; let it end one, or give --config")
        last = max(run.batches.groups) + 1
        config, mode = run.config(last), run.config(last).allocation_mode
        place = run.start(last).get("environment", {})
        devices, card = place.get("devices", ""), CARDS.get(values.gpu)
        if devices.endswith("cpu") and not card:
            for flag in ("gpus", "allocation"):
                if getattr(values, flag) and values.gpu != "this":
                    what = f"--{flag} does nothing with a run on CPUs"
                    raise UserError(f"{what}; add --gpu=KIND, or leave it out")
            peak = place.get("peak_flops", 0.0) / place["cores"]
            return cls(config, values, replace(CPU, peak=peak or CPU.peak), place["cores"], run)
        card = card or gpu_cards.card_of(devices)
        count = int(values.gpus or (allocation.parse(mode).gpus if mode else 0))
        if card is None or not count:
            what = f"{workdir} ran on {devices or 'unknown devices'} without allocation_mode"
            raise UserError(f"{what}; give GPUs to plan for, such as --gpus=8 --gpu=h100")
        return cls(config, values, card, count, run)

    def recorded_allocation(self, work: Workload) -> allocation.Allocation | None:
        """Return the allocation that a run measured, on a CPU with the servers of `work`."""
        if work.cores:
            return allocation.parse(f"jax:d{max(1, work.sizes.num_servers)}+jax:f1")
        mode = self.config.allocation_mode if self.run else ""
        split = allocation.parse(mode) if mode else None
        return split if split and len(split.parts) == 2 and split.gpus == self.gpus else None

    def workload(self, changed: Mapping[str, Any]) -> Workload:
        """Return the workload of the config with some keys changed."""
        config = self.config.copy_and_resolve_references()
        config.update_from_flattened_dict(changed)
        config.model.compute_dtype = config.model.compute_dtype.replace(AUTO, "bfloat16")
        config.model.remat = config.model.remat.replace(AUTO, "full")
        options = RunOptions.of(config)
        path = directory.resolve(config.model.path, weights=False)
        model = directory.load_config(path).within(options.context)
        sizes = sizes_of(config, model)
        algorithm = sizes.train.algorithm
        prompts, answers, turns, observed = self._recorded_lengths
        limit, on_cpu = sizes.max_new_tokens, self.card.kind == CPU.kind
        usual = self.number("prompt_tokens", sizes.max_prompt_tokens / 2)
        prompt = statistics.mean(prompts or [usual])
        turns = max(1, round(self.number("turns", turns)))
        observed = self.number("observation_tokens", observed)
        lengths = Lengths.measured(answers) if answers else Lengths.fit(
            self.number("answer_tokens", limit / 2), limit, self.number("cut_share", 0.1)
        )  # fmt: skip
        return Workload(
            sizes, self.card, limits_of(config), lengths, prompt, config.fleet.slots,
            algorithm.needs_proximal_pass(sizes.train.minibatches) + algorithm.needs_reference,
            config.trainer, self.number("tool_seconds", 0.0), turns, observed,
            config.fleet.kv_on_update != "keep", shared_tokens=self._shared_tokens(sizes, prompt),
            calibration=_ON_CPU if on_cpu else Calibration(), cores=self.gpus * on_cpu,
            fanout=config.fleet.relay_fanout,
        )  # fmt: skip

    def _shared_tokens(self, sizes: RunSizes, prompt: float) -> float:
        """Return the first tokens computed once for a group, by the run's steps; 0 without."""
        train, n = sizes.train, sizes.n_samples
        if "context" in train.mesh or train.share_prefixes == "off":
            return 0.0
        steps = [*self.run.metrics.values()][-RECENT:] if self.run else []
        tokens = [s["n_shared_tokens"] / s["n_seqs"] for s in steps if "n_shared_tokens" in s]
        return statistics.mean(tokens) * n / max(1, n - 1) if tokens else prompt

    @cached_property
    def measured(self) -> dict[str, float]:
        """Mean seconds of a step's phases in the second half of the run, without its stops."""
        records = [record for _, record in sorted(self.run.metrics.items())] if self.run else []
        if (done := len(records)) >= self.config.total_steps:  # servers had no prompts at the end
            records = records[: max(2, done - int(self.config.rollout.max_staleness))]
        half = records[max(0, len(records) // 2 - 1) :]  # the first one is not averaged
        works = [r["step_seconds"] - r["seconds"].get("wait", 0.0) for r in half[1:]]
        most = _STOP * statistics.median([r["step_seconds"] for r in half[1:]] or [0.0])
        others = [record for record, work in zip(half[1:], works, strict=True) if work <= most]
        seconds = measured_phases([*half[:1], *others])
        if "train" in seconds:  # with packing and records, which the trainer does not wait for
            seconds["train"] = seconds["step"] - seconds.get("wait", 0.0)
        return seconds

    @cached_property
    def _recorded_lengths(self) -> tuple[list[float], list[float], float, float]:
        """Tokens of a run's prompts and answers; mean turns, and tokens that one more adds."""
        run = self.run
        steps = sorted(run.batches.groups)[-RECENT:] if run else []
        groups = [g for s in steps for g in run.groups(s + 1)] if run else []
        return turns_of([t.loss_mask for group in groups for t in group.trajectories])

    def number(self, flag: str, default: float) -> float:
        """Return the value of a flag, or `default`; UserError for no number from 0."""
        text = getattr(self.values, flag, "")
        with suppress(ValueError):
            if math.inf > (number := float(text) if text else default) >= 0:
                return number
        raise UserError(f"--{flag}={text} is not a number from 0; give one, such as 0.1")

    def plans(self, work: Workload) -> list[SplitPlan]:
        """Return plans, fastest first: of --allocation, or the best ones."""
        if (run_split := self.recorded_allocation(work)) and work.cores:
            return [search.plan(work, run_split)]
        if not self.values.allocation:
            return search.best(work, self.gpus)
        split = allocation.parse(self.values.allocation)
        if len(split.parts) != 2 or split.gpus != self.gpus:
            why = f"has {split.gpus} GPUs and {len(split.parts)} parts, not servers and a trainer "
            why += f"of --gpus={self.gpus} together"
        elif search.fits(work, split):
            return [search.plan(work, split)]
        else:
            why = f"does not fit GPUs of {size(self.card.memory)}: the trainer has "
            why += f"{size(work.trainer_bytes(split))} on each"
        best = search.best(work, self.gpus)[0]
        raise UserError(f"--allocation={split} {why}; the best that fits is {best.allocation}")


def turns_of(masks: Sequence[np.ndarray]) -> tuple[list[float], list[float], float, float]:
    """Return tokens of prompts and of answers by trajectories' masks of sampled tokens.

    Further the mean number of turns, and the mean tokens between two of them.
    """
    answers = [float(mask.sum()) for mask in masks]
    begins = [np.flatnonzero(np.diff(mask, prepend=False) & mask) for mask in masks]
    firsts = zip(begins, masks, strict=True)
    prompts = [float(begin[0] if begin.size else len(mask)) for begin, mask in firsts]
    further = sum(max(begin.size - 1, 0) for begin in begins)
    between = sum(map(len, masks)) - sum(answers) - sum(prompts)
    return prompts, answers, 1 + further / max(1, len(masks)), between / max(1, further)


def probe(config: ConfigDict, workdir: Path) -> None:
    """Measure this machine by a short run of `config` in `workdir`; UserError if it is too slow."""
    config = config.copy_and_resolve_references()
    config.update_from_flattened_dict({
        "total_steps": _PROBE_STEPS, "scheduler.type": "local", "eval.num_questions": 0,
        "gate.enabled": False, "observe.writers": (), "observe.metrics_port": 0,
        "observe.traces": "", "checkpoint.copy_to": "",  # which has the last probe's
    })  # fmt: skip
    workdir.mkdir()
    command = [sys.executable, "-m", "rlx.main", as_flag(config, workdir.parent)]
    say(f"measuring this machine: {_PROBE_STEPS} steps, at most {_PROBE_SECONDS:g} s", sys.stderr)
    why, remedy = "", "give a smaller rollout.batch_prompts or sampling.max_new_tokens"
    with suppress(subprocess.TimeoutExpired):
        done = subprocess.run([*command, f"--workdir={workdir}"], capture_output=True, text=True,
                              timeout=_PROBE_SECONDS)  # fmt: skip
        if done.returncode:
            *_, why = (done.stdout + done.stderr).splitlines() or ["no message"]
    if (steps := sum(1 for _ in read_jsonl(workdir / "metrics.jsonl"))) < 4 or why:
        why = why or f"{steps} steps in {_PROBE_SECONDS:g} s are too few; {remedy}"
        raise UserError(f"--gpu=this: {why.removeprefix('error: ')}")


def choose(config: ConfigDict, kind: str, gpus: int, workdir: Path | None) -> str:
    """Say, write and return the fastest allocation, "" if nothing is generated; or UserError."""
    card = gpu_cards.card_of(kind)
    if card is None:
        usual = f"vllm:d{gpus - 1}+{config.trainer}:f1" if gpus > 1 else "vllm:d1|jax:f1"
        what = f"allocation_mode=auto: the GPU {kind!r} is unknown"
        raise UserError(f"{what}; set it, such as {usual}")
    work = PlanRequest(config, None, card, gpus, None).workload({})
    if work.sizes.train.algorithm.data != "rollouts":
        return ""
    best, *others = search.best(work, gpus)
    if config.cluster.process < 1:  # others follow
        seconds = f"{best.prediction.step_seconds:.3g} s a step on {gpus} × {card.kind}"
        what = f"allocation_mode=auto: {best.allocation}, {seconds} by the plan, {_idle(best)}"
        for other in others[:1]:
            what += f"; next {other.allocation} with {other.prediction.step_seconds:.3g} s"
        say(what)
        if workdir:
            _write(best, workdir)
    return str(best.allocation)


def judge_idle(config: ConfigDict, kind: str) -> Finding | None:
    """Return the doctor's row of the waiting that an allocation leads to; None without a plan.

    GPUs of an unknown `kind` count as H100s, which changes seconds more than shares.
    """
    mode = config.allocation_mode
    split, card = allocation.parse(mode), gpu_cards.card_of(kind) or CARDS["h100"]
    work = PlanRequest(config, None, card, split.gpus, None).workload({})
    if len(split.parts) != 2 or not search.fits(work, split):
        return None
    current = search.plan(work, split)
    what = f"{_idle(current)} with {mode} on {split.gpus} × {card.kind}, by the plan"
    if current.longest_idle <= IDLE:
        return advised("config", "plan", what)
    remedy = "no split avoids it: raise rollout.max_staleness, and rollout.max_concurrent_rollouts"
    better = (plan for plan in search.best(work, split.gpus) if plan.longest_idle <= IDLE)
    if plan := next(better, None):  # the fastest
        step, before = plan.prediction.step_seconds, current.prediction.step_seconds
        remedy = f"set allocation_mode={plan.allocation}: {_idle(plan)}, "
        remedy += f"{step:.3g} s a step in place of {before:.3g}"
    return advised("config", "plan", what, remedy)


def _idle(plan: SplitPlan) -> str:
    means = plan.prediction
    return f"trainer idle {means.trainer_idle:.0%}, servers idle {means.servers_idle:.0%}"


def _write(plan: SplitPlan, workdir: Path) -> None:
    """Write what is expected of a run into its directory, for its report."""
    record = {"allocation": str(plan.allocation), "seconds": plan.seconds}
    write_atomically(workdir / "plan.json", json.dumps(jsonable(record)).encode())


def lines(request: PlanRequest) -> Iterator[str]:
    """Yield what to print; write the timeline if one is wanted."""
    key, _, choices = request.values.what_if.partition("=")
    settings = [f"--config.{key}={value}" for value in choices.split(",")] if key else []
    work = request.workload({})
    yield _workload_line(request, work)
    split = request.recorded_allocation(work) if request.run else None
    if request.run:
        measured, step = request.measured, request.measured["step"]
        idle = [max(0.0, 1 - measured.get(phase, step) / step) for phase in ("train", "generate")]
        idles = f"trainer idle {idle[0]:.0%}, servers idle {idle[1]:.0%}"
        yield f"measured in {request.run.workdir}: {step:.3g} s a step, {idles}"
        split = split if all(map(measured.get, ("generate", "train"))) else None
        if split:
            if not (work.cores or (request.run.workdir / "plan.json").exists()):
                _write(search.plan(work, split), request.run.workdir)
            work = search.refit(work, split, measured)
            serve, train, publish = work.measured
            times = f"servers take {serve:.3g} and the trainer {train:.3g} times the seconds"
            times += f" of their data sheets, and a publish {publish:.2g} s more"
            yield f"refitted: {times}; the plans below count on that"
    error = "" if split else f" ±{work.calibration.error:.0%}"
    header = (_HEADER[0], f"step s{error}", *_HEADER[1:])
    if settings:
        if request.values.explain or request.values.timeline or request.values.dollars:
            need = "--explain, --timeline and --dollars need one plan; leave one of them out"
            raise UserError(f"--what_if prints a plan for each value, and {need}")
        rows: list[tuple[str, ...]] = [(key, *header)]
        for setting in settings:
            changed = request.workload(changes(request.config, [setting]))
            plan = request.plans(replace(changed, measured=work.measured))[0]
            rows.append((setting.partition("=")[2], *_row(plan)))
        yield from aligned(rows)
        return
    plans = request.plans(work)
    best, failures = plans[0], _failure_factor(request.config, plans[0])
    yield from aligned([header, *map(_row, plans)])
    yield from _advice(best)
    if split:
        yield _change(request, work, split, best)
    if request.values.dollars:
        hourly, steps = request.number("dollars", 0.0) * request.gpus, request.config.total_steps
        price = hourly / 3600 * best.prediction.step_seconds * (1 + failures)
        yield f"a step costs {price:.3g} dollars, {steps} steps {price * steps:,.0f}"
    if request.values.explain:
        yield from _terms(work, best)
        gpus = best.trainer_gpus
        often = f"one every {_FAILURE_HOURS / gpus:,.0f} h on {gpus} GPUs, as in Llama 3's training"
        more = f"restarts and repeated steps take {failures:.2%} more"
        yield f"failures of the trainer: {often}; {more}"
    if request.values.timeline:
        timeline = Timeline()
        for process, name, start, end in best.prediction.spans:
            timeline.add(process, "main", name, int(start * 1e9), int(end * 1e9))
        timeline.save(request.values.timeline)
        yield f"wrote {request.values.timeline}; open it at https://ui.perfetto.dev"


def _workload_line(request: PlanRequest, work: Workload) -> str:
    limits, lengths = work.limits, work.lengths
    longest = lengths.quantiles[-1]
    cut = sum(n >= longest for n in lengths.quantiles) / len(lengths.quantiles)
    turns = f" in {work.turns} turns" if work.turns > 1 else ""
    origin = "measured" if request.run else "given" if request.values.answer_tokens else "assumed"
    return (
        f"{request.gpus} × {work.card.kind}: {limits.batch_prompts} prompts × "
        f"{work.sizes.n_samples} answers a step, prompts of {work.prompt_tokens:,.0f} tokens, "
        f"answers of {lengths.mean:,.0f} ({origin}){turns}, "
        f"{cut:.0%} of them at {longest:,.0f}; at most "
        f"{limits.concurrency} prompts live, max_staleness {limits.max_staleness:g}"
    )


def _row(plan: SplitPlan) -> tuple[str, ...]:
    means = plan.prediction
    mean = sum(lag * share for lag, share in means.lags.items())
    speed = means.tokens / means.step_seconds / plan.allocation.gpus
    return (
        str(plan.allocation), f"{means.step_seconds:,.3g}", f"{speed:,.0f}",
        f"{means.trainer_idle:.0%}", f"{means.servers_idle:.0%}",
        f"{mean:.1f} (max {max(means.lags, default=0)})", size(plan.trainer_bytes),
    )  # fmt: skip


def _advice(plan: SplitPlan) -> Iterator[str]:
    """Yield what holds the best plan back."""
    means = plan.prediction
    if means.preempted > 0:
        remedy = "lower fleet.slots or give a server more GPUs"
        yield f"servers run out of KV cache {means.preempted:.0f} times a step; {remedy}"
    if min(means.trainer_idle, means.servers_idle) > IDLE:
        remedy = "raise rollout.max_staleness and rollout.max_concurrent_rollouts"
        yield f"both sides wait: the tail of long answers decides; {remedy}, or use fewer GPUs"


def _failure_factor(config: ConfigDict, plan: SplitPlan) -> float:
    """Return the time that the trainer's failures take, for one of the time without them.

    A server's failure takes its share of the tokens only, until it is back.
    """
    step, saves = plan.prediction.step_seconds, config.checkpoint
    every = [each for each in (saves.every_seconds, saves.every_steps * step) if each > 0]
    rarely = step if saves.every_epochs else config.total_steps * step  # epochs are not known
    repeated = max(min(every, default=rarely), step) / 2
    return plan.trainer_gpus / _FAILURE_HOURS * (_RESTART + repeated) / 3600


def _terms(work: Workload, plan: SplitPlan) -> Iterator[str]:
    """Yield the terms that a step's seconds are made of."""
    setup, means, longest = work.setup(plan.allocation), plan.prediction, work.lengths.quantiles[-1]
    server, running = setup.server, means.running
    context = work.prompt_tokens + work.lengths.mean / 2
    decode = server.decode_seconds(running, running * context)
    yield (
        f"server: {size(server.weights)} of weights, KV cache for {server.kv_tokens:,.0f} tokens; "
        f"{running:.0f} sequences decode together, a token each in {decode * 1e3:.1f} ms "
        f"({running / decode / server.tensor:,.0f} tokens/s/GPU)"
    )
    alone = longest * server.decode_seconds(1, context)
    yield f"longest answer: {longest:,.0f} tokens, {alone:,.0f} s alone"
    trained = means.step_seconds * (1 - means.trainer_idle)
    yield (
        f"trainer: {trained:,.3g} s a step on {setup.training.gpus} GPUs with "
        f"{setup.training.forwards:g} more forward passes; publish {means.publish_seconds:.2g} s, "
        f"servers pause {server.load_seconds():.2g} s"
    )
    constants = asdict(work.calibration).items()
    yield "constants: " + ", ".join(f"{name} {value:g}" for name, value in constants)


def _change(
    request: PlanRequest, work: Workload, split: allocation.Allocation, best: SplitPlan
) -> str:
    """Return the change of a run that makes its steps shortest, by the refitted plan."""
    limits = work.limits
    now = search.plan(work, split).prediction.step_seconds
    tries = {f"allocation_mode={best.allocation}": best.prediction.step_seconds}
    for key, value in {
        "rollout.max_staleness": int(limits.max_staleness) + 1,
        **({} if limits.samples else {"rollout.max_concurrent_rollouts": 2 * limits.concurrency}),
        **({"fleet.num_servers": work.sizes.num_servers + 1} if work.cores else {}),
    }.items():
        changed = replace(request.workload({key: value}), measured=work.measured)
        plan = search.plan(changed, request.recorded_allocation(changed) or split)
        tries[f"{key}={value}"] = plan.prediction.step_seconds
    setting, seconds = min(tries.items(), key=itemgetter(1))
    if seconds > _FASTER * now:
        why = "no setting tried is faster"
        return f"nothing to change: {split} takes {now:.3g} s a step, and {why}"
    return f"change {setting}: {seconds:.3g} s a step in place of {now:.3g} s with {split}"
