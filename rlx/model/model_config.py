"""Hyperparameters of a decoder, read from and written to HF's `config.json`. Imports no JAX.

The forward pass depends on one frozen, hashable `ModelConfig`, so it can be a static argument of
`jax.jit`. Options of HF's file that this decoder does not have (another architecture, sliding
windows, another activation) are named here: such a model is transformers' alone.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from rlx.base import UserError


class NotOurs(UserError):
    """A model that transformers may have and rlx's decoder has not."""


# HF's class name → model_type, and HF's defaults of keys that its file may lack.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Qwen2ForCausalLM": {"model_type": "qwen2", "max_position_embeddings": 32768},
    "Qwen3ForCausalLM": {"model_type": "qwen3", "max_position_embeddings": 32768, "head_dim": 128},
    "LlamaForCausalLM": {"model_type": "llama", "max_position_embeddings": 2048},
}
# To HF a model with a value head is the same decoder under another class name.
_SCORED = ("ForCausalLM", "ForSequenceClassification")
ROPE_KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding; names are HF's, None where HF's own default applies.

    The numbers that a kind needs (see _ROPE_REQUIRED) are at these defaults for other kinds.

    Attributes:
      kind: default | linear | llama3 | yarn.
      theta: base of the geometric series of wavelengths.
      factor: how many times the context is stretched.
      original_max_position_embeddings: tokens the model was trained on before stretching.
    """

    kind: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None


_ROPE_REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder-only transformer.

    Attributes:
      architecture: HF class name, a key of ARCHITECTURES.
      attention_bias: biases on the query, key and value projections.
      output_bias: a bias on the attention output projection.
      qk_norm: RMS norm of each query and key head before RoPE (Qwen3).
      value_head: one number a token in place of logits: a critic or a reward model, in HF
        ...ForSequenceClassification with one label.
      max_position: longest context in tokens.
      eos_token_ids: tokens that end a completion, in the order of HF's files.
      foreign: config.json of a model that this decoder does not compute; sizes that it does not
        tell in our words are guesses then. "" for ours. why: what is not ours, in words.
      numbers: how many numbers a foreign model has, as its files say; 0: as ours would have.
    """

    architecture: str
    vocab_size: int
    num_layers: int
    model_dim: int
    mlp_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope = Rope()
    tie_embeddings: bool = False
    qk_norm: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    value_head: bool = False
    rms_eps: float = 1e-6
    max_position: int = 32768
    initializer_range: float = 0.02
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    foreign: str = ""
    why: str = ""
    numbers: int = 0

    def __post_init__(self):
        if self.foreign:
            return
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"num_attention_heads={self.num_heads} is not a multiple of num_key_value_heads="
                f"{self.num_kv_heads}; fix config.json"
            )
        if self.head_dim % 2:
            raise UserError(f"head_dim={self.head_dim} is odd; RoPE rotates pairs: fix config.json")

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> "ModelConfig":
        """Return the config of HF's `config.json`, a dict with `rope_scaling` or `rope_parameters`.

        Raises:
          UserError: for an architecture or an option this decoder does not have, and for a
            missing key.
        """
        architecture, value_head = _architecture(hf)
        hf = {**ARCHITECTURES[architecture], **{k: v for k, v in hf.items() if v is not None}}
        _refuse_options(hf, architecture)
        heads = _need(hf, "num_attention_heads")
        llama_like = architecture != "Qwen2ForCausalLM"  # Qwen2 has no choice: q, k, v biases
        bias = bool(hf.get("attention_bias", False)) if llama_like else True
        return cls(
            architecture=architecture,
            vocab_size=_need(hf, "vocab_size"),
            num_layers=_need(hf, "num_hidden_layers"),
            model_dim=_need(hf, "hidden_size"),
            mlp_dim=_need(hf, "intermediate_size"),
            num_heads=heads,
            num_kv_heads=_need(hf, "num_key_value_heads", heads),
            head_dim=_need(hf, "head_dim", _need(hf, "hidden_size") // heads),
            rope=_rope_from_hf(hf),
            tie_embeddings=bool(hf.get("tie_word_embeddings", False)),
            qk_norm=architecture == "Qwen3ForCausalLM",
            attention_bias=bias,
            output_bias=bias and llama_like,
            value_head=value_head,
            rms_eps=float(hf.get("rms_norm_eps", 1e-6)),
            max_position=_need(hf, "max_position_embeddings"),
            initializer_range=float(hf.get("initializer_range", 0.02)),
            eos_token_ids=_ids(hf.get("eos_token_id")),
            bos_token_id=hf.get("bos_token_id"),
            pad_token_id=hf.get("pad_token_id"),
        )

    @classmethod
    def from_foreign(cls, hf: Mapping[str, Any], why: str, numbers: int) -> "ModelConfig":
        """Return what a run asks of any causal language model; the rest is a guess for estimates.

        Raises:
          UserError: the file does not tell its vocabulary, context or sizes.
        """
        text = {**hf, **hf.get("text_config", {})}
        for name, others in _OTHER_NAMES.items():
            found = [text[key] for key in (name, *others) if text.get(key) is not None]
            text[name] = found[0] if found else None
        heads, wide = _need(text, "num_attention_heads"), _need(text, "hidden_size")
        return cls(
            architecture=str((hf.get("architectures") or [hf.get("model_type")])[0]),
            vocab_size=_need(text, "vocab_size"),
            num_layers=_need(text, "num_hidden_layers"),
            model_dim=wide,
            mlp_dim=text["intermediate_size"] or 4 * wide,
            num_heads=heads,
            num_kv_heads=text["num_key_value_heads"] or heads,
            head_dim=text.get("head_dim") or wide // heads,
            tie_embeddings=bool(text.get("tie_word_embeddings", False)),
            max_position=_need(text, "max_position_embeddings"),
            eos_token_ids=_ids(text.get("eos_token_id")),
            bos_token_id=text.get("bos_token_id"),
            pad_token_id=text.get("pad_token_id"),
            foreign=json.dumps(hf, sort_keys=True),
            why=why,
            numbers=numbers,
        )

    def require_ours(self, what: str) -> None:
        """Raise UserError unless rlx's own decoder computes this model, for `what` needs that."""
        if self.foreign:
            raise UserError(
                f"{self.why}; {what} computes rlx's own models alone: trainer=torch with "
                "fleet.engine=vllm takes any causal language model of transformers"
            )

    def to_hf(self) -> dict[str, Any]:
        """Return the dict of a `config.json` from which transformers builds the same model."""
        if self.foreign:
            return json.loads(self.foreign)
        eos, name = list(self.eos_token_ids), self.architecture
        name = name.replace(*_SCORED) if self.value_head else name
        hf = {
            "architectures": [name],
            "model_type": ARCHITECTURES[self.architecture]["model_type"],
            "vocab_size": self.vocab_size,
            "num_hidden_layers": self.num_layers,
            "hidden_size": self.model_dim,
            "intermediate_size": self.mlp_dim,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "tie_word_embeddings": self.tie_embeddings,
            "rms_norm_eps": self.rms_eps,
            "max_position_embeddings": self.max_position,
            "initializer_range": self.initializer_range,
            "attention_dropout": 0.0,
            "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
            "bos_token_id": self.bos_token_id,
            "pad_token_id": self.pad_token_id,
            **_rope_to_hf(self.rope),
        }
        if self.architecture != "Qwen2ForCausalLM":
            hf["attention_bias"] = self.attention_bias
        if self.value_head:
            hf |= {"id2label": {"0": "value"}, "label2id": {"value": 0}}
        return hf


# Keys of config.json → what other architectures call them.
_OTHER_NAMES = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "n_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "num_key_value_heads": ("num_kv_heads",),
    "intermediate_size": ("n_inner", "ffn_dim"),
    "max_position_embeddings": ("n_positions", "max_sequence_length", "max_seq_len"),
}


def _need(hf: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Return a size, ≥ 1; `default` if the file lacks it, None: then it is an error."""
    value = hf.get(key, default)
    if value is None:
        raise UserError(f"config.json has no {key!r}; it is not a whole HF model config")
    if not isinstance(value, int) or value < 1:
        raise UserError(f"config.json has {key}={value!r}; it must be a whole number above 0")
    return value


def _architecture(hf: Mapping[str, Any]) -> tuple[str, bool]:
    """Return the key of ARCHITECTURES, and whether the model has a value head."""
    by_type = {row["model_type"]: name for name, row in ARCHITECTURES.items()}
    names = hf.get("architectures") or [by_type.get(hf.get("model_type", ""), hf.get("model_type"))]
    name = str(names[0]).replace(*_SCORED[::-1])
    if name not in ARCHITECTURES:
        raise NotOurs(
            f"unsupported architecture {names[0]!r}; use one of {', '.join(sorted(ARCHITECTURES))}"
        )
    value_head = name != names[0]
    if value_head and len(hf.get("id2label", ())) != 1:
        raise UserError(
            f"{names[0]} has {len(hf.get('id2label', ())) or 2} labels, wanted 1: one value a token"
        )
    return name, value_head


def _refuse_options(hf: Mapping[str, Any], architecture: str) -> None:
    """Raise UserError for an option of HF's file that would change the forward pass."""
    refused = {
        "hidden_act": hf.get("hidden_act", "silu") != "silu",
        "use_sliding_window": bool(hf.get("use_sliding_window")),
        "layer_types": set(hf.get("layer_types", ())) - {"full_attention"},
        "mlp_bias": bool(hf.get("mlp_bias")),
        "attention_dropout": bool(hf.get("attention_dropout")),
        "quantization_config": "quantization_config" in hf,
        "partial_rotary_factor": hf.get("partial_rotary_factor", 1.0) != 1.0,
    }
    for key, refuse in refused.items():
        if refuse:
            raise NotOurs(
                f"unsupported option {key}={hf.get(key)!r} of {architecture}; use another model"
            )


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def _rope_from_hf(hf: Mapping[str, Any]) -> Rope:
    key = "rope_parameters" if hf.get("rope_parameters") else "rope_scaling"
    given = hf.get(key) or {}
    if not isinstance(given, Mapping):
        raise UserError(f"config.json has {key}={given!r}; it must be an object with a rope_type")
    given = dict(given)
    if "full_attention" in given:  # the per-layer-type form of newer files
        given = dict(given["full_attention"])
    kind = given.pop("rope_type", None) or given.get("type") or "default"
    given.pop("type", None)
    theta = float(given.pop("rope_theta", None) or hf.get("rope_theta", 10_000.0))
    if kind not in ROPE_KINDS:
        raise NotOurs(f"unsupported RoPE scaling {kind!r}; use one of {', '.join(ROPE_KINDS)}")
    if given.pop("partial_rotary_factor", 1.0) != 1.0:
        raise NotOurs("unsupported option partial_rotary_factor; use a model without it")
    if kind in ("llama3", "yarn"):
        given.setdefault("original_max_position_embeddings", hf["max_position_embeddings"])
    known = {field.name for field in fields(Rope)} - {"kind", "theta"}
    for key in _ROPE_REQUIRED[kind]:
        if given.get(key) is None:
            raise UserError(f"RoPE scaling {kind!r} has no {key!r}; add it to config.json")
    if kind == "default":
        given = {}
    if extra := sorted(set(given) - known):
        raise NotOurs(f"unsupported RoPE option {extra[0]!r} of {kind!r}; remove it")
    return Rope(kind=kind, theta=theta, **given)


def _rope_to_hf(rope: Rope) -> dict[str, Any]:
    """Return both spellings: `rope_parameters` for transformers 5, and the older keys."""
    needed = _ROPE_REQUIRED[rope.kind]
    optional = {
        f.name for f in fields(Rope) if f.default is None and getattr(rope, f.name) is not None
    }
    options = {name: getattr(rope, name) for name in (*needed, *sorted(optional))}
    both = {
        "rope_parameters": {"rope_type": rope.kind, "rope_theta": rope.theta, **options},
        "rope_theta": rope.theta,
    }
    if rope.kind != "default":
        both["rope_scaling"] = {"rope_type": rope.kind, **options}
    return both
