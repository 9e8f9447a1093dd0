"""REINFORCE++ on what users say of an application's answers, with the model that comes with rlx.

Command:   python -m rlx.main --config=configs/arithmetic_online.py
           with $RLX_ADMIN_KEY from `openssl rand -hex 24`, and with it in another terminal
           python experiments/2026-11-online/users.py
Hardware:  two CPU cores, no network; the extra `agents`; about four minutes.
Expect:    greedy accuracy on 200 held-out problems from 0.345 to 0.99, by thumbs up and down
           alone. The run behind this: experiments/2026-11-online.
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
    c.sampling.n_samples = 1  # a session is a group: users ask what they like
    c.rollout.batch_prompts = 128
    c.rollout.max_concurrent_rollouts = 384
    c.eval.every_steps = 10
    return c
