"""|Δ logprob| between an engine and the trainer on real text: its size, tail and divergence.

    python -m experiments.bench.mismatch --model=rlx:smollm2 --engine=vllm --dtype=bfloat16 \
        --text=gsm8k/test.jsonl --out=mismatch.jsonl
    python -m experiments.bench.mismatch …  --random     # the same shape with random weights

A server continues contexts cut from the text, sampled at temperature 1; both trainers, where torch
is installed, score the tokens in float32 and, for a bfloat16 engine, in bfloat16 too. One JSON line
a pair: mean, p99 and max of |Δ|, nats; `k1`, the mean of Δ = behaviour − trainer on tokens that the
engine sampled, and `k3`, of exp(−Δ) − 1 + Δ, which is never negative: both estimate KL(behaviour ‖
trainer); the largest importance weight exp(−Δ) and the smallest.
"""

import argparse
import importlib.util
import json
import tempfile
from contextlib import nullcontext
from pathlib import Path

import jax
import numpy as np

from rlx.fleet.requests import Sampling
from rlx.launch.local import servers_of
from rlx.mismatch import compare_table
from rlx.model import directory, hf
from rlx.model import params as parameters
from rlx.run.tokenizer_files import load_tokenizer

CONTEXTS = (32, 64, 96, 128, 160, 192, 224, 256, 500, 1000, 1500, 1936)  # tokens
SHORT = 256  # short contexts; others are long
NEW = 64


def contexts(text: Path, tokenizer) -> list[np.ndarray]:
    """Return the beginnings of a text of questions and answers, each from another row."""
    rows = [json.loads(line) for line in text.read_text().splitlines()]
    words = [f"{row['question']}\n{row['answer']}\n\n" for row in rows]
    found = []
    for i, length in enumerate(CONTEXTS):
        start = 20 * i
        ids = tokenizer("".join(words[start : start + 20]), add_special_tokens=False)["input_ids"]
        assert len(ids) >= length
        found.append(np.asarray(ids[:length], np.int32))
    return found


def random_weights(model_dir: Path, target: Path) -> Path:
    """Return the same shape and tokenizer with random weights."""
    config = hf.load_config(model_dir)
    hf.save(target, config, parameters.init(config, jax.random.key(0)), None, source=model_dir)
    return target


def statistics(behaviour: np.ndarray, trainer: np.ndarray) -> dict:
    """Return the statistics of a pair, from [N] float64 log-probabilities, nats."""
    delta = behaviour - trainer
    size, weight = np.abs(delta), np.exp(-delta)
    return {
        "tokens": len(delta),
        "mean": size.mean(),
        "p99": np.quantile(size, 0.99),
        "max": size.max(),
        "k1": delta.mean(),
        "k3": (weight - 1 + delta).mean(),
        "weight_low": weight.min(),
        "weight_high": weight.max(),
        "entropy": -behaviour.mean(),
    }


def is_short(sample) -> bool:
    return len(sample.prompt) <= SHORT


def torch_score(model_dir: Path, samples: list, dtype: str) -> list[np.ndarray]:
    """Return log-probabilities of each sample's new tokens by the PyTorch trainer."""
    import torch

    from rlx_torch import packed_model

    model, found = packed_model.load(model_dir, "cpu", dtype), []
    cast = nullcontext() if dtype == "float32" else torch.autocast("cpu", torch.bfloat16)
    for sample in samples:
        tokens = np.concatenate([sample.prompt, sample.completion.tokens]).astype(np.int32)
        arrays = {
            "tokens": tokens, "positions": np.arange(len(tokens), dtype=np.int32),
            "segment_ids": np.ones(len(tokens), np.int32),
            "loss_mask": np.arange(len(tokens)) >= len(sample.prompt),
        }  # fmt: skip
        row = packed_model.put({name: x[None] for name, x in arrays.items()}, "cpu")
        with torch.no_grad(), cast:
            scores, _ = packed_model.logprobs(model, row, temperature=1.0, chunk=256)
        found.append(scores[0, len(sample.prompt) :].numpy())
    return found


def jax_score(model_dir: Path, samples: list, sampling: Sampling, engine: str, dtype: str) -> list:
    """Return the same by the JAX trainer; short and long contexts use separate programs."""
    groups = [[s for s in samples if is_short(s) == short] for short in (True, False)]
    cases = (compare_table.case_of(model_dir, group, sampling, engine, dtype) for group in groups)
    return [scores for case in cases for scores in case.score()]  # order of the contexts


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--model", required=True)
    p.add_argument("--engine", choices=("jax", "vllm"), required=True)
    p.add_argument("--dtype", choices=("float32", "bfloat16"), required=True)
    p.add_argument("--text", type=Path, required=True)
    p.add_argument("--random", action="store_true")
    p.add_argument("--out", type=Path, required=True)
    a = p.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = directory.resolve(a.model)
        if a.random:
            model = random_weights(model, Path(scratch) / "random")
        prompts = contexts(a.text, load_tokenizer(model))
        sampling = Sampling(temperature=1.0, max_new_tokens=NEW, seed=0)
        with servers_of(
            [], model, workdir=scratch, engine=a.engine, dtype=a.dtype, slots=len(prompts),
            max_model_len=max(CONTEXTS) + NEW,
        ) as servers:  # fmt: skip
            samples = compare_table.ask(servers.fleet(), prompts, sampling)
        trainers = {"jax": lambda dtype: jax_score(model, samples, sampling, a.dtype, dtype)}
        if importlib.util.find_spec("torch"):
            trainers["torch"] = lambda dtype: torch_score(model, samples, dtype)
        for dtype in dict.fromkeys(("float32", a.dtype)):
            for trainer, score in trainers.items():
                pairs = list(zip(samples, score(dtype), strict=True))
                for positions, which in (
                    (f"to {SHORT + NEW}", [p for p in pairs if is_short(p[0])]),
                    ("564 to 2,000", [p for p in pairs if not is_short(p[0])]),
                    ("all", pairs),
                ):
                    behaviour = np.concatenate([s.completion.logprobs for s, _ in which])
                    found = statistics(
                        behaviour.astype(np.float64),
                        np.concatenate([t for _, t in which]).astype(np.float64),
                    )
                    row = {
                        "weights": "random" if a.random else "real", "engine": a.engine,
                        "engine_dtype": a.dtype, "trainer": trainer, "trainer_dtype": dtype,
                        "positions": positions,
                    }  # fmt: skip
                    row |= {key: float(f"{value:.4g}") for key, value in found.items()}
                    with a.out.open("a") as file:
                        file.write(json.dumps(row) + "\n")
                    print(row, flush=True)


if __name__ == "__main__":
    main()
