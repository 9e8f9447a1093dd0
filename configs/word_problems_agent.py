"""GRPO of an agent that calls a calculator over OpenAI's API, with a real language model.

Command:   python -m rlx.main --config=configs/word_problems_agent.py
           First run configs/word_problems_tools_sft.py. Faster, with vLLM's servers:
           --config.fleet.engine=vllm
Hardware:  two CPU cores and 16 GB, as configs/word_problems.py, and the extra `agents`.
Time:      17 minutes on an AMD EPYC, with vLLM's server.
Expect:    greedy accuracy on 200 held-out problems from 0.485 to 0.67, and calls an answer from
           0.25 to 2.5 (one seed; experiments/2026-11-word-problems).
"""

from pathlib import Path

from configs import word_problems_tools

AGENT = Path(__file__).parent / "agents" / "calculator.py"


def get_config():
    """The run described above."""
    c = word_problems_tools.get_config()
    c.rollout.workflow = f"{AGENT}:WithCalculator"
    c.rollout.workflow_kwargs = '{"max_calls": 4}'
    c.sampling.max_new_tokens = 96  # of an answer, calls included
    c.fleet.max_model_len = 512  # of a conversation
    c.train.row_buckets = (512,)
    return c
