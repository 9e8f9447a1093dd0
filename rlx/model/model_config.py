"""Hyperparameters of a decoder, read from and written to HF's `config.json`. Imports no JAX.

`ModelConfig` is frozen and hashable, a static argument of `jax.jit`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rlx.base import UserError, refuse
from rlx.model import rope
from rlx.model.config_forms import NotOurs, check, need
from rlx.model.rope import LAYER_KINDS, Rope

_GEMMA = {
    "head_dim": 256, "num_key_value_heads": 4, "tie_word_embeddings": True, "layer_types": None,
    "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "sliding_window": 4096,
    "attn_logit_softcapping": None, "final_logit_softcapping": None,
}  # fmt: skip
# HF's class name → model_type, and HF's defaults of keys that its file may lack. Keys that some
# classes lack, such as sliding_window, are read and written only for classes that have them here.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "Qwen2ForCausalLM": {"model_type": "qwen2", "max_position_embeddings": 32768},
    "Qwen3ForCausalLM": {"model_type": "qwen3", "max_position_embeddings": 32768, "head_dim": 128},
    "LlamaForCausalLM": {"model_type": "llama", "max_position_embeddings": 2048},
    "MistralForCausalLM": {
        "model_type": "mistral", "max_position_embeddings": 131072, "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    "Gemma2ForCausalLM": {
        **_GEMMA, "model_type": "gemma2", "max_position_embeddings": 8192,
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
        "sliding_window_pattern": 2,
    },
    "Gemma3ForCausalLM": {
        **_GEMMA, "model_type": "gemma3_text", "max_position_embeddings": 131072,
        "sliding_window_pattern": 6, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
        "vocab_size": 262208, "num_attention_heads": 8,
    },
    "Olmo2ForCausalLM": {
        "model_type": "olmo2", "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
    },
    "Phi3ForCausalLM": {
        "model_type": "phi3", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
        "sliding_window": None, "original_max_position_embeddings": 4096,
    },
    "Qwen3MoeForCausalLM": {
        "model_type": "qwen3_moe", "max_position_embeddings": 32768, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": False,
    },
}  # fmt: skip
_NO_BIAS = {"attention_bias": False, "output_bias": False}
_OF_GEMMA = {"norms": "both", "norm_offset": 1.0, "scaled_embedding": True}
# HF's class name → fields of ModelConfig that its file cannot change.
TRAITS: dict[str, dict[str, Any]] = {
    "Qwen2ForCausalLM": {"attention_bias": True, "output_bias": False},
    "Qwen3ForCausalLM": {"qk_norm": True},
    "LlamaForCausalLM": {},
    "MistralForCausalLM": _NO_BIAS,
    "Gemma2ForCausalLM": _OF_GEMMA,
    "Gemma3ForCausalLM": _OF_GEMMA | {"qk_norm": True},
    "Olmo2ForCausalLM": {"norms": "after", "qk_norm": True, "joint_qk_norm": True},
    "Phi3ForCausalLM": _NO_BIAS | {"fused": True},
    "Qwen3MoeForCausalLM": {"qk_norm": True},
}
# HF gives a model with a value head another class name.
_SCORED = ("ForCausalLM", "ForSequenceClassification")
_SCORED_NAMES = {"Gemma3ForCausalLM": "Gemma3TextForSequenceClassification"}
ACTIVATIONS = ("silu", "gelu_pytorch_tanh")
CHUNK = 1024  # tokens whose logits exist at one time, unless set
_SIZES: dict[str, str] = {  # fields of ModelConfig → keys of config.json
    "vocab_size": "vocab_size", "num_layers": "num_hidden_layers", "model_dim": "hidden_size",
    "mlp_dim": "intermediate_size", "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads", "head_dim": "head_dim",
    "max_position": "max_position_embeddings",
}  # fmt: skip
_OPTIONS: dict[str, str] = {  # the same for keys that only some classes have
    "query_scalar": "query_pre_attn_scalar", "attention_softcap": "attn_logit_softcapping",
    "logit_softcap": "final_logit_softcapping", "num_experts": "num_experts",
    "experts_per_token": "num_experts_per_tok", "expert_dim": "moe_intermediate_size",
    "norm_topk_prob": "norm_topk_prob",
}  # fmt: skip
# Keys whose null switches something off. For other keys null means HF's default.
_NULL_IS_OFF = ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping")


def kernel_fits(head_dim: int, softcap: float, capability: tuple[int, ...]) -> bool:
    """Return whether cuDNN's attention supports this head width and softcap on a GPU."""
    widest = 256 if capability >= (9, 0) else 128  # since Hopper
    return not (head_dim % 8 or head_dim > widest or softcap)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One decoder-only transformer."""

    architecture: str  # HF class name, a key of ARCHITECTURES
    vocab_size: int
    num_layers: int
    model_dim: int
    mlp_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope = Rope()  # noqa: RUF009
    local_rope: Rope | None = None  # of layers with a window; None: the same
    windows: tuple[int, ...] = ()  # tokens that each layer's queries see, own included; 0, (): all
    activation: str = "silu"  # of the gated MLP, one of ACTIVATIONS
    norms: str = "before"  # of a layer's blocks: before (Llama) | after (OLMo 2) | both (Gemma)
    norm_offset: float = 0.0  # added to the weight of every norm; 1 for Gemma
    scaled_embedding: bool = False  # the token embedding is multiplied by √model_dim
    query_scalar: int = 0  # attention divides q·k by its root; 0: by √head_dim
    attention_softcap: float = 0.0  # c where scores become c·tanh(x / c); 0: not
    logit_softcap: float = 0.0  # the same for logits
    tie_embeddings: bool = False
    qk_norm: bool = False  # RMS norm of each query and key head before RoPE
    joint_qk_norm: bool = False  # of all heads at once
    fused: bool = False  # HF's file has q, k, v as one matrix, and gate, up as one
    attention_bias: bool = False  # on the query, key and value projections
    output_bias: bool = False  # on the attention output projection
    num_experts: int = 0  # MLPs of a layer, `expert_dim` wide; 0: one MLP, mlp_dim wide
    experts_per_token: int = 0  # experts that each token uses
    expert_dim: int = 0
    norm_topk_prob: bool = False  # the weights of a token's experts sum to 1
    value_head: bool = False  # one number a token; HF's ...ForSequenceClassification with one label
    rms_eps: float = 1e-6
    max_position: int = 32768  # longest context in tokens
    initializer_range: float = 0.02
    eos_token_ids: tuple[int, ...] = ()  # tokens that end a completion, in the order of HF's files
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    foreign: str = ""  # config.json of an unsupported model, whose missing sizes are guesses
    why: str = ""  # the reason why it is unsupported, for errors
    numbers: int = 0  # parameters of a foreign model by its files; 0: count them from the sizes

    def __post_init__(self):
        if self.foreign:
            return
        factors = ("short_factor", "long_factor") if self.rope.kind == "longrope" else ()
        lengths, half = {n: len(getattr(self.rope, n)) for n in factors}, self.head_dim // 2
        refuse((
            (self.num_heads % self.num_kv_heads,
             f"num_attention_heads={self.num_heads} is not a multiple of num_key_value_heads="
             f"{self.num_kv_heads}; fix config.json"),
            (not min(1, self.num_experts) <= self.experts_per_token <= self.num_experts,
             f"num_experts_per_tok={self.experts_per_token} is not between 1 and num_experts="
             f"{self.num_experts}; fix config.json"),
            *((size != half, f"{name} of longrope has {size} numbers, wanted {half}: half of a "
               "head's width; fix config.json") for name, size in lengths.items()),
            (self.head_dim % 2,
             f"head_dim={self.head_dim} is odd; RoPE rotates pairs: fix config.json"),
        ))  # fmt: skip

    @property
    def layer_windows(self) -> tuple[int, ...]:
        """Window of every layer, 0 for none."""
        return self.windows or (0,) * self.num_layers

    def within(self, context: int) -> "ModelConfig":
        """Return the model for sequences of at most `context` tokens."""
        # As in vLLM, so that no token's probability depends on how many tokens follow it.
        long = context > self.rope.original_max_position_embeddings
        return replace(self, rope=replace(self.rope, long=self.rope.kind == "longrope" and long))

    @property
    def query_factor(self) -> float:
        """Factor of queries before scores are divided by √head_dim."""
        return (self.head_dim / (self.query_scalar or self.head_dim)) ** 0.5

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> "ModelConfig":
        """Return the config of HF's `config.json`; UserError for what the decoder lacks."""
        architecture, value_head = _architecture(hf)
        values = {k: v for k, v in hf.items() if v is not None or k in _NULL_IS_OFF}
        if "num_local_experts" in values:  # the name in newer files
            values["num_experts"] = values["num_local_experts"]
        hf = {**ARCHITECTURES[architecture], **values}
        row = {key: hf[key] for key in ARCHITECTURES[architecture]}  # HF ignores other keys
        check(hf)
        _refuse_options(hf, architecture)
        heads, wide = need(hf, "num_attention_heads"), need(hf, "hidden_size")
        hf = {"num_key_value_heads": heads, "head_dim": wide // heads, **hf}
        bias = bool(hf.get("attention_bias", False))
        kinds = ("default", "longrope") if architecture == "Phi3ForCausalLM" else rope.KINDS
        return cls(
            architecture=architecture,
            **_shared(hf),
            rope=rope.from_hf(hf, kinds),
            local_rope=rope.local_from_hf(hf) if "rope_local_base_freq" in row else None,
            windows=_windows(row, need(hf, "num_hidden_layers")),
            activation=row.get("hidden_activation", hf.get("hidden_act", "silu")),
            **{field: row[key] for field, key in _OPTIONS.items() if row.get(key)},
            **{"attention_bias": bias, "output_bias": bias} | TRAITS[architecture],
            value_head=value_head,
            rms_eps=float(hf.get("rms_norm_eps", 1e-6)),
            initializer_range=float(hf.get("initializer_range", 0.02)),
        ).within(need(hf, "max_position_embeddings"))

    @classmethod
    def from_foreign(cls, hf: Mapping[str, Any], why: str, numbers: int) -> "ModelConfig":
        """Return the sizes and tokens of any causal language model; UserError for a missing one."""
        check(hf, "architectures", "text_config")
        text, rows = hf.get("text_config") or {}, ARCHITECTURES.values()
        matches = [row for row in rows if row["model_type"] == text.get("model_type")]
        text = {**hf, **(matches[0] if matches else {}), **text}  # its file may leave out defaults
        for name, others in _OTHER_NAMES.items():
            values = [text[key] for key in (name, *others) if text.get(key) is not None]
            text[name] = values[0] if values else None
        for name in ("intermediate_size", "head_dim"):  # a list where layers differ: Gemma 3n
            text[name] = None if isinstance(text.get(name), list) else text.get(name)
        check(text, *_OTHER_NAMES, "vocab_size", "head_dim", "bos_token_id", "pad_token_id")
        heads, wide = need(text, "num_attention_heads"), need(text, "hidden_size")
        guesses = {"intermediate_size": 4 * wide, "num_key_value_heads": heads}
        guesses["head_dim"] = wide // heads
        text |= {key: text[key] or guess for key, guess in guesses.items()}
        return cls(
            architecture=str((hf.get("architectures") or [hf.get("model_type")])[0]),
            **_shared(text),
            foreign=json.dumps(hf, sort_keys=True),
            why=why,
            numbers=numbers,
        )

    def require_ours(self, what: str) -> None:
        """Raise UserError unless rlx's own decoder supports this model; `what` needs it."""
        if self.foreign:
            raise UserError(
                f"{self.why}; {what} supports only rlx's own models: use trainer=torch with "
                "fleet.engine=vllm, which support any causal language model of transformers"
            )

    def to_hf(self) -> dict[str, Any]:
        """Return the dict of a `config.json` from which transformers builds the same model."""
        if self.foreign:
            return json.loads(self.foreign)
        eos, name = list(self.eos_token_ids), self.architecture
        scored = _SCORED_NAMES.get(name, name.replace(*_SCORED))
        name = scored if self.value_head else name
        hf = {
            "architectures": [name],
            "model_type": ARCHITECTURES[self.architecture]["model_type"],
            **{key: getattr(self, field) for field, key in _SIZES.items()},
            "hidden_act": self.activation,
            "tie_word_embeddings": self.tie_embeddings,
            "rms_norm_eps": self.rms_eps,
            "initializer_range": self.initializer_range,
            "attention_dropout": 0.0,
            "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
            "bos_token_id": self.bos_token_id,
            "pad_token_id": self.pad_token_id,
            **rope.to_hf(self.rope),
        }
        row = ARCHITECTURES[self.architecture]
        # transformers wants a window even if layer_types gives it to no layer.
        unused = row["sliding_window"] if "layer_types" in row else None
        values = {key: getattr(self, field) for field, key in _OPTIONS.items()}
        options = {
            **{key: x or None if key in _NULL_IS_OFF else x for key, x in values.items()},
            "hidden_activation": self.activation,
            "sliding_window": max(self.windows, default=0) or unused,
            "original_max_position_embeddings": self.rope.original_max_position_embeddings or 4096,
            "layer_types": [LAYER_KINDS[w > 0] for w in self.layer_windows],
        }
        hf |= {key: options[key] for key in row if key in options}
        if self.local_rope:
            both = (self.rope, self.local_rope)
            ropes = (rope.to_hf(options)["rope_parameters"] for options in both)
            hf["rope_parameters"] = dict(zip(LAYER_KINDS, ropes, strict=True))
            hf["rope_local_base_freq"] = self.local_rope.theta
        if "attention_bias" not in TRAITS[self.architecture]:
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
    "max_position_embeddings": ("n_positions", "n_ctx", "max_sequence_length", "max_seq_len"),
}


def _shared(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ModelConfig that the file of any language model has."""
    return {
        **{field: need(hf, key) for field, key in _SIZES.items()},
        "tie_embeddings": bool(hf.get("tie_word_embeddings", False)),
        "eos_token_ids": end_tokens(hf),
        "bos_token_id": hf.get("bos_token_id"),
        "pad_token_id": hf.get("pad_token_id"),
    }


def _architecture(hf: Mapping[str, Any]) -> tuple[str, bool]:
    """Return the key of ARCHITECTURES, and whether the model has a value head."""
    check(hf, "architectures", "model_type", "id2label")
    by_type = {row["model_type"]: name for name, row in ARCHITECTURES.items()}
    names = hf.get("architectures") or [by_type.get(hf.get("model_type", ""), hf.get("model_type"))]
    scored = {other: name for name, other in _SCORED_NAMES.items()}
    name = scored.get(names[0], str(names[0]).replace(*_SCORED[::-1]))
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
    row = ARCHITECTURES[architecture]
    kinds = LAYER_KINDS if "layer_types" in row else LAYER_KINDS[:1]
    activation = "hidden_activation" if "hidden_activation" in row else "hidden_act"
    refused = {
        activation: hf.get(activation, "silu") not in ACTIVATIONS,
        "use_sliding_window": bool(hf.get("use_sliding_window")),
        "use_bidirectional_attention": bool(hf.get("use_bidirectional_attention")),
        "layer_types": set(hf.get("layer_types") or ()) - set(kinds),
        "mlp_bias": bool(hf.get("mlp_bias")),
        **{k: bool(hf.get(k)) for k in ("attention_dropout", "resid_pdrop", "embd_pdrop")},
        "quantization_config": "quantization_config" in hf,
        "partial_rotary_factor": hf.get("partial_rotary_factor", 1.0) != 1.0,
        "mlp_only_layers": bool(hf.get("mlp_only_layers")),
        "decoder_sparse_step": hf.get("decoder_sparse_step", 1) != 1,
    }
    for key, unlike in refused.items():
        if unlike:
            raise NotOurs(
                f"unsupported option {key}={hf.get(key)!r} of {architecture}; use another model"
            )


def _windows(row: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Return the field `windows` from the keys of an architecture."""
    window, pattern = row.get("sliding_window") or 0, row.get("sliding_window_pattern", layers + 1)
    kinds = row.get("layer_types") or [LAYER_KINDS[bool(i % pattern)] for i in range(1, layers + 1)]
    if len(kinds) != layers:
        raise UserError(
            f"layer_types has {len(kinds)} layers, num_hidden_layers={layers}; fix config.json"
        )
    windows = tuple(window * (kind == LAYER_KINDS[1]) for kind in kinds)
    return windows if any(windows) else ()


def end_tokens(hf: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the tokens that end a completion by config.json or generation_config.json."""
    check(hf, "eos_token_id")
    value = hf.get("eos_token_id")
    return (value,) if isinstance(value, int) else tuple(value or ())
