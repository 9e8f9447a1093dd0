"""MaxRL on GSM8K: rewards relative to their group's mean, so that rare successes weigh most.

Command:   python -m rlx.main --config=configs/gsm8k_maxrl.py
Hardware:  as configs/gsm8k.py: one 80 GB GPU for the trainer at 1.5B, one more for each server.
Expect:    a group without a success moves nothing; one success among eight has advantage 7.
           Published: pass@k above GRPO's at large k (2602.02710). Not yet run by rlx at this size.
"""

from configs import gsm8k


def get_config():
    """The run described above."""
    c = gsm8k.get_config()
    c.algorithm.preset = "maxrl"
    return c
