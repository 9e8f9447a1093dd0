"""The files of an HF directory: whether its tensors fit its config, and writing one. No JAX."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlx.base import UserError
from rlx.model import params as parameters
from rlx.model.model_config import ModelConfig
from rlx.model.params import Row
from rlx.model.tensors import WEIGHTS, Buckets, LazyTensors, save_tensors
from rlx.system.atomic_directory import atomic_directory

# Copied next to exported weights from the directory that the run started from.
COMPANIONS = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "tokenizer.model", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
    "generation_config.json",
)  # fmt: skip

# Tensors that old exporters wrote and no decoder reads.
_IGNORED = ("rotary_emb.inv_freq", "attn.masked_bias", "attn.bias")


def check_tensors(tensors: LazyTensors, config: ModelConfig) -> None:
    """Raise UserError naming the first tensor that does not fit; reads only headers."""
    rows = parameters.table(config)
    check_names(tensors, config, rows)
    for row in rows:
        for name in row.names:
            check_shape(name, tensors.shape(name), row)


def write(
    path: str | Path,
    config: ModelConfig,
    tensors: Buckets,
    source: str | Path | None = None,
    chat_template: str = "",
) -> None:
    """Write an HF directory: config.json, model.safetensors, and `source`'s tokenizer files.

    `path` is replaced in one step. `chat_template` replaces the one of `source`.

    Raises:
      UserError: it cannot be written; nothing is left behind.
    """
    with atomic_directory(Path(path)) as fresh:
        name = np.dtype(next(iter(tensors.tensors.values())).dtype).name
        record = {**config.to_hf(), "dtype": name, "torch_dtype": name}
        (fresh / "config.json").write_text(json.dumps(record, indent=2) + "\n")
        save_tensors(tensors, fresh / WEIGHTS)
        for companion in COMPANIONS if source else ():
            if Path(source or "", companion).exists():
                shutil.copyfile(Path(source or "", companion), fresh / companion)
        if chat_template:
            (fresh / "chat_template.jinja").write_text(chat_template)


def check_names(tensors: Mapping[str, Any], config: ModelConfig, rows: tuple[Row, ...]) -> None:
    """Raise UserError where tensors are missing, or have no place in the model."""
    config.require_ours("JAX")
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


def check_shape(name: str, got: tuple[int, ...], row: Row) -> None:
    """Raise UserError where a tensor has not its row's shape."""
    if got != row.hf_shape:
        raise UserError(
            f"tensor {name!r} has shape {got}, config.json wants {row.hf_shape}; get both again, "
            "from one and the same model"
        )
