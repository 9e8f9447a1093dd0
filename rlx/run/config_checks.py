"""Check a run's config: its model, its data, and the arithmetic between its numbers."""

import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from pathlib import Path

from ml_collections import ConfigDict

from rlx.cli.findings import Finding, advised, attempt, problem, problems
from rlx.cli.text import number, size
from rlx.doctor import machine, memory
from rlx.doctor.memory import RunSizes
from rlx.fleet.addresses import read_addresses
from rlx.model.mesh import WEIGHTS, check_devices, mesh_axes, num_row_shards
from rlx.model.model_config import ModelConfig
from rlx.run.auto_values import decide_dtypes, decide_microbatches
from rlx.run.export import held_bytes
from rlx.run.inputs import Missing, prepare
from rlx.run.plan_run import judge_idle
from rlx.run.room_options import sizes_of
from rlx.system import available_memory
from rlx.system.workdir_lock import existing

_TIGHT = 0.9  # share of the memory above which a row is a warning
_LEAST = 0.7  # of the bound: XLA's plan for a GPU (docs/scale.md)


def check(config: ConfigDict, workdir: Path, devices: machine.Devices) -> Iterator[Finding]:
    """Yield the rows of a config by section, without those that depend on a failed check."""
    rows: list[Finding] = []
    inputs = prepare(config, partial(record_check, rows))
    yield from rows
    bad, model = {row.name for row in problems(rows)}, vars(inputs).get("model_config")
    if model and "values" not in bad:
        config = config.copy_and_resolve_references()
        decide = partial(decide_dtypes, config, model, devices)
        row, precision = attempt("config", "dtype", decide, attrgetter("message"))
        config.model.update(precision.dtypes if precision else {})
        if row.result:
            yield row
    sizes = sizes_of(config, model) if model and not bad & {"values", "algorithm"} else None
    if sizes and model:
        fit = decide_microbatches(config, sizes, devices, partial(memory.bound, devices=devices))
        config.update_from_flattened_dict(fit.keys)
        sizes = sizes_of(config, model)
        if fit.message:
            yield Finding("config", "microbatch", "ok", fit.message)
    if model and "mesh" not in bad:
        yield attempt("config", "mesh", partial(_mesh, config, model, devices), str)[0]
    if sizes and not bad:  # the arithmetic between numbers
        yield judge_batch(sizes, len(inputs.train_rows))
        if config.trainer == "jax" and devices.platform == "gpu":
            yield judge_attention(config.model.compute_dtype)
        if inputs.algorithm.data == "rollouts":
            yield judge_staleness(config, sizes.group)
            if config.allocation_mode and (idle := judge_idle(config, machine.gpu_kind())):
                yield idle
        if inputs.algorithm.needs_proximal_pass(config.train.minibatches):
            what = "one more forward pass per batch (algorithm.proximal=recompute)"
            yield Finding("config", "proximal", "ok", what)
    if sizes:
        same_host = not (config.fleet.addresses or config.fleet.join)
        yield from check_capacity(sizes, workdir, devices, same_host or sizes.publish != "path")


@contextmanager
def record_check(rows: list[Finding], area: str, name: str) -> Iterator[Callable[..., None]]:
    """Add the row of a check, unless it needs an input that an earlier check did not find."""
    findings: list[Finding] = []
    try:
        yield lambda *texts: findings.append(advised(area, name, *texts)) if texts[0] else None
    except Missing:
        return
    except Exception as error:
        row = problem(area, name, error)
        if row.result not in {row.result for row in rows}:
            rows.append(row)
    rows += findings


def _mesh(config: ConfigDict, model: ModelConfig, devices: machine.Devices) -> str:
    """Return how the run uses its devices, as text; raise UserError if it cannot."""
    text, count = config.train.mesh, devices.count
    axes = mesh_axes(text, count)
    hosts = max(math.prod(axes.values()) // count, 1)  # this is one of them
    check_devices(text, hosts * count)
    layout = ", ".join(f"{name}:{n}" for name, n in axes.items() if n > 1) or "one device"
    more = f" on {hosts} hosts like this one" if hosts > 1 else ""
    parts = math.prod(axes[name] for name in WEIGHTS)
    note = f"whole: {parts} does not divide the width {model.model_dim}"
    weights = note if model.model_dim % parts else f"cut in {parts * axes['tensor']}"
    return f"{layout}{more}; rows cut in {num_row_shards(axes)}, parameters {weights}"


def judge_attention(compute_dtype: str) -> Finding:
    """Return the row of how attention is computed on an NVIDIA GPU."""
    if compute_dtype != "float32":
        return advised("config", "attention", "cuDNN, on packed rows with Hopper and newer", "")
    what = "model.compute_dtype=float32: cuDNN has no kernel for it, XLA's blocks are slower"
    return advised("config", "attention", what, "set model.compute_dtype=bfloat16")


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


def judge_staleness(config: ConfigDict, group: int) -> Finding:
    """Return the row that compares staleness and concurrency with the servers' slots."""
    eta, batch = config.rollout.max_staleness, config.rollout.batch_prompts
    ahead = (eta + 1) * batch
    most = config.rollout.max_concurrent_rollouts or ahead
    live, servers, remedy = min(ahead, most), config.fleet.num_servers, ""
    what = (
        f"(η + 1)·B = ({eta} + 1) × {batch} = {ahead} prompts ahead of the trainer, {most} live at "
        f"most: {live * group} sequences"
    )
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
        remedy = "raise rollout.max_concurrent_rollouts" if most < ahead else remedy
    return advised("config", "staleness", what, remedy)


def check_capacity(
    sizes: RunSizes, workdir: Path, devices: machine.Devices, in_workdir: bool = True
) -> Iterator[Finding]:
    """Yield the rows of a train step's memory, of published weights, and of checkpoints.

    Weights may be published in the workdir too if `in_workdir`, see `parts.publish_dir`.
    """
    pieces = memory.trainer(sizes, devices)
    needed, room = sum(pieces.values()), devices.memory  # 0: unknown
    if devices.platform == "cpu":
        room = available_memory.memory().free
    what = memory.estimate(pieces, sizes.train.mesh) + f"; {size(room)} free" * bool(room)
    tight = room and needed > _TIGHT * room
    least = needed * (_LEAST if devices.platform == "gpu" else 1.0)
    level = ("problem" if least > room else "warning") if tight else "ok"
    yield Finding("memory", "trainer", level, what, memory.remedy(sizes, devices) if tight else "")
    free, (needed, what) = shutil.disk_usage(existing(workdir)).free, memory.checkpoints(sizes)
    if sizes.has_fleet:
        place, both = sizes.publish_dir, memory.in_publish_dir(sizes)
        yield machine.check_publish_dir(place, both, free * in_workdir)
    remedy = "free some, give another --workdir, or lower checkpoint.keep"
    remedy *= needed > free + held_bytes(workdir)
    level = "problem" if remedy else "ok"
    yield Finding("memory", "disk", level, f"{what}; {size(free)} free", remedy)
