"""Allocations are read as AReaL reads them, printed in one form, and dealt to hosts."""

import re
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlx.base import UserError
from rlx.launch.allocation import Allocation, Part, parse, place, settings

# text, printed form, GPUs
READ = [
    ("sglang:d12p1t1", "vllm:d12", 12),
    ("sglang:d96p1t1", "vllm:d96", 96),
    ("sglang:d4+archon:d4", "vllm:d4+jax:f4", 8),
    ("vllm:d4p1t1", "vllm:d4", 4),
    ("sglang:t2", "vllm:d1t2", 2),
    ("sglang:d4t2+fsdp:d8", "vllm:d4t2+jax:f8", 16),
    ("sglang:d4p1t1 + fsdp:d4p1t1", "vllm:d4+jax:f4", 8),
    ("vllm:d2t4+megatron:d2p2t4", "vllm:d2t4+jax:f4t4", 24),
    ("vllm:d2t4+megatron:d2p2t4e4", "vllm:d2t4+jax:f4t4e4", 24),
    ("fsdp:d8", "jax:f8", 8),
    ("fsdp:d4t2c2", "jax:f4t2c2", 16),
    ("archon:d2c2t2p2e2", "jax:f4t2c2e2", 16),
    ("megatron:(attn:d4p2t2c2|ffn:d2p2t4e2)", "jax:f8t2c2e2", 32),
    ("megatron:attn:d1p12t4|ffn:d1p12e4", "jax:f12t4e4", 48),
    ("megatron:(attn:d4p2t2|ffn:t1e4)", "jax:f8t2e4", 16),
    ("sglang:d8t4+megatron:(attn:d4p4t2|ffn:d2p4e4)", "vllm:d8t4+jax:f16t2e4", 64),
    ("sglang[rollout]:d2+fsdp[actor]:d4", "vllm[rollout]:d2+jax[actor]:f4", 6),
    ("sglang[r]:d2+fsdp[a]:d4+fsdp[c]:d4", "vllm[r]:d2+jax[a]:f4+jax[c]:f4", 10),
    ("sglang[r]:d2+fsdp[a]:d4|fsdp[c]:d4", "vllm[r]:d2+jax[a]:f4|jax[c]:f4", 6),
    ("vllm[g]:d4|fsdp[a]:d4", "vllm[g]:d4|jax[a]:f4", 4),
    ("sglang:d4+d4", "vllm:d4+jax:f4", 8),
    ("sglang:d4+cpu", "vllm:d4+eval", 4),
    ("sglang.d4p1t1+d4p1t1", "vllm:d4+jax:f4", 8),
    ("sglang.d4m2p1+d4m2p1", "vllm:d4t2+jax:f4t2", 16),
    ("d4m2p1+sglang.d4m2p1", "jax:f4t2+vllm:d4t2", 16),
    ("d4m2p1", "vllm[rollout]:d4t2|jax[actor]:f4t2", 8),
    ("sglang.d4p1m1+actor_train:d2p1m2,ref_inf:d4p1m1", "vllm:d4+jax:f2t2", 8),
    ("jax:d2+jax:f1", "jax:d2+jax:f1", 3),
    ("vllm:d4t2+torch:d2f4t2", "vllm:d4t2+torch:d2f4t2", 24),
]  # fmt: skip

# text, words of the error, the nearest that can be read
WRONG = [
    ("vllm:d4|fsdp:d4", "need names", "vllm[part0]:d4|jax[part1]:f4"),
    ("vllm:d4|fsdp[a]:d4", "need names", "vllm[part0]:d4|jax[a]:f4"),
    ("fsdp:d4p2", "column 8, p2: no p here", "jax:f4"),
    ("megatron:(attn:d4|ffn:d3e2)", "attn has 4 GPUs and ffn 6", ""),
    ("megatron:(attn:d4p2|ffn:p1e2)", "attn has p2 and ffn p1", ""),
    ("megatron:d2e4", "do not divide 2", ""),
    ("vllm:d1+jax:f2t2e4", "e4 is inside f and does not divide it", ""),
    ("vllm:d1+fsdp:d1+fsdp:d1", "3 parts need", "vllm[part0]:d1+jax[part1]:f1+jax[part2]:f1"),
    ("sglang[r]:d1+fsdp[r]:d1", "r is there already", "vllm[r]:d1+jax[r2]:f1"),
    ("jax[a]:d1+jax[a]:f1", "a is there already", "jax[a]:d1+jax[a2]:f1"),
    ("vllm:d4 fsdp:d4", "column 9, fsdp:d4: want sizes", "vllm:d4"),
    ("vllm:d2t1,fsdp:d4", "column 10, ,fsdp:d4: want sizes", "vllm:d2"),
    ("jax:f2-t2+vllm:d4", "column 7, -t2: want sizes", "jax:f2+vllm:d4"),
    ("vllm[r]:d2|fsdp[a]:d4", "both need as many", ""),
    ("fsdp(actor):d4", "this is no BACKEND:SIZES", "jax[actor]:f4"),
    ("sglang:d0", "column 8, d0: sizes are at least 1", "vllm:d1"),
    ("vllm:d4c2", "column 8, c2: no c here", "vllm:d4"),
    ("vllm:d4d2", "d is given twice", "vllm:d4"),
    ("vllm:4", "want sizes as d4t2", ""),
    ("vlm:d4", "'vlm' is no backend", ""),
    ("heuristic", "this is no BACKEND:SIZES", ""),
    ("", "the end", ""),
]  # fmt: skip


@pytest.mark.parametrize(("text", "printed", "gpus"), READ)
def test_what_areal_writes_is_read_and_printed_in_our_form(text, printed, gpus):
    found = parse(text)
    assert (str(found), found.gpus) == (printed, gpus)
    assert parse(printed) == found
    assert not parse(printed).notes


def test_what_is_translated_is_said():
    assert parse("sglang:d4+megatron:d2p2t4e8").notes == (
        "sglang runs as vllm",
        "megatron runs as jax",
        "megatron has no stages here: p2 shards weights, as f does",
        "megatron's experts are sharded as other weights are: e8 is left out",
    )
    assert parse("sglang:d4+eval").evaluates


@pytest.mark.parametrize(("text", "words", "nearest"), WRONG)
def test_an_error_shows_where_and_the_nearest_that_can_be_read(text, words, nearest):
    with pytest.raises(UserError, match=re.escape(words)) as error:
        parse(text)
    hint = re.search(r"did you mean '(.*)'\?", str(error.value))
    assert (hint[1] if hint else "") == nearest


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
    shared = Part(engine, False, {"d": train.gpus}, "gen")
    on_one = Part(train.backend, True, trainer, "train", "gen")
    return Allocation(
        draw(st.sampled_from([(servers, train), (servers,), (train,), (shared, on_one)]))
    )


@given(allocations())
def test_what_is_printed_is_read_back(made):
    assert parse(str(made)) == made


@given(st.text(alphabet="vlmjax:dtpcef0123+|()[]., ", max_size=30))
def test_no_text_is_more_than_a_one_line_error(text):
    with suppress(UserError):
        found = parse(text)
        assert parse(str(found)) == found


@given(allocations(), st.integers(1, 8), st.integers(1, 40))
def test_each_gpu_is_dealt_once_and_what_must_be_together_is(made, each, count):
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
    own = [gpu for one in placed if not one.part.on for gpu in one.gpus]
    assert len(own) == len(set(own)) == made.gpus
    for one in placed:
        where = [one.gpus[i : i + one.part.each] for i in range(0, len(one.gpus), one.part.each)]
        for group in where if one.part.each <= each else ():
            assert len({host for host, _ in group}) == 1
    sharing = [one for one in placed if one.part.on]
    assert not sharing or {g for one in sharing for g in one.gpus} == set(own)


def test_too_few_gpus_is_an_error_with_the_arithmetic():
    with pytest.raises(UserError, match=r"needs 6 GPUs; jax:f4 has 4 × 1, of which 2 .* a: 4"):
        place(parse("vllm:d2+jax:f4"), {"a": range(4)})
    with pytest.raises(UserError, match=r"vllm:d2t3 has 2 × 3, of which 1 found 3 together"):
        place(parse("vllm:d2t3"), {"a": range(4), "b": range(2)})


def test_what_shares_gpus_is_together_too():
    made = parse("jax[gen]:d6|jax[train]:f2t3")
    *_, trainer = place(made, {"a": range(4), "b": range(4)})
    assert trainer.gpus == (("a", 0), ("a", 1), ("a", 2), ("b", 0), ("b", 1), ("b", 2))
    with pytest.raises(UserError, match=r"needs 6 GPUs; .* of which 1 found 3 together"):
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
    with pytest.raises(UserError, match="write t4 for a server of 4 GPUs"):
        settings(parse("vllm:t2p2"))
    with pytest.raises(UserError, match="one trainer, which has critic"):
        settings(parse("vllm[r]:d2+fsdp[a]:d4+fsdp[c]:d4"))
