"""Compile JSON Schemas into the tokens that may come next, by llguidance (extra `guidance`)."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlx.base import install
from rlx.model.model_config import ModelConfig

_FORM: Any = {"whitespace_flexible": False}  # as vLLM: small models would write nothing but blanks


class Guide:
    """A schema and the tokens of one answer so far."""

    def __init__(self, matcher: Any, vocab: int):
        self._matcher, self._vocab = matcher, vocab

    def begin(self, tokens: Sequence[int]) -> "Guide":
        """Return a guide of its own for an answer that begins with `tokens`."""
        guide = Guide(self._matcher.deep_copy(), self._vocab)
        guide.add(tokens)
        return guide

    def add(self, tokens: Sequence[int]) -> None:
        """Take the next tokens."""
        self._matcher.consume_tokens(list(tokens))

    def allowed(self) -> np.ndarray:
        """Return the tokens that may come next as bits, lowest first: [⌈V / 8⌉] uint8."""
        bits = np.zeros(-(-self._vocab // 32), np.int32)
        self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        return bits.view(np.uint8)[: -(-self._vocab // 8)]


def compiler(model: Path, config: ModelConfig) -> Callable[[str], Guide]:
    """Return what compiles schemas for a directory's tokenizer; both raise ValueError."""
    try:
        from llguidance import LLMatcher, LLTokenizer
    except ImportError:
        raise ValueError(f"guide needs the server's extra: {install('guidance')}") from None
    try:
        text, ends = (model / "tokenizer.json").read_text(), list(config.eos_token_ids)
        tokenizer = LLTokenizer(text, n_vocab=config.vocab_size, eos_token=ends)
    except (OSError, ValueError) as error:
        raise ValueError(f"guide needs tokenizer.json of {model}: {error}") from error

    def compiled(schema: str) -> Guide:
        try:
            grammar = LLMatcher.grammar_from_json_schema(schema, defaults=_FORM)
            failed, words = LLMatcher.validate_grammar_with_warnings(grammar, tokenizer)
        except ValueError as error:
            failed, words = True, [str(error)]
        if failed:
            raise ValueError(f"guide {schema:.200} has no answer: {words[0]}; correct the schema")
        return Guide(LLMatcher(tokenizer, grammar), config.vocab_size)

    return compiled
