"""A run's config against what it names: model, data, and the arithmetic between the numbers.

Everything is looked at, and nothing written or started; only a hub name is downloaded, as the run
would.
"""

import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from rlx import config as configs
from rlx import memory
from rlx.base import UserError
from rlx.checkup import machine
from rlx.checkup.findings import Finding, attempt
from rlx.inputs import Inputs, has_servers, load_tokenizer, prepare
from rlx.memory import listed, longest, size
from rlx.model import hf
from rlx.model import params as parameters
from rlx.model.config import ModelConfig
from rlx.model.sharding import parse_mesh
from rlx.observe.jsonl import read_jsonl
from rlx.observe.text import number
from rlx.train import packing
from rlx.train.update import attention_cost

SAMPLED_ROWS = 256  # whose prompts are counted in tokens
_TIGHT = 0.9  # of the memory there is


def check(config: ConfigDict, workdir: Path, devices: machine.Devices) -> Iterator[Finding]:
    """The rows of a config, section by section; what follows from something broken is left out."""
    row, _ = attempt("config", "config", lambda: configs.check(config), lambda _: "its values fit")
    if row.level == "problem":
        yield row
    found, model = _model(config)
    yield from found
    if not model:
        return
    row, inputs = attempt("data", "rows", lambda: prepare(config), _rows)
    said = {(each.found, each.remedy) for each in found}
    if row.level == "ok" or (row.found, row.remedy) not in said:
        yield row
    if inputs:
        prompts = _prompt_tokens(inputs)
        yield judge_prompts(prompts, config.data.max_prompt_tokens)
        yield from arithmetic(config, model, inputs, prompts, workdir, devices)
    elif row.level == "problem":
        return
    yield from room(config, model, workdir, devices)


def _model(config: ConfigDict) -> tuple[list[Finding], ModelConfig | None]:
    """The rows of the model's directory, and its config where that can be read."""
    area = "model"
    row, place = attempt(area, "directory", lambda: hf.resolve(config.model.path), str)
    rows = [row]
    if not place:
        return rows, None
    row, model = attempt(area, "config.json", lambda: hf.load_config(place), _shape)
    rows.append(row)
    if model and not config.model.random_init:
        read: Callable[[], ModelConfig] = lambda: hf.check(place)  # noqa: E731
        row, _ = attempt(area, "tensors", read, lambda _: "names and shapes fit, by their headers")
        rows.append(row)
    row, _ = attempt(area, "tokenizer", lambda: load_tokenizer(place), _vocabulary)
    rows.append(row)
    return rows, model


def _shape(model: ModelConfig) -> str:
    count = parameters.count(model)
    return (
        f"{model.architecture}, {count / 1e6:.1f}M parameters, {model.num_layers} layers, context "
        f"{model.max_position}"
    )


def _vocabulary(tokenizer: Any) -> str:
    return f"{len(tokenizer)} tokens, with a chat template"


def _rows(inputs: Inputs) -> str:
    return f"{len(inputs.train_rows)} to train on, {len(inputs.eval_rows)} held out, none is bad"


def _prompt_tokens(inputs: Inputs) -> np.ndarray:
    """[N] prompt lengths of rows spread over the dataset, tokens."""
    rows = inputs.train_rows
    every = np.unique(np.linspace(0, len(rows) - 1, SAMPLED_ROWS).astype(int))
    return np.array([len(inputs.workflow.prompt_ids(rows[i])) for i in every])


def judge_prompts(tokens: np.ndarray, limit: int) -> Finding:
    """The row of prompt lengths against `data.max_prompt_tokens`."""
    most = int(tokens.max())
    what = f"{tokens.mean():.0f} tokens on average, {most} at most of {len(tokens)} looked at"
    if limit > 4 * most:
        return Finding("data", "prompts", "warning", f"{what}; data.max_prompt_tokens={limit} "
                       "makes servers and rows keep room for more",
                       f"set data.max_prompt_tokens={_round(1.5 * most)}")  # fmt: skip
    return Finding("data", "prompts", "ok", f"{what}; the limit is {limit}")


def _round(tokens: float) -> int:
    return math.ceil(tokens / 64) * 64


def arithmetic(
    config: ConfigDict,
    model: ModelConfig,
    inputs: Inputs,
    prompts: np.ndarray,
    workdir: Path,
    devices: machine.Devices,
) -> Iterator[Finding]:
    """The rows of batch, minibatches, microbatches and staleness."""
    pairs = inputs.algorithm.data == "pairs"
    each = 2 if pairs else 1 if inputs.algorithm.data == "demonstrations" else None
    group = each or config.sampling.n_samples
    yield judge_batch(config, group, len(inputs.train_rows))
    expected = expected_tokens(config, prompts, workdir)
    shards = (parse_mesh(config.train.mesh) or {"data": devices.count}).get("data", 1)
    cost = attention_cost(model, devices.platform)
    yield judge_microbatches(config, group, expected, cost, shards)
    if inputs.algorithm.data == "rollouts":
        yield judge_staleness(config, group)
    if inputs.algorithm.needs_proximal_pass(config.train.minibatches):
        yield Finding("config", "proximal", "ok",
                      "one more forward pass a batch (algorithm.proximal=recompute)")  # fmt: skip


def judge_batch(config: ConfigDict, group: int, rows: int) -> Finding:
    """The row of batch = prompts × group, and its minibatches."""
    batch, parts = config.rollout.batch_prompts, config.train.minibatches
    steps = config.total_steps
    what = (
        f"{batch} prompts × {group} = {batch * group} trajectories; {parts} minibatch"
        f"{'es' * (parts > 1)} of {batch / parts:g} prompts; {steps} steps see "
        f"{number(steps * batch / rows)} epochs of {rows} rows"
    )
    if batch % parts:
        return Finding("config", "batch", "warning", f"{what}: they are not equally large",
                       f"make rollout.batch_prompts={batch} a multiple of train.minibatches={parts}"
                       )  # fmt: skip
    if rows < batch:
        return Finding("config", "batch", "warning", f"{what}: a batch meets rows twice",
                       "add rows, or lower rollout.batch_prompts")  # fmt: skip
    return Finding("config", "batch", "ok", what)


def expected_tokens(config: ConfigDict, prompts: np.ndarray, workdir: Path) -> float:
    """Tokens of a usual trajectory: what the run in `workdir` last had, else the mean prompt and
    half of the completion's budget."""
    lengths = [r.get("avg_seq_len") for r in read_jsonl(workdir / "metrics.jsonl")]
    known = [length for length in lengths if length]
    return float(known[-1] if known else prompts.mean() + config.sampling.max_new_tokens / 2)


def judge_microbatches(
    config: ConfigDict, group: int, expected: float, cost: float = 0.0, shards: int = 1
) -> Finding:
    """The row of microbatches: of a minibatch whose lengths spread evenly around `expected`."""
    budget, most = config.train.max_tokens_per_microbatch, longest(config)
    count = math.ceil(config.rollout.batch_prompts / config.train.minibatches) * group
    spread = np.linspace(0.5, 1.5, count) * expected
    sizes = np.clip(spread, 1, min(most, budget)).astype(np.int64)
    sizes[-1] = min(most, budget)  # one of the longest decides the rows
    plan = packing.plan(sizes, budget, config.train.row_buckets, attention_cost=cost, shards=shards)
    full = sizes.sum() / plan.padded_tokens
    what = (
        f"{budget} tokens: {number(budget / most)} of the longest trajectories ({most} tokens), "
        f"{number(budget / expected)} of the expected ({expected:.0f}); a minibatch of {count} is "
        f"{len(plan.microbatch_rows)} × rows of {plan.row_length}, {full:.0%} full"
    )
    if full < 0.5:
        small = f"or a train.row_buckets entry nearer to {most} tokens"
        return Finding("config", "microbatches", "warning", f"{what}: most of it is padding",
                       f"lower train.max_tokens_per_microbatch, {small}")  # fmt: skip
    return Finding("config", "microbatches", "ok", what)


def judge_staleness(config: ConfigDict, group: int) -> Finding:
    """The row of what staleness and concurrency allow, beside the servers' slots."""
    eta, batch = config.rollout.max_staleness, config.rollout.batch_prompts
    ahead, most = (eta + 1) * batch, config.rollout.max_concurrent_rollouts
    live = min(ahead, most)
    servers = len(config.fleet.addresses) or config.fleet.num_servers
    slots = servers * config.fleet.slots
    what = (
        f"(η + 1)·B = ({eta} + 1) × {batch} = {ahead} prompts ahead of the trainer, {most} live at "
        f"most: {live * group} sequences for {slots} slots"
    )
    if most < batch:
        return Finding("config", "staleness", "warning", f"{what}; not even one batch is generated "
                       "together", f"raise rollout.max_concurrent_rollouts to {batch} or more"
                       )  # fmt: skip
    if live * group < slots // 2:
        remedy = "raise rollout.max_concurrent_rollouts" if most < ahead else (
            f"lower fleet.slots to {max(live * group // max(servers, 1), 1)}, or raise "
            "rollout.max_staleness"
        )  # fmt: skip
        return Finding("config", "staleness", "warning", f"{what}; half of them stay empty", remedy)
    return Finding("config", "staleness", "ok", what)


def room(
    config: ConfigDict, model: ModelConfig, workdir: Path, devices: machine.Devices
) -> Iterator[Finding]:
    """The rows of memory and disk: what the run needs against what there is."""
    try:
        pieces = memory.trainer(config, model, devices.platform, devices.count)
    except UserError:
        return  # a name that `prepare` has complained about
    available = machine.memory_available()
    on_host = devices.platform == "cpu"
    yield judge_trainer(config, model, pieces, devices, available)
    copies = memory.published(config, model)
    served, own = has_servers(config), 0
    if served and not config.fleet.addresses:
        parts = memory.server(config, model)
        own = sum(parts.values())
        what = f"{size(own)} each × {config.fleet.num_servers}: {listed(parts)}"
        yield Finding("memory", "servers", "ok", f"{what} (beside the program, about 0.5 GB)")
    delta = config.fleet.publish == "delta"
    in_shm = copies * (2 if delta else 1) * 2  # the old file stays until the new one is taken
    if served:
        yield machine.check_shared_memory(in_shm, config.fleet.publish_dir)
    host = own * config.fleet.num_servers + copies + in_shm * served
    host += sum(pieces.values()) if on_host else 0
    if not on_host or sum(pieces.values()) <= available:  # else the trainer's row has said it
        yield judge_host(host, available, on_host)
    place = machine.existing(workdir)
    state = sum(memory.state(config, model).values())
    exported = parameters.count(model) * (2 if config.model.publish_dtype == "bfloat16" else 4)
    yield judge_disk(state, exported, config.checkpoint.keep, shutil.disk_usage(place).free)


def judge_trainer(
    config: ConfigDict,
    model: ModelConfig,
    pieces: dict[str, int],
    devices: machine.Devices,
    available: int,
) -> Finding:
    """The row of a train step's peak, against the device's memory or the machine's."""
    total = sum(pieces.values())
    there = available if devices.platform == "cpu" else devices.memory
    what = f"a step is estimated at {size(total)}: {listed(pieces)}"
    if not there or total <= _TIGHT * there:
        of = f"; {size(there)} there" if there else ""
        return Finding("memory", "trainer", "ok", what + of)
    remedy = memory.remedy(config, model, devices.platform, devices.count, int(_TIGHT * there))
    level = "problem" if total > there else "warning"
    return Finding("memory", "trainer", level, f"{what}; there are {size(there)}", remedy)


def judge_host(needed: int, available: int, with_trainer: bool) -> Finding:
    """The row of this machine's memory: servers, published files and, on a CPU, the trainer."""
    whose = "trainer, servers and publishing" if with_trainer else "servers and publishing"
    what = f"{whose} need about {size(needed)} of {size(available)} free"
    if needed > available:
        return Finding("memory", "machine", "problem", what, "lower fleet.num_servers, fleet.slots "
                       "or fleet.max_model_len, or use a larger machine")  # fmt: skip
    if needed > _TIGHT * available:
        return Finding("memory", "machine", "warning", what, "lower fleet.slots or end other "
                       "programs")  # fmt: skip
    return Finding("memory", "machine", "ok", what)


def judge_disk(state: int, exported: int, keep: int, free: int) -> Finding:
    """The row of checkpoints: `keep` of them, one more while it is written, and the HF export."""
    needed = (keep + 1) * state + 2 * exported
    what = (
        f"{keep} + 1 checkpoints of {size(state)} and the HF directory need {size(needed)}; "
        f"{size(free)} free"
    )
    if needed > free:
        return Finding("memory", "disk", "problem", what,
                       "free some, give another --workdir, or lower checkpoint.keep")  # fmt: skip
    return Finding("memory", "disk", "ok", what)
