"""Compile a run's trainer and JAX engine for GPUs that are not here, and judge what comes out.

Needs JAX's CUDA plugin, and neither a GPU nor CUDA. XLA's plan of memory and its schedule are what
a GPU would run; autotuning is the exception, because it measures, so seconds are a range.
"""

import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from itertools import product
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from rlx.base import UserError
from rlx.cli.findings import Finding
from rlx.cli.text import size
from rlx.doctor import gpu_cards, gpu_program
from rlx.doctor.gpu_cards import LARGEST_SHARE, Card
from rlx.doctor.gpu_program import Collective, Reach, Reading
from rlx.doctor.machine import Devices
from rlx.doctor.memory import RunSizes
from rlx.engines.kv_memory import make_plan, token_bytes
from rlx.launch import xla_flags
from rlx.model import directory
from rlx.model import params as parameters
from rlx.model.model_config import ModelConfig
from rlx.run import auto_values
from rlx.run.allocate import OWN_MEMORY, apply_allocation, shares_gpus
from rlx.run.room_options import RunOptions, sizes_of
from rlx.train.train_options import AUTO

# Without a GPU nothing can be timed: XLA's default choice of each product, by cuBLAS.
FLAGS = ("--xla_gpu_autotune_level=0", "--xla_gpu_enable_triton_gemm=false")
# Published runs on Hopper reach these, from slow to fast. cuDNN's causal attention, heads of 128:
# 39 to 54 % forward and 41 to 52 % backward from 1k to 16k tokens (arXiv 2407.08608, 5 and 6).
SLOW, FAST = Reach(0.58, 0.38, 0.80), Reach(0.72, 0.50, 0.90)
DEFAULT_SHARE = 0.75  # of a GPU's memory that JAX takes by itself
SHOWN = 4  # collectives of a program
TRAINS = ("train step", "microbatch")  # programs of the policy's loss
TRAINER_FULL = "lower train.max_tokens_per_microbatch, set model.remat=full, or use more GPUs"
ENGINE_FULL = "lower fleet.slots or fleet.max_model_len"


def set_up(environment: MutableMapping[str, str]) -> None:
    """Set the variables that JAX reads when it starts; raise UserError without the plugin."""
    if sys.version_info < (3, 12):
        raise UserError(
            f"--compile-for needs Python 3.12 or newer, and this is {sys.version_info[0]}."
            f"{sys.version_info[1]}; make an environment with it"
        )
    places = [os.environ.get("PATH", ""), "/usr/local/cuda/bin"]
    places += [f"{place}/nvidia/cu13/bin" for place in sys.path]
    ptxas = shutil.which("ptxas", path=os.pathsep.join(places))  # without it XLA ends the process
    if not ptxas or not any(map(find_spec, xla_flags.PLUGINS)):
        pin = version("jaxlib")
        raise UserError(
            "--compile-for needs JAX's CUDA plugin and ptxas, which are not installed; run: pip "
            f"install --no-deps jax-cuda13-plugin=={pin} jax-cuda13-pjrt=={pin} nvidia-cuda-nvcc "
            "nvidia-nvvm"
        )
    environment["JAX_PLATFORMS"] = "cpu"
    environment.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA's warnings of each rematerialisation
    value = environment.get("XLA_FLAGS", "")
    flags = (flag for flag in (*xla_flags.FLAGS, *FLAGS) if flag.partition("=")[0] not in value)
    environment["XLA_FLAGS"] = " ".join([value, *flags]).strip()


def findings(config: ConfigDict, gpus: str) -> Iterator[Finding]:
    """Yield the rows of the trainer's and the engine's programs; `gpu_cards.parse` reads `gpus`."""
    # JAX reads the variables of `set_up` when it is imported.
    from rlx.run import jax_trainer
    from rlx.train import device_programs

    run = _Target.of(config, gpus)
    with device_programs.gpus(run.card.target(), run.hosts, run.each) as devices:
        run, choice = run.fitted(partial(jax_trainer.planned, devices=devices))
        if choice:
            yield Finding("compiled", "choice", "ok", choice)
        trainer, programs = jax_trainer.programs(run.sizes, devices)
        parts = ", ".join(f"{name} {size(part)}" for name, part in trainer.bytes_held().items())
        mesh = run.sizes.train.mesh or f"fsdp:{len(devices)}"
        what = f"{len(devices)} × {run.card.kind}, {mesh}; {parts} on each"
        yield Finding("compiled", "GPUs", "ok", what)
        for name, program, beside in programs:
            row, reading = _compile(name, program, run, TRAINER_FULL, {"rest of the state": beside})
            yield row
            trained = trainer.tokens_a_device(run.sizes.row_length) * (name in TRAINS)
            yield _speed_row(name, reading, run, trained)
            yield from _collective_rows(name, reading, run.card)
        if run.sizes.has_fleet and run.sizes.engine == "jax":
            yield from _engine(replace(run, share=DEFAULT_SHARE), devices[0])


def _engine(run: "_Target", device: Any) -> Iterator[Finding]:
    """Yield the rows of the JAX engine's programs, on one GPU."""
    from rlx.engines.jax.programs import PROMPTS, Programs
    from rlx.train import device_programs

    model, sizes, dtype = run.model, run.sizes, run.sizes.publish_dtype
    plan = make_plan(sizes.slots, sizes.max_model_len, sizes.decode_steps)
    width = np.dtype(dtype).itemsize
    weights = width * parameters.count(model)
    cache = token_bytes(model, dtype) * plan.slots * plan.length
    what = f"{plan.slots} × {plan.length:,} tokens; weights {size(weights)}, cache {size(cache)}"
    yield Finding("compiled", "JAX engine", "ok", what)
    programs = Programs(model, plan, sizes.decode_steps, dtype)
    chunks = plan.prompt // plan.chunk
    for name, key, trips in (
        ("decode", programs.full, (sizes.decode_steps,)),
        ("cache write", ("append", plan.slots), ()),
        ("prefill", ("prefill", PROMPTS), (chunks, PROMPTS)),
    ):
        program = device_programs.lower_on(device, *programs.program(key))
        # While new weights are read, the old ones decode.
        row, reading = _compile(name, program, run, ENGINE_FULL, {"new weights": weights}, trips)
        yield row
        if name == "decode":
            # Of an embedding that is not the head, a step reads a few rows.
            unread = 0 if model.tie_embeddings else width * model.vocab_size * model.model_dim
            needed = weights - unread + cache
            yield _decode_row(reading, run.card, plan.slots, sizes.decode_steps, needed)
        else:
            yield _speed_row(name, reading, run, 0)


def scan(config: ConfigDict, gpus: str) -> Iterator[Finding]:
    """Yield a row for each mesh and `model.remat` on `gpus`, then the fastest that fits."""
    from rlx.run import jax_trainer
    from rlx.train import device_programs

    run = _Target.of(config, gpus)
    best: tuple[float, str] = 0.0, ""
    with device_programs.gpus(run.card.target(), run.hosts, run.each) as devices:
        for mesh, remat in product(_meshes(run), auto_values.KINDS["jax"]):
            options = replace(run.sizes.train, mesh=mesh, remat=remat)
            name = f"{mesh} {remat}"
            try:
                trainer, programs = jax_trainer.programs(replace(run.sizes, train=options), devices)
                _, program, beside = next(programs)
                compiled = program.compile()
            except (RuntimeError, UserError) as error:  # JAX's errors of XLA are RuntimeErrors
                yield Finding("scan", name, "warning", str(error).partition("\n")[0][:200])
                continue
            planned = device_programs.planned_bytes(compiled.memory_analysis()) + beside
            reading = gpu_program.read(compiled.as_text(), run.each)
            slow, fast = (reading.seconds(run.card, reach) for reach in (SLOW, FAST))
            tokens = trainer.tokens_a_device(run.sizes.row_length)
            fits = planned <= LARGEST_SHARE * run.card.memory
            what = (
                f"{size(planned)}; {tokens / slow:,.0f} to {tokens / fast:,.0f} tokens a second "
                f"and GPU; waits {reading.waiting(run.card):.2g} s of {slow:.3g}"
            )
            yield Finding("scan", name, "ok" if fits else "absent", what)
            if fits:
                best = max(best, (tokens / slow, f"train.mesh={mesh} model.remat={remat}"))
    yield Finding("scan", "best", "ok" if best[0] else "problem", best[1] or "none fits")


def _meshes(run: "_Target") -> Iterator[str]:
    """Yield the meshes worth a try: copies on several hosts, heads cut within one."""
    count = run.hosts * run.each
    for replica, tensor in product((1, 2, 4), (1, 2, 4, 8)):
        cut = replica * tensor
        if run.hosts % replica or run.each % tensor or count % cut:
            continue
        if run.model.num_kv_heads % tensor == 0 and (replica == 1 or count > cut):
            axes = {"replica": replica, "fsdp": count // cut, "tensor": tensor}
            yield ",".join(f"{name}:{n}" for name, n in axes.items() if n > 1 or name == "fsdp")


@dataclass(frozen=True)
class _Target:
    """A run, and the GPUs that its trainer is compiled for."""

    config: ConfigDict
    model: ModelConfig
    sizes: RunSizes
    card: Card
    hosts: int
    each: int
    share: float  # of a GPU's memory that JAX takes

    @classmethod
    def of(cls, config: ConfigDict, gpus: str) -> "_Target":
        card, hosts, each = gpu_cards.parse(gpus)
        config = apply_allocation(config).copy_and_resolve_references()
        if config.trainer != "jax":
            raise UserError(
                f"--compile-for with trainer={config.trainer}: PyTorch cannot compile for a GPU "
                "that is not here; use trainer=jax"
            )
        path = directory.resolve(config.model.path)
        model = directory.load_config(path).within(RunOptions.of(config).context)
        for key in ("compute_dtype", "publish_dtype"):
            config.model[key] = config.model[key].replace(AUTO, "bfloat16")
        default = DEFAULT_SHARE if shares_gpus(config) else OWN_MEMORY
        share = float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", default))
        return cls(config, model, sizes_of(config, model), card, hosts, each, share)

    def fitted(self, planned: auto_values.Planned) -> tuple["_Target", str]:
        """Return the run with values for what it leaves open, and why these; see `auto_values`."""
        memory = int(self.share * self.card.memory)
        devices = Devices("gpu", self.card.kind, self.hosts * self.each, memory)
        keys, message = auto_values.decide_microbatches(self.config, self.sizes, devices, planned)
        self.config.update_from_flattened_dict(keys)
        return replace(self, sizes=sizes_of(self.config, self.model)), message


def _compile(
    name: str, program: Any, run: _Target, remedy: str, extra: Mapping[str, int],
    trips: Iterable[int] = (),
) -> tuple[Finding, Reading]:  # fmt: skip
    """Return a program's row of memory, with `extra` bytes next to it, and what it does."""
    from rlx.train import device_programs

    start, memory = time.monotonic(), run.card.memory
    compiled = program.compile()
    plan = compiled.memory_analysis()
    total = device_programs.planned_bytes(plan) + sum(extra.values())
    what = (
        f"{size(total)} of {size(memory)} planned: arguments "
        f"{size(plan.argument_size_in_bytes)}, temporaries {size(plan.temp_size_in_bytes)}"
        f"{''.join(f', {what} {size(count)}' for what, count in extra.items() if count)}; "
        f"compiled in {time.monotonic() - start:.0f} s"
    )
    more = f"JAX takes {run.share:.0%} of a GPU; set XLA_PYTHON_CLIENT_MEM_FRACTION=0.95"
    level, remedy = ("problem", remedy) if total > LARGEST_SHARE * memory else ("warning", more)
    if total <= run.share * memory:
        level, remedy = "ok", ""
    row = Finding("compiled", name, level, what, remedy)
    return row, gpu_program.read(compiled.as_text(), run.each, trips)


def _decode_row(reading: Reading, card: Card, slots: int, steps: int, needed: int) -> Finding:
    """Return the row of a decode step, which has to read `needed` bytes of weights and cache."""
    slow, fast = (reading.seconds(card, reach) / steps for reach in (SLOW, FAST))
    moved = reading.moved / steps
    moving, computing = moved / card.bandwidth, reading.flops / steps / card.flops
    what = (
        f"{1e3 * fast:.3g} to {1e3 * slow:.3g} ms a step, limited by "
        f"{'bandwidth' if moving > computing else 'products'}: {size(int(moved))} moved, "
        f"{moved / needed:.2f} × weights and cache, {size(int(moved / slots))} a token; "
        f"at the card's peak {1e3 * moving:.2g} ms, and {1e3 * computing:.2g} ms of products; "
        f"{reading.kernels / steps:,.0f} kernels; "
        f"{slots / slow:,.0f} to {slots / fast:,.0f} tokens a second"
    )
    return Finding("compiled", "decode time", "ok", what)


def _speed_row(name: str, reading: Reading, run: _Target, trained: float) -> Finding:
    """Return the row of a program's work and its roofline time."""
    slow, fast = (reading.seconds(run.card, reach) for reach in (SLOW, FAST))
    waiting, flops = reading.waiting(run.card), reading.flops + reading.attention_flops
    calls = ", ".join(f"{count} {call.strip('_')}" for call, count in reading.calls.items())
    what = f"{fast:.3g} to {slow:.3g} s: {flops / 1e12:.0f} TFLOP"
    what += f", {size(int(reading.bytes))} moved outside products"
    what += f" and {size(int(reading.copied))} during them" if reading.copied > 1e9 else ""
    what += f", {waiting:.2g} s waiting for other GPUs" if reading.collectives else ""
    if trained:  # tokens that a GPU trains on in a call
        length = run.sizes.row_length  # of one trajectory, the longest
        passes = 2 if run.sizes.train.lora else 3  # LoRA has no gradients of the base's weights
        needed = passes * parameters.forward_flops(run.model, np.array([length]))
        useful = trained * needed / length / run.card.flops
        what += f"; MFU {useful / slow:.0%} to {useful / fast:.0%}"
        what += f", {trained / slow:,.0f} to {trained / fast:,.0f} tokens a second and GPU"
    return Finding("compiled", f"{name} time", "ok", what + (f"; {calls}" if calls else ""))


def _hidden_share(collectives: list[Collective], card: Card) -> float:
    """Return the share of the bytes that travel while products run."""
    total = sum(c.bytes for c in collectives)
    return sum(c.hidden(card) for c in collectives) / total if total else 0.0


def _collective_rows(name: str, reading: Reading, card: Card) -> Iterator[Finding]:
    """Yield the row of the bytes sent, and of the largest that no product hides."""
    total = sum(c.bytes for c in reading.collectives)
    if total < 1e6:
        return
    gathers = [c for c in reading.collectives if c.kind == "all-gather"]
    hidden, gathered = (_hidden_share(some, card) for some in (reading.collectives, gathers))
    waited = [
        f"{size(int(c.bytes))} by {c.times} × {c.kind} of {c.shape} "
        f"({c.place}, {'between hosts' if c.cards else 'within a host'})"
        for c in sorted(reading.collectives, key=lambda c: -c.waiting(card))
        if c.waiting(card) > 0.01 * reading.waiting(card)
    ]
    kinds = Counter[str]()
    for one in reading.collectives:
        kinds[one.kind] += int(one.bytes)
    parts = ", ".join(f"{kind} {size(part)}" for kind, part in kinds.items())
    what = f"{size(int(total))} a GPU ({parts}), {hidden:.0%} of it hidden by products"
    what += f", of what is gathered {gathered:.0%}" if gathers else ""
    if waited:
        what += "; waits for " + ", ".join(waited[:SHOWN])
    yield Finding("compiled", f"{name} sent", "ok", what)
