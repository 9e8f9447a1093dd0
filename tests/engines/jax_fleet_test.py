"""The whole path with a model: `python -m rlx.serve` processes, the JAX engine, real weights."""

import asyncio
import dataclasses
import os
import re
import signal
import sys

import numpy as np
import pytest

from rlx.fleet.requests import Sampling
from rlx.launch.local import LocalServers

PROMPTS = [[3, 17, 44, 9], [5, 6, 7], [100, 90, 80, 70, 60]]
SAMPLING = Sampling(seed=5, max_new_tokens=96, min_new_tokens=96)


@pytest.fixture(scope="module")
def servers(tiny_model_dir, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("servers")
    options = {"slots": 16, "max_model_len": 128, "decode_steps": 4}
    local = LocalServers(tiny_model_dir, workdir=workdir, num_servers=2, **options)
    with local:
        local.wait()
        yield local, workdir


BREAKS_ONCE = """
import os, sys
from rlx import serve
from rlx.cli import command
from rlx.engines.jax.programs import Programs

decode, flag = Programs.decode, os.environ["BREAKS_ONCE"]

def broken(self, *args):
    if os.path.exists(flag):
        os.unlink(flag)
        raise ValueError("device lost")
    return decode(self, *args)

Programs.decode = broken
command.run(lambda: serve.main(sys.argv[1:]))
"""


def connected(tools, servers, body):
    """Runs body(fleet) with a fleet of both servers."""
    local, _ = servers

    async def main():
        fleet = local.fleet(limits=tools.limits)
        try:
            await fleet.connect()
            return await body(fleet)
        finally:
            await fleet.close()

    return tools.run(main(), 90)


async def draw(fleet):
    """4 samples of each prompt, flattened."""
    groups = await asyncio.gather(*(fleet.generate(p, SAMPLING, 4) for p in PROMPTS))
    return [completion for group in groups for completion in group]


def scaled(model_dir, factor):
    from safetensors.numpy import load_file

    tensors = load_file(model_dir / "model.safetensors")
    return {name: (value * factor).astype(np.float32) for name, value in tensors.items()}


@pytest.mark.parametrize("method", ["path", "stream"])
def test_weights_replaced_in_flight(tools, servers, tiny_model_dir, method):
    async def body(fleet):
        await fleet.publish(1, scaled(tiny_model_dir, 1.0), method)
        before = await draw(fleet)
        running = asyncio.create_task(draw(fleet))
        while not any(server.status.running for server in await fleet.status()):
            await asyncio.sleep(0.002)
        report = await fleet.publish(2, scaled(tiny_model_dir, 0.8), method)
        assert len(report.acks) == 2
        during, after = await running, await draw(fleet)
        for completion in before:
            assert set(completion.versions.tolist()) == {1}
        assert any(1 in completion.versions for completion in during)
        for old, mixed, new in zip(before, during, after, strict=True):
            assert (np.diff(mixed.versions) >= 0).all()
            first = mixed.versions == 1
            np.testing.assert_array_equal(mixed.tokens[first], old.tokens[first])
            np.testing.assert_array_equal(mixed.logprobs[first], old.logprobs[first])
            assert set(new.versions.tolist()) == {2}
            assert not np.array_equal(new.logprobs, old.logprobs)
            assert (new.logprobs <= 0).all()

    connected(tools, servers, body)


def test_killed_server_does_not_change_a_token(tools, servers, tiny_model_dir):
    local, _ = servers

    async def body(fleet):
        await fleet.publish(7, scaled(tiny_model_dir, 1.1))
        undisturbed = await draw(fleet)
        running = asyncio.create_task(draw(fleet))
        while not all(server.status.running for server in await fleet.status()):
            await asyncio.sleep(0.002)
        os.kill(local.pids[0], signal.SIGKILL)
        for one, two in zip(undisturbed, await running, strict=True):
            np.testing.assert_array_equal(one.tokens, two.tokens)
            np.testing.assert_allclose(one.logprobs, two.logprobs, atol=1e-4)
            assert set(two.versions.tolist()) == {7}

    connected(tools, servers, body)


def test_weights_of_another_shape_are_refused_by_name(tools, servers, tiny_model_dir):
    async def body(fleet):
        good = scaled(tiny_model_dir, 1.0)
        await fleet.publish(8, good)
        name = "model.norm.weight"
        for bad in ({**good, name: good[name][:-1]}, {k: v for k, v in good.items() if k != name}):
            with pytest.raises(Exception, match=name):
                await fleet.publish(9, bad)
        completion = (await fleet.generate(PROMPTS[0], SAMPLING, 1))[0]
        assert set(completion.versions.tolist()) == {8}

    connected(tools, servers, body)


def test_a_server_ends_with_its_engine_and_is_started_again(
    tools, tiny_model_dir, tmp_path, monkeypatch
):
    flag, messages = tmp_path / "flag", []
    monkeypatch.setenv("BREAKS_ONCE", str(flag))
    flag.touch()
    local = LocalServers(
        tiny_model_dir, workdir=tmp_path, on_message=messages.append,
        command=(sys.executable, "-c", BREAKS_ONCE), slots=4, max_model_len=128,
    )  # fmt: skip

    limits = dataclasses.replace(
        tools.limits, hang_seconds=10, outage_seconds=60
    )  # it compiles anew

    async def main():
        fleet = local.fleet(limits=limits)
        try:
            await fleet.connect()
            await fleet.publish(1, scaled(tiny_model_dir, 1.0))
            return (await fleet.generate(PROMPTS[0], Sampling(seed=5, max_new_tokens=8), 1))[0]
        finally:
            await fleet.close()

    with local:
        completion = tools.run(main(), 90)
    assert not flag.exists(), "the engine never broke"
    assert len(completion.tokens)
    assert re.search(
        r"ended with status 1 \(.*device lost\); starting it again", " ".join(messages)
    )
    assert (
        "EngineStopped: the engine has stopped: ValueError: device lost"
        in (tmp_path / "logs" / "server-0.log").read_text()
    )
