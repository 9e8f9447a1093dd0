"""Conversion of HF directories and tensors to (ModelConfig, params) and back.

Both directions are copies and transposes driven by the parameter table, so a round trip is bit for
bit. Exported directories load in transformers unchanged.
"""

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from rlx.base import UserError
from rlx.model import params as parameters
from rlx.model.atomic_directory import atomic_directory
from rlx.model.directory import load_config as load_config
from rlx.model.directory import resolve as resolve
from rlx.model.model_config import ModelConfig
from rlx.model.params import Params, Row
from rlx.model.tensors import INDEX as INDEX
from rlx.model.tensors import WEIGHTS as WEIGHTS
from rlx.model.tensors import LazyTensors, save_tensors
from rlx.model.tensors import open_tensors as open_tensors

# Copied next to exported weights from the directory that the run started from.
COMPANIONS = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "tokenizer.model", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
    "generation_config.json",
)  # fmt: skip

# Tensors that old exporters wrote and no decoder reads.
_IGNORED = ("rotary_emb.inv_freq", "attn.masked_bias", "attn.bias")


def load(path: str | Path, dtype: Any = jnp.float32) -> tuple[ModelConfig, Params]:
    """Return the model of an HF directory, its parameters as JAX arrays of `dtype`.

    Raises:
      UserError: naming the file or tensor that is missing, extra or mis-shaped.
    """
    config = load_config(path)
    with open_tensors(path) as tensors:
        return config, from_hf(tensors, config, dtype)


def check(path: str | Path) -> ModelConfig:
    """Return the ModelConfig of an HF directory; reads only the headers of its tensors.

    Raises:
      UserError: naming the file or tensor that is missing, extra or mis-shaped.
    """
    config = load_config(path)
    with open_tensors(path) as tensors:
        check_tensors(tensors, config)
    return config


def check_tensors(tensors: LazyTensors, config: ModelConfig) -> None:
    """Raise UserError naming the first tensor that does not fit; reads only headers."""
    rows = parameters.table(config)
    _check_names(tensors, config, rows)
    for row in rows:
        for name in row.names:
            _check_shape(name, tensors.shape(name), row)


def from_hf(tensors: Mapping[str, np.ndarray], config: ModelConfig, dtype: Any = None) -> Params:
    """Return the pytree of tensors with HF's names.

    Args:
      tensors: HF name → array; read one at a time, so it may be lazy.
      dtype: of the parameters; None keeps each tensor's own.

    Raises:
      UserError: naming the tensor that is missing, extra or mis-shaped.
    """
    rows = parameters.table(config)
    _check_names(tensors, config, rows)
    return parameters.build({row.path: jnp.asarray(_gather(tensors, row, dtype)) for row in rows})


def to_hf(params: Params, config: ModelConfig, dtype: Any = None) -> dict[str, np.ndarray]:
    """Return tensors with HF's names and layouts, on the host, as the fleet receives them.

    Args:
      dtype: of the tensors; None keeps each parameter's own.
    """
    return export(params, parameters.table(config), dtype)


def export(params: Params, rows: Iterable[Row], dtype: Any = None) -> dict[str, np.ndarray]:
    """Return the tensors of `rows` with their names and layouts in HF's or PEFT's files."""
    tensors = {}
    for row in rows:
        value = np.asarray(parameters.leaf(params, row))
        for name, part in zip(row.names, value if row.stacked else [value], strict=True):
            part = part.T if row.transposed else part
            tensors[name] = np.ascontiguousarray(part, dtype=dtype or part.dtype)
    return tensors


def save(
    path: str | Path,
    config: ModelConfig,
    params: Params,
    dtype: Any = None,
    source: str | Path | None = None,
    chat_template: str = "",
) -> None:
    """Write an HF directory: config.json, model.safetensors, and `source`'s tokenizer files.

    A `chat_template` takes the place of the one that is among them.

    It is written under another name and renamed, so `path` is always whole: old or new.

    Raises:
      UserError: it cannot be written; nothing is left behind.
    """
    tensors = to_hf(params, config, dtype)
    with atomic_directory(Path(path)) as fresh:
        name = str(next(iter(tensors.values())).dtype)
        record = {**config.to_hf(), "dtype": name, "torch_dtype": name}
        (fresh / "config.json").write_text(json.dumps(record, indent=2) + "\n")
        save_tensors(tensors, fresh / WEIGHTS)
        for companion in COMPANIONS if source else ():
            if Path(source or "", companion).exists():
                shutil.copyfile(Path(source or "", companion), fresh / companion)
        if chat_template:
            (fresh / "chat_template.jinja").write_text(chat_template)


def _check_names(tensors: Mapping[str, Any], config: ModelConfig, rows: tuple[Row, ...]) -> None:
    wanted = {name for row in rows for name in row.names}
    given = {name for name in tensors if not name.endswith(_IGNORED)}
    if missing := sorted(wanted - given):
        raise UserError(
            f"{_tensors(missing)} missing of those that config.json describes, first "
            f"{missing[0]!r}; get weights and config.json again, from one and the same "
            f"{config.architecture}"
        )
    extra = sorted(given - wanted)
    if config.tie_embeddings and extra == ["lm_head.weight"]:
        # Some exporters store the tied matrix twice; harmless as long as both are equal.
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


def _gather(tensors: Mapping[str, Any], row: Row, dtype: Any) -> np.ndarray:
    """Return the row's array, copied from HF's tensors into the pytree's layout."""
    out: Any = None
    for index, name in enumerate(row.names):
        tensor = np.asarray(tensors[name])
        _check_shape(name, tensor.shape, row)
        if out is None:
            out = np.empty(row.shape, dtype or tensor.dtype)
        target = out[index] if row.stacked else out
        target[...] = tensor.T if row.transposed else tensor
    return out


def _check_shape(name: str, got: tuple[int, ...], row: Row) -> None:
    if got != row.hf_shape:
        raise UserError(
            f"tensor {name!r} has shape {got}, config.json wants {row.hf_shape}; get both again, "
            "from one and the same model"
        )
