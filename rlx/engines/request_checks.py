"""What a request, and an engine's own context, must satisfy before it is taken. No JAX."""

import numpy as np

from rlx.base import UserError
from rlx.fleet.requests import Request, ScoreRequest

DEFAULT_MODEL_LEN = 4096  # tokens, where the model's context is longer and nothing was asked


def model_len(asked: int, context: int) -> int:
    """The tokens of prompt and completion that an engine serves: `asked`, or the default for 0.

    Args:
      context: of the model, tokens.

    Raises:
      UserError: there is not that much.
    """
    longest = asked or min(context, DEFAULT_MODEL_LEN)
    if not 2 <= longest <= context:
        raise UserError(
            f"max_model_len={longest} is not in [2, {context}], the model's "
            "context; lower it or shorten prompts and completions"
        )
    return longest


def check_request(request: Request, vocab_size: int, max_model_len: int) -> None:
    """Raises ValueError, with the remedy, for a request that cannot be served.

    Args:
      vocab_size: of the model; tokens are in [0, vocab_size).
      max_model_len: tokens of prompt and completion together.
    """
    prompt, sampling = request.prompt_tokens, request.sampling
    if prompt.ndim != 1 or not prompt.size:
        raise ValueError(f"prompt_tokens has shape {prompt.shape}; give at least one token")
    _check_vocabulary(prompt, vocab_size)
    if prompt.size >= max_model_len:
        raise ValueError(
            f"the prompt has {prompt.size} tokens and max_model_len={max_model_len} leaves no room "
            "for a completion; shorten the prompt or raise fleet.max_model_len"
        )
    if request.n < 1 or not 0 <= request.prefix_len < prompt.size:
        raise ValueError(
            f"n={request.n} and prefix_len={request.prefix_len} do not fit a prompt of "
            f"{prompt.size} tokens; n must be ≥ 1 and the prefix shorter than the prompt"
        )
    if not 0 <= sampling.temperature < float("inf") or not 0 < sampling.top_p <= 1:
        raise ValueError(
            f"temperature={sampling.temperature}, top_p={sampling.top_p}; wanted a finite number "
            "≥ 0, and one in (0, 1]"
        )
    if not 0 <= sampling.top_k < 1 << 31 or not 0 <= sampling.min_new_tokens < 1 << 31:
        raise ValueError(
            f"top_k={sampling.top_k} and min_new_tokens={sampling.min_new_tokens}; neither may be "
            "negative"
        )
    if "" in sampling.stop:
        raise ValueError("a stop string is empty; remove it")


def check_score(request: ScoreRequest, vocab_size: int, max_model_len: int) -> None:
    """As `check_request`, for a sequence to be scored; its other fields are checked on the wire."""
    _check_vocabulary(request.tokens, vocab_size)
    if request.tokens.size > max_model_len:
        raise ValueError(
            f"the sequence has {request.tokens.size} tokens, max_model_len={max_model_len}; "
            "shorten it or raise fleet.max_model_len"
        )


def _check_vocabulary(tokens: np.ndarray, vocab_size: int) -> None:
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        bad = tokens[(tokens < 0) | (tokens >= vocab_size)][0]
        raise ValueError(
            f"token {bad} is out of the vocabulary of {vocab_size}; use the model's own tokenizer"
        )
