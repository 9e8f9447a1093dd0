"""Text of a completion while its tokens come; what is sent never has to be taken back. Pure."""

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
_HALF = "\ufffd"  # what a decoder writes for a character that has not all its bytes yet


class StreamText:
    """The text of one completion that grows.

    Text that may be the beginning of a stop string, or of a mark that hides the rest, is held back
    until it is known not to be one.

    Args:
      decode: token ids to text.
      stop: strings that end the text, and are not in it.
      marks: from the first of these on, nothing is text.
    """

    def __init__(self, decode: Decode, stop: Sequence[str] = (), marks: Sequence[str] = ()):
        self._decode, self._ends = decode, (*stop, *marks)
        self._ids: list[int] = []
        self._from = self._read = 0  # decoded together with, and decoded until
        self._text = ""
        self._said = 0

    def add(self, ids: Sequence[int]) -> str:
        """Take the next tokens; return the text that can be sent now."""
        self._ids += ids
        # A token's text depends on the one before it (leading blanks), so both are decoded.
        before = self._decode(self._ids[self._from : self._read])
        now = self._decode(self._ids[self._from :])
        if len(now) > len(before) and not now.endswith(_HALF):
            self._text += now[len(before) :]
            self._from, self._read = self._read, len(self._ids)
        return self._say(self._safe())

    def rest(self, whole: str) -> str:
        """Return the part of `whole`, the finished text, that has not been sent."""
        said, self._said = self._said, len(whole)
        return whole[said:]

    def _say(self, until: int) -> str:
        said, self._said = self._said, max(self._said, until)
        return self._text[said : self._said]

    def _safe(self) -> int:
        """Return how many characters of the text no stop string or mark can reach any more."""
        until = len(self._text)
        for end in self._ends:
            found = self._text.find(end, max(0, self._said - len(end)))
            if found >= 0:
                until = min(until, found)
                continue
            for length in range(min(len(end) - 1, len(self._text)), 0, -1):
                if self._text.endswith(end[:length]):
                    until = min(until, len(self._text) - length)
                    break
        return until


def cut(text: str, stop: Sequence[str]) -> tuple[str, str]:
    """Return `text` up to the first stop string in it, and that string, "" where there is none."""
    at, ended = min(((at, s) for s in stop if (at := text.find(s)) >= 0), default=(len(text), ""))
    return text[:at], ended
