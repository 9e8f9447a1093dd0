"""Sampling from many clients' adapters by one fleet: side by side, or one at a time."""

import asyncio
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from rlx.fleet.client import Fleet
from rlx.fleet.publish import Adapter
from rlx.fleet.requests import Sampling
from rlx.fleet.sample import Completion
from rlx.model import peft
from rlx.model.tensors import open_tensors
from rlx.system.threads import in_thread

_MOST_RANK = 64  # of adapters side by side; vLLM gives each as much memory


def engine_options(adapters: int, directory: Path) -> dict[str, Any]:
    """Return options of servers that read `adapters` at one time below `directory`; {} for 0."""
    lora = f"enable_lora=true;max_loras={adapters};max_lora_rank={_MOST_RANK}"
    return {"engine_args": lora, "weight_roots": [str(directory)]} if adapters else {}


@dataclass
class WeightTurns:
    """Requests for several weights, of which a fleet serves one at a time. Pure.

    Requests for the served weights begin at once, until one for others waits. When those that run
    have ended, all begin that wait for the weights which were asked for first.
    """

    served: Hashable = None
    running: int = 0
    waiting: dict[Hashable, list[Any]] = field(default_factory=dict)

    def add(self, weights: Hashable, request: Any) -> list[Any]:
        """Return the requests that begin now, all for `served`."""
        self.waiting.setdefault(weights, []).append(request)
        return self._begin()

    def end(self, weights: Hashable, request: Any) -> list[Any]:
        """Note that a request has ended, maybe while it waited; return those that begin now."""
        waiting = self.waiting.get(weights, [])
        if request not in waiting:
            self.running -= 1
        elif waiting == [request]:
            del self.waiting[weights]
        else:
            waiting.remove(request)
        return self._begin()

    def _begin(self) -> list[Any]:
        if not self.waiting or (self.running and [*self.waiting] != [self.served]):
            return []
        self.served = next(iter(self.waiting))
        begin = self.waiting.pop(self.served)
        self.running += len(begin)
        return begin


class Samplers:
    """Samples and scores by the base model, or by it with the adapter in a PEFT directory.

    `base` is the digest of the base model of the connected fleet's servers, whose files have
    `base_bytes`. They add adapters to it in `dtype`, or read them by themselves if `side_by_side`.
    """

    def __init__(
        self, fleet: Fleet, base: bytes, dtype: str, side_by_side: bool = False,
        base_bytes: int = 0,
    ):  # fmt: skip
        self._fleet, self._base, self._dtype = fleet, (base, base_bytes), dtype
        self._side_by_side = side_by_side
        self._turns, self._version, self._publishing = WeightTurns(), 0, asyncio.Lock()
        self._published: tuple[Hashable, asyncio.Future] | None = None

    async def sample(
        self, adapter: Path | None, prompt: Sequence[int], sampling: Sampling, n: int, scored: int
    ) -> tuple[list[Completion], np.ndarray | None]:
        """Return `n` completions, and [P] logprobs of the last `scored` tokens, NaN elsewhere."""
        if self._side_by_side:
            return await self._ask(str(adapter or ""), prompt, sampling, n, scored)
        turn = asyncio.get_running_loop().create_future()
        weights = adapter and (adapter, (adapter / peft.WEIGHTS).stat().st_mtime_ns)
        self._begin(self._turns.add(weights, turn))
        try:
            await asyncio.shield(await turn)
            return await self._ask("", prompt, sampling, n, scored)
        finally:
            self._begin(self._turns.end(weights, turn))

    async def _ask(
        self, adapter: str, prompt: Sequence[int], sampling: Sampling, n: int, scored: int
    ) -> tuple[list[Completion], np.ndarray | None]:
        tokens = np.asarray(prompt, np.int32)
        completions = await self._fleet.generate(tokens, replace(sampling, adapter=adapter), n)
        logprobs, first = np.full(len(tokens), np.nan, np.float32), max(len(tokens) - scored, 1)
        if scored and len(tokens) > 1:
            logprobs[first:] = (await self._fleet.score(tokens, first, adapter=adapter))[first:]
        return completions, logprobs if scored else None

    def _begin(self, turns: list[Any]) -> None:
        """Let requests for the same weights begin, after these are published."""
        served = self._turns.served
        if turns and (not self._published or self._published[0] != served):
            self._published = served, asyncio.ensure_future(self._publish(served))
        for turn in turns:
            if not turn.cancelled():
                turn.set_result(self._published and self._published[1])

    async def _publish(self, weights: Any) -> None:
        # In turn: requests for earlier weights may be cancelled before all servers have these.
        try:
            async with self._publishing:
                self._version += 1
                adapter = await in_thread(self._read_adapter, weights and weights[0])
                await self._fleet.publish(self._version, adapter, "adapter")
        except BaseException:
            self._published = None  # the next request tries again
            raise

    def _read_adapter(self, adapter: Path | None) -> Adapter:
        tensors, scale = dict[str, Any](), 1.0  # None: the base, plus nothing
        if adapter:
            scale = peft.load_config(adapter).scale
            with open_tensors(adapter / peft.WEIGHTS) as saved:
                tensors = {name: np.array(saved[name]) for name in saved}
        return Adapter(tensors, scale, self._dtype, *self._base)
