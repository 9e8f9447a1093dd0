"""Samples that an engine made while its weights changed, made again bit for bit."""

import asyncio
import time
from contextlib import aclosing
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rlx.engines.jax.jax_engine import JaxEngine
from rlx.engines.jax.regenerate import Recording, Regenerator, batches
from rlx.fleet.requests import Request, Sampling
from rlx.fleet.sample import Completion, GenerateCall, PartialSample
from tests.fixtures.served import prompt_of

STEPS, COUNT, LOST = 4, 6, 5  # decode steps; samples; the one whose server is lost
OPTIONS = {"slots": COUNT, "max_model_len": 128, "decode_steps": STEPS}
LEVELS = {"sleep": 1, "sleep without weights": 2}
SAMPLING = Sampling(min_new_tokens=70, max_new_tokens=90, top_k=20, seed=3)


def weights(tiny_model_dir, path, version):
    """A version's file, which differs from others by more than a factor."""
    tensors = load_file(tiny_model_dir / "model.safetensors")
    rng = np.random.default_rng(version)
    changed = {k: t * rng.uniform(0.9, 1.1, t.shape).astype(t.dtype) for k, t in tensors.items()}
    save_file(changed, path)
    return str(path)


class Slowed(JaxEngine):
    """An engine that decodes slowly while weights are read, so that samples outlast it."""

    slow = 0.005

    def _tick(self):
        time.sleep(self.slow)
        super()._tick()


async def recorded(model, files, kv):
    """Samples during which the weights change twice; one goes on in another request."""
    engine = Slowed(model, **OPTIONS)
    await engine.start()
    samples = [PartialSample(1) for _ in range(COUNT)]

    async def sample(number):
        call = GenerateCall(prompt_of(number, 5 + number), SAMPLING, None, 0)
        own, cut = samples[number], number != LOST
        while not call.finished(own):
            async with aclosing(engine.generate(call.request([own]))) as stream:
                async for chunk in stream:
                    own.add(chunk)
                    if not cut and own.length >= 3 * STEPS:
                        cut = True
                        break
        asked = replace(call.request([PartialSample(1)]), request_id=str(number))
        return Recording(asked, own.completion())

    async def change():
        for version, length in ((1, 8), (2, 20)):
            while samples[0].length < length:
                await asyncio.sleep(0.001)
            engine.slow = 0.1
            if level := LEVELS.get(kv, 0):  # as a server in turns with its trainer
                await engine.pause(level)
                await engine.load(files[version], version)
                await engine.resume()
            else:
                await engine.load(files[version], version, kv)
            engine.slow = 0.005

    *found, _ = await asyncio.gather(*map(sample, range(COUNT)), change())
    await engine.close()
    return found


def bits(made):
    return made.tokens.tolist(), np.float32(made.logprobs).tobytes(), made.versions.tolist()


@pytest.mark.parametrize("kv", ["keep", "recompute", "abort", *LEVELS])
def test_samples_are_made_again_across_weights_and_requests(tiny_model_dir, tmp_path, kv):
    files = {v: weights(tiny_model_dir, tmp_path / f"{v}.safetensors", v) for v in (1, 2)}
    files[0] = str(tiny_model_dir)
    found = asyncio.run(recorded(files[0], files, kv))
    assert sum(len(set(each.completion.versions.tolist())) == 3 for each in found) >= COUNT - 1
    engine = Regenerator(files[0], kv, **OPTIONS)

    def again(*recordings):
        return [bits(made) for made in engine.make(recordings, files.__getitem__)]

    own, made = [bits(each.completion) for each in found], again(*found)
    assert made[:LOST] == own[:LOST]
    tries = [replace(found[LOST], prefills=frozenset({call})) for call in range(1, 24)]
    assert own[LOST] in again(*tries)
    if kv == "keep":  # else a prefill with new weights may have replaced the other one
        assert made[LOST] != own[LOST]
        assert again(*tries).count(own[LOST]) == 1

    late = found[0].completion.versions.copy()  # weights that are switched a decode call late
    switch = int(np.argmax(late > 0))
    late[switch : switch + STEPS] = 0
    moved = replace(found[0], completion=replace(found[0].completion, versions=late))
    (other,) = again(moved)
    assert np.frombuffer(other[1], np.float32)[switch] != found[0].completion.logprobs[switch]
    engine.end()
    other = Regenerator(files[0], "recompute" if kv == "keep" else "keep", **OPTIONS)
    assert [bits(each) for each in other.make(found, files.__getitem__)] != own
    other.end()


def test_a_guides_sample_is_made_again_a_token_a_call(tiny_model_dir):
    pytest.importorskip("llguidance", reason="llguidance is not installed")
    schema = '{"type": "string", "minLength": 200}'
    request = Request("0", prompt_of(1, 9), Sampling(guide=schema, max_new_tokens=20, seed=3))

    async def recorded():
        engine, own = JaxEngine(str(tiny_model_dir), **OPTIONS), PartialSample(0)
        await engine.start()
        async with aclosing(engine.generate(request)) as stream:
            async for chunk in stream:
                own.add(chunk)
        await engine.close()
        return own.completion()

    found = Recording(request, asyncio.run(recorded()))
    engine = Regenerator(str(tiny_model_dir), "keep", **OPTIONS)
    (made,) = engine.make([found], lambda version: str(tiny_model_dir))
    engine.end()
    assert bits(made) == bits(found.completion)
    assert len(made.tokens) == 20


def recording(*versions):
    made = Completion(*np.zeros((2, len(versions)), np.float32), np.array(versions), "stop")
    return Recording(Request("", np.ones(1, np.int32), SAMPLING), made)


def test_a_batch_has_one_series_of_versions():
    short, long, later, other = (
        recording(0, 0), recording(0, 0, 0, 0, 1, 1), recording(1, 1, 1, 1), recording(0, 0, 1)
    )  # fmt: skip
    found = batches([short, later, other, long], 2, 8)
    assert found == [[long, short], [later], [other]]
    assert batches([long, long, long], 2, 2) == [[long, long], [long]]
