"""An engine, rlx and transformers beside each other: what `python -m rlx.compare` says."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from rlx.base import install
from rlx.fleet.requests import Sampling
from rlx.fleet.sample import Completion
from rlx.mismatch import measure
from rlx.mismatch.diagnose import Case, advice, diagnose
from rlx.mismatch.measure import Report, Sample, Scorer, Tolerance
from rlx.model import compile_cache, hf


def case_of(
    model_dir: Path,
    prompts: Sequence[np.ndarray],
    completions: Sequence[Completion],
    sampling: Sampling,
    tolerance: Tolerance,
    dtype: str,
) -> Case:
    """The engine's tokens and how rlx scores them, with weights and activations of `dtype`."""
    for name, value in compile_cache.options().items():
        jax.config.update(name, value)
    config, params = hf.load(model_dir, dtype)
    longest = max(len(p) + len(c.tokens) for p, c in zip(prompts, completions, strict=True))
    temperature = sampling.temperature or 1.0  # greedy tokens have untempered logprobs
    scorer = Scorer(config, temperature, measure.row_length(longest), dtype)
    samples = [Sample(p, c) for p, c in zip(prompts, completions, strict=True)]
    return Case(scorer, params, samples, tolerance, top_p=sampling.top_p, top_k=sampling.top_k)


def reports(case: Case, model_dir: Path) -> dict[str, Report]:
    """Pair → report; transformers is there when torch is installed."""
    ours, dtype = case.score(), case.scorer.compute_dtype
    found = {"engine – rlx": case.compare(ours)}
    if importlib.util.find_spec("torch"):
        theirs = measure.transformers_logprobs(
            model_dir, case.samples, case.scorer.temperature, dtype
        )
        ids = [sample.completion.tokens for sample in case.samples]
        found["engine – transformers"] = case.compare(theirs)
        found["rlx – transformers"] = measure.compare(ours, theirs, case.tolerance, tokens=ids)
    return found


def table(case: Case, found: dict[str, Report], dtype: str) -> str:
    """What to print: a line a pair, and the likely cause where the engine differs from rlx.

    Args:
      dtype: of the engine.
    """
    limits, tokens = case.tolerance, sum(len(s.completion.tokens) for s in case.samples)
    lines = [
        f"{len(case.samples)} completions, {tokens} tokens, temperature "
        f"{case.scorer.temperature:g}, engine {dtype}, rlx and transformers "
        f"{case.scorer.compute_dtype}; limits: mean {limits.mean:.2g}, max {limits.max:.2g}",
        f"{'pair':<24}{'mean |Δ|':>10}{'max |Δ|':>10}{'bad':>6}  first bad",
    ]
    for pair, report in found.items():
        place = report.first_bad
        where = place and (
            f"position {place.position} of completion {place.sample}, token {place.token}: "
            f"{place.first:.4f} against {place.second:.4f}"
        )
        numbers = f"{report.mean:>10.1e}{report.max:>10.1e}{report.bad:>6}"
        lines.append(f"{pair:<24}{numbers}  {where or '–'}")
    if "engine – transformers" not in found:
        lines.append(f"without transformers, for torch is not installed; {install('witnesses')}")
    if not found["engine – rlx"].ok:
        lines.append(advice(diagnose(case, found["engine – rlx"])))
    return "\n".join(lines)
