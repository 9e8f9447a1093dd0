"""Serve a run's numbers to Prometheus, and list the run's listeners in WORKDIR/prometheus.json.

    last lines of metrics.jsonl, eval.jsonl, gate.jsonl ─┐
    executor, fleet and disk ────────────────────────────┴▶ rlx_NAME, a gauge each, at a scrape
    servers that report a listener ─▶ prometheus.json, as Prometheus reads it

rlx/observe/monitoring has alert rules and a dashboard.
"""

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from rlx.base import UserError
from rlx.doctor import memory
from rlx.fleet.tls import Tls, is_loopback
from rlx.observe.writers import scalars, values_of
from rlx.system.host_port import bracketed, split_address
from rlx.system.jsonl import read_last, write_atomically

RECORDS = {"metrics.jsonl": "", "eval.jsonl": "eval_", "gate.jsonl": "gate_"}  # prefixes of names


def gauges_of(record: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """Return name → number of a record; histograms and facts by server address are left out."""
    values = scalars(values_of({**record, "servers": None}, "step"))
    name = re.compile(r"\W", re.ASCII).sub
    return {prefix + name("_", tag.removeprefix("step/")): value for tag, value in values.items()}


def gauges(parts: Any) -> dict[str, float]:
    """Return all numbers of a built run."""
    values = dict[str, float]()
    for file, prefix in RECORDS.items():
        values |= gauges_of(read_last(parts.workdir / file), prefix)
    states = parts.fleets["policy"].states() if "policy" in parts.fleets else {}
    return values | parts.executor.counters() | {
        "seconds_since_step": parts.progress.age(),
        "max_staleness": parts.config.rollout.max_staleness,
        "disk_free_bytes": shutil.disk_usage(parts.workdir).free,
        "checkpoint_bytes": sum(memory.state(parts.sizes).values()) + memory.exported(parts.sizes),
        "servers": len(states),
        "servers_live": sum(not why for why in states.values()),
    }  # fmt: skip


def targets(parts: Any) -> list[dict[str, Any]]:
    """Return the listeners of a run and its servers, in the form of file_sd_configs."""
    observe, run = parts.config.observe, parts.workdir.absolute().name
    listeners = [("trainer", "policy", bracketed(observe.metrics_host, observe.metrics_port))]
    for model, fleet in getattr(parts, "fleets", {}).items():
        listeners += [("server", model, address) for address in fleet.metrics_listeners()]
    entries = []
    for role, model, address in listeners:
        scheme = "http" if is_loopback(split_address(address)[0]) else "https"
        labels = {"job": "rlx", "run": run, "role": role, "model": model, "__scheme__": scheme}
        entries.append({"targets": [address], "labels": labels})
    return entries


@contextmanager
def serve_metrics(parts: Any) -> Iterator[None]:
    """Serve the run's metrics at `observe.metrics_port` during the block.

    UserError if the port is in use, or the address is not loopback and fleet.tls has no CA.
    """
    observe, tls = parts.config.observe, Tls(**parts.config.fleet.tls)
    from prometheus_client import CollectorRegistry, ProcessCollector
    from prometheus_client.metrics_core import GaugeMetricFamily
    from prometheus_client.registry import Collector

    from rlx.engines.server_metrics import listen

    def write(entries: list[dict[str, Any]]) -> None:
        text, path = json.dumps(entries, indent=1).encode(), parts.workdir / "prometheus.json"
        with suppress(OSError, UserError):  # a full disk hides neither its metric nor a failure
            if not path.exists() or path.read_bytes() != text:
                write_atomically(path, text)

    class Gauges(Collector):
        def collect(self) -> Iterator[GaugeMetricFamily]:
            write(targets(parts))
            for name, value in gauges(parts).items() if hasattr(parts, "executor") else ():
                yield GaugeMetricFamily(f"rlx_{name}", "docs/metrics.md has its meaning.", value)

    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(Gauges())
    server = listen(registry, observe.metrics_host, observe.metrics_port, tls)
    try:
        write(targets(parts))
        yield
    finally:
        server.shutdown()
        server.server_close()
        write([])
