"""The JAX engine on a tiny model: what it promises to servers, bit for bit where it says so."""

import asyncio
import shutil
import threading
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rlx.base import UserError
from rlx.engines.engine import EngineStopped
from rlx.engines.jax.jax_engine import JaxEngine
from rlx.fleet.requests import Request, Sampling
from rlx.model import decoder, hf

MAX_LEN = 96


class Running:
    """An engine on its own event loop's thread; `do` runs coroutines there from the test."""

    def __init__(self, path, **options):
        options = {"slots": 12, "max_model_len": MAX_LEN, "decode_steps": 4} | options
        self.engine = JaxEngine(str(path), **options)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        self.do(self.engine.start())

    def do(self, coroutine, timeout=120):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(timeout)

    def close(self):
        self.do(self.engine.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    async def collect(self, prompt, n=1, first_index=0, prefix_len=0, priority=0, **sampling):
        """{sample index: namespace of tokens, logprobs, versions, stop} of one request."""
        request = Request(
            "r", np.asarray(prompt, np.int32), Sampling(**sampling), n, first_index, prefix_len,
            priority,
        )  # fmt: skip
        out = {}
        async for chunk in self.engine.generate(request):
            sample = out.setdefault(
                chunk.index, SimpleNamespace(tokens=[], logprobs=[], versions=[], stop=None)
            )
            assert sample.stop is None
            sample.tokens += chunk.tokens
            sample.logprobs += chunk.logprobs
            sample.versions += chunk.versions
            sample.stop = chunk.stop_reason
        return out

    def ask(self, prompt, n=1, **options):
        return self.do(self.collect(prompt, n, **options))


@pytest.fixture(scope="module")
def running(tiny_model_dir):
    engine = Running(tiny_model_dir)
    yield engine
    engine.close()


@pytest.fixture
def changing(tiny_model_dir):
    """An engine whose weights the test may change."""
    engine = Running(tiny_model_dir)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def model(tiny_model_dir):
    return hf.load(tiny_model_dir)


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


def long_one(running, prompt):
    """(seed, completion of at least 20 tokens) without a minimum, which would change the draws."""
    for seed in range(100):
        sample = running.ask(prompt, seed=seed, max_new_tokens=30)[0]
        if len(sample.tokens) >= 20:
            return seed, sample
    raise AssertionError("no long completion")


def bits(samples):
    return {i: (s.tokens, np.float32(s.logprobs).tobytes(), s.stop) for i, s in samples.items()}


def test_a_completion_does_not_depend_on_its_batch(running):
    """Alone, in two different crowds, and in an engine of other shapes: the same bits."""

    async def crowd(seed):
        rng = np.random.default_rng(seed)

        async def other(k):
            await asyncio.sleep(rng.random() * 0.02)
            limits = [{}, {"top_p": 0.8}, {"top_k": 3}, {"min_new_tokens": 5}, {"temperature": 0}]
            length = int(rng.integers(1, 60))
            return await running.collect(
                prompt_of(k, length), n=int(rng.integers(1, 4)), seed=k,
                max_new_tokens=int(rng.integers(1, 30)), **limits[k % 5],
            )  # fmt: skip

        others = [asyncio.create_task(other(100 * seed + k)) for k in range(10)]
        await asyncio.sleep(rng.random() * 0.02)
        ours = [
            running.collect(prompt_of(1, length), n=3, seed=7, max_new_tokens=30)
            for length in (1, 10, 50)
        ]
        results = await asyncio.gather(*ours)
        await asyncio.gather(*others)
        return [bits(r) for r in results]

    alone = [
        bits(running.ask(prompt_of(1, length), n=3, seed=7, max_new_tokens=30))
        for length in (1, 10, 50)
    ]
    assert all(len(t) > 3 for result in alone for t, *_ in result.values())
    for seed in range(3):
        assert running.do(crowd(seed)) == alone
    # One sample of the group, and each sample by itself, are the same samples.
    single = running.ask(prompt_of(1, 10), first_index=2, seed=7, max_new_tokens=30)
    assert bits(single) == {2: alone[1][2]}


def test_other_shapes_of_the_engine_give_the_same_completions(running, tiny_model_dir):
    """More slots and a longer cache: all of it, or the smaller programs it picks by itself."""
    wanted = bits(running.ask(prompt_of(5), n=4, seed=1, max_new_tokens=40))
    other = Running(tiny_model_dir, slots=24, max_model_len=200)
    try:
        for _ in range(3):
            assert bits(other.ask(prompt_of(5), n=4, seed=1, max_new_tokens=40)) == wanted
    finally:
        other.close()


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_logprobs_are_the_tempered_ones_of_the_whole_vocabulary(running, model, temperature):
    for limits in ({}, {"top_k": 4, "top_p": 0.9}):
        prompt = prompt_of(2)
        out = running.ask(prompt, n=2, seed=3, max_new_tokens=20, temperature=temperature, **limits)
        for sample in out.values():
            wanted = teacher(model, prompt, sample.tokens, temperature)
            np.testing.assert_allclose(sample.logprobs, wanted, atol=1e-4)


def test_greedy_is_the_argmax_with_untempered_logprobs(running, model):
    prompt = prompt_of(3)
    one, two = running.ask(prompt, n=2, temperature=0, max_new_tokens=12).values()
    assert one.tokens == two.tokens
    np.testing.assert_allclose(one.logprobs, teacher(model, prompt, one.tokens), atol=1e-4)
    narrow = running.ask(prompt, top_k=1, seed=0, max_new_tokens=12)[0]
    assert narrow.tokens == one.tokens


def test_draws_follow_the_model(running, model):
    """First tokens of many samples against the model's own probabilities."""
    prompt = prompt_of(4)
    out = running.ask(prompt, n=600, seed=11, max_new_tokens=1, temperature=0.7)
    counts = np.bincount([s.tokens[0] for s in out.values()], minlength=128)
    config, params = model
    x = decoder.hidden(params, config, prompt[None], np.arange(10)[None], np.ones((1, 10), int))
    chances = np.asarray(jax.nn.softmax(decoder.unembed(params, config, x)[0, -1] / 0.7))
    deviation = np.sqrt(600 * chances * (1 - chances))
    assert (np.abs(counts - 600 * chances) < 5 * deviation + 1).all()


def test_samples_differ_and_unseeded_requests_too(running):
    samples = running.ask(prompt_of(1), n=4, seed=5, max_new_tokens=12)
    assert len({tuple(s.tokens) for s in samples.values()}) == 4
    one, two = (running.ask(prompt_of(1), max_new_tokens=12)[0].tokens for _ in range(2))
    assert one != two


def test_budgets_and_stop_reasons(running):
    prompt = prompt_of(6, 90)
    full = running.ask(prompt, seed=1, max_new_tokens=50, min_new_tokens=50)[0]
    assert (len(full.tokens), full.stop) == (MAX_LEN - 90, "length")
    short = running.ask(prompt_of(6), seed=1, max_new_tokens=7, min_new_tokens=7)[0]
    assert (len(short.tokens), short.stop) == (7, "length")
    whole = running.ask(prompt_of(6), seed=1, max_new_tokens=40, min_new_tokens=40)[0]
    assert 2 not in whole.tokens
    ends = [running.ask(prompt_of(k), seed=k, max_new_tokens=80)[0] for k in range(12)]
    stopped = [s for s in ends if s.stop == "stop"]
    assert stopped
    assert all(s.tokens[-1] == 2 and 2 not in s.tokens[:-1] for s in stopped)
    assert all(2 not in s.tokens for s in ends if s.stop == "length")


def test_stop_tokens_end_a_completion_and_are_kept(running):
    seed, free = long_one(running, prompt_of(7))
    stop = free.tokens[9]
    at = free.tokens.index(stop)
    out = running.ask(prompt_of(7), seed=seed, max_new_tokens=30, stop_token_ids=(stop,))[0]
    assert out.tokens == free.tokens[: at + 1]
    assert out.stop == "stop"
    later = running.ask(
        prompt_of(7), seed=seed, max_new_tokens=30, min_new_tokens=at + 3, stop_token_ids=(stop,)
    )[0]
    assert stop not in later.tokens[: at + 3]


def test_stop_strings_end_a_completion_and_are_kept(running, tiny_model_dir):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tiny_model_dir / "tokenizer.json"))
    seed, free = long_one(running, prompt_of(8))
    stop = tokenizer.decode(free.tokens[9:12])
    assert stop
    out = running.ask(prompt_of(8), seed=seed, max_new_tokens=30, stop=("no such", stop))[0]
    text = tokenizer.decode(out.tokens)
    assert out.tokens == free.tokens[: len(out.tokens)]
    assert text.index(stop) + len(stop) == len(text)
    assert out.stop == "stop"
    assert len(out.logprobs) == len(out.versions) == len(out.tokens)


def test_a_group_shares_its_prefill_even_when_slots_run_out(changing):
    calls = []
    programs = changing.engine._programs
    original = programs.prefill

    def counted(params, cache, prompts, targets):
        calls.append(len(prompts))
        return original(params, cache, prompts, targets)

    programs.prefill = counted
    out = changing.ask(prompt_of(9), n=30, seed=1, max_new_tokens=9)
    assert len(out) == 30
    assert calls == [1]


def test_a_continued_completion_is_the_same_one(running):
    prompt = prompt_of(10)
    whole = running.ask(prompt, n=3, seed=4, max_new_tokens=24, min_new_tokens=24)
    for index, cut in ((0, 1), (1, 6), (2, 23)):
        start = np.concatenate([prompt, whole[index].tokens[:cut]])
        rest = running.ask(
            start, first_index=index, prefix_len=cut, seed=4, max_new_tokens=24, min_new_tokens=24
        )[index]
        assert whole[index].tokens[cut:] == rest.tokens
        np.testing.assert_allclose(whole[index].logprobs[cut:], rest.logprobs, atol=1e-4)
        assert rest.stop == "length"


def test_higher_priority_starts_first(changing):
    order = []

    async def one(name, priority):
        await changing.collect(prompt_of(1), n=12, max_new_tokens=8, priority=priority)
        order.append(name)

    async def all_of_them():
        tasks = [asyncio.create_task(one("first", 0))]
        await asyncio.sleep(0)
        tasks += [asyncio.create_task(one(name, p)) for name, p in (("low", -1), ("high", 1))]
        await asyncio.gather(*tasks)

    changing.do(changing.engine.pause())
    task = asyncio.run_coroutine_threadsafe(all_of_them(), changing.loop)
    while changing.engine.status().queued < 36:
        threading.Event().wait(0.01)
    changing.do(changing.engine.resume())
    task.result(60)
    assert order == ["high", "first", "low"]


def test_closing_a_stream_frees_its_slots(running):
    async def abandon():
        request = Request("r", prompt_of(1), Sampling(max_new_tokens=80, min_new_tokens=80), n=12)
        stream = running.engine.generate(request)
        await anext(stream)
        await stream.aclose()

    running.do(abandon())
    assert running.ask(prompt_of(2), max_new_tokens=2)
    assert running.engine.status().running == 0


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([5, 128], {}, "token 128 is out of the vocabulary of 128"),
        ([-1], {}, "token -1"),
        ([5] * MAX_LEN, {}, f"{MAX_LEN} tokens and max_model_len={MAX_LEN}"),
        ([5], {"stop_token_ids": tuple(range(20))}, "at most 8"),
    ],
)
def test_bad_requests_are_refused_before_anything_runs(running, prompt, options, message):
    with pytest.raises(ValueError, match=message):
        running.ask(prompt, **options)
    assert running.engine.status().running == 0


def scaled(tiny_model_dir, path, change=lambda tensors: None, factor=0.5):
    tensors = {k: v * factor for k, v in load_file(tiny_model_dir / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, path)
    return str(path)


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_weights_change_in_flight(changing, model, tiny_model_dir, tmp_path, kv):
    """Tokens carry the version that made them; a recomputed cache is that of the new weights."""
    path = scaled(tiny_model_dir, tmp_path / "new.safetensors")
    prompt, engine = prompt_of(12, 40), changing.engine

    async def scenario():
        task = asyncio.create_task(
            changing.collect(prompt, n=4, seed=1, max_new_tokens=40, min_new_tokens=40)
        )
        while engine.status().tokens_generated < 32:
            await asyncio.sleep(0.001)
        await engine.pause()
        before = engine.status().tokens_generated
        await engine.load(path, 5, kv)
        assert engine.status().tokens_generated == before
        assert (engine.status().version, engine.status().running) == (5, 4)
        await engine.resume()
        return await task

    out = changing.do(scenario())
    config, _ = model
    new = config, hf.from_hf(load_file(path), config, jnp.float32)
    for sample in out.values():
        versions = np.array(sample.versions)
        assert (np.diff(versions) >= 0).all()
        assert set(versions) == {0, 5}
        old = teacher(model, prompt, sample.tokens)
        np.testing.assert_allclose(
            np.array(sample.logprobs)[versions == 0], old[versions == 0], atol=1e-4
        )
        error = np.abs(np.array(sample.logprobs) - teacher(new, prompt, sample.tokens))
        error = error[versions == 5].max()
        assert error < 1e-4 if kv == "recompute" else error > 1e-3


def test_a_sample_that_starts_after_an_update_uses_none_of_the_old_cache(
    changing, model, tiny_model_dir, tmp_path
):
    path = scaled(tiny_model_dir, tmp_path / "new.safetensors")
    prompt, engine = prompt_of(13), changing.engine

    async def scenario():
        # Several stop tokens, so that samples start one by one beside siblings.
        options = {"max_new_tokens": 60, "stop_token_ids": (5, 6, 7, 8, 9)}
        task = asyncio.create_task(changing.collect(prompt, n=60, seed=1, **options))
        while engine.status().tokens_generated < 12:
            await asyncio.sleep(0)
        await engine.pause()
        assert engine.status().queued > 20
        await engine.load(path, 1)
        await engine.resume()
        return await task

    out = changing.do(scenario())
    config, _ = model
    new = config, hf.from_hf(load_file(path), config, jnp.float32)
    fresh = [s for s in out.values() if set(s.versions) == {1}]
    assert fresh
    for sample in fresh:
        wanted = teacher(new, prompt, sample.tokens)
        np.testing.assert_allclose(sample.logprobs, wanted, atol=1e-4)


def _poison(tensors):
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = np.nan


def _reshape(tensors):
    tensors["model.norm.weight"] = np.ones(65, np.float32)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop("model.layers.0.self_attn.q_proj.bias"), "layers.0.self_attn.q_proj.bias"),
        (lambda t: t.update(surplus=np.ones(3, np.float32)), "surplus"),
        (_reshape, "model.norm.weight"),
        (_poison, "model.layers.1.mlp.up_proj.weight"),
    ],
)
def test_bad_weights_change_nothing(running, tiny_model_dir, tmp_path, change, named):
    path = scaled(tiny_model_dir, tmp_path / "bad.safetensors", change)
    wanted = bits(running.ask(prompt_of(14), seed=1, max_new_tokens=8))
    for bad in (path, str(tmp_path / "missing.safetensors")):
        with pytest.raises(ValueError, match=named if bad == path else "missing"):
            running.do(running.engine.load(bad, 3))
    assert running.engine.status().version == 0
    assert bits(running.ask(prompt_of(14), seed=1, max_new_tokens=8)) == wanted


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_update_that_fails_half_way_ends_the_engine(tiny_model_dir, tmp_path):
    """Else tokens of one version come from a cache that is partly the other's."""
    path = scaled(tiny_model_dir, tmp_path / "new.safetensors")
    own = Running(tiny_model_dir)
    try:

        async def scenario():
            task = asyncio.create_task(own.collect(prompt_of(13), n=4, seed=1, max_new_tokens=80))
            while own.engine.status().tokens_generated < 8:
                await asyncio.sleep(0)

            def broken(*_):
                raise RuntimeError("out of memory")

            own.engine._programs.prefill = broken
            with pytest.raises(EngineStopped, match="out of memory"):
                await own.engine.load(path, 1, "recompute")
            with pytest.raises(EngineStopped):
                own.engine.status()
            with pytest.raises(EngineStopped):
                await task

        own.do(scenario())
    finally:
        own.close()


def test_finite_weights_that_overflow_do_not_outlive_their_version(changing, tiny_model_dir,
                                                                   tmp_path):  # fmt: skip
    """Infinities in a slot's cache would turn later sequences of that slot into NaN."""
    # Of one token: a longer prompt would write over what the slot held.
    wanted = bits(changing.ask(prompt_of(15, 1), n=12, seed=1, max_new_tokens=20))
    huge = scaled(tiny_model_dir, tmp_path / "huge.safetensors", factor=1e18)
    changing.do(changing.engine.load(huge, 1))
    broken = changing.ask(prompt_of(15, 40), n=12, seed=1, max_new_tokens=20, min_new_tokens=20)
    assert not np.isfinite([s.logprobs for s in broken.values()]).all()
    assert all(0 <= t < 128 for s in broken.values() for t in s.tokens)
    changing.do(changing.engine.load(str(tiny_model_dir), 2))
    assert bits(changing.ask(prompt_of(15, 1), n=12, seed=1, max_new_tokens=20)) == wanted


def test_status_and_spans(changing):
    changing.ask(prompt_of(1), n=3, seed=1, max_new_tokens=5, min_new_tokens=5)
    status = changing.engine.status()
    assert (status.version, status.running, status.queued, status.paused) == (0, 0, 0, False)
    assert (status.slots, status.max_model_len, status.tokens_generated) == (12, MAX_LEN, 15)
    assert {name for name, *_ in status.spans} == {"prefill", "decode"}
    assert all(start <= end for _, start, end in status.spans)
    assert changing.engine.status().spans == ()


def test_closing_aborts_what_runs(tiny_model_dir):
    engine = Running(tiny_model_dir)
    stream = asyncio.run_coroutine_threadsafe(
        engine.collect(prompt_of(1), n=20, max_new_tokens=80, min_new_tokens=80), engine.loop
    )
    while not engine.engine.status().tokens_generated:
        threading.Event().wait(0.005)
    engine.do(engine.engine.close())
    out = stream.result(10)
    engine.close()
    assert len(out) == 20
    assert {s.stop for s in out.values()} <= {"abort", "length"}
    assert any(s.stop == "abort" and s.tokens for s in out.values())
    assert any(s.stop == "abort" and not s.tokens for s in out.values())  # never had a slot


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_broken_engine_serves_nothing_and_says_why(changing):
    """A failure of the engine's thread ends what waits and refuses what comes later."""
    engine = changing.engine

    def broken(*args):
        raise ValueError("device lost")

    engine._programs.decode = broken
    with pytest.raises(EngineStopped, match="ValueError: device lost"):
        changing.ask(prompt_of(1), n=20, seed=1, max_new_tokens=5)
    with pytest.raises(EngineStopped, match="device lost"):
        changing.do(changing.collect(prompt_of(1), seed=1, max_new_tokens=5), timeout=10)
    with pytest.raises(EngineStopped):
        engine.status()
    for call in (engine.pause(), engine.resume(), engine.load(str(engine.model_path), 1)):
        with pytest.raises(EngineStopped):
            changing.do(call, timeout=10)


def test_an_engine_that_cannot_serve_says_why(tiny_model_dir, tmp_path):
    for options, message in (
        ({"slots": 0}, "slots=0"),
        ({"dtype": "float16"}, "dtype='float16'"),
        ({"max_model_len": 1000}, "max_model_len=1000"),
    ):
        with pytest.raises(UserError, match=message):
            asyncio.run(JaxEngine(str(tiny_model_dir), **options).start())
    copy = shutil.copytree(tiny_model_dir, tmp_path / "copy")
    (copy / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"model\.safetensors"):
        asyncio.run(JaxEngine(str(copy)).start())
