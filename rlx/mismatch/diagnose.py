"""Diagnosis of a mismatch between engine and trainer: make each known mistake and see which fits.

    case ─▶ each cause's guesses: the same tokens, scored with a mistake ─▶ closest to the engine

To add a cause, write a function from a MismatchCase to its guesses and give it a row in CAUSES.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import ml_dtypes as ml_dtypes  # numpy knows the name bfloat16 by it
import numpy as np

from rlx.mismatch import measure
from rlx.mismatch.measure import Comparison, EngineSample, Tolerance, TrainerScorer, compare
from rlx.model.params import Params
from rlx.model.rope import Rope

CLEARLY = 4.0  # an inexact guess must be this many times closer to the engine than the trainer is
NOISE = 3.0  # largest ratio between a deviation and the rounding noise that explains it
ROPE_BASES = (10_000.0, 500_000.0, 1_000_000.0, 5_000_000.0)

Scores = list[np.ndarray]  # [T] a sample


@dataclass(frozen=True, eq=False)
class MismatchCase:
    """An engine's tokens and log-probabilities, and how the trainer scores the same tokens."""

    scorer: TrainerScorer  # scorer, params: the trainer's scorer and weights
    params: Params
    samples: Sequence[EngineSample]
    tolerance: Tolerance
    top_p: float = 1.0  # top_p, top_k: of the engine's sampling
    top_k: int = 0
    # Name → function that loads weights the engine may still have.
    earlier: Mapping[str, Callable[[], Params]] = field(default_factory=dict)
    version: int | None = None  # compare only tokens of this policy version; None: all

    def score(self, params: Params | None = None, **changes) -> Scores:
        """Return the samples' log-probabilities under other weights, or a scorer with `changes`."""
        scorer = replace(self.scorer, **changes)
        return scorer.logprobs(self.params if params is None else params, self.samples)

    def compare(self, scores: Scores) -> Comparison:
        """Compare the engine's log-probabilities with `scores`."""
        done = [sample.completion for sample in self.samples]
        logprobs, tokens = [each.logprobs for each in done], [each.tokens for each in done]
        return compare(logprobs, scores, self.tolerance, tokens=tokens, counted=self.counted)

    @property
    def counted(self) -> list[np.ndarray] | None:
        """Whether each token is compared, [T] bool a sample; None: all are."""
        if self.version is None:
            return None
        return [sample.completion.versions == self.version for sample in self.samples]

    @cached_property
    def tokens(self) -> np.ndarray:
        """The tokens of all completions, [N] int32."""
        return np.concatenate([sample.completion.tokens for sample in self.samples])

    @cached_property
    def logits(self) -> np.ndarray:
        """The trainer's logits at `tokens`, [N, V] float32."""
        return self.scorer.logits(self.params, self.samples)

    def split(self, flat: np.ndarray) -> Scores:
        """Split [N] numbers into [T] a sample."""
        ends = np.cumsum([len(sample.completion.tokens) for sample in self.samples])
        return np.split(flat, ends[:-1])


@dataclass(frozen=True, eq=False)
class Guess:
    """A possible mistake, the scores under it, and for rounding the change of the scores."""

    words: str
    scores: Scores
    noise: Scores | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """A guess that explains the deviation."""

    cause: str
    words: str
    remedy: str
    exact: bool  # the engine is within the tolerance of the guess, not only clearly closer to it
    report: Comparison  # the engine compared with the guess


def _temperature(case: MismatchCase) -> Iterator[Guess]:
    if (temperature := case.scorer.temperature) != 1:
        words = f"the engine's logprobs are at 1, the trainer's at {temperature:g}"
        yield Guess(words, case.split(measure.tempered(case.logits, case.tokens, 1.0)))


def _renormalised(case: MismatchCase) -> Iterator[Guess]:
    if case.top_p < 1 or case.top_k:
        sampling = case.scorer.temperature, case.top_p, case.top_k
        scores = measure.restricted(case.logits, case.tokens, *sampling)
        words = f"the engine's logprobs are those after top_p={case.top_p:g}, top_k={case.top_k}"
        yield Guess(words, case.split(scores))


def _rope(case: MismatchCase) -> Iterator[Guess]:
    model, rope = case.scorer.model, case.scorer.model.rope
    ropes = {f"base {base:g}": replace(rope, theta=base) for base in ROPE_BASES}
    ropes[f"no {rope.kind} scaling"] = Rope(theta=rope.theta)
    if rope.kind == "longrope":
        ropes["longrope's other factors"] = replace(rope, long=not rope.long)
    if local := model.local_rope:
        words = f"the engine has one RoPE, the trainer base {local.theta:g} in layers with a window"
        yield Guess(words, case.score(model=replace(model, local_rope=None)))
    for name, other in ropes.items():
        if other != rope:
            scores = case.score(model=replace(model, rope=other))
            yield Guess(f"the engine has {name}, the trainer {rope.theta:g} ({rope.kind})", scores)


def _head(case: MismatchCase) -> Iterator[Guess]:
    """Guess that the head is the token embedding, or that either comes from earlier weights."""
    from rlx.model import decoder

    new, model = case.params, case.scorer.model
    untied = replace(model, tie_embeddings=False)
    new_head = decoder.head(new, model)
    if not model.tie_embeddings:
        words = "the engine's head is its token embedding, though they are two matrices"
        yield Guess(words, case.score({**new, "lm_head": new["embed"]}, model=untied))
    for name, load in case.earlier.items():
        old = load()
        head = {**new, "lm_head": decoder.head(old, model)}
        yield Guess(f"the engine's head is still that of {name}", case.score(head, model=untied))
        embedding = {**new, "embed": old["embed"], "lm_head": new_head}
        words = f"the engine's token embedding is still that of {name}"
        yield Guess(words, case.score(embedding, model=untied))


def _stale(case: MismatchCase) -> Iterator[Guess]:
    for name, load in case.earlier.items():
        yield Guess(f"the engine still has {name}", case.score(load()))


def _dtype(case: MismatchCase) -> Iterator[Guess]:
    import jax

    trainer_scores, compute = case.score(), case.scorer.compute_dtype
    for dtype in ("bfloat16", "float16"):
        rounded = jax.tree.map(lambda leaf, dtype=dtype: leaf.astype(dtype), case.params)
        yield Guess(f"the engine's weights are rounded to {dtype}", case.score(rounded))
        if np.dtype(compute).itemsize > 2:  # with rounded logits, as in an engine
            scorer = replace(case.scorer, compute_dtype=dtype)
            logits = scorer.logits(rounded, case.samples).astype(np.dtype(dtype))
            scores = case.split(measure.tempered(logits, case.tokens, scorer.temperature))
            noise = [a - b for a, b in zip(scores, trainer_scores, strict=True)]
            yield Guess(f"the engine computes in {dtype}, the trainer in {compute}", scores, noise)


# cause → (its guesses, the remedy)
CAUSES: dict[str, tuple[Callable[[MismatchCase], Iterator[Guess]], str]] = {
    "temperature": (
        _temperature, "the engine must return log softmax(logits / sampling.temperature)"
    ),
    "top-p": (_renormalised, "the engine must return logprobs from before top-p and top-k"),
    "RoPE base": (_rope, "give servers and trainer the same config.json"),
    "tied embeddings": (_head, "an update does not reach the whole model: restart the servers"),
    "stale weights": (_stale, "an update did not reach the engine: restart the servers"),
    "dtype": (_dtype, "serve in model.publish_dtype, or raise gate.max_delta and gate.mean_delta"),
}  # fmt: skip


def diagnose(case: MismatchCase, observed: Comparison) -> list[Explanation]:
    """Return at most two causes that explain `observed`, best first."""
    pairs: list[tuple[int, Explanation]] = []
    for cause, (guesses, remedy) in CAUSES.items():
        for guess in guesses(case):
            report = case.compare(guess.scores)
            rank = _rank(case, guess, report, observed)
            if rank is not None:
                pairs.append((rank, Explanation(cause, guess.words, remedy, rank < 2, report)))
    pairs.sort(key=lambda pair: (pair[0], pair[1].report.mean))
    best = [finding for rank, finding in pairs if rank == pairs[0][0]]
    return [each for each in best if each.report.mean <= 2 * best[0].report.mean][:2]


def advice(explanations: Sequence[Explanation]) -> str:
    """Describe the likely cause and its remedy."""
    if not explanations:
        return "no known cause fits"
    kind = "likely cause" if explanations[0].exact else "closest cause, which does not explain all"
    causes = " or ".join(f"{each.cause}: {each.words}" for each in explanations)
    return f"{kind}: {causes}; {explanations[0].remedy}"


def _rank(case: MismatchCase, guess: Guess, report: Comparison, observed: Comparison) -> int | None:
    """Return 0: exact; 1: noise of the right size; 2: clearly closer; None: no explanation."""
    if report.ok:
        return 0
    if report.non_finite > observed.non_finite:  # tokens the mistake could not have drawn
        return None
    if guess.noise is not None and not observed.non_finite:
        nothing = [np.zeros(len(each)) for each in guess.noise]
        noise = compare(guess.noise, nothing, case.tolerance, counted=case.counted)
        ratio = observed.mean / noise.mean if noise.mean else 0.0
        if 1 / NOISE <= ratio <= NOISE and observed.max <= NOISE * noise.max:
            return 1
    return 2 if CLEARLY * report.mean <= observed.mean else None
