"""SFT on solutions with a calculator, for configs/word_problems_tools.py to begin with.

Command:   python -m rlx.main --config=configs/word_problems_tools_sft.py \
               --workdir=runs/word_problems_tools_sft
           after configs/word_problems_sft.py, whose weights it begins with
Hardware:  two CPU cores and 16 GB, as configs/word_problems.py.
Expect:    the model calls a calculator for some equations and does the others by head, and errs:
           97 of 200 held-out answers are right after 11 minutes of both cores of an AMD EPYC
           (avx512_bf16), with a call in every fourth (experiments/2026-11-word-problems).
"""

from pathlib import Path

from configs import word_problems_sft

DATA = Path(__file__).parent / "data"


def get_config():
    """The run described above."""
    c = word_problems_sft.get_config()
    c.total_steps = 120
    c.model.path = "runs/word_problems_sft/hf"
    c.data.dataset = f"{DATA}/calculator_solutions.py:rows"
    c.data.chat_template = f"{DATA}/smollm2_tools.jinja"
    c.data.system_prompt = ""  # the conversations have their own
    c.data.max_prompt_tokens = 384
    c.train.row_buckets = (512,)
    c.optimizer.learning_rate = 2e-4
    return c
