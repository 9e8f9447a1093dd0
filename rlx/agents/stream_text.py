"""Text of a completion while its tokens come; what is sent never has to be taken back. Pure."""

import re
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

Decode = Callable[[Sequence[int]], str]
_HALF = "\ufffd"  # what a decoder writes for a character that has not all its bytes yet
_KINDS = ("thinking", "text")


class StreamText:
    """The text of one completion that grows.

    Text that may be the beginning of a stop string, or of a mark that hides the rest, is held back
    until it is known not to be one.

    Args:
      decode: token ids to text.
      stop: strings that end the text, and are not in it.
      marks: from the first of these on, nothing is text.
      thoughts: a text, or its beginning, to (thoughts, words); a longer one to longer ones.
      tags: around thoughts, held back as the marks are until they are whole.

    Attributes:
      span: where in the text the words begin that could be sent, and end.
    """

    def __init__(
        self,
        decode: Decode,
        stop: Sequence[str] = (),
        marks: Sequence[str] = (),
        thoughts: Callable[[str], tuple[str, str]] = lambda text: ("", text),
        tags: Sequence[str] = (),
    ):
        self._decode, self._ends, self._tags = decode, (*stop, *marks), tags
        self._thoughts = thoughts
        self._ids: list[int] = []
        self._from = self._read = 0  # decoded together with, and decoded until
        self._text = ""
        self._safe = 0  # characters that no stop string or mark can reach any more
        self._said = [0, 0]
        self.span = 0, 0

    def add(self, ids: Sequence[int]) -> Iterator[tuple[str, str]]:
        """Take the next tokens; return what can be sent now, as `rest` does."""
        self._ids += ids
        # A token's text depends on the one before it (leading blanks), so both are decoded.
        before = self._decode(self._ids[self._from : self._read])
        now = self._decode(self._ids[self._from :])
        if len(now) > len(before) and not now.endswith(_HALF):
            self._text += now[len(before) :]
            self._from, self._read = self._read, len(self._ids)
        self._safe = max(self._safe, self._until())
        thoughts, words = self._thoughts(self._text[: self._safe])
        self.span = self._safe - len(words), self._safe
        return self.rest(thoughts, words)

    def rest(self, thoughts: str, words: str) -> Iterator[tuple[str, str]]:
        """Yield ("thinking" or "text", what of it has not been sent), neither empty."""
        for place, text in enumerate((thoughts, words)):
            said, self._said[place] = self._said[place], max(self._said[place], len(text))
            if text[said:]:
                yield _KINDS[place], text[said:]

    def _until(self) -> int:
        until = len(self._text)
        for end in (*self._ends, *self._tags):
            found = self._text.find(end, max(0, self._safe - len(end)))
            if found >= 0:
                until = min(until, found) if end in self._ends else until
                continue
            for length in range(min(len(end) - 1, len(self._text)), 0, -1):
                if self._text.endswith(end[:length]):
                    until = min(until, len(self._text) - length)
                    break
        return until


class Logprobs:
    """Logprobs of the tokens of a text that grows, each with the bytes that it adds to the text.

    Args:
      decode: token ids to text.
      own: a token to its bytes, of parts of characters too, which have no text.
      write: bytes and nats to JSON.
      most: how many of the likeliest tokens stand next to each.
      hidden: tokens that are not in the text.
    """

    def __init__(
        self, decode: Decode, own: Callable[[int], bytes], write: Callable[[bytes, float], Any],
        most: int, hidden: Set[int],
    ):  # fmt: skip
        self._decode, self._own, self._write, self._most = decode, own, write, most
        self._hidden, self._ids = hidden, list[int]()
        self._from = self._read = self._sent = 0
        self._text, self._half = "", b""  # and the bytes of a character that is not whole
        self._made: list[tuple[int, int, bytes, int, Any]] = []  # start, end, bytes, those before

    def add(self, drawn: Any) -> None:
        """Take a Chunk or a Completion."""
        for k, (token, value) in enumerate(zip(drawn.tokens, drawn.logprobs, strict=True)):
            tops, own = slice(k * self._most, (k + 1) * self._most), int(token)
            likely = zip(drawn.top_tokens[tops], drawn.top_logprobs[tops], strict=True)
            likeliest = [self._write(self._next(int(t))[0], float(v)) for t, v in likely]
            new, text = self._next(own)
            if own in self._hidden:
                continue
            self._ids.append(own)
            if text == "":  # SentencePiece's first blank
                continue
            start, written = len(self._text), (float(value), likeliest)
            self._made.append((start, start + len(text or "?"), new, len(self._half), written))
            self._half = self._half + new if text is None else b""
            if text:
                self._text += text
                self._from, self._read = self._read, len(self._ids)

    def sent(self, begin: int, end: int, last: bool = False) -> list[dict]:
        """Return the JSON of the next tokens that end in a part of the text.

        Args:
          last: there are no more; one that reaches beyond the part is cut.
        """
        found = []
        for start, until, new, before, (value, likeliest) in self._made[self._sent :]:
            if until > end and not last:
                break
            self._sent += 1
            low, high = max(start, begin), min(until, end)
            if (low, high) != (start, until):
                new = self._text[low:high].encode()[before if low == start else 0 :]
            if low < high and new:
                found.append({**self._write(new, value), "top_logprobs": likeliest})
        return found

    def _next(self, token: int) -> tuple[bytes, str | None]:
        """Return a next token's bytes and text; None: it ends within a character."""
        before = self._decode(self._ids[self._from : self._read])
        text = self._decode([*self._ids[self._from :], token])[len(before) :]
        whole = text.encode()
        if token in self._hidden or text.endswith(_HALF) or not whole.startswith(self._half):
            return self._own(token), None if text.endswith(_HALF) else text
        return whole[len(self._half) :], text


def token_bytes(tokenizer: Any) -> Callable[[int], bytes]:
    """Return a function from a token to its bytes, as the tokenizer's vocabulary writes them."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in visible]
    table = {chr(b): b for b in visible} | {chr(256 + n): b for n, b in enumerate(others)}
    levels = "".join(tokenizer.tokenize("é")).endswith("Ã©")  # GPT-2's letters for bytes

    def own(token: int) -> bytes:
        piece = str(tokenizer.convert_ids_to_tokens(token))
        if levels and all(letter in table for letter in piece):
            return bytes(table[letter] for letter in piece)
        if re.fullmatch("<0x[0-9A-F]{2}>", piece):  # SentencePiece's
            return bytes([int(piece[3:5], 16)])
        return piece.replace("▁", " ").encode()

    return own
