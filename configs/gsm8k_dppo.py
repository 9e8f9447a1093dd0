"""DPPO on GSM8K: REINFORCE inside a trust region of probabilities, not of ratios.

Command:   python -m rlx.main --config=configs/gsm8k_dppo.py
Hardware:  as configs/gsm8k.py: one 80 GB GPU for the trainer at 1.5B, one more for each server.
Expect:    `actor_clip_ratio` is the share of tokens that have left the region. Published: stable
           where the clip is not, with mixtures of experts too (2602.04879). Not yet run by rlx at
           this size.
"""

from configs import gsm8k


def get_config():
    """The run described above."""
    c = gsm8k.get_config()
    c.algorithm.preset = "dppo"
    return c
