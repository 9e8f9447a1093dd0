"""GRPO on chains of additions and subtractions, with the model that comes with rlx.

Command:   python -m rlx.main --config=configs/arithmetic.py
Hardware:  two CPU cores, no network.
Time:      2 minutes.
Expect:    greedy accuracy on 200 held-out problems from 0.345 to 0.975 or more (five seeds).
           Completions grow from 29 to 40 or 47 tokens, because the model stops giving up half-way.
           Runs: experiments/2026-11-arithmetic.
"""

from rlx.config import default


def get_config():
    """The run described above."""
    c = default()
    c.total_steps = 100
    c.model.path = "rlx:arithmetic"
    c.data.kind = "arithmetic"
    c.data.max_prompt_tokens = 64
    c.reward.name = "arithmetic"
    c.sampling.n_samples = 8
    c.sampling.max_new_tokens = 128
    c.rollout.batch_prompts = 16
    c.rollout.max_staleness = 2
    c.rollout.max_concurrent_rollouts = 48
    c.train.max_tokens_per_microbatch = 2304  # a train batch: few shapes to compile
    c.train.row_buckets = (192,)
    c.optimizer.learning_rate = 5e-5
    c.optimizer.b2 = 0.99
    c.fleet.slots = 64
    c.eval.every_steps = 10
    c.eval.num_questions = 200
    return c
