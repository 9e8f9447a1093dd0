"""Text and logprobs of a completion while it is sampled; sent text is final. Pure."""

import math
import re
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

Decode = Callable[[Sequence[int]], str]
_HALF = "\ufffd"  # decoders write it for an incomplete character
_KINDS = ("thinking", "text")


@dataclass(eq=False)
class StreamText:
    """Growing text of a completion; holds back what may begin a stop string, mark or tag."""

    decode: Decode
    stop: Sequence[str] = ()  # strings that end the text and are not part of it
    marks: Sequence[str] = ()  # strings that end the text, such as the start of a tool call
    # Splits a text into (thoughts, words); a longer text gives longer ones.
    thoughts: Callable[[str], tuple[str, str]] = lambda text: ("", text)
    tags: Sequence[str] = ()  # tags around thoughts

    def __post_init__(self) -> None:
        self._ends, self._ids = (*self.stop, *self.marks), list[int]()
        self._from = self._read = 0  # start of the decoded context, and its end
        self._text = ""
        self._safe = 0  # characters that no stop string or mark can include
        self._sent = [0, 0]  # characters of the thoughts, and of the words
        self.span = 0, 0  # (begin, end) in the text of the words that may be sent

    def add(self, ids: Sequence[int]) -> Iterator[tuple[str, str]]:
        """Add tokens; return the text that can be sent now, as `rest` does."""
        self._ids += ids
        # A token's text depends on the token before it (leading blanks), so both are decoded.
        before = self.decode(self._ids[self._from : self._read])
        now = self.decode(self._ids[self._from :])
        if len(now) > len(before) and not now.endswith(_HALF):
            self._text += now[len(before) :]
            self._from, self._read = self._read, len(self._ids)
        self._safe = max(self._safe, self._until())
        thoughts, words = self.thoughts(self._text[: self._safe])
        if self.tags and not (thoughts or words.strip()):
            words = ""  # a tag may come after the blanks, which are then no words
        self.span = self._safe - len(words), self._safe
        return self.rest(thoughts, words)

    def rest(self, thoughts: str, words: str) -> Iterator[tuple[str, str]]:
        """Yield ("thinking" or "text", unsent text) of those with unsent text."""
        for place, text in enumerate((thoughts, words)):
            start, self._sent[place] = self._sent[place], max(self._sent[place], len(text))
            if text[start:]:
                yield _KINDS[place], text[start:]

    def _until(self) -> int:
        until = len(self._text)
        for end in (*self._ends, *self.tags):
            at = self._text.find(end, max(0, self._safe - len(end)))
            if at >= 0:
                until = min(until, at) if end in self._ends else until
                continue
            lengths = range(len(end) - 1, -1, -1)
            length = next(n for n in lengths if self._text.endswith(end[:n]))
            until = min(until, len(self._text) - length)
        return until


@dataclass(eq=False)
class Logprobs:
    """Logprobs of a growing text's tokens, each with the bytes that it adds."""

    decode: Decode
    token_bytes: Callable[[int], bytes]  # returns a token's bytes, which may be part of a character
    most: int  # number of `top_logprobs`
    hidden: Set[int]  # tokens that are not in the text

    def __post_init__(self) -> None:
        self._ids = list[int]()
        self._from = self._read = self._sent = 0
        self._text, self._half = "", b""  # bytes of an incomplete character
        self._made: list[tuple[int, int, bytes, int, Any]] = []  # start, end, bytes, bytes before

    def add(self, chunk: Any) -> None:
        """Add the tokens of a Chunk or a Completion."""
        for k, (token, value) in enumerate(zip(chunk.tokens, chunk.logprobs, strict=True)):
            tops, token_id = slice(k * self.most, (k + 1) * self.most), int(token)
            likely = zip(chunk.top_tokens[tops], chunk.top_logprobs[tops], strict=True)
            likeliest = [_logprob_entry(self._next(int(t))[0], float(v)) for t, v in likely]
            new, text = self._next(token_id)
            if token_id in self.hidden:
                continue
            self._ids.append(token_id)
            if text == "":  # SentencePiece's first blank
                continue
            start, scores = len(self._text), (float(value), likeliest)
            self._made.append((start, start + len(text or "?"), new, len(self._half), scores))
            self._half = self._half + new if text is None else b""
            if text:
                self._text += text
                self._from, self._read = self._read, len(self._ids)

    def unsent(self, begin: int, end: int, last: bool = False) -> list[dict]:
        """Return the JSON of a span's unsent tokens; in the last span cut the token at its end."""
        tokens = []
        for start, until, new, before, (value, likeliest) in self._made[self._sent :]:
            if until > end and not last:
                break
            self._sent += 1
            low, high = max(start, begin), min(until, end)
            if (low, high) != (start, until):
                new = self._text[low:high].encode()[before if low == start else 0 :]
            if low < high and new:
                tokens.append({**_logprob_entry(new, value), "top_logprobs": likeliest})
        return tokens

    def _next(self, token: int) -> tuple[bytes, str | None]:
        """Return a next token's bytes, and its text or None if it ends within a character."""
        before = self.decode(self._ids[self._from : self._read])
        text = self.decode([*self._ids[self._from :], token])[len(before) :]
        raw = text.encode()
        if token in self.hidden or text.endswith(_HALF) or not raw.startswith(self._half):
            return self.token_bytes(token), None if text.endswith(_HALF) else text
        return raw[len(self._half) :], text


def _logprob_entry(token: bytes, logprob: float) -> dict[str, Any]:
    """Return a token and its logprob (nats); −inf becomes −9999, as in OpenAI's API."""
    finite = logprob if math.isfinite(logprob) else -9999.0
    return {"token": token.decode(errors="replace"), "logprob": finite, "bytes": list(token)}


def token_bytes(tokenizer: Any) -> Callable[[int], bytes]:
    """Return a function from a token to its bytes in the tokenizer's vocabulary."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in visible]
    table = {chr(b): b for b in visible} | {chr(256 + n): b for n, b in enumerate(others)}
    levels = "".join(tokenizer.tokenize("é")).endswith("Ã©")  # byte-level BPE, as GPT-2's

    def own(token: int) -> bytes:
        piece = str(tokenizer.convert_ids_to_tokens(token))
        if levels and all(letter in table for letter in piece):
            return bytes(table[letter] for letter in piece)
        if re.fullmatch("<0x[0-9A-F]{2}>", piece):  # SentencePiece's byte
            return bytes([int(piece[3:5], 16)])
        return piece.replace("▁", " ").encode()

    return own
