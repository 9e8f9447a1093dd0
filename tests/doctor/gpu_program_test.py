"""Programs of GPUs as text: products, bytes and collectives counted by hand."""

from collections import Counter

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

%picked (p0.1: f32[5,64,32], p1.1: s32[3,2]) -> f32[3,32] {{
  %p0.1 = f32[5,64,32]{{2,1,0}} parameter(0)
  %p1.1 = s32[3,2]{{1,0}} parameter(1)
  %rows = f32[320,32]{{1,0}} bitcast(%p0.1)
  ROOT %gather = f32[3,32]{{1,0}} gather(%rows, %p1.1), offset_dims={{1}}, slice_sizes={{1,32}}
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
  %index = s32[3,2]{{1,0}} parameter(3)
  %few = f32[3,32]{{1,0}} fusion(%stack, %index), kind=kLoop, calls=%picked
  ROOT %part = f32[64,32]{{1,0}} fusion(%stack, %n), kind=kLoop, calls=%sliced
}}
"""


def test_products_and_bytes_of_a_loop_count_as_often_as_it_runs():
    reading = gpu_program.read(MODULE)
    product = 2 * 16 * 32 * 64
    assert (reading.flops, reading.attention_flops) == (3 * product, 0)
    assert reading.calls == {"__cublas$gemm": 3}
    assert reading.moved - reading.bytes == 3 * 2 * (16 * 64 + 64 * 32 + 16 * 32)
    picked = 2 * 4 * 3 * 32 + 4 * 3 * 2
    assert reading.bytes == 2 * 4 * 64 * 32 + 4 + picked, "a slice and rows of the stack, not all"


def test_a_collective_is_hidden_by_the_products_between_its_start_and_end():
    reading = gpu_program.read(MODULE, per_host=4)
    gather, reduced = reading.collectives
    assert (gather.kind, gather.times, gather.place) == ("all-gather", 3, "loop × 3")
    others = 3 / 4  # of four devices
    assert (gather.bytes, gather.covered) == (3 * 2 * 64 * 32 * others, reading.flops)
    assert (gather.cards, reduced.cards) == (1, 0)
    assert (reduced.kind, reduced.bytes, reduced.covered) == ("all-reduce", 3 * 2 * 16 * 32, 0)
    card = CARDS["h100"]
    sent = gather.bytes / card.network - gather.covered / (gpu_program.PRODUCTS * card.flops)
    assert reading.waiting(card) == pytest.approx(max(sent, 0) + reduced.bytes / card.link)
    assert not gpu_program.read(MODULE, per_host=16).collectives[0].cards


def test_collectives_that_are_under_way_together_share_the_products():
    """They run one after the other, so one product cannot hide both."""
    second = "  %start.2 = (bf16[64,8]{1,0}, bf16[64,32]{1,0}) all-gather-start(%x), " + GROUPS
    text = MODULE.replace("  %y = ", f"{second}\n  %y = ", 1)
    reading = gpu_program.read(text, per_host=4)
    assert [one.covered for one in reading.collectives[:1]] == [reading.flops]
    assert (reading.collectives[0].kind, reading.collectives[0].times) == ("all-gather", 6)


def test_devices_of_a_host_receive_the_same_bytes_by_all_of_their_cards():
    one = {"kind": "all-gather", "shape": "", "place": "", "times": 1, "bytes": 400e9, "covered": 0}
    card = CARDS["h100"]
    gathers = (gpu_program.Collective(**one, cards=cards) for cards in (0, 1, 4, 16))
    seconds = [gather.seconds(card) for gather in gathers]
    assert seconds == [400e9 / rate for rate in (card.link, 50e9, 200e9, card.link)]


def test_half_of_a_collective_is_hidden_by_products_of_half_its_time():
    card = CARDS["h100"]
    covered = gpu_program.PRODUCTS * card.flops / 2
    one = gpu_program.Collective("all-gather", "", "", 1, card.link, covered, 0)
    assert (one.waiting(card), one.hidden(card)) == (0.5, card.link / 2)


MESH = "replica_groups=mesh['replica'=2,'fsdp'=8,'tensor'=1] "


@pytest.mark.parametrize(
    ("groups", "cards"),
    [
        ("replica_groups=[4,4]<=[4,4]T(1,0)", 2),
        ("replica_groups={{0,1,2,3,4,5,6,7},{8,9,10,11,12,13,14,15}}", 0),
        (MESH + "{'fsdp'}", 0),
        (MESH + "{'replica'}", 1),
        (MESH + "{'replica','fsdp'}", 8),
    ],
)
def test_groups_of_several_hosts_are_found_in_each_form(groups, cards):
    text = MODULE.replace(GROUPS, f"{groups}, dimensions={{1}}")
    assert gpu_program.read(text).collectives[0].cards == cards


DECODE = f"""HloModule decode, is_scheduled=true

%written (p0.2: bf16[8,64], p1.2: s32[], p2.2: bf16[1,64], p3.2: s32[2]) -> (bf16[8,64]) {{
  %p0.2 = bf16[8,64]{{1,0}} parameter(0)
  %p1.2 = s32[] parameter(1)
  %p2.2 = bf16[1,64]{{1,0}} parameter(2)
  %p3.2 = s32[2]{{0}} parameter(3)
  %row = bf16[8,64]{{1,0}} dynamic-update-slice(%p0.2, %p2.2, %p1.2, %p1.2)
  %same = bf16[8,64]{{1,0}} bitcast(%row)
  %rows.2 = bf16[8,64]{{1,0}} scatter(%p0.2, %p3.2, %p2.2), to_apply=%last
  ROOT %both = (bf16[8,64]{{1,0}}, bf16[8,64]{{1,0}}) tuple(%same, %rows.2)
}}

%step (state.2: (s32[], bf16[8,64], bf16[64,64])) -> (s32[], bf16[8,64], bf16[64,64]) {{
  %state.2 = (s32[], bf16[8,64]{{1,0}}, bf16[64,64]{{1,0}}) parameter(0)
  %x.2 = bf16[8,64]{{1,0}} get-tuple-element(%state.2), index=1
  %w.2 = bf16[64,64]{{1,0}} get-tuple-element(%state.2), index=2
  %y.2 = (bf16[8,64]{{1,0}}, s8[4194304]{{0}}) custom-call(%x.2, %w.2), {GEMM}
  ROOT %out.2 = (s32[], bf16[8,64]{{1,0}}, bf16[64,64]{{1,0}}) tuple(%state.2, %x.2, %w.2)
}}

ENTRY %main (a: bf16[8,64], w: bf16[64,64], new: bf16[1,64], at: s32[2]) -> bf16[8,64] {{
  %a = bf16[8,64]{{1,0}} parameter(0)
  %w.3 = bf16[64,64]{{1,0}} parameter(1)
  %new = bf16[1,64]{{1,0}} parameter(2)
  %at = s32[2]{{0}} parameter(3)
  %n = s32[] constant(0)
  %init = (s32[], bf16[8,64]{{1,0}}, bf16[64,64]{{1,0}}) tuple(%n, %a, %w.3)
  %steps = (s32[], bf16[8,64]{{1,0}}, bf16[64,64]{{1,0}}) while(%init), condition=%cond, body=%step
  %kept = (bf16[8,64]{{1,0}}, bf16[8,64]{{1,0}}) fusion(%a, %n, %new, %at), calls=%written
  ROOT %alone = bf16[8,64]{{1,0}} dynamic-update-slice(%a, %new, %n, %n)
}}
"""


def test_updates_in_place_count_by_their_part_and_a_workspace_not_at_all():
    """Else a cache would seem to be copied at every step, and each product to move 4 MB more."""
    reading = gpu_program.read(DECODE, trips=[5])
    assert reading.products == {(2 * 8 * 64 * 64, 2 * (8 * 64 + 64 * 64 + 8 * 64)): 5}
    row, place, places = 2 * 64, 4, 8
    fused = place + row + places + 2 * row
    assert reading.bytes == fused + (row + 2 * place + row)
    assert reading.kernels == 5 + 2


def test_a_roofline_adds_products_and_other_kernels():
    """The first product is limited by the peak, the second by the bandwidth."""
    products = Counter({(494.5e12, 1.0): 2, (1.0, 3.352e12): 1})
    reading = gpu_program.Reading(products, attention_flops=98.9e12, bytes=3.352e12)
    seconds = reading.seconds(CARDS["h100"], Reach(0.5, 0.2, 1.0))
    assert seconds == pytest.approx(2.0 + 1.0 + 0.5 + 1.0)


COPY = """
  %copy = ((bf16[8,64], s32[]), bf16[8,64], u32[]) fusion-start(%a, %new, %n), calls=%written
  %beside = bf16[8,64]{1,0} custom-call(%a, %w.3), GEMM
  %copied = bf16[8,64]{1,0} fusion-done(%copy)
  ROOT %alone"""


def test_a_copy_takes_the_bandwidth_that_the_products_during_it_leave():
    plain = gpu_program.read(DECODE, trips=[5])
    text = DECODE.replace("\n  ROOT %alone", COPY.replace("GEMM", GEMM))
    reading = gpu_program.read(text, trips=[5])
    assert reading.bytes == plain.bytes
    [((own, flops, moved), times)] = reading.copies.items()
    assert (flops, moved, times) == (2 * 8 * 64 * 64, 2 * (8 * 64 + 64 * 64 + 8 * 64), 1)
    assert own == reading.copied
    assert reading.moved - plain.moved == own + moved
    # A second of products, which leave half of the bandwidth, beside two thirds of its bytes.
    band = 3.352e12
    copy = gpu_program.Reading(copies=Counter({(2 * band / 3, 494.5e12, band / 2): 1}))
    assert copy.seconds(CARDS["h100"], Reach(0.5, 0.2, 1.0)) == pytest.approx(1 / 6)


@pytest.mark.parametrize(
    ("text", "hosts", "each"),
    [("h100:16", 2, 8), ("h100", 1, 1), ("a100:3x4", 3, 4), ("b200:6", 1, 6)],
)
def test_gpus_fill_hosts_of_eight(text, hosts, each):
    assert gpu_cards.parse(text)[1:] == (hosts, each)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("h10:8", "did you mean 'h100'"), ("h100:12", "3x4"), ("h100:x", "2x8"), ("h100:0", "2x8"),
        ("h100:2x0", "2x8"),
    ],
)  # fmt: skip
def test_unknown_gpus_are_refused_in_one_line(text, words):
    with pytest.raises(UserError, match=words):
        gpu_cards.parse(text)
