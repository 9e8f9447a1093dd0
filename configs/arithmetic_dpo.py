"""DPO on pairs of a careful and a wrong solution, with the model that comes with rlx.

Command:   python -m rlx.main --config=configs/arithmetic_dpo.py
Hardware:  two CPU cores, no network.
Time:      4 minutes on a shared machine.
Expect:    greedy accuracy on 200 held-out problems from 0.345 to 0.955 after 60 steps, and 0.925 at
           the end, where the margin still grows. Of held-out pairs 0.88 are right, with a margin
           of 0.56. Run: experiments/2026-11-other-trainers.
"""

from configs import arithmetic_sft


def get_config():
    """The run described above."""
    c = arithmetic_sft.get_config()
    c.algorithm.preset = "dpo"
    c.rollout.batch_prompts = 32
    c.optimizer.learning_rate = 1e-4
    return c
