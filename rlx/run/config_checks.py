"""Check a run's config: its model, its data, and the arithmetic between its numbers."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from pathlib import Path

import numpy as np
from ml_collections import ConfigDict
from packaging.version import Version

from rlx.base import UserError, install
from rlx.cli.text import number
from rlx.doctor import capacity, machine
from rlx.doctor.findings import Finding, attempt, problem, problems
from rlx.doctor.memory import RunSizes
from rlx.fleet.addresses import read_addresses
from rlx.launch.teacher import ScorerOptions
from rlx.model import directory
from rlx.model import params as parameters
from rlx.model.mesh import WEIGHTS, check_devices, mesh_axes, num_row_shards
from rlx.model.model_config import ModelConfig
from rlx.run.inputs import Inputs, Missing, prepare
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
    if not bad:
        rows_seen = np.linspace(0, len(inputs.train_rows) - 1, SAMPLED_ROWS).astype(int)
        ids = [inputs.prompts.ids(inputs.train_rows[i]) for i in np.unique(rows_seen)]
        prompts = np.array([len(each) for each in ids])
        yield judge_prompts(prompts, config.data.max_prompt_tokens)
    if model and "mesh" not in bad:
        yield attempt("config", "mesh", partial(_mesh, config, model, devices), str)[0]
    if not bad:
        yield from arithmetic(config, inputs, prompts, workdir, devices)
    if model and not bad & {"values", "algorithm"}:
        sizes = sizes_of(config, model)
        yield from capacity.check(sizes, _teacher_sizes(config), workdir, devices)


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
    rows += (Finding(area, name, "warning" if len(m) > 1 else "ok", *m) for m in messages if m[0])


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


def _teacher_sizes(config: ConfigDict) -> RunSizes | None:
    """Return the sizes of the teacher's servers; None if the run starts none."""
    options = ScorerOptions.of_teacher(config)
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
    if limit > max(4 * most, enough):
        return Finding("data", "prompt lengths", "warning", f"{what}; data.max_prompt_tokens="
                       f"{limit} reserves memory for longer ones",
                       f"set data.max_prompt_tokens={enough}")  # fmt: skip
    return Finding("data", "prompt lengths", "ok", f"{what}; the limit is {limit}")


def arithmetic(
    config: ConfigDict,
    inputs: Inputs,
    prompts: np.ndarray,
    workdir: Path,
    devices: machine.Devices,
) -> Iterator[Finding]:
    """Yield the rows of batch, minibatches, microbatches and staleness."""
    sizes = sizes_of(config, inputs.model_config)
    yield judge_batch(sizes, len(inputs.train_rows))
    shards = num_row_shards(mesh_axes(config.train.mesh, devices.count))
    jax = config.trainer == "jax"  # torch attends to each segment by itself
    cost = jax * parameters.attention_cost(inputs.model_config, devices.platform)
    yield judge_microbatches(sizes, expected_tokens(config, prompts, workdir), cost, shards)
    if jax and devices.platform == "gpu":
        yield judge_attention(config.model.compute_dtype, metadata.version("jax"))
    if inputs.algorithm.data == "rollouts":
        yield judge_staleness(config, sizes.group)
    if inputs.algorithm.needs_proximal_pass(config.train.minibatches):
        yield Finding("config", "proximal", "ok",
                      "one more forward pass per batch (algorithm.proximal=recompute)")  # fmt: skip


def judge_attention(compute_dtype: str, jax: str) -> Finding:
    """Return the row of how attention is computed on an NVIDIA GPU."""
    if compute_dtype == "float32":
        what = "model.compute_dtype=float32: cuDNN has no kernel for it, XLA's blocks are slower"
        return Finding("config", "attention", "warning", what, "set model.compute_dtype=bfloat16")
    if Version(jax) < Version("0.11.2"):
        what = f"jax {jax} copies the keys for each query head in cuDNN's packed attention"
        return Finding("config", "attention", "warning", what,
                       f"use Python 3.12 or newer with jax 0.11.2 or newer: {install('cuda')}"
                       )  # fmt: skip
    return Finding("config", "attention", "ok", "cuDNN, on packed rows with Hopper and newer")


def judge_batch(sizes: RunSizes, rows: int) -> Finding:
    """Return the row of a batch (prompts × group) and its minibatches."""
    batch, group = sizes.batch_prompts, sizes.group
    parts, steps = sizes.train.minibatches, sizes.train.total_steps
    what = (
        f"{batch} prompts × {group} = {batch * group} trajectories; {parts} minibatch"
        f"{'es' * (parts > 1)} of {batch / parts:g} prompts; {steps} steps see "
        f"{number(steps * batch / rows)} epochs of {rows} rows"
    )
    if batch % parts:
        return Finding("config", "batch", "warning", f"{what}: minibatches differ in size",
                       f"make rollout.batch_prompts={batch} a multiple of train.minibatches={parts}"
                       )  # fmt: skip
    if 1 < rows < batch:
        return Finding("config", "batch", "warning", f"{what}: a batch repeats rows",
                       "add rows, or lower rollout.batch_prompts")  # fmt: skip
    return Finding("config", "batch", "ok", what)


def expected_tokens(config: ConfigDict, prompts: np.ndarray, workdir: Path) -> float:
    """Return the mean tokens of a trajectory.

    Taken from the records in `workdir`, else the mean prompt plus half of the completion's budget.
    """
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
    if full < 0.5:
        small = f"or a train.row_buckets entry nearer to {most} tokens"
        return Finding("config", "microbatches", "warning", f"{what}: most of it is padding",
                       f"lower train.max_tokens_per_microbatch, {small}")  # fmt: skip
    return Finding("config", "microbatches", "ok", what)


def judge_staleness(config: ConfigDict, group: int) -> Finding:
    """Return the row that compares staleness and concurrency with the servers' slots."""
    eta, batch = config.rollout.max_staleness, config.rollout.batch_prompts
    ahead, most = (eta + 1) * batch, config.rollout.max_concurrent_rollouts
    live = min(ahead, most)
    what = (
        f"(η + 1)·B = ({eta} + 1) × {batch} = {ahead} prompts ahead of the trainer, {most} live at "
        f"most: {live * group} sequences"
    )
    if most < batch:
        return Finding("config", "staleness", "warning", f"{what}; less than one batch at a "
                       "time", f"raise rollout.max_concurrent_rollouts to {batch} or more"
                       )  # fmt: skip
    if config.fleet.addresses:  # with slots of their own
        running = len(read_addresses(config.fleet.addresses))
        what += f" for {running} running server{'s' * (running > 1)}"
        return Finding("config", "staleness", "ok", what)
    servers = config.fleet.num_servers
    slots = servers * config.fleet.slots
    what += f" for {slots} slots"
    if live * group < slots // 2:
        remedy = "raise rollout.max_concurrent_rollouts" if most < ahead else (
            f"lower fleet.slots to {max(live * group // max(servers, 1), 1)}, or raise "
            "rollout.max_staleness"
        )  # fmt: skip
        return Finding("config", "staleness", "warning", f"{what}; half of them stay empty", remedy)
    return Finding("config", "staleness", "ok", what)
