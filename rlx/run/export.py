"""Export the policy: weights for the fleet, HF and PEFT directories for other programs."""

import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Semaphore
from typing import Any, cast

import numpy as np

from rlx.base import UserError, refuse
from rlx.fleet import adapter
from rlx.fleet.publish import Adapter
from rlx.model import directory as directories
from rlx.model import peft
from rlx.model.model_config import ModelConfig
from rlx.model.tensors import Buckets, num_bytes, write_directory
from rlx.run import checkpoint_tensors
from rlx.run.inputs import INITIAL
from rlx.system.atomic_directory import atomic_directory
from rlx.train import checkpoint
from rlx.train.contract import State, Update
from rlx.train.train_options import TrainOptions, lora_of

AHEAD = 2  # buckets in flight to the host or in its memory
POLL_SECONDS = 0.1  # how often a blocked writer looks for a failed reader


class Export:
    """Convert the trainer's weights to published, HF and PEFT forms."""

    def __init__(
        self,
        options: TrainOptions,
        publish: str,  # how weights travel; see `config.fleet.publish`
        update: Update,
        model_dir: Path,  # HF directory of the run's first weights, the base of LoRA adapters
        source: Path,  # HF directory whose tokenizer files are copied to exports
        template: str = "",  # chat template of exports; "": the one in `source`
    ):
        self._update, self._model_dir = update, model_dir
        self._tokenizer_files: Any = {"source": source, "chat_template": template}
        self._lora, self._dtype, self._publish = options.lora, options.publish_dtype, publish
        self.base_digest = adapter.digest(model_dir) if self._lora else b""
        self._base_bytes = num_bytes(model_dir) if self._lora else 0

    def publish(self, state: State, send: Callable[[Buckets | Adapter], Future]) -> Future:
        """Give `send` the policy of `state`, in the form that the fleet loads; see `hand_over`."""
        if not self._lora or self._publish != "adapter":
            return hand_over(self._update.weights(state), send)
        fields = self._lora.scale, self._dtype, self.base_digest, self._base_bytes
        adapters = self._update.weights(state, adapters=True)
        return hand_over(adapters, lambda tensors: send(Adapter(tensors, *fields)))

    def save(
        self, workdir: Path, state: State, submit: Callable[..., Future], saved: Future[Any]
    ) -> Sequence[Future]:
        """Begin to write `workdir`/hf, merged, and for LoRA `workdir`/adapter in PEFT's format."""
        # They replace earlier directories once their checkpoint, `saved`, is complete.
        futures = [self.write(workdir / "hf", state, submit, saved.result)]
        if self._lora:
            place, base = workdir / "adapter", str(self._model_dir)
            write = partial(submit, peft.write, place, self._lora, base=base)
            adapters = self._update.weights(state, adapters=True)
            futures.append(hand_over(adapters, write, saved.result))
        return futures

    def write(
        self, path: Path, state: State, submit: Callable[..., Future],
        last: Callable[[], Any] = lambda: None,
    ) -> Future[list[int]]:  # fmt: skip
        """Begin to write the merged HF directory `path`; the future has its sums."""
        model, files = self._update.model, self._tokenizer_files
        write = partial(submit, write_directory, path, model, **files)
        return hand_over(self._update.weights(state), write, last)


def computed(weights: Buckets | Adapter) -> Buckets | Adapter:
    """Return Buckets or an Adapter when the device has computed the first bucket; waits for it."""
    if isinstance(weights, Adapter):
        return replace(weights, tensors=cast(Buckets, computed(Buckets.of(weights.tensors))))
    buckets = iter(weights)
    first: Mapping[str, Any] = next(buckets, {})
    for tensor in first.values():
        np.asarray(tensor)  # JAX keeps this copy for the reader
    return Buckets(weights.tensors, _before(first, buckets))


def _before(
    first: Mapping[str, Any], others: Iterator[Mapping[str, Any]]
) -> Iterator[Mapping[str, Any]]:
    yield first
    del first  # before the next one is made
    yield from others


def hand_over(
    buckets: Buckets, send: Callable[[Buckets], Future], last: Callable[[], Any] = lambda: None
) -> Future:
    """Give `send` buckets that are made in this thread and read in another; return its future.

    Returns once the trainer has made the last bucket, because its next call may donate the state.
    Returns early if the future does. The other thread calls `last` after the last bucket.
    """
    queue: SimpleQueue[Mapping[str, Any] | None] = SimpleQueue()
    room = Semaphore(AHEAD - 1)

    def taken() -> Iterator[Mapping[str, Any]]:
        while (bucket := queue.get()) is not None:
            yield bucket
            del bucket
            room.release()
        last()

    future = send(Buckets(buckets.tensors, taken()))
    try:
        for bucket in buckets:
            queue.put(bucket)
            del bucket
            while not room.acquire(timeout=POLL_SECONDS):
                if future.done():
                    return future
    finally:
        queue.put(None)  # the reader notices missing buckets
    return future


def prune(directory: Path, keep: int) -> None:
    """Delete all exports (see `Position.name`) except the newest `keep`; 0: delete none."""
    steps = {
        int(match[1]): path for path in directory.iterdir()
        if (match := re.fullmatch(r"epoch\d+epochstep\d+globalstep(\d+)", path.name))
    }  # fmt: skip
    for step in sorted(steps)[:-keep] if keep else ():
        shutil.rmtree(steps[step])


def held_bytes(workdir: Path) -> int:
    """Return the bytes of the checkpoints and the HF directory there, which new ones replace."""
    paths = (path for name in ("checkpoints", "hf") for path in (workdir / name).rglob("*"))
    total = 0
    for path in paths:
        with suppress(OSError):  # a run has just removed it
            total += path.stat().st_size * path.is_file()
    return total


def require_base(host: Mapping[str, Any], wanted: bytes, directory: Path) -> None:
    """Raise UserError unless a checkpoint's adapters belong to the base with digest `wanted`."""
    digest = host.get("lora_base", "")  # both digests are empty without LoRA
    if digest != wanted.hex():
        raise UserError(
            f"the checkpoint's adapters belong to base {digest[:12] or 'none'} and {directory} is "
            f"{wanted.hex()[:12]}; give their base model"
        )


def checkpoint_to_hf(
    path: Path, target: Path, model: str, dtype: str = "", peft_target: Path | None = None
) -> str:
    """Write a checkpoint's HF directory, return a line about it; UserError for another model's.

    LoRA adapters are merged into the run's first weights, and written to `peft_target`, which needs
    them. `model`, an HF directory or hub name, replaces the one that the checkpoint names. With ""
    for `dtype`, tensors keep the checkpoint's, or merged ones the model's.
    """
    host = checkpoint.read_host(path)
    run = host.get("config", {})
    lora = lora_of(run["lora"]) if "lora" in run else None
    section, initial = run.get("model", {}), path.absolute().parents[1] / INITIAL
    directory: Path | None = initial  # of the run's random first weights
    if not lora or model or not section.get("random_init") or not initial.is_dir():
        name = model or section.get("path", "")
        directory = directories.resolve(name, "--model") if name else None
    if "model" in host:
        config = ModelConfig.from_hf(host["model"])
    elif directory:
        config = directories.load_config(directory)
    else:
        raise UserError(f"{path} does not name its model; give --model=HF_DIRECTORY")
    refuse((
        (not lora and peft_target, f"{path} has no LoRA adapters; remove --adapter"),
        (lora and config.foreign,
         f"{path} has adapters of a model that rlx does not have; use its run's hf/"),
        (lora and not directory,
         f"{path} does not name the base of its adapters; give --model"),
    ))  # fmt: skip
    if not lora or not directory:
        tensors = checkpoint_tensors.policy_of(path, config, dtype)
        write_directory(target, config, tensors, source=directory)
        return f"{path} -> {target} (HF)"
    from rlx.model import hf
    from rlx.model import lora as lora_lib

    require_base(host, adapter.digest(directory), directory)
    adapters = peft.from_peft(checkpoint_tensors.adapters_of(path, config, lora), config, lora)
    # `merge` rounds to the dtype of the base.
    params = lora_lib.merge(hf.load(directory, "float32" if dtype else None)[1], adapters, lora)
    hf.save(target, config, params, dtype or None, source=directory)
    if not peft_target:
        return f"{path} -> {target} (HF)"
    peft.save(peft_target, config, lora, adapters, str(directory))
    return f"{path} -> {target} (HF), {peft_target} (PEFT)"


def hf_to_checkpoint(source: Path, target: Path, dtype: str) -> str:
    """Write a checkpoint with an HF directory's parameters; return a line for the terminal."""
    if not (source / "config.json").exists():
        raise UserError(
            f"{source} holds neither an HF config.json nor a checkpoint step_*; give one of them"
        )
    from rlx.model import hf

    config, loaded = hf.load(source, dtype or None)
    host = {"model": config.to_hf(), "config": {"model": {"path": str(source.absolute())}}}
    with atomic_directory(target) as fresh:
        saved = checkpoint.save(fresh, 0, {"params": loaded}, host)
    return f"{source} -> {target / saved.name} (orbax)"


def directory_of(path: Path, out: Path) -> Path:
    """Return the HF directory of a model: `path`, or `out`/hf for a checkpoint, written once."""
    if not checkpoint.is_one(path):
        return path
    if not (target := out / "hf").exists():  # it is created atomically, with its parents
        checkpoint_to_hf(path, target, "")
    return target


def named_models(sources: Sequence[str]) -> dict[str, Path]:
    """Return short name → directory, by the ends of paths that differ; UserError for no model.

    `sources` are HF directories, hub names, checkpoints, or runs (their newest), each once.
    """
    paths = {text: checkpoint.find(text) or directories.resolve(text, "--models")
             for text in (source.strip() for source in sources)}  # fmt: skip
    if len(paths) < len(sources):
        raise UserError(f"--models={','.join(sources)} names a model twice; name each once")
    for depth in range(1, 64):
        ends = ("-".join(Path(s.replace(":", "/")).parts[-depth:]).strip("/.") for s in paths)
        names = {end or "model": path for end, path in zip(ends, paths.values(), strict=True)}
        if len(names) == len(paths):
            return names
    raise AssertionError("distinct paths have distinct names")
