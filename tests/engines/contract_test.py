"""The promises of both engines, in real server processes, scored by the trainer's decoder."""

import asyncio
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import grpc
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rlx.fleet import rollout_pb2 as pb
from rlx.model import hf, kept_tokens
from rlx.run.tokenizer_files import load_tokenizer
from tests.fixtures.served import (
    LONG,
    LONG_ATOL,
    MAX_LEN,
    Served,
    assert_scored,
    assert_scores,
    logits_of,
    long_group,
    prompt_of,
    servers_of,
    teacher,
    until,
    with_weights,
)

CODE = grpc.StatusCode


@pytest.fixture(scope="module", params=["jax", pytest.param("vllm", marks=pytest.mark.vllm)])
def engine(request):
    """The name of the engine that serves."""
    return request.param


@pytest.fixture(scope="module")
def two(engine, tiny_model_dir, tmp_path_factory):
    """Two servers of one model, for everything that leaves them as they were."""
    folder = tmp_path_factory.mktemp(engine)
    with servers_of(tiny_model_dir, folder, 2, engine=engine) as servers:
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


def oracle_sets(z, top_p=1.0, top_k=0, banned=()):
    """The tokens [N, V] that top-k and then top-p leave of tempered logits [N, V], in float64."""
    z = np.where(np.isin(np.arange(z.shape[1]), banned), -np.inf, z)
    order = np.argsort(-z, axis=1)
    ranked = np.take_along_axis(z, order, 1)
    ranked[:, top_k or z.shape[1] :] = -np.inf
    chances = np.exp(ranked - ranked.max(1, keepdims=True))
    chances /= chances.sum(1, keepdims=True)
    kept = (np.cumsum(chances, 1) - chances < top_p) & (chances > 0)
    return np.take_along_axis(kept, np.argsort(order, axis=1), 1)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.3, "top_p": 0.6},
        {"temperature": 0.7, "top_k": 3},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_new_tokens": 12},
        {"min_new_tokens": 12},
        {},
    ],
)
def test_masks_are_the_tokens_drawn_from_and_logprobs_are_over_them(running, model, options):
    """The set of each token is an oracle's on the trainer's logits, as is its probability."""
    prompt, temperature = prompt_of(3), options.get("temperature", 1.0)
    limits = {name: options[name] for name in ("top_p", "top_k") if name in options}
    ends = list(model[0].eos_token_ids)
    stops = {"stop_token_ids": (7, 8)} if "min_new_tokens" in options else {}

    async def together():  # a request without masks in the same steps keeps its own logprobs
        asked = {"n": 4, "seed": 3, "max_new_tokens": 30, **options, **stops}
        calls = (running.collect(prompt, return_masks=yes, **asked) for yes in (True, False))
        return await asyncio.gather(*calls)

    out, plain = running.do(together())
    for index, sample in out.items():
        assert sample.tokens == plain[index].tokens
        assert not plain[index].kept_sizes
        assert_scored(model, prompt, plain[index], temperature)
        sizes = np.array(sample.kept_sizes, np.int32)
        masks = kept_tokens.masks(np.frombuffer(sample.kept, np.uint8), sizes, 128)
        z = logits_of(model, prompt, sample.tokens) / temperature
        early = np.arange(len(z)) < options.get("min_new_tokens", 0)
        banned = [*ends, *stops.get("stop_token_ids", ())]
        wanted = np.where(early[:, None], oracle_sets(z, **limits, banned=banned),
                          oracle_sets(z, **limits))  # fmt: skip
        np.testing.assert_array_equal(masks, wanted)
        log_p = np.where(masks, z, -np.inf)
        log_p -= np.log(np.exp(log_p).sum(1, keepdims=True))
        picked = log_p[np.arange(len(z)), sample.tokens]
        np.testing.assert_allclose(sample.logprobs, picked, atol=1e-4)
    assert options or not sizes.any()


SCHEMA = {"type": "object", "properties": {"a": {"enum": [7, 71, "x"]}, "b": {"type": "boolean"}},
          "required": ["a", "b"], "additionalProperties": False}  # fmt: skip
TEXTS = [f'{{"a":{a},"b":{b}}}' for a in ("7", "71", '"x"') for b in ("true", "false")]


@pytest.fixture
def guided(engine, tiny_model_dir):
    """The tiny model's tokenizer, where the engine has what schemas need."""
    if engine == "jax":
        pytest.importorskip("llguidance", reason="llguidance is not installed")
    return load_tokenizer(tiny_model_dir)


@pytest.mark.parametrize("options", [{}, {"temperature": 1.5, "top_p": 0.7}, {"temperature": 0.0}])
def test_a_guide_s_masks_are_the_tokens_that_a_schema_allows(running, model, guided, options):
    """The oracle knows all answers: a token may follow if some answer begins with both."""
    prompt, temperature = prompt_of(4), options.get("temperature", 1.0)
    asked = {"n": 6, "seed": 5, "max_new_tokens": 40, "return_masks": True, **options}

    async def together():  # next to a request without a guide
        calls = (running.collect(prompt, guide=g, **asked) for g in (json.dumps(SCHEMA), ""))
        return await asyncio.gather(*calls)

    out, plain = running.do(together())
    assert {index: s.tokens for index, s in plain.items()} == {
        index: s.tokens for index, s in running.ask(prompt, **asked).items()
    }
    texts = set()
    for sample in out.values():
        text = guided.decode(sample.tokens, skip_special_tokens=True)
        texts.add(text)
        assert (sample.stop, sample.tokens[-1]) == ("stop", 2)
        z = logits_of(model, prompt, sample.tokens) / (temperature or 1.0)
        wanted = np.zeros((len(z), 128), bool)
        for at, allowed in enumerate(wanted):
            begun = [t[at:] for t in TEXTS if t.startswith(text[:at])]
            allowed[[guided.encode(t[0])[0] if t else 2 for t in begun]] = True
        log_p = np.where(wanted, z, -np.inf)
        cut = oracle_sets(log_p, options.get("top_p", 1.0))
        if temperature:
            log_p = np.where(cut, z, -np.inf)
            sizes = np.array(sample.kept_sizes, np.int32)
            masks = kept_tokens.masks(np.frombuffer(sample.kept, np.uint8), sizes, 128)
            np.testing.assert_array_equal(masks, cut)
        log_p -= np.log(np.exp(log_p).sum(1, keepdims=True))
        picked = log_p[np.arange(len(z)), sample.tokens]
        np.testing.assert_allclose(sample.logprobs, picked, atol=1e-4)
    assert len(texts) > 1 or not temperature


@pytest.mark.parametrize(
    "schema",
    [{"type": "nothing"}, {"enum": []}, {"type": "integer", "minimum": 5, "maximum": 3},
     {"allOf": [{"type": "string"}, {"type": "integer"}]}, {"$ref": "#/nope"}, "no JSON"],
)  # fmt: skip
def test_a_schema_without_an_answer_is_refused_in_a_line(running, guided, schema):
    text = schema if isinstance(schema, str) else json.dumps(schema)
    with pytest.raises(grpc.RpcError) as error:
        running.ask(prompt_of(4), guide=text, max_new_tokens=20)
    assert error.value.code() == CODE.INVALID_ARGUMENT
    assert "guide" in error.value.details()
    assert "\n" not in error.value.details()
    with pytest.raises(grpc.RpcError, match="min_new_tokens=3"):
        running.ask(prompt_of(4), guide=json.dumps(SCHEMA), min_new_tokens=3)


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
    saved = np.isnan(unscored.logprobs)  # the work of scoring, which an engine may save
    np.testing.assert_allclose(np.where(saved, scored.logprobs, unscored.logprobs), scored.logprobs)
    assert saved.all() or not saved.any()
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
def test_a_prefix_of_other_weights_with_the_same_version_is_never_reused(changing, model, changed):
    """rlx.evaluate publishes each of its models as version 0, and asks the same questions."""
    prompt, path = prompt_of(13, 96), changed()
    changing.ask(prompt, max_new_tokens=2)  # its prefix is cached
    changing.do(changing.load(path, 0, pb.KEEP))
    (sample,) = changing.ask(prompt, max_new_tokens=8).values()
    assert set(sample.versions) == {0}
    assert_scored(with_weights(model, path), prompt, sample)


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


def norm(values):
    return lambda tensors: tensors | {"model.norm.weight": np.asarray(values)}


BAD = {
    "missing": (lambda t: {k: v for k, v in t.items() if "layers.1.mlp.up" not in k}, "missing"),
    "extra": (lambda t: t | {"model.more": np.ones(3, np.float32)}, r"'?model\.more"),
    "shape": (norm(np.ones(3, np.float32)), "has shape"),
    "nan": (norm(np.full(64, np.nan, np.float32)), "not finite"),
    "infinity": (norm(np.full(64, np.inf, np.float32)), "not finite"),
    "integers": (norm(np.ones(64, np.int32)), "floating point"),
}


@pytest.mark.usefixtures("original")
@pytest.mark.parametrize("kind", [*BAD, "truncated"])
def test_bad_weights_are_refused_and_change_nothing(changing, model, changed, kind):
    edit, message = BAD.get(
        kind, (lambda tensors: None, "not a readable safetensors file|cannot read")
    )
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


@pytest.mark.parametrize("freed", [pb.CACHE, pb.CACHE_AND_WEIGHTS])
def test_requests_go_on_after_a_sleep(changing, original, changed, model, freed):
    """Their tokens before it have the old version, those after it the new one's logprobs."""

    async def scenario(prompt, path, version):
        out = {}
        task = long_group(changing, prompt, out, n=48)  # 12 run, the others wait
        await until(changing, out, 40)
        await changing.stub.Pause(pb.PauseRequest(freed=freed), timeout=60)
        waiting = asyncio.create_task(changing.collect(prompt_of(24), max_new_tokens=4))
        await asyncio.sleep(0.8)  # what was decoded before it has come
        before = {index: len(sample.tokens) for index, sample in out.items()}
        assert (await changing.status()).paused
        if freed == pb.CACHE_AND_WEIGHTS:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await changing.stub.Resume(pb.ResumeRequest(), timeout=60)
            assert refused.value.code() is CODE.FAILED_PRECONDITION
            assert "sleeps without weights" in refused.value.details()
        await changing.load(path, version, pb.RECOMPUTE)
        await asyncio.sleep(0.3)
        assert {index: len(sample.tokens) for index, sample in out.items()} == before
        await changing.stub.Pause(pb.PauseRequest(freed=pb.CACHE), timeout=60)  # it sleeps already
        await changing.stub.Resume(pb.ResumeRequest(), timeout=60)
        await task
        assert {len(sample.tokens) for sample in out.values()} == {LONG}
        assert set((await waiting)[0].versions) == {version}
        return before, out

    scored, version = {0: model}, 0
    while True:  # on a busy machine a group may end before its pause comes
        prompt, version = prompt_of(23 + version), version + 1
        path = changed(factor=0.8**version)
        scored[version] = with_weights(model, path)
        before, out = changing.do(scenario(prompt, path, version))
        slept = [index for index, tokens in before.items() if tokens < LONG]
        if slept:
            break
        assert version < 4, "four groups ended before their pause"
    for index, sample in out.items():
        versions = np.array(sample.versions)
        assert index not in slept or {*sample.versions} == {version - 1, version}
        assert (np.diff(versions) >= 0).all()
        for each in (version - 1, version):
            wanted, here = teacher(scored[each], prompt, sample.tokens), versions == each
            np.testing.assert_allclose(
                np.array(sample.logprobs)[here], wanted[here], atol=LONG_ATOL
            )


def test_an_unknown_sleep_is_refused(changing):
    async def scenario():
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await changing.stub.Pause(pb.PauseRequest(freed=9), timeout=60)
        assert refused.value.code() is CODE.INVALID_ARGUMENT
        assert not (await changing.status()).paused

    changing.do(scenario())
