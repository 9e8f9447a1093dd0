"""Detection of stop strings in the text of a completion. No JAX.

Engines work on tokens, so only requests with stop strings pay for decoding, and only of their tail.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

from rlx.base import UserError

Decode = Callable[[Sequence[int]], str]


def load_decode(model: Path) -> Decode:
    """Return the function token ids → text of an HF directory; special tokens are kept.

    Raises:
      UserError: the directory has no tokenizer.
    """
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
    # a list of texts only for a batch of sequences
    return lambda ids: cast(str, slow.decode(list(ids), skip_special_tokens=False))


class StopStrings:
    """Watcher of one completion.

    Args:
      decode: token ids → text.
      stop: the strings; none is empty.
      minimum: length in tokens before which the completion does not end; stop strings that end
        sooner are text like any other.
    """

    def __init__(self, decode: Decode, stop: Sequence[str], minimum: int = 0):
        self._decode, self._stop, self._minimum = decode, tuple(stop), minimum
        # A token is at least a byte of text, so no stop string reaches further back than its own
        # bytes; the rest is room for a character cut in two and for a leading space.
        self._reach = max(len(text.encode()) for text in stop) + 8
        self._tail: list[int] = []
        self._seen = 0

    def __call__(self, new: list[int]) -> int | None:
        """Take the next tokens; return how many to keep if the completion ends in them."""
        ids, before, least = self._tail + new, len(self._tail), self._minimum - self._seen
        self._tail = ids[-self._reach :]
        self._seen += len(new)
        text = self._decode(ids)
        if any(stop in text for stop in self._stop):
            for count in range(max(1, least), len(new) + 1):
                if self._ends(ids[: before + count]):
                    return count
        return None

    def _ends(self, ids: Sequence[int]) -> bool:
        return bool(cut(self._decode(ids), self._stop, self._decode(ids[:-1]))[1])


def cut(text: str, stop: Sequence[str], before: str) -> tuple[str, str]:
    """Return a text up to the stop string that its last token ended, and that; "" where none did.

    Args:
      before: the text without the last token.
    """
    known = len(before.rstrip("\ufffd"))  # half a character stands for as many as it has bytes
    places = ((text.find(s, max(0, known + 1 - len(s))), s) for s in stop)
    at, ended = min(((at, s) for at, s in places if at >= 0), default=(len(text), ""))
    return text[:at], ended
