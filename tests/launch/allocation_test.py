"""Allocations are read, printed in one form, and placed on hosts."""

import re
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlx.base import UserError
from rlx.launch.allocation import Allocation, Part, parse, place, settings


@pytest.mark.parametrize(
    ("text", "gpus"),
    [
        ("vllm:d4t2+torch:d2f4t2", 24),
        ("jax:f4t2+vllm:d4t2", 16),
        ("vllm[gen]:d4|jax[train]:f4", 4),
        ("jax:d2+jax:f1", 3),  # the second is the trainer
        ("jax:f8t2c2e4", 32),
        ("vllm:d4+eval", 4),
    ],
)
def test_an_allocation_prints_as_it_was_written(text, gpus):
    found = parse(text)
    assert (str(found), found.gpus, found.shared) == (text, gpus, "|" in text)
    assert found.evaluates == text.endswith("eval")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("vllm:d4|jax:f2", "vllm:d4 has 4 GPUs and jax:f2 2; give both the same"),
        ("vllm:d1+jax:f2t2e4", "e4 of 'jax:f2t2e4' is inside f and does not divide it"),
        ("vllm:d1+jax:f1+jax:f1", "too many parts; keep one kind of server and one trainer"),
        ("vllm:d4 jax:f4", "cannot read the sizes 'd4 jax:f4' of 'vllm:d4 jax:f4'; give each of d"),
        ("vllm:d2t2p2", "'d2t2p2' of 'vllm:d2t2p2'; give each of d, t at most once"),
        ("vllm:d1+torch:f4e2", "give each of d, f, t, c at most once"),
        ("jax:d0", "with a number from 1"),
        ("vllm:d4d2", "at most once"),
        ("vllm:", "such as d4t2"),
        (
            "vlm:d4",
            "'vlm:d4' is not ENGINE:SIZES, such as vllm:d4t2; the engines are vllm, jax",
        ),
        ("sglang:d4+fsdp:d4", "`rlx areal` translates AReaL's"),
        ("vllm:d1|eval", "'eval' is not ENGINE:SIZES"),
        ("", "'' is not ENGINE:SIZES"),
    ],
)
def test_an_error_names_the_part_and_the_form_to_give(text, words):
    with pytest.raises(UserError, match=re.escape(words)):
        parse(text)


SIZES = st.integers(1, 9)


@st.composite
def allocations(draw) -> Allocation:
    """One with servers, a trainer, or both, apart or on the same GPUs."""
    tensor, context = draw(SIZES), draw(SIZES)
    trainer = {"f": draw(SIZES) * 2, "t": tensor, "c": context, "d": draw(SIZES)}
    trainer = {x: n for x, n in trainer.items() if n > 1}
    train = Part(draw(st.sampled_from(["jax", "torch"])), True, trainer, "train")
    engine = draw(st.sampled_from(["jax", "vllm"]))
    served = {x: n for x, n in {"d": draw(SIZES), "t": draw(SIZES)}.items() if n > 1}
    servers = Part(engine, False, served, "gen")
    one_each = Part(engine, False, {"d": train.gpus}, "gen")
    apart = [(servers, train), (servers,), (train,)]
    return draw(st.sampled_from([*map(Allocation, apart), Allocation((one_each, train), True)]))


@given(allocations())
def test_what_is_printed_is_read_back(made):
    assert parse(str(made)) == made


@given(st.text(alphabet="vlmjax:dtpcef0123+|()[]., ", max_size=30))
def test_no_text_is_more_than_a_one_line_error(text):
    with suppress(UserError):
        found = parse(text)
        assert parse(str(found)) == found


@given(allocations(), st.integers(1, 8), st.integers(1, 40))
def test_a_gpu_has_one_owner_and_a_tensor_group_is_on_one_host(made, each, count):
    hosts = {f"h{i}": range(each) for i in range(count)}
    if made.gpus > each * count:
        with pytest.raises(UserError, match="needs"):
            place(made, hosts)
        return
    try:
        placed = place(made, hosts)
    except UserError:  # enough in all, but not together
        assert max(part.each for part in made.parts) > 1
        return
    own = [gpu for part, gpus in placed if not (made.shared and part.trains) for gpu in gpus]
    assert len(own) == len(set(own)) == made.gpus
    for part, gpus in placed:
        where = [gpus[i : i + part.each] for i in range(0, len(gpus), part.each)]
        for group in where if part.each <= each else ():
            assert len({host for host, _ in group}) == 1
    assert not made.shared or set(placed[-1][1]) == set(own)


def test_too_few_gpus_is_an_error_with_the_arithmetic():
    with pytest.raises(UserError, match=r"needs 6 GPUs; jax:f4 takes 4 groups .* 2 of .* a: 4"):
        place(parse("vllm:d2+jax:f4"), {"a": range(4)})
    with pytest.raises(UserError, match=r"vllm:d2t3 takes 2 groups of 3 that share a host, and 1"):
        place(parse("vllm:d2t3"), {"a": range(4), "b": range(2)})


def test_what_shares_gpus_is_together_too():
    made = parse("jax[gen]:d6|jax[train]:f2t3")
    *_, (_, gpus) = place(made, {"a": range(4), "b": range(4)})
    assert gpus == (("a", 0), ("a", 1), ("a", 2), ("b", 0), ("b", 1), ("b", 2))
    with pytest.raises(UserError, match=r"needs 6 GPUs; .* groups of 3 .* and 1 of them fit"):
        place(made, {"a": range(2), "b": range(4)})


def test_it_decides_the_keys_of_a_run():
    assert settings(parse("vllm:d4+torch:f4t2")) == {
        "fleet.engine": "vllm", "fleet.num_servers": 4, "fleet.tensor_parallel": 1,
        "trainer": "torch", "train.mesh": "fsdp:4,tensor:2", "cluster.processes": 8,
    }  # fmt: skip
    assert settings(parse("jax:f1")) == {
        "fleet.num_servers": 0, "trainer": "jax", "train.mesh": "fsdp:1",
    }  # fmt: skip
    assert settings(parse("vllm:t2"))["fleet.tensor_parallel"] == 2
    assert settings(parse("jax:f8t2e4"))["train.mesh"] == "fsdp:2,expert:4,tensor:2"
