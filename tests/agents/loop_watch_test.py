"""The line that keeps a loop from turning is found while it does."""

import asyncio
import threading

from rlx.agents.worker import watch_loop


def test_the_blocking_line_is_seen_while_it_blocks():
    seen, found = threading.Event(), []

    def late(seconds, at):
        found.append((seconds, at))
        seen.set()

    async def run():
        watch_loop(late)
        assert seen.wait(60)  # holds the loop up until the watch has looked

    asyncio.run(run())
    seconds, at = found[0]
    assert seconds > 0
    assert "loop_watch_test.py:18 " in at
    assert at.endswith("run: assert seen.wait(60)  # holds the loop up until the watch has looked")
