"""`python -m rlx.serve --model=DIR`: one rollout server process; --help lists the flags.

Once it answers calls it prints one JSON line, `{"port": …, "pid": …}`.
"""

import argparse
import asyncio
import faulthandler
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from rlx.cli import command
from rlx.doctor import failures
from rlx.engines import options
from rlx.system.process_settings import end_with_parent, keep_private


def main(argv: Sequence[str], engines: Mapping[str, Callable] = options.ENGINES) -> None:
    """Serve until SIGTERM or SIGINT."""
    parse = options.parser(engines).parse_args
    args = parse(argv)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # until it is ready it ends at once
    faulthandler.register(signal.SIGUSR1)  # a hung server is asked for its stacks
    keep_private()  # /proc/PID/environ holds the token that we were started with
    os.umask(0o077)  # only this user may read files and vLLM's sockets
    if args.parent_pid:
        end_with_parent(args.parent_pid)
    asyncio.run(_serve(args, engines[args.engine], parse))


async def _serve(args: argparse.Namespace, engine: Callable, parse: Callable) -> None:
    from rlx.engines import server

    early = None
    if args.early:
        with suppress(Exception):  # the second try below has a log
            await (first := engine(args)).start()
            early = first
        args = parse(await asyncio.to_thread(options.early_flags))

    stop = asyncio.Event()

    def ready(port: int) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        print(json.dumps({"port": port, "pid": os.getpid()}), flush=True)

    await server.serve(
        lambda: early or engine(args), on_ready=ready, stop=stop, **options.server_options(args)
    )


if __name__ == "__main__":
    command.run(lambda: main(sys.argv[1:]), explain=failures.explain, teardown=False)
