"""IPO on pairs of a careful and a wrong solution, with the model that comes with rlx.

Command:   python -m rlx.main --config=configs/arithmetic_ipo.py
Hardware:  two CPU cores, no network.
Time:      7 minutes on a shared machine.
Expect:    greedy accuracy on 200 held-out problems from 0.345 to 0.97 after 60 steps, then level.
           Of held-out pairs 0.87 are right. The margin is 0.06, β times 0.12 nats a token, and
           still grows. Run: experiments/2026-11-other-trainers.
"""

from configs import arithmetic_sft


def get_config():
    """The run described above."""
    c = arithmetic_sft.get_config()
    c.algorithm.preset = "ipo"
    c.algorithm.pair_beta = 0.5  # the target margin is 1/(2·β) nats a token
    c.rollout.batch_prompts = 32
    c.optimizer.learning_rate = 1e-4
    return c
