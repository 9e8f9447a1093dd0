"""Fit the planner's constants to published runs, and report the error on runs left out.

    python experiments/2026-12-planner/calibrate.py          # about three minutes on one core

Writes calibration.json: constants, and predicted beside published seconds, fitted and left out.
"""

import dataclasses
import json
import math
from functools import cache
from pathlib import Path
from statistics import NormalDist

import numpy as np
from scipy.optimize import least_squares

from rlx.doctor.gpu_cards import CARDS
from rlx.model import params
from rlx.model.model_config import ModelConfig
from rlx.plan.simulate import Lengths, Setup, simulate
from rlx.plan.speeds import Calibration, ServerSpeed, TrainerSpeed
from rlx.rollout.staleness import Limits

HERE = Path(__file__).parent


def qwen(vocab, layers, dim, mlp, heads, kv, **more) -> ModelConfig:
    """Return a shape of Qwen2.5 or Qwen3."""
    sizes = {"head_dim": 128, **more}
    architecture = "Qwen3MoeForCausalLM" if "num_experts" in more else "Qwen2ForCausalLM"
    return ModelConfig(architecture, vocab, layers, dim, mlp, heads, kv, **sizes)


MODELS = {
    "0.6B": qwen(151936, 28, 1024, 3072, 16, 8, tie_embeddings=True),
    "1.5B": qwen(151936, 28, 1536, 8960, 12, 2, tie_embeddings=True),
    "4B": qwen(151936, 36, 2560, 9728, 32, 8, tie_embeddings=True),
    "7B": qwen(152064, 28, 3584, 18944, 28, 4),
    "32B": qwen(152064, 64, 5120, 27648, 40, 8),
    "30B-A3B": qwen(
        151936, 48, 2048, 6144, 32, 4, num_experts=128, experts_per_token=8, expert_dim=768
    ),
}
# Settings are those of the configs that AReaL (examples/configs, 0.2) and verl (fully_async_policy)
# published with their figures. Both have 512 prompts.
# AReaL's log of 7B has 7,800 tokens an answer, and 12 % of answers at its limit of 16k. These runs
# have the same model and a limit of 27k, so the same log-normal distribution is cut there.
AREAL = {
    "prompts": 512, "n": 16, "card": "h800", "limit": 27_648, "prompt": 108, "forwards": 1,
    "updates": 4, "logged": (7800, 16_384, 0.12),
}  # fmt: skip
# verl gives no mean, which is fitted too. Its steps are those of the first hundred. Later, answers
# grew in colocated runs (on 32 GPUs 1,067 s a step from 200 to 300), and not in the others.
VERL = {
    "prompts": 512, "n": 16, "card": "h20", "limit": 28_672, "cut": 0.002, "prompt": 150,
    "forwards": 1, "updates": 16, "tensor": 4,
}  # fmt: skip
# Half a batch more than one is under way, and no pass makes log-probabilities again.
STALE = {"eta": 1, "live": 768, "forwards": 0}
RUNS = {  # name → run, published seconds a step
    name: (base | {"model": model, "gpus": gpus, "own": own, **more}, seconds)
    for name, base, model, gpus, own, seconds, more in (
        ("AReaL 1.5B, 8", AREAL, "1.5B", 4, 4, 3461, {}),
        ("AReaL 1.5B, 32", AREAL, "1.5B", 16, 16, 997, {}),
        ("AReaL 1.5B, 128", AREAL, "1.5B", 64, 64, 391, {}),
        ("AReaL 7B, 32", AREAL, "7B", 16, 16, 2275, {}),
        ("AReaL 7B, 128", AREAL, "7B", 64, 64, 815, {}),
        ("AReaL 32B, 128", AREAL, "32B", 64, 64, 6707, {"n": 32, "tensor": 8, "slots": 128}),
        ("verl 7B, 32", VERL, "7B", 32, 0, 494.4, {}),
        ("verl 7B, 64", VERL, "7B", 64, 0, 373.2, {}),
        ("verl 7B, 128", VERL, "7B", 128, 0, 309.6, {}),
        ("verl 7B, 16 + 16", VERL, "7B", 16, 16, 286.8, STALE),
        ("verl 7B, 32 + 32", VERL, "7B", 32, 32, 178.2, STALE),
        ("verl 7B, 64 + 64", VERL, "7B", 64, 64, 115.8, STALE),
    )
}
# Seconds of an update, without other forward passes: model, GPU, GPUs, updates, tokens of each
# sequence (None: as verl's answers), seconds. prime-rl publishes tokens a second of its trainer,
# with two sequences a GPU. verl's are means of 400 steps, and here scaled like the steps.
UPDATES = {
    **{
        f"prime-rl {model} {kind}, {tokens}k": (
            model, card, gpus, 1, [tokens << 10] * (2 * gpus), (2 * gpus * tokens << 10) / speed
        )
        for model, kind, card, gpus, tokens, speed in (
            ("0.6B", "SFT", "h100", 1, 8, 26_000), ("0.6B", "SFT", "h100", 1, 16, 25_500),
            ("4B", "SFT", "h100", 8, 16, 49_700),
            ("0.6B", "RL", "h100", 1, 16, 11_900), ("0.6B", "RL", "h100", 1, 64, 10_200),
            ("4B", "RL", "h100", 8, 16, 26_000), ("4B", "RL", "h100", 8, 64, 29_000),
            ("30B-A3B", "RL", "h100", 8, 16, 6_100), ("30B-A3B", "RL", "h200", 8, 64, 12_800),
        )
    },
    **{
        f"verl 7B, update on {gpus}": ("7B", "h20", gpus, VERL["updates"], None, seconds)
        for gpus, seconds in (
            (32, 269.8 * 494.4 / 790.1), (64, 133.4 * 373.2 / 365.3), (128, 113.8 * 309.6 / 356.3)
        )
    },
}  # fmt: skip
FITTED = ("bandwidth", "step", "sequence", "mfu", "weights", "update")
# A step of prime-rl's RL ends with a publish, which SFT has not: seconds for each billion weights.
# Of each of FITTED, of verl's mean length, and of prime-rl's publish.
BOUNDS = (0.2, 1e-3, 1e-6, 0.2, 0.05, 0.1, 100, 0.1), (0.9, 1e-2, 1e-3, 0.7, 5, 3, 2000, 5)
PUBLISHED = {name: row[-1] for name, row in (RUNS | UPDATES).items()}
SCALED = 512  # trajectories that are simulated of a step, on as many fewer servers


def setup(run: dict, calibration: Calibration, mean: float) -> Setup:
    """Return a run's simulation, with servers and prompts made fewer by the same factor."""
    model, card = MODELS[run["model"]], CARDS[run["card"]]
    tensor, own = run.get("tensor", 1), run.get("own", 0)
    servers = run["gpus"] // tensor
    factor = next(
        f for f in (32, 16, 8, 4, 2, 1)
        if not servers % f and run["prompts"] * run["n"] // f >= SCALED
    )  # fmt: skip
    prompts = run["prompts"] // factor
    training = TrainerSpeed(
        model, card, own or run["gpus"], calibration, run["forwards"], run.get("recomputed", 1.0),
        run["updates"],
    )  # fmt: skip

    class Whole:  # the trainer sees all trajectories
        def seconds(self, lengths):
            return training.seconds(np.tile(lengths, factor))

        def publish_seconds(self, servers):
            return training.publish_seconds(servers * factor)

    if "logged" in run:
        lengths = cut_later(*run["logged"], run["limit"])
    else:
        lengths = Lengths.fit(mean, run["limit"], run["cut"])
    limits = Limits(prompts, run.get("eta", 0), run.get("live", 1 << 30) // factor)
    server = ServerSpeed(model, card, tensor, calibration, 0.8)
    return Setup(limits, run["n"], servers // factor, run.get("slots", 1024), server, Whole(),
                 lengths, run["prompt"], shared=not own)  # fmt: skip


@cache
def cut_later(mean: float, limit: int, cut: float, later: int) -> Lengths:
    """Return the log-normal of this mean and share at `limit` with the limit `later` instead."""
    known = np.log(Lengths.fit(mean, limit, cut).quantiles)
    shares = (np.arange(len(known)) + 0.5) / len(known)
    below = known < math.log(limit) - 1e-9
    normal = np.array([NormalDist().inv_cdf(share) for share in shares])
    sigma, center = np.polyfit(normal[below], known[below], 1)
    return Lengths.measured(np.minimum(np.exp(center + sigma * normal), later))


def predicted(run: dict, calibration: Calibration, verl_mean: float) -> float:
    """Return the seconds of a step."""
    return simulate(setup(run, calibration, verl_mean), 4 if run.get("eta") else 2).step_seconds


def update_seconds(row: tuple, calibration: Calibration, verl_mean: float) -> float:
    """Return the seconds of an update of `UPDATES`."""
    model, card, gpus, updates, lengths, _ = row
    lengths = lengths or [verl_mean + VERL["prompt"]] * (VERL["prompts"] * VERL["n"])
    training = TrainerSpeed(MODELS[model], CARDS[card], gpus, calibration, 0.0, 1.0, updates)
    return training.seconds(np.array(lengths))


def publish_seconds(name: str, row: tuple, each: float) -> float:
    """Return the seconds of the publish in a step of `UPDATES`, `each` for a billion weights."""
    return each * params.count(MODELS[row[0]]) / 1e9 if " RL" in name else 0.0


def errors(values: np.ndarray) -> dict[str, float]:
    """Return name → log of predicted over published."""
    calibration, mean, publish = of(values)
    found = {name: predicted(run, calibration, mean) for name, (run, _) in RUNS.items()}
    for name, row in UPDATES.items():
        found[name] = update_seconds(row, calibration, mean) + publish_seconds(name, row, publish)
    return {name: math.log(seconds / PUBLISHED[name]) for name, seconds in found.items()}


def of(values: np.ndarray) -> tuple[Calibration, float, float]:
    """Return the constants, verl's mean length and prime-rl's publish of the vector."""
    *constants, mean, publish = map(float, np.exp(values))
    return Calibration(**dict(zip(FITTED, constants, strict=True))), mean, publish


def fit(start: np.ndarray) -> np.ndarray:
    """Return the vector with the least squares of the errors, within `BOUNDS`."""
    found = least_squares(lambda values: [*errors(values).values()], start,
                          diff_step=0.05, max_nfev=20, bounds=np.log(BOUNDS))  # fmt: skip
    return found.x


def left_out(values: np.ndarray) -> np.ndarray:
    """Return each row's error by a fit without it, to first order: e / (1 − its leverage)."""
    small = 0.08  # finite differences larger than the steps that drawn lengths make
    moved = [
        [[*errors(values + s * axis).values()] for s in (small, -small)]
        for axis in np.eye(len(values))
    ]
    slopes = np.array([np.subtract(*pair) / (2 * small) for pair in moved]).T
    leverage = np.diag(slopes @ np.linalg.pinv(slopes))
    return np.array([*errors(values).values()]) / (1 - leverage)


def main() -> None:
    """Fit, find the errors of rows left out, and write calibration.json."""
    values = fit(np.log([0.5, 4e-3, 3e-5, 0.5, 0.5, 0.5, 500, 1.2]))
    calibration, mean, publish = of(values)
    print(calibration, f"verl's mean {mean:.0f}, prime-rl's publish {publish:.2f}", flush=True)
    rows, errors_without = {}, left_out(values)
    for (name, error), without in zip(errors(values).items(), errors_without, strict=True):
        published = PUBLISHED[name]
        rows[name] = {
            "published": published,
            "fitted": published * math.exp(error),
            "left_out": published * math.exp(without),
        }
        print(
            f"{name:>22}: fitted {math.exp(error) - 1:+.0%}, left out {math.exp(without) - 1:+.0%}"
        )
    typical = round(float(np.median(abs(errors_without))), 2)
    record = {
        "constants": {**dataclasses.asdict(calibration), "error": typical},
        "verl_mean_tokens": round(mean), "prime_rl_publish": round(publish, 2), "runs": rows,
    }  # fmt: skip
    (HERE / "calibration.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
