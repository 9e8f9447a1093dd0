"""GRPO of an agent of two turns (configs/agents/second_try.py), with the model that comes with rlx.

Command:   python -m rlx.main --config=configs/arithmetic_agent.py
           Another agent: --config.rollout.workflow=FILE.py:Class
Hardware:  two CPU cores, no network; the extra `agents`.
Time:      10 to 13 minutes on a shared machine.
Expect:    held-out accuracy of greedy runs, right in either turn, from 0.35 to 0.93 or more (three
           seeds). Turns a run fall from 1.7 to 1.1. Runs: experiments/2026-11-agents.
"""

from pathlib import Path

from configs import arithmetic

AGENT = Path(__file__).parent / "agents" / "second_try.py"


def get_config():
    """The run described above."""
    c = arithmetic.get_config()
    c.total_steps = 60
    c.rollout.workflow = f"{AGENT}:SecondTry"
    c.sampling.max_new_tokens = 96  # of a turn
    c.fleet.max_model_len = 384  # of a conversation
    c.train.row_buckets = (384,)
    return c
