"""REINFORCE++ on users' ratings of an application's answers, with the model that comes with rlx.

Command:   python -m rlx.main --config=configs/arithmetic_online.py
           Set $RLX_ADMIN_KEY to the output of `openssl rand -hex 24`, here and in another
           terminal, where you run: python experiments/2026-11-online/users.py
Hardware:  two CPU cores, no network; the extra `agents`.
Time:      6 minutes on a shared machine.
Expect:    greedy accuracy on 200 held-out problems from 0.345 to 0.99, only by thumbs up and down.
           Run: experiments/2026-11-online.
"""

from configs import arithmetic


def get_config():
    """The run described above."""
    c = arithmetic.get_config()
    c.total_steps = 40
    c.rollout.workflow = "online"
    c.online.port = 8123
    c.algorithm.preset = "reinforce_pp"
    c.algorithm.kl_coefficient = 0.0
    c.sampling.n_samples = 1  # a session is a group, because users choose their own questions
    c.rollout.batch_prompts = 128
    c.rollout.max_concurrent_rollouts = 384
    c.eval.every_steps = 10
    return c
