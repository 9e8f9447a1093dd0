"""Ask a server on this machine for its status every second, and say when it no longer answers."""

import time
from collections.abc import Callable

import grpc

from rlx.fleet import rollout_pb2 as pb
from rlx.fleet import rollout_pb2_grpc as rpc

_EVERY_SECONDS = 1.0
_DEADLINE_SECONDS = 10.0  # then it is asked again, maybe on a better connection
_TICK_SECONDS = 0.5
_NO_ANSWER = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.UNKNOWN,  # its engine has stopped; it should end, and may hang on its way
)
_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)


class LivenessProbe:
    """Probe of one server process; never blocks.

    Args:
      port: on loopback.
      token: bearer token. A refusal for want of the right one is an answer, too.
      answered: it has said that it is ready.
      clock: seconds.

    Attributes:
      silent: seconds since its last answer, or since the start. Time in which `poll` was not called
        does not count: then this process was stopped.
      answered: it was ready once.
    """

    def __init__(
        self,
        port: int,
        token: str | None,
        *,
        answered: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.silent, self.answered = 0.0, answered
        self._clock = clock
        self._polled = self._ask_at = clock()
        self._metadata = (("authorization", f"Bearer {token}"),) if token else ()
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}", options=_OPTIONS)
        self._status = rpc.RolloutStub(self._channel).Status
        self._call: grpc.Future | None = None

    def poll(self) -> None:
        """Record an answer and ask again; call it several times a second."""
        now = self._clock()
        self.silent += min(now - self._polled, _TICK_SECONDS)
        self._polled = now
        if self._call and self._call.done():
            if self._call.code() not in _NO_ANSWER:
                self.silent, self.answered = 0.0, True
            self._call = None
        if not self._call and now >= self._ask_at:
            self._ask_at = now + _EVERY_SECONDS
            self._call = self._status.future(
                pb.StatusRequest(), timeout=_DEADLINE_SECONDS, metadata=self._metadata
            )

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()
