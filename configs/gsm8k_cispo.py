"""CISPO on GSM8K: REINFORCE weighed by a bounded ratio; no token loses its gradient.

Command:   python -m rlx.main --config=configs/gsm8k_cispo.py
Hardware:  as configs/gsm8k.py: one 80 GB GPU for the trainer at 1.5B, one more for each server.
Expect:    `actor_clip_ratio` is the share of tokens whose weight is bounded, near 0 with a bound of
           5. The ratio is of target to behaviour policy. Not yet run by rlx at this size.
"""

from configs import gsm8k


def get_config():
    """The run described above."""
    c = gsm8k.get_config()
    c.algorithm.preset = "cispo"
    return c
