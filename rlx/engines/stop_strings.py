"""Detection of stop strings in the text of a completion, by decoding its last tokens."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

from rlx.base import UserError

Decode = Callable[[Sequence[int]], str]


def load_decode(model: Path) -> Decode:
    """Return a directory's function ids → text, special ones kept; UserError without tokenizer."""
    if (model / "tokenizer.json").exists():
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False)
    try:
        from transformers import AutoTokenizer

        slow = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise UserError(
            f"{model} has no tokenizer, which stop strings need; add tokenizer.json"
        ) from error
    # `decode` returns a list only for a batch
    return lambda ids: cast(str, slow.decode(list(ids), skip_special_tokens=False))


class StopStrings:
    """Stop strings of one completion; the first `minimum` tokens are not searched for them.

    `decode` gives the text of token ids; the strings of `stop` are not empty.
    """

    def __init__(self, decode: Decode, stop: Sequence[str], minimum: int = 0):
        self._decode, self._stop, self._minimum = decode, tuple(stop), minimum
        # A token is at least one byte, so a stop string spans at most its bytes in tokens. Add 8
        # for a divided character and a leading space.
        self._reach = max(len(text.encode()) for text in stop) + 8
        self._tail: list[int] = []
        self._seen = 0

    def __call__(self, new: list[int]) -> int | None:
        """Add new tokens; return how many of them to keep if the completion ends, else None."""
        ids, before, least = self._tail + new, len(self._tail), self._minimum - self._seen
        self._tail = ids[-self._reach :]
        self._seen += len(new)
        text = self._decode(ids)
        if any(stop in text for stop in self._stop):
            for count in range(max(1, least), len(new) + 1):
                longer, shorter = (self._decode(ids[: before + k]) for k in (count, count - 1))
                if cut(longer, self._stop, shorter)[1]:
                    return count
        return None


def cut(text: str, stop: Sequence[str], before: str) -> tuple[str, str]:
    """Return the text before a stop string completed by its last token, and that string, "": none.

    `before` is the text without the last token.
    """
    length = len(before.rstrip("\ufffd"))  # an incomplete character is decoded to several of these
    places = ((text.find(s, max(0, length + 1 - len(s))), s) for s in stop)
    at, match = min(((at, s) for at, s in places if at >= 0), default=(len(text), ""))
    return text[:at], match
