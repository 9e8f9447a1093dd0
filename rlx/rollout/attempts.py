"""The rules for failed attempts: a prompt is tried again, then skipped; a long outage ends the run.

Shared by training, held-out evaluations and `rlx.evaluate`. No clock is read here.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlx.base import UserError
from rlx.cli import user_code

_LONGEST = 60.0  # seconds between two attempts at one prompt
_FEW = 8  # prompts of which more than the rate must fail again at least, before a run ends
_RATE = 0.5  # above which an outage begins where no rate ends the run
_CHARACTERS = 200  # of a row in a message


class RolloutError(UserError):
    """More prompts fail, for longer, than `Patience` allows; its cause is the last failure."""


class Skipped(RolloutError):
    """One row failed in all its attempts; its cause is the last failure.

    Attributes:
      group_id: of the prompt. index: of the row in its dataset, from 0.
    """

    def __init__(
        self, group_id: int, index: int, row: Mapping[str, Any], attempts: int, error: Exception
    ):
        super().__init__(
            f"{attempts} of rollout.max_attempts={attempts} failed; the last one, row {index}: "
            f"{type(error).__name__}: {_told(error)}"
        )
        self.group_id, self.index, self._row, self._attempts = group_id, index, row, attempts
        self.__cause__ = error

    @property
    def reason(self) -> BaseException:
        """Return the user's mistake that caused this error, if one did, else this error."""
        return self.__cause__ if isinstance(self.__cause__, UserError) else self

    def record(self, which: str) -> dict[str, Any]:
        """Return the line of skipped.jsonl; `which` is train or eval."""
        return {
            "which": which,
            "group_id": self.group_id,
            "row": self.index,
            "text": describe(self._row),
            "attempts": self._attempts,
            "error": type(self.__cause__).__name__,
            "message": _told(self.__cause__),
        }


@dataclass(frozen=True, slots=True)
class Patience:
    """When a prompt is given up, and when the run ends.

    Attributes:
      attempts: of one prompt, ≥ 1; after the last the prompt is skipped.
      rate: share of the last prompts that may fail; 1: no failure ends the run.
      pause: seconds before the second attempt at a prompt.
      outage: seconds in which more may fail, and in which a failure is held against no prompt.
      mistakes: whether a UserError is tried again like any failure.
    """

    attempts: int = 3
    rate: float = 0.5
    pause: float = 1.0
    outage: float = 120.0
    mistakes: bool = True

    def over(self, failed: int, error: BaseException) -> bool:
        """Return whether to give up a prompt after `failed` failures, the last with `error`."""
        return failed >= self.attempts or (isinstance(error, UserError) and not self.mistakes)

    def back_off(self, failed: int, lasted: float = 0.0, group_id: int = 0) -> float:
        """Return the seconds until a prompt that has failed `failed` ≥ 1 times is tried again.

        Args:
          lasted: seconds of the outage; a fourth of them passes unnoticed at its end.
          group_id: of the prompt. In an outage prompts come back one after the other.
        """
        wait = max(self.pause * 8 ** (failed - 1), lasted / 4)
        return min(wait * (1 + (group_id % 8 / 8 if lasted else 0)), _LONGEST)


class _Outcomes(OrderedDict[int, bool]):
    """group_id → whether it failed, of the last `most` prompts in the order of their first."""

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
        """Return whether more than `rate` failed, of `least` prompts or more."""
        return self.failed > rate * max(len(self), min(least, self.most))

    def __str__(self) -> str:
        return f"{self.failed} of the last {len(self)} rollouts failed"


class Failures:
    """How the last prompts ended, and since when too many of them fail.

    Failures at one time have one cause: a judge or a host that is down, a trainer that was stopped.
    So each prompt counts once, a failure in an outage is held against no prompt, and a run ends
    where an outage lasts and attempts that began in it fail too.

    Args:
      live: prompts that may be under way at one time.

    Attributes:
      room: prompts that may be under way or wait for their next attempt in an outage.
    """

    def __init__(self, patience: Patience, live: int):
        self._patience, self.room = patience, max(_FEW, 2 * live)
        self._last = _Outcomes(2 * live)
        self._again = _Outcomes(self.room)  # by attempts that began in the outage
        self._since: float | None = None
        self._said = False

    def lasted(self, now: float) -> float | None:
        """Return the seconds since the outage began; None where there is none, or no longer."""
        seconds = None if self._since is None else now - self._since
        return None if seconds is None or seconds >= self._patience.outage else seconds

    def add(self, group_id: int, failed: bool, first: bool, begun: float, now: float) -> str:
        """Record how an attempt ended; return a sentence where an outage begins or ends.

        Args:
          first: whether it is the prompt's first attempt. begun: when it began.
        """
        p, said = self._patience, ""
        if first or not failed or group_id in self._last:  # else who is tried again counts more
            self._last.note(group_id, failed)
        if self._since is not None and begun >= self._since:
            self._again.note(group_id, failed)
        if not self._last.more(p.rate if p.rate < 1 else _RATE, 2):
            if self._said and self._since is not None:
                said = f"rollouts succeed again, after {now - self._since:.0f} s"
            self._since, self._again, self._said = None, _Outcomes(self.room), False
        elif self._since is None:
            self._since = now
        elif not self._said and p.pause <= now - self._since < p.outage:
            self._said = True
            said = f"{self._last}; they are tried again for {p.outage:g} s"
        return said

    def verdict(self, error: BaseException, what: str, now: float) -> RolloutError | None:
        """Return the error that ends the run, or None while failures are few enough.

        Args:
          error: of the last failure. what: had that failure, as `row 3`.
        """
        p, found = self._patience, self._again if self._patience.outage else self._last
        if self._since is None or now - self._since < p.outage or not found.more(p.rate, _FEW):
            return None
        if isinstance(error, UserError):
            ended = RolloutError(f"{error} ({found})")
        else:
            ended = RolloutError(
                f"{found}, more than rollout.max_failure_rate={p.rate:g} allows for "
                f"rollout.outage_seconds={p.outage:g}; the last one, {what}: {why(error)}; mend "
                "that and give the same command, which goes on"
            )
        ended.__cause__ = error
        return ended


def why(error: BaseException) -> str:
    """Return an exception in one line: kind, message, the lines of the user's that it came by."""
    first = str(error).partition("\n")[0]
    kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
    return f"{kind}{first} {user_code.line(error, most=4)}".rstrip()


def _told(error: BaseException | None) -> str:
    """Return an error's message, and the line of the user's source that it came by."""
    return f"{error} {user_code.line(error) if error else ''}".rstrip()


def describe(row: Mapping[str, Any]) -> str:
    """Return a row as one short line, without its answer."""
    return str({key: value for key, value in row.items() if key != "answer"})[:_CHARACTERS]


def sentence(record: Mapping[str, Any]) -> str:
    """Return the line that the terminal shows for a skipped row, with the end of its failure."""
    why = (record["message"].strip().splitlines() or [""])[-1][:_CHARACTERS]
    return (
        f"skipped {record['which']} row {record['row']} after {record['attempts']} attempts "
        f"({record['error']}: {why}): {record['text']}"
    )
