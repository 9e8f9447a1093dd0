"""Somebody else publishes to the servers of a run, who has their token: another trainer, say."""

import asyncio
import dataclasses

import pytest

from rlx.base import UserError
from rlx.fleet import rollout_pb2 as pb
from rlx.fleet.client import Fleet
from rlx.fleet.publish import checksum, write_weights
from rlx.fleet.requests import Sampling


async def publish(tools, tmp_path, server, version, scale):
    """A publish by no fleet of ours; returns the checksum."""
    path = tmp_path / f"foreign-{version}-{scale}.safetensors"
    crc = write_weights(tools.weights(scale), path)
    header = pb.PublishHeader(
        version=version, path=str(path), num_bytes=path.stat().st_size, crc32=crc
    )
    async with tools.stub(server) as stub:
        await stub.Publish(iter([pb.PublishRequest(header=header)]))
    assert crc == checksum(path)
    return crc


# Its version is another one, or ours with other weights.
@pytest.mark.parametrize("version", [7, 3])
def test_the_next_probe_tells(tools, tmp_path, version):
    async def main():
        async with tools.fleet(2, tmp_path) as (fleet, _, servers):
            await fleet.publish(3, tools.weights(0.5))
            crc = await publish(tools, tmp_path, servers[1], version, 0.25)
            with pytest.raises(UserError) as caught:
                await fleet.drain_spans()
            (line,) = str(caught.value).splitlines()
            assert line.startswith(f"127.0.0.1:{servers[1].port} served version {version} ")
            assert f"{crc:08x}" in line
            for call in (
                fleet.generate([1], Sampling(max_new_tokens=2), 1),
                fleet.publish(4, tools.weights(0.5)),
            ):
                with pytest.raises(UserError, match="something else publishes to it"):
                    await call

    tools.run(main())


def test_the_next_publish_tells_where_no_probe_came_between(tools, tmp_path):
    limits = dataclasses.replace(tools.limits, probe_seconds=60)

    async def main(first):
        async with tools.fleet(1, tmp_path, limits=limits) as (fleet, _, servers):
            if first:
                await fleet.publish(1, tools.weights(0.5))
            await fleet.generate([1], Sampling(max_new_tokens=2), 1)
            await publish(tools, tmp_path, servers[0], 1, 0.25)
            with pytest.raises(UserError, match=r"served version 1 .* something else publishes"):
                await fleet.publish(2, tools.weights(0.5))

    for first in (True, False):  # also before the first publish of ours
        tools.run(main(first))


def test_an_update_by_the_killed_process_of_this_run_may_end_after_the_next_one_connects(
    tools, tmp_path
):
    async def main():
        async with tools.fleet(1, tmp_path) as (fleet, _, servers):
            await publish(tools, tmp_path, servers[0], 7, 0.25)  # no token was asked for before
            await fleet.publish(0, tools.weights(0.5))
            assert [s.status.version for s in await fleet.status()] == [0]

    tools.run(main())


def test_own_publishes_and_those_of_the_run_before_are_no_surprise(tools, tmp_path):
    async def main():
        async with tools.fleet(2, tmp_path) as (fleet, _, servers):
            stop = asyncio.Event()

            async def probing():
                while not stop.is_set():
                    await fleet.drain_spans()

            probes = asyncio.create_task(probing())
            for version in range(1, 40):
                method = ("path", "stream", "delta")[version % 3]
                await fleet.publish(version, tools.weights(1 / version), method)
            stop.set()
            await probes
            await fleet.close()
            addresses = [f"127.0.0.1:{server.port}" for server in servers]
            following = Fleet(addresses, limits=tools.limits, publish_dir=str(tmp_path))
            try:
                await following.connect()
                for version in (0, 1):
                    await following.publish(version, tools.weights(2.0))
                    assert [s.status.version for s in await following.status()] == [version] * 2
            finally:
                await following.close()

    tools.run(main())
