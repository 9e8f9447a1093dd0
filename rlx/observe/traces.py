"""Record spans of rollouts for OpenTelemetry: who waited for whom, in which process.

    rollout ─▶ agent ─▶ gateway ─▶ generate ┈ traceparent, in gRPC's metadata ┈▶ engine
          └──▶ reward

A span begins in the current one, which `contextvars` carries into tasks. Without `observe.traces`
nothing of OpenTelemetry is imported, and `span` reads one variable.
"""

import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from rlx.base import explained, packages_of

HEADER = "traceparent"  # https://www.w3.org/TR/trace-context/
_SECONDS = 5.0  # limit of one export, so that a collector that is gone holds up no run's end
_TRACER: ContextVar[Any] = ContextVar("_TRACER", default=None)  # of the current span


@contextmanager
def tracing(place: str, service: str) -> Iterator[Any]:
    """Yield a tracer for `span`, or None if `place` is empty; write the last spans at the end.

    A place is http(s)://HOST:PORT of a collector that takes OTLP over HTTP. It may be a directory:
    there SERVICE-HOST-PID.jsonl gets an object for each span.
    """
    if not place:
        yield None
        return
    with packages_of("otel", "observe.traces needs packages"):
        from opentelemetry.exporter.otlp.proto.http import trace_exporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider, export
    host = socket.gethostname()
    attributes: Any = {"service.name": service, "host.name": host, "process.pid": os.getpid()}
    provider = TracerProvider(resource=Resource.create(attributes), shutdown_on_exit=False)
    with ExitStack() as stack:
        exporter: Any
        if place.startswith(("http://", "https://")):
            url = f"{place.rstrip('/')}/v1/traces"
            exporter = trace_exporter.OTLPSpanExporter(endpoint=url, timeout=_SECONDS)
        else:
            with explained(f"cannot write observe.traces={place}", "give another directory"):
                Path(place).mkdir(parents=True, exist_ok=True)
                file = (Path(place) / f"{service}-{host}-{os.getpid()}.jsonl").open("a")
            line = lambda span: f"{span.to_json(indent=None)}\n"  # noqa: E731
            exporter = export.ConsoleSpanExporter(out=stack.enter_context(file), formatter=line)
        provider.add_span_processor(export.BatchSpanProcessor(exporter))
        stack.callback(provider.shutdown)
        yield provider.get_tracer("rlx")


@contextmanager
def span(name: str, tracer: Any = None, parent: Any = None, **attributes: Any) -> Iterator[Any]:
    """Record the block as a span inside the current one, also when it raises; yield it, or None.

    Without a current one, `tracer` begins a trace. `parent` is a context in place of the current.
    """
    tracer = tracer or _TRACER.get()
    if tracer is None:
        yield None
        return
    before = _TRACER.set(tracer)
    try:
        with tracer.start_as_current_span(name, parent, attributes=attributes) as new_span:
            yield new_span
    finally:
        _TRACER.reset(before)


def here() -> tuple[Any, Any]:
    """Return tracer and context of the current span, for `span` in a task that it did not start."""
    if (tracer := _TRACER.get()) is None:
        return None, None
    from opentelemetry import context

    return tracer, context.get_current()


def metadata() -> tuple[tuple[str, str], ...]:
    """Return metadata that names the current span to another process; () without one."""
    if _TRACER.get() is None:
        return ()
    from opentelemetry.trace.propagation import tracecontext

    carrier = dict[str, str]()
    tracecontext.TraceContextTextMapPropagator().inject(carrier)
    return ((HEADER, carrier[HEADER]),)


def caller(tracer: Any, pairs: Iterable[tuple[str, Any]] | None) -> tuple[Any, Any]:
    """Return the arguments of `span` for a call with this metadata; None twice without a trace."""
    headers = {key: value for key, value in pairs or () if tracer and key == HEADER}
    if not headers:
        return None, None
    from opentelemetry.trace.propagation import tracecontext

    return tracer, tracecontext.TraceContextTextMapPropagator().extract(headers)
