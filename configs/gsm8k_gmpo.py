"""GMPO on GSM8K: the geometric mean of a sequence's ratios, each clipped on its own.

Command:   python -m rlx.main --config=configs/gsm8k_gmpo.py
Hardware:  as configs/gsm8k.py: one 80 GB GPU for the trainer at 1.5B, one more for each server.
Expect:    ratios stay nearer to 1 than GRPO's, so that a wider clip holds (2507.20673). Not yet run
           by rlx at this size.
"""

from configs import gsm8k


def get_config():
    """The run described above."""
    c = gsm8k.get_config()
    c.algorithm.preset = "gmpo"
    return c
