"""Servers in this process and their clients; processes that are killed are in faults_test.py."""

import asyncio
import importlib.util
import sys
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest

from rlx.fleet import rollout_pb2_grpc as rpc
from rlx.fleet import wire
from rlx.fleet.client import Fleet, Limits
from rlx.fleet.server import Server

PATH = Path(__file__).parent / "arithmetic_engine.py"
_spec = importlib.util.spec_from_file_location("arithmetic_engine", PATH)
_module = importlib.util.module_from_spec(_spec)
sys.modules["arithmetic_engine"] = _module
_spec.loader.exec_module(_module)

QUICK = Limits(
    connect=10, request=20, publish=10, probe=1.0, probe_every=0.1, outage=10, backoff=0.2
)


@pytest.fixture(scope="session")
def arithmetic():
    """The engine whose tokens are arithmetic."""
    return _module


class Tools:
    """What the fleet's tests start things with."""

    limits = QUICK
    script = str(PATH)

    @staticmethod
    def run(coroutine, seconds=30):
        """Runs a test's coroutine to its end, or fails it."""
        return asyncio.run(asyncio.wait_for(coroutine, seconds))

    @staticmethod
    def weights(scale):
        """The arithmetic engine's weights."""
        return {"scale": np.asarray(scale, np.float32)}

    @staticmethod
    @asynccontextmanager
    async def server(engine=None, **options):
        """A server on loopback; yields (engine, server)."""
        engine = engine or _module.ArithmeticEngine()
        server = Server(lambda: engine, **options)
        await server.start()
        try:
            yield engine, server
        finally:
            await server.stop()

    @staticmethod
    @asynccontextmanager
    async def stub(server, **metadata):
        """A bare client of `server`."""
        address = f"127.0.0.1:{server.port}"
        async with grpc.aio.insecure_channel(address, options=wire.OPTIONS) as channel:
            yield rpc.RolloutStub(channel)

    @classmethod
    @asynccontextmanager
    async def fleet(cls, count, tmp_path, engines=None, limits=QUICK, **options):
        """`count` servers and a connected Fleet; yields (fleet, engines, servers)."""
        options = {"weight_roots": [str(tmp_path)], "stage_dir": str(tmp_path), **options}
        async with AsyncExitStack() as stack:
            engines = engines or [_module.ArithmeticEngine() for _ in range(count)]
            started = [await stack.enter_async_context(cls.server(e, **options)) for e in engines]
            servers = [server for _, server in started]
            fleet = Fleet(
                [f"127.0.0.1:{server.port}" for server in servers],
                limits=limits,
                publish_dir=str(tmp_path),
            )
            stack.push_async_callback(fleet.close)
            await fleet.connect()
            yield fleet, engines, servers


@pytest.fixture(scope="session")
def tools():
    """See Tools."""
    return Tools
