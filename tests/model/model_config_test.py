"""What is read from HF's config.json, what is written back, and what is refused by name."""

import contextlib
import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
import transformers

from rlx.base import UserError
from rlx.model import directory
from rlx.model import params as parameters
from rlx.model.config_forms import NotOurs
from rlx.model.lora_config import LORA_TARGETS
from rlx.model.model_config import ARCHITECTURES, TRAITS, ModelConfig
from rlx.model.rope import Rope

COMMON = {
    "vocab_size": 97, "num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 48,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}  # fmt: skip

# name → (options as they stand in a file, what they mean; rope_theta is 500 in each)
ROPES = {
    "default": ({}, Rope(theta=500.0)),
    "linear": ({"factor": 2.0}, Rope("linear", 500.0, factor=2.0)),
    "llama3": (
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 64},
        Rope("llama3", 500.0, 8.0, 64, low_freq_factor=1.0, high_freq_factor=4.0),
    ),
    "yarn": (
        {"factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.3,
         "beta_fast": 8.0, "beta_slow": 2.0, "mscale": 0.7, "mscale_all_dim": 0.5,
         "truncate": False},
        Rope("yarn", 500.0, 4.0, 64, attention_factor=1.3, beta_fast=8.0, beta_slow=2.0,
             mscale=0.7, mscale_all_dim=0.5, truncate=False),
    ),
    "longrope": (
        {"factor": 8.0, "original_max_position_embeddings": 4096, "attention_factor": 1.3,
         "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 4.0, 8.0]},
        Rope("longrope", 500.0, 8.0, 4096, attention_factor=1.3,
             short_factor=(1.0, 1.1, 1.2, 1.3), long_factor=(1.0, 2.0, 4.0, 8.0)),
    ),
}  # fmt: skip


# Phi 3 has RoPE without scaling and longrope alone, which the others have not.
KINDS = [
    (name, kind) for name in sorted(ARCHITECTURES) for kind in ROPES
    if kind == "default" or (name == "Phi3ForCausalLM") == (kind == "longrope")
]  # fmt: skip


def hf_dict(architecture="LlamaForCausalLM", **changes):
    model_type = ARCHITECTURES[architecture]["model_type"]
    return {**COMMON, "architectures": [architecture], "model_type": model_type, **changes}


def spelled(spelling, kind, options):
    """The keys of a config.json that ask for a RoPE variant, in one of HF's spellings."""
    if spelling == "rope_parameters":
        return {"rope_parameters": {"rope_type": kind, "rope_theta": 500.0, **options}}
    if spelling == "full_attention":
        parameters = {"rope_type": kind, "rope_theta": 500.0, **options}
        return {"rope_parameters": {"full_attention": parameters}}
    if kind == "default":
        return {"rope_theta": 500.0, "rope_scaling": None}
    name = "type" if spelling == "rope_scaling type" else "rope_type"
    return {"rope_theta": 500.0, "rope_scaling": {name: kind, **options}}


def test_every_key_of_the_file_is_read():
    hf = hf_dict(
        "Qwen3ForCausalLM", head_dim=10, tie_word_embeddings=True, attention_bias=True,
        initializer_range=0.3, eos_token_id=[5, 7], bos_token_id=1, pad_token_id=2,
        rope_theta=1e6,
    )  # fmt: skip
    assert ModelConfig.from_hf(hf) == ModelConfig(
        "Qwen3ForCausalLM", vocab_size=97, num_layers=3, model_dim=32, mlp_dim=48, num_heads=4,
        num_kv_heads=2, head_dim=10, rope=Rope(theta=1e6), tie_embeddings=True, qk_norm=True,
        attention_bias=True, output_bias=True, rms_eps=1e-5, max_position=256,
        initializer_range=0.3, eos_token_ids=(5, 7), bos_token_id=1, pad_token_id=2,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "bias", "output_bias", "qk_norm", "head_dim"),
    [
        ("Qwen2ForCausalLM", True, False, False, 8),
        ("Qwen3ForCausalLM", False, False, True, 128),  # HF's class has 128 whatever the width
        ("LlamaForCausalLM", False, False, False, 8),
    ],
)
def test_keys_that_may_be_missing(architecture, bias, output_bias, qk_norm, head_dim):
    config = ModelConfig.from_hf(hf_dict(architecture))
    assert (config.attention_bias, config.output_bias) == (bias, output_bias)
    assert (config.qk_norm, config.head_dim) == (qk_norm, head_dim)
    assert config.rope == Rope(theta=10_000.0)
    assert (config.tie_embeddings, config.eos_token_ids) == (False, ())


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_null_is_a_missing_key(architecture):
    nothing = ("head_dim", "rope_scaling", "layer_types", "eos_token_id", "quantization_config")
    given = hf_dict(architecture, **dict.fromkeys(nothing))
    assert ModelConfig.from_hf(given) == ModelConfig.from_hf(hf_dict(architecture))


def test_as_many_key_heads_as_heads_when_the_file_is_silent():
    hf = hf_dict()
    del hf["num_key_value_heads"]
    assert ModelConfig.from_hf(hf).num_kv_heads == 4


def test_the_model_type_serves_where_architectures_is_missing():
    hf = hf_dict("Qwen3ForCausalLM")
    del hf["architectures"]
    assert ModelConfig.from_hf(hf).architecture == "Qwen3ForCausalLM"


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize(
    "spelling", ["rope_parameters", "full_attention", "rope_scaling", "rope_scaling type"]
)
def test_rope_is_read_in_every_spelling(kind, spelling):
    options, wanted = ROPES[kind]
    architecture = "Phi3ForCausalLM" if kind == "longrope" else "LlamaForCausalLM"
    given = spelled(spelling, kind, options)
    config = ModelConfig.from_hf(hf_dict(architecture, **given))
    assert config.rope == wanted


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_the_original_context_defaults_to_the_longest(kind):
    options = {k: v for k, v in ROPES[kind][0].items() if k != "original_max_position_embeddings"}
    config = ModelConfig.from_hf(hf_dict(**spelled("rope_parameters", kind, options)))
    assert config.rope.original_max_position_embeddings == 256


@pytest.mark.parametrize("kind", ["llama3", "yarn"])
def test_the_models_own_original_context_wins_as_in_transformers(kind):
    scaling = spelled("rope_scaling", kind, ROPES[kind][0])
    given = hf_dict(original_max_position_embeddings=32, **scaling)
    theirs = transformers.AutoConfig.for_model(**given)
    theirs.standardize_rope_params()  # as its models do, and vLLM
    config = ModelConfig.from_hf(given)
    wanted = theirs.rope_parameters["original_max_position_embeddings"]
    assert config.rope.original_max_position_embeddings == wanted == 32


@pytest.mark.parametrize(("architecture", "kind"), KINDS)
def test_a_round_trip_changes_nothing(architecture, kind):
    config = ModelConfig.from_hf(
        hf_dict(
            architecture,
            head_dim=8 if kind == "longrope" else 10,
            tie_word_embeddings=True,
            eos_token_id=[5, 7],
            **spelled("rope_parameters", kind, ROPES[kind][0]),
        )
    )
    hf = config.to_hf()
    assert ModelConfig.from_hf(hf) == config
    newer = {k: v for k, v in hf.items() if k not in ("rope_scaling", "rope_theta")}
    assert ModelConfig.from_hf(newer) == config
    older = {k: v for k, v in hf.items() if k != "rope_parameters"}
    assert ModelConfig.from_hf(older) == config
    biased = dataclasses.replace(config, attention_bias=True, output_bias=True)
    if "attention_bias" not in TRAITS[architecture]:
        assert ModelConfig.from_hf(biased.to_hf()) == biased


@pytest.mark.parametrize("eos", [(), (5,), (5, 7)])
def test_end_tokens_keep_their_number_and_order(eos):
    config = dataclasses.replace(ModelConfig.from_hf(hf_dict()), eos_token_ids=eos)
    assert ModelConfig.from_hf(config.to_hf()).eos_token_ids == eos


@pytest.mark.parametrize(("architecture", "kind"), KINDS)
def test_transformers_reads_what_is_written_and_writes_what_is_read(architecture, kind, tmp_path):
    rope = spelled("rope_parameters", kind, ROPES[kind][0])
    width = 8 if kind == "longrope" else 10  # which Phi 3's class wants to be D / heads there
    wanted = ModelConfig.from_hf(hf_dict(architecture, head_dim=width, eos_token_id=5, **rope))
    hf = wanted.to_hf()
    theirs = transformers.AutoConfig.for_model(**hf)
    for key in COMMON | {"head_dim": 10}:
        assert getattr(theirs, key) == hf[key], key
    options = {**theirs.rope_parameters}
    assert {k: options[k] for k in hf["rope_parameters"]} == hf["rope_parameters"]
    theirs.architectures = [architecture]
    theirs.save_pretrained(tmp_path)
    written = theirs.to_dict()
    assert ModelConfig.from_hf(written) == wanted


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, ["'MixtralForCausalLM'", "LlamaForCausalLM"]),
        ({"architectures": [], "model_type": "gpt2"}, ["'gpt2'", "Qwen2ForCausalLM"]),
        ({"use_sliding_window": True, "sliding_window": 64}, ["use_sliding_window=True"]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types", "sliding"]),
        (
            {"architectures": ["Phi3ForCausalLM"], "rope_scaling": {"type": "longrope"}},
            ["'longrope' has no 'short_factor'; add it"],
        ),
        (
            {
                "architectures": ["Phi3ForCausalLM"],
                "rope_scaling": {"type": "su", "short_factor": [1.0] * 4, "long_factor": [2.0] * 3},
            },
            ["long_factor of longrope has 3 numbers, wanted 4"],
        ),
        (
            {"architectures": ["Gemma2ForCausalLM"], "sliding_window_pattern": 0},
            ["sliding_window_pattern=0; it must be a whole number above 0"],
        ),
        (
            {"architectures": ["Qwen3MoeForCausalLM"], "num_experts_per_tok": 0},
            ["num_experts_per_tok=0 is not between 1 and num_experts=128"],
        ),
        (
            {
                "architectures": ["Gemma3ForCausalLM"],
                "layer_types": ["full_attention"] * 2,
                "sliding_window": 8,
                "hidden_activation": "gelu",
            },
            ["hidden_activation='gelu'"],
        ),
        (
            {"architectures": ["Gemma2ForCausalLM"], "layer_types": ["sliding_attention"] * 2},
            ["2 layers", "num_hidden_layers=3"],
        ),
        (
            {"architectures": ["Gemma2ForCausalLM"], "layer_types": ["full_attention"] * 2},
            ["2 layers", "num_hidden_layers=3"],
        ),
        ({"hidden_act": "gelu"}, ["hidden_act='gelu'"]),
        ({"mlp_bias": True}, ["mlp_bias=True"]),
        ({"attention_dropout": 0.1}, ["attention_dropout=0.1"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor=0.5"]),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            ["partial_rotary_factor"],
        ),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            ["'dynamic'", "linear, llama3"],
        ),
        ({"rope_scaling": {"type": "longrope"}}, ["'longrope'", "yarn"]),
        ({"rope_parameters": {"rope_type": "linear"}}, ["'linear'", "'factor'", "add it"]),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, ["'low_freq_factor'"]),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0, "bogus": 1}},
            ["'bogus'", "'linear'"],
        ),
        ({"num_key_value_heads": 3}, ["num_attention_heads=4", "num_key_value_heads=3"]),
        ({"head_dim": 7}, ["head_dim=7", "odd"]),
        ({"vocab_size": None}, ["'vocab_size'"]),
        ({"vocab_size": "97"}, ["vocab_size='97'"]),
        ({"num_attention_heads": 0}, ["num_attention_heads=0"]),
        ({"rope_scaling": "linear"}, ["rope_scaling='linear'"]),
        ({"hidden_size": None}, ["'hidden_size'"]),
    ],
)
def test_what_cannot_be_done_is_one_line_that_names_the_key(changes, words):
    with pytest.raises(UserError) as error:
        ModelConfig.from_hf(hf_dict(**changes))
    assert "\n" not in str(error.value)
    for word in words:
        assert re.search(re.escape(word), str(error.value)), error.value


ODD = [0, -1, 1.5, 10**12, 10**400, 1e300, float("nan"), True, "8"]
ODD += [[], [1], ["x"], [None], {}, {"a": 1}]
ODD += [{"rope_type": kind, "factor": 0, "original_max_position_embeddings": "8"} for kind in ROPES]
ODD += [{"rope_type": kind, "short_factor": 1, "long_factor": ["x"] * 4} for kind in ROPES]
ODD += [{"rope_type": ["yarn"]}, {"rope_theta": "x"}, {"full_attention": 1}]


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_a_damaged_file_is_read_or_is_a_users_error(architecture):
    whole = hf_dict(architecture, **ModelConfig.from_hf(hf_dict(architecture)).to_hf())
    keys = {*whole, "rope_scaling", "layer_types", "text_config", "num_local_experts", "id2label"}
    for key in sorted(keys | {key for row in ARCHITECTURES.values() for key in row}):
        for read in (ModelConfig.from_hf, lambda hf: ModelConfig.from_foreign(hf, "why", 0)):
            for odd in ODD:
                with contextlib.suppress(UserError):
                    try:
                        hash(read({**whole, key: odd}))
                    except (TypeError, ValueError, LookupError, AttributeError) as error:
                        pytest.fail(f"{key}={odd!r}: {error!r}")


def described(architecture):
    """A row of the table in docs/models.md but for its last cell, from the code."""
    own, words = ARCHITECTURES[architecture], hf_dict(architecture, head_dim=8)
    pattern = own.get("sliding_window_pattern")
    windows = f"{pattern - 1} of {pattern} layers" if pattern else "every layer"
    caps = {"scores": "attn_logit_softcapping", "logits": "final_logit_softcapping"}
    ropes = []
    for kind in ROPES:
        with contextlib.suppress(NotOurs):
            ModelConfig.from_hf(words | spelled("rope_scaling", kind, ROPES[kind][0]))
            ropes.append(kind)
    rows = {row.path[-1]: row for row in parameters.table(ModelConfig.from_hf(words))}
    targets = [name for name in LORA_TARGETS if name in rows]
    return [
        f"`{architecture}`",
        TRAITS[architecture].get("norms", "before"),
        windows if "sliding_window" in own else "",
        ", ".join(word for word, key in caps.items() if own.get(key)),
        ", ".join(kind for kind in ropes if kind != "default"),
        "all" if targets == list(LORA_TARGETS) else ", ".join(targets),
    ]


def test_the_page_says_of_every_architecture_what_holds():
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    lines = [line for line in page.splitlines() if "ForCausalLM` |" in line]
    found = [[cell.strip() for cell in line.split("|")[1:-2]] for line in lines]
    assert sorted(found) == sorted(map(described, ARCHITECTURES)), "mend docs/models.md"


def test_null_switches_a_window_and_caps_off():
    keys = ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping")
    config = ModelConfig.from_hf(hf_dict("Gemma2ForCausalLM", **dict.fromkeys(keys)))
    assert (config.windows, config.attention_softcap, config.logit_softcap) == ((), 0.0, 0.0)
    full = ModelConfig.from_hf(hf_dict("Gemma2ForCausalLM"))
    assert (full.windows, full.attention_softcap) == ((4096, 0, 4096), 50.0)
    assert ModelConfig.from_hf(hf_dict("MistralForCausalLM", sliding_window=None)).windows == ()
    assert ModelConfig.from_hf(hf_dict("MistralForCausalLM")).windows == (4096,) * 3


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_a_reward_model_is_of_a_class_that_transformers_has(architecture):
    config = dataclasses.replace(ModelConfig.from_hf(hf_dict(architecture)), value_head=True)
    hf = config.to_hf()
    assert ModelConfig.from_hf(hf) == config
    known = transformers.AutoModelForSequenceClassification._model_mapping
    theirs = known[type(transformers.AutoConfig.for_model(**hf))]
    assert (theirs if isinstance(theirs, tuple) else (theirs,))[0].__name__ == hf["architectures"][
        0
    ]


def test_a_gemma_without_local_layers_is_written_with_a_window_that_transformers_can_read():
    hf = hf_dict("Gemma3ForCausalLM", layer_types=["full_attention"] * 3)
    written = ModelConfig.from_hf(hf).to_hf()
    assert written["sliding_window"] == 4096
    assert written["layer_types"] == ["full_attention"] * 3
    model = transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**written))
    model(input_ids=torch.ones((1, 3), dtype=torch.long))
    assert ModelConfig.from_hf(written) == ModelConfig.from_hf(hf)


def test_an_unused_sliding_window_is_no_obstacle():
    hf = hf_dict(
        "Qwen2ForCausalLM", use_sliding_window=False, sliding_window=64,
        layer_types=["full_attention"] * 3,
    )  # fmt: skip
    assert ModelConfig.from_hf(hf) == ModelConfig.from_hf(hf_dict("Qwen2ForCausalLM"))


def test_qwen2_has_its_biases_whatever_the_file_says():
    """Its class in transformers does not read the key either."""
    assert ModelConfig.from_hf(hf_dict("Qwen2ForCausalLM", attention_bias=False)).attention_bias


def test_a_file_around_a_text_model_may_leave_out_the_defaults_of_its_class():
    """As google/gemma-3-4b-it's does, whose class rlx's decoder has not."""
    sizes = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    hf = {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
        "text_config": {"model_type": "gemma3_text", **sizes},
    }  # fmt: skip
    with pytest.raises(NotOurs):
        ModelConfig.from_hf(hf)
    config, theirs = ModelConfig.from_foreign(hf, "why", 0), transformers.Gemma3TextConfig(**sizes)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.vocab_size) == (
        theirs.num_attention_heads, theirs.num_key_value_heads, theirs.head_dim, theirs.vocab_size,
    )  # fmt: skip
    assert config.max_position == theirs.max_position_embeddings


def test_a_model_of_another_architecture_says_so_though_its_file_leaves_sizes_out(tmp_path):
    hf = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 32, "n_head": 2,
          "n_layer": 2, "vocab_size": 100, "n_ctx": 64}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(hf))
    config = directory.load_config(tmp_path)
    assert config.max_position == 64
    with pytest.raises(UserError, match=r"'GPT2LMHeadModel'; .*trainer=torch with fleet.engine=vl"):
        config.require_ours("trainer=jax")
    del hf["n_ctx"]
    (tmp_path / "config.json").write_text(json.dumps(hf))
    with pytest.raises(UserError, match=r"'GPT2LMHeadModel'; .*; trainer=torch may take it, but"):
        directory.load_config(tmp_path)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, None])
def test_a_config_without_end_or_that_is_a_directory_is_one_line(tmp_path, text):
    file = tmp_path / "config.json"
    file.mkdir() if text is None else file.write_text(text)
    with pytest.raises(UserError, match=r"config.json cannot be read .*; get it again"):
        directory.load_config(tmp_path)
