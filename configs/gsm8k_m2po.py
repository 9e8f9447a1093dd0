"""M2PO on GSM8K with old data: a clip as wide as the second moment of log-ratios allows.

Command:   python -m rlx.main --config=configs/gsm8k_m2po.py
Hardware:  as configs/gsm8k.py: one 80 GB GPU for the trainer at 1.5B, one more for each server.
           With 17 batches in flight or waiting, generation may run far ahead of training.
Expect:    `actor_clip_ratio` is the share of tokens that were clipped. Published: data 256 updates
           old trains as well as fresh data (2510.01161). Not yet run by rlx; AReaL's form of it
           (`algorithm.preset=m2po_areal`) at 0.8M parameters: experiments/2026-11-presets.
"""

from configs import gsm8k


def get_config():
    """The run described above."""
    c = gsm8k.get_config()
    c.algorithm.preset = "m2po"
    c.rollout.max_staleness = 16
    c.rollout.max_concurrent_rollouts = 512
    return c
