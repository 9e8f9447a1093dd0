"""An agent that asks several times and answers what most of its answers say.

    python -m rlx.evaluate --config=configs/arithmetic.py --datasets=arithmetic \\
        --workflow=experiments/2026-11-agents/vote.py:Vote --workflow_kwargs='{"voters": 5}'
"""

import re
from collections import Counter

from openai import AsyncOpenAI

BOX = re.compile(r"\\boxed\{([^{}]*)\}")


class Vote:
    """Answer the commonest of `voters` samples: self-consistency (Wang et al., 2203.11171)."""

    def __init__(self, voters: int = 5):
        self.voters = voters

    async def run(self, data, **extra_kwargs):
        """Return 1.0 if the commonest answer is right, else 0.0."""
        async with AsyncOpenAI(**extra_kwargs) as client:
            got = await client.chat.completions.create(
                model="default", messages=data["messages"], n=self.voters
            )
        found = [BOX.findall(choice.message.content)[-1:] for choice in got.choices]
        votes = Counter(box for boxes in found for box in boxes)
        winner = votes.most_common(1)[0][0] if votes else None
        return float(winner == data["answer"])
