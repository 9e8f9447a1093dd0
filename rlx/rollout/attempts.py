"""Decide about failed attempts: retry a prompt, skip it, or end the run after a long outage."""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlx.base import UserError
from rlx.cli import user_code

_LONGEST = 60.0  # seconds between two attempts at one prompt
_FEW = 8  # a run ends only if more than the allowed rate of at least this many prompts fail again
_RATE = 0.5  # of failures at which an outage begins, in runs that no rate ends
_CHARACTERS = 200  # of a row in a message


class RolloutError(UserError):
    """More prompts fail, for longer, than `Patience` allows; its cause is the last failure."""


class Skipped(RolloutError):
    """A row whose attempts all failed; `index` is its place in the dataset, from 0."""

    def __init__(
        self, group_id: int, index: int, row: Mapping[str, Any], attempts: int, error: Exception
    ):
        super().__init__(
            f"{attempts} of rollout.max_attempts={attempts} failed; the last one, row {index}: "
            f"{type(error).__name__}: {_message(error)}"
        )
        self.group_id, self.index, self._row, self._attempts = group_id, index, row, attempts
        self.__cause__ = error

    @property
    def reason(self) -> BaseException:
        """Return the UserError that caused this error, if one did, else this error."""
        return self.__cause__ if isinstance(self.__cause__, UserError) else self

    def record(self, which: str) -> dict[str, Any]:
        """Return the line of skipped.jsonl; `which` is train or eval."""
        return {
            "which": which, "group_id": self.group_id, "row": self.index,
            "text": describe(self._row), "attempts": self._attempts,
            "error": type(self.__cause__).__name__, "message": _message(self.__cause__),
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Patience:
    """Limits at which a prompt is skipped, and at which the run ends."""

    attempts: int = 3  # at a prompt before it is skipped, ≥ 1
    rate: float = 0.5  # share of the last prompts that may fail; 1: no failure ends the run
    pause: float = 1.0  # seconds before the second attempt at a prompt
    outage: float = 120.0  # seconds for which more may fail, without counting against prompts
    mistakes: bool = True  # whether to retry a UserError like any failure

    def over(self, failed: int, error: BaseException) -> bool:
        """Return whether to give up a prompt after `failed` failures, the last with `error`."""
        return failed >= self.attempts or (isinstance(error, UserError) and not self.mistakes)

    def back_off(self, failed: int, lasted: float = 0.0, group_id: int = 0) -> float:
        """Return the seconds to wait after `failed` ≥ 1 failures, `lasted` s into an outage."""
        wait = max(self.pause * 8 ** (failed - 1), lasted / 4)
        spread = group_id % 8 / 8 if lasted else 0  # so that not all prompts return at once
        return min(wait * (1 + spread), _LONGEST)


class _Outcomes(OrderedDict[int, bool]):
    """The last `most` prompts: group_id → whether it failed, in the order of first attempts."""

    def __init__(self, most: int):
        super().__init__()
        self.most, self.failed = most, 0

    def note(self, group_id: int, failed: bool) -> None:
        """Record the last outcome of a prompt."""
        self.failed += failed - self.get(group_id, False)
        self[group_id] = failed
        if len(self) > self.most:
            self.failed -= self.popitem(last=False)[1]

    def more(self, rate: float, least: int) -> bool:
        """Return whether more than `rate` of at least `least` prompts failed."""
        return self.failed > rate * max(len(self), min(least, self.most))

    def __str__(self) -> str:
        return f"{self.failed} of the last {len(self)} rollouts failed"


class Failures:
    """Outcomes of the last prompts, and the outage in which too many of them fail."""

    # Simultaneous failures share a cause, such as a judge or host that is down. So each prompt
    # counts once, and only an outage whose own attempts fail too ends the run.

    def __init__(self, patience: Patience, most_live: int):
        # In an outage at most `room` prompts run or wait for their next attempt.
        self._patience, self.room = patience, max(_FEW, 2 * most_live)
        self._last = _Outcomes(2 * most_live)
        self._again = _Outcomes(self.room)  # of attempts that began in the outage
        self._since: float | None = None
        self._announced = False

    def outage_seconds(self, now: float) -> float | None:
        """Return the seconds since the outage began; None without one, or after its time is up."""
        seconds = None if self._since is None else now - self._since
        return None if seconds is None or seconds >= self._patience.outage else seconds

    def add(self, group_id: int, failed: bool, first: bool, start: float, now: float) -> str:
        """Record how an attempt ended; return a message when an outage begins or ends, else ""."""
        p, message = self._patience, ""
        if first or not failed or group_id in self._last:  # else retried prompts would count more
            self._last.note(group_id, failed)
        if self._since is not None and start >= self._since:
            self._again.note(group_id, failed)
        if not self._last.more(p.rate if p.rate < 1 else _RATE, 2):
            if self._announced and self._since is not None:
                message = f"rollouts succeed again, after {now - self._since:.0f} s"
            self._since, self._again, self._announced = None, _Outcomes(self.room), False
        elif self._since is None:
            self._since = now
        elif not self._announced and p.pause <= now - self._since < p.outage:
            self._announced = True
            message = f"{self._last}; they are tried again for {p.outage:g} s"
        return message

    def verdict(self, error: BaseException, name: str, now: float) -> RolloutError | None:
        """Return the error that ends the run after `error` of row `name`; None if few rows fail."""
        p, outcomes = self._patience, self._again if self._patience.outage else self._last
        if self._since is None or now - self._since < p.outage or not outcomes.more(p.rate, _FEW):
            return None
        if isinstance(error, UserError):
            fatal = RolloutError(f"{error} ({outcomes})")
        else:
            fatal = RolloutError(
                f"{outcomes}, more than rollout.max_failure_rate={p.rate:g} allows for "
                f"rollout.outage_seconds={p.outage:g}; the last one, {name}: {why(error)}; fix "
                "that and resume with the same --workdir"
            )
        fatal.__cause__ = error
        return fatal


def why(error: BaseException) -> str:
    """Return an exception in one line: its type, message, and the user's source lines."""
    first = str(error).partition("\n")[0]
    kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
    return f"{kind}{first} {user_code.line(error, most=4)}".rstrip()


def _message(error: BaseException | None) -> str:
    """Return an error's message and the line of the user's source that raised it."""
    return f"{error} {user_code.line(error) if error else ''}".rstrip()


def describe(row: Mapping[str, Any]) -> str:
    """Return a row as one short line, without its answer."""
    return str({key: value for key, value in row.items() if key != "answer"})[:_CHARACTERS]


def sentence(record: Mapping[str, Any]) -> str:
    """Return the terminal's line about a skipped row, with the last line of its error."""
    last_line = (record["message"].strip().splitlines() or [""])[-1][:_CHARACTERS]
    return (
        f"skipped {record['which']} row {record['row']} after {record['attempts']} attempts "
        f"({record['error']}: {last_line}): {record['text']}"
    )
