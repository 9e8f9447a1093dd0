"""The table of `python -m rlx.compare`: an engine, rlx and transformers side by side."""

import asyncio
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from rlx.base import UserError, install
from rlx.fleet.client import Fleet
from rlx.fleet.requests import Sampling
from rlx.fleet.sample import Completion
from rlx.mismatch import measure
from rlx.mismatch.diagnose import MismatchCase, advice, diagnose
from rlx.mismatch.measure import Comparison, EngineSample, TrainerScorer
from rlx.model import compile_cache, hf
from rlx.model.directory import load_config

_OURS = "engine – rlx"


def ask(fleet: Fleet, prompts: Sequence[Any], sampling: Sampling) -> list[EngineSample]:
    """Return the first server's completion of each prompt; the fleet is closed afterwards."""

    async def probe() -> Sequence[Completion]:
        try:
            await fleet.connect()
            return next(iter((await fleet.probe(prompts, sampling)).values()))
        finally:
            await fleet.close()

    done = asyncio.run(probe())
    return [EngineSample(p, c) for p, c in zip(prompts, done, strict=True)]


def case_of(
    model_dir: Path, samples: Sequence[EngineSample], sampling: Sampling, engine_dtype: str,
    dtype: str, limits: tuple[float, float] = (0.0, 0.0),
) -> MismatchCase:  # fmt: skip
    """Return the samples with the trainer's scorer in `dtype`; limits of 0 follow the dtypes."""
    for name, value in compile_cache.options().items():
        jax.config.update(name, value)
    config, params = load_config(model_dir), dict[str, Any]()
    if not config.foreign:
        config, params = hf.load(model_dir, dtype)
    longest = max(len(s.prompt) + len(s.completion.tokens) for s in samples)
    temperature = sampling.temperature or 1.0  # greedy tokens have untempered logprobs
    config = config.within(max(len(s.prompt) for s in samples) + sampling.max_new_tokens)
    scorer = TrainerScorer(config, temperature, measure.row_length(longest), dtype)
    tolerance = measure.tolerance(engine_dtype == dtype == "float32", *limits)
    return MismatchCase(scorer, params, samples, tolerance, sampling.top_p, sampling.top_k)


def comparisons(
    case: MismatchCase, model_dir: Path, image: Callable[[str], bytes] | None = None
) -> dict[str, Comparison]:
    """Return pair → comparison: with rlx's decoder, and with transformers if torch is installed."""
    torch, foreign = importlib.util.find_spec("torch"), case.scorer.model.foreign
    if foreign and not torch:
        problem = f"rlx's decoder has no {model_dir}, and torch is not here"
        raise UserError(f"{problem}; {install('torch')}")
    ours = [] if foreign else case.score()
    pairs = {} if foreign else {_OURS: case.compare(ours)}
    if torch:
        settings = case.scorer.temperature, case.scorer.compute_dtype
        theirs = measure.transformers_logprobs(model_dir, case.samples, *settings, image)
        ids = [sample.completion.tokens for sample in case.samples]
        pairs["engine – transformers"] = case.compare(theirs)
        if not foreign:
            pairs["rlx – transformers"] = measure.compare(ours, theirs, case.tolerance, tokens=ids)
    return pairs


def table(case: MismatchCase, pairs: dict[str, Comparison], dtype: str) -> str:
    """Return one line a pair, and the likely cause where the engine (of `dtype`) differs."""
    limits, tokens = case.tolerance, sum(len(s.completion.tokens) for s in case.samples)
    lines = [
        f"{len(case.samples)} completions, {tokens} tokens, temperature "
        f"{case.scorer.temperature:g}, engine {dtype}, rlx and transformers "
        f"{case.scorer.compute_dtype}; limits: mean {limits.mean:.2g}, max {limits.max:.2g}",
        f"{'pair':<24}{'mean |Δ|':>10}{'max |Δ|':>10}{'bad':>6}  first bad",
    ]
    for pair, one in pairs.items():
        numbers = f"{one.mean:>10.1e}{one.max:>10.1e}{one.bad:>6}"
        lines.append(f"{pair:<24}{numbers}  {one.first_bad or '–'}")
    if "engine – transformers" not in pairs:
        lines.append(f"without transformers, for torch is not installed; {install('witnesses')}")
    if _OURS in pairs and not pairs[_OURS].ok:
        lines.append(advice(diagnose(case, pairs[_OURS])))
    return "\n".join(lines)
