"""A real scrape of a real server, read by Prometheus's own parser."""

import asyncio
import socket
import ssl
import time
import urllib.error
import urllib.request

import grpc
import pytest
import trustme
from prometheus_client.parser import text_string_to_metric_families as families

from rlx.base import UserError
from rlx.engines import server_metrics
from rlx.engines.engine import EngineStopped
from rlx.engines.server import Server
from rlx.engines.server_metrics import Meters, listen
from rlx.fleet import publish
from rlx.fleet import rollout_pb2 as pb
from rlx.fleet.tls import Tls

RIGHT = (("authorization", "Bearer sesame"),)
RIGHT_SOON = {"metadata": RIGHT, "timeout": 10}


@pytest.fixture
def port():
    """A port that was free a moment ago."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def samples(url, context=None):
    """(name, method, code, way: those it has) → value."""
    with urllib.request.urlopen(url, timeout=10, context=context) as page:
        text = page.read().decode()
    labels = ("method", "code", "way")
    return {
        (s.name, *(s.labels[label] for label in labels if label in s.labels)): s.value
        for family in families(text)
        for s in family.samples
    }


def generate(n, tokens):
    sampling = pb.Sampling(temperature=1, top_p=1, max_new_tokens=tokens, seed=1)
    return pb.GenerateRequest(prompt_tokens=[1, 2], sampling=sampling, n=n)


def weights_header(tools, path):
    crc = publish.write_weights(tools.weights(0.5), path)
    size = path.stat().st_size
    return pb.PublishHeader(version=6, path=str(path), num_bytes=size, crc32=crc)


async def ended_with(call):
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"


async def use(stub, header):
    """One call of each fate."""
    right = RIGHT_SOON
    async for _ in stub.Generate(generate(2, 30), **right):
        pass
    assert await ended_with(stub.Generate(generate(0, 30), **right).read()) == "INVALID_ARGUMENT"
    assert await ended_with(stub.AddImage(pb.ImageFile(name="a"), **right)) == "INVALID_ARGUMENT"
    assert await ended_with(stub.Status(pb.StatusRequest(), timeout=10)) == "UNAUTHENTICATED"
    for wanted in ("OK", "DATA_LOSS"):
        messages = iter([pb.PublishRequest(header=header)])
        assert await ended_with(stub.Publish(messages, **right)) == wanted
        header.crc32 ^= 1


def test_a_scrape_tells_what_was_done(tools, tmp_path, port):
    async def main():
        options = {"token": "sesame", "metrics_port": port, "weight_roots": [str(tmp_path)]}
        async with tools.server(**options) as (engine, server), tools.stub(server) as stub:
            header = weights_header(tools, tmp_path / "w.safetensors")
            await use(stub, header)
            seen = await asyncio.to_thread(samples, f"http://127.0.0.1:{port}/metrics")
            assert seen["rlx_calls_total", "Generate", "OK"] == 1
            assert seen["rlx_calls_total", "Generate", "INVALID_ARGUMENT"] == 1
            assert seen["rlx_calls_total", "AddImage", "INVALID_ARGUMENT"] == 1
            assert seen["rlx_calls_total", "Status", "UNAUTHENTICATED"] == 1
            assert seen["rlx_calls_total", "Publish", "OK"] == 1
            assert seen["rlx_calls_total", "Publish", "DATA_LOSS"] == 1
            assert seen["rlx_publish_bytes_total", "path"] == header.num_bytes
            assert seen["rlx_load_stall_seconds_count",] == 1
            assert seen["rlx_request_seconds_count",] == 1
            assert seen["rlx_first_token_seconds_count",] == 1
            assert 0 < seen["rlx_first_token_seconds_sum",] <= seen["rlx_request_seconds_sum",]
            assert seen["rlx_tokens_generated_total",] == engine.generated > 0
            assert seen["rlx_policy_version",] == 6
            assert seen["rlx_slots",] == engine.slots
            assert seen["rlx_running_sequences",] == seen["rlx_queued_sequences",] == 0
            assert seen["rlx_engine_alive",] == 1
            assert (await stub.Status(pb.StatusRequest(), **RIGHT_SOON)).metrics_port == port

            def broken():
                raise EngineStopped("gone")

            engine.status = broken
            seen = await asyncio.to_thread(samples, f"http://127.0.0.1:{port}/metrics")
            assert seen["rlx_engine_alive",] == 0
        with pytest.raises(urllib.error.URLError):
            await asyncio.to_thread(samples, f"http://127.0.0.1:{port}/metrics")

    tools.run(main())


def test_calls_that_are_cut_off_are_counted_as_such(tools, port):
    async def main():
        async with tools.server(metrics_port=port) as (engine, server), tools.stub(server) as stub:
            engine.step_seconds = 0.01
            call = stub.Generate(generate(1, 4000))
            await call.read()
            call.cancel()
            late = stub.Generate(generate(1, 4000), timeout=0.2)
            while await ended_with(late.read()) == "OK":
                pass
            while engine.running:
                await asyncio.sleep(0.005)
            seen = await asyncio.to_thread(samples, f"http://127.0.0.1:{port}/metrics")
            cut = ("CANCELLED", "DEADLINE_EXCEEDED")
            assert sum(seen.get(("rlx_calls_total", "Generate", c), 0) for c in cut) == 2

    tools.run(main())


def test_a_cancelled_call_is_not_late_because_the_wall_clock_jumped(tools, port, monkeypatch):
    async def main():
        async with tools.server(metrics_port=port) as (engine, server), tools.stub(server) as stub:
            engine.step_seconds = 0.01
            call, now = stub.Generate(generate(1, 4000), timeout=60.0), time.time
            await call.read()
            monkeypatch.setattr(time, "time", lambda: now() + 7200)
            call.cancel()
            while engine.running:
                await asyncio.sleep(0.005)
            seen = await asyncio.to_thread(samples, f"http://127.0.0.1:{port}/metrics")
            assert seen["rlx_calls_total", "Generate", "CANCELLED"] == 1

    tools.run(main())


def test_beyond_loopback_scrapers_show_a_certificate(tmp_path, port):
    authority = trustme.CA()
    made = authority.issue_cert("127.0.0.1")
    made.private_key_and_cert_chain_pem.write_to_path(tmp_path / "own.pem")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    own, ca = str(tmp_path / "own.pem"), str(tmp_path / "ca.pem")
    for files in (None, Tls(own, own)):
        with pytest.raises(UserError, match="anyone could scrape them"):
            listen(Meters().registry, "0.0.0.0", port, files)
    # 127.0.0.1 under a name that is not known to be loopback
    server = listen(Meters().registry, "0:0:0:0:0:ffff:127.0.0.1", port, Tls(own, own, ca))
    try:
        context = ssl.create_default_context(cafile=ca)
        url = f"https://127.0.0.1:{port}/metrics"
        with pytest.raises((urllib.error.URLError, OSError)):
            samples(url, context)
        context.load_cert_chain(own)
        assert ("process_open_fds",) in samples(url, context)
    finally:
        server.shutdown()
        server.server_close()


def test_a_taken_metrics_port_is_one_line(tools, port):
    async def main():
        Server(lambda: None, metrics_port=port)

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        with pytest.raises(UserError, match=f"cannot serve metrics on 127.0.0.1:{port}"):
            tools.run(main())


def test_idle_connections_neither_keep_scrapes_out_nor_stay(monkeypatch, port):
    """Half a handshake kept every later scrape waiting, and each half request a thread."""
    monkeypatch.setattr(server_metrics, "_SCRAPE_SECONDS", 0.5)
    monkeypatch.setattr(server_metrics, "_MOST_SCRAPES", 4)
    server = listen(Meters().registry, "127.0.0.1", port, None)
    try:
        idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
        for one in idle:
            one.sendall(b"GET /metr")
        for one in idle:
            one.settimeout(30)
            assert one.recv(1) == b""
            one.close()
        assert ("process_open_fds",) in samples(f"http://127.0.0.1:{port}/metrics")
    finally:
        server.shutdown()
        server.server_close()


def test_half_a_handshake_keeps_no_scrape_waiting(tmp_path, port):
    authority = trustme.CA()
    made = authority.issue_cert("127.0.0.1")
    made.private_key_and_cert_chain_pem.write_to_path(tmp_path / "own.pem")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    own, ca = str(tmp_path / "own.pem"), str(tmp_path / "ca.pem")
    server = listen(Meters().registry, "0:0:0:0:0:ffff:127.0.0.1", port, Tls(own, own, ca))
    try:
        with socket.create_connection(("127.0.0.1", port)):
            context = ssl.create_default_context(cafile=ca)
            context.load_cert_chain(own)
            assert ("process_open_fds",) in samples(f"https://127.0.0.1:{port}/metrics", context)
    finally:
        server.shutdown()
        server.server_close()
