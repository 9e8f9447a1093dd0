"""Check a run's config: its model, its data, and the arithmetic between its numbers."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from operator import attrgetter
from pathlib import Path

import numpy as np
from ml_collections import ConfigDict
from packaging.version import Version

from rlx.base import UserError, install
from rlx.cli.text import number
from rlx.doctor import capacity, machine, memory
from rlx.doctor.findings import Finding, advised, attempt, problem, problems
from rlx.doctor.memory import RunSizes
from rlx.fleet.addresses import read_addresses
from rlx.launch.teacher import ScorerOptions
from rlx.model import directory
from rlx.model import params as parameters
from rlx.model.mesh import WEIGHTS, check_devices, mesh_axes, num_row_shards
from rlx.model.model_config import ModelConfig
from rlx.run import fitting
from rlx.run.inputs import Missing, prepare
from rlx.run.plan_run import judge_idle
from rlx.run.precision import decide
from rlx.run.room_options import sizes_of
from rlx.system.jsonl import read_jsonl
from rlx.train import packing

SAMPLED_ROWS = 256  # rows whose prompts are tokenized


def check(config: ConfigDict, workdir: Path, devices: machine.Devices) -> Iterator[Finding]:
    """Yield the rows of a config by section, without those that depend on a failed check."""
    rows: list[Finding] = []
    inputs = prepare(config, partial(record_check, rows))
    yield from rows
    bad, model = {row.name for row in problems(rows)}, vars(inputs).get("model_config")
    if model and "values" not in bad:
        config = config.copy_and_resolve_references()
        row, precision = attempt(
            "config", "dtype", partial(decide, config, model, devices), attrgetter("message")
        )
        config.model.update(precision.dtypes if precision else {})
        if row.found:
            yield row
    sizes = sizes_of(config, model) if model and not bad & {"values", "algorithm"} else None
    if sizes and model:
        fit = fitting.decide(config, sizes, devices, partial(memory.bound, devices=devices))
        config.update_from_flattened_dict(fit.keys)
        sizes = sizes_of(config, model)
        if fit.message:
            yield Finding("config", "microbatch", "ok", fit.message)
    if not bad:
        rows_seen = np.linspace(0, len(inputs.train_rows) - 1, SAMPLED_ROWS).astype(int)
        ids = [inputs.prompts.ids(inputs.train_rows[i]) for i in np.unique(rows_seen)]
        prompts = np.array([len(each) for each in ids])
        yield judge_prompts(prompts, config.data.max_prompt_tokens)
    if model and "mesh" not in bad:
        yield attempt("config", "mesh", partial(_mesh, config, model, devices), str)[0]
    if sizes and not bad:  # the arithmetic between numbers
        yield judge_batch(sizes, len(inputs.train_rows))
        shards = num_row_shards(mesh_axes(config.train.mesh, devices.count))
        jax = config.trainer == "jax"  # torch attends to each segment by itself
        cost = jax * parameters.attention_cost(inputs.model_config, devices.platform)
        yield judge_microbatches(sizes, expected_tokens(config, prompts, workdir), cost, shards)
        if jax and devices.platform == "gpu":
            yield judge_attention(config.model.compute_dtype, metadata.version("jax"))
        if inputs.algorithm.data == "rollouts":
            yield judge_staleness(config, sizes.group)
            if config.allocation_mode and (idle := judge_idle(config, machine.gpu_kind())):
                yield idle
        if inputs.algorithm.needs_proximal_pass(config.train.minibatches):
            what = "one more forward pass per batch (algorithm.proximal=recompute)"
            yield Finding("config", "proximal", "ok", what)
    if sizes:
        teacher = _teacher_sizes(config, inputs.options.teacher)
        yield from capacity.check(sizes, teacher, workdir, devices)


@contextmanager
def record_check(rows: list[Finding], area: str, name: str) -> Iterator[Callable[..., None]]:
    """Add the row of a check, unless it needs an input that an earlier check did not find."""
    messages: list[tuple[str, ...]] = []
    try:
        yield lambda *texts: messages.append(texts)
    except Missing:
        return
    except Exception as error:
        row = problem(area, name, error)
        if row.found not in {row.found for row in rows}:
            rows.append(row)
    rows += (advised(area, name, *texts) for texts in messages if texts[0])


def _mesh(config: ConfigDict, model: ModelConfig, devices: machine.Devices) -> str:
    """Return how the run uses its devices, as text; raise UserError if it cannot."""
    text, count = config.train.mesh, devices.count
    places = math.prod(mesh_axes(text, count).values())
    hosts = max(places // count, 1)  # this is one of them
    check_devices(text, hosts * count)
    axes = mesh_axes(text, count)
    named = ", ".join(f"{name}:{size}" for name, size in axes.items() if size > 1) or "one device"
    more = f" on {hosts} hosts like this one" if hosts > 1 else ""
    parts = math.prod(axes[name] for name in WEIGHTS)
    whole = f"whole: {parts} does not divide the width {model.model_dim}"
    weights = whole if model.model_dim % parts else f"cut in {parts * axes['tensor']}"
    return f"{named}{more}; rows cut in {num_row_shards(axes)}, parameters {weights}"


def _teacher_sizes(config: ConfigDict, options: ScorerOptions) -> RunSizes | None:
    """Return the sizes of the teacher's servers; None if the run starts none."""
    if not options.num_local:
        return None
    try:
        model = directory.load_config(directory.resolve(options.path))
    except UserError:  # reported in the row of the teacher
        return None
    return dataclasses.replace(
        sizes_of(config, model),
        engine=options.engine,
        num_servers=options.num_local,
        slots=options.slots,
        max_model_len=options.longest,
    )


def judge_prompts(tokens: np.ndarray, limit: int) -> Finding:
    """Return the row that compares prompt lengths with `data.max_prompt_tokens`."""
    most = int(tokens.max())
    what = f"{tokens.mean():.0f} tokens on average, {most} at most in {len(tokens)} sampled rows"
    enough = math.ceil(1.5 * most / 64) * 64
    if limit <= max(4 * most, enough):
        return advised("data", "prompt lengths", f"{what}; the limit is {limit}")
    what += f"; data.max_prompt_tokens={limit} reserves memory for longer ones"
    return advised("data", "prompt lengths", what, f"set data.max_prompt_tokens={enough}")


def judge_attention(compute_dtype: str, jax: str) -> Finding:
    """Return the row of how attention is computed on an NVIDIA GPU."""
    what, remedy = "cuDNN, on packed rows with Hopper and newer", ""
    if compute_dtype == "float32":
        what = "model.compute_dtype=float32: cuDNN has no kernel for it, XLA's blocks are slower"
        remedy = "set model.compute_dtype=bfloat16"
    elif Version(jax) < Version("0.11.2"):
        what = f"jax {jax} copies the keys for each query head in cuDNN's packed attention"
        remedy = f"use Python 3.12 or newer with jax 0.11.2 or newer: {install('cuda')}"
    return advised("config", "attention", what, remedy)


def judge_batch(sizes: RunSizes, rows: int) -> Finding:
    """Return the row of a batch (prompts × group) and its minibatches."""
    batch, group = sizes.batch_prompts, sizes.group
    parts, steps = sizes.train.minibatches, sizes.train.total_steps
    what = (
        f"{batch} prompts × {group} = {batch * group} trajectories; {parts} minibatch"
        f"{'es' * (parts > 1)} of {batch / parts:g} prompts; {steps} steps see "
        f"{number(steps * batch / rows)} epochs of {rows} rows"
    )
    remedy = ""
    if batch % parts:
        what += ": minibatches differ in size"
        remedy = f"make rollout.batch_prompts={batch} a multiple of train.minibatches={parts}"
    elif 1 < rows < batch:
        what, remedy = f"{what}: a batch repeats rows", "add rows, or lower rollout.batch_prompts"
    return advised("config", "batch", what, remedy)


def expected_tokens(config: ConfigDict, prompts: np.ndarray, workdir: Path) -> float:
    """Return the mean tokens of a trajectory, by the records in `workdir` if there are any."""
    lengths = [r.get("avg_seq_len") for r in read_jsonl(workdir / "metrics.jsonl")]
    known = [length for length in lengths if length]
    return float(known[-1] if known else prompts.mean() + config.sampling.max_new_tokens / 2)


def judge_microbatches(
    sizes: RunSizes, expected: float, cost: float = 0.0, shards: int = 1
) -> Finding:
    """Return the row of microbatches, for lengths spread evenly around `expected` tokens."""
    budget, most, count = sizes.train.row_budget, sizes.longest, sizes.minibatch
    spread = np.linspace(0.5, 1.5, count) * expected
    lengths = np.clip(spread, 1, min(most, budget)).astype(np.int64)
    lengths[-1] = min(most, budget)  # the longest one decides the row length
    buckets = sizes.train.row_buckets
    plan = packing.plan(lengths, budget, buckets, attention_cost=cost, shards=shards)
    full = lengths.sum() / plan.padded_tokens
    parts = len(plan.shapes)
    what = (
        f"{budget} tokens: {number(budget / most)} of the longest trajectories ({most} tokens), "
        f"{number(budget / expected)} of the expected ({expected:.0f}); a minibatch of {count} is "
        f"{parts} microbatch{'es' * (parts > 1)} in rows of {plan.row_length}, {full:.0%} full"
    )
    remedy = ""
    if full < 0.5:
        what += ": most of it is padding"
        remedy = (
            "lower train.max_tokens_per_microbatch, or a train.row_buckets entry nearer to "
            f"{most} tokens"
        )
    return advised("config", "microbatches", what, remedy)


def judge_staleness(config: ConfigDict, group: int) -> Finding:
    """Return the row that compares staleness and concurrency with the servers' slots."""
    eta, batch = config.rollout.max_staleness, config.rollout.batch_prompts
    ahead, most = (eta + 1) * batch, config.rollout.max_concurrent_rollouts
    live = min(ahead, most)
    what = (
        f"(η + 1)·B = ({eta} + 1) × {batch} = {ahead} prompts ahead of the trainer, {most} live at "
        f"most: {live * group} sequences"
    )
    remedy = ""
    servers = config.fleet.num_servers
    slots = servers * config.fleet.slots
    if most < batch:
        what += "; less than one batch at a time"
        remedy = f"raise rollout.max_concurrent_rollouts to {batch} or more"
    elif config.fleet.addresses:  # with slots of their own
        running = len(read_addresses(config.fleet.addresses))
        what += f" for {running} running server{'s' * (running > 1)}"
    elif live * group >= slots // 2:
        what += f" for {slots} slots"
    else:
        what += f" for {slots} slots; half of them stay empty"
        fewer = max(live * group // max(servers, 1), 1)
        remedy = f"lower fleet.slots to {fewer}, or raise rollout.max_staleness"
        if most < ahead:
            remedy = "raise rollout.max_concurrent_rollouts"
    return advised("config", "staleness", what, remedy)
