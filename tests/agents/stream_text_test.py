"""What a stream says is the beginning of what the whole text will be, whatever the pieces."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rlx.agents.stream_text import Logprobs, StreamText, token_bytes
from rlx.agents.tool_calls import Reader
from rlx.engines.stop_strings import cut
from rlx.fleet.requests import Chunk


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


def byte_level():
    """Letters, and tokens that are parts of characters, several characters, or both."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    words = ["é😊漢", "a 漢", "! ", "漢 é"]
    trainer = trainers.BpeTrainer(vocab_size=275, initial_alphabet=alphabet, show_progress=False)
    core.train_from_iterator(words * 9, trainer)
    return core


def pieces():
    """SentencePiece's: blanks in front of words, bytes for what it does not know."""
    known = ["<unk>", *(f"<0x{b:02X}>" for b in range(256)), *"▁atrueTh!é", "▁true", "▁T", "h漢"]
    core = Tokenizer(models.BPE({c: i for i, c in enumerate(dict.fromkeys(known))}, [
        ("▁", "T")], unk_token="<unk>", byte_fallback=True))  # fmt: skip
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    core.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ])  # fmt: skip
    return core


def made(core):
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|end|>", clean_up_tokenization_spaces=False
    )


TOKENIZERS = {"bytes": made(byte_level()), "pieces": made(pieces())}


def logprobs(tokenizer, ids, most=0):
    hidden = {tokenizer.eos_token_id}
    decode = lambda ids: tokenizer.decode([i for i in ids if i not in hidden])  # noqa: E731
    return Logprobs(decode, token_bytes(tokenizer), most, hidden), decode(ids)


def drawn(ids, tops=()):
    return Chunk(0, ids, [-float(k) for k in range(len(ids))], [0] * len(ids), None, tops,
                 [0.0] * len(tops))  # fmt: skip


@pytest.mark.parametrize("name", TOKENIZERS)
@example(words="TTTTTTTTé😊", at=0, to=9, sizes=[1] * 60)
@given(words=st.text("é😊漢 aT!true", max_size=12), at=st.integers(0, 12), to=st.integers(0, 12),
       sizes=st.lists(st.integers(1, 4), min_size=60, max_size=60))  # fmt: skip
def test_the_bytes_of_tokens_joined_are_the_text(name, words, at, to, sizes):
    tokenizer = TOKENIZERS[name]
    ids = [*tokenizer(words)["input_ids"], tokenizer.eos_token_id]
    whole, text = logprobs(tokenizer, ids)
    whole.add(drawn(ids))
    at, to = sorted((min(at, len(text)), min(to, len(text))))
    every = whole.unsent(at, to, last=True)
    # A token that begins before a cut and ends behind it has bytes of a character that is cut off.
    assert b"".join(bytes(t["bytes"]) for t in every).decode(errors="ignore") == text[at:to]
    assert [t["logprob"] for t in every] == sorted((t["logprob"] for t in every), reverse=True)
    grown, _ = logprobs(tokenizer, ids)
    found, sent, places = [], 0, iter(sizes)
    while sent < len(ids):  # as it grows, in pieces of any size
        size = next(places)
        grown.add(drawn(ids[sent : sent + size]))
        sent += size
        reached = len(tokenizer.decode(ids[:sent]).rstrip("\ufffd"))
        if at < min(reached, to):
            found += grown.unsent(at, min(reached, to))
    found += grown.unsent(at, to, last=True)
    assert [t["bytes"] for t in found] == [t["bytes"] for t in every]


def test_a_token_has_its_own_bytes_where_no_text_is_whole():
    tokenizer = TOKENIZERS["bytes"]
    ids = tokenizer.convert_tokens_to_ids([*"aæ¼"])  # 漢 without its last byte
    whole, text = logprobs(tokenizer, ids)
    whole.add(drawn(ids))
    every = whole.unsent(0, len(text), last=True)
    assert [bytes(t["bytes"]) for t in every] == [b"a", b"\xe6", b"\xbc"]
    assert text == "a\ufffd"


def test_the_likeliest_tokens_have_their_bytes_in_the_same_place():
    for tokenizer in TOKENIZERS.values():
        ids = tokenizer("true 漢true")["input_ids"]
        others = [tokenizer.convert_tokens_to_ids("<|end|>"), ids[0]]
        whole, text = logprobs(tokenizer, ids, most=3)
        whole.add(drawn(ids, [t for own in ids for t in (own, *others)]))
        for one in whole.unsent(0, len(text), last=True):
            same, end, _ = one["top_logprobs"]
            assert same["bytes"] == one["bytes"]
            assert bytes(end["bytes"]) == b"<|end|>"


@given(st.text("\n ", max_size=3), st.lists(st.integers(1, 9), min_size=1))
def test_thoughts_come_first_and_their_tags_never(blanks, sizes):
    reader = Reader("<think></think>")
    ids, k = list(blanks.encode() + b"<think>\nhm < 5</think>\n\nyes <b> no"), 0
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
