"""SFT on answers about pictures, with a small random model that sees, before configs/shapes.py.

Command:   python -m rlx.main --config=configs/shapes_sft.py --workdir=runs/shapes_sft
           once: pip install -e '.[torch,vision]'
Hardware:  two CPU cores, no network.
Time:      8 minutes on one core, 14 on a machine that was busy with other work.
Expect:    greedy accuracy on 200 held-out questions from 0 to 0.96–0.985 (three seeds), which
           configs/shapes.py measures at its start.
"""

from configs import shapes


def get_config():
    """The run described above."""
    c = shapes.get_config()
    c.total_steps = 3000
    c.model.path = "rlx:shapes"
    c.algorithm.preset = "sft"
    c.rollout.batch_prompts = 64
    c.optimizer.learning_rate = 2e-3
    c.optimizer.b2 = 0.98
    c.optimizer.schedule = "cosine"
    c.optimizer.warmup_steps = 20
    c.fleet.num_servers = 0  # no generation: the next run begins with an evaluation
    c.checkpoint.every_seconds = 300.0
    c.eval.every_steps = 0
    c.eval.num_questions = 0
    return c
