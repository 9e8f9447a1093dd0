"""Predict published runs that the planner's constants were not fitted to.

    python experiments/2026-12-planner/held_out.py          # half a minute on one core

NeMo RL publishes seconds a step and mean lengths (docs/about/performance-summary.md of 0.4 and 0.6,
DGX-H100, bfloat16); its recipes have the other settings. AReaL's paper (2505.24298, table 1) has
hours of synchronous and asynchronous runs, without lengths. So only their ratio is predicted.
"""

from calibrate import AREAL, MODELS, qwen, setup

from rlx.model.model_config import ModelConfig
from rlx.plan.simulate import Prediction, simulate
from rlx.plan.speeds import Calibration

MODELS |= {
    "8B": ModelConfig("LlamaForCausalLM", 128256, 32, 4096, 14336, 32, 8, head_dim=128),
    "14B": qwen(152064, 48, 5120, 13824, 40, 8),
    "Qwen3-32B": qwen(151936, 64, 5120, 25600, 64, 8),
    "235B-A22B": qwen(
        151936, 94, 4096, 12288, 64, 4, num_experts=128, experts_per_token=8, expert_dim=1536
    ),
}
# Log-probabilities of the policy and of a reference are computed before the update.
NEMO = {"card": "h100", "prompt": 110, "forwards": 2, "n": 32}
STALE = {"eta": 1}
SMALL = NEMO | {"prompts": 64, "updates": 4, "limit": 3986}
KEPT = SMALL | {"recomputed": 0.0}  # activations
LARGE = NEMO | {"prompts": 16, "updates": 1, "limit": 8082}
# The share of answers at the limit is not published: 2 % of Llama's and 40 % of Qwen3's, which
# think, are assumed.
# Version, run, model, GPUs that generate, GPUs that train, tensor, length, share cut, seconds:
NEMO_RUNS = (
    ("0.4", SMALL, "8B", 16, 0, 1, 1060, 0.02, 97.7),
    ("0.4", SMALL | STALE, "8B", 8, 8, 1, 1129, 0.02, 74.6),
    ("0.4", KEPT, "Qwen3-32B", 32, 0, 4, 3206, 0.4, 393.0),
    ("0.4", KEPT | STALE, "Qwen3-32B", 32, 32, 4, 3207, 0.4, 215.0),
    ("0.4", KEPT, "30B-A3B", 32, 0, 4, 3154, 0.4, 225.0),
    ("0.4", KEPT | STALE, "30B-A3B", 16, 16, 2, 3158, 0.4, 244.0),
    ("0.4", LARGE, "235B-A22B", 128, 0, 16, 5671, 0.4, 506.0),
    ("0.4", LARGE | STALE, "235B-A22B", 128, 128, 8, 5691, 0.4, 241.0),
    ("0.6", KEPT, "30B-A3B", 32, 0, 2, 3203, 0.4, 192.0),
    ("0.6", KEPT | STALE, "30B-A3B", 16, 16, 2, 3201, 0.4, 152.0),
    ("0.6", LARGE, "235B-A22B", 128, 0, 16, 5698, 0.4, 395.0),
    ("0.6", LARGE, "235B-A22B", 256, 0, 16, 5713, 0.4, 312.0),
    ("0.6", LARGE | STALE, "235B-A22B", 128, 128, 8, 5721, 0.4, 231.0),
)
# A quarter of the asynchronous runs' GPUs train.
AREAL_RUNS = (  # model, nodes of eight GPUs, tensor, hours synchronous, hours asynchronous
    ("1.5B", 16, 1, 41.0, 14.8),
    ("7B", 24, 1, 57.7, 25.4),
    ("14B", 32, 2, 48.8, 21.9),
    ("32B", 48, 4, 51.1, 31.1),
)


def predicted(run: dict, mean: float = 0.0) -> Prediction:
    """Return the prediction of a run, with answers of `mean` tokens where it has no log."""
    return simulate(setup(run, Calibration(), mean), 4)


def main() -> None:
    """Print a table of each source."""
    print("| run | published | planned | error | trainer idle | servers idle |")
    print("|---|---|---|---|---|---|")
    for version, base, model, gpus, own, tensor, length, cut, seconds in NEMO_RUNS:
        sizes = {"model": model, "gpus": gpus, "own": own, "tensor": tensor}
        plan = predicted(base | sizes | {"cut": cut}, length)
        split = f"{gpus} + {own}" if own else f"{gpus}"
        error = plan.step_seconds / seconds - 1
        print(
            f"| NeMo RL {version}, {model}, {split} | {seconds:g} | {plan.step_seconds:.4g} "
            f"| {error:+.0%} | {plan.trainer_idle:.0%} | {plan.servers_idle:.0%} |"
        )
    print("\n| AReaL, GPUs | published speed-up | planned | error |\n|---|---|---|---|")
    for model, nodes, tensor, before, after in AREAL_RUNS:
        half, quarter = nodes * 4, nodes * 2
        sizes = AREAL | {"model": model, "tensor": tensor}
        synchronous = predicted(sizes | {"gpus": half, "own": half})
        asynchronous = predicted(sizes | {"gpus": 3 * quarter, "own": quarter, "eta": 4})
        gain, published = synchronous.step_seconds / asynchronous.step_seconds, before / after
        print(
            f"| {model}, {8 * nodes} | {published:.2f} | {gain:.2f} | {gain / published - 1:+.0%} |"
        )


if __name__ == "__main__":
    main()
