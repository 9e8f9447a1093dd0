"""GRPO mixed with distillation from a teacher, with the model that comes with rlx.

Command:   python -m rlx.main --config=configs/arithmetic_distill_mixed.py
           First train the teacher, two minutes of GRPO:
           python -m rlx.main --config=configs/arithmetic.py --workdir=runs/teacher
           Another teacher of the same vocabulary: --config.teacher.path=DIR
Hardware:  two CPU cores, no network.
Time:      4 minutes on a shared machine.
Expect:    greedy accuracy on 200 held-out problems from 0.345 to 0.97 after 40 steps, and 0.985 or
           more at the end; the teacher has 0.985. The preset's coefficient, 0.005, has no visible
           effect here: GRPO does as well. One run has --config.algorithm.kl_coefficient=1.
           Runs: experiments/2026-11-other-trainers.
"""

from configs import arithmetic


def get_config():
    """The run described above."""
    c = arithmetic.get_config()
    c.algorithm.preset = "distill_mixed"
    c.teacher.path = "runs/teacher/hf"
    return c
