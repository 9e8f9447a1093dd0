"""GRPO on word problems with a second try after a wrong answer, with a real language model.

Command:   python -m rlx.main --config=configs/word_problems_turns.py
           after configs/word_problems_sft.py, whose weights it begins with; with vLLM's servers,
           which generate faster: --config.fleet.engine=vllm
Hardware:  two CPU cores and 16 GB, as configs/word_problems.py.
Expect:    little: of 200 held-out greedy answers 0.70 are right before and 0.715 after 24 batches,
           14 minutes of two cores of an AMD EPYC with vLLM's server, and hardly one at the second
           try (experiments/2026-11-word-problems; one seed).
"""

from configs import word_problems


def get_config():
    """The run described above."""
    c = word_problems.get_config()
    c.total_steps = 24
    c.rollout.workflow = "multi_turn"
    c.rollout.workflow_kwargs = '{"max_turns": 2, "turn_discount": 0.8}'
    c.sampling.max_new_tokens = 224  # of both answers and what is said between
    c.train.row_buckets = (384,)
    c.optimizer.learning_rate = 2e-5
    c.algorithm.drop_equal_rewards = True
    return c
