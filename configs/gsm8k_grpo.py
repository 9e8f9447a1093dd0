"""GRPO on GSM8K as published, with its KL term to the model it began with.

Command:   python -m rlx.main --config=configs/gsm8k_grpo.py
Hardware:  as configs/gsm8k.py: one 80 GB GPU for the trainer at 1.5B, one more for each server. The
           reference policy is one more copy of the parameters, 6 GB in float32, and one more
           forward pass a batch. configs/gsm8k.py is the same without it.
Expect:    published for 7B, already instructed in mathematics: GSM8K from 0.829 to 0.882
           (DeepSeekMath, 2402.03300). Not yet run by rlx at this size; at 0.8M parameters:
           experiments/2026-11-presets.
"""

from configs import gsm8k


def get_config():
    """The run described above."""
    c = gsm8k.get_config()
    c.algorithm.preset = "grpo"
    c.algorithm.kl_placement = "loss"
    c.algorithm.kl_estimator = "k3"
    c.algorithm.kl_coefficient = 0.04
    return c
