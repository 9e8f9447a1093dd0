"""Several tries at a row: where an answer is wrong the model is told so, and answers again."""

from rlx.base import Group, UserError
from rlx.fleet.requests import Sampling
from rlx.rewards.reward_pool import RewardPool
from rlx.rollout.episode import begin, behind, together
from rlx.rollout.workflows import Generator, Prompts, Task, encode


class MultiTurn:
    """A conversation until the answer is right; all its answers are trained on, by one reward:

        reward = turn_discount^retries · r(last answer)

    It has at most `max_turns` answers; after one whose reward is not above `right` the user says
    `feedback`. `sampling.max_new_tokens` are all tokens after the prompt; the rest is as of `RLVR`.
    """

    def __init__(
        self, prompts: Prompts, sampling: Sampling, reward_pool: RewardPool, n: int,
        max_turns: int = 2, turn_discount: float = 1.0, right: float = 0.5,
        feedback: str = "Your answer is wrong. Please try again.",
    ):  # fmt: skip
        if max_turns < 1 or not 0 < turn_discount <= 1:
            raise UserError(f"{max_turns=}, {turn_discount=}; give 1 or more, a number in (0, 1]")
        self._prompts, self._sampling, self._rewards, self._n = prompts, sampling, reward_pool, n
        self._max_turns, self._discount, self._right = max_turns, turn_discount, right
        again = {"role": "user", "content": feedback}
        self._feedback = encode(prompts.tokenizer, behind(prompts.tokenizer, again))

    async def run(self, fleet: Generator, task: Task) -> Group:
        """Return the group of the task's row."""
        episodes = await begin(fleet, self._prompts, task, self._sampling, self._n)
        rewards, infos = [0.0] * len(episodes), [dict[str, float]() for _ in episodes]
        trying = list(range(len(episodes)))
        for turn in range(self._max_turns):
            graded = await self._rewards.grade([episodes[i].graded_as(first=turn) for i in trying])
            for i, reward, info in zip(trying, graded.rewards, graded.infos, strict=True):
                rewards[i], infos[i] = self._discount**turn * reward, {**info, "turns": turn + 1}
            wrong = [i for i, r in zip(trying, graded.rewards, strict=True) if r <= self._right]
            last = turn + 1 == self._max_turns
            trying = [] if last else [i for i in wrong if episodes[i].show(self._feedback)]
            await together(*(episodes[i].sample(fleet) for i in trying))
        parts = zip(episodes, rewards, infos, strict=True)
        return Group(task.group_id, tuple(e.trajectory(r, i) for e, r, i in parts), task.row)
