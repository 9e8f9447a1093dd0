"""A Bradley-Terry reward model of arithmetic solutions, from the model that comes with rlx.

Command:   python -m rlx.main --config=configs/arithmetic_reward_model.py
Hardware:  two CPU cores, no network; two minutes or so.
Expect:    of 200 held-out pairs about 0.8 right after 20 steps and ever after, their loss from
           0.693 to 0.32. It knows every answer that gives up and guesses; one that carries a
           mistake through it does not tell from a careful one. The runs behind this, with a table
           of both: experiments/2026-11-other-trainers.
"""

from configs import arithmetic_sft


def get_config():
    """The run described above."""
    c = arithmetic_sft.get_config()
    c.algorithm.preset = "reward_model"
    c.rollout.batch_prompts = 32
    c.fleet.num_servers = 0  # a reward model generates nothing
    return c
