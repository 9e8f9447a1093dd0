"""Read which servers and which trainer have how many GPUs, and deal GPUs of hosts to them.

    vllm:d4t2+jax:f8t2            four servers of two GPUs each, and a trainer of 16: 24 GPUs
    vllm[gen]:d4|jax[train]:f4    servers and trainer on the same four

Letters: d copies (servers; a trainer's replicas), f fsdp, t tensor, p pipeline, c context, e
experts (inside the others). What is absent is 1. The forms of all releases of AReaL are read too,
its backends become those here, and `notes` says so.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from math import lcm, prod

from rlx.base import UserError

ENGINES = {"vllm": "vllm", "jax": "jax", "sglang": "vllm", "mock": "jax"}
# A trainer's backend → what runs here, and the letters it takes.
TRAINERS = {
    "jax": ("jax", "dftce"), "torch": ("torch", "dftc"), "fsdp": ("jax", "dtc"),
    "megatron": ("jax", "dtpce"), "archon": ("jax", "dtpce"),
}  # fmt: skip
OURS = ("vllm", "jax", "torch")
EVALUATION = ("eval", "cpu")  # `vllm:d4+eval`: nothing is trained
MEANINGS = {"f": "fsdp", "d": "replica", "e": "expert", "t": "tensor", "c": "context"}


@dataclasses.dataclass(frozen=True)
class Part:
    """Servers, or the trainer.

    Attributes:
      backend: vllm | jax | torch. trains: whether it is the trainer.
      sizes: letter → how many, of those above 1.
      on: name of the part whose GPUs it sits on; empty where it has its own.
    """

    backend: str
    trains: bool
    sizes: Mapping[str, int]
    name: str = ""
    on: str = ""

    @property
    def gpus(self) -> int:
        """How many GPUs it runs on."""
        return prod(n for x, n in self.sizes.items() if x != "e")

    @property
    def each(self) -> int:
        """How many of them must be on one host where they fit: a server's, or a tensor group."""
        return self.sizes.get("t", 1) * (1 if self.trains else self.sizes.get("p", 1))

    def __str__(self) -> str:
        first = "f" if self.trains else "d"  # is always said
        letters = [x for x in "dftpce" if x in self.sizes or x == first]
        dims = "".join(f"{x}{self.sizes.get(x, 1)}" for x in letters)
        return f"{self.backend}{f'[{self.name}]' if self.name else ''}:{dims}"


@dataclasses.dataclass(frozen=True)
class Allocation:
    """Parts in the order they were written; `notes` are sentences on what was translated."""

    parts: tuple[Part, ...]
    evaluates: bool = False
    notes: tuple[str, ...] = dataclasses.field(default=(), compare=False)

    @property
    def gpus(self) -> int:
        """How many GPUs all parts have; those on another's count once."""
        return sum(part.gpus for part in self.parts if not part.on)

    def __str__(self) -> str:
        text = "".join(f"{'|' if part.on else '+'}{part}" for part in self.parts)[1:]
        return text + "+eval" * self.evaluates


@dataclasses.dataclass(frozen=True)
class Placed:
    """One server, or one process group of the trainer's that stays together, and its GPUs."""

    part: Part
    index: int
    gpus: tuple[tuple[str, int], ...]  # (host, id there)


def parse(text: str) -> Allocation:
    """Return what an allocation says.

    Raises:
      UserError: it cannot be read, or contradicts itself; with the column, and the nearest
        text that can be read where one is known.
    """
    parts: list[Part] = []
    notes: list[str] = []
    pieces = list(_split(text, r"\+", 0, len(text)))
    word = text[slice(*pieces[-1])].strip()
    evaluates = len(pieces) > 1 and word in EVALUATION
    for start, end in pieces[: -1 if evaluates else None]:
        group = list(_split(text, r"\|(?!\s*ffn\s*:)", start, end))
        for at, stop in group:
            served = any(not part.trains for part in parts)
            alone = len(pieces) == len(group) == 1
            found = _parts(text, at, stop, served, alone, notes)
            on = "" if at == start else parts[-1].on or parts[-1].name
            for part in found:
                if at != start and (not part.name or not on):
                    raise _wrong(text, start, end, "parts on the same GPUs need names",
                                 _named(text, group))  # fmt: skip
                same = next((p for p in parts if p.name and p.name == part.name), None)
                if same:
                    fix = text[:at] + text[at:stop].replace(f"[{part.name}]", f"[{part.name}2]")
                    raise _wrong(text, at, stop, f"{part.name} is there already",
                                 fix + text[stop:])  # fmt: skip
                parts.append(dataclasses.replace(part, on=part.on or on))
        first = next(p for p in parts if p.name == parts[-1].on) if parts[-1].on else parts[-1]
        if parts[-1].gpus != first.gpus:
            raise _wrong(text, start, end, f"{first} has {first.gpus} GPUs and {parts[-1]} "
                         f"{parts[-1].gpus}; on the same GPUs both need as many")  # fmt: skip
    if len(parts) > 2 and not all(part.name for part in parts):
        spans = [span for piece in pieces for span in _split(text, r"\|(?!\s*ffn)", *piece)]
        raise _wrong(text, 0, len(text), f"{len(parts)} parts need names", _named(text, spans))
    return Allocation(tuple(parts), evaluates, tuple(notes))


def _parts(
    text: str, start: int, end: int, served: bool, alone: bool, notes: list[str]
) -> list[Part]:
    """Return the part that text[start:end] is; of AReaL's first releases it may be two."""
    whole = text[start:end]
    bare = re.fullmatch(r"\s*((?:[a-z]\d+)+)\s*", whole)
    if bare:
        sizes = _sizes(text, start, bare.span(1), "dtpcem")
        trainer = Part("jax", True, _folded(sizes, "a trainer", notes))
        if not alone:
            return [trainer]
        servers = Part("vllm", False, {x: n for x, n in sizes.items() if x in "dtp"}, "rollout")
        notes.append(f"{whole.strip()} is servers (vllm) and a trainer (jax) on the same GPUs")
        return [servers, dataclasses.replace(trainer, name="actor", on="rollout")]
    if re.match(r"\s*\w+\s*:[^,]*,", whole):  # roles of the first releases
        roles = dict(re.findall(r"(\w+)\s*:\s*([a-z\d]+)", whole))
        if "actor_train" in roles:
            notes.append("one trainer has all networks: other roles than actor_train are left out")
            at = whole.index(roles["actor_train"])
            sizes = _sizes(text, start, (at, at + len(roles["actor_train"])), "dtpm")
            return [Part("jax", True, _folded(sizes, "actor_train", notes))]
    match = re.fullmatch(r"\s*([A-Za-z_]+)\s*(?:\[\s*(\w+)\s*\]\s*)?[:.]\s*(.*?)\s*", whole)
    if not match:
        fix = re.sub(r"\(\s*(\w+)\s*\)\s*:", r"[\1]:", whole)
        raise _wrong(text, start, end, "this is no BACKEND:SIZES, as vllm:d4t2",
                     text[:start] + fix + text[end:])  # fmt: skip
    backend, name = match[1], match[2] or ""
    if backend not in (*ENGINES, *TRAINERS):
        known = ", ".join((*OURS, "and AReaL's sglang, fsdp, megatron, archon"))
        raise _wrong(text, start, end, f"{backend!r} is no backend; there are {known}")
    at = start + match.start(3)
    if both := re.fullmatch(r"\(?\s*attn\s*:\s*(\w+)\s*\|\s*ffn\s*:\s*(\w+)\s*\)?", match[3]):
        sizes = _hybrid(text, at, both)
        letters = "dtpc"
    else:
        trains = backend not in ENGINES or (
            backend == "jax" and (served or bool(re.search("[fc]", match[3])))
        )
        letters = TRAINERS[backend][1] if trains else "dtp"
        sizes = _sizes(text, start, match.span(3), letters + ("m" if "." in whole else ""))
    if backend in ENGINES and (backend != "jax" or not trains):
        if backend not in OURS:
            notes.append(f"{backend} runs as {ENGINES[backend]}")
        return [Part(ENGINES[backend], False, sizes, name)]
    runs = TRAINERS[backend][0]
    if backend in OURS:
        if sizes.get("f", 1) % sizes.get("e", 1):
            raise _wrong(text, at, end, f"e{sizes['e']} is inside f and does not divide it")
        return [Part(runs, True, sizes, name)]
    notes.append(f"{backend} runs as {runs}")
    experts, stages = sizes.get("e", 1), sizes.get("p", 1)
    world = prod(n for x, n in sizes.items() if x != "e")
    if world % (experts * stages):
        raise _wrong(text, at, end, f"{experts} experts' places in {stages} stages do not divide "
                     f"{world} GPUs")  # fmt: skip
    return [Part(runs, True, _folded(sizes, backend, notes), name)]


def _sizes(text: str, start: int, span: tuple[int, int], letters: str) -> dict[str, int]:
    """Return the sizes above 1 that are written in a span behind text[start], `m` as `t`."""
    sizes: dict[str, int] = {}
    dims = re.compile(r"([A-Za-z])(\d+)")
    at, end = start + span[0], start + span[1]
    while match := dims.match(text, at, end):
        letter, number = match[1], int(match[2])
        rest = text[:at] + text[match.end() :]
        if letter not in letters and (number != 1 or letter not in "tpce"):
            raise _wrong(text, at, match.end(), f"no {letter} here, but {', '.join(letters)}", rest)
        if number < 1:
            one = f"{text[:at]}{letter}1{text[match.end() :]}"
            raise _wrong(text, at, match.end(), "sizes are at least 1", one)
        letter = "t" if letter == "m" else letter
        if letter in sizes:
            raise _wrong(text, at, match.end(), f"{letter} is given twice", rest)
        sizes[letter], at = number, match.end()
    if at < end or span[0] == span[1]:
        raise _wrong(text, at, end, "want sizes as d4t2", text[:at] + text[end:])
    return {x: n for x, n in sizes.items() if n > 1}


def _hybrid(text: str, start: int, both: re.Match) -> dict[str, int]:
    """Return the sizes of a mixture's attention; those of its experts must fit inside."""
    attention = _sizes(text, start, both.span(1), "dtpc")
    experts = _sizes(text, start, both.span(2), "dtpe")
    world, stages = prod(attention.values()), attention.get("p", 1)
    if "p" in both[2] and experts.get("p", 1) != stages:
        raise _wrong(text, start, start + both.end(), f"attn has p{stages} and ffn "
                     f"p{experts.get('p', 1)}; both need the same")  # fmt: skip
    inside = prod(n for x, n in experts.items() if x in "te") * stages
    copies = experts.get("d", 1) if "d" in both[2] else world // inside
    if copies * inside != world:
        raise _wrong(text, start, start + both.end(), f"attn has {world} GPUs and ffn "
                     f"{copies * inside}; both need the same")  # fmt: skip
    return attention | {x: n for x, n in experts.items() if x == "e"}


def _folded(sizes: Mapping[str, int], what: str, notes: list[str]) -> dict[str, int]:
    """Return sizes of an AReaL trainer as ours: d and p shard weights, e is inside them."""
    if stages := sizes.get("p"):
        notes.append(f"{what} has no stages here: p{stages} shards weights, as f does")
    shards, experts = sizes.get("d", 1) * sizes.get("p", 1), sizes.get("e", 1)
    if shards % experts:
        notes.append(f"{what}'s experts are sharded as other weights are: e{experts} is left out")
        experts = 1
    own = {"f": shards, "t": sizes.get("t", 1), "c": sizes.get("c", 1), "e": experts}
    return {x: n for x, n in own.items() if n > 1}


def _split(text: str, separator: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the spans between separators that are in no parentheses."""
    depth, begin = 0, start
    for match in re.compile(rf"[()]|{separator}").finditer(text, start, end):
        if match[0] in "()":
            depth += 1 if match[0] == "(" else -1
        elif depth == 0:
            yield begin, match.start()
            begin = match.end()
    yield begin, end


def _named(text: str, spans: Sequence[tuple[int, int]]) -> str:
    """Return the text with a name for each part that has none."""
    for number, (start, end) in reversed(list(enumerate(spans))):
        piece = re.sub(r"^(\s*[A-Za-z_]+)\s*([:.])", rf"\1[part{number}]\2", text[start:end])
        text = text[:start] + piece + text[end:]
    return text


def _wrong(text: str, start: int, end: int, why: str, fix: str = "") -> UserError:
    hint = ""
    if fix and fix != text:
        with suppress(UserError):
            hint = f"; did you mean {str(parse(fix))!r}?"
    what = text[start:end].strip() or "the end"
    start += len(text[start:end]) - len(text[start:end].lstrip())
    return UserError(f"allocation_mode={text!r}, column {start + 1}, {what}: {why}{hint}")


def settings(allocation: Allocation) -> dict[str, str | int]:
    """Return the keys of a run's config that an allocation decides, and their values.

    Raises:
      UserError: it has what no run has.
    """
    servers = [part for part in allocation.parts if not part.trains]
    trainers = [part for part in allocation.parts if part.trains]
    if len(servers) > 1 or len(trainers) > 1:
        more = [str(part) for part in (servers[1:] or trainers[1:])]
        raise UserError(
            f"allocation_mode={allocation} has {more[0]} beside the first: a run has one kind of "
            "server, and one trainer, which has critic and reference too; leave it out"
        )
    found: dict[str, str | int] = {}
    for part in servers:
        if "p" in part.sizes:
            raise UserError(
                f"allocation_mode={allocation}: {part} has servers of {part.sizes['p']} stages, "
                f"and there are none here; write t{part.each} for a server of {part.each} GPUs"
            )
        found |= {"fleet.engine": part.backend, "fleet.num_servers": part.sizes.get("d", 1)}
        found |= {"fleet.tensor_parallel": part.each}
    for part in trainers:
        experts = part.sizes.get("e", 1)
        mesh = {**part.sizes, "f": part.sizes.get("f", 1) // experts}
        axes = [f"{MEANINGS[x]}:{mesh[x]}" for x in "dfetc" if x in part.sizes and mesh[x] > 1]
        found |= {"trainer": part.backend, "train.mesh": ",".join(axes) or "fsdp:1"}
        if part.backend == "torch" and part.gpus > 1:  # whose processes have one each
            found["cluster.processes"] = part.gpus
    if not servers:
        found["fleet.num_servers"] = 0
    return found


def place(allocation: Allocation, hosts: Mapping[str, Sequence[int]]) -> tuple[Placed, ...]:
    """Deal the GPUs of hosts to the parts, in order; a server or a tensor group is on one host.

    Those larger than a host have whole hosts.

    Args:
      hosts: name → ids of its GPUs.

    Raises:
      UserError: there are too few, with the arithmetic.
    """
    free = {host: list(ids) for host, ids in hosts.items()}
    largest, placed = max(map(len, free.values()), default=0), []
    owned: dict[str, list[tuple[str, int]]] = {}

    def too_few(part: Part, each: int, index: int) -> UserError:
        there = ", ".join(f"{h}: {len(ids)}" for h, ids in hosts.items()) or "none"
        return UserError(
            f"allocation_mode={allocation} needs {allocation.gpus} GPUs; {part} has "
            f"{part.gpus // each} × {each}, of which {index} found {each} together, and there are "
            f"{there}; use fewer, or more hosts"
        )

    for part in allocation.parts:
        taken = list(owned.get(part.on, ()))
        sharing = [p for p in allocation.parts if p is part or (p.on and p.on == part.name)]
        each = lcm(*(p.each for p in sharing))  # those on the same GPUs cut them each in its way
        for index in range(0 if part.on else part.gpus // each):
            need = each
            while need:
                least = min(need, largest)
                host = next((h for h, ids in free.items() if len(ids) >= max(least, 1)), "")
                if not host or (need > largest and need % largest):
                    raise too_few(part, each, index)
                taken += [(host, gpu) for gpu in free[host][:least]]
                free[host] = free[host][least:]
                need -= least
        owned[part.name or str(part)] = taken
        cut = [tuple(taken[i : i + part.each]) for i in range(0, part.gpus, part.each)]
        together = [len({host for host, _ in group}) == 1 for group in cut]
        if part.each <= largest and not all(together):
            raise too_few(part, part.each, sum(together))
        groups = [tuple(taken)] if part.trains else cut
        placed += [Placed(part, i, group) for i, group in enumerate(groups)]
    return tuple(placed)
