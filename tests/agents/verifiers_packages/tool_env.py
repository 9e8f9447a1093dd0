"""Sums with a tool, which is a server of the package's own class."""

import verifiers.v1 as vf
from sums_env import Data


class Adder(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "calculator"

    @vf.tool
    def add(self, a: int, b: int) -> str:
        """Adds two numbers."""
        return str(a + b)


class ToolSum(vf.Task[Data]):
    @classmethod
    def toolsets(cls, config):
        return [Adder(vf.ToolsetConfig())]

    @vf.reward
    async def exact(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)


class ToolSums(vf.Taskset[ToolSum, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        k = 0
        while True:
            yield ToolSum(Data(prompt=f"{k} 1", answer=str(k + 1)), self.config.task)
            k += 1


__all__ = ["ToolSums"]

if __name__ == "__main__":
    Adder.run()
