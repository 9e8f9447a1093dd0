"""Many prompts admitted at once reach the server, all of them, over one connection."""

import asyncio
import threading

import numpy as np

from rlx.fleet.client import Fleet
from rlx.fleet.requests import Sampling

BURST = 4000  # gRPC's own server cancels calls beyond 3000 that wait to be accepted


def test_a_burst_waits_its_turn(tools, arithmetic, tmp_path):
    """Otherwise the client takes the cancelled calls for a lost server and drops all the others."""
    messages = []

    async def run(port):
        fleet = Fleet([f"127.0.0.1:{port}"], publish_dir=str(tmp_path), on_message=messages.append)
        await fleet.connect()
        sampling = Sampling(max_new_tokens=1, seed=0)
        prompt = np.ones(1, np.int32)
        calls = [asyncio.create_task(fleet.generate(prompt, sampling, 1)) for _ in range(BURST)]
        await asyncio.sleep(0)  # every call is on its way
        done = await asyncio.gather(*calls)
        await fleet.close()
        return done

    async def serve(ready, stop):
        async with tools.server(stage_dir=str(tmp_path)) as (engine, server):
            ready(server.port)
            while not stop.is_set():
                await asyncio.sleep(0.01)
            return len(engine.requests)

    port, stop, known, seen = [], threading.Event(), threading.Event(), []

    def thread():
        seen.append(asyncio.run(serve(lambda p: (port.append(p), known.set()), stop)))

    server = threading.Thread(target=thread)
    server.start()
    try:
        assert known.wait(30)
        done = tools.run(run(port[0]), 60)
    finally:
        stop.set()
        server.join()
    assert len(done) == BURST
    assert messages == []  # the server was never lost
    assert seen == [BURST]  # and no call came twice
