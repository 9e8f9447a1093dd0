"""SFT of the embedded model with tools, from its initial weights, on `demonstrations.py`.

Command:   python experiments/2026-11-tools/make_model.py runs/begin
           python -m rlx.main --config=experiments/2026-11-tools/sft.py --workdir=runs/calculator
           Then runs/calculator/hf becomes rlx/assets/calculator.
"""

from pathlib import Path

from rlx.config import default


def get_config():
    """The run described above."""
    c = default()
    c.total_steps = 400
    c.model.path = "runs/begin"
    c.algorithm.preset = "sft"
    c.data.dataset = f"{Path(__file__).parent}/demonstrations.py:rows"
    c.data.max_prompt_tokens = 128
    c.sampling.max_new_tokens = 64
    c.rollout.batch_prompts = 48
    c.train.max_tokens_per_microbatch = 6144
    c.train.row_buckets = (192,)
    c.optimizer.learning_rate = 1e-3
    c.optimizer.b2 = 0.98
    c.optimizer.schedule = "cosine"
    c.optimizer.warmup_steps = 20
    c.fleet.num_servers = 0
    c.checkpoint.every_steps = 100
    return c
