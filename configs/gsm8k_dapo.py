"""DAPO on GSM8K: groups without a signal sampled anew, long answers penalised, clip higher.

Command:   python -m rlx.main --config=configs/gsm8k_dapo.py
Hardware:  as configs/gsm8k.py: one 80 GB GPU for the trainer at 1.5B, one more for each server. It
           generates more than it trains on, so it wants more servers than GRPO.
Expect:    `rejected` in metrics.jsonl grows with accuracy, and the wait for a batch with it: where
           the answers to nine prompts of ten are all right, ten groups are generated for one.
           Published at 32B: AIME 2024 0.50 (2503.14476). Not yet run by rlx at this size; at 0.8M
           parameters: experiments/2026-11-presets.
"""

from configs import gsm8k


def get_config():
    """The run described above."""
    c = gsm8k.get_config()
    c.algorithm.preset = "dapo"
    c.sampling.n_samples = 16
    c.rollout.max_concurrent_rollouts = 256  # what is rejected wants others in flight
    c.optimizer.warmup_steps = 80  # 20 batches
    return c
