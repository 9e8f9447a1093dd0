"""What a stream says is the beginning of what the whole text will be, whatever the pieces."""

from hypothesis import given
from hypothesis import strategies as st

from rlx.agents.stream_text import StreamText
from rlx.agents.tool_calls import Reader
from rlx.engines.stop_strings import cut


def text(pieces):
    """The words among the pieces, which are all there is."""
    pieces = list(pieces)
    assert {kind for kind, _ in pieces} <= {"text"}
    return "".join(piece for _, piece in pieces)


def decode(ids):
    return bytes(ids).decode("utf-8", "replace")


@given(st.text(alphabet="ENDżó🐢 x", max_size=30), st.lists(st.integers(1, 4), min_size=1))
def test_pieces_add_up_to_the_text_before_the_stop(words, sizes):
    stop = ("END", "DE🐢")
    pieces = []
    found = [words.find(s) + len(s) for s in stop if s in words]
    words = words[: min(found)] if found else words
    whole, ended = cut(words, stop, words[:-1])
    assert (ended in stop) == bool(found)
    ids = list(words.encode())
    stream, k = StreamText(decode, stop), 0
    while ids:
        size = sizes[k % len(sizes)]
        pieces.append(text(stream.add(ids[:size])))
        assert whole.startswith("".join(pieces))
        ids, k = ids[size:], k + 1
    assert "".join(pieces) + text(stream.rest("", whole)) == whole


def test_what_might_be_a_mark_is_held_back_and_said_when_it_is_not():
    stream = StreamText(decode, marks=("<tool_call>",))
    assert text(stream.add(list(b"a <tool"))) == "a "
    assert text(stream.add(list(b"box> b"))) == "<toolbox> b"
    assert text(stream.add(list(b"<tool_call>{"))) == ""
    assert text(stream.add(list(b"x}"))) == ""


def test_half_a_character_waits_for_the_rest():
    stream = StreamText(decode)
    turtle = list("🐢!".encode())
    assert text(stream.add(turtle[:2])) == ""
    assert text(stream.add(turtle[2:])) == "🐢!"


@given(st.lists(st.integers(1, 9), min_size=1))
def test_thoughts_come_first_and_their_tags_never(sizes):
    reader = Reader("<think></think>")
    ids, k = list(b"<think>\nhm < 5</think>\n\nyes <b> no"), 0
    stream = StreamText(decode, thoughts=lambda t: reader.thoughts(t, False), tags=reader.tags)
    pieces = []
    while ids:
        size = sizes[k % len(sizes)]
        pieces += stream.add(ids[:size])
        ids, k = ids[size:], k + 1
    pieces += stream.rest("hm < 5", "yes <b> no")
    kinds = [kind for kind, _ in pieces]
    assert kinds == sorted(kinds, reverse=True)
    for kind, whole in (("thinking", "hm < 5"), ("text", "yes <b> no")):
        assert "".join(piece for own, piece in pieces if own == kind) == whole
