"""GRPO that is also drawn to a teacher, with the model that comes with rlx.

Command:   python -m rlx.main --config=configs/arithmetic_distill_mixed.py
           after the teacher's own run, which is two minutes of GRPO:
           python -m rlx.main --config=configs/arithmetic.py --workdir=runs/teacher
           Another teacher of the same vocabulary: --config.teacher.path=DIR
Hardware:  two CPU cores, no network; three minutes or so when they are free.
Expect:    greedy accuracy on 200 held-out problems from 0.345 to about 0.98 after 50 steps, where
           it stays; the teacher has 0.985. At the preset's 0.005 the pull is a light one beside
           the reward's. The runs behind this: experiments/2026-11-other-trainers.
"""

from configs import arithmetic


def get_config():
    """The run described above."""
    c = arithmetic.get_config()
    c.algorithm.preset = "distill_mixed"
    c.teacher.path = "runs/teacher/hf"
    return c
