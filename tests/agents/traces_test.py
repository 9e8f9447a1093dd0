"""Spans of rollouts, through gateway, fleet, engine and reward, at a collector that takes OTLP."""

import asyncio
import contextlib
import json
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rlx.agents.workflow import AgentWorkflow
from rlx.base import UserError
from rlx.engines.server import Server
from rlx.fleet.client import Fleet
from rlx.observe import traces
from rlx.rewards.reward_pool import RewardCall, RewardPool
from rlx.rollout.attempts import Patience
from rlx.rollout.data import Cursor
from rlx.rollout.executor import Executor
from rlx.rollout.staleness import Limits
from rlx.system.threads import LoopThread
from tests.agents.conftest import LIMITS

pytestmark = pytest.mark.witnesses
ROWS = [{"question": f"what is {k}?", "answer": str(k)} for k in range(4)]


@contextlib.contextmanager
def collector(status=200):
    """(address, spans): a collector, and (name, id, parent, trace, service, attributes, …)."""
    service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    spans = []

    class Receive(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert self.path == "/v1/traces"
            for resource in service.ExportTraceServiceRequest.FromString(body).resource_spans:
                named = {a.key: a.value.string_value for a in resource.resource.attributes}
                spans.extend(
                    (named["service.name"], span)
                    for scope in resource.scope_spans
                    for span in scope.spans
                )
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Receive)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", spans
    finally:
        server.shutdown()
        server.server_close()


class Graded:
    """An agent's workflow, whose prompts are also graded by a function of rewards."""

    def __init__(self, agents, pool):
        self._own = AgentWorkflow(
            f"{agents.classes}:AsTheRowSays", agents.tokenizer(), agents.sampling, 2
        )
        self._pool = pool

    async def run(self, fleet, task):
        group = await self._own.run(fleet, task)
        await self._pool.grade([RewardCall("", "7", (), (), {"answer": "7"})])
        return group

    async def aclose(self):
        await self._own.aclose()


async def connected(agents, tracer):
    """A server of a scripted engine, and a fleet of it."""
    server = Server(agents.engine, tracer=tracer)
    await server.start()
    fleet = Fleet([f"127.0.0.1:{server.port}"], limits=LIMITS)
    await fleet.connect()
    return server, fleet


def rollouts(agents, place, **row):
    """Make two groups of an agent by an executor; the server has a tracer of its own."""
    loop, pool = LoopThread("executor"), RewardPool("gsm8k", timeout=30.0)
    rows = [{**each, "agent": "Repeat", "options": {}, **row} for each in ROWS]
    with traces.tracing(place, "rlx-trainer") as own, traces.tracing(place, "rlx-server") as theirs:
        loop.start()
        server, fleet = loop.run(connected(agents, theirs))
        executor = Executor(
            Graded(agents, pool), Cursor(rows, 0, False), Limits(2, 0, 8), fleet,
            loop=loop, tracer=own, patience=Patience(attempts=1),
        )  # fmt: skip
        try:
            executor.set_version(0)
            end = time.monotonic() + 60
            while not executor.collect(timeout=0.1) and not executor.counters()["skipped"]:
                assert time.monotonic() < end
        finally:
            executor.close()
            loop.run(fleet.close())
            loop.run(server.stop())
            pool.close()
            loop.close()


def test_a_rollout_is_one_trace_through_all_processes(agents):
    with collector() as (address, spans):
        rollouts(agents, address)
    ids = {span.span_id: span.name for _, span in spans}
    above = {(s, span.name, ids.get(span.parent_span_id, "")) for s, span in spans}
    assert above == {
        ("rlx-trainer", "rollout", ""),
        ("rlx-trainer", "agent", "rollout"),
        ("rlx-trainer", "gateway", "agent"),
        ("rlx-trainer", "generate", "gateway"),
        ("rlx-server", "engine", "generate"),
        ("rlx-trainer", "reward", "rollout"),
    }
    counts = {name: sum(span.name == name for _, span in spans) for name in set(ids.values())}
    assert counts == {
        "rollout": 2, "reward": 2, "agent": 4, "gateway": 4, "generate": 4, "engine": 4
    }  # fmt: skip
    roots = {span.trace_id for _, span in spans if span.name == "rollout"}
    assert {span.trace_id for _, span in spans} == roots
    assert len(roots) == 2
    for _, span in spans:
        named = {a.key: a.value for a in span.attributes}
        if span.name == "rollout":
            assert named["row"].int_value in (0, 1)
            assert named["attempt"].int_value == 0
        if span.name == "engine":
            assert [event.name for event in span.events] == ["first token"]


def test_a_failed_agent_is_seen(agents):
    with collector() as (address, spans):
        rollouts(agents, address, agent="Misbehaves", how="raises")
    failed = [span for _, span in spans if span.status.code == 2]
    # What was under way for other samples ends with it, cancelled or with errors of its own.
    raised = {span.name for span in failed if "no such tool" in span.status.message}
    assert raised == {"agent", "rollout"}


def test_a_directory_gets_lines_of_json(agents, tmp_path):
    pytest.importorskip("opentelemetry.sdk")
    with traces.tracing(str(tmp_path / "of" / "spans"), "rlx-trainer") as tracer:
        with traces.span("rollout", tracer, group_id=3):
            own, parent = traces.here()
            ((header, sent),) = traces.metadata()

        async def later():
            with traces.span("gateway", own, parent):
                pass

        asyncio.run(later())
        with traces.span("engine", *traces.caller(tracer, [("a", "b"), (header, sent)])):
            pass
        assert traces.caller(tracer, [("a", "b")]) == traces.caller(None, [(header, sent)])
    (file,) = (tmp_path / "of" / "spans").iterdir()
    found = [json.loads(line) for line in file.read_text().splitlines()]
    assert [span["name"] for span in found] == ["rollout", "gateway", "engine"]
    root = found[0]["context"]["span_id"]
    assert [span["parent_id"] for span in found] == [None, root, root]
    assert found[0]["attributes"] == {"group_id": 3}


@pytest.mark.parametrize("gone", [False, True])
def test_a_collector_that_refuses_or_is_gone_ends_nothing(gone):
    with contextlib.ExitStack() as stack:
        address, _ = stack.enter_context(collector(503))
        if gone:
            stack.close()
        begun = time.monotonic()
        with traces.tracing(address, "rlx-trainer") as tracer, traces.span("rollout", tracer):
            pass
        assert time.monotonic() - begun < 15


def test_without_a_place_nothing_is_imported_or_recorded():
    code = """
import sys
from rlx.observe import traces
with traces.tracing("", "rlx-trainer") as tracer, traces.span("rollout", tracer, group_id=1) as own:
    assert (tracer, own, traces.here(), traces.metadata()) == (None, None, (None, None), ())
assert not [name for name in sys.modules if name.startswith("opentelemetry")]
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    place = traces.tracing("http://127.0.0.1:1", "rlx-trainer")
    with pytest.raises(UserError, match=r"observe\.traces needs packages.*otel"), place:
        pass
