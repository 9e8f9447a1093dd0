"""HF directories and tensors ⇄ (ModelConfig, params). The only file of the room that does I/O.

Importing and exporting are copies and transposes driven by the parameter table, so a round trip
is bit for bit. Exported directories load in transformers unchanged.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from rlx.base import UserError
from rlx.model import params as parameters
from rlx.model.directory import load_config as load_config
from rlx.model.directory import resolve as resolve
from rlx.model.model_config import ModelConfig
from rlx.model.params import Params, Row
from rlx.model.replaced import replaced_directory
from rlx.model.tensors import INDEX as INDEX
from rlx.model.tensors import WEIGHTS as WEIGHTS
from rlx.model.tensors import LazyTensors
from rlx.model.tensors import open_tensors as open_tensors

# Copied beside exported weights from the directory the run started from, where they exist.
COMPANIONS = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "tokenizer.model", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
    "generation_config.json",
)  # fmt: skip

# Tensors that old exporters wrote and nobody reads.
_IGNORED = ("rotary_emb.inv_freq", "attn.masked_bias", "attn.bias")


def load(path: str | Path, dtype: Any = jnp.float32) -> tuple[ModelConfig, Params]:
    """The model of an HF directory, parameters as JAX arrays of `dtype`.

    Raises:
      UserError: naming the file or tensor that is missing, extra or mis-shaped.
    """
    config = load_config(path)
    with open_tensors(path) as tensors:
        return config, from_hf(tensors, config, dtype)


def check(path: str | Path) -> ModelConfig:
    """The ModelConfig of an HF directory whose tensors, by their headers alone, all fit it.

    Raises:
      UserError: naming the file or tensor that is missing, extra or mis-shaped.
    """
    config = load_config(path)
    with open_tensors(path) as tensors:
        check_tensors(tensors, config)
    return config


def check_tensors(tensors: LazyTensors, config: ModelConfig) -> None:
    """Raises UserError naming the first opened tensor that does not fit; reads only headers."""
    rows = parameters.table(config)
    _check_names(tensors, config, rows)
    for row in rows:
        shape = parameters.shape(config, row)
        for name, _ in parts(row, config, np.empty(shape[:1], bool)):
            _check_shape(name, tensors.shape(name), _hf_shape(row, shape))


def from_hf(tensors: Mapping[str, np.ndarray], config: ModelConfig, dtype: Any = None) -> Params:
    """The pytree of tensors with HF's names.

    Args:
      tensors: HF name → array; read one at a time, so it may be lazy.
      dtype: of the parameters; None keeps each tensor's own.

    Raises:
      UserError: naming the tensor that is missing, extra or mis-shaped.
    """
    rows = parameters.table(config)
    _check_names(tensors, config, rows)
    leaves = {row.path: jnp.asarray(_gather(tensors, config, row, dtype)) for row in rows}
    return parameters.build(leaves)


def to_hf(params: Params, config: ModelConfig, dtype: Any = None) -> dict[str, np.ndarray]:
    """Tensors with HF's names and layouts, on the host: what the fleet receives.

    Args:
      dtype: of the tensors; None keeps each parameter's own.
    """
    tensors = {}
    for row in parameters.table(config):
        value = np.asarray(parameters.leaf(params, row))
        for name, part in parts(row, config, value):
            part = part.T if row.transposed else part
            tensors[name] = np.ascontiguousarray(part, dtype=dtype or part.dtype)
    return tensors


def save(
    path: str | Path,
    config: ModelConfig,
    params: Params,
    dtype: Any = None,
    source: str | Path | None = None,
) -> None:
    """Writes an HF directory: config.json, model.safetensors, and `source`'s tokenizer files.

    Everything is written beside `path` and renamed, so `path` is always whole: old or new.

    Raises:
      UserError: when it cannot be written; nothing is left behind.
    """
    path = Path(path)
    tensors = to_hf(params, config, dtype)
    with replaced_directory(path) as fresh:
        name = str(next(iter(tensors.values())).dtype)
        record = {**config.to_hf(), "dtype": name, "torch_dtype": name}
        (fresh / "config.json").write_text(json.dumps(record, indent=2) + "\n")
        save_file(tensors, fresh / WEIGHTS, metadata={"format": "pt"})
        (fresh / WEIGHTS).chmod(0o644)  # safetensors makes it 0600, whatever the umask
        if source:
            _copy_companions(Path(source), fresh)


def _copy_companions(source: Path, target: Path) -> None:
    for name in COMPANIONS:
        if (source / name).exists():
            shutil.copyfile(source / name, target / name)


def parts(row: Row, config: ModelConfig, value: Any) -> list[tuple[str, Any]]:
    """(HF name, slice of the stacked array) of a row."""
    if not row.stacked:
        return [(row.hf, value)]
    return [(row.hf.format(layer), value[layer]) for layer in range(config.num_layers)]


def _check_names(tensors: Mapping[str, Any], config: ModelConfig, rows: tuple[Row, ...]) -> None:
    layers = range(config.num_layers)
    wanted = {r.hf.format(i) for r in rows for i in (layers if r.stacked else [0])}
    given = {name for name in tensors if not name.endswith(_IGNORED)}
    if missing := sorted(wanted - given):
        raise UserError(
            f"{_tensors(missing)} missing of those that config.json describes, first "
            f"{missing[0]!r}; get weights and config.json again, from one and the same "
            f"{config.architecture}"
        )
    extra = sorted(given - wanted)
    if config.tie_embeddings and extra == ["lm_head.weight"]:
        # Some exporters store the tied matrix twice; that is harmless only while they agree.
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


def _gather(tensors: Mapping[str, Any], config: ModelConfig, row: Row, dtype: Any) -> np.ndarray:
    """The row's array, copied out of HF's tensors into the pytree's layout."""
    shape = parameters.shape(config, row)
    out: Any = None
    for index, (name, _) in enumerate(parts(row, config, np.empty(shape[:1], bool))):
        tensor = np.asarray(tensors[name])
        _check_shape(name, tensor.shape, _hf_shape(row, shape))
        if out is None:
            out = np.empty(shape, dtype or tensor.dtype)
        target = out[index] if row.stacked else out
        target[...] = tensor.T if row.transposed else tensor
    return out


def _hf_shape(row: Row, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of each HF tensor of a row whose own array has `shape`."""
    one = shape[1:] if row.stacked else shape
    return one[::-1] if row.transposed else one


def _check_shape(name: str, got: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if got != wanted:
        raise UserError(
            f"tensor {name!r} has shape {got}, config.json wants {wanted}; get both again, from "
            "one and the same model"
        )
