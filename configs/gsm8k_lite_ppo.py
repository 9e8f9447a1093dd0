"""Lite PPO on GSM8K: group mean, batch deviation, mean over tokens, and nothing else.

Command:   python -m rlx.main --config=configs/gsm8k_lite_ppo.py
Hardware:  as configs/gsm8k.py: one 80 GB GPU for the trainer at 1.5B, one more for each server.
Expect:    published for base models of 4B and 8B, which is why the model is one (2508.08221). Not
           yet run by rlx at this size; at 0.8M parameters: experiments/2026-11-presets.
"""

from configs import gsm8k


def get_config():
    """The run described above."""
    c = gsm8k.get_config()
    c.algorithm.preset = "lite_ppo"
    c.model.path = "Qwen/Qwen2.5-1.5B"
    return c
