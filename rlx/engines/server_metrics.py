"""Prometheus metrics of a rollout server, and the listener that serves these or others.

    rlx_calls_total{method,code}           ended calls; method: Generate, Publish, …, other
    rlx_request_seconds                    histogram: Generate calls that ended OK
    rlx_first_token_seconds                histogram: until the first message of a Generate call
    rlx_publish_bytes_total{way}           accepted weights; way: one of fleet.publish.METHODS
    rlx_load_stall_seconds                 histogram: time without a decode step, per load
    rlx_tokens_generated_total             since the engine started
    rlx_running_sequences, rlx_queued_sequences, rlx_slots, rlx_policy_version, rlx_paused
    rlx_engine_alive                       0: it has failed, or its event loop does not answer

The listener is plain HTTP on loopback; elsewhere scrapers need a client certificate.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any
from wsgiref.simple_server import WSGIServer

import grpc
import prometheus_client as prometheus
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from rlx.base import UserError
from rlx.fleet.requests import EngineStatus
from rlx.fleet.rollout_pb2 import DESCRIPTOR
from rlx.fleet.tls import Tls, is_loopback

_METHODS = frozenset(DESCRIPTOR.services_by_name["Rollout"].methods_by_name)
_STATUS_SECONDS = 5.0  # for the event loop to answer a scrape
_SCRAPE_SECONDS, _MOST_SCRAPES = 10.0, 64  # of a silent connection; concurrent
_CALL_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_STALL_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_CODES = {code.value[0]: code for code in grpc.StatusCode}


class Meters:
    """Counters and histograms of one server, in their own registry."""

    def __init__(self) -> None:
        self.port = 0  # of the listener, for callers on the hosts that reach the server; 0: none
        self.registry = registry = prometheus.CollectorRegistry()
        prometheus.ProcessCollector(registry=registry)
        count = partial(prometheus.Counter, registry=registry)
        times = partial(prometheus.Histogram, registry=registry)
        calls = partial(times, buckets=_CALL_SECONDS)
        self.calls = count("rlx_calls", "Ended calls.", ("method", "code"))
        self.request = calls("rlx_request_seconds", "Generate calls that ended OK.")
        self.first_token = calls("rlx_first_token_seconds", "Until a call's first message.")
        self.publish_bytes = count("rlx_publish_bytes", "Bytes of weights.", ("way",))
        name, text = "rlx_load_stall_seconds", "No step could run, by load."
        self.stall = times(name, text, buckets=_STALL_SECONDS)

    def watch(self, look: Callable[[], EngineStatus]) -> None:
        """Let scrapes read the status from `look`, called on the running event loop."""
        self.registry.register(_Status(look, asyncio.get_running_loop()))


class CallMeter(grpc.aio.ServerInterceptor):
    """Counts calls by code; the outermost interceptor, to count calls that others refuse."""

    def __init__(self, meters: Meters):
        self._meters = meters

    async def intercept_service(self, continuation, handler_call_details):
        name = handler_call_details.method.rpartition("/")[2]
        name = name if name in _METHODS else "other"
        handler = await continuation(handler_call_details)
        if handler is None:
            self._meters.calls.labels(name, "UNIMPLEMENTED").inc()
            return None
        streams = (handler.request_streaming, handler.response_streaming)
        kind = "_".join("stream" if each else "unary" for each in streams)
        metered = {kind: self._metered(name, getattr(handler, kind))}
        return handler._replace(**metered)  # a named tuple

    def _metered(self, name: str, behaviour: Callable) -> Callable:
        async def call(request, context):
            start, left = time.monotonic(), context.time_remaining()  # by the wall clock
            code = grpc.StatusCode.UNKNOWN
            try:
                result = await behaviour(request, context)
                code = _code(context, grpc.StatusCode.OK)
                return result
            except asyncio.CancelledError:
                late = left is not None and left <= time.monotonic() - start
                code = grpc.StatusCode.DEADLINE_EXCEEDED if late else grpc.StatusCode.CANCELLED
                raise
            except BaseException:
                code = _code(context, grpc.StatusCode.UNKNOWN)
                raise
            finally:
                self._meters.calls.labels(name, code.name).inc()
                if name == "Generate" and code is grpc.StatusCode.OK:
                    self._meters.request.observe(time.monotonic() - start)

        return call


class _Status:
    """Collects the engine's status, on the listener's threads."""

    def __init__(self, look: Callable[[], EngineStatus], loop: asyncio.AbstractEventLoop):
        self._look, self._loop = look, loop

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        async def look() -> EngineStatus:
            return self._look()

        try:
            answer = asyncio.run_coroutine_threadsafe(look(), self._loop)
            status = answer.result(_STATUS_SECONDS)
        except Exception:  # EngineStopped, or the loop hangs or has ended
            yield GaugeMetricFamily("rlx_engine_alive", "Whether the engine serves.", 0)
            return
        for name, text, value in (
            ("engine_alive", "Whether the engine serves.", 1),
            ("running_sequences", "Sequences decoding now.", status.running),
            ("queued_sequences", "Sequences waiting for a slot.", status.queued),
            ("slots", "Sequences decoded together at most.", status.slots),
            ("policy_version", "Version of the weights.", status.version),
            ("paused", "Whether decoding is paused.", status.paused),
        ):
            yield GaugeMetricFamily(f"rlx_{name}", text, value)
        tokens = status.tokens_generated
        yield CounterMetricFamily("rlx_tokens_generated", "Tokens generated.", tokens)


def listen(
    source: prometheus.CollectorRegistry, host: str, port: int, tls: Tls | None
) -> WSGIServer:
    """Serve a registry over HTTP until `shutdown`, with TLS beyond loopback.

    UserError if the port is in use, or the address is not loopback and there is no client CA.
    """
    options: dict[str, Any] = {}
    if not is_loopback(host):
        if not (tls and tls.ca):
            raise UserError(
                f"metrics at {host} are beyond this machine and anyone could scrape them; use "
                "127.0.0.1, or require certificates (--tls-client-ca, or fleet.tls of a run)"
            )
        options = {"certfile": tls.cert, "keyfile": tls.key}
        options |= {"client_cafile": tls.ca, "client_auth_required": True}
    try:
        server, _ = prometheus.start_http_server(port, host, source, **options)
    except (OSError, OverflowError) as error:
        raise UserError(
            f"cannot serve metrics on {host}:{port}: {error}; choose another port for metrics"
        ) from None
    # Anyone may connect: bound the time of handshakes and requests, and the number of threads.
    if options:
        server.socket.do_handshake_on_connect = False  # type: ignore[attr-defined]
    handler: Any = server.RequestHandlerClass
    scrape = type("Scrape", (handler,), {"timeout": _SCRAPE_SECONDS})
    most = threading.active_count() + _MOST_SCRAPES
    server.RequestHandlerClass = scrape
    server.verify_request = lambda *_: threading.active_count() < most  # type: ignore[method-assign]
    server.handle_error = lambda *_: None  # type: ignore[method-assign]
    return server


def _code(context: grpc.aio.ServicerContext, unset: grpc.StatusCode) -> grpc.StatusCode:
    code = context.code()  # 0, a number or a StatusCode
    return _CODES.get(code, code) if code else unset
