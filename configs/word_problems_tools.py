"""GRPO on word problems with a calculator inside generation, with a real language model.

Command:   python -m rlx.main --config=configs/word_problems_tools.py
           First run configs/word_problems_tools_sft.py. Faster, with vLLM's servers:
           --config.fleet.engine=vllm
Hardware:  two CPU cores and 16 GB, as configs/word_problems.py.
Time:      22 minutes on an AMD EPYC, with vLLM's server.
Expect:    greedy accuracy on 200 held-out problems from 0.485 to 0.72 after 20 batches, and calls
           an answer from 0.25 to 2.4 (one seed; experiments/2026-11-word-problems).
"""

from configs import word_problems
from configs.word_problems import DATA


def get_config():
    """The run described above."""
    c = word_problems.get_config()
    c.total_steps = 24
    c.model.path = "runs/word_problems_tools_sft/hf"
    c.data.chat_template = f"{DATA}/smollm2_tools.jinja"
    c.data.system_prompt = ""  # the template's own lists the tools
    c.rollout.workflow = "tools"
    c.rollout.workflow_kwargs = '{"tools": ["calculator"], "max_calls": 4, "max_output_tokens": 8}'
    c.sampling.max_new_tokens = 256  # four calls and their text
    c.train.row_buckets = (384,)
    c.optimizer.learning_rate = 2e-5
    c.algorithm.drop_equal_rewards = True
    return c
