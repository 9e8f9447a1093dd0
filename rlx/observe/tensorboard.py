"""TensorBoard event files, written in the caller's thread. The only importer of tensorboardX.

tensorboardX's own SummaryWriter hands events to a thread behind a bounded queue; when the
disk fills, that thread dies and the next `add_scalar` blocks the trainer for ever. Its event
writer underneath has no such thread, and raises: we use that one.
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# The board's sections; a name that is not here goes under `other`.
SECTIONS = {
    "run": ("epoch", "global_step", "version", "elapsed_seconds"),
    "reward": ("task_reward", "kl_reward", "final_reward", "advantage"),
    "loss": ("actor_loss", "actor_clip_ratio", "importance_weight", "ppo_approx_kl", "entropy",
             "grad_norm", "behaviour_weight", "behaviour_kl", "learning_rate"),
    "tokens": ("avg_seq_len", "avg_prompt_len", "n_seqs", "n_tokens", "n_valid_tokens",
               "no_eos_ratio", "pad_ratio"),
    "staleness": ("staleness_min", "staleness_mean", "staleness_max", "staleness_histogram",
                  "tokens_per_version"),
    "prompts": ("admitted", "accepted", "rejected", "failed", "dropped", "queued", "live"),
    "speed": ("seconds", "step_seconds", "generated_tokens_per_second",
              "consumed_tokens_per_second", "server_busy_seconds", "teacher_busy_seconds"),
}  # fmt: skip
_SECTION = {name: section for section, names in SECTIONS.items() for name in names}


class EventFile:
    """One event file in `directory`. Flushed at most every `flush_seconds`, and at close."""

    def __init__(
        self,
        directory: str | Path,
        first_step: int | None = None,
        flush_seconds: float = 5.0,
        clock: Callable[[], float] = time.time,
    ):
        """Open a new file; with `first_step`, boards hide earlier files' steps from that one on."""
        with _without_torch():
            from tensorboardX import event_file_writer, summary
            from tensorboardX.proto import event_pb2
        self._summary, self._proto = summary, event_pb2
        self._clock, self._flush_seconds = clock, flush_seconds
        Path(directory).mkdir(parents=True, exist_ok=True)
        # The name ends in nanoseconds: two starts within one second must not share a file.
        self._file = event_file_writer.EventsWriter(
            str(Path(directory) / "events"), f".{time.time_ns()}"
        )
        self._flushed_at = clock()
        if first_step is not None:
            self._event(step=first_step, session_log={"status": "START"})

    def add(self, step: int, record: Mapping[str, Any], section: str | None = None) -> None:
        """Write the numbers of one record.

        Numbers become scalars, dicts of counts by number histograms, other dicts one scalar a key;
        texts, lists and None are left out. `section` is that of each name unless given.
        """
        values = [
            value
            for name, item in record.items()
            if name != "step"
            for value in self._values(_tag(name, section), item)
        ]
        if values:
            self._event(step=step, summary=self._summary.Summary(value=values))
        if self._clock() - self._flushed_at >= self._flush_seconds:
            self._file.flush()
            self._flushed_at = self._clock()

    def close(self) -> None:
        """Flush and close the file."""
        self._file.close()

    def _event(self, **fields: Any) -> None:
        self._file.write_event(self._proto.Event(wall_time=self._clock(), **fields))

    def _values(self, tag: str, item: Any) -> Iterator[Any]:
        if isinstance(item, int | float):
            yield self._summary.Summary.Value(tag=tag, simple_value=item)
        elif isinstance(item, Mapping) and (counts := _counts(item)):
            keys = sorted(counts)
            yield self._summary.histogram_raw(
                tag, keys[0], keys[-1], sum(counts.values()),
                sum(key * counts[key] for key in keys), sum(key**2 * counts[key] for key in keys),
                [key + 0.5 for key in keys], [counts[key] for key in keys],
            ).value[0]  # fmt: skip
        elif isinstance(item, Mapping):
            for key, value in item.items():
                yield from self._values(f"{tag}_{key}", value)


def _tag(name: str, section: str | None) -> str:
    own = section or _SECTION.get(name, "" if "/" in name else "other")
    return f"{own}/{name}" if own else name


def _counts(item: Mapping[Any, Any]) -> dict[float, float]:
    """{number: count} if `item` holds that, else {}."""
    try:
        return {float(key): float(value) for key, value in item.items()}
    except (TypeError, ValueError):
        return {}


@contextmanager
def _without_torch() -> Iterator[None]:
    """Keep tensorboardX from importing torch, where installed, just to know its tensor type.

    That import would add two seconds and 300 MB to a JAX run.
    """
    if "torch" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["torch"]
