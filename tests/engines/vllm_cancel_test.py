"""Requests that are cancelled while a vLLM engine takes new weights; its EngineCore is a fake."""

import asyncio
from types import SimpleNamespace

import numpy as np

from rlx.engines.vllm.vllm_engine import VllmEngine
from rlx.fleet.requests import Request, Sampling


class Core:
    """An EngineCore that notes requests, and ends none before `go_on`."""

    def __init__(self):
        self.added, self.ending, self.go_on = [], asyncio.Event(), asyncio.Event()

    async def add_request_async(self, request):
        self.added.append(request.request_id)

    async def abort_requests_async(self, ids):
        self.ending.set()
        await self.go_on.wait()

    async def pause_scheduler_async(self, mode, clear_cache):
        pass

    async def resume_scheduler_async(self):
        pass


def test_a_request_that_is_cancelled_during_an_update_is_not_sent_again():
    """It would hold a slot up to its last token, and nobody reads them."""

    async def same(call):
        return await call

    async def nothing(*_):
        return [""]

    async def main():
        engine, core = VllmEngine("rlx:arithmetic"), Core()
        lora = SimpleNamespace(lora_config=None)
        engine.llm = SimpleNamespace(
            vllm_config=lora, engine_core=core, update_weight_version=nothing
        )
        engine._await_core, engine._call_workers = same, nothing
        engine._core_request = lambda request: SimpleNamespace(mm_features=None)
        prompt = np.array([1, 2, 3], np.int32)
        stream = engine.generate(Request("a", prompt, Sampling(max_new_tokens=4)))

        async def ask():
            return await anext(stream)

        asked = asyncio.create_task(ask())
        while not core.added:
            await asyncio.sleep(0.01)
        update = asyncio.create_task(engine.load("weights", 1))
        await core.ending.wait()
        asked.cancel()
        await asyncio.wait([asked])
        core.go_on.set()
        await update
        assert len(core.added) == 1
        assert not engine._samples

    asyncio.run(asyncio.wait_for(main(), 10))
