"""Dr.GRPO on GSM8K: divided by neither the group's deviation nor the answer's length.

Command:   python -m rlx.main --config=configs/gsm8k_dr_grpo.py
Hardware:  as configs/gsm8k.py: one 80 GB GPU for the trainer at 1.5B, one more for each server.
Expect:    gradient norms below GRPO's, for token losses are divided by the whole budget of 1024
           tokens; Adam takes no notice. Published: wrong answers do not grow longer than right
           ones, as they do under GRPO (2503.20783). Not yet run by rlx at this size; at 0.8M
           parameters: experiments/2026-11-presets.
"""

from configs import gsm8k


def get_config():
    """The run described above."""
    c = gsm8k.get_config()
    c.algorithm.preset = "dr_grpo"  # its constant length is sampling.max_new_tokens
    return c
