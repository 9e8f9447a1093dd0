"""AReaL's form of M2PO on GSM8K with old data: a bound on the second moment, no clip.

Command:   python -m rlx.main --config=configs/gsm8k_m2po_areal.py
Hardware:  as configs/gsm8k.py: one 80 GB GPU for the trainer at 1.5B, one more for each server.
           With 17 batches in flight or waiting, generation may run far ahead of training.
Expect:    `n_left_out` counts the tokens dropped. Not yet run by rlx at this size; at 0.8M
           parameters: experiments/2026-11-presets. The authors' own form: configs/gsm8k_m2po.py.
"""

from configs import gsm8k


def get_config():
    """The run described above."""
    c = gsm8k.get_config()
    c.algorithm.preset = "m2po_areal"
    c.rollout.max_staleness = 16
    c.rollout.max_concurrent_rollouts = 512
    return c
