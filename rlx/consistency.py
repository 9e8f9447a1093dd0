"""Do engine and trainer give the same tokens the same probabilities? If not, why?

engine's tokens and logprobs ─┐
                              ├─▶ compare ─▶ Report ─ not ok ─▶ diagnose: score again under each
trainer's logprobs of them ───┘              known mistake, and see which one explains it
"""

import dataclasses
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlx.base import UserError
from rlx.fleet.engine import Sampling
from rlx.fleet.sample import Completion
from rlx.model import decoder, hf
from rlx.model.config import ModelConfig, Rope
from rlx.model.params import Params

_EXPLAINS = 0.2  # share of the mean |Δ| that may remain under the mistake that explains it


@dataclass(frozen=True)
class Tolerance:
    """The largest |Δ logprob| taken for rounding, in nats: of one token, and on average."""

    max: float
    mean: float


EXACT = Tolerance(max=1e-3, mean=1e-4)  # float32 on both sides; measured 1e-5
ROUNDED = Tolerance(max=0.5, mean=0.06)  # bfloat16 on either; measured 0.10 and 0.024


@dataclass(frozen=True)
class Report:
    """What `compare` found.

    Attributes:
      tokens: compared. bad: of them, those beyond `tolerance.max` or not finite.
      mean, max: of |engine − trainer| over the finite ones, nats.
      first_bad: (sample, position in the completion, engine's logprob, trainer's logprob).
    """

    tokens: int
    bad: int
    mean: float
    max: float
    tolerance: Tolerance
    first_bad: tuple[int, int, float, float] | None

    @property
    def ok(self) -> bool:
        """Whether the differences are rounding."""
        return not self.bad and self.mean <= self.tolerance.mean

    def __str__(self) -> str:
        text = f"mean |Δ| {self.mean:.2g}, max {self.max:.2g} over {self.tokens} tokens"
        if self.first_bad:
            sample, position, engine, trainer = self.first_bad
            text += (
                f", first bad one at position {position} of sample {sample} "
                f"(engine {engine:.3f}, trainer {trainer:.3f})"
            )
        return text


def compare(
    engine: Sequence[np.ndarray], trainer: Sequence[np.ndarray], tolerance: Tolerance = EXACT
) -> Report:
    """Compares two scorings of the same completions, token by token, in float64.

    Args:
      engine, trainer: one [T] array a sample, nats.
    """
    bad, first, differences = 0, None, [np.zeros(0)]
    for sample, (ours, theirs) in enumerate(zip(engine, trainer, strict=True)):
        delta = np.abs(np.asarray(ours, np.float64) - np.asarray(theirs, np.float64))
        wrong = ~(delta <= tolerance.max)
        if wrong.any() and first is None:
            at = int(wrong.argmax())
            first = sample, at, float(ours[at]), float(theirs[at])
        bad += int(wrong.sum())
        differences.append(delta[np.isfinite(delta)])
    found = np.concatenate(differences)
    return Report(
        tokens=sum(len(each) for each in engine),
        bad=bad,
        mean=float(found.mean()) if len(found) else 0.0,
        max=float(found.max()) if len(found) else 0.0,
        tolerance=tolerance,
        first_bad=first,
    )


@dataclass(frozen=True, eq=False)
class Policy:
    """A way to score tokens: what the trainer does, or what an engine may do by mistake.

    Attributes:
      temperature: > 0. compute_dtype: of activations.
      top_p, top_k: not off: the logprob is renormalised over what they leave.
    """

    params: Params
    config: ModelConfig
    temperature: float = 1.0
    compute_dtype: Any = jnp.float32
    top_p: float = 1.0
    top_k: int = 0


@partial(jax.jit, static_argnames=("temperature", "config", "compute_dtype"))
def _score(params, tokens, positions, segments, *, temperature, config, compute_dtype):
    batch = {"tokens": tokens, "positions": positions, "segment_ids": segments}
    return decoder.logprobs(
        params, config, batch, temperature=temperature, compute_dtype=compute_dtype, chunk=256
    )[0]


@partial(jax.jit, static_argnames=("config", "compute_dtype"))
def _logits(params, tokens, positions, segments, *, config, compute_dtype):
    x = decoder.hidden(params, config, tokens, positions, segments, compute_dtype=compute_dtype)
    return decoder.unembed(params, config, x)


def score(
    policy: Policy, prompts: Sequence[np.ndarray], completions: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """The policy's logprobs of `completions`: one [T] float32 array each, nats.

    Args:
      prompts, completions: int32 token ids, one array a sample.
    """
    if not prompts:
        return []
    wanted = max(len(p) + len(c) for p, c in zip(prompts, completions, strict=True))
    width = -(-wanted // 64) * 64
    tokens = np.zeros((len(prompts), width), np.int32)
    segments = np.zeros((len(prompts), width), np.int32)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        whole = np.concatenate([prompt, completion])
        tokens[row, : len(whole)], segments[row, : len(whole)] = whole, 1
    positions = np.broadcast_to(np.arange(width, dtype=np.int32), tokens.shape)
    arguments = (policy.params, tokens, positions, segments)
    options = {"config": policy.config, "compute_dtype": policy.compute_dtype}
    if policy.top_p < 1 or policy.top_k:
        scores = _restricted(np.asarray(_logits(*arguments, **options), np.float64), tokens, policy)
    else:
        scores = np.asarray(_score(*arguments, temperature=policy.temperature, **options))
    return [
        scores[row, len(prompt) : len(prompt) + len(completion)]
        for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
    ]


def _restricted(logits: np.ndarray, tokens: np.ndarray, policy: Policy) -> np.ndarray:
    """Logprobs renormalised over what top-k and top-p leave; −inf for what they do not."""
    logits = logits[:, :-1] / policy.temperature
    chances = np.exp(logits - logits.max(-1, keepdims=True))
    chances /= chances.sum(-1, keepdims=True)
    order = np.argsort(-chances, axis=-1)
    ranked = np.take_along_axis(chances, order, -1)
    kept = np.cumsum(ranked, -1) - ranked < policy.top_p
    if policy.top_k:
        kept &= np.arange(chances.shape[-1]) < policy.top_k
    mass = (ranked * kept).sum(-1)
    rank = (order == tokens[:, 1:, None]).argmax(-1)[..., None]
    chance = np.take_along_axis(ranked * kept, rank, -1)[..., 0]
    with np.errstate(divide="ignore"):
        scores = np.log(chance / mass)
    return np.pad(scores, ((0, 0), (1, 0)))


@dataclass(frozen=True, eq=False)
class Case:
    """What a diagnosis may know: the trainer's policy, the sampling, and earlier weights.

    Attributes:
      earlier: gives weights that an engine may still have, e.g. those the run began with.
    """

    policy: Policy
    sampling: Sampling
    earlier: Callable[[], Params] | None = None


def _temperature(case: Case) -> list[Policy]:
    if case.policy.temperature == 1.0:
        return []
    return [dataclasses.replace(case.policy, temperature=1.0)]


def _rope(case: Case) -> list[Policy]:
    own = case.policy.config.rope
    ropes = [Rope(theta=theta) for theta in (1e4, 5e5, 1e6, own.theta)]
    ropes += [dataclasses.replace(own, theta=theta) for theta in (1e4, 5e5, 1e6)]
    configs = [dataclasses.replace(case.policy.config, rope=r) for r in ropes if r != own]
    return [dataclasses.replace(case.policy, config=config) for config in configs]


def _head(case: Case) -> list[Policy]:
    """The new body under a head that was not updated, or under the wrong one of two."""
    params, config = case.policy.params, case.policy.config
    untied = dataclasses.replace(config, tie_embeddings=False)
    heads = [] if config.tie_embeddings else [params["embed"]]
    if case.earlier is not None:
        heads.append(decoder.head(case.earlier(), config))
    return [
        dataclasses.replace(case.policy, config=untied, params={**params, "lm_head": head})
        for head in heads
    ]


def _dtype(case: Case) -> list[Policy]:
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), case.policy.params)
    return [
        dataclasses.replace(case.policy, params=rounded, compute_dtype=dtype)
        for dtype in (jnp.float32, jnp.bfloat16)
    ]


def _stale(case: Case) -> list[Policy]:
    if case.earlier is None:
        return []
    return [dataclasses.replace(case.policy, params=case.earlier())]


def _top_p(case: Case) -> list[Policy]:
    top_p, top_k = case.sampling.top_p, case.sampling.top_k
    if top_p == 1.0 and not top_k:
        return []
    return [dataclasses.replace(case.policy, top_p=top_p, top_k=top_k)]


CAUSES: Mapping[str, Callable[[Case], list[Policy]]] = {
    "temperature: the engine's logprobs are those of the untempered distribution": _temperature,
    "top-p or top-k: the engine's logprobs are renormalised over what they leave": _top_p,
    "stale weights: the engine serves earlier ones than it says": _stale,
    "tied embeddings: the engine's output head is not the trainer's": _head,
    "RoPE: the engine uses another base or scaling": _rope,
    "dtype: the engine rounds to bfloat16": _dtype,
}


def diagnose(case: Case, prompts: Sequence[np.ndarray], completions: Sequence[Completion]) -> str:
    """The known mistake under which the trainer would have given the engine's logprobs."""
    tokens = [completion.tokens for completion in completions]
    engine = [completion.logprobs for completion in completions]
    before = compare(engine, score(case.policy, prompts, tokens)).mean
    best, cause = before, ""
    for name, policies in CAUSES.items():
        for policy in policies(case):
            report = compare(engine, score(policy, prompts, tokens))
            # A token that the mistake could not have drawn is not explained by it.
            if np.isfinite(report.mean) and report.mean < best and _all_finite(report):
                best, cause = report.mean, name
    if best <= max(_EXPLAINS * before, EXACT.mean):
        return f"{cause} (with it, mean |Δ| is {best:.2g})"
    return "no known cause fits"


def _all_finite(report: Report) -> bool:
    return report.first_bad is None or np.isfinite(report.first_bad[3])


def check(
    case: Case,
    prompts: Sequence[np.ndarray],
    answers: Mapping[str, Sequence[Completion]],
    tolerance: Tolerance,
    version: int | None = None,
) -> dict[str, Report]:
    """Compares every server's completions of `prompts` with the trainer's scores of them.

    Args:
      answers: address → one completion a prompt.
      version: what every token must be stamped with; None: anything.

    Returns:
      address → its report, all of them ok.

    Raises:
      UserError: one is not, or a token carries another version; says where, how much, and why.
    """
    reports = {}
    for address, completions in answers.items():
        stamps = {int(v) for completion in completions for v in completion.versions}
        if version is not None and stamps - {version}:
            raise UserError(
                f"{address} answers with version {min(stamps)} … {max(stamps)} where {version} was "
                "published; is another trainer using this server?"
            )
        trainer = score(case.policy, prompts, [completion.tokens for completion in completions])
        report = compare([completion.logprobs for completion in completions], trainer, tolerance)
        if not report.ok:
            raise UserError(
                f"engine and trainer disagree on {address}: {report}; likely cause: "
                f"{diagnose(case, prompts, completions)}; gate.enabled=False goes on regardless"
            )
        reports[address] = report
    return reports


def table(
    model_dir: Path,
    dtype: str,
    prompts: Sequence[np.ndarray],
    completions: Sequence[Completion],
    sampling: Sampling,
    tolerance: Tolerance,
) -> tuple[str, bool]:
    """An engine's logprobs against rlx's decoder and, with torch installed, against transformers.

    Args:
      dtype: float32 | bfloat16, of weights and activations on every side.

    Returns:
      What to print, and whether every pair agrees.
    """
    config, params = hf.load(model_dir, dtype)
    temperature = sampling.temperature or 1.0  # greedy tokens have untempered logprobs
    case = Case(Policy(params, config, temperature, jnp.dtype(dtype)), sampling)
    tokens = [completion.tokens for completion in completions]
    ours = score(case.policy, prompts, tokens)
    engine = [completion.logprobs for completion in completions]
    pairs = {"engine – rlx": compare(engine, ours, tolerance)}
    if importlib.util.find_spec("torch"):
        theirs = _transformers(model_dir, dtype, prompts, tokens, temperature)
        pairs["engine – transformers"] = compare(engine, theirs, tolerance)
        pairs["rlx – transformers"] = compare(ours, theirs, tolerance)
    lines = [f"{len(engine)} completions, {dtype}, temperature {sampling.temperature:g}"]
    lines += [
        f"{'ok ' if report.ok else 'BAD'}  {name:<22} {report}" for name, report in pairs.items()
    ]
    if not pairs["engine – rlx"].ok:
        lines.append(f"likely cause: {diagnose(case, prompts, completions)}")
    return "\n".join(lines), all(report.ok for report in pairs.values())


def _transformers(
    model_dir: Path,
    dtype: str,
    prompts: Sequence[np.ndarray],
    tokens: Sequence[np.ndarray],
    temperature: float,
) -> list[np.ndarray]:
    import torch

    from rlx_torch import model as reference

    model = reference.load(model_dir, getattr(torch, dtype))
    scores = []
    for prompt, completion in zip(prompts, tokens, strict=True):
        whole = torch.from_numpy(np.concatenate([prompt, completion]).astype(np.int64))[None]
        batch = {
            "tokens": whole,
            "positions": torch.arange(whole.shape[1])[None],
            "segment_ids": torch.ones_like(whole),
        }
        with torch.inference_mode():
            found, _ = reference.logprobs(model, batch, temperature=temperature)
        scores.append(found[0, len(prompt) :].numpy())
    return scores
