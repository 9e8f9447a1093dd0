"""Translate AReaL's `allocation_mode`, of all its releases, into rlx's.

    sglang:d4t2+fsdp:d8                 vllm:d4t2+jax:f8
    megatron:(attn:d4p2t2|ffn:t1e4)     jax:f8t2e4
    sglang.d4m2p1+d4m2p1                vllm:d4t2+jax:f4t2
    d4m2p1                              vllm:d4t2|jax:f4t2

The last two are forms of the first releases; `m` is `t` there.
"""

import re
from collections.abc import Mapping
from math import prod

from rlx.base import UserError
from rlx.launch import allocation

SERVERS = {"vllm": "vllm", "sglang": "vllm", "mock": "jax"}
# A trainer's backend → the letters it takes; first releases gave it no name.
TRAINERS = {"fsdp": "dtc", "megatron": "dtpce", "archon": "dtpce", "": "dtpce"}
_SIZES = r"([a-z]\d+)+"


def translate(text: str) -> tuple[str, tuple[str, ...]]:
    """Return an allocation in rlx's form, and sentences on the changes; rlx's own has none.

    UserError if neither AReaL nor rlx has such an allocation, or no run can have it.
    """
    notes: list[str] = []
    pieces = re.split(r"([+|])(?!\s*ffn\s*:)", text)  # separators have the odd places
    if len(pieces) == 1 and re.fullmatch(_SIZES, text):
        notes.append(f"{text} is servers (vllm) and a trainer (jax) on the same GPUs")
        pieces = [f"vllm:{text}", "|", text]
    pieces[::2] = [_part(piece.strip(), notes) for piece in pieces[::2]]
    return str(allocation.parse("".join(pieces))), tuple(notes)


def _part(text: str, notes: list[str]) -> str:
    """Return a part in rlx's form, or unchanged if its backend is none of AReaL's."""
    if text == "cpu":
        return "eval"
    if role := re.search(r"\bactor_train\s*:\s*(\w+)", text):
        notes.append("one trainer has all networks: other roles than actor_train are left out")
        text = role[1]
    match = re.fullmatch(r"(\w+)\s*(\[\w+\])?\s*[:.]\s*(.*)", text)
    backend, name, dims = match.groups(default="") if match else ("", "", text)
    if backend in SERVERS:
        if backend != SERVERS[backend]:
            notes.append(f"{backend} runs as {SERVERS[backend]}")
        sizes = _sizes(text, dims, "dt")
        return f"{SERVERS[backend]}{name}:d{sizes.get('d', 1)}t{sizes.get('t', 1)}"
    if backend not in TRAINERS or not (match or re.fullmatch(_SIZES, text)):
        return text
    if backend:
        notes.append(f"{backend} runs as jax")
    if both := re.fullmatch(r"\(?\s*attn\s*:\s*(\w+)\s*\|\s*ffn\s*:\s*(\w+)\s*\)?", dims):
        sizes = _hybrid(text, both[1], both[2])
    else:
        sizes = _sizes(text, dims, TRAINERS[backend])
    return f"jax{name}:{_trainer_sizes(text, backend or 'a trainer', sizes, notes)}"


def _sizes(part: str, dims: str, letters: str) -> dict[str, int]:
    """Return the sizes above 1; letters that a backend lacks may stand there with 1."""
    above = re.sub(r"[tpce]1(?!\d)", "", dims.replace("m", "t"))
    return allocation.read_sizes(part, above or "d1", letters)


def _hybrid(part: str, attention: str, feed_forward: str) -> dict[str, int]:
    """Return the sizes of a mixture's attention, and `e` of its experts, which must fit inside."""
    sizes, experts = _sizes(part, attention, "dtpc"), _sizes(part, feed_forward, "dtpe")
    world, stages = prod(sizes.values()), sizes.get("p", 1)
    inside = experts.get("t", 1) * experts.get("e", 1) * stages
    gpus = experts.get("d", 1) * inside if "d" in feed_forward else world // inside * inside
    same_stages = "p" not in feed_forward or experts.get("p", 1) == stages
    if gpus != world or not same_stages:
        raise UserError(
            f"allocation_mode: attn and ffn of {part!r} have {world} and {gpus} GPUs, in {stages} "
            f"and {experts.get('p', 1)} stages; give both as many GPUs and stages"
        )
    return sizes | {"e": experts.get("e", 1)}


def _trainer_sizes(part: str, what: str, sizes: Mapping[str, int], notes: list[str]) -> str:
    """Return sizes of AReaL's trainer in rlx's letters: d and p shard weights, e is inside them."""
    stages, experts = sizes.get("p", 1), sizes.get("e", 1)
    shards = sizes.get("d", 1) * stages
    world = shards * sizes.get("t", 1) * sizes.get("c", 1)
    if world % (experts * stages):
        raise UserError(
            f"allocation_mode: {experts} experts' places in {stages} stages do not divide the "
            f"{world} GPUs of {part!r}; give another e"
        )
    if stages > 1:
        notes.append(f"{what} has no stages here: p{stages} shards weights, as f does")
    if shards % experts:
        notes.append(f"{what}'s experts are sharded as other weights are: e{experts} is left out")
        experts = 1
    return f"f{shards}t{sizes.get('t', 1)}c{sizes.get('c', 1)}e{experts}"
