"""A gateway over a real fleet: gRPC on loopback, with an engine that answers by a script."""

import asyncio
import importlib.util
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlx.agents.api_gateway import Gateway
from rlx.engines.server import Server
from rlx.fleet.client import Fleet
from rlx.fleet.requests import Sampling, Timeouts
from rlx.run.tokenizer_files import load_tokenizer

HERE = Path(__file__).parent


def _load(name):
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


scripted = _load("scripted_engine")
LIMITS = Timeouts(
    connect_seconds=10, request=20, hang_seconds=1.0, probe_seconds=0.1, outage_seconds=0.5,
    backoff=0.2,
)  # fmt: skip


class AgentTools:
    """What the tests of agents start things with."""

    engine = scripted.ScriptedEngine
    tokenizer = staticmethod(scripted.make_tokenizer)
    classes = str(HERE / "agent_classes.py")
    sampling = Sampling(temperature=1.0, max_new_tokens=200, seed=1)

    @staticmethod
    def run(coroutine, seconds=30):
        """Runs a test's coroutine to its end, or fails it."""
        return asyncio.run(asyncio.wait_for(coroutine, seconds))

    @staticmethod
    @asynccontextmanager
    async def fleet(engine, limits=LIMITS, image=None):
        """A connected Fleet of one server with `engine`."""
        server = Server(lambda: engine)
        await server.start()
        fleet = Fleet([f"127.0.0.1:{server.port}"], limits=limits, image=image)
        try:
            await fleet.connect()
            yield fleet, server
        finally:
            await fleet.close()
            await server.stop()

    @classmethod
    @asynccontextmanager
    async def gateway(
        cls, engine=None, sampling=None, template=None, tokenizer="", limits=LIMITS, images=None,
        **options,
    ):  # fmt: skip
        """A gateway with a session; yields gateway, session, engine, server, fleet."""
        engine = engine or cls.engine()
        if tokenizer:  # of a real model
            tokenizer = load_tokenizer(Path(tokenizer))
        else:
            tokenizer = cls.tokenizer(template) if template else cls.tokenizer()
        images = images and images(tokenizer)
        get = images and images.store.get
        async with cls.fleet(engine, limits, get) as (fleet, server):
            gateway = Gateway(fleet, tokenizer, images=images)
            await gateway.start()
            try:
                yield SimpleNamespace(
                    gateway=gateway,
                    session=gateway.sessions.open(sampling or cls.sampling, **options),
                    engine=engine,
                    server=server,
                    fleet=fleet,
                )
            finally:
                await gateway.stop()

    @staticmethod
    def client(found, session=None, **options):
        """The official client of a session, without retries."""
        from openai import AsyncOpenAI

        key = (session or found.session).key
        options = {"max_retries": 0, "api_key": key, **options}
        return AsyncOpenAI(base_url=found.gateway.base_url(), **options)

    @staticmethod
    def claude(found, kind="AsyncAnthropic", **options):
        """Anthropic's client of the session, which sends the key in its own header, x-api-key."""
        import anthropic

        options = {"max_retries": 0, "api_key": found.session.key, **options}
        return getattr(anthropic, kind)(base_url=found.gateway.base_url(), **options)


@pytest.fixture(scope="session")
def agents():
    """See AgentTools."""
    return AgentTools
