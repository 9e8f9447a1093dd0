"""Scores of the JAX engine: the trainer's numbers, beside whatever else the engine does."""

import asyncio
import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from rlx.engines.engine import EngineStopped
from rlx.engines.jax.jax_engine import JaxEngine
from rlx.fleet.requests import Request, Sampling, ScoreRequest
from rlx.model import decoder, hf
from rlx.model import params as parameters
from tests.fixtures.model import make_oracle

MAX_LEN = 96
CHUNK = 32  # of an engine with so short a context
_logprobs = jax.jit(decoder.logprobs, static_argnums=1, static_argnames="temperature")


class Running:
    """An engine, and the event loop it answers on."""

    def __init__(self, path):
        self.runner = asyncio.Runner()
        self.engine = JaxEngine(str(path), slots=6, max_model_len=MAX_LEN, decode_steps=4)
        self.do(self.engine.start())
        assert self.engine._programs.plan.chunk == CHUNK

    def do(self, coroutine, timeout=60):
        return self.runner.run(asyncio.wait_for(coroutine, timeout))

    def close(self):
        self.do(self.engine.close())
        self.runner.close()

    def score(self, tokens, first=1, temperature=1.0):
        return self.do(self.engine.score(request_of(tokens, first, temperature)))

    async def generate(self, prompt, n=1, **sampling):
        request = Request("r", np.asarray(prompt, np.int32), Sampling(**sampling), n)
        samples = {k: ([], []) for k in range(n)}
        async for chunk in self.engine.generate(request):
            samples[chunk.index][0].extend(chunk.tokens)
            samples[chunk.index][1].extend(chunk.logprobs)
        return samples


@pytest.fixture(scope="module")
def running(tiny_model_dir):
    running = Running(tiny_model_dir)
    yield running
    running.close()


@pytest.mark.torch
@pytest.mark.parametrize("name", ["gemma3", "phi3-long"])
def test_scores_of_other_families_are_the_trainers_too(name, tmp_path_factory):
    """Over windows in several chunks, and by longrope's factors of the engine's context."""
    _, path = make_oracle(name, tmp_path_factory)
    engine, (config, params) = Running(path), hf.load(path)
    try:
        for length in (10, 80):
            tokens = sequence(3, length) % config.vocab_size
            wanted = trainers((config.within(MAX_LEN), params), tokens)
            np.testing.assert_allclose(engine.score(tokens).logprobs, wanted[1:], atol=1e-5)
    finally:
        engine.close()


@pytest.fixture
def changing(tiny_model_dir):
    running = Running(tiny_model_dir)
    yield running
    running.close()


@pytest.fixture(scope="module")
def model(tiny_model_dir):
    return hf.load(tiny_model_dir)


def request_of(tokens, first=1, temperature=1.0):
    return ScoreRequest(np.asarray(tokens, np.int32), first, temperature)


def sequence(seed, length):
    return np.random.default_rng(seed).integers(0, 128, length).astype(np.int32)


def trainers(model, tokens, temperature=1.0):
    """The trainer's logprobs of one sequence, [T]."""
    config, params = model
    row = np.zeros((1, MAX_LEN), np.int32)
    row[0, : len(tokens)] = tokens
    batch = {
        "tokens": row,
        "positions": np.arange(MAX_LEN, dtype=np.int32)[None],
        "segment_ids": (np.arange(MAX_LEN) < len(tokens)).astype(np.int32)[None],
    }
    logprobs, _ = _logprobs(params, config, batch, temperature=temperature)
    return np.asarray(logprobs)[0, : len(tokens)]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_scores_are_the_trainers_logprobs(running, model, data):
    edges = [2, 3, CHUNK, CHUNK + 1, CHUNK + 2, 2 * CHUNK + 1, MAX_LEN - 1, MAX_LEN]
    length = data.draw(st.one_of(st.sampled_from(edges), st.integers(2, MAX_LEN)), "length")
    near = st.sampled_from([1, CHUNK, CHUNK + 1, length - 1]).filter(lambda k: 1 <= k < length)
    first = data.draw(st.one_of(near, st.integers(1, length - 1)), "first")
    temperature = data.draw(st.sampled_from([1.0, 0.7, 2.0]), "temperature")
    tokens = sequence(data.draw(st.integers(0, 99), "seed"), length)
    scores = running.score(tokens, first, temperature)
    assert (scores.version, scores.logprobs.dtype) == (0, np.float32)
    wanted = trainers(model, tokens, temperature)[first:]
    np.testing.assert_allclose(scores.logprobs, wanted, atol=1e-5)


def test_scores_of_a_completion_are_its_behaviour_logprobs(running):
    prompt = sequence(1, 10)
    options = {"seed": 4, "max_new_tokens": 60, "min_new_tokens": 40}
    for tokens, logprobs in running.do(running.generate(prompt, 3, **options)).values():
        assert len(tokens) >= 40
        scores = running.score([*prompt, *tokens], len(prompt)).logprobs
        np.testing.assert_allclose(scores, logprobs, atol=1e-5)


def test_scoring_goes_on_between_decode_calls_and_changes_no_bit(running):
    async def together():
        await engine.pause()
        asked = [engine.score(request_of(sequence(s, MAX_LEN), s + 1)) for s in range(8)]
        tasks = [asyncio.create_task(call) for call in (generation(), *asked)]
        while engine.status().queued < 4 or len(engine._scores) < 8:
            await asyncio.sleep(0.001)
        await engine.resume()
        return await asyncio.gather(*tasks)

    async def generation():
        return await running.generate(
            sequence(1, 10), 4, seed=4, max_new_tokens=80, min_new_tokens=80
        )

    engine = running.engine
    alone = running.do(generation())
    scores = [running.score(sequence(seed, MAX_LEN), seed + 1) for seed in range(8)]
    samples, *beside = running.do(together())
    assert samples == alone
    for one, other in zip(scores, beside, strict=True):
        np.testing.assert_array_equal(one.logprobs, other.logprobs)
    names = [name for name, *_ in engine.status().spans if name in ("decode", "score")]
    assert names.count("score") == 8 * MAX_LEN // CHUNK
    assert names[:40] == ["decode", "score"] * 20, "each has a turn, none waits for the other's end"


def test_scores_under_way_are_made_again_by_new_weights(changing, tiny_model_dir, tmp_path):
    tensors = load_file(tiny_model_dir / "model.safetensors")
    path = tmp_path / "halved.safetensors"
    save_file({name: tensor * np.float32(0.5) for name, tensor in tensors.items()}, path)
    engine, tokens = changing.engine, sequence(3, 50)
    before = changing.score(tokens)

    async def change():
        await engine.pause()
        score = asyncio.create_task(engine.score(request_of(tokens)))
        withdrawn = asyncio.create_task(engine.score(request_of(tokens)))
        while len(engine._scores) < 2:
            await asyncio.sleep(0.001)
        for _ in range(9):  # turns of the engine's thread, more than two sequences take
            await engine.pause()
        assert not score.done(), "a paused engine scores nothing"
        await engine.load(str(path), 5)
        withdrawn.cancel()
        await engine.resume()
        return await score

    after = changing.do(change())
    assert (before.version, after.version) == (0, 5)
    config, _ = hf.load(tiny_model_dir)
    params = hf.from_hf(load_file(path), config, np.float32)
    np.testing.assert_allclose(after.logprobs, trainers((config, params), tokens)[1:], atol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_a_reward_model_answers_with_the_trainers_values_and_generates_nothing(
    model, tiny_model_dir, tmp_path, tied
):
    params, config = parameters.with_value_head(model[1], model[0])
    config = dataclasses.replace(config, tie_embeddings=tied)
    params["value_head"] = jax.random.normal(jax.random.key(1), params["value_head"].shape)
    hf.save(tmp_path / "reward", config, params, source=tiny_model_dir)
    running = Running(tmp_path / "reward")
    try:
        for length in (2, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, MAX_LEN - 1, MAX_LEN):
            tokens = sequence(length, length)
            batch = {
                "tokens": tokens[None],
                "positions": np.arange(length, dtype=np.int32)[None],
                "segment_ids": np.ones((1, length), np.int32),
            }
            wanted = np.asarray(decoder.values(params, config, batch))[0]
            assert np.abs(wanted).max() > 0.1
            for first in (1, length - 1):
                scores = running.score(tokens, first, temperature=0.7)
                assert scores.values
                np.testing.assert_allclose(scores.logprobs, wanted[first:], atol=1e-4)
        with pytest.raises(ValueError, match="a reward model generates nothing; give a language"):
            running.do(running.generate([3, 4]))
    finally:
        running.close()


def test_bad_sequences_are_refused_with_a_remedy(running):
    for tokens, match in (
        ([3, 128], "token 128 is out of the vocabulary of 128; use the model's own tokenizer"),
        ([-1, 3], "token -1 is out of the vocabulary"),
        ([3] * (MAX_LEN + 1), "97 tokens, max_model_len=96; shorten it or raise"),
    ):
        with pytest.raises(ValueError, match=match):
            running.score(tokens)


def test_an_engine_that_breaks_or_closes_leaves_no_score_waiting(changing):
    engine = changing.engine

    async def closed():
        await engine.pause()
        score = asyncio.create_task(engine.score(request_of([3, 4])))
        await asyncio.sleep(0)
        while not engine._scores:
            await asyncio.sleep(0.001)
        await engine.close()
        with pytest.raises(EngineStopped, match="it was closed"):
            await score

    changing.do(closed())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_score_that_breaks_the_engine_says_why(changing):
    def broken(*args):
        raise ValueError("device lost")

    changing.engine._programs.score = broken
    for _ in range(2):
        with pytest.raises(EngineStopped, match="device lost"):
            changing.score([3, 4])


def test_a_sequence_begins_again_with_other_weights_and_withdrawn_ones_cost_nothing(changing):
    engine, begun, score = changing.engine, [], changing.engine._programs.score

    def noted(params, request):
        begun.append(int(request.tokens[0]))
        if begun == [1]:  # the weights come before its second chunk
            engine._inbox.put(lambda: engine._swap(params, 6, "keep"))
        return score(params, request)

    async def main():
        await engine.pause()
        asked = [request_of([k] * (CHUNK + 9)) for k in (1, 2, 3)]
        one, gone, two = (asyncio.create_task(engine.score(each)) for each in asked)
        while len(engine._scores) < 3:
            await asyncio.sleep(0.001)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        await engine.resume()
        return await asyncio.gather(one, two)

    engine._programs.score = noted
    scores = changing.do(main())
    assert begun == [1, 1, 3]
    assert [(each.version, len(each.logprobs)) for each in scores] == [(6, CHUNK + 8)] * 2
