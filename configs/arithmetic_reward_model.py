"""A Bradley-Terry reward model of arithmetic solutions, from the model that comes with rlx.

Command:   python -m rlx.main --config=configs/arithmetic_reward_model.py
Hardware:  two CPU cores, no network.
Time:      2 to 3 minutes.
Expect:    0.8 of 200 held-out pairs right from step 20 to the end; their loss falls from 0.693 to
           0.32. It recognises every answer that gives up and guesses. It cannot distinguish a
           solution with a wrong step from a careful one.
           Runs: experiments/2026-11-other-trainers.
"""

from configs import arithmetic_sft


def get_config():
    """The run described above."""
    c = arithmetic_sft.get_config()
    c.algorithm.preset = "reward_model"
    c.rollout.batch_prompts = 32
    c.fleet.num_servers = 0  # a reward model generates nothing
    return c
