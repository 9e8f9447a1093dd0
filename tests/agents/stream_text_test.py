"""What a stream says is the beginning of what the whole text will be, whatever the pieces."""

from hypothesis import given
from hypothesis import strategies as st

from rlx.agents.stream_text import StreamText, cut


def decode(ids):
    return bytes(ids).decode("utf-8", "replace")


@given(st.text(alphabet="ENDżó🐢 x", max_size=30), st.lists(st.integers(1, 4), min_size=1))
def test_pieces_add_up_to_the_text_before_the_stop(text, sizes):
    stop = ("END", "DE🐢")
    ids, pieces = list(text.encode()), []
    found = [text.find(s) + len(s) for s in stop if s in text]
    whole, ended = cut(text[: min(found)] if found else text, stop)
    assert (ended in stop) == bool(found)
    ids = list((text[: min(found)] if found else text).encode())
    stream, k = StreamText(decode, stop), 0
    while ids:
        size = sizes[k % len(sizes)]
        pieces.append(stream.add(ids[:size]))
        assert whole.startswith("".join(pieces))
        ids, k = ids[size:], k + 1
    assert "".join(pieces) + stream.rest(whole) == whole


def test_what_might_be_a_mark_is_held_back_and_said_when_it_is_not():
    stream = StreamText(decode, marks=("<tool_call>",))
    assert stream.add(list(b"a <tool")) == "a "
    assert stream.add(list(b"box> b")) == "<toolbox> b"
    assert stream.add(list(b"<tool_call>{")) == ""
    assert stream.add(list(b"x}")) == ""


def test_half_a_character_waits_for_the_rest():
    stream = StreamText(decode)
    turtle = list("🐢!".encode())
    assert stream.add(turtle[:2]) == ""
    assert stream.add(turtle[2:]) == "🐢!"
