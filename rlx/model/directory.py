"""Find an HF directory; read its config, check its files. No JAX."""

import dataclasses
import fcntl
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlx.base import UserError, unknown
from rlx.model import params as parameters
from rlx.model.config_forms import NotOurs, read_json
from rlx.model.model_config import ModelConfig, end_tokens
from rlx.model.params import Row, check_shape
from rlx.model.tensors import LazyTensors, open_tensors

ASSETS = Path(__file__).parents[1] / "assets"
# Tensors that old exporters wrote and no decoder reads.
IGNORED = (
    "rotary_emb.inv_freq", "attn.masked_bias", "attn.bias", "attention.masked_bias",
    "attention.bias",
)  # fmt: skip


def resolve(path: str, what: str = "model.path", weights: bool = True) -> Path:
    """Return the local directory of an HF directory or hub name; UserError if it is neither.

    A hub name is downloaded once, without `weights` only its config and tokenizer. `rlx:NAME` is
    in `rlx/assets/NAME`, of another package (`gguf_files.PACKAGES`), or made by `shapes_model`;
    the last two are written once. For errors, `what` is the config key or argument that gave the
    path.
    """
    if path.startswith("rlx:"):
        return _packaged_directory(path.removeprefix("rlx:"))
    local = Path(path).expanduser()
    if local.is_dir():
        return local
    if local.exists() or path.count("/") != 1 or path.startswith((".", "/", "~")):
        raise UserError(f"{what}={path!r} is not a directory; give an HF directory or hub name")
    try:
        from huggingface_hub import snapshot_download

        patterns = ["*.json", "*.jinja", "*.model", "merges.txt", *["*.safetensors"] * weights]
        return Path(snapshot_download(path, allow_patterns=patterns))
    except Exception as error:  # the hub client raises its own, requests' and OS errors
        raise UserError(
            f"{what}={path!r} is neither a directory nor downloadable from the hub "
            f"({type(error).__name__}); check the name and the network, or give a directory that "
            "has it"
        ) from error


def at_hand(path: str) -> Path | None:
    """Return what `resolve` would, or None where that downloads, converts or fails."""
    is_asset = path.startswith("rlx:")
    place = ASSETS / path.removeprefix("rlx:") if is_asset else Path(path).expanduser()
    return place if (place / "config.json").exists() else None


def _packaged_directory(name: str) -> Path:
    if place := at_hand(f"rlx:{name}"):
        return place
    from rlx.model import gguf_files, shapes_model  # they import tokenizers, which takes a moment

    if name == "shapes":
        return cached_directory(f"shapes-{shapes_model.VERSION}", shapes_model.write)
    if name in gguf_files.PACKAGES:
        return gguf_files.packaged_model(name)
    names = [*(place.name for place in ASSETS.iterdir()), *gguf_files.PACKAGES, "shapes"]
    raise unknown("packaged model", f"rlx:{name}", [f"rlx:{name}" for name in names])


def cached_directory(name: str, write: Callable[[Path], Any]) -> Path:
    """Return the directory `name` of rlx's cache, made once by `write`; UserError if it fails."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlx" / "models"
    target = cache / name
    try:
        cache.mkdir(parents=True, exist_ok=True)
        if not target.exists():  # it appears in one step; a second process waits for the first
            with open(cache / f".lock-{name}", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not target.exists():
                    write(target)
    except OSError as error:
        raise UserError(f"cannot write {target}: {error}; set XDG_CACHE_HOME") from error
    return target


def load_config(path: str | Path) -> ModelConfig:
    """Return an HF directory's ModelConfig; `foreign` if rlx's decoder does not support it."""
    path = Path(path)
    record = read_json(path / "config.json")
    try:
        config = ModelConfig.from_hf(record)
    except NotOurs as error:
        numbers = 0
        if list(path.glob("*.safetensors")):
            with open_tensors(path) as tensors:
                numbers = sum(math.prod(tensors.shape(name)) for name in tensors)
        try:
            config = ModelConfig.from_foreign(record, str(error), numbers)
        except UserError as lack:
            raise UserError(f"{error}; trainer=torch may take it, but {lack}") from None
    generation = path / "generation_config.json"
    ends = end_tokens(read_json(generation)) if generation.exists() else ()
    merged = tuple(dict.fromkeys((*config.eos_token_ids, *ends)))
    return dataclasses.replace(config, eos_token_ids=merged)


def check(path: str | Path) -> ModelConfig:
    """Check an HF directory by the headers of its tensors; return its ModelConfig."""
    config = load_config(path)
    with open_tensors(path) as tensors:
        if not config.foreign:  # only transformers knows the tensor names of foreign models
            check_tensors(tensors, config)
    return config


def check_tensors(tensors: LazyTensors, config: ModelConfig) -> None:
    """Raise UserError naming the first tensor that does not fit; reads only headers."""
    rows = parameters.table(config)
    check_names(tensors, config, rows)
    for row in rows:
        for name in row.names:
            check_shape(name, tensors.shape(name), row)


def check_names(tensors: Mapping[str, Any], config: ModelConfig, rows: tuple[Row, ...]) -> None:
    """Raise UserError for a missing or extra tensor."""
    config.require_ours("JAX")
    wanted = {name for row in rows for name in row.names}
    names = {name for name in tensors if not name.endswith(IGNORED)}
    if missing := sorted(wanted - names):
        raise UserError(
            f"{_tensors(missing)} missing of those that config.json describes, first "
            f"{missing[0]!r}; get weights and config.json again, from one and the same "
            f"{config.architecture}"
        )
    extra = sorted(names - wanted)
    if config.tie_embeddings and extra == ["lm_head.weight"]:
        # Some exporters store the tied matrix twice.
        if np.array_equal(tensors["lm_head.weight"], tensors["model.embed_tokens.weight"]):
            return
        raise UserError(
            "tensor 'lm_head.weight' differs from the embedding although config.json says "
            "tie_word_embeddings; set it to false or remove the tensor"
        )
    if extra:
        raise UserError(
            f"{_tensors(extra)} without a place in {config.architecture}, first {extra[0]!r}; "
            "check architectures, num_hidden_layers and tie_word_embeddings in config.json"
        )


def _tensors(names: list[str]) -> str:
    return f"{len(names)} tensors are" if len(names) > 1 else "1 tensor is"
