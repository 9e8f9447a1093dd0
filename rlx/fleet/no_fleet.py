"""Stand-in for the fleet of a run that trains on a dataset and has no servers."""

from typing import Any, NoReturn

from rlx.fleet.client import PublishReport


class NoFleet:
    """A `Fleet` without servers: publishing succeeds at once, generating is an error."""

    async def connect(self) -> None:
        """Do nothing."""

    async def generate(self, *_: Any, **__: Any) -> NoReturn:
        """Raise RuntimeError: the caller must not generate in a run without servers."""
        raise RuntimeError("a run without rollout servers generates nothing")

    async def publish(self, version: int, source: Any, method: str = "path") -> PublishReport:
        """Return a report without servers."""
        return PublishReport(acks=(), deliveries=(), num_bytes=0, seconds=0.0)

    async def drain_spans(self) -> dict[str, list[tuple[str, int, int]]]:
        """Return no spans."""
        return {}

    async def close(self) -> None:
        """Do nothing."""
