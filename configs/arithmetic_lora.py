"""GRPO on chains of additions and subtractions with LoRA: adapters of every matrix, base frozen.

Command:   python -m rlx.main --config=configs/arithmetic_lora.py
Hardware:  two CPU cores, no network.
Time:      minutes; not measured.
Expect:    greedy accuracy on 200 held-out problems from 0.345 to 0.93 after 20 steps and 1.00 after
           100 (one run, seed 0). A checkpoint has 1.8 MB and a publish sends 0.63 MB; the model has
           3.3 MB. WORKDIR/adapter loads in PEFT, WORKDIR/hf is merged.
"""

from configs import arithmetic


def get_config():
    """The run described above."""
    c = arithmetic.get_config()
    c.lora.rank = 16
    c.lora.alpha = 32.0
    c.optimizer.learning_rate = 5e-4  # adapters need ten times the rate of the whole model
    c.fleet.publish = "adapter"
    return c
