"""Sums in up to three turns: the environment plays a user who asks again after a wrong answer."""

import verifiers.v1 as vf
from sums_env import Config, Sum, Sums


class RetrySums(vf.Taskset[Sum, Config]):
    load = Sums.load


class RetryConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class Retry(vf.Env[RetryConfig]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            for _ in range(2):
                if segment.terminated or segment.last_reply.endswith(task.data.answer):
                    break
                segment = await interaction.turn(f"No. {task.data.prompt}")


__all__ = ["Retry", "RetrySums"]
