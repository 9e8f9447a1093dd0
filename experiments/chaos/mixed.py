"""The workflow of the runs that are disturbed: an agent answers every second prompt."""

from pathlib import Path
from typing import Any

from rlx.agents.workflow import AgentWorkflow
from rlx.rollout.workflows import RLVR

AGENT = f"{Path(__file__).parents[1]}/2026-11-soak/agent.py:Adds"


class Mixed:
    """Graded answers, and runs of the agent."""

    def __init__(self, prompts: Any, sampling: Any, n: int, reward_pool: Any):
        self._plain = RLVR(prompts, sampling, reward_pool, n)
        self._agent = AgentWorkflow(AGENT, prompts.tokenizer, sampling, n)

    async def run(self, fleet: Any, task: Any) -> Any:
        """Return the group of a task."""
        return await (self._plain, self._agent)[task.group_id % 2].run(fleet, task)

    async def aclose(self) -> None:
        """End the agent's processes and the gateway."""
        await self._agent.aclose()
