"""GRPO on a task of reasoning-gym, chains of additions and subtractions, with the model of rlx.

Command:   python -m rlx.main --config=configs/reasoning_gym.py
           once: pip install -e '.[reasoning-gym]'
Hardware:  two CPU cores, no network.
Time:      15 minutes on one core of an AMD EPYC that had much other work.
Expect:    greedy accuracy on 200 held-out questions from 0.245 to about 0.5. That is nearly all of
           the 105 questions whose running value is never negative; the model cannot write the other
           95 (experiments/2026-12-reasoning-gym).
"""

from pathlib import Path

from configs import arithmetic

DATA = Path(__file__).parent / "data"


def get_config():
    """The run described above."""
    c = arithmetic.get_config()
    c.total_steps = 300
    c.rollout.workflow = "reasoning_gym:chain_sum?min_terms=3&max_terms=8&max_digits=1"
    c.data.chat_template = f"{DATA}/chain_sum.jinja"  # 8 - 4 + 3 = becomes 8a-4b+3=?
    c.eval.every_steps = 25
    return c
