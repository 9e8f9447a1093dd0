"""SAPO on GSM8K: a soft gate in place of the clip.

Command:   python -m rlx.main --config=configs/gsm8k_sapo.py
Hardware:  as configs/gsm8k.py: one 80 GB GPU for the trainer at 1.5B, one more for each server.
Expect:    `actor_clip_ratio` is 0: nothing is clipped. The gate is on the ratio of target to
           behaviour policy, so old data closes it, which is why max_staleness is 1. Not yet run by
           rlx at this size; at 0.8M parameters: experiments/2026-11-presets.
"""

from configs import gsm8k


def get_config():
    """The run described above."""
    c = gsm8k.get_config()
    c.algorithm.preset = "sapo"
    c.rollout.max_staleness = 1
    c.rollout.max_concurrent_rollouts = 128
    return c
