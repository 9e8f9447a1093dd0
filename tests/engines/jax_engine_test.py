"""The JAX engine on a tiny model: what it promises bit for bit, and its own faults.

contract_test has what it promises as vLLM does.
"""

import asyncio
import shutil
import threading
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rlx.base import UserError
from rlx.engines.engine import EngineStopped
from rlx.engines.jax import programs
from rlx.engines.jax.jax_engine import JaxEngine
from rlx.fleet.requests import Request, Sampling
from rlx.model import hf
from tests.fixtures.model import logits_of_rows
from tests.fixtures.served import assert_scored, prompt_of, with_weights

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
    wanted = running.ask(prompt_of(5), n=4, seed=1, max_new_tokens=40)
    other = Running(tiny_model_dir, slots=24, max_model_len=200)
    try:
        answers = [other.ask(prompt_of(5), n=4, seed=1, max_new_tokens=40) for _ in range(3)]
        assert all(bits(answer) == bits(answers[0]) for answer in answers)
        if jax.__version_info__ < (0, 12):
            assert bits(answers[0]) == bits(wanted)
        # From JAX 0.12 XLA's products add up in an order that follows the number of rows.
        for index, sample in wanted.items():
            assert answers[0][index].tokens == sample.tokens
            np.testing.assert_allclose(answers[0][index].logprobs, sample.logprobs, atol=1e-5)
    finally:
        other.close()


@pytest.mark.parametrize(("rounding", "trials"), [(0.1, programs.TRIALS), (1.0, -1)])
def test_on_a_gpu_a_smaller_program_is_used_within_a_bound(
    tiny_model_dir, monkeypatch, rounding, trials
):
    """Its libraries add in an order that depends on the shape, so that bits never agree."""
    original = programs.Programs._decode

    def rounded(self, params, cache, shape, inputs):
        block, recent = original(self, params, cache, shape, inputs)
        error = rounding if shape.slots < self.full.slots else 0.0
        return block._replace(logprobs=block.logprobs + error), recent

    monkeypatch.setattr(programs, "on_cpu", lambda: False)
    monkeypatch.setattr(programs.Programs, "_decode", rounded)
    own = Running(tiny_model_dir)
    try:
        for _ in range(2):
            own.ask(prompt_of(5), seed=1, max_new_tokens=30)
            own.engine.wait_compiled()
        tried = {s: n for s, n in own.engine._programs._agreed.items() if s.slots < 12}
        assert tried
        assert set(tried.values()) == {trials}
        assert own.engine._programs.prompts == programs.PROMPTS
    finally:
        own.close()


def test_draws_follow_the_model(running, model):
    """First tokens of many samples against the model's own probabilities."""
    prompt = prompt_of(4)
    out = running.ask(prompt, n=600, seed=11, max_new_tokens=1, temperature=0.7)
    counts = np.bincount([s.tokens[0] for s in out.values()], minlength=128)
    config, params = model
    logits = logits_of_rows(params, config, prompt[None])[0, -1]
    chances = np.asarray(jax.nn.softmax(logits / 0.7))
    deviation = np.sqrt(600 * chances * (1 - chances))
    assert (np.abs(counts - 600 * chances) < 5 * deviation + 1).all()


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


def test_no_prompt_is_copied_from_other_weights_with_the_same_version(
    changing, model, tiny_model_dir, tmp_path
):
    """Twelve of a group's samples begin before such weights come, and twelve after."""
    engine, prompt, path = changing.engine, prompt_of(3, 40), tmp_path / "new.safetensors"
    tensors = load_file(tiny_model_dir / "model.safetensors")
    save_file({name: tensor * np.float32(0.7) for name, tensor in tensors.items()}, path)
    tick = engine._tick

    def tick_then_swap():
        tick()
        if engine._slots.running:
            engine._tick = tick
            engine._swap(engine._read(str(path)), 0, "keep")

    engine._tick = tick_then_swap
    out = changing.ask(prompt, n=24, seed=1, max_new_tokens=40)
    for index in range(12, 24):
        assert_scored(with_weights(model, path), prompt, out[index])


def test_a_server_wakes_before_it_has_computed_its_caches_again(changing, monkeypatch):
    """Waking has a deadline, and long prompts on a CPU take longer."""
    engine, go = changing.engine, threading.Event()
    again = engine._recompute

    def slow():
        go.wait(60)
        again()

    monkeypatch.setattr(engine, "_recompute", slow)

    async def scenario():
        task = asyncio.create_task(changing.collect(prompt_of(1), n=4, seed=1, max_new_tokens=60))
        while not engine.status().running:
            await asyncio.sleep(0.001)
        await engine.pause(1)
        try:
            await asyncio.wait_for(engine.resume(), 30)
            assert not task.done()
        finally:
            go.set()
        return await task

    assert {sample.stop for sample in changing.do(scenario()).values()} <= {"stop", "length"}


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
    assert {name for name, *_ in status.spans} == {"load and compile", "prefill", "decode"}
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
