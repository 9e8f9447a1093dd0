"""GRPO on competition mathematics with R1-Distill-Qwen 32B, on sixteen nodes, as one Slurm job.

Command:   python -m rlx.main --config=configs/cluster/math_32b_n16.py --workdir=SHARED
           (SHARED: on a disk that all nodes see. On Ray: --config.scheduler.type=ray)
Hardware:  16 nodes of 8 GPUs of 80 GB: 64 for the trainer, 64 for 16 servers of 4.
Expect:    published for this size and these nodes, 512 × 32: 6,707 s a step
           (AReaL's guide, on H800, which did not train it to the end). Not yet run by rlx.
"""

from configs import math_32b


def get_config():
    """The run described above."""
    c = math_32b.get_config()
    c.allocation_mode = "vllm:d16t4+jax:f32t2"
    c.scheduler.type = "slurm"
    c.scheduler.nodes = 16
    c.scheduler.gpus_per_node = 8
    c.train.mesh = ""  # as the allocation has it
    return c
