"""GRPO on word problems with a second try after a wrong answer, with a real language model.

Command:   python -m rlx.main --config=configs/word_problems_turns.py
           First run configs/word_problems_sft.py. Faster, with vLLM's servers:
           --config.fleet.engine=vllm
Hardware:  two CPU cores and 16 GB, as configs/word_problems.py.
Time:      14 minutes on an AMD EPYC, with vLLM's server.
Expect:    greedy accuracy on 200 held-out problems from 0.70 to 0.715 after 24 batches. The second
           try is hardly ever right (one seed; experiments/2026-11-word-problems).
"""

from configs import word_problems


def get_config():
    """The run described above."""
    c = word_problems.get_config()
    c.total_steps = 24
    c.rollout.workflow = "multi_turn"
    c.rollout.workflow_kwargs = '{"max_turns": 2, "turn_discount": 0.8}'
    c.sampling.max_new_tokens = 224  # both answers and the text between
    c.train.row_buckets = (384,)
    c.optimizer.learning_rate = 2e-5
    c.algorithm.drop_equal_rewards = True
    return c
