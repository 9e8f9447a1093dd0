"""What the decoder says of rows of tokens, as `measure.TrainerScorer` asks it; jitted."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlx.model import decoder
from rlx.model.params import Params


@partial(jax.jit, static_argnums=2)
def logprobs(params: Params, batch: Any, scorer: Any) -> jax.Array:
    """Return the log-probabilities of rows' tokens, [B, T] float32, by a TrainerScorer."""
    return decoder.logprobs(
        params, scorer.model, batch,
        temperature=scorer.temperature, compute_dtype=jnp.dtype(scorer.compute_dtype),
        chunk=scorer.chunk,
    )[0]  # fmt: skip


@partial(jax.jit, static_argnums=3)
def logits(params: Params, batch: Any, index: np.ndarray, scorer: Any) -> jax.Array:
    """Return the logits after the flat positions `index` of rows, [N, V] float32."""
    x = decoder.hidden(
        params, scorer.model, batch["tokens"], batch["positions"], batch["segment_ids"],
        compute_dtype=jnp.dtype(scorer.compute_dtype),
    )  # fmt: skip
    return decoder.unembed(params, scorer.model, x.reshape(-1, x.shape[-1])[index])
