"""GRPO with a calculator inside generation, with the tool-calling model that comes with rlx.

Command:   python -m rlx.main --config=configs/arithmetic_tools.py
           Your own tools: --config.rollout.workflow_kwargs='{"tools": ["FILE.py:Class"]}'
Hardware:  two CPU cores, no network.
Time:      minutes; not measured.
Expect:    greedy accuracy on 200 held-out problems from 0.215 to 0.84 or more after 15 steps (two
           seeds), and calls an answer from 0.29 to 1.0. Runs: experiments/2026-11-tools.
"""

from pathlib import Path

from configs import arithmetic

PROBLEMS = Path(__file__).parent / "data" / "large_numbers.py"


def get_config():
    """The run described above."""
    c = arithmetic.get_config()
    c.total_steps = 30
    c.model.path = "rlx:calculator"
    c.data.dataset = f"{PROBLEMS}:rows"
    c.rollout.workflow = "tools"
    c.rollout.workflow_kwargs = '{"tools": ["calculator"], "max_calls": 2, "max_output_tokens": 16}'
    c.sampling.max_new_tokens = 96  # outputs included
    c.eval.every_steps = 5
    return c
