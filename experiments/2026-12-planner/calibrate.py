"""Fit the planner's constants to published runs, and report the error on runs left out.

    python experiments/2026-12-planner/calibrate.py          # about five minutes on one core

Writes calibration.json: constants, and predicted beside published seconds, fitted and left out.
"""

import dataclasses
import json
import math
import statistics
from pathlib import Path

import numpy as np
from scipy.optimize import minimize

from rlx.base import UserError
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
# All have 512 prompts. AReaL's log of 7B says 7,900 tokens an answer, 12 % at the limit of 16k.
# Its guide says that generation and training have GPUs of their own, not how many: half is assumed.
# verl gives no mean, which is fitted too, by the seconds of its updates.
AREAL = {
    "prompts": 512,
    "n": 16,
    "card": "h800",
    "limit": 16384,
    "mean": 7800,
    "cut": 0.12,
    "prompt": 108,
    "forwards": 2,
}
VERL = {
    "prompts": 512,
    "n": 16,
    "card": "h20",
    "limit": 28672,
    "mean": 0,
    "cut": 0.002,
    "prompt": 150,
    "forwards": 1,
}
RUNS = {  # name → run, published seconds a step
    name: (base | {"model": model, "gpus": gpus, "own": own, "eta": eta, **more}, seconds)
    for name, base, model, gpus, own, eta, seconds, more in (
        ("AReaL 1.5B, 8", AREAL, "1.5B", 4, 4, 0, 3461, {}),
        ("AReaL 1.5B, 32", AREAL, "1.5B", 16, 16, 0, 997, {}),
        ("AReaL 1.5B, 128", AREAL, "1.5B", 64, 64, 0, 391, {}),
        ("AReaL 7B, 32", AREAL, "7B", 16, 16, 0, 2275, {}),
        ("AReaL 7B, 128", AREAL, "7B", 64, 64, 0, 815, {}),
        ("AReaL 32B, 128", AREAL, "32B", 64, 64, 0, 6707, {"n": 32, "tensor": 2}),
        ("verl 7B, 32", VERL, "7B", 32, 0, 0, 790.1, {}),
        ("verl 7B, 64", VERL, "7B", 64, 0, 0, 365.3, {}),
        ("verl 7B, 128", VERL, "7B", 128, 0, 0, 356.3, {}),
        ("verl 7B, 16 + 16", VERL, "7B", 16, 16, 1, 294.8, {}),
        ("verl 7B, 32 + 32", VERL, "7B", 32, 32, 1, 189.3, {}),
        ("verl 7B, 64 + 64", VERL, "7B", 64, 64, 1, 150.6, {}),
    )
}
# prime-rl's trainer: model, GPU, GPUs, tokens a GPU and update → share of the peak
UPDATES = {
    "prime-rl 4B, 16k": ("4B", "h100", 8, 32_768, 16_384, 0.139),
    "prime-rl 4B, 64k": ("4B", "h100", 8, 131_072, 65_536, 0.354),
    "prime-rl 0.6B, 16k": ("0.6B", "h100", 1, 32_768, 16_384, 0.111),
    "prime-rl 0.6B, 64k": ("0.6B", "h100", 1, 131_072, 65_536, 0.268),
}
# GPUs → seconds of the updates of verl's runs, without other forward passes
VERL_UPDATES = {32: 269.8, 64: 133.4, 128: 113.8}
FITTED = ("bandwidth", "step", "sequence", "mfu", "half")
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
    training = TrainerSpeed(model, card, (own or run["gpus"]), calibration, run["forwards"], 1.0)

    class Whole:  # the trainer sees all trajectories
        def seconds(self, lengths):
            return training.seconds(np.tile(lengths, factor))

        def publish_seconds(self, servers):
            return training.publish_seconds(servers * factor)

    lengths = Lengths.fit(run["mean"] or verl_mean, run["limit"], run["cut"])
    limits = Limits(prompts, run.get("eta", 0), 1 << 30)
    memory = 0.85 if own else 0.7
    server = ServerSpeed(model, card, tensor, calibration, memory)
    return Setup(limits, run["n"], servers // factor, 1024, server, Whole(), lengths,
                 run["prompt"], shared=not own)  # fmt: skip


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


def errors(values: np.ndarray, left_out: str = "") -> dict[str, float]:
    """Return name → log of predicted over published, without one of them."""
    calibration, mean = of(values)
    found = {
        name: math.log(predicted(run, calibration, mean) / seconds)
        for name, (run, seconds) in RUNS.items() if name != left_out
    }  # fmt: skip
    for name, row in UPDATES.items():
        if name != left_out:
            found[name] = math.log(utilisation(row, calibration) / row[-1])
    lengths = np.full(8192, mean + VERL["prompt"])
    for gpus, seconds in VERL_UPDATES.items():
        name = f"verl 7B, update on {gpus}"
        if name != left_out:
            training = TrainerSpeed(MODELS["7B"], CARDS["h20"], gpus, calibration, 0.0, 1.0)
            found[name] = math.log(training.seconds(lengths) / seconds)
    return found


def of(values: np.ndarray) -> tuple[Calibration, float]:
    """Return the constants, and verl's mean length, of the vector that is fitted."""
    *constants, mean = np.exp(values)
    return Calibration(**dict(zip(FITTED, map(float, constants), strict=True))), float(mean)


def fit(start: np.ndarray, left_out: str = "", steps: int = 60) -> np.ndarray:
    """Return the vector with the least squares of the errors, and weak priors."""

    def loss(values: np.ndarray) -> float:
        bandwidth, mfu = math.exp(values[0]), math.exp(values[3])
        wild = max(0.0, bandwidth - 0.9) + max(0.0, mfu - 0.6) + max(0.0, 0.2 - bandwidth)
        try:
            found = errors(values, left_out)
        except UserError:  # no lengths have this mean
            return 1e3
        return sum(e * e for e in found.values()) + 100 * wild

    found = minimize(loss, start, method="Nelder-Mead",
                     options={"maxfev": steps, "initial_simplex": simplex(start)})  # fmt: skip
    return found.x


def simplex(start: np.ndarray) -> np.ndarray:
    """Return the first points: each constant a third larger, in turn."""
    return np.vstack([start, start + 0.3 * np.eye(len(start))])


def main() -> None:
    """Fit, leave each run out once, and write calibration.json."""
    start = np.log([0.5, 4e-3, 1.8e-4, 0.5, 70_000, 900])
    values = fit(start, steps=140)
    calibration, mean = of(values)
    print(calibration, "verl's mean", round(mean), flush=True)
    found, rows = errors(values), {}
    for name, error in found.items():
        published = PUBLISHED[name]
        rows[name] = {"published": published, "fitted": published * math.exp(error)}
        print(f"{name:>20}: published {published:g}, fitted {rows[name]['fitted']:.4g}", flush=True)
    for name in found:
        without = fit(values, name, 24)
        error = errors(without)[name]
        rows[name]["left_out"] = rows[name]["published"] * math.exp(error)
        print(f"{name:>20}: left out {math.exp(error) - 1:+.0%}", flush=True)
    missed = [abs(math.log(r["left_out"] / r["published"])) for r in rows.values()]
    typical = round(statistics.median(missed), 2)
    record = {
        "constants": {**dataclasses.asdict(calibration), "error": typical},
        "verl_mean_tokens": round(mean), "runs": rows,
    }  # fmt: skip
    (HERE / "calibration.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
