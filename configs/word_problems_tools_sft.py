"""SFT on solutions with a calculator, the first step of configs/word_problems_tools.py.

Command:   python -m rlx.main --config=configs/word_problems_tools_sft.py \
               --workdir=runs/word_problems_tools_sft
           First run configs/word_problems_sft.py.
Hardware:  two CPU cores and 16 GB, as configs/word_problems.py.
Time:      11 minutes on an AMD EPYC (avx512_bf16).
Expect:    97 of 200 held-out answers right, with a call in every fourth. The model calls the
           calculator for some equations, and makes mistakes in the others
           (experiments/2026-11-word-problems).
"""

from configs import word_problems_sft
from configs.word_problems import DATA


def get_config():
    """The run described above."""
    c = word_problems_sft.get_config()
    c.total_steps = 120
    c.model.path = "runs/word_problems_sft/hf"
    c.data.completion_key = "completion"
    c.data.dataset = f"{DATA}/calculator_solutions.py:rows"
    c.data.chat_template = f"{DATA}/smollm2_tools.jinja"
    c.data.system_prompt = ""  # the conversations have their own
    c.data.max_prompt_tokens = 384
    c.train.row_buckets = (512,)
    c.optimizer.learning_rate = 2e-4
    return c
