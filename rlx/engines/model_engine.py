"""Base class of the engines: options, checks of requests against the model, state."""

import asyncio
import copy
from collections import deque
from collections.abc import Callable
from functools import partial

import numpy as np

from rlx.base import UserError
from rlx.cli.user_code import words
from rlx.engines.engine import EngineStopped
from rlx.engines.stop_strings import Decode, StopStrings, load_decode
from rlx.fleet.requests import EngineStatus, Request, Sampling, ScoreRequest
from rlx.model.directory import load_config, resolve

DEFAULT_MODEL_LEN = 4096  # tokens
MAX_SPANS = 100_000  # kept until the next status


class ModelEngine:
    """State common to the engines; UserError if an option is out of range or there is no model.

    `model_path` is an HF directory or hub name. Where `max_model_len` is 0, a sequence has at most
    DEFAULT_MODEL_LEN tokens, if the model's context is that long. `clock` returns ns, for spans.
    """

    def __init__(self, model_path: str, slots: int, max_model_len: int, clock: Callable[[], int]):
        if slots < 1:
            raise UserError(f"slots={slots} is below 1; set it to 1 or more")
        self.model_path = resolve(model_path, "--model")  # the local HF directory
        config = load_config(self.model_path)
        context = config.max_position
        self._max_model_len = max_model_len or min(context, DEFAULT_MODEL_LEN)
        if not 2 <= self._max_model_len <= context:
            raise UserError(
                f"max_model_len={self._max_model_len} is not in [2, {context}], the model's "
                "context; lower it or shorten prompts and completions"
            )
        self._config = config.within(self._max_model_len)
        self._clock = clock
        self._spans: deque[tuple[str, int, int]] = deque(maxlen=MAX_SPANS)
        self._failure: BaseException | None = None
        self._paused = False
        # Caches are kept by load: other weights may come under a version that was here before.
        self._version = self._loads = self._generated = 0
        self._decode_text: Decode | None = None

    async def add_image(self, name: str, data: bytes) -> None:
        """See Engine.add_image; the models of this engine take none."""
        raise ValueError("this server's engine takes no images; use fleet.engine=vllm")

    def _check_request(self, request: Request) -> None:
        if self._config.value_head:
            raise ValueError("a reward model generates nothing; give a language model's server")
        length, longest = request.prompt_tokens.size, self._max_model_len
        if request.sampling.guide and (least := request.sampling.min_new_tokens):
            raise ValueError(
                f"guide says when an answer ends, and min_new_tokens={least}; leave one out"
            )
        self._check_vocabulary(request.prompt_tokens)
        if length >= longest:
            raise ValueError(
                f"the prompt has {length} tokens and max_model_len={longest} leaves no room "
                "for a completion; shorten the prompt or raise fleet.max_model_len"
            )

    def _check_score(self, request: ScoreRequest) -> None:
        self._check_vocabulary(request.tokens)
        if request.tokens.size > self._max_model_len:
            raise ValueError(
                f"the sequence has {request.tokens.size} tokens, max_model_len="
                f"{self._max_model_len}; shorten it or raise fleet.max_model_len"
            )

    def _check_vocabulary(self, tokens: np.ndarray) -> None:
        size = self._config.vocab_size
        if tokens.min() < 0 or tokens.max() >= size:
            bad = tokens[(tokens < 0) | (tokens >= size)][0]
            raise ValueError(
                f"token {bad} is out of the vocabulary of {size}; use the model's own tokenizer"
            )

    def _stop_tokens(self, sampling: Sampling) -> tuple[int, ...]:
        return tuple(dict.fromkeys((*self._config.eos_token_ids, *sampling.stop_token_ids)))

    async def _stop_strings(self, request: Request) -> Callable[[], StopStrings] | None:
        """Return what makes StopStrings, None if none is needed; ValueError without a tokenizer."""
        sampling = request.sampling
        if not sampling.stop:
            return None
        if self._decode_text is None:
            try:
                self._decode_text = await asyncio.to_thread(load_decode, self.model_path)
            except UserError as error:
                raise ValueError(str(error)) from error
        watch = StopStrings(self._decode_text, sampling.stop, sampling.min_new_tokens)
        watch(request.prefix)
        return partial(copy.copy, watch)

    def _status(self, *, running: int, queued: int, slots: int) -> EngineStatus:
        self._check_alive()
        spans = []
        while self._spans:  # no `clear`: the engine's thread may append meanwhile
            spans.append(self._spans.popleft())
        return EngineStatus(
            self._version, running, queued, slots, self._max_model_len,
            tokens_generated=self._generated, paused=self._paused, spans=tuple(spans),
        )  # fmt: skip

    def _check_alive(self) -> None:
        if self._failure:
            raise self._stopped() from self._failure

    def _stopped(self) -> EngineStopped:
        reason = words(self._failure, 500) if self._failure else "it was closed"
        return EngineStopped(f"the engine has stopped: {reason}")
