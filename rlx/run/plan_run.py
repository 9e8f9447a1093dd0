"""Plan a run from its config: what `python -m rlx.plan` prints."""

import dataclasses
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from rlx.base import UserError
from rlx.cli.text import aligned, size
from rlx.doctor.gpu_cards import CARDS, Card
from rlx.launch import allocation
from rlx.model import directory
from rlx.observe.timeline import Timeline
from rlx.plan import search
from rlx.plan.lengths import Lengths
from rlx.plan.search import SplitPlan, Workload
from rlx.plan.simulate import Prediction
from rlx.rollout.staleness import Limits
from rlx.run.replay_run import Recorded, changes
from rlx.run.room_options import RunOptions, sizes_of
from rlx.train.train_options import AUTO

IDLE = 0.3  # of one side, above which another split is named
_HEADER = (
    "allocation_mode",
    "tokens/s/GPU",
    "trainer idle",
    "servers idle",
    "staleness",
    "memory/GPU",
)


@dataclass(frozen=True, eq=False)
class PlanRequest:
    """A question to the planner: a config or a run, and GPUs."""

    config: ConfigDict
    values: Any
    card: Card
    gpus: int
    run: Recorded | None

    @classmethod
    def of(cls, config: ConfigDict, values: Any, workdir: Path | None) -> "PlanRequest":
        """Return the question; UserError if the run is unreadable."""
        run = Recorded(workdir) if workdir else None
        if run:
            config = run.config(max(run.batches.groups) + 1)
        return cls(config, values, CARDS[values.gpu], int(values.gpus), run)

    def workload(self, changed: Mapping[str, Any]) -> Workload:
        """Return the workload of the config with some keys changed."""
        config = self.config.copy_and_resolve_references()
        config.update_from_flattened_dict(changed)
        config.model.update(compute_dtype=config.model.compute_dtype.replace(AUTO, "bfloat16"))
        options = RunOptions.of(config)
        path = directory.resolve(config.model.path)
        model = directory.load_config(path).within(options.context)
        sizes = sizes_of(config, model)
        algorithm = sizes.train.algorithm
        rollout, (prompts, answers) = config.rollout, self._recorded
        limit = sizes.max_new_tokens
        usual = self._number("prompt_tokens", sizes.max_prompt_tokens / 2)
        lengths = Lengths.measured(answers) if answers else Lengths.fit(
            self._number("answer_tokens", limit / 2), limit, self._number("cut_share", 0.1)
        )  # fmt: skip
        return Workload(
            sizes, self.card,
            Limits(rollout.batch_prompts, rollout.max_staleness, rollout.max_concurrent_rollouts),
            lengths,
            statistics.mean(prompts or [usual]),
            config.fleet.slots,
            algorithm.needs_proximal_pass(sizes.train.minibatches) + algorithm.needs_reference,
            config.trainer, self._number("tool_seconds", 0.0),
            config.fleet.kv_on_update != "keep",
        )  # fmt: skip

    @cached_property
    def _recorded(self) -> tuple[list[float], list[float]]:
        """Tokens of the prompts and of the answers of the run, if there is one."""
        run = self.run
        groups = [g for s in run.batches.groups for g in run.groups(s + 1)] if run else []
        masks = [t.loss_mask for group in groups for t in group.trajectories]
        answers = [float(mask.sum()) for mask in masks]
        return [len(m) - n for m, n in zip(masks, answers, strict=True)], answers

    def _number(self, flag: str, default: float) -> float:
        text = getattr(self.values, flag)
        try:
            number = float(text) if text else default
        except ValueError:
            number = -1.0
        if number < 0:
            raise UserError(f"--{flag}={text} is not a number from 0; give one, such as 0.1")
        return number

    def plans(self, work: Workload) -> list[SplitPlan]:
        """Return plans, fastest first: of --allocation, or the best ones."""
        if not self.values.allocation:
            return search.best(work, self.gpus)
        found = allocation.parse(self.values.allocation)
        if len(found.parts) != 2 or found.gpus != self.gpus:
            raise UserError(
                f"--allocation={found} has {found.gpus} GPUs and {len(found.parts)} parts; give "
                f"servers and a trainer of --gpus={self.gpus} together"
            )
        if not search.fits(work, found):
            raise UserError(
                f"--allocation={found} does not fit GPUs of {size(self.card.memory)}: the trainer "
                f"has {size(work.trainer_bytes(found))} on each; leave the flag out to find others"
            )
        return [search.plan(work, found)]


def lines(asked: PlanRequest) -> Iterator[str]:
    """Yield what to print; write the timeline if one is wanted."""
    key, _, wanted = asked.values.what_if.partition("=")
    settings = [f"--config.{key}={value}" for value in wanted.split(",")] if key else []
    work = asked.workload({})
    yield _workload_line(asked, work)
    header = (_HEADER[0], f"step s ±{work.calibration.error:.0%}", *_HEADER[1:])
    if settings:
        if asked.values.explain or asked.values.timeline or asked.values.dollars:
            raise UserError(
                "--what_if prints a plan for each value, and --explain, --timeline and --dollars "
                "need one plan; leave one of them out"
            )
        rows = []
        for setting in settings:
            found = asked.plans(asked.workload(changes(asked.config, [setting])))[0]
            rows.append((setting.partition("=")[2], *_row(found)))
        yield from aligned([(key, *header), *rows])
        return
    plans = asked.plans(work)
    yield from aligned([header, *map(_row, plans)])
    yield from _advice(plans[0])
    if asked.values.dollars:
        price = asked._number("dollars", 0.0) * asked.gpus / 3600 * plans[0].prediction.step_seconds
        yield f"a step costs {price:.3g} dollars, {asked.config.total_steps} steps "\
              f"{price * asked.config.total_steps:,.0f}"  # fmt: skip
    if asked.values.explain:
        yield from _terms(work, plans[0])
    if asked.run:
        yield _measured(asked.run)
    if asked.values.timeline:
        timeline = Timeline()
        for process, name, start, end in plans[0].prediction.spans:
            timeline.add(process, "main", name, int(start * 1e9), int(end * 1e9))
        timeline.save(asked.values.timeline)
        yield f"wrote {asked.values.timeline}; open it at https://ui.perfetto.dev"


def _workload_line(asked: PlanRequest, work: Workload) -> str:
    limits, lengths = work.limits, work.lengths
    longest = lengths.quantiles[-1]
    cut = sum(n >= longest for n in lengths.quantiles) / len(lengths.quantiles)
    origin = "measured" if asked.run else "given" if asked.values.answer_tokens else "assumed"
    return (
        f"{asked.gpus} × {work.card.kind}: {limits.batch_prompts} prompts × "
        f"{work.sizes.n_samples} answers a step, prompts of {work.prompt_tokens:,.0f} tokens, "
        f"answers of {lengths.mean:,.0f} ({origin}), {cut:.0%} of them at {longest:,.0f}; at most "
        f"{limits.concurrency} prompts live, max_staleness {limits.max_staleness:g}"
    )


def _row(plan: SplitPlan) -> tuple[str, ...]:
    found = plan.prediction
    mean = sum(lag * share for lag, share in found.lags.items())
    return (
        str(plan.allocation), f"{found.step_seconds:,.3g}", f"{plan.tokens_per_gpu:,.0f}",
        f"{found.trainer_idle:.0%}", f"{found.servers_idle:.0%}",
        f"{mean:.1f} (max {max(found.lags, default=0)})", size(plan.trainer_bytes),
    )  # fmt: skip


def _advice(plan: SplitPlan) -> Iterator[str]:
    """Yield what holds the best plan back."""
    found: Prediction = plan.prediction
    if found.preempted > 0:
        yield (
            f"servers run out of KV cache {found.preempted:.0f} times a step; lower fleet.slots "
            "or give a server more GPUs"
        )
    if min(found.trainer_idle, found.servers_idle) > IDLE:
        yield (
            "both sides wait: the tail of long answers decides; raise rollout.max_staleness and "
            "rollout.max_concurrent_rollouts, or use fewer GPUs"
        )


def _terms(work: Workload, plan: SplitPlan) -> Iterator[str]:
    """Yield the terms that a step's seconds are made of."""
    setup, found = work.setup(plan.allocation), plan.prediction
    server, mean = setup.server, work.lengths.mean
    running = found.running
    context = work.prompt_tokens + mean / 2
    decode = server.decode_seconds(running, running * context)
    yield (
        f"server: {size(server.weights)} of weights, KV cache for {server.kv_tokens:,.0f} tokens; "
        f"{running:.0f} sequences decode together, a token each in {decode * 1e3:.1f} ms "
        f"({running / decode / setup.server.tensor:,.0f} tokens/s/GPU)"
    )
    yield (
        f"longest answer: {work.lengths.quantiles[-1]:,.0f} tokens, "
        f"{work.lengths.quantiles[-1] * server.decode_seconds(1, context):,.0f} s alone"
    )
    trained = found.step_seconds * (1 - found.trainer_idle)
    yield (
        f"trainer: {trained:,.3g} s a step on {setup.training.gpus} GPUs with "
        f"{setup.training.forwards:g} more forward passes; publish "
        f"{setup.training.publish_seconds(setup.servers):.2g} s, servers pause "
        f"{server.load_seconds():.2g} s"
    )
    yield "constants: " + ", ".join(
        f"{name} {value:g}" for name, value in dataclasses.asdict(work.calibration).items()
    )


def _measured(run: Recorded) -> str:
    """Return the measured seconds of a run, for comparison."""
    steps = [record for _, record in sorted(run.metrics.items())][1:] or [*run.metrics.values()]
    seconds = [record["step_seconds"] for record in steps]
    waits = sum(record["seconds"].get("wait", 0.0) for record in steps) / sum(seconds)
    return (
        f"measured in {run.workdir}: {statistics.median(seconds):.3g} s a step, trainer idle "
        f"{waits:.0%}, on the machine of its environment.json"
    )
