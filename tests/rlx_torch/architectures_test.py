"""Decoders that rlx has not: packed rows in them, what is refused, and what is published."""

import json

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from rlx.base import UserError
from rlx.config import default
from rlx.model import directory, hf
from rlx.model import params as parameters
from rlx.model.model_config import ModelConfig
from rlx.run.inputs import check_context
from rlx.run.room_options import RunOptions
from rlx.train.update import JaxUpdate
from rlx_torch import packed_model
from rlx_torch.update import TorchUpdate
from tests.rlx_torch.update_test import groups, options, weights

SIZES = (19, 2, 23)  # tokens of packed sequences, longer and shorter than a window
SMALL = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0,
    "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
KINDS = {
    "qwen3_moe": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
        "decoder_sparse_step": 1,
    },
    "gemma2": {
        "sliding_window": 7, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gpt_oss": {  # sinks
        "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 7,
        "max_position_embeddings": 4096,
    },
    "gpt_neox": {},
    "granite": {"logits_scaling": 4.0},
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Returns a directory of a random model of a kind, and the model, by transformers' own code."""
    found = {}

    def make(kind):
        if kind not in found:
            torch.manual_seed(0)
            config = AutoConfig.for_model(kind, **{**SMALL, **KINDS[kind]})
            model = AutoModelForCausalLM.from_config(
                config, dtype=torch.float32, attn_implementation="eager"
            ).eval()
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(torch.randn_like(p) * p.abs().mean())
            path = tmp_path_factory.mktemp(kind)
            model.save_pretrained(path)
            found[kind] = path, model
        return found[kind]

    return make


@pytest.mark.parametrize("kind", KINDS)
def test_packed_logprobs_are_those_of_each_sequence_alone(kind, made):
    path, own = made(kind)
    model = packed_model.load(path, "cpu", "float32")
    packed_model.require_packed(model)
    tokens = np.random.default_rng(0).integers(3, 128, sum(SIZES), dtype=np.int32)
    arrays = {
        "tokens": tokens[None],
        "positions": np.concatenate([np.arange(n, dtype=np.int32) for n in SIZES])[None],
        "segment_ids": np.repeat(np.arange(1, 4, dtype=np.int32), SIZES)[None],
    }
    packed = packed_model.put(arrays, "cpu")
    found = packed_model.logprobs(model, packed, temperature=0.8, chunk=16)[0]
    found.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    for got, part in zip(found[0].split(SIZES), packed["tokens"][0].split(SIZES), strict=True):
        with torch.no_grad():
            want = torch.log_softmax(own(part[None].long()).logits[0] / 0.8, -1)[:-1]
        want = want.gather(1, part[1:, None].long())[:, 0]
        np.testing.assert_allclose(got[1:].detach(), want, atol=1e-5)


def test_only_tokens_that_are_trained_on_have_logits(made):
    model = packed_model.load(made("granite")[0], "cpu", "float32")
    arrays = {
        "tokens": np.arange(3, 3 + sum(SIZES), dtype=np.int32)[None],
        "positions": np.concatenate([np.arange(n, dtype=np.int32) for n in SIZES])[None],
        "segment_ids": np.repeat(np.arange(1, 4, dtype=np.int32), SIZES)[None],
    }
    mask = np.arange(sum(SIZES))[None] % 3 == 0
    rows = []
    model.get_output_embeddings().register_forward_hook(lambda _, given, __: rows.append(given[0]))

    def found(**more):
        packed = packed_model.put({**arrays, **more}, "cpu")
        return packed_model.logprobs(model, packed, temperature=0.8, chunk=4096)

    for all_of_them, some in zip(found(), found(loss_mask=mask), strict=True):
        torch.testing.assert_close(some, all_of_them * torch.from_numpy(mask))
    begins = (arrays["positions"] == 0) & mask
    assert [len(x) for x in rows] == [sum(SIZES) - len(SIZES), mask.sum() - begins.sum()]
    assert begins.any()
    nothing = found(loss_mask=np.zeros_like(mask))[0]  # but the head is called, with one token
    assert len(rows[-1]) == 1
    assert np.count_nonzero(nothing.detach()) == 1


def test_an_update_of_a_mixture_of_experts_is_that_of_jax_by_the_names_of_its_files(made):
    """What both make of the weights, which is the gradient times the rate, and their metrics."""
    path, _ = made("qwen3_moe")
    model = directory.load_config(path)
    trainer = TorchUpdate(model, options(), path)
    state = trainer.init()
    stored = load_file(path / "model.safetensors")
    before = weights(trainer, state)
    assert {k: (v.shape, v.tobytes()) for k, v in before.items()} == {
        k: (v.shape, v.tobytes()) for k, v in stored.items()
    }
    assert parameters.count(model) == sum(x.size for x in stored.values())
    other = JaxUpdate(model, options(), source=lambda _: hf.load(path)[1])
    wanted, want = other.update(other.init(), groups())
    state, metrics = trainer.update(state, groups())
    assert metrics["skipped_updates"] == 0
    for name in ("grad_norm", "actor_loss", "entropy", "lag_kl"):
        assert metrics[name] == pytest.approx(want[name], rel=1e-3, abs=1e-5), name
    assert want["grad_norm"] > 0
    assert sum(want["expert_load"].values()) == pytest.approx(1)
    after, wanted = weights(trainer, state), weights(other, wanted)
    assert set(after) == set(wanted)
    changes = {name: np.abs(x - before[name]).max() for name, x in wanted.items()}
    for name, x in after.items():
        assert np.abs(x - wanted[name]).max() <= 1e-3 * max(changes.values()), name
    assert changes["model.layers.1.mlp.gate.weight"] > 0


def test_a_reward_model_of_a_mixture_has_the_names_of_its_files(made):
    path, _ = made("qwen3_moe")
    trainer = TorchUpdate(directory.load_config(path), options("reward_model"), path)
    stored, found = load_file(path / "model.safetensors"), weights(trainer, trainer.init())
    assert {*found} == {*stored, "score.weight"} - {"lm_head.weight"}
    assert all(np.array_equal(found[name], stored[name]) for name in {*found} - {"score.weight"})


def test_layers_are_compiled_whatever_the_decoder_calls_them(tmp_path, monkeypatch):
    own = AutoConfig.for_model("gpt2", vocab_size=128, n_embd=32, n_layer=2, n_head=4)
    AutoModelForCausalLM.from_config(own).save_pretrained(tmp_path)
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **_: compiled.append(self))
    given = options(**{"train.compile": True})
    state = TorchUpdate(directory.load_config(tmp_path), given, tmp_path).init()
    assert compiled == list(state.policy.model.transformer.h)


def test_what_no_packed_row_can_enter_is_refused(tmp_path, made):
    config = AutoConfig.for_model("mamba", vocab_size=128, hidden_size=32, num_hidden_layers=2)
    config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"MambaForCausalLM has layers of .*only attention"):
        packed_model.empty(tmp_path)
    model = packed_model.load(made("granite")[0], "cpu", "float32")
    model.config.logits_scaling = 1.0  # as of a model that scales in a way of its own
    type(model).forward, forward = (
        lambda self, **k: _halved(forward(self, **k)), type(model).forward,
    )  # fmt: skip
    try:
        with pytest.raises(UserError, match="other log-probabilities to packed sequences than"):
            packed_model.require_packed(model)
    finally:
        type(model).forward = forward


def _halved(out):
    out.logits = out.logits / 2
    return out


def test_a_foreign_model_is_for_torch_and_vllm_alone(made):
    path, _ = made("granite")
    model = directory.check(path)
    assert (model.max_position, model.vocab_size, model.eos_token_ids) == (256, 128, (2,))
    assert model.to_hf() == json.loads((path / "config.json").read_text())
    with pytest.raises(UserError, match=r"unsupported .*trainer=torch with fleet.engine=vllm"):
        model.require_ours("trainer=jax")
    with pytest.raises(UserError, match="unsupported"), hf.open_tensors(path) as tensors:
        directory.check_tensors(tensors, model)


def test_mlps_and_mixtures_by_turns_are_for_torch_and_vllm_alone(tmp_path):
    for key, value in {"mlp_only_layers": [1], "decoder_sparse_step": 2}.items():
        given = {**SMALL, **KINDS["qwen3_moe"], key: value}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_moe", **given))
        model.save_pretrained(tmp_path / key)
        found = directory.check(tmp_path / key)
        with pytest.raises(UserError, match=rf"option {key}=.*trainer=torch with fleet.engine=vll"):
            found.require_ours("trainer=jax")
        packed_model.require_packed(packed_model.load(tmp_path / key, "cpu", "float32"))


def test_experts_too_narrow_for_torchs_product_are_refused_before_it(tmp_path):
    config = AutoConfig.for_model("qwen3_moe", **SMALL, **KINDS["qwen3_moe"] | {
        "moe_intermediate_size": 10, "architectures": ["Qwen3MoeForCausalLM"]})  # fmt: skip
    config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"moe_intermediate_size=10.*multiple of 4.*trainer=jax"):
        packed_model.packable_config(tmp_path)


def test_longrope_beyond_its_original_context_is_not_for_torch():
    """The factors that servers have there transformers takes for longer batches alone."""
    rope = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    hf = {
        **SMALL,
        "model_type": "phi3",
        "rope_scaling": rope,
        "original_max_position_embeddings": 64,
    }
    foreign = hf | {"model_type": "new", "architectures": ["NewForCausalLM"]}
    config = default()
    config.data.max_prompt_tokens, config.sampling.max_new_tokens = 32, 32
    config.eval.max_new_tokens = 32
    for model in (ModelConfig.from_hf(hf), ModelConfig.from_foreign(foreign, "why", 0)):
        config.trainer, config.fleet.max_model_len = "torch", 64
        check_context(config, model, RunOptions.of(config))
        config.fleet.max_model_len = 65
        with pytest.raises(UserError, match=r"longrope with up to 65 tokens.* within 64 tokens"):
            check_context(config, model, RunOptions.of(config))
        config.trainer = "jax"
        check_context(config, model, RunOptions.of(config))


def test_a_file_that_tells_no_context_is_one_line(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["NewForCausalLM"]}))
    save_file({"a": np.zeros(2, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="has no 'num_attention_heads'"):
        directory.load_config(tmp_path)
