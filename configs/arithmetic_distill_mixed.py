"""GRPO that is also drawn to a teacher, with the model that comes with rlx.

Command:   python -m rlx.main --config=configs/arithmetic_distill_mixed.py
           after the teacher's own run, which is two minutes of GRPO:
           python -m rlx.main --config=configs/arithmetic.py --workdir=runs/teacher
           Another teacher of the same vocabulary: --config.teacher.path=DIR
Hardware:  two CPU cores, no network; three minutes or so when they are free.
Expect:    greedy accuracy on 200 held-out problems from 0.345 to 0.97 after 40 steps and 0.985 or
           more at the end; the teacher has 0.985. The preset's pull, 0.005, cannot be told from
           none here: GRPO does as well. The runs behind this, and one of 1 instead
           (--config.algorithm.kl_coefficient=1): experiments/2026-11-other-trainers.
"""

from configs import arithmetic


def get_config():
    """The run described above."""
    c = arithmetic.get_config()
    c.algorithm.preset = "distill_mixed"
    c.teacher.path = "runs/teacher/hf"
    return c
