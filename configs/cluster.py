"""GRPO on competition mathematics with R1-Distill-Qwen on whole nodes, as one Slurm job.

Command:   python -m rlx.main --config=configs/cluster.py:math_7b_n4 --workdir=SHARED
           SHARED is on a disk that all nodes see. On Ray: --config.scheduler.type=ray
Hardware:  nodes of 8 GPUs of 80 GB; VARIANTS has their number. Half of the GPUs train.
Time:      not run. VARIANTS has the seconds a step that AReaL's guide published for this size and
           these nodes, on H800, with 512 prompts × 16 answers (32B: × 32).
Expect:    not run. The guide trained 250 steps for 1.5B and 400 for 7B, and 32B not to the end.
"""

from configs import math_1_5b, math_7b, math_32b
from rlx.base import unknown

# name → summary, which `rlx configs` lists; config of one node, nodes, allocation
VARIANTS = {
    "math_1_5b_n1": ("1.5B on 1 node: 3,461 s a step", math_1_5b, 1, "vllm:d4+jax:f4"),
    "math_1_5b_n4": ("1.5B on 4 nodes: 997 s a step", math_1_5b, 4, "vllm:d16+jax:d2f8"),
    "math_1_5b_n16": ("1.5B on 16 nodes: 391 s a step", math_1_5b, 16, "vllm:d64+jax:d8f8"),
    "math_7b_n4": ("7B on 4 nodes: 2,275 s a step", math_7b, 4, "vllm:d16+jax:f16"),
    "math_7b_n16": ("7B on 16 nodes: 815 s a step", math_7b, 16, "vllm:d64+jax:d4f16"),
    "math_32b_n16": ("32B on 16 nodes: 6,707 s a step", math_32b, 16, "vllm:d16t4+jax:d2f32"),
}


def get_config(name=""):
    """The run of a row of VARIANTS."""
    if name not in VARIANTS:
        raise unknown("variant", name, VARIANTS)
    _, base, nodes, allocation = VARIANTS[name]
    c = base.get_config()
    c.allocation_mode = allocation
    c.scheduler.type = "slurm"
    c.scheduler.nodes = nodes
    c.scheduler.gpus_per_node = 8
    c.train.mesh = ""  # the allocation sets it
    return c
