"""Programs of GPUs as text: products, bytes and collectives counted by hand."""

import pytest

from rlx.base import UserError
from rlx.doctor import gpu_cards, gpu_program
from rlx.doctor.gpu_cards import CARDS
from rlx.doctor.gpu_program import Reach

GEMM = (
    'custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{'
    '"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}'
)
GROUPS = "replica_groups=[4,4]<=[4,4]T(1,0), dimensions={1}"
TRIPS = 'condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"3"}}'
MODULE = f"""HloModule step, is_scheduled=true

%sliced (p0: f32[5,64,32], p1: s32[]) -> f32[64,32] {{
  %p0 = f32[5,64,32]{{2,1,0}} parameter(0)
  %p1 = s32[] parameter(1)
  ROOT %slice = f32[64,32]{{1,0}} dynamic-slice(%p0, %p1), dynamic_slice_sizes={{1,64,32}}
}}

%body (state: (s32[], bf16[16,64], bf16[64,32])) -> (s32[], bf16[16,64], bf16[64,32]) {{
  %state = (s32[], bf16[16,64]{{1,0}}, bf16[64,32]{{1,0}}) parameter(0)
  %x = bf16[16,64]{{1,0}} get-tuple-element(%state), index=1
  %w = bf16[64,32]{{1,0}} get-tuple-element(%state), index=2
  %start = (bf16[64,8]{{1,0}}, bf16[64,32]{{1,0}}) all-gather-start(%x), {GROUPS}
  %y = bf16[16,32]{{1,0}} custom-call(%x, %w), {GEMM}
  %done = bf16[64,32]{{1,0}} all-gather-done(%start)
  %sum = bf16[16,32]{{1,0}} all-reduce(%y), replica_groups={{{{0,1}},{{2,3}}}}, to_apply=%add
  ROOT %out = (s32[], bf16[16,64]{{1,0}}, bf16[64,32]{{1,0}}) tuple(%state, %x, %done)
}}

ENTRY %main (a: bf16[16,64], w: bf16[64,32], stack: f32[5,64,32]) -> f32[64,32] {{
  %a = bf16[16,64]{{1,0}} parameter(0)
  %w.1 = bf16[64,32]{{1,0}} parameter(1)
  %stack = f32[5,64,32]{{2,1,0}} parameter(2)
  %n = s32[] constant(0)
  %init = (s32[], bf16[16,64]{{1,0}}, bf16[64,32]{{1,0}}) tuple(%n, %a, %w.1)
  %loop = (s32[], bf16[16,64]{{1,0}}, bf16[64,32]{{1,0}}) while(%init), {TRIPS}
  ROOT %part = f32[64,32]{{1,0}} fusion(%stack, %n), kind=kLoop, calls=%sliced
}}
"""


def test_products_and_bytes_of_a_loop_count_as_often_as_it_runs():
    reading = gpu_program.read(MODULE)
    product = 2 * 16 * 32 * 64
    assert (reading.flops, reading.attention_flops) == (3 * product, 0)
    assert reading.calls == {"__cublas$gemm": 3}
    assert reading.product_bytes == 3 * 2 * (16 * 64 + 64 * 32 + 16 * 32)
    assert reading.bytes == 2 * 4 * 64 * 32 + 4, "a slice of the stack, not all five"


def test_a_collective_is_hidden_by_the_products_between_its_start_and_end():
    reading = gpu_program.read(MODULE, per_host=4)
    gather, reduced = reading.collectives
    assert (gather.kind, gather.times, gather.place) == ("all-gather", 3, "loop × 3")
    assert (gather.bytes, gather.covered) == (3 * 2 * 64 * 32, reading.flops)
    assert (gather.between_hosts, reduced.between_hosts) == (True, False)
    assert (reduced.kind, reduced.bytes, reduced.covered) == ("all-reduce", 3 * 2 * 2 * 16 * 32, 0)
    card = CARDS["h100"]
    sent = gather.bytes / card.network - gather.covered / (gpu_program.PRODUCTS * card.flops)
    assert reading.waiting(card) == pytest.approx(max(sent, 0) + reduced.bytes / card.link)
    assert not gpu_program.read(MODULE, per_host=16).collectives[0].between_hosts


def test_a_roofline_adds_products_and_other_kernels():
    reading = gpu_program.Reading(flops=989e12, attention_flops=98.9e12, bytes=3.352e12)
    seconds = reading.seconds(CARDS["h100"], Reach(0.5, 0.2, 1.0))
    assert seconds == pytest.approx(2.0 + 0.5 + 1.0)


@pytest.mark.parametrize(
    ("text", "hosts", "each"),
    [("h100:16", 2, 8), ("h100", 1, 1), ("a100:3x4", 3, 4), ("b200:6", 1, 6)],
)
def test_gpus_fill_hosts_of_eight(text, hosts, each):
    assert gpu_cards.parse(text)[1:] == (hosts, each)


@pytest.mark.parametrize(
    ("text", "words"), [("h10:8", "did you mean 'h100'"), ("h100:12", "3x4"), ("h100:x", "2x8")]
)
def test_unknown_gpus_are_refused_in_one_line(text, words):
    with pytest.raises(UserError, match=words):
        gpu_cards.parse(text)
