"""Sums in one turn, with two rewards and a metric; `taskset.task.fault` breaks a reward."""

import asyncio
import time

import verifiers.v1 as vf


class Data(vf.TaskData):
    answer: str


class Fault(vf.TaskConfig):
    fault: str = ""


class Sum(vf.Task[Data, vf.State, Fault]):
    @vf.reward(weight=1.0)
    async def exact(self, trace: vf.Trace) -> float:
        match self.config.fault:
            case "raises":
                raise RuntimeError("the grader\nis broken")
            case "hangs":
                await asyncio.sleep(1000)
            case "blocks":
                time.sleep(1000)
            case "nan":
                return float("nan")
        return float(trace.last_reply.endswith(self.data.answer))

    @vf.reward(weight=0.5)
    async def brief(self, trace: vf.Trace) -> float:
        return 1.0 / max(1, len(trace.last_reply))

    @vf.metric
    async def characters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class Config(vf.TasksetConfig):
    num_tasks: int = 60
    task: Fault = Fault()


class Sums(vf.Taskset[Sum, Config]):
    def load(self):
        for k in range(self.config.num_tasks):
            a, b = k % 10, k // 10
            prompt = f"Compute {a} + {b}."
            yield Sum(Data(name=f"sum {k}", prompt=prompt, answer=str(a + b)), self.config.task)


__all__ = ["Sums"]
