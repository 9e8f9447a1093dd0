"""GRPO on chains of additions and subtractions, with the model that comes with rlx.

Command:   python -m rlx.main --config=configs/arithmetic.py
Hardware:  two CPU cores, no network.
"""

from rlx.config import default


def get_config(arg=None):
    """The run described above."""
    del arg
    c = default()
    c.total_steps = 80
    c.model.path = "rlx:arithmetic"
    c.data.kind = "arithmetic"
    c.data.max_prompt_tokens = 64
    c.reward.name = "arithmetic"
    c.sampling.n_samples = 8
    c.sampling.max_new_tokens = 128
    c.rollout.batch_prompts = 12
    c.rollout.max_staleness = 2
    c.rollout.max_concurrent_rollouts = 36
    c.train.max_tokens_per_microbatch = 1536
    c.train.row_buckets = (192,)
    c.optimizer.learning_rate = 1e-4
    c.optimizer.b2 = 0.99
    c.fleet.slots = 64
    c.eval.every_steps = 10
    c.eval.num_questions = 200
    return c
