"""GRPO on competition mathematics with R1-Distill-Qwen 32B, on sixteen nodes.

Command:   srun -N8 --ntasks-per-node=1 python -m rlx.main --config=configs/math_32b.py
           --config.fleet.addresses="('@servers',)"    (on eight nodes; docs/scale.md)
Hardware:  8 nodes of 8 GPUs of 80 GB for the trainer. The weights of a server are 66 GB, so use 16
           servers of 4 such GPUs each (rlx.serve --tensor-parallel=4).
Time:      not run. AReaL's guide has 6,707 s a step on 16 nodes, with 512 prompts × 32 answers.
Expect:    not run. The guide did not train it to the end.
"""

from configs import math_14b


def get_config():
    """The run described above."""
    c = math_14b.get_config()
    c.model.path = "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B"
    c.sampling.n_samples = 32
    c.model.remat = "full"
    c.train.mesh = "replica:2,fsdp:32"  # weights are gathered within four nodes
    return c
