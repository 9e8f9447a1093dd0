"""PPO with a critic on GSM8K, one sample a prompt.

Command:   python -m rlx.main --config=configs/gsm8k_ppo.py
Hardware:  as configs/gsm8k.py: one 80 GB GPU for the trainer at 1.5B, one more for each server. The
           critic is a second model with an Adam of its own: by arithmetic 2 × 18.5 GB of parameters
           and moments in float32 and 6 GB of gradients, before activations.
Expect:    for 20 batches the policy stands still while the critic learns what to expect: `value`
           goes to the mean reward; accuracy moves only then. Not yet run by rlx at this size; at
           0.8M parameters: experiments/2026-11-presets.
"""

from configs import gsm8k


def get_config():
    """The run described above."""
    c = gsm8k.get_config()
    c.algorithm.preset = "ppo"
    c.sampling.n_samples = 1  # the critic is the baseline: no second sample of a prompt is needed
    c.rollout.batch_prompts = 512
    c.rollout.max_concurrent_rollouts = 1536
    c.critic.learning_rate = 1e-5  # ten times the policy's
    c.critic.warmup_steps = 20
    return c
