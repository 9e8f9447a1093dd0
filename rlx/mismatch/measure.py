"""Compare the log-probabilities that engine and trainer give to the same tokens.

    engine's tokens and logprobs ─┐
                                  ├─▶ compare ─▶ Comparison ─ not ok ─▶ diagnose.py: why
    trainer's logprobs of them ───┘

Rows have one padded shape, so a run compiles one program. JAX is imported lazily.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlx.base import images_of, joined_masks
from rlx.fleet.requests import Chunk
from rlx.fleet.sample import Completion
from rlx.model import kept_tokens
from rlx.model.model_config import ModelConfig
from rlx.model.params import Params
from rlx.system import image_store

ROW_MULTIPLE = 64  # tokens


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The largest |Δ logprob| that counts as rounding, nats: of one token, and on average."""

    max: float
    mean: float


EXACT = Tolerance(max=1e-3, mean=1e-4)  # float32 on both sides; measured 1e-5 and 1e-6
# Measured means: bfloat16 on either side 0.024, a wrong temperature, head or RoPE base 0.1 to 0.6.
# A single improbable token of a healthy model differed by 3.2, from transformers by 3.0.
ROUNDED = Tolerance(max=5.0, mean=0.06)


def tolerance(exact: bool, max: float = 0.0, mean: float = 0.0) -> Tolerance:
    """Return EXACT or ROUNDED; `max` and `mean` above 0 replace its numbers."""
    default = EXACT if exact else ROUNDED
    return Tolerance(max or default.max, mean or default.mean)


@dataclass(frozen=True, slots=True)
class TokenPlace:
    """A compared token."""

    sample: int  # sample, position: index of the sample, and in its completion, from 0
    position: int
    token: int  # its id; −1: unknown
    first: float  # first, second: its log-probability on the two sides, nats
    second: float

    def __str__(self) -> str:
        sides = f"{self.first:.4g} against {self.second:.4g}"
        return f"position {self.position} of sample {self.sample} (token {self.token}: {sides})"


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of `compare`."""

    tokens: int  # compared
    bad: int  # those beyond `tolerance.max` or not finite
    non_finite: int
    mean: float  # mean, max: of |first − second| over finite tokens, nats; 0 when there are none
    max: float
    tolerance: Tolerance
    first_bad: TokenPlace | None  # the first above the limit of the mean, if only that is too high

    @property
    def ok(self) -> bool:
        """Whether the differences are rounding; False when nothing was compared."""
        return self.tokens > 0 and not self.bad and self.mean <= self.tolerance.mean

    def __str__(self) -> str:
        t, first = self.tolerance, f", first at {self.first_bad}" * bool(self.first_bad)
        return (
            f"|Δ logprob| mean {self.mean:.2g} (limit {t.mean:.2g}), max {self.max:.2g} (limit "
            f"{t.max:.2g}), {self.bad} of {self.tokens} tokens bad{first}"
        )


def compare(
    first: Sequence[np.ndarray],  # first, second: one [T] array a sample, nats
    second: Sequence[np.ndarray],
    tolerance: Tolerance = EXACT,
    *,
    tokens: Sequence[np.ndarray] | None = None,  # [T] ids a sample, to name the first bad one
    counted: Sequence[np.ndarray] | None = None,  # [T] bool a sample, which to compare; None: all
) -> Comparison:
    """Compare two scorings of completions by token, in float64; ValueError for unequal numbers."""
    lengths = [len(sample) for sample in first]
    if lengths != [len(sample) for sample in second]:
        raise ValueError("the two sides have different completions")
    a, b = _flat(first), _flat(second)
    use = np.ones(len(a), bool) if counted is None else _flat(counted).astype(bool)
    finite = np.isfinite(a) & np.isfinite(b)
    delta = np.abs(np.where(finite, a, 0.0) - np.where(finite, b, 0.0))
    bad = use & (~finite | (delta > tolerance.max))
    sizes = delta[use & finite]
    mean = float(sizes.mean()) if sizes.size else 0.0
    wrong = bad if bad.any() or mean <= tolerance.mean else use & (delta > tolerance.mean)
    place = None
    if wrong.any():
        k = int(wrong.argmax())
        sample = int(np.searchsorted(np.cumsum(lengths), k, side="right"))
        token = -1 if tokens is None else int(_flat(tokens)[k])
        place = TokenPlace(sample, k - sum(lengths[:sample]), token, float(a[k]), float(b[k]))
    return Comparison(
        tokens=int(use.sum()), bad=int(bad.sum()), non_finite=int((use & ~finite).sum()), mean=mean,
        max=float(sizes.max(initial=0.0)), tolerance=tolerance, first_bad=place,
    )  # fmt: skip


def _flat(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0), *(np.asarray(array, np.float64) for array in arrays)])


@dataclass(frozen=True, slots=True, eq=False)
class EngineSample:
    """A prompt, P ≥ 1 tokens, and an engine's completion of it."""

    prompt: Any  # [P] int32, or PromptTokens
    completion: Completion


@dataclass(frozen=True)
class TrainerScorer:
    """Settings for scoring tokens as the trainer does; hashable, for `jax.jit`."""

    model: ModelConfig
    temperature: float  # > 0, of the engine's sampling as configured
    row_length: int  # tokens of a padded row, at least the longest prompt and completion
    compute_dtype: str = "float32"  # compute_dtype, chunk: as of `decoder.logprobs`
    chunk: int = 0

    def logprobs(self, params: Params, samples: Sequence[EngineSample]) -> list[np.ndarray]:
        """Return each completion's log-probabilities, [T] float32, nats. Waits for the device."""
        from rlx.model import decoder

        scores = np.asarray(decoder.row_logprobs(params, self._rows(samples), self))
        pairs = zip(scores, samples, strict=True)
        return [row[len(s.prompt) :][: len(s.completion.tokens)] for row, s in pairs]

    def logits(self, params: Params, samples: Sequence[EngineSample]) -> np.ndarray:
        """Return the logits that all completion tokens were drawn from, [N, V] float32."""
        # All N × V are in memory at once, so it is for a few samples only.
        index = np.concatenate([
            i * self.row_length + len(s.prompt) - 1 + np.arange(len(s.completion.tokens))
            for i, s in enumerate(samples)
        ])  # fmt: skip
        from rlx.model import decoder

        logits = np.asarray(decoder.row_logits(params, self._rows(samples), index, self))
        masks = joined_masks([sample.completion for sample in samples])
        kept = kept_tokens.masks(**masks, vocab=self.model.vocab_size) if masks else True
        return np.where(kept, logits, -np.inf)

    def _rows(self, samples: Sequence[EngineSample]) -> dict[str, np.ndarray]:
        """Return one padded row a sample: the inputs of `decoder.logprobs`, [B, T] int32 each."""
        tokens = np.zeros((len(samples), self.row_length), np.int32)
        segments, parts = np.zeros_like(tokens), list[Any]()
        for i, sample in enumerate(samples):
            sequence = np.concatenate([sample.prompt, sample.completion.tokens])
            tokens[i, : len(sequence)], segments[i, : len(sequence)] = sequence, 1
            parts += [Chunk(i, sample.prompt), sample.completion]
        positions = np.arange(self.row_length, dtype=np.int32) * segments
        rows = {"tokens": tokens, "positions": positions, "segment_ids": segments}
        if masks := joined_masks(parts):
            index = np.where(segments > 0, np.cumsum(segments).reshape(segments.shape) - 1, 1 << 30)
            rows |= kept_tokens.batch_arrays(**masks, index_BT=index, vocab=self.model.vocab_size)
        return rows


def row_length(longest: int) -> int:
    """Return the padded length for `longest` tokens of prompt and completion."""
    return -(-longest // ROW_MULTIPLE) * ROW_MULTIPLE


def tempered(logits: np.ndarray, tokens: np.ndarray, temperature: float) -> np.ndarray:
    """Return log softmax(logits / temperature)[token]: [N, V], [N] → [N] float64."""
    z = logits.astype(np.float64) / temperature
    return _picked(z, tokens) - _log_sum(z)


def restricted(
    logits: np.ndarray, tokens: np.ndarray, temperature: float, top_p: float, top_k: int
) -> np.ndarray:
    """Return log-probabilities renormalised over the tokens that top-k, then top-p keep.

    Takes logits [N, V], tokens [N]; returns [N] float64, −inf for a token that is not kept.
    """
    z = logits.astype(np.float64) / temperature
    ranked = np.sort(z, axis=-1)[:, ::-1]
    if top_k:
        ranked = ranked[:, :top_k]
    chances = np.exp(ranked - _log_sum(ranked)[:, None])
    kept = np.where(np.cumsum(chances, axis=-1) - chances < top_p, ranked, -np.inf)
    lowest = np.min(np.where(np.isfinite(kept), kept, np.inf), axis=-1)
    picked = _picked(z, tokens)
    return np.where(picked >= lowest, picked - _log_sum(kept), -np.inf)


def transformers_logprobs(
    model_dir: Path,
    samples: Sequence[EngineSample],
    temperature: float,
    dtype: str,
    image: Callable[[str], bytes] | None = None,  # returns the file of a prompt's image by its name
) -> list[np.ndarray]:
    """Return transformers' scores on the CPU in `dtype` (float32 or bfloat16), [T] a sample."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.utils import logging

    logging.disable_progress_bar()
    kind: Any = getattr(torch, dtype)
    sees = any(images_of(sample.prompt) for sample in samples)
    family: Any = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    model = family.from_pretrained(model_dir, dtype=kind, trust_remote_code=False).eval()
    scores = []
    for sample in samples:
        tokens = np.concatenate([sample.prompt, sample.completion.tokens])
        with torch.inference_mode():
            ids = torch.from_numpy(tokens[None].astype(np.int64))
            pictures = [
                image_store.open_picture(image(n)) for n in images_of(sample.prompt) if image
            ]
            more = _image_inputs(model, model_dir, ids, pictures) if pictures else {}
            logits = model(ids, **more).logits
        drawn_from = logits[0, len(sample.prompt) - 1 : -1].float().numpy()
        scores.append(tempered(drawn_from, sample.completion.tokens, temperature))
    return scores


def _image_inputs(model: Any, model_dir: Path, ids: Any, pictures: list) -> dict[str, Any]:
    """Return further arguments of a model of transformers for the images among tokens [1, T]."""
    from transformers import AutoImageProcessor

    processor = AutoImageProcessor.from_pretrained(model_dir, trust_remote_code=False)
    inputs = processor(images=[pictures], return_tensors="pt")
    holders = (ids == model.config.image_token_id).int()
    every = {**inputs, "token_type_ids": holders, "mm_token_type_ids": holders}
    takes = inspect.signature(model.forward).parameters
    arguments = {name: x for name, x in every.items() if name in takes}
    return {k: x.to(model.dtype) if x.is_floating_point() else x for k, x in arguments.items()}


def _picked(z: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    return np.take_along_axis(z, tokens[:, None].astype(np.int64), axis=-1)[:, 0]


def _log_sum(z: np.ndarray) -> np.ndarray:
    highest = z.max(axis=-1)
    return highest + np.log(np.exp(z - highest[:, None]).sum(axis=-1))
