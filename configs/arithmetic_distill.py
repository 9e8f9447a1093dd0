"""Distillation on the student's own answers, with the model that comes with rlx and a teacher.

Command:   python -m rlx.main --config=configs/arithmetic_distill.py
           First train the teacher, two minutes of GRPO:
           python -m rlx.main --config=configs/arithmetic.py --workdir=runs/teacher
           Another teacher of the same vocabulary: --config.teacher.path=DIR
Hardware:  two CPU cores, no network.
Time:      3 to 7 minutes on a shared machine.
Expect:    greedy accuracy on 200 held-out problems from 0.345 to 0.98 after 40 steps, without a
           reward; the teacher has 0.985. The KL to it falls from 0.05 nats a token to 0.001.
           Runs: experiments/2026-11-other-trainers.
"""

from configs import arithmetic


def get_config():
    """The run described above."""
    c = arithmetic.get_config()
    c.algorithm.preset = "distill"
    c.teacher.path = "runs/teacher/hf"
    c.sampling.n_samples = 1  # no answer is compared with others of its prompt
    c.rollout.batch_prompts = 128
    c.rollout.max_concurrent_rollouts = 384
    return c
