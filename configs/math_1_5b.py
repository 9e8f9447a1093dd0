"""GRPO on competition mathematics with long answers, R1-Distill-Qwen 1.5B, on one node.

Command:   python -m rlx.main --config=configs/math_1_5b.py --config.fleet.addresses="('@servers',)"
Hardware:  8 GPUs of 80 GB, 4 for the trainer (CUDA_VISIBLE_DEVICES=0,1,2,3; see docs/scale.md) and
           4 for servers. Start these by hand and list each host:port in the file `servers`.
Time:      not run. AReaL's guide has 3,461 s a step on one such node, with 512 prompts × 16 answers
           of about 8,000 tokens.
Expect:    not run. The guide trained 250 steps.
"""

from configs import gsm8k


def get_config():
    """The run described above."""
    c = gsm8k.get_config()
    c.total_steps = 250
    c.model.path = "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"
    c.data.train = "agentica-org/DeepScaleR-Preview-Dataset:train"
    c.data.eval = "HuggingFaceH4/aime_2024:train"
    c.data.question_key = "problem"
    c.data.max_prompt_tokens = 1024
    c.data.overlong = "skip"
    c.reward.name = "math"
    c.reward.workers = 8
    c.sampling.n_samples = 16
    c.sampling.max_new_tokens = 16384
    c.rollout.batch_prompts = 512
    c.rollout.max_staleness = 4
    c.rollout.max_concurrent_rollouts = 512
    c.rollout.request_timeout_seconds = 3600.0
    c.model.remat = "none"
    c.train.mesh = "fsdp:4"
    c.train.row_buckets = (2048, 4096, 8192, 12288, 17408)  # the last: the longest trajectory
    c.train.max_tokens_per_microbatch = 17408  # on each of 4 devices: one of the longest rows
    c.fleet.slots = 256
    c.fleet.publish = "stream"  # servers on other hosts need no shared disk
    c.fleet.publish_timeout_seconds = 600.0
    c.checkpoint.every_seconds = 1800.0
    c.eval.num_questions = 30
    return c
