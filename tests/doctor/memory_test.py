"""The memory estimate against the compiler's own account of the same step."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from rlx.base import DiskFull
from rlx.config import default
from rlx.doctor import memory
from rlx.doctor.machine import Devices
from rlx.engines import kv_memory
from rlx.engines.jax import kv_cache
from rlx.model import lora, params
from rlx.model.model_config import TRAITS, ModelConfig
from rlx.run.room_options import sizes_of
from rlx.system.available_memory import MemoryLimit
from rlx.train.device_programs import ShapesUpdate
from rlx.train.train_options import TrainOptions
from rlx.train.update import JaxUpdate

MODEL = ModelConfig(
    "Qwen2ForCausalLM", vocab_size=2048, num_layers=4, model_dim=128, mlp_dim=512, num_heads=4,
    num_kv_heads=2, head_dim=32, tie_embeddings=True, attention_bias=True,
)  # fmt: skip
GEMMA = dataclasses.replace(
    MODEL, architecture="Gemma2ForCausalLM", attention_bias=False, windows=(256, 0) * 2,
    attention_softcap=50.0, logit_softcap=30.0, activation="gelu_pytorch_tanh",
    **TRAITS["Gemma2ForCausalLM"],
)  # fmt: skip
MIXTURE = dataclasses.replace(
    MODEL, architecture="Qwen3MoeForCausalLM", attention_bias=False, qk_norm=True, num_experts=8,
    experts_per_token=2, expert_dim=256,
)  # fmt: skip
ROW = 512


def config_of(**values):
    """A run whose microbatches are rows of 512 tokens."""
    c = default()
    c.data.max_prompt_tokens, c.sampling.max_new_tokens = 128, ROW - 128
    for key, value in values.items():
        c.update_from_flattened_dict({key.replace("__", "."): value})
    return c


def compiled_peak(config, model=MODEL):
    """Bytes that XLA plans for one train step of microbatches in rows of 512."""
    trainer = ShapesUpdate(model, TrainOptions.of(config), jax.devices()[:1])
    _, program, _ = next(trainer.lowered(ROW, accumulates=False))
    m = program.compile().memory_analysis()
    results = m.output_size_in_bytes - m.alias_size_in_bytes
    return m.argument_size_in_bytes + m.temp_size_in_bytes + results


@pytest.mark.parametrize(
    ("tokens", "values", "model"),
    [
        (8192, {"model__remat": "none"}, MODEL),
        (8192, {"model__remat": "full"}, MODEL),
        (8192, {"model__remat": "attention"}, MODEL),
        (8192, {"model__remat": "dots"}, MODEL),
        (2048, {"model__remat": "full", "model__logprob_chunk": 2048}, MODEL),
        (4096, {"model__remat": "none", "model__compute_dtype": "bfloat16"}, MODEL),
        (8192, {"model__remat": "full"}, GEMMA),
        (8192, {"model__remat": "none"}, GEMMA),
        (2048, {"model__remat": "full"}, MIXTURE),
        (512, {"model__dtype": "bfloat16", "model__remat": "full"}, MODEL),
    ],
)
def test_a_step_needs_no_more_than_the_bound(tokens, values, model):
    config = config_of(train__max_tokens_per_microbatch=tokens, **values)
    config.rollout.batch_prompts, config.sampling.n_samples = 1, tokens // ROW
    config.algorithm.reward_mean = "batch"  # which a single sample can have
    planned = compiled_peak(config, model)
    bound = sum(memory.trainer(sizes_of(config, model)).values())
    assert planned < bound < 2.4 * planned, f"{bound / planned:.2f}"


def test_scores_that_no_kernel_makes_are_counted_on_a_gpu():
    config = config_of(model__compute_dtype="bfloat16", model__remat="full")
    capped, wide = (
        dataclasses.replace(MODEL, **change)
        for change in (
            {"attention_softcap": 50.0},
            {"num_heads": 1, "num_kv_heads": 1, "head_dim": 264},
        )
    )
    plain, *others = (
        memory.trainer(sizes_of(config, model), Devices("gpu"))["activations"]
        for model in (MODEL, capped, wide)
    )
    assert min(others) > 1.2 * plain


def test_the_state_is_counted_exactly():
    config = config_of(algorithm__preset="ppo")
    valued = dataclasses.replace(MODEL, value_head=True)
    trainer = JaxUpdate(MODEL, TrainOptions.of(config))
    critic = params.init(valued, jax.random.key(1))
    state = trainer.first_state(params.init(MODEL, jax.random.key(0)), critic)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    pieces = memory.state(sizes_of(config, MODEL))
    assert pieces.keys() == {"parameters", "optimizer", "critic"}
    assert 0 <= held - sum(pieces.values()) <= 48, "counters and a coefficient"


def test_adapters_make_the_state_small_and_keep_the_base_beside_it():
    config = config_of(lora__rank=4)
    whole, count = memory.state(sizes_of(config_of(), MODEL)), params.count(MODEL)
    adapters = lora.count(MODEL, TrainOptions.of(config).lora)
    pieces = memory.trainer(sizes_of(config, MODEL))
    assert pieces["parameters"] == 4 * adapters < whole["parameters"] / 3
    assert pieces["frozen base"] == 4 * count
    assert memory.in_publish_dir(sizes_of(config, MODEL)) == 2 * 4 * count
    config.fleet.publish = "adapter"
    assert memory.in_publish_dir(sizes_of(config, MODEL)) == 2 * 4 * adapters


def test_the_kv_cache_is_the_engines_own():
    cache = jax.eval_shape(lambda: kv_cache.init_cache(MODEL, 6, ROW, jnp.bfloat16))
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))
    assert kv_memory.token_bytes(MODEL, "bfloat16") * 6 * ROW == held


def test_a_mesh_divides_the_state_and_a_reference_is_counted():
    alone = config_of(algorithm__kl_placement="loss", algorithm__kl_coefficient=0.1)
    pieces = memory.trainer(sizes_of(alone, MODEL), Devices("gpu"))
    four = memory.trainer(sizes_of(alone, MODEL), Devices("gpu", count=4))
    assert pieces["reference"] == pieces["parameters"]
    vectors = 4 * ((2 * MODEL.num_layers + 1) * MODEL.model_dim + MODEL.num_layers * 256)
    cut = (pieces["parameters"] - vectors) / 4
    assert four["parameters"] == pytest.approx(cut + vectors), "norms and biases are whole"
    assert four["activations"] == pieces["activations"], "the budget is each device's"
    assert "gathered weights" in four
    assert "gathered weights" not in pieces


def test_of_experts_a_device_gathers_its_own_alone():
    fsdp, expert = (
        memory.trainer(sizes_of(config_of(train__mesh=f"{axis}:4"), MIXTURE), Devices("cpu", 4))
        for axis in ("fsdp", "expert")
    )
    experts = MIXTURE.num_experts * 3 * MIXTURE.model_dim * MIXTURE.expert_dim
    saved = fsdp["gathered weights"] - expert["gathered weights"]
    assert saved == experts * 3 / 4 * 8, "float32 weights and gradients"


def test_the_remedy_names_settings_that_lower_the_estimate():
    config = config_of(train__max_tokens_per_microbatch=8192, model__remat="none")
    now = sum(memory.trainer(sizes_of(config, MODEL)).values())
    found = memory.remedy(sizes_of(config, MODEL)).removeprefix("set ").split(" or ")
    assert found
    for setting in found:
        key, value = setting.split("=")
        other = config.copy_and_resolve_references()
        other.update_from_flattened_dict({key: int(value) if value.isdigit() else value})
        assert sum(memory.trainer(sizes_of(other, MODEL)).values()) < now


def test_sizes_are_read_at_a_glance():
    sizes = {0: "0 B", 512: "512 B", 999_700: "1.0 MB", 1_640_000_000: "1.6 GB", 24e9: "24 GB"}
    assert {number: memory.size(number) for number in sizes} == sizes
    assert memory.sizes_text({"a": 10**9, "b": 3 * 10**9, "c": 5}) == "b 3.0 GB, a 1.0 GB"
    assert sizes_of(config_of(), MODEL).minibatch == 8 * 8


def test_a_run_that_may_be_killed_is_told_before():
    config = config_of()
    sizes = sizes_of(config, MODEL)
    need = sum(memory.trainer(sizes).values())
    much = MemoryLimit(4 * need, 2 * need, "on this machine")
    assert memory.low_memory_warning(sizes, much) == ""
    assert "a step takes at most about " in memory.low_memory_warning(sizes, much, always=True)
    text = memory.low_memory_warning(sizes, much._replace(free=need // 2))
    assert text.startswith("may run out of memory: ")
    assert "; set " in text


def test_a_disk_that_will_fill_is_told_before():
    config = config_of()
    sizes = sizes_of(config, MODEL)
    saved = sum(memory.state(sizes).values())
    out = memory.exported(sizes)
    needed = (config.checkpoint.keep + 1) * saved + 2 * out
    assert memory.full_disk_warning(sizes, free=needed) == ""
    assert memory.full_disk_warning(sizes, free=saved + out, held=needed) == ""
    text = memory.full_disk_warning(sizes, free=needed - 1)
    assert text.startswith("may run out of disk space: 2 + 1 checkpoints of ")
    assert "lower checkpoint.keep" in text
    with pytest.raises(DiskFull, match="no disk space for a checkpoint"):
        memory.full_disk_warning(sizes, free=saved + out - 1, held=needed)
