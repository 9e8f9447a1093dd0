"""Stop strings, however tokens and decode calls cut the text."""

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlx.base import UserError
from rlx.engines.model_engine import ModelEngine
from rlx.engines.stop_strings import StopStrings, load_decode
from rlx.fleet.requests import Request, Sampling


def decode(ids):
    """A token per byte."""
    return bytes(ids).decode("utf-8", "replace")


@given(
    text=st.text("ab", max_size=30),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    minimum=st.integers(0, 12),
    cuts=st.lists(st.integers(1, 5), min_size=40, max_size=40),
)
def test_ends_at_the_first_token_after_the_minimum_that_ends_one(text, stops, minimum, cuts):
    ends = [k for k in range(1, len(text) + 1) if any(text[:k].endswith(s) for s in stops)]
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


def test_a_character_that_ends_none_of_them_hides_no_stop_string():
    watch = StopStrings(decode, ["END"], minimum=4)
    assert watch(list("END é".encode())) is None
    assert watch(list(b"END")) == 3


def test_a_continued_completion_goes_on_where_it_was(tiny_model_dir):
    """Its first tokens, on another server: they count, and a stop string may begin in them."""
    engine = ModelEngine(str(tiny_model_dir), 1, 64, lambda: 0)
    text = load_decode(tiny_model_dir)
    stop = text([50, 51])
    assert stop.startswith(text([50]))

    async def watches(minimum, prefix):
        sampling = Sampling(max_new_tokens=9, min_new_tokens=minimum, stop=(stop,))
        request = Request("r", np.array([60, *prefix]), sampling, prefix_len=len(prefix))
        return await engine._stop_strings(request)

    fresh = asyncio.run(watches(3, [61, 50]))
    assert [fresh()([51, 51]), fresh()([51])] == [1, 1]
    assert asyncio.run(watches(4, [61, 50]))()([51]) is None
    assert asyncio.run(watches(0, [50, 51]))()([61]) is None
    assert asyncio.run(watches(0, []))()([50, 51]) == 2


def test_special_tokens_are_text(tiny_model_dir):
    text = load_decode(tiny_model_dir)
    assert text([2]) == "<|im_end|>"
    assert StopStrings(text, ["<|im_end|>"])([50, 2, 51]) == 2


def test_a_directory_without_tokenizer_is_named(tmp_path):
    with pytest.raises(UserError, match="no tokenizer"):
        load_decode(tmp_path)
