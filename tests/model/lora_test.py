"""Adapters against PEFT, which is the oracle: logits, gradients, directories both ways."""

import dataclasses
import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from rlx.base import UserError
from rlx.model import decoder, hf, lora, peft
from rlx.model import params as parameters
from rlx.model.lora_config import LORA_TARGETS, LoraConfig
from tests.fixtures.model import logits_of_rows, make_oracle

TOKENS = np.random.default_rng(3).integers(0, 97, (2, 40)).astype(np.int32)
SOME = LoraConfig(rank=3, alpha=5.0, targets=("v", "o", "gate"))
ALL = LoraConfig(rank=4, alpha=16.0)


def random_adapters(config, settings, seed=0):
    """Adapters whose B is not zero either, large enough to change the logits."""
    shapes = parameters.shapes(config, rows=lora.table(config, settings))
    leaves, tree = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return tree.unflatten(
        [0.1 * jax.random.normal(k, leaf.shape) for k, leaf in zip(keys, leaves, strict=True)]
    )


@functools.partial(jax.jit, static_argnums=1)
def logits(params, config):
    return logits_of_rows(params, config, TOKENS)


def peft_model(base, adapter):
    module = pytest.importorskip("peft")
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return module.PeftModel.from_pretrained(model, adapter, is_trainable=True).eval()


# Against PEFT.


@pytest.mark.parametrize(
    "name", ["qwen2", "qwen3-tied-yarn", "llama-tied-llama3", "gemma3", "phi3", "qwen3-moe"]
)
def test_peft_loads_what_we_export_and_gives_our_logits(name, tmp_path_factory, tmp_path):
    _, base = make_oracle(name, tmp_path_factory)
    config, params = hf.load(base)
    settings = ALL if config.qk_norm else SOME
    if config.fused:
        with pytest.raises(UserError, match=r"targets has v without q, .* name it whole: qkv_proj"):
            parameters.shapes(config, rows=lora.table(config, settings))
        settings = LoraConfig(rank=3, alpha=5.0, targets=("qkv_proj", "o_proj", "gate_up_proj"))
    if config.num_experts:  # whose matrices have none
        with pytest.raises(UserError, match=r"has gate, up, down and .*'q', 'k', 'v', 'o'"):
            lora.table(config, settings)
        settings = dataclasses.replace(settings, targets=("q", "k", "v", "o"))
    adapters = random_adapters(config, settings)
    peft.save(tmp_path / "adapter", config, settings, adapters, str(base))
    with torch.no_grad():
        wanted = peft_model(base, tmp_path / "adapter")(torch.tensor(TOKENS).long()).logits.numpy()
    plain = logits(params, config)
    assert np.abs(plain - wanted).max() > 0.1
    bound = 1e-5 * max(1.0, np.abs(wanted).max())
    attached = logits(lora.attach(params, adapters, settings), config)
    merged = logits(lora.merge(params, adapters, settings), config)
    assert np.abs(attached - wanted).max() <= bound
    assert np.abs(merged - wanted).max() <= bound


def test_gradients_are_those_of_peft_and_the_base_has_none(one, tmp_path):
    _, base = one
    config, params = hf.load(base)
    adapters = random_adapters(config, ALL)
    peft.save(tmp_path / "adapter", config, ALL, adapters)
    model = peft_model(base, tmp_path / "adapter")
    tokens = torch.tensor(TOKENS).long()
    logprobs = torch.log_softmax(model(tokens).logits[:, :-1], -1)
    logprobs.gather(-1, tokens[:, 1:, None]).sum().backward()
    wanted = {
        name.replace(".default", ""): p.grad.numpy()
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    batch = {
        "tokens": jnp.asarray(TOKENS),
        "positions": jnp.broadcast_to(jnp.arange(TOKENS.shape[1]), TOKENS.shape),
        "segment_ids": jnp.ones_like(TOKENS),
    }

    @jax.jit
    @jax.grad
    def gradient(adapters):
        attached = lora.attach(params, adapters, ALL)
        return decoder.logprobs(attached, config, batch, remat="full")[0].sum()

    got = peft.to_peft(gradient(adapters), config, ALL).arrays()
    assert got.keys() == wanted.keys()
    for name, grad in wanted.items():
        np.testing.assert_allclose(got[name], grad, atol=1e-4 * np.abs(grad).max(), err_msg=name)


def test_a_directory_of_peft_is_read_and_written_back_bit_for_bit(one, tmp_path):
    module = pytest.importorskip("peft")
    _, base = one
    config, params = hf.load(base)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    settings = module.LoraConfig(
        r=5, lora_alpha=7, target_modules=["down_proj", "q_proj"], init_lora_weights=False
    )
    torch.manual_seed(0)
    theirs = module.get_peft_model(model, settings).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    found, adapters = peft.load(tmp_path / "theirs", config)
    assert found == LoraConfig(5, 7.0, ("q", "down"))
    with torch.no_grad():
        wanted = theirs(torch.tensor(TOKENS).long()).logits.numpy()
    bound = 1e-5 * max(1.0, np.abs(wanted).max())
    assert np.abs(logits(lora.attach(params, adapters, found), config) - wanted).max() <= bound
    peft.save(tmp_path / "ours", config, found, adapters)
    ours, before = (load_file(tmp_path / d / peft.WEIGHTS) for d in ("ours", "theirs"))
    assert ours.keys() == before.keys()
    assert all(ours[name].tobytes() == before[name].tobytes() for name in ours)
    assert peft.load(tmp_path / "ours", config)[0] == found


def test_adapters_begin_as_those_of_peft(one):
    """A is uniform in ±1/√in, as torch's kaiming_uniform_ with a = √5; B is zero."""
    _, base = one
    config, params = hf.load(base)
    settings = LoraConfig(rank=64, alpha=64.0)
    adapters = lora.init(config, settings, jax.random.key(0))
    for row in lora.table(config, settings):
        leaf = np.asarray(parameters.leaf(adapters, row))
        assert leaf.dtype == np.float32
        if row.kind == "zeros":
            assert not leaf.any()
            continue
        theirs = torch.empty(64, leaf.shape[1])
        torch.nn.init.kaiming_uniform_(theirs, a=5**0.5)
        bound = leaf.shape[1] ** -0.5
        assert 0.98 * bound < np.abs(leaf).max() <= bound
        assert abs(float(theirs.std()) / leaf.std() - 1) < 0.05
    attached = lora.attach(params, adapters, settings)
    np.testing.assert_array_equal(logits(attached, config), logits(params, config))
    same = jax.tree.map(np.array_equal, lora.merge(params, adapters, settings), params)
    assert all(jax.tree.leaves(same))


# Ours alone.


def test_merging_rounds_once_from_float32(one):
    _, base = one
    config, params = hf.load(base, jnp.bfloat16)
    adapters = random_adapters(config, SOME)
    merged = lora.merge(params, adapters, SOME)
    assert {leaf.dtype for leaf in jax.tree.leaves(merged)} == {np.dtype(jnp.bfloat16)}
    a, b = (np.asarray(adapters["layers"][f"v_lora_{x}"], np.float64) for x in "ab")
    exact = np.asarray(params["layers"]["v"], np.float64) + 5 / 3 * (a @ b)
    wanted = jnp.asarray(exact, jnp.bfloat16)
    different = np.asarray(merged["layers"]["v"] != wanted).mean()
    assert different < 1e-3  # float32's own error next to a rounding boundary
    assert merged["layers"]["q"] is params["layers"]["q"]


def test_the_frozen_matrices_cost_no_gradient(one):
    """The backward pass has the products for x and the adapters, not those for W."""
    _, base = one
    config, params = hf.load(base)
    adapters = random_adapters(config, ALL)
    tokens = jnp.zeros((1, 64), jnp.int32)

    def loss(base, adapters):
        attached = lora.attach(base, adapters, ALL)
        batch = {"tokens": tokens, "positions": tokens, "segment_ids": tokens + 1}
        return decoder.states(attached, config, batch)[0].sum()

    def flops(argument):
        made = jax.jit(jax.grad(loss, argument)).lower(params, adapters).compile()
        return made.cost_analysis()["flops"]

    assert flops(1) < 0.9 * flops((0, 1))


def test_sizes_agree():
    config = parameters_config()
    shapes = parameters.shapes(config, rows=lora.table(config, ALL))
    sizes = [np.prod(leaf.shape) for leaf in jax.tree.leaves(shapes)]
    assert lora.count(config, ALL) == sum(sizes)
    made = lora.init(config, ALL, jax.random.key(0))
    assert jax.tree.map(jnp.shape, made) == jax.tree.map(jnp.shape, shapes)


def parameters_config():
    from rlx.model.model_config import ModelConfig

    return ModelConfig(
        "Qwen2ForCausalLM", vocab_size=32, num_layers=2, model_dim=16, mlp_dim=32, num_heads=4,
        num_kv_heads=2, head_dim=4, tie_embeddings=True, attention_bias=True,
    )  # fmt: skip


def test_names_are_ours_or_those_of_hf():
    assert LoraConfig(2, 4, ("up_proj", "q")).targets == ("q", "up")
    assert LoraConfig(2, 4).targets == LORA_TARGETS
    assert LoraConfig(2, 5).scale == 2.5


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0, 1.0), "lora.rank=0 is below 1"),
        ((1, 0.0), "lora.alpha=0.0 is not a finite number above 0"),
        ((1, float("nan")), "lora.alpha=nan is not a finite number above 0"),
        ((1, 1.0, ("gaet",)), "unknown lora.targets entry 'gaet'; did you mean 'gate'?"),
        ((1, 1.0, ("gates_proj",)), "did you mean 'gate'?"),
        ((1, 1.0, ("embed_tokens",)), "choose one of down, gate"),
        ((1, 1.0, ()), "lora.targets is empty"),
        ((1, 1.0, "q"), "lora.targets='q' is one text"),
    ],
)
def test_settings_that_cannot_work_are_refused(arguments, words):
    with pytest.raises(UserError) as error:
        LoraConfig(*arguments)
    assert words in str(error.value)


# Directories that are not what they should be.


@pytest.fixture(scope="module")
def adapter_dir(tmp_path_factory):
    config = parameters_config()
    path = tmp_path_factory.mktemp("adapter") / "peft"
    peft.save(path, config, SOME, random_adapters(config, SOME))
    return path


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type='IA3'"),
        ({"use_rslora": True}, "sets use_rslora=True"),
        ({"use_dora": True}, "sets use_dora=True"),
        ({"modules_to_save": ["lm_head"]}, "sets modules_to_save=['lm_head']"),
        ({"rank_pattern": {"q_proj": 2}}, "sets rank_pattern="),
        ({"bias": "all"}, "bias='all'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"r": None}, "r=None"),
        ({"target_modules": ".*q_proj"}, "target_modules='.*q_proj'"),
        ({"target_modules": ["v_proj", "lm_head"]}, "unknown lora.targets entry 'lm_head'"),
        ({"target_modules": ["v_proj", "o_proj"]}, "4 adapter tensors have no place"),
        ({"target_modules": ["v_proj", "o_proj", "gate_proj", "up_proj"]}, "4 adapter tensors are"),
        ({"r": 4}, "has shape (3, 16), wanted (4, 16)"),
    ],
)
def test_a_directory_of_another_kind_is_refused(changes, words, adapter_dir, tmp_path):
    shutil.copytree(adapter_dir, tmp_path / "peft")
    file = tmp_path / "peft" / peft.CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(UserError) as error:
        peft.load(tmp_path / "peft", parameters_config())
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_whole_names_of_modules_are_read_as_their_last_parts(adapter_dir, tmp_path):
    """As PEFT writes target_modules='all-linear' of a small model."""
    shutil.copytree(adapter_dir, tmp_path / "peft")
    file = tmp_path / "peft" / peft.CONFIG
    record = json.loads(file.read_text())
    whole = [f"model.layers.{i}.x.{name}" for i in range(2) for name in record["target_modules"]]
    file.write_text(json.dumps(record | {"target_modules": whole}))
    want, got = (peft.load(path, parameters_config()) for path in (adapter_dir, tmp_path / "peft"))
    assert got[0] == want[0]
    jax.tree.map(np.testing.assert_array_equal, got[1], want[1])


def test_missing_and_damaged_files_are_named(adapter_dir, tmp_path):
    config = parameters_config()
    shutil.copytree(adapter_dir, tmp_path / "peft")
    weights = tmp_path / "peft" / peft.WEIGHTS
    save_file({"x": np.zeros(2, np.float32)}, weights)
    with pytest.raises(UserError, match="adapter tensors are missing, first 'base_model"):
        peft.load(tmp_path / "peft", config)
    weights.write_bytes(b"text")
    with pytest.raises(UserError, match="not a whole safetensors file"):
        peft.load(tmp_path / "peft", config)
    weights.unlink()
    with pytest.raises(UserError, match=r"has no adapter_model\.safetensors"):
        peft.load(tmp_path / "peft", config)
    (tmp_path / "peft" / peft.CONFIG).unlink()
    with pytest.raises(UserError, match=r"adapter_config\.json is missing"):
        peft.load(tmp_path / "peft", config)
