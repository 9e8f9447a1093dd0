"""Compare the sandbox with `python -c` per call: calls per second and p99 with many at once.

    python -m experiments.bench.sandbox --calls=256 --at_once=64 --rounds=5

Each round runs both in turns on the same programs. Medians, ranges and their ratio are printed. The
time of a call includes waiting for its turn.
"""

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable, Callable

from rlx.sandbox.sandbox import LEVELS, Sandbox

CODE = "print(sum(n * n for n in range(1000)))"
WANTED = "332833500\n"


async def measured(
    ask: Callable[[], Awaitable[str]], calls: int, at_once: int
) -> tuple[float, float]:
    """Return calls per second and the 99th percentile of a call's seconds."""
    turns, seconds = asyncio.Semaphore(at_once), []

    async def one() -> None:
        async with turns:
            begun = time.perf_counter()
            text = await ask()
            seconds.append(time.perf_counter() - begun)
            assert text == WANTED, text

    begun = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(calls)))
    rate = calls / (time.perf_counter() - begun)
    return rate, statistics.quantiles(seconds, n=100)[98]


async def plain() -> str:
    """Run the program in a Python process, unconfined."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-c", CODE, stdout=asyncio.subprocess.PIPE
    )
    return (await process.communicate())[0].decode()


def row(name: str, values: list[tuple[float, float]], base: list[tuple[float, float]]) -> str:
    """Return a line of the table: median (lowest to highest) of each."""
    rates, tails = ([v[i] for v in values] for i in (0, 1))
    ratios = [mine[0] / other[0] for mine, other in zip(values, base, strict=True)]
    shown = f"{statistics.median(rates):.0f} ({min(rates):.0f} to {max(rates):.0f})"
    tail = (
        f"{statistics.median(tails) * 1e3:.0f} ({min(tails) * 1e3:.0f} to {max(tails) * 1e3:.0f})"
    )
    ratio = f"{statistics.median(ratios):.1f} ({min(ratios):.1f} to {max(ratios):.1f})"
    return f"| {name} | {shown} | {tail} | {ratio} |"


async def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    for name, value in (("calls", 256), ("at_once", 64), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    asked = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = {"python -I -c": []}
    boxes = {level: Sandbox(require=level, strongest=level) for level in ("landlock", LEVELS[-1])}
    for box in boxes.values():
        await box.__aenter__()
    for _ in range(asked.rounds):
        found["python -I -c"].append(await measured(plain, asked.calls, asked.at_once))
        for level, box in boxes.items():

            async def ask(box: Sandbox = box) -> str:
                return (await box.run(CODE)).text

            found.setdefault(level, []).append(await measured(ask, asked.calls, asked.at_once))
    print("| | calls a second | p99, ms | times the calls of python |\n|---|---|---|---|")
    for name, values in found.items():
        print(row(name, values, found["python -I -c"]))
    for box in boxes.values():
        await box.__aexit__()


if __name__ == "__main__":
    asyncio.run(main())
