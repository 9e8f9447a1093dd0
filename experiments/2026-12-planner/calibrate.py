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
# prime-rl's trainer: model, GPU, GPUs, tokens a GPU and update → share of the peak
UPDATES = {
    "prime-rl 4B, 16k": ("4B", "h100", 8, 32_768, 16_384, 0.139),
    "prime-rl 4B, 64k": ("4B", "h100", 8, 131_072, 65_536, 0.354),
    "prime-rl 0.6B, 16k": ("0.6B", "h100", 1, 32_768, 16_384, 0.111),
    "prime-rl 0.6B, 64k": ("0.6B", "h100", 1, 131_072, 65_536, 0.268),
}
# GPUs → seconds of the updates of verl's colocated runs, without other forward passes. Published
# are means of 400 steps; these are scaled like the steps.
VERL_UPDATES = {32: 269.8 * 494.4 / 790.1, 64: 133.4 * 373.2 / 365.3, 128: 113.8 * 309.6 / 356.3}
FITTED = ("bandwidth", "step", "sequence", "mfu", "half")
# Of each of FITTED, and of verl's mean length.
BOUNDS = (0.2, 1e-3, 1e-6, 0.2, 1e4, 100), (0.9, 1e-2, 1e-3, 0.6, 2e5, 2000)
PUBLISHED = (
    {name: seconds for name, (_, seconds) in RUNS.items()}
    | {name: row[-1] for name, row in UPDATES.items()}
    | {f"verl 7B, update on {gpus}": seconds for gpus, seconds in VERL_UPDATES.items()}
)
SCALED = 512  # trajectories that are simulated of a step, on as many fewer servers


def setup(run: dict, calibration: Calibration, verl_mean: float) -> Setup:
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
        model, card, own or run["gpus"], calibration, run["forwards"], 1.0, run["updates"]
    )

    class Whole:  # the trainer sees all trajectories
        def seconds(self, lengths):
            return training.seconds(np.tile(lengths, factor))

        def publish_seconds(self, servers):
            return training.publish_seconds(servers * factor)

    if "logged" in run:
        lengths = cut_later(*run["logged"], run["limit"])
    else:
        lengths = Lengths.fit(verl_mean, run["limit"], run["cut"])
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


def utilisation(row: tuple, calibration: Calibration) -> float:
    """Return the share of the peak of an update by the usual count, nothing computed again."""
    model, card, gpus, tokens, length, _ = row
    lengths = np.full(gpus * tokens // length, length)
    training = TrainerSpeed(MODELS[model], CARDS[card], gpus, calibration, 0.0, 1.0)
    plain = dataclasses.replace(training, recomputed=0.0)
    peak = dataclasses.replace(calibration, mfu=1.0, half=0.0, update=0.0)
    return dataclasses.replace(plain, calibration=peak).seconds(lengths) / training.seconds(lengths)


def errors(values: np.ndarray) -> dict[str, float]:
    """Return name → log of predicted over published."""
    calibration, mean = of(values)
    found = {
        name: math.log(predicted(run, calibration, mean) / seconds)
        for name, (run, seconds) in RUNS.items()
    }  # fmt: skip
    for name, row in UPDATES.items():
        found[name] = math.log(utilisation(row, calibration) / row[-1])
    lengths = np.full(8192, mean + VERL["prompt"])
    for gpus, seconds in VERL_UPDATES.items():
        training = TrainerSpeed(
            MODELS["7B"], CARDS["h20"], gpus, calibration, 0.0, 1.0, VERL["updates"]
        )
        found[f"verl 7B, update on {gpus}"] = math.log(training.seconds(lengths) / seconds)
    return found


def of(values: np.ndarray) -> tuple[Calibration, float]:
    """Return the constants, and verl's mean length, of the vector that is fitted."""
    *constants, mean = np.exp(values)
    return Calibration(**dict(zip(FITTED, map(float, constants), strict=True))), float(mean)


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
    values = fit(np.log([0.5, 4e-3, 3e-5, 0.5, 60_000, 700]))
    calibration, mean = of(values)
    print(calibration, "verl's mean", round(mean), flush=True)
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
        "verl_mean_tokens": round(mean), "runs": rows,
    }  # fmt: skip
    (HERE / "calibration.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
