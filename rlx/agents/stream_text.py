"""Text of a completion while its tokens come; what is sent never has to be taken back. Pure."""

from collections.abc import Callable, Iterator, Sequence

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
        return self.rest(*self._thoughts(self._text[: self._safe]))

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
