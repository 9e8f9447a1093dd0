"""GSPO on GSM8K: one importance ratio for a whole answer, clipped within 4e-4.

Command:   python -m rlx.main --config=configs/gsm8k_gspo.py
Hardware:  as configs/gsm8k.py: one 80 GB GPU for the trainer at 1.5B, one more for each server.
Expect:    far more tokens clipped than under GRPO, whole answers at a time; published to learn
           better all the same (2507.18071). The clip is made for small updates: `actor_clip_ratio`
           near 0.75 means that the first of the four minibatches alone has learnt. Not yet run by
           rlx at this size; at 0.8M parameters: experiments/2026-11-presets.
"""

from configs import gsm8k


def get_config():
    """The run described above."""
    c = gsm8k.get_config()
    c.algorithm.preset = "gspo"
    return c
