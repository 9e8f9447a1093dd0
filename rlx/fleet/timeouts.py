"""Deadlines and intervals of a fleet's client."""

from dataclasses import dataclass

from rlx.option import option

_SLOWEST = 50e6  # bytes/s at which weights still travel: a shared network, a disk, a checksum


@dataclass(frozen=True)
class Timeouts:
    """Deadlines and intervals, in seconds."""

    publish_timeout_seconds: float = option(
        120.0, "limit to take weights, and 20 for each GB of them; then a server is lost"
    )
    connect_seconds: float = option(60.0, "limit for servers to answer at the start", "(0, inf)")
    probe_seconds: float = option(1.0, "between two probes of a server", "(0, inf)")
    hang_seconds: float = option(5.0, "silence after which its requests go elsewhere", "(0, inf)")
    outage_seconds: float = option(300.0, "longest wait while no server is alive", "(0, inf)")
    request: float = 600.0  # deadline of one Generate call
    backoff: float = 2.0  # the longest pause between two attempts to join a lost server

    def publish_seconds(self, num_bytes: int) -> float:
        """Return the deadline of a publish of `num_bytes` bytes."""
        return self.publish_timeout_seconds + num_bytes / _SLOWEST
