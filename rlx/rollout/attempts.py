"""The rules for failed attempts: a prompt is tried again, then skipped; too many end the run.

Shared by training, held-out evaluations and `rlx.evaluate`. No clock is read here.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlx.base import UserError
from rlx.cli import user_code

_LONGEST = 60.0  # seconds between two attempts at one prompt
_FIRST = 4  # a window's part that counts as full from the beginning
_CHARACTERS = 200  # of a row in a message


class RolloutError(RuntimeError):
    """More attempts failed than `Patience` allows; its cause is the last failure."""


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
      rate: share of the last `window` attempts, of all prompts, that may fail; 1: all of them.
      window: attempts, ≥ 1. A run begins as if a fourth of them had succeeded.
      pause: seconds before the second attempt at a prompt.
      mistakes: whether a UserError is tried again like any failure.
    """

    attempts: int = 3
    rate: float = 0.5
    window: int = 128
    pause: float = 1.0
    mistakes: bool = True

    def over(self, failed: int, error: BaseException) -> bool:
        """Return whether to give up a prompt after `failed` ≥ 1 failures, the last with `error`."""
        return failed >= self.attempts or (isinstance(error, UserError) and not self.mistakes)

    def back_off(self, failed: int) -> float:
        """Return the seconds until a prompt that has failed `failed` ≥ 1 times is tried again."""
        return min(self.pause * 8 ** (failed - 1), _LONGEST)


class Window:
    """Outcomes of the last attempts at all prompts."""

    def __init__(self, patience: Patience):
        self._patience = patience
        self._failed: deque[bool] = deque(maxlen=patience.window)

    def add(self, failed: bool) -> None:
        """Record the outcome of an attempt."""
        self._failed.append(failed)

    def verdict(self, error: BaseException, what: str) -> Exception | None:
        """Return the error that ends the run, or None while failures are few enough.

        Args:
          error: of the last failure. Where it is the user's to mend, so is the result.
          what: had that failure, as `row 3`.
        """
        p, failed = self._patience, sum(self._failed)
        if failed <= p.rate * max(len(self._failed), p.window // _FIRST):
            return None
        share = f"{failed} of the last {len(self._failed)} rollouts failed"
        if isinstance(error, UserError):
            ended: Exception = UserError(f"{error} ({share})")
        else:
            ended = RolloutError(
                f"{share}, more than rollout.max_failure_rate={p.rate:g} of "
                f"rollout.failure_window={p.window} allow; the last one, {what}: "
                f"{type(error).__name__}: {_told(error)}"
            )
        ended.__cause__ = error
        return ended


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
