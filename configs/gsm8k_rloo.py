"""RLOO on GSM8K: REINFORCE on whole answers, each against the mean of its peers.

Command:   python -m rlx.main --config=configs/gsm8k_rloo.py
Hardware:  as configs/gsm8k.py: one 80 GB GPU for the trainer at 1.5B, one more for each server. A
           KL term, published in the reward (kl_placement=reward, kl_estimator=k1) and off here,
           costs a reference policy: one more copy of the parameters.
Expect:    gradient norms far above GRPO's, for the loss is a sum over an answer's tokens. Not yet
           run by rlx at this size; at 0.8M parameters: experiments/2026-11-presets.
"""

from configs import gsm8k


def get_config():
    """The run described above."""
    c = gsm8k.get_config()
    c.algorithm.preset = "rloo"
    c.train.minibatches = 1  # nothing is clipped: one update a batch, as published
    c.optimizer.clip_norm = 0.0  # at 1.0 it would cut every gradient; Adam does without
    return c
