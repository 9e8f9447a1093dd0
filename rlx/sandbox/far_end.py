"""The program at the far end of a sandbox over ssh: a Sandbox there, spoken to by lines of JSON.

    in    {workers, preload, require}, then {call, code, limits}; {call} alone ends that call
    out   {sandbox: {level, notes, workers} or {error}}, then {call, outcome}

When the input ends, as the connection does, each program ends with all it started.
"""

import asyncio
import json
import os
import sys
from dataclasses import asdict
from typing import Any

from rlx.base import UserError
from rlx.sandbox.sandbox import ProgramLimits, Sandbox

LINE_BYTES = 1 << 28  # of code, or of output, as JSON


async def main() -> None:
    """Serve calls until standard input ends."""
    loop, reader = asyncio.get_running_loop(), asyncio.StreamReader(LINE_BYTES)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    options = json.loads(await reader.readline())
    try:
        async with Sandbox(**options) as sandbox, asyncio.TaskGroup() as group:
            workers = options["workers"] or len(os.sched_getaffinity(0))
            _say(sandbox={"level": sandbox.level, "notes": sandbox.notes, "workers": workers})
            calls: dict[int, asyncio.Task] = {}
            while line := await reader.readline():
                request = json.loads(line)
                number = request["call"]
                if "code" in request:
                    calls = {n: call for n, call in calls.items() if not call.done()}
                    calls[number] = group.create_task(_answer(sandbox, **request))
                elif number in calls:
                    calls[number].cancel()
            for call in calls.values():
                call.cancel()
    except UserError as error:
        _say(sandbox={"error": str(error)})


async def _answer(sandbox: Sandbox, call: int, code: str, limits: dict[str, Any]) -> None:
    _say(call=call, outcome=asdict(await sandbox.run(code, ProgramLimits(**limits))))


def _say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
