"""Stop strings, however tokens and decode calls cut the text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlx.base import UserError
from rlx.engines.stop_strings import StopStrings, load_decode


def decode(ids):
    """A token per byte."""
    return bytes(ids).decode("utf-8", "replace")


@given(
    text=st.text("ab", max_size=30),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    minimum=st.integers(0, 12),
    cuts=st.lists(st.integers(1, 5), min_size=40, max_size=40),
)
def test_ends_at_the_first_token_whose_text_contains_one(text, stops, minimum, cuts):
    ends = [k for k in range(1, len(text) + 1) if any(s in text[:k] for s in stops)]
    wanted = next((k for k in ends if k >= minimum), None)
    watch, at = StopStrings(decode, stops, minimum), 0
    for size in cuts:
        kept = watch(list(text[at : at + size].encode()))
        if kept is not None:
            assert at + kept == wanted
            return
        at += size
    assert wanted is None


def test_a_character_of_several_tokens_is_found_when_it_is_whole():
    watch = StopStrings(decode, ["é!"])
    first, second = "é".encode()
    assert watch([first]) is None
    assert watch([second]) is None
    assert watch([ord("!"), ord("x")]) == 1


def test_what_came_before_a_continuation_counts():
    watch = StopStrings(decode, ["abc"])
    watch(list(b"ab"))
    assert watch(list(b"cd")) == 1


def test_special_tokens_are_text(tiny_model_dir):
    text = load_decode(tiny_model_dir)
    assert text([2]) == "<|im_end|>"
    assert StopStrings(text, ["<|im_end|>"])([50, 2, 51]) == 2


def test_a_directory_without_tokenizer_is_named(tmp_path):
    with pytest.raises(UserError, match="no tokenizer"):
        load_decode(tmp_path)
