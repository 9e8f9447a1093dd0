"""Checks of the values in HF's `config.json`, key by key, before anything uses them."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rlx.base import UserError

_MOST = 2**24  # of any size: a damaged file must not make rlx allocate all memory
_LARGEST = 1e38  # of float32


class NotOurs(UserError):
    """A model that rlx's decoder does not support; transformers may."""


def _is_integer(value: Any, least: int) -> bool:
    return type(value) is int and least <= value < _MOST


def _is_number(value: Any, least: float = math.ulp(0.0)) -> bool:
    return type(value) in (int, float) and least <= value < _LARGEST


# Description of a form → its test, and the keys of config.json and of RoPE's options that have it.
# Missing and null keys pass.
_FORMS: dict[str, tuple[Callable[[Any], bool], str]] = {
    f"a whole number above 0 and below {_MOST:,}": (
        lambda v: _is_integer(v, 1),
        "vocab_size num_hidden_layers hidden_size intermediate_size num_attention_heads head_dim "
        "num_key_value_heads max_position_embeddings sliding_window_pattern moe_intermediate_size "
        "original_max_position_embeddings",
    ),
    f"a whole number, 0 or more and below {_MOST:,}": (
        lambda v: _is_integer(v, 0), "sliding_window num_experts num_experts_per_tok",
    ),
    "a number above 0": (
        _is_number,
        "rms_norm_eps rope_theta rope_local_base_freq query_pre_attn_scalar factor beta_fast "
        "beta_slow low_freq_factor high_freq_factor attention_factor",
    ),
    "a number, 0 or more": (
        lambda v: _is_number(v, 0),
        "initializer_range attn_logit_softcapping final_logit_softcapping mscale mscale_all_dim",
    ),
    "true or false": (
        lambda v: v in (False, True), "tie_word_embeddings attention_bias norm_topk_prob truncate",
    ),
    "an object": (
        lambda v: isinstance(v, Mapping),
        "rope_scaling rope_parameters full_attention sliding_attention text_config id2label",
    ),
    "a list of numbers above 0": (
        lambda v: isinstance(v, list | tuple) and all(map(_is_number, v)),
        "short_factor long_factor",
    ),
    "a list of words": (
        lambda v: isinstance(v, list | tuple) and all(isinstance(x, str) for x in v),
        "architectures layer_types",
    ),
    "a word": (lambda v: isinstance(v, str), "model_type"),
    "a token's number": (lambda v: _is_integer(v, -1), "bos_token_id pad_token_id"),
    "a token's number, or a list of them": (
        lambda v: all(_is_integer(x, -1) for x in (v if isinstance(v, list) else [v])),
        "eos_token_id",
    ),
}  # fmt: skip


def check(hf: Mapping[str, Any], *keys: str) -> None:
    """Raise UserError for a value of a wrong form, among these keys or among all."""
    for words, (fits, names) in _FORMS.items():
        for key in names.split():
            value = hf.get(key) if key in keys or not keys else None
            if not (value is None or fits(value)):
                raise UserError(f"config.json has {key}={value!r}; it must be {words}")


def need(hf: Mapping[str, Any], key: str) -> int:
    """Return a size; UserError if the file lacks it."""
    if not (value := hf.get(key)):
        raise UserError(f"config.json has no {key!r}; it is not a whole HF model config")
    return value


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of an HF directory; UserError if there is none."""
    try:
        record = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(
            f"{path} is missing; give an HF directory with config.json and safetensors"
        ) from None
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not JSON (line {error.lineno}: {error.msg}); mend it") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not JSON ({error.reason}); get it again") from None
    except (OSError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({error}); get it again") from None
    if not isinstance(record, dict):
        raise UserError(f"{path} holds no JSON object; get it again")
    return record
