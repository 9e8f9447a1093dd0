"""GRPO on competition mathematics with R1-Distill-Qwen 7B, on four nodes.

Command:   srun -N2 --ntasks-per-node=1 python -m rlx.main --config=configs/math_7b.py
           --config.fleet.addresses="('@servers',)"    (on two nodes; see docs/scale.md)
Hardware:  4 nodes of 8 GPUs of 80 GB, 2 for the trainer and 2 for 16 servers.
Time:      not run. AReaL's guide has 2,275 s a step on 4 nodes and 815 s on 16, with 512 prompts
           × 16 answers.
Expect:    not run. The guide trained 400 steps.
"""

from configs import math_1_5b


def get_config():
    """The run described above."""
    c = math_1_5b.get_config()
    c.total_steps = 400
    c.model.path = "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"
    c.rollout.max_concurrent_rollouts = 1024
    c.model.remat = "dots"
    c.train.mesh = "fsdp:16"
    return c
