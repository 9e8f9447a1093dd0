"""A Bradley-Terry reward model of arithmetic solutions, from the model that comes with rlx.

Command:   python -m rlx.main --config=configs/arithmetic_reward_model.py
Hardware:  two CPU cores, no network; two minutes or so.
Expect:    of 200 held-out pairs about 0.8 right after 20 steps and ever after, their loss from
           0.693 to 0.32. It knows every answer that gives up and guesses; one that carries a
           mistake through it does not tell from a careful one. The runs behind this, with a table
           of both: experiments/2026-11-other-trainers.
"""

from rlx.config import default


def get_config():
    """The run described above."""
    c = default()
    c.total_steps = 100
    c.model.path = "rlx:arithmetic"
    c.algorithm.preset = "reward_model"
    c.data.kind = "arithmetic"
    c.data.max_prompt_tokens = 64
    c.sampling.max_new_tokens = 128
    c.rollout.batch_prompts = 32
    c.train.max_tokens_per_microbatch = 1536  # what a core's cache likes
    c.train.row_buckets = (192,)
    c.optimizer.learning_rate = 3e-4
    c.optimizer.b2 = 0.99
    c.optimizer.schedule = "cosine"
    c.optimizer.warmup_steps = 5
    c.fleet.num_servers = 0  # a reward model generates nothing
    c.eval.every_steps = 20
    c.eval.num_questions = 200
    return c
