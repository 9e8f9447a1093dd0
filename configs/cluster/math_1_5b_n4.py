"""GRPO on competition mathematics with R1-Distill-Qwen 1.5B, on four nodes, as one Slurm job.

Command:   python -m rlx.main --config=configs/cluster/math_1_5b_n4.py --workdir=SHARED
           (SHARED: on a disk that all nodes see. On Ray: --config.scheduler.type=ray)
Hardware:  4 nodes of 8 GPUs of 80 GB: 16 for the trainer, 16 for as many servers.
Expect:    published for this size and these nodes, 512 × 16: 997 s a step, 250 steps
           (AReaL's guide, on H800). Not yet run by rlx.
"""

from configs import math_1_5b


def get_config():
    """The run described above."""
    c = math_1_5b.get_config()
    c.allocation_mode = "vllm:d16+jax:d2f8"
    c.scheduler.type = "slurm"
    c.scheduler.nodes = 4
    c.scheduler.gpus_per_node = 8
    c.train.mesh = ""  # as the allocation has it
    return c
