"""GRPO of an agent of two turns (configs/agents/second_try.py), with the model that comes with rlx.

Command:   python -m rlx.main --config=configs/arithmetic_agent.py
           Another agent: --config.rollout.workflow=FILE.py:Class
Hardware:  two CPU cores, no network; the extra `agents`. The first step compiles for half a
           minute, the others take three to ten seconds.
Expect:    held-out accuracy of greedy runs, right in either turn, from about 0.3; how far a whole
           run takes it is not measured yet.
"""

from pathlib import Path

from configs import arithmetic

AGENT = Path(__file__).parent / "agents" / "second_try.py"


def get_config():
    """The run described above."""
    c = arithmetic.get_config()
    c.rollout.workflow = f"{AGENT}:SecondTry"
    c.sampling.max_new_tokens = 96  # of a turn
    c.fleet.max_model_len = 384  # of a conversation
    c.train.row_buckets = (384,)
    return c
