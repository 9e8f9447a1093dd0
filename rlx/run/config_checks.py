"""Check a run's config against what it names: model, data, and the arithmetic between numbers.

Nothing is written or started; only a hub name is downloaded, as the run would.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict
from packaging.version import Version

from rlx import config as configs
from rlx.algorithms import presets
from rlx.algorithms.algorithm import Algorithm
from rlx.base import UserError, install
from rlx.cli.text import number
from rlx.cli.user_code import find
from rlx.doctor import capacity, machine
from rlx.doctor.findings import Finding, attempt, problems
from rlx.doctor.memory import RunSizes
from rlx.fleet.addresses import read_addresses
from rlx.launch import teacher
from rlx.launch.teacher import ScorerOptions
from rlx.model import directory
from rlx.model import params as parameters
from rlx.model.mesh import WEIGHTS, check_devices, mesh_axes, num_row_shards
from rlx.model.model_config import ModelConfig
from rlx.rollout.workflows import encode, render
from rlx.run import dataset_rows, model_checks, room_options, tokenizer_files
from rlx.run.inputs import Inputs, prepare
from rlx.run.room_options import sizes_of
from rlx.system.jsonl import read_jsonl
from rlx.train import packing

SAMPLED_ROWS = 256  # whose prompts are counted in tokens


def check(config: ConfigDict, workdir: Path, devices: machine.Devices) -> Iterator[Finding]:
    """Yield the rows of a config by section; what follows from something broken is left out."""
    row, _ = attempt("config", "values", partial(configs.check, config), lambda _: "they fit")
    yield from problems([row])
    named, algorithm = attempt("config", "algorithm", partial(_algorithm, config), str)
    found, model = _model(config, algorithm)
    yield from found
    if model:
        found += [attempt("config", "mesh", partial(_mesh, config, model, devices), str)[0]]
        yield found[-1]
    whole, inputs = attempt("data", "rows", partial(prepare, config), _rows)
    if not inputs:
        yield from problems([named])
        yield from _blame(config, model, algorithm, whole, [row, named, *found])
    elif inputs.train_rows:
        yield whole
        prompts = _prompt_tokens(inputs)
        yield judge_prompts(prompts, config.data.max_prompt_tokens)
        if row.level == "ok":
            yield from arithmetic(config, inputs, prompts, workdir, devices)
    if model and row.level == "ok":
        with suppress(UserError):  # rows above have complained about it
            sizes = sizes_of(config, model)
            yield from capacity.check(sizes, _teacher_sizes(config), workdir, devices)


def _mesh(config: ConfigDict, model: ModelConfig, devices: machine.Devices) -> str:
    """Return in words how the run uses its devices; UserError where it cannot."""
    text, count = config.train.mesh, devices.count
    model_checks.check_mesh(config, model)
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
    """Return the sizes of the teacher's servers that the run starts; None without any."""
    options = ScorerOptions.of_teacher(config)
    if not options.num_local:
        return None
    try:
        model = directory.load_config(directory.resolve(options.path))
    except UserError:  # the row of the teacher has said it
        return None
    return dataclasses.replace(
        sizes_of(config, model),
        engine=options.engine,
        num_servers=options.num_local,
        slots=options.slots,
        max_model_len=options.longest,
    )


def _algorithm(config: ConfigDict) -> Algorithm:
    sampling = config.sampling
    return presets.resolve(config.algorithm, sampling.max_new_tokens, sampling.n_samples, find)


def _model(
    config: ConfigDict, algorithm: Algorithm | None
) -> tuple[list[Finding], ModelConfig | None]:
    """Return the rows of the model's and the teacher's directory, and the config that was read."""
    area = "model"
    row, place = attempt(area, "directory", lambda: directory.resolve(config.model.path), str)
    rows = [row]
    if not place:
        return rows, None
    row, model = attempt(area, "config.json", lambda: directory.load_config(place), _shape)
    rows.append(row)
    if model and not config.model.random_init:
        count = len(list(place.glob("*.safetensors")))
        fit = "are transformers' own" if model.foreign else "fit"
        words = f"names and shapes {fit}, by the headers of {count} file{'s' * (count > 1)}"
        rows.append(attempt(area, "tensors", partial(directory.check, place), lambda _: words)[0])
    rows += _tokenizer(config, place, model)
    options = ScorerOptions.of_teacher(config)
    if algorithm and options:
        known = "its vocabulary is the student's"
        words = known if options.path else f"at {', '.join(options.addresses)}"
        compare = partial(teacher.check, options, algorithm, place, directory.check)
        rows.append(attempt(area, "teacher", compare, lambda _: words)[0])
    return rows, model


def _shape(model: ModelConfig) -> str:
    count = parameters.count(model)
    return (
        f"{model.architecture}, {count / 1e6:.1f}M parameters, {model.num_layers} layers, context "
        f"{model.max_position}"
    )


def _tokenizer(config: ConfigDict, place: Path, model: ModelConfig | None) -> Iterator[Finding]:
    """Yield the rows of tokenizer and chat template."""
    prompt = config.data.system_prompt
    read = partial(tokenizer_files.load_tokenizer, place, prompt, config.data.chat_template)
    row, tokenizer = attempt("model", "tokenizer", read, lambda found: f"{len(found)} tokens")
    if not tokenizer:
        yield row
        return
    if model and len(tokenizer) > model.vocab_size:
        what = f"{len(tokenizer)} tokens, the model's vocabulary has {model.vocab_size}"
        row = Finding("model", "tokenizer", "warning", f"{what}: rows with others are refused",
                      "use the tokenizer files that came with the weights")  # fmt: skip
    yield row
    text = render(tokenizer, "?", prompt)
    around = len(encode(tokenizer, text)) - 1
    system = " and the system prompt" if prompt else ""
    yield Finding("model", "chat template", "ok", f"{around} tokens around a question{system}; "
                  f"the prompt ends in {text[-24:]!r}")  # fmt: skip


def _blame(
    config: ConfigDict,
    model: ModelConfig | None,
    algorithm: Algorithm | None,
    whole: Finding,
    earlier: list[Finding],
) -> Iterator[Finding]:
    """Yield the rows of a run whose inputs cannot be prepared, checking each part by itself.

    So one mistake does not hide another. `whole` is what all of them together said.
    """
    looks: dict[str, Callable[[], Any]] = {
        "reward": partial(room_options.check_reward, config),
    }
    if model:
        looks["engine"] = partial(model_checks.check_engine, config, model)
        looks["context"] = partial(model_checks.check_context, config, model)
    if model and algorithm:
        looks["algorithm"] = partial(model_checks.check_kind, config, model, algorithm)
    rows = [attempt("config", name, look, str)[0] for name, look in looks.items()]
    if algorithm:
        read = partial(dataset_rows.rows, config, algorithm)
        words = "read; prompts need the model's tokenizer"
        rows.append(attempt("data", "rows", read, lambda _: words)[0])
    bad = list({row.found: row for row in problems(rows)[::-1]}.values())[::-1]  # once each
    if (whole.found, whole.remedy) not in {(row.found, row.remedy) for row in [*earlier, *bad]}:
        name = "first row" if "dry call" in whole.remedy else "prompts"
        bad.append(Finding("data", name, "problem", whole.found, whole.remedy))
    elif algorithm and rows[-1].level == "ok":
        yield rows[-1]
    yield from bad


def _rows(inputs: Inputs) -> str:
    counts = [f"{len(s.rows)} of {s.name}" for s in inputs.sources]
    if len(counts) > 1:
        counts = [f"{c} (weight {s.weight:g})" for c, s in zip(counts, inputs.sources, strict=True)]
    held_out = f"{len(inputs.eval_rows)} held out, {inputs.notes or 'none is bad'}"
    return f"{', '.join(counts)} to train on, {held_out}"


def _prompt_tokens(inputs: Inputs) -> np.ndarray:
    """Return [N] prompt lengths, tokens, of rows spread over the dataset."""
    rows = inputs.train_rows
    every = np.unique(np.linspace(0, len(rows) - 1, SAMPLED_ROWS).astype(int))
    return np.array([len(inputs.prompts.ids(rows[i])) for i in every])


def judge_prompts(tokens: np.ndarray, limit: int) -> Finding:
    """Return the row of prompt lengths against `data.max_prompt_tokens`."""
    most = int(tokens.max())
    what = f"{tokens.mean():.0f} tokens on average, {most} at most of {len(tokens)} looked at"
    enough = math.ceil(1.5 * most / 64) * 64
    if limit > max(4 * most, enough):
        return Finding("data", "prompts", "warning", f"{what}; data.max_prompt_tokens={limit} "
                       "makes servers and rows keep room for more",
                       f"set data.max_prompt_tokens={enough}")  # fmt: skip
    return Finding("data", "prompts", "ok", f"{what}; the limit is {limit}")


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
    jax = config.trainer == "jax"  # the other one attends to each segment alone, by other kernels
    cost = jax * parameters.attention_cost(inputs.model_config, devices.platform)
    yield judge_microbatches(sizes, expected_tokens(config, prompts, workdir), cost, shards)
    if jax and devices.platform == "gpu":
        yield judge_attention(config.model.compute_dtype, metadata.version("jax"))
    if inputs.algorithm.data == "rollouts":
        yield judge_staleness(config, sizes.group)
    if inputs.algorithm.needs_proximal_pass(config.train.minibatches):
        yield Finding("config", "proximal", "ok",
                      "one more forward pass a batch (algorithm.proximal=recompute)")  # fmt: skip


def judge_attention(compute_dtype: str, jax: str) -> Finding:
    """Return the row of how attention is computed on an NVIDIA GPU."""
    if compute_dtype == "float32":
        what = "model.compute_dtype=float32: cuDNN has no kernel for it, XLA's blocks are slower"
        return Finding("config", "attention", "warning", what, "set model.compute_dtype=bfloat16")
    if Version(jax) < Version("0.11.2"):
        what = f"jax {jax} gives cuDNN's packed attention the keys once a query head"
        return Finding("config", "attention", "warning", what,
                       f"use Python 3.12 or newer with jax 0.11.2 or newer: {install('cuda')}"
                       )  # fmt: skip
    return Finding("config", "attention", "ok", "cuDNN's, of packed rows on Hopper and newer")


def judge_batch(sizes: RunSizes, rows: int) -> Finding:
    """Return the row of batch = prompts × group, and its minibatches."""
    batch, group = sizes.batch_prompts, sizes.group
    parts, steps = sizes.train.minibatches, sizes.train.total_steps
    what = (
        f"{batch} prompts × {group} = {batch * group} trajectories; {parts} minibatch"
        f"{'es' * (parts > 1)} of {batch / parts:g} prompts; {steps} steps see "
        f"{number(steps * batch / rows)} epochs of {rows} rows"
    )
    if batch % parts:
        return Finding("config", "batch", "warning", f"{what}: they are not equally large",
                       f"make rollout.batch_prompts={batch} a multiple of train.minibatches={parts}"
                       )  # fmt: skip
    if 1 < rows < batch:
        return Finding("config", "batch", "warning", f"{what}: a batch meets rows twice",
                       "add rows, or lower rollout.batch_prompts")  # fmt: skip
    return Finding("config", "batch", "ok", what)


def expected_tokens(config: ConfigDict, prompts: np.ndarray, workdir: Path) -> float:
    """Return the tokens of a usual trajectory.

    The run in `workdir` knows it; else it is the mean prompt and half of the completion's budget.
    """
    lengths = [r.get("avg_seq_len") for r in read_jsonl(workdir / "metrics.jsonl")]
    known = [length for length in lengths if length]
    return float(known[-1] if known else prompts.mean() + config.sampling.max_new_tokens / 2)


def judge_microbatches(
    sizes: RunSizes, expected: float, cost: float = 0.0, shards: int = 1
) -> Finding:
    """Return the row of microbatches, for lengths that spread evenly around `expected` tokens."""
    budget, most, count = sizes.train.row_budget, sizes.longest, sizes.minibatch
    spread = np.linspace(0.5, 1.5, count) * expected
    lengths = np.clip(spread, 1, min(most, budget)).astype(np.int64)
    lengths[-1] = min(most, budget)  # one of the longest decides the rows
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
    """Return the row of what staleness and concurrency allow, against the servers' slots."""
    eta, batch = config.rollout.max_staleness, config.rollout.batch_prompts
    ahead, most = (eta + 1) * batch, config.rollout.max_concurrent_rollouts
    live = min(ahead, most)
    what = (
        f"(η + 1)·B = ({eta} + 1) × {batch} = {ahead} prompts ahead of the trainer, {most} live at "
        f"most: {live * group} sequences"
    )
    if most < batch:
        return Finding("config", "staleness", "warning", f"{what}; not even one batch is generated "
                       "together", f"raise rollout.max_concurrent_rollouts to {batch} or more"
                       )  # fmt: skip
    if config.fleet.addresses:  # their slots are their own
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
