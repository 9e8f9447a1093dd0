"""vLLM in real server processes: slices of layers, other families, an engine that dies.

contract_test has what it promises as the JAX engine does.
"""

import asyncio
import shutil
import subprocess
import sys
import warnings
from collections import namedtuple
from contextlib import nullcontext
from types import SimpleNamespace

import grpc
import jax
import jax.numpy as jnp
import numpy as np
import psutil
import pytest
import torch
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from rlx.fleet.requests import Sampling, Timeouts
from rlx.model import hf, kept_tokens, lora, peft
from rlx.model import params as parameters
from rlx.model.lora_config import LoraConfig
from rlx.model.model_config import TRAITS, ModelConfig
from rlx.model.rope import Rope
from tests.fixtures.commands import ended
from tests.fixtures.served import (
    LONG,
    LONG_ATOL,
    Served,
    assert_scored,
    assert_scores,
    long_group,
    prompt_of,
    servers_of,
    teacher,
    until,
    with_weights,
)

pytestmark = pytest.mark.vllm
CODE = grpc.StatusCode


@pytest.fixture(scope="module")
def model(tiny_model_dir):
    return hf.load(tiny_model_dir)


def random_model(path, architecture, source, **options):
    shape = {
        "vocab_size": 128, "num_layers": 2, "model_dim": 64, "mlp_dim": 96, "num_heads": 2,
        "num_kv_heads": 1, "head_dim": 32, "max_position": 512, "initializer_range": 0.1,
        "eos_token_ids": (2,), "pad_token_id": 0,
    }  # fmt: skip
    config = ModelConfig(architecture, **(shape | options))
    hf.save(path, config, parameters.init(config, jax.random.key(1)), source=source)
    return config


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        pytest.param(
            "Qwen3ForCausalLM", {"tie_embeddings": False, "qk_norm": True}, marks=pytest.mark.slow
        ),
        ("LlamaForCausalLM", {"tie_embeddings": True, "vocab_size": 131}),
    ],
)
def test_other_models_before_and_after_an_update(tiny_model_dir, tmp_path, architecture, options):
    """Untied and tied heads, normed queries, a vocabulary that vLLM pads."""
    random_model(tmp_path / "m", architecture, tiny_model_dir, **options)
    model = hf.load(tmp_path / "m")
    weights = tmp_path / "new.safetensors"
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    save_file({name: tensor * np.float32(0.7) for name, tensor in tensors.items()}, weights)
    with servers_of(tmp_path / "m", tmp_path) as servers:
        served = Served(*servers.wait(), servers.token)
        try:
            before = served.ask(prompt_of(1), n=2, max_new_tokens=20)
            served.do(served.load(weights, 1))
            after = served.ask(prompt_of(1), n=2, max_new_tokens=20)
        finally:
            served.close()
    new = with_weights(model, weights)
    for version, wanted, out in ((0, model, before), (1, new, after)):
        for sample in out.values():
            assert set(sample.versions) == {version}
            assert_scored(wanted, prompt_of(1), sample)


def test_requests_with_adapters_side_by_side(tiny_model_dir, tmp_path):
    """Two adapters and the base at once; a changed directory counts; weights stay."""
    random_model(tmp_path / "m", "Qwen3ForCausalLM", tiny_model_dir, qk_norm=True)
    config, base = model = hf.load(tmp_path / "m")

    def adapted(name, rank, seed):
        own = LoraConfig(rank, 32.0)
        pairs = lora.init(config, own, jax.random.key(seed))
        pairs = jax.tree.map(
            lambda x: x + 0.05 * jax.random.normal(jax.random.key(9), x.shape), pairs
        )
        peft.save(tmp_path / name, config, own, pairs)
        return config, lora.merge(base, pairs, own)

    wanted = {
        "": model,
        str(tmp_path / "a"): adapted("a", 4, 1),
        str(tmp_path / "b"): adapted("b", 8, 2),
    }
    options = {"engine_args": "enable_lora=true;max_loras=2;max_lora_rank=8"}
    with servers_of(tmp_path / "m", tmp_path, **options) as servers:
        served = Served(*servers.wait(), servers.token)

        async def all_at_once():
            given = {"n": 2, "max_new_tokens": 20}
            calls = [served.collect(prompt_of(1), adapter=each, **given) for each in wanted]
            return await asyncio.gather(*calls)

        try:
            for each, out in zip(wanted, served.do(all_at_once()), strict=True):
                for sample in out.values():
                    assert_scored(wanted[each], prompt_of(1), sample)
                tokens = np.concatenate([prompt_of(1), out[0].tokens])
                scores = served.do(served.score(tokens, len(prompt_of(1)), adapter=each))
                np.testing.assert_allclose(scores.logprobs, out[0].logprobs, atol=1e-4)
            wanted[str(tmp_path / "a")] = adapted("a", 4, 3)
            (again,) = served.ask(
                prompt_of(1), max_new_tokens=20, adapter=str(tmp_path / "a")
            ).values()
            assert_scored(wanted[str(tmp_path / "a")], prompt_of(1), again)
            for wrong, code in [
                ("/etc", CODE.PERMISSION_DENIED),
                (tmp_path / "c", CODE.INVALID_ARGUMENT),
            ]:
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    served.ask(prompt_of(1), adapter=str(wrong))
                assert refused.value.code() == code
            with pytest.raises(grpc.aio.AioRpcError, match="enable_lora keeps its weights"):
                served.do(served.load(tmp_path / "m" / "model.safetensors", 1))
            (after,) = served.ask(prompt_of(1), max_new_tokens=20).values()
        finally:
            served.close()
    assert_scored(model, prompt_of(1), after)


def test_two_workers_with_a_slice_of_each_layer_are_one_server(tiny_model_dir, tmp_path):
    """Tensor parallel, with biases, one head of keys for both workers and a padded vocabulary."""
    random_model(
        tmp_path / "m", "Qwen2ForCausalLM", tiny_model_dir, attention_bias=True,
        tie_embeddings=False, vocab_size=131,
    )  # fmt: skip
    model = hf.load(tmp_path / "m")
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    tensors = {name: tensor * np.float32(0.7) for name, tensor in tensors.items()}
    good, bad, out = tmp_path / "new.safetensors", tmp_path / "bad.safetensors", {}
    save_file(tensors, good)
    save_file(tensors | {"model.norm.weight": np.full(64, np.nan, np.float32)}, bad)
    prompt = prompt_of(19, 40)
    with servers_of(tmp_path / "m", tmp_path, tensor_parallel=2) as servers:
        served = Served(*servers.wait(), servers.token)
        server = psutil.Process(servers.pids[0])
        (core,) = server.children()
        everyone = [server, core, *core.children()]
        workers = [process for process in everyone if "Worker" in process.name()]

        async def scenario():
            task = long_group(served, prompt, out)
            await until(served, out, 40)
            with pytest.raises(grpc.aio.AioRpcError, match="not finite"):
                await served.load(bad, 1)
            await served.load(good, 2)
            await task
            return await served.score(np.concatenate([prompt, prompt]))

        try:
            scores = served.do(scenario())
        finally:
            served.close()
        server.kill()  # and what it started ends with it
        assert all(ended(process, 60) for process in everyone)
    assert len(workers) == 2
    new, seen = with_weights(model, good), set()
    for sample in out.values():
        versions = np.array(sample.versions)
        seen |= set(versions.tolist())
        old = teacher(model, prompt, sample.tokens)
        here = versions == 0
        np.testing.assert_allclose(np.array(sample.logprobs)[here], old[here], atol=LONG_ATOL)
    assert seen == {0, 2}
    assert scores.version == 2
    assert_scores(new, np.concatenate([prompt, prompt]), scores)


def random_mixture(path, seed):
    """A mixture of 4 experts, 2 a token, written by transformers; returns its model."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        "qwen3_moe", vocab_size=131, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, max_position_embeddings=512,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, decoder_sparse_step=1,
        initializer_range=0.1, eos_token_id=2, pad_token_id=0, bos_token_id=1,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(path)
    return model


def before_and_after(tmp_path, prompt, n, **options):
    """n samples by a server that began with the model in m0, and n after an update to m1's."""
    with servers_of(tmp_path / "m0", tmp_path, **options) as servers:
        served = Served(*servers.wait(), servers.token)
        try:
            found = [served.ask(prompt, n=n, max_new_tokens=40)]
            served.do(served.load(tmp_path / "m1" / "model.safetensors", 1))
            return [*found, served.ask(prompt, n=n, max_new_tokens=40)]
        finally:
            served.close()


def test_tensors_that_old_exporters_wrote_need_no_update(tiny_model_dir, tmp_path):
    """Angles of RoPE, and the tied matrix a second time; the trainer publishes neither."""
    tensors = load_file(tiny_model_dir / "model.safetensors")
    more = {
        "lm_head.weight": tensors["model.embed_tokens.weight"].copy(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(16, np.float32),
    }
    shutil.copytree(tiny_model_dir, tmp_path / "m0")
    save_file(tensors | more, tmp_path / "m0" / "model.safetensors", {"format": "pt"})
    (tmp_path / "m1").mkdir()
    new = tmp_path / "m1" / "model.safetensors"
    save_file({name: tensor * np.float32(0.7) for name, tensor in tensors.items()}, new)
    _, after = before_and_after(tmp_path, prompt_of(23), 1)
    assert_scored(with_weights(hf.load(tiny_model_dir), new), prompt_of(23), after[0])


@pytest.mark.slow
def test_a_mixture_of_experts_on_two_workers_before_and_after_an_update(tmp_path):
    """Transformers' logprobs, and the trainer's; each worker packs its slice of every expert."""
    models = [random_mixture(tmp_path / f"m{version}", version) for version in (0, 1)]
    prompt = prompt_of(23)
    found = before_and_after(tmp_path, prompt, 4, tensor_parallel=2)
    for version, (model, samples) in enumerate(zip(models, found, strict=True)):
        for sample in samples.values():
            assert set(sample.versions) == {version}
            tokens = torch.tensor([*prompt.tolist(), *sample.tokens])
            with torch.no_grad():
                logprobs = model(tokens[None]).logits[0, :-1].log_softmax(dim=-1)
            wanted = logprobs.gather(-1, tokens[1:, None])[len(prompt) - 1 :, 0]
            np.testing.assert_allclose(sample.logprobs, wanted, atol=1e-4)
            assert_scored(hf.load(tmp_path / f"m{version}"), prompt, sample)


SIZES = {
    "vocab_size": 131, "num_layers": 2, "model_dim": 64, "mlp_dim": 96, "num_heads": 2,
    "num_kv_heads": 1, "head_dim": 32, "max_position": 512, "initializer_range": 0.1,
    "eos_token_ids": (2,), "pad_token_id": 0, "bos_token_id": 1,
}  # fmt: skip
OTHERS = {
    "gemma2": ModelConfig(
        "Gemma2ForCausalLM", **SIZES, windows=(16, 0), query_scalar=20, attention_softcap=2.0,
        logit_softcap=3.0, activation="gelu_pytorch_tanh", tie_embeddings=True,
        **TRAITS["Gemma2ForCausalLM"],
    ),
    "phi3": ModelConfig(
        "Phi3ForCausalLM", **SIZES, windows=(16, 16), fused=True, rope=Rope(
            "longrope", factor=16.0, original_max_position_embeddings=32, long=True,
            short_factor=(1.0,) * 16, long_factor=tuple(1.0 + i / 4 for i in range(16))),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_other_families_before_and_after_an_update(name, tmp_path):
    """The trainer's own logprobs, of completions that outgrow the window."""
    config, models = OTHERS[name], []
    for version in (0, 1):
        params = parameters.init(config, jax.random.key(version))
        params = jax.tree.map(
            lambda x: x + 0.05 * jnp.sin(jnp.arange(x.size)).reshape(x.shape), params
        )
        hf.save(tmp_path / f"m{version}", config, params)
        models.append((config, params))
    prompt = prompt_of(23)
    found = before_and_after(tmp_path, prompt, 2)
    for version, (model, samples) in enumerate(zip(models, found, strict=True)):
        for sample in samples.values():
            assert set(sample.versions) == {version}
            assert_scored(model, prompt, sample)


def engine_core(server_pid):
    """The EngineCore process of a server."""
    (core,) = psutil.Process(server_pid).children(recursive=True)
    return core


def test_an_engine_that_is_killed_leaves_its_tokens_and_ends_the_server(
    tiny_model_dir, tmp_path, model
):
    with servers_of(tiny_model_dir, tmp_path) as servers:
        served = Served(*servers.wait(), servers.token)
        pid, out = servers.pids[0], {}
        server, core = psutil.Process(pid), engine_core(pid)

        async def scenario():
            for stops in ((4000,), (-3,)):  # refused, without harm to the engine
                with pytest.raises(grpc.aio.AioRpcError, match="vLLM does not take") as caught:
                    await served.collect(prompt_of(1), seed=1 << 62, stop_token_ids=stops)
                assert caught.value.code() is CODE.INVALID_ARGUMENT
            task = long_group(served, prompt_of(18, 40), out)
            await until(served, out, 40)
            core.kill()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await task
            return caught.value.code()

        try:
            assert served.do(scenario()) is CODE.UNAVAILABLE
        finally:
            served.close()
        assert ended(server), "a server without an engine must end"
        for sample in out.values():
            assert set(sample.versions) <= {0}
            assert sample.stop is None
            assert_scored(model, prompt_of(18, 40), sample, atol=LONG_ATOL)


def test_an_exchange_that_fails_half_way_ends_the_engine(tiny_model_dir, tmp_path, model):
    """Else new weights, or some of them, are served as the old version's."""
    flag, script = tmp_path / "fail", tmp_path / "serve.py"
    script.write_text(f"""
import os, sys
from rlx import serve
from rlx.engines.vllm.vllm_engine import VllmEngine
whole = VllmEngine._call_workers
async def call(self, method, *args):
    found = await whole(self, method, *args)
    if method == "rlx_exchange" and os.path.exists({str(flag)!r}):
        os.remove({str(flag)!r})
        await whole(self, method)  # raises in the worker: nothing is staged any more
    return found
VllmEngine._call_workers = call
if __name__ == "__main__":
    from rlx.cli import command
    command.run(lambda: serve.main(sys.argv[1:]), teardown=False)
""")
    new = {k: v * 1.5 for k, v in load_file(tiny_model_dir / "model.safetensors").items()}
    prompt, out = prompt_of(18, 40), []
    limits = Timeouts(probe_seconds=0.1, backoff=0.2, connect_seconds=60)
    with servers_of(tiny_model_dir, tmp_path, command=(sys.executable, str(script))) as servers:
        fleet = servers.fleet(limits=limits)

        async def main():
            await fleet.connect()
            first = servers.pids[0]
            flag.touch()
            asking = asyncio.create_task(
                fleet.generate(prompt, Sampling(seed=1, max_new_tokens=LONG), 4, watch=out.append)
            )
            while len(out) < 8:
                await asyncio.sleep(0.01)
            await fleet.publish(1, new)
            done = await asking
            assert servers.pids[0] != first
            await fleet.close()
            return done

        done = asyncio.run(asyncio.wait_for(main(), 240))
    config = model[0]
    models = [model, (config, hf.from_hf(new, config, jnp.float32))]
    for sample in done:
        for version in set(sample.versions.tolist()):
            wanted = teacher(models[version], prompt, sample.tokens)
            own = sample.versions == version
            np.testing.assert_allclose(sample.logprobs[own], wanted[own], atol=LONG_ATOL)
    assert {v for sample in done for v in sample.versions.tolist()} == {0, 1}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("max_num_batched_token=64", "did you mean 'max_num_batched_tokens'"),
        ("max_num_seqs=4", "which rlx sets itself"),
        ("max_num_batched_tokens=64", "max_num_batched_tokens (64) is smaller than max_model_len"),
    ],
)
def test_arguments_of_vllm_reach_it_or_are_refused(tiny_model_dir, given, said):
    command = (sys.executable, "-m", "rlx.serve", f"--model={tiny_model_dir}", "--engine=vllm")
    flags = ("--max-model-len=96", f"--engine-args={given}")
    found = subprocess.run((*command, *flags), capture_output=True, text=True, timeout=120)
    assert found.returncode == 2
    assert said in found.stderr


@pytest.mark.parametrize(
    ("free_gb", "kept_gb", "ranks", "where"),
    [(5, 0, 1, "device"), (3, 2, 1, "device"), (3, 0, 1, "pinned"), (50, 0, 2, "pinned")],
)
def test_weights_are_staged_on_a_gpu_that_has_room_or_in_pinned_memory(
    monkeypatch, free_gb, kept_gb, ranks, where
):
    # The driver counts what the allocator keeps as used. Fakes stand for both.
    with warnings.catch_warnings(action="ignore"):  # of torch, at vLLM's imports
        from rlx.engines.vllm import vllm_worker

    kept = {"memory_reserved": kept_gb << 30, "memory_allocated": 0, "set_device": None}
    kept |= {"Stream": SimpleNamespace(synchronize=lambda: None), "stream": nullcontext()}
    for name, value in (kept | {"mem_get_info": (free_gb << 30, 80 << 30)}).items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(vllm_worker, "get_tensor_model_parallel_world_size", lambda: ranks)
    worker = vllm_worker.RolloutWorker()
    worker.device, worker._copies = torch.device("meta"), None  # moves nothing
    given = {"w": torch.empty(1 << 30, dtype=torch.bfloat16)}  # 2 GB, never touched
    found = worker._on_gpu(given, torch.bfloat16)["w"]
    assert found.device.type == {"device": "meta", "pinned": "cpu"}[where]


def test_a_chunk_may_have_steps_with_and_without_masks():
    """As a sample that has its least number of tokens; 276 is no multiple of 32."""
    from rlx.engines.vllm.vllm_engine import _Sample

    sample = _Sample(0, SimpleNamespace(), asyncio.Event())
    sample.vocab = 276
    sample.new.tokens.extend([1, 2])
    words = np.full((1, 9), -1, np.int32)
    words[0, 0] = ~1  # token 0 was left out
    cut, whole = np.zeros((1, 2), np.float32), np.zeros((1, 1), np.float32)
    made = namedtuple("Made", ["logprobs", "logprob_token_ids"])
    sample._unmasked(made(cut, np.hstack([np.zeros((1, 2), np.int32), words])), 1)
    sample._unmasked(made(whole, np.zeros((1, 1), np.int32)), 1)
    chunk = sample.drain()
    found = kept_tokens.masks(np.frombuffer(chunk.kept, np.uint8), np.array(chunk.kept_sizes), 276)
    assert found.sum(1).tolist() == [275, 276]
