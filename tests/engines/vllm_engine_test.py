"""The vLLM engine, in real server processes: what it promises, scored by the trainer's decoder."""

import asyncio
import os
import sys
import threading
import time
from functools import partial
from pathlib import Path
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

from rlx.fleet import publish, wire
from rlx.fleet import rollout_pb2 as pb
from rlx.fleet import rollout_pb2_grpc as rpc
from rlx.fleet.client import Timeouts
from rlx.fleet.requests import Request, Sampling, ScoreRequest
from rlx.launch.local import CpuPlan, LocalServers
from rlx.model import decoder, hf
from rlx.model import params as parameters
from rlx.model.model_config import TRAITS, ModelConfig
from rlx.model.rope_config import Rope
from tests.fixtures.commands import ended

pytestmark = pytest.mark.vllm

MAX_LEN = 384
LONG = 240  # tokens: many times what is generated while the client hears of the first ones
LONG_ATOL = 5e-4  # nats; float32 after hundreds of tokens
CODE = grpc.StatusCode


class Served:
    """One `rlx.serve --engine=vllm`, and calls to it from the test's own thread."""

    def __init__(self, address, token):
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.channel = self.do(self._connect(address))
        self.stub, known = rpc.RolloutStub(self.channel), (("authorization", f"Bearer {token}"),)
        for name, call in vars(self.stub).items():
            setattr(self.stub, name, partial(call, metadata=known))

    async def _connect(self, address):
        return grpc.aio.insecure_channel(address, options=wire.OPTIONS)

    def do(self, coroutine, timeout=120):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout)

    def close(self):
        self.do(self.channel.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    async def collect(self, prompt, n=1, first_index=0, prefix_len=0, out=None, **sampling):
        """{sample index: namespace of tokens, logprobs, versions, stop} of one request."""
        request = Request(
            "r", np.asarray(prompt, np.int32), Sampling(**sampling), n, first_index, prefix_len
        )
        out = {} if out is None else out
        async for reply in self.stub.Generate(wire.request_message(request), timeout=60):
            for chunk in wire.chunks_from(reply):
                sample = out.setdefault(
                    chunk.index, SimpleNamespace(tokens=[], logprobs=[], versions=[], stop=None)
                )
                assert sample.stop is None
                sample.tokens += chunk.tokens.tolist()
                sample.logprobs += chunk.logprobs.tolist()
                sample.versions += chunk.versions.tolist()
                sample.stop = chunk.stop_reason
        return out

    def ask(self, prompt, n=1, **options):
        return self.do(self.collect(prompt, n, **options))

    async def score(self, tokens, first=1, temperature=1.0):
        request = ScoreRequest(np.asarray(tokens, np.int32), first, temperature)
        return wire.scores_from(
            await self.stub.Score(wire.score_message(request), timeout=60), request
        )

    async def load(self, path, version, kv=pb.KEEP):
        header = pb.PublishHeader(
            version=version, path=str(path), num_bytes=os.path.getsize(path),
            crc32=publish.checksum(path), kv=kv,
        )  # fmt: skip
        return await self.stub.Publish(iter([pb.PublishRequest(header=header)]), timeout=60)

    async def status(self):
        return await self.stub.Status(pb.StatusRequest(), timeout=30)


def servers_of(model, workdir, num_servers=1, **options):
    cores = sorted(os.sched_getaffinity(0))
    plan = CpuPlan((cores[0],), tuple((cores[-1 - i % len(cores)],) for i in range(num_servers)))
    defaults = {"slots": 12, "max_model_len": MAX_LEN, "engine": "vllm"}
    return LocalServers(
        model, workdir=workdir, plan=plan, weight_roots=("/dev/shm", str(workdir)),
        **{**defaults, **options},
    )  # fmt: skip


@pytest.fixture(scope="module")
def two(tiny_model_dir, tmp_path_factory):
    """Two servers of one model, for everything that leaves them as they were."""
    with servers_of(tiny_model_dir, tmp_path_factory.mktemp("vllm"), 2) as servers:
        served = [Served(address, servers.token) for address in servers.wait()]
        yield served
        for each in served:
            each.close()


@pytest.fixture(scope="module")
def running(two):
    return two[0]


@pytest.fixture(scope="module")
def changing(two, tiny_model_dir):
    """The second one: its weights may change, and are put back by `original`."""
    return two[1]


@pytest.fixture
def original(changing, tiny_model_dir, tmp_path):
    """Weights of version 0 before the test, whatever the tests before it published."""
    path = tmp_path / "original.safetensors"
    path.write_bytes((tiny_model_dir / "model.safetensors").read_bytes())
    copy = shared(path)
    changing.do(changing.load(copy, 0, pb.RECOMPUTE))
    yield copy
    Path(copy).unlink()


def shared(path):
    """A copy of `path` where the servers' weight roots allow it."""
    target = Path("/dev/shm") / f"rlx-test-{os.getpid()}-{time.monotonic_ns()}.safetensors"
    target.write_bytes(Path(path).read_bytes())
    return str(target)


@pytest.fixture
def changed(tiny_model_dir):
    """Writes changed weights where the servers may read them; `(path, model)` of each."""
    made = []

    def change(edit=lambda tensors: None, factor=0.5):
        tensors = load_file(tiny_model_dir / "model.safetensors")
        tensors = {name: tensor * np.float32(factor) for name, tensor in tensors.items()}
        tensors = edit(tensors) or tensors
        path = f"/dev/shm/rlx-test-{os.getpid()}-{len(made)}-{time.monotonic_ns()}.safetensors"
        save_file(tensors, path)
        made.append(path)
        return path

    yield change
    for path in made:
        os.unlink(path)


@pytest.fixture(scope="module")
def model(tiny_model_dir):
    return hf.load(tiny_model_dir)


def with_weights(model, path):
    config, _ = model
    return config, hf.from_hf(load_file(path), config, jnp.float32)


def prompt_of(seed, length=10):
    return np.random.default_rng(seed).integers(3, 99, length).astype(np.int32)


def teacher(model, prompt, completion, temperature=1.0):
    """Logprobs of the completion by the trainer's forward pass."""
    config, params = model
    tokens = np.concatenate([prompt, completion]).astype(np.int32)[None]
    tokens = np.pad(tokens, ((0, 0), (0, MAX_LEN - tokens.shape[1])))
    batch = {
        "tokens": tokens,
        "positions": np.arange(MAX_LEN, dtype=np.int32)[None],
        "segment_ids": np.ones((1, MAX_LEN), np.int32),
    }
    run = jax.jit(decoder.logprobs, static_argnums=1, static_argnames="temperature")
    logprobs, _ = run(params, config, batch, temperature=temperature)
    return np.asarray(logprobs)[0, len(prompt) : len(prompt) + len(completion)]


def assert_scored(model, prompt, sample, temperature=1.0, atol=1e-4):
    wanted = teacher(model, prompt, sample.tokens, temperature)
    np.testing.assert_allclose(sample.logprobs, wanted, atol=atol)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 1.3, "top_p": 0.6},
        {"temperature": 0.7, "top_k": 3, "min_new_tokens": 20},
        {"temperature": 0.7, "stop_token_ids": (7, 8)},
    ],
)
def test_logprobs_are_the_tempered_ones_of_the_whole_vocabulary(running, model, options):
    prompt = prompt_of(1)
    out = running.ask(prompt, n=4, seed=3, max_new_tokens=30, **options)
    assert sorted(out) == [0, 1, 2, 3]
    for sample in out.values():
        assert set(sample.versions) == {0}
        assert_scored(model, prompt, sample, options.get("temperature", 1.0))


def test_greedy_is_the_argmax_with_untempered_logprobs(running, model):
    prompt = prompt_of(2)
    (sample,) = running.ask(prompt, temperature=0.0, max_new_tokens=12).values()
    assert_scored(model, prompt, sample)
    (again,) = running.ask(prompt, temperature=0.0, max_new_tokens=12, seed=5).values()
    assert again.tokens == sample.tokens

    async def both():
        greedy = {"temperature": 0.0, "max_new_tokens": 12}
        calls = (running.collect(prompt, **greedy, unscored=no) for no in (True, False))
        return await asyncio.gather(*calls)

    (unscored,), (scored,) = (found.values() for found in running.do(both()))
    assert unscored.tokens == scored.tokens == sample.tokens
    assert np.isnan(unscored.logprobs).all()
    np.testing.assert_allclose(scored.logprobs, sample.logprobs, atol=1e-4)
    for k in range(len(sample.tokens)):  # no other token is likelier
        others = [
            teacher(model, prompt, [*sample.tokens[:k], token])[-1] for token in range(0, 128, 9)
        ]
        assert sample.logprobs[k] > max(others) - 1e-4


def test_greedy_and_drawn_samples_in_one_batch_keep_their_own_logprobs(running, model):
    async def both():
        calls = [
            running.collect(prompt_of(4), temperature=t, max_new_tokens=40, min_new_tokens=40)
            for t in (0.0, 0.5, 1.5)
        ]
        return await asyncio.gather(*calls)

    for (sample,), temperature in zip(
        (out.values() for out in running.do(both())), (1.0, 0.5, 1.5), strict=True
    ):
        assert_scored(model, prompt_of(4), sample, temperature)


def test_seeds(two):
    prompt = prompt_of(3)
    first, second = (server.ask(prompt, n=3, seed=9, max_new_tokens=20) for server in two)
    assert {i: s.tokens for i, s in first.items()} == {i: s.tokens for i, s in second.items()}
    assert len({tuple(sample.tokens) for sample in first.values()}) == 3
    one = two[0].ask(prompt, n=1, first_index=2, seed=9, max_new_tokens=20)
    assert one[2].tokens == first[2].tokens
    # Without one, every server draws its own: vLLM's engines all begin with seed 0.
    free = [server.ask(prompt, n=2, max_new_tokens=20) for server in two]
    drawn = {tuple(sample.tokens) for out in free for sample in out.values()}
    assert len(drawn) == 4


def test_budgets_and_ends(running):
    prompt = prompt_of(5)
    (sample,) = running.ask(prompt, max_new_tokens=5, min_new_tokens=5).values()
    assert (len(sample.tokens), sample.stop) == (5, "length")
    long = prompt_of(5, MAX_LEN - 4)
    (sample,) = running.ask(long, max_new_tokens=50, min_new_tokens=50).values()
    assert (len(sample.tokens), sample.stop) == (4, "length"), "the context is the other budget"
    out = running.ask(prompt, n=12, max_new_tokens=60, stop_token_ids=(11, 12, 13, 14, 15, 2))
    stopped = [sample for sample in out.values() if sample.stop == "stop"]
    assert stopped
    for sample in stopped:
        assert sample.tokens[-1] in (2, 11, 12, 13, 14, 15)
        assert not set(sample.tokens[:-1]) & {2, 11, 12, 13, 14, 15}


def test_stop_strings_end_a_completion_and_are_kept(running, tiny_model_dir):
    from rlx.engines.stop_strings import load_decode

    decode = load_decode(tiny_model_dir)
    prompt = prompt_of(6)
    seeds = ((seed, running.ask(prompt, seed=seed, max_new_tokens=40)[0]) for seed in range(50))
    seed, whole = next((seed, sample) for seed, sample in seeds if len(sample.tokens) > 20)
    stop = decode(whole.tokens)[10:12]
    (sample,) = running.ask(prompt, seed=seed, max_new_tokens=40, stop=(stop,)).values()
    assert sample.stop == "stop"
    assert sample.tokens == whole.tokens[: len(sample.tokens)]
    assert stop in decode(sample.tokens)
    assert stop not in decode(sample.tokens[:-1])
    assert len(sample.tokens) == len(sample.logprobs) == len(sample.versions)
    running.do(_idle(running))


def assert_scores(model, tokens, scores, first=1, temperature=1.0):
    wanted = teacher(model, tokens[:first], tokens[first:], temperature)
    assert scores.logprobs.shape == wanted.shape
    np.testing.assert_allclose(scores.logprobs, wanted, atol=1e-4)


@pytest.mark.parametrize("length", [2, 3, 40, 257, 258, 259, MAX_LEN])
def test_scores_are_the_trainers_logprobs(running, model, length):
    tokens = np.random.default_rng(length).integers(0, 128, length).astype(np.int32)
    for first in {1, (length + 1) // 2, length - 1}:
        for temperature in (1.0, 0.7):
            scores = running.do(running.score(tokens, first, temperature))
            assert scores.version == 0
            assert_scores(model, tokens, scores, first, temperature)


def test_scores_beside_generation_at_other_temperatures_keep_their_own(running, model):
    """vLLM's sampler makes them, fresh from the batch of as many rows as some prompts have."""
    prompts = [prompt_of(20 + length, length) for length in range(2, 12)]

    async def together():
        calls = [
            running.collect(prompt_of(9), seed=k, temperature=0.5, max_new_tokens=60,
                            min_new_tokens=60)
            for k in range(4)
        ]  # fmt: skip
        scores = [running.score(prompt, 1, t) for prompt in prompts for t in (1.0, 1.4)]
        return await asyncio.gather(*scores, *calls)

    *scores, _, _, _, sampled = running.do(together())
    for k, prompt in enumerate(prompts):
        assert_scores(model, prompt, scores[2 * k])
        assert_scores(model, prompt, scores[2 * k + 1], 1, 1.4)
    assert_scored(model, prompt_of(9), sampled[0], 0.5)


def test_a_completion_scores_its_behaviour_logprobs_also_where_its_prefix_is_cached(running):
    prompt = prompt_of(10, 200)
    sample = running.ask(prompt, seed=2, max_new_tokens=60, min_new_tokens=60)[0]
    for _ in range(2):
        scores = running.do(running.score([*prompt, *sample.tokens], 200))
        np.testing.assert_allclose(scores.logprobs, sample.logprobs, atol=1e-4)
    whole = running.do(running.score([*prompt, *sample.tokens]))
    np.testing.assert_allclose(whole.logprobs[199:], sample.logprobs, atol=1e-4)
    status = running.do(running.status())
    assert (status.running, status.queued) == (0, 0)


@pytest.mark.parametrize("kv", [pb.KEEP, pb.RECOMPUTE, pb.ABORT_AND_RESEND])
def test_scores_during_an_update_are_of_one_version_and_say_which(
    changing, original, changed, model, kv
):
    path, tokens = changed(factor=0.6), prompt_of(11, MAX_LEN)
    models = {0: model, 1: with_weights(model, path)}

    async def during():
        scores = [asyncio.create_task(changing.score(tokens)) for _ in range(30)]
        await scores[0]
        await changing.load(path, 1, kv)
        return await asyncio.gather(*scores, changing.score(tokens))

    found = changing.do(during())
    assert (found[0].version, found[-1].version) == (0, 1)
    for scores in found:
        assert_scores(models[scores.version], tokens, scores)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [([5, 128], "out of the vocabulary"), ([5] * (MAX_LEN + 1), "385 tokens, max_model_len=384")],
)
def test_bad_sequences_are_refused(running, tokens, message):
    with pytest.raises(grpc.aio.AioRpcError, match=message) as caught:
        running.do(running.score(tokens))
    assert caught.value.code() is CODE.INVALID_ARGUMENT


async def _idle(served):
    async with asyncio.timeout(20):
        while (status := await served.status()).running or status.queued:
            await asyncio.sleep(0.02)


def test_a_continued_completion_goes_on_from_its_tokens(running, model):
    prompt = prompt_of(7)
    options = {"seed": 4, "max_new_tokens": 30, "min_new_tokens": 30}
    whole = running.ask(prompt, **options)[0]
    longer = np.concatenate([prompt, whole.tokens[:12]])
    rest = running.ask(longer, prefix_len=12, **options)[0]
    assert (len(rest.tokens), rest.stop) == (18, "length")
    joined = SimpleNamespace(
        tokens=whole.tokens[:12] + rest.tokens, logprobs=whole.logprobs[:12] + rest.logprobs
    )
    assert_scored(model, prompt, joined)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([5, 128], {}, "out of the vocabulary"),
        ([-1], {}, "out of the vocabulary"),
        ([5] * MAX_LEN, {}, "leaves no room"),
        ([5], {"stop_token_ids": (4000,)}, "vLLM does not take"),
        ([5], {"seed": 1 << 62, "stop_token_ids": (-3,)}, "vLLM does not take"),
    ],
)
def test_bad_requests_are_refused_and_harm_nothing(running, prompt, options, message):
    with pytest.raises(grpc.aio.AioRpcError, match=message) as caught:
        running.ask(np.array(prompt), **options)
    assert caught.value.code() is CODE.INVALID_ARGUMENT
    assert len(running.ask(prompt_of(1), max_new_tokens=3, min_new_tokens=3)[0].tokens) == 3


def test_closing_a_stream_ends_its_samples(running):
    async def begin_and_leave():
        task = asyncio.create_task(running.collect(prompt_of(8), n=20, min_new_tokens=200))
        while (await running.status()).running < 2:
            await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    running.do(begin_and_leave())
    running.do(_idle(running))


def long_group(served, prompt, out, n=8):
    return asyncio.create_task(
        served.collect(prompt, n=n, seed=1, out=out, max_new_tokens=LONG, min_new_tokens=LONG)
    )


async def until(served, out, tokens):
    async with asyncio.timeout(30):
        while sum(len(sample.tokens) for sample in out.values()) < tokens:
            await asyncio.sleep(0.002)


@pytest.mark.usefixtures("original")
@pytest.mark.parametrize("kv", [pb.KEEP, pb.RECOMPUTE])
def test_weights_change_in_flight(changing, model, changed, kv):
    """The embedding, which is also the head, and everything else is the new version's at once."""
    prompt, path, out = prompt_of(12, 40), changed(), {}

    async def scenario():
        task = long_group(changing, prompt, out)
        await until(changing, out, 40)
        reply = await changing.load(path, 5, kv)
        assert reply.paused_ns > 0
        assert (await changing.status()).version == 5
        return await task

    changing.do(scenario())
    new, seen = with_weights(model, path), set()
    for sample in out.values():
        versions = np.array(sample.versions)
        seen |= set(versions.tolist())
        assert (np.diff(versions) >= 0).all()
        logprobs = np.array(sample.logprobs)
        old = teacher(model, prompt, sample.tokens)
        np.testing.assert_allclose(logprobs[versions == 0], old[versions == 0], atol=LONG_ATOL)
        error = np.abs(logprobs - teacher(new, prompt, sample.tokens))[versions == 5]
        assert (error.max() < LONG_ATOL) == (kv == pb.RECOMPUTE)
    assert seen == {0, 5}


@pytest.mark.usefixtures("original")
def test_aborted_requests_say_so_and_keep_their_tokens(changing, model, changed):
    prompt, path, out = prompt_of(13, 40), changed(), {}

    async def scenario():
        task = long_group(changing, prompt, out, n=16)
        await until(changing, out, 40)
        await changing.load(path, 6, pb.ABORT_AND_RESEND)
        return await task

    changing.do(scenario())
    changing.do(_idle(changing))
    assert {sample.stop for sample in out.values()} == {"abort"}
    for sample in out.values():
        assert set(sample.versions) <= {0}
        assert_scored(model, prompt, sample, atol=LONG_ATOL)


@pytest.mark.usefixtures("original")
def test_a_prefix_of_old_weights_is_never_reused(changing, model, changed):
    """Neither by a request that comes after the update, nor by one that was waiting for it."""
    prompt, path, out = prompt_of(14, 96), changed(), {}

    async def scenario():
        await changing.collect(prompt, max_new_tokens=2, min_new_tokens=2)  # its prefix is cached
        task = long_group(changing, prompt, out, n=24)  # 12 run, 12 wait
        await until(changing, out, 20)
        await changing.load(path, 7, pb.KEEP)
        late = await changing.collect(prompt, n=2, max_new_tokens=8)
        await task
        return late

    late = changing.do(scenario())
    new = with_weights(model, path)
    for sample in late.values():
        assert set(sample.versions) == {7}
        assert_scored(new, prompt, sample)
    waited = [sample for sample in out.values() if set(sample.versions) == {7}]
    assert len(waited) >= 12
    for sample in waited:
        assert_scored(new, prompt, sample, atol=LONG_ATOL)


BAD = {
    "missing": (lambda t: {k: v for k, v in t.items() if "layers.1.mlp.up" not in k}, "missing"),
    "extra": (lambda t: t | {"model.more": np.ones(3, np.float32)}, "not part of the model"),
    "shape": (lambda t: t | {"model.norm.weight": np.ones(3, np.float32)}, "has shape"),
    "nan": (lambda t: t | {"model.norm.weight": np.full(64, np.nan, np.float32)}, "not finite"),
    "infinity": (
        lambda t: t | {"model.norm.weight": np.full(64, np.inf, np.float32)}, "not finite"
    ),
    "integers": (lambda t: t | {"model.norm.weight": np.ones(64, np.int32)}, "floating point"),
}  # fmt: skip


@pytest.mark.usefixtures("original")
@pytest.mark.parametrize("kind", [*BAD, "truncated"])
def test_bad_weights_are_refused_and_change_nothing(changing, model, changed, kind):
    edit, message = BAD.get(kind, (lambda tensors: None, "no readable safetensors file"))
    path = changed(edit)
    if kind == "truncated":
        os.truncate(path, os.path.getsize(path) - 100)
    with pytest.raises(grpc.aio.AioRpcError, match=message) as caught:
        changing.do(changing.load(path, 9))
    assert caught.value.code() is CODE.FAILED_PRECONDITION
    assert changing.do(changing.status()).version == 0
    sample = changing.ask(prompt_of(15), max_new_tokens=20)[0]
    assert set(sample.versions) == {0}
    assert_scored(model, prompt_of(15), sample)


@pytest.mark.usefixtures("original")
def test_many_updates_under_load(changing, model, changed):
    prompt, paths = prompt_of(16, 40), [changed(factor=f) for f in (0.5, 0.8)]

    async def scenario():
        out = {}
        task = long_group(changing, prompt, out, n=12)
        await until(changing, out, 12)
        for version in range(1, 21):
            await changing.load(paths[version % 2], version, pb.RECOMPUTE)
        await task
        return out

    scored = {0: model} | {v: with_weights(model, paths[v % 2]) for v in range(1, 21)}
    for sample in changing.do(scenario()).values():
        versions = np.array(sample.versions)
        assert (np.diff(versions) >= 0).all()
        for version in set(sample.versions):
            wanted = teacher(scored[version], prompt, sample.tokens)
            here = versions == version
            np.testing.assert_allclose(
                np.array(sample.logprobs)[here], wanted[here], atol=LONG_ATOL
            )


def test_pause_holds_over_an_update(changing, original):
    async def scenario():
        await changing.stub.Pause(pb.PauseRequest(), timeout=30)
        out = {}
        task = long_group(changing, prompt_of(17), out)
        await changing.load(original, 3)
        status = await changing.status()
        assert (status.paused, status.version, status.running) == (True, 3, 0)
        await asyncio.sleep(0.2)
        assert not out
        await changing.stub.Resume(pb.ResumeRequest(), timeout=30)
        await task
        assert {v for sample in out.values() for v in sample.versions} == {3}

    changing.do(scenario())


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
        ("Qwen3ForCausalLM", {"tie_embeddings": False, "qk_norm": True}),
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
whole = VllmEngine._call
async def call(self, method, *args):
    found = await whole(self, method, *args)
    if method == "rlx_exchange" and os.path.exists({str(flag)!r}):
        os.remove({str(flag)!r})
        await whole(self, method)  # raises in the worker: nothing is staged any more
    return found
VllmEngine._call = call
if __name__ == "__main__":
    from rlx.cli import command
    command.run(lambda: serve.main(sys.argv[1:]), teardown=False)
""")
    new = {k: v * 1.5 for k, v in load_file(tiny_model_dir / "model.safetensors").items()}
    prompt, out = prompt_of(18, 40), []
    limits = Timeouts(probe_every=0.1, backoff=0.2, connect=60)
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
