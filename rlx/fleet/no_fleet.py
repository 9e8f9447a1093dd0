"""The fleet of a run without servers: it has nobody to connect to, to ask, or to publish to."""

from typing import Any, NoReturn

from rlx.fleet.client import PublishReport


class Nobody:
    """Stands for `Fleet` where a dataset is trained on and nothing is generated."""

    async def connect(self) -> None:
        """Does nothing."""

    async def generate(self, *_: Any, **__: Any) -> NoReturn:
        """Raises RuntimeError: whoever asks has not looked whether there are servers."""
        raise RuntimeError("a run without rollout servers generates nothing")

    async def publish(self, version: int, source: Any, method: str = "path") -> PublishReport:
        """Nobody took it, at once."""
        return PublishReport(acks=(), deliveries=(), num_bytes=0, seconds=0.0)

    async def drain_spans(self) -> dict[str, list[tuple[str, int, int]]]:
        """None."""
        return {}

    async def close(self) -> None:
        """Does nothing."""
