"""RAE on GSM8K: one answer a question, and a running mean of the rewards as its baseline.

Command:   python -m rlx.main --config=configs/gsm8k_rae.py
Hardware:  as configs/gsm8k.py: one 80 GB GPU for the trainer at 1.5B, one more for each server.
Expect:    published for games with two roles (2506.24119), of each of which it keeps a mean; here
           there is one. Not yet run by rlx at this size.
"""

from configs import gsm8k


def get_config():
    """The run described above."""
    c = gsm8k.get_config()
    c.algorithm.preset = "rae"
    c.sampling.n_samples = 1  # nothing is compared with the others of its question
    c.rollout.batch_prompts = 512
    c.rollout.max_concurrent_rollouts = 1536
    return c
