"""PEFT directories: reading and writing (LoraConfig, adapters), as `peft.PeftModel` does.

    adapter_config.json           rank, alpha, targets
    adapter_model.safetensors     base_model.model.….q_proj.lora_A.weight [rank, in], and lora_B

`lora_config.table` drives both directions. JAX is imported only where its arrays are used.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rlx.base import UserError, refuse
from rlx.model import lora_config
from rlx.model import params as parameters
from rlx.model.config_forms import read_json
from rlx.model.lora_config import LORA_TARGETS, LoraConfig
from rlx.model.model_config import ModelConfig
from rlx.model.params import Params
from rlx.model.tensors import Buckets, open_tensors, save_tensors
from rlx.system.atomic_directory import atomic_directory

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
# Initialisations that leave the base as it is; the others (PiSSA, OLoRA, …) subtract from it.
_INITS = ("default", "gaussian", "eva", "orthogonal")
# Options of PEFT that change the adapter's function.
_REFUSED = (
    "use_rslora", "use_dora", "fan_in_fan_out", "lora_bias", "rank_pattern", "alpha_pattern",
    "modules_to_save", "layers_to_transform", "layers_pattern", "exclude_modules",
    "trainable_token_indices", "target_parameters", "layer_replication", "alora_invocation_tokens",
    "use_qalora", "use_bdlora", "arrow_config", "kasa_config", "monteclora_config",
)  # fmt: skip


def to_peft(adapters: Params, config: ModelConfig, settings: LoraConfig) -> Buckets:
    """Return tensors with PEFT's names and layouts, float32."""
    from rlx.model.buckets import export

    return export(adapters, lora_config.table(config, settings), np.float32)


def require_fit(
    tensors: Mapping[str, np.ndarray], config: ModelConfig, settings: LoraConfig
) -> None:
    """Raise UserError unless tensors have PEFT's names and shapes; it names the first without."""
    shapes = {n: row.hf_shape for row in lora_config.table(config, settings) for n in row.names}
    if missing := sorted(set(shapes) - set(tensors)):
        raise UserError(
            f"{len(missing)} adapter tensors are missing, first {missing[0]!r}; {CONFIG} names "
            "other targets, or the adapter belongs to another model"
        )
    if extra := sorted(set(tensors) - set(shapes)):
        raise UserError(
            f"{len(extra)} adapter tensors have no place in {config.architecture} with the targets "
            f"of {CONFIG}, first {extra[0]!r}; the adapter belongs to another model"
        )
    for name, shape in shapes.items():
        if (got := np.shape(tensors[name])) != shape:
            raise UserError(
                f"adapter tensor {name!r} has shape {got}, wanted {shape}; it does not fit "
                f"{CONFIG} or the model"
            )


def from_peft(
    tensors: Mapping[str, np.ndarray], config: ModelConfig, settings: LoraConfig
) -> Params:
    """Return the adapters of PEFT's tensors, float32; UserError as of `require_fit`."""
    import jax.numpy as jnp

    require_fit(tensors, config, settings)
    leaves = {}
    for row in lora_config.table(config, settings):
        parts = [np.asarray(tensors[name]).T.astype(np.float32) for name in row.names]
        leaves[row.path] = jnp.asarray(np.stack(parts))
    return parameters.build(leaves)


def save(
    path: str | Path, config: ModelConfig, settings: LoraConfig, adapters: Params, base: str = ""
) -> None:
    """Write a PEFT directory of adapters; see `write`."""
    write(path, settings, to_peft(adapters, config, settings), base)


def write(path: str | Path, settings: LoraConfig, tensors: Buckets, base: str = "") -> None:
    """Write a PEFT directory in one step; on UserError nothing is left behind.

    `tensors` have PEFT's names, as of `to_peft`; `base` is the model's directory or hub name.
    """
    with atomic_directory(Path(path)) as fresh:
        adapted = list(dict.fromkeys(name.split(".")[-3] for name in tensors.tensors))
        (fresh / CONFIG).write_text(json.dumps(_to_json(settings, adapted, base), indent=2) + "\n")
        save_tensors(tensors, fresh / WEIGHTS)


def _to_json(settings: LoraConfig, adapted: list[str], base: str) -> dict[str, Any]:
    alpha = settings.alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base or None,
        "r": settings.rank,
        "lora_alpha": int(alpha) if alpha == int(alpha) else alpha,
        "lora_dropout": 0.0,
        "target_modules": adapted,
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "inference_mode": True,
    }


def load(path: str | Path, config: ModelConfig) -> tuple[LoraConfig, Params]:
    """Return the adapters of a PEFT directory, for the model of `config`; UserError if unfit."""
    path = Path(path)
    settings = load_config(path)
    if not (path / WEIGHTS).exists():
        raise UserError(f"{path} has no {WEIGHTS}; save the adapter as safetensors")
    with open_tensors(path / WEIGHTS) as tensors:
        return settings, from_peft(tensors, config, settings)


def load_config(path: str | Path) -> LoraConfig:
    """Return the settings of a PEFT directory; UserError for an unsupported option."""
    file = Path(path) / CONFIG
    if not file.exists():
        raise UserError(f"{file} is missing; give a directory that PEFT or rlx wrote")
    record = read_json(file)
    targets: Any = record.get("target_modules")
    rank: Any = record.get("r")
    alpha: Any = record.get("lora_alpha")
    start, bias = record.get("init_lora_weights", True), record.get("bias", "none")
    targets = list(LORA_TARGETS) if targets == "all-linear" else targets
    refuse((
        (record.get("peft_type") != "LORA",
         f"{file} has peft_type={record.get('peft_type')!r}; rlx reads only LORA"),
        (bias != "none", f"{file} has bias={bias!r}; rlx reads adapters without biases"),
        *((record.get(key),
           f"{file} sets {key}={record.get(key)!r}, which rlx does not support; merge that adapter "
           "with PEFT and give the merged model as model.path") for key in _REFUSED),
        (isinstance(start, str) and start not in _INITS,
         f"{file} has init_lora_weights={start!r}, which changes the base too; convert it with "
         "PEFT's path_initial_model_for_weight_conversion"),
        (not isinstance(rank, int) or not isinstance(alpha, int | float),
         f"{file} has r={rank!r} and lora_alpha={alpha!r}; wanted two numbers"),
        (not isinstance(targets, list),
         f"{file} has target_modules={targets!r}; rlx reads a list of names such as 'q_proj'"),
    ))  # fmt: skip
    # For a small model PEFT writes 'all-linear' as full names of modules.
    short = dict.fromkeys(str(name).rpartition(".")[2] for name in targets)
    return LoraConfig(rank, float(alpha), tuple(short))
