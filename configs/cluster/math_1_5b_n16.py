"""GRPO on competition mathematics with R1-Distill-Qwen 1.5B, on sixteen nodes, as one Slurm job.

Command:   python -m rlx.main --config=configs/cluster/math_1_5b_n16.py --workdir=SHARED
           (SHARED: on a disk that all nodes see. On Ray: --config.scheduler.type=ray)
Hardware:  16 nodes of 8 GPUs of 80 GB: 64 for the trainer, 64 for as many servers.
Expect:    published for this size and these nodes, 512 × 16: 391 s a step, 250 steps
           (AReaL's guide, on H800). Not yet run by rlx.
"""

from configs import math_1_5b


def get_config():
    """The run described above."""
    c = math_1_5b.get_config()
    c.allocation_mode = "vllm:d64+jax:d8f8"
    c.scheduler.type = "slurm"
    c.scheduler.nodes = 16
    c.scheduler.gpus_per_node = 8
    c.train.mesh = ""  # as the allocation has it
    return c
