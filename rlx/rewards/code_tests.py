"""The reward `code`: a program that the model wrote passes the row's tests, in the sandbox."""

import asyncio
import functools
import re
import secrets
from collections.abc import Sequence
from typing import Any

from rlx.sandbox.sandbox import ProgramLimits
from rlx.workers.worker_process import worker_sandbox

_FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
_LIMITS = ProgramLimits(wall_seconds=3.0, cpu_seconds=3.0)


async def code(prompt: str, completion: str, *ids: Sequence[int], answer: Any, **row: Any) -> float:
    """Return 1 when the completion's last fenced block of Python passes the tests, else 0.

    A program that ends before the tests have passes none. It may still look for what they print
    at their end, or change what they call: tests in its own process judge no adversary.

    Args:
      answer: the tests: Python that is run after the program, in its names, and raises where it
        is wrong, as `assert add(1, 2) == 3`.
    """
    if not (blocks := _FENCE.findall(completion)):
        return 0.0
    passed = secrets.token_hex(8)
    sandbox = await asyncio.shield(_entered(asyncio.get_running_loop()))
    outcome = await sandbox.run(f"{blocks[-1]}\n{answer}\nprint({passed!r})", _LIMITS)
    return float(outcome.status == "ok" and outcome.text.endswith(f"{passed}\n"))


@functools.cache
def _entered(loop: asyncio.AbstractEventLoop) -> asyncio.Future:
    """Return the worker's one sandbox once it is ready; it ends with the process."""
    return asyncio.ensure_future(worker_sandbox(("math",)).__aenter__(), loop=loop)
