"""GRPO on competition mathematics with R1-Distill-Qwen 14B, on eight nodes.

Command:   srun -N4 --ntasks-per-node=1 python -m rlx.main --config=configs/math_14b.py
           --config.fleet.addresses="('@servers',)"    (on four nodes; docs/scale.md)
Hardware:  8 nodes of 8 GPUs of 80 GB, 4 for the trainer and 4 for 32 servers.
Time:      not run. AReaL's guide, the source of the other sizes, has no figure for this one.
Expect:    not run.
"""

from configs import math_7b


def get_config():
    """The run described above."""
    c = math_7b.get_config()
    c.model.path = "deepseek-ai/DeepSeek-R1-Distill-Qwen-14B"
    c.train.mesh = "replica:2,fsdp:16"  # a state of 20 bytes a parameter does not fit 8 devices
    c.model.remat = "attention"
    return c
