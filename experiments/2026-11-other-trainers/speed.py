"""Measure how fast a teacher with its own core scores solutions of the embedded task.

    python -m experiments.2026-11-other-trainers.speed [MODEL] [--core=1] [--count=2000]

Counted tokens are those of the answers; prompts are processed too. On a busy machine compare
seconds of processor time.
"""

import argparse
import asyncio
import os
import tempfile
import time
from pathlib import Path

import numpy as np

from rlx.launch.local import CpuPlan, LocalServers
from rlx.model import hf
from rlx.rollout import arithmetic
from rlx.run.tokenizer_files import load_tokenizer

AT_ONCE = 64


def sequences(model: Path, count: int) -> list[tuple[np.ndarray, int]]:
    """Return (tokens, index of the answer's first token) of `count` careful solutions."""
    tokenizer, found = load_tokenizer(model), []
    for row in arithmetic.problems(0, "held_out", count):
        chat = [{"role": "user", "content": row["question"]}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        solution = arithmetic.careful_solution(row["question"])
        head, answer = (tokenizer(text)["input_ids"] for text in (prompt, solution))
        found.append((np.array([*head, *answer], np.int32), len(head)))
    return found


async def score(servers: LocalServers, work: list[tuple[np.ndarray, int]]) -> float:
    """Return the seconds to score `work`, AT_ONCE at a time, without compilation."""
    fleet, gate = servers.fleet(), asyncio.Semaphore(AT_ONCE)

    async def one(tokens: np.ndarray, first: int) -> None:
        async with gate:
            await fleet.score(tokens, first)

    await fleet.connect()
    await one(*work[0])
    start = time.monotonic()
    await asyncio.gather(*(one(*item) for item in work))
    seconds = time.monotonic() - start
    await fleet.close()
    return seconds


def cpu_seconds(pid: int) -> float:
    """Return the processor time of all threads of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Start a server, score with it, print a line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="rlx:arithmetic")
    parser.add_argument("--core", type=int, default=1)
    parser.add_argument("--count", type=int, default=2000)
    a = parser.parse_args()
    model = hf.resolve(a.model, "model")
    work = sequences(model, a.count)
    tokens = sum(len(all_) - first for all_, first in work)
    options = {"engine": "jax", "slots": 1, "max_model_len": 192}
    plan = CpuPlan((), ((a.core,),))
    with (
        tempfile.TemporaryDirectory() as workdir,
        LocalServers(model, workdir=workdir, plan=plan, **options) as servers,
    ):
        servers.wait()
        (pid,) = servers.pids
        asyncio.run(score(servers, work[:AT_ONCE]))
        before = cpu_seconds(pid)
        seconds = asyncio.run(score(servers, work))
        spent = cpu_seconds(pid) - before
    print(
        f"{len(work)} answers, {tokens} tokens (prompts have {sum(f for _, f in work)} more): "
        f"{tokens / seconds:,.0f} a second, {tokens / spent:,.0f} a second of processor time"
    )


if __name__ == "__main__":
    main()
