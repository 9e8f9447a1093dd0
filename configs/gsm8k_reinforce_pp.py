"""REINFORCE++ on GSM8K, one sample a prompt: the baseline is the batch's mean.

Command:   python -m rlx.main --config=configs/gsm8k_reinforce_pp.py
Hardware:  as configs/gsm8k.py: one 80 GB GPU for the trainer at 1.5B, one more for each server. The
           reference policy is one more copy of the parameters, 6 GB in float32, and one more
           forward pass a batch.
Expect:    `kl_reward` is a small part of `final_reward`, `reference_kl` grows slowly. Not yet run
           by rlx at this size; at 0.8M parameters: experiments/2026-11-presets.
"""

from configs import gsm8k


def get_config():
    """The run described above."""
    c = gsm8k.get_config()
    c.algorithm.preset = "reinforce_pp"
    c.sampling.n_samples = 1  # prompts are compared with each other, so a batch has many
    c.rollout.batch_prompts = 512
    c.rollout.max_concurrent_rollouts = 1536
    return c
