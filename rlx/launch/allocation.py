"""Read which servers and which trainer have how many GPUs, and give them GPUs of hosts.

    vllm:d4t2+jax:f8t2            four servers of two GPUs each, and a trainer of 16: 24 GPUs
    vllm[gen]:d4|jax[train]:f4    servers and trainer on the same four; names are free
    vllm:d4+eval                  servers only

Letters: d copies (servers; a trainer's replicas), f fsdp, t tensor, c context, e experts (inside
f). A letter that is absent counts 1. `rlx.areal.areal_allocation` translates AReaL's strings.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import lcm, prod

from rlx.base import UserError

LETTERS = {"vllm": "dt", "jax": "dftce", "torch": "dftc"}  # of an engine's trainer, or of servers
MEANINGS = {"f": "fsdp", "d": "replica", "e": "expert", "t": "tensor", "c": "context"}


@dataclass(frozen=True)
class Part:
    """Servers, or the trainer.

    Attributes:
      backend: vllm | jax | torch. trains: whether it is the trainer.
      sizes: letter → how many, of those above 1.
    """

    backend: str
    trains: bool
    sizes: Mapping[str, int]
    name: str = ""

    @property
    def gpus(self) -> int:
        """How many GPUs it runs on."""
        return prod(n for x, n in self.sizes.items() if x != "e")

    @property
    def each(self) -> int:
        """How many of them must be on one host where they fit: a server's, or a tensor group."""
        return self.sizes.get("t", 1)

    def __str__(self) -> str:
        first = "f" if self.trains else "d"  # is always written
        letters = [x for x in "dftce" if x in self.sizes or x == first]
        dims = "".join(f"{x}{self.sizes.get(x, 1)}" for x in letters)
        return f"{self.backend}{f'[{self.name}]' if self.name else ''}:{dims}"


@dataclass(frozen=True)
class Allocation:
    """Parts in the order they were written, at most one of servers and one trainer.

    Attributes:
      shared: whether both are on the same GPUs. evaluates: whether nothing is trained.
    """

    parts: tuple[Part, ...]
    shared: bool = False
    evaluates: bool = False

    @property
    def gpus(self) -> int:
        """How many GPUs all parts have; shared ones count once."""
        return self.parts[0].gpus if self.shared else sum(part.gpus for part in self.parts)

    def __str__(self) -> str:
        return ("|" if self.shared else "+").join(map(str, self.parts)) + "+eval" * self.evaluates


@dataclass(frozen=True)
class Placed:
    """One server, or one process group of the trainer's that stays together, and its GPUs."""

    part: Part
    index: int
    gpus: tuple[tuple[str, int], ...]  # (host, id there)


def parse(text: str) -> Allocation:
    """Return what an allocation says.

    Raises:
      UserError: it cannot be read, or contradicts itself.
    """
    both, plus, last = text.rpartition("+")
    evaluates = bool(plus) and last.strip() == "eval"
    parts: list[Part] = []
    for piece in re.split(r"[+|]", both if evaluates else text):
        parts.append(_part(piece.strip(), served=any(not part.trains for part in parts)))
    if len(parts) > len({part.trains for part in parts}):
        raise UserError(
            f"allocation_mode={text!r} has too many parts; a run has one kind of server, and one "
            "trainer, which has critic and reference too; leave the others out"
        )
    shared = "|" in text
    if shared and parts[0].gpus != parts[1].gpus:
        raise UserError(
            f"allocation_mode={text!r}: {parts[0]} has {parts[0].gpus} GPUs and {parts[1]} "
            f"{parts[1].gpus}; on the same GPUs both need as many"
        )
    return Allocation(tuple(parts), shared, evaluates)


def _part(text: str, served: bool) -> Part:
    match = re.fullmatch(r"(\w+)(?:\[(\w+)\])?:(.*)", text)
    if not match or match[1] not in LETTERS:
        raise UserError(
            f"allocation_mode: {text!r} is not ENGINE:SIZES, such as vllm:d4t2; the engines are "
            f"{', '.join(LETTERS)}, and `rlx areal` translates AReaL's"
        )
    backend, name, dims = match.groups(default="")
    # JAX serves and trains: the second part, or one with a trainer's letters, is the trainer.
    trains = backend == "torch" or (backend == "jax" and (served or bool(re.search("[fc]", dims))))
    sizes = read_sizes(text, dims, LETTERS[backend] if trains else "dt")
    if sizes.get("f", 1) % sizes.get("e", 1):
        raise UserError(
            f"allocation_mode: e{sizes['e']} of {text!r} is inside f and does not divide it; "
            "give e that divides f"
        )
    return Part(backend, trains, sizes, name)


def read_sizes(part: str, dims: str, letters: str) -> dict[str, int]:
    """Return the sizes above 1 of a text such as d4t2, of a part that errors show.

    Raises:
      UserError: it is another text, or has another letter, a letter twice, or a size of 0.
    """
    found = dict(re.findall(r"([a-z])([1-9]\d*)", dims))
    whole = "".join(letter + number for letter, number in found.items()) == dims
    if not found or not whole or not found.keys() <= set(letters):
        raise UserError(
            f"allocation_mode: cannot read the sizes {dims!r} of {part!r}; give each of "
            f"{', '.join(letters)} at most once, with a number from 1, such as d4t2"
        )
    return {letter: int(number) for letter, number in found.items() if number != "1"}


def settings(allocation: Allocation) -> dict[str, str | int]:
    """Return the keys of a run's config that an allocation decides, and their values."""
    found: dict[str, str | int] = {"fleet.num_servers": 0}
    for part in allocation.parts:
        if not part.trains:
            found |= {"fleet.engine": part.backend, "fleet.num_servers": part.sizes.get("d", 1)}
            found |= {"fleet.tensor_parallel": part.each}
            continue
        mesh = {**part.sizes, "f": part.sizes.get("f", 1) // part.sizes.get("e", 1)}
        axes = [f"{MEANINGS[x]}:{mesh[x]}" for x in "dfetc" if x in part.sizes and mesh[x] > 1]
        found |= {"trainer": part.backend, "train.mesh": ",".join(axes) or "fsdp:1"}
        if part.backend == "torch" and part.gpus > 1:  # whose processes have one each
            found["cluster.processes"] = part.gpus
    return found


def place(allocation: Allocation, hosts: Mapping[str, Sequence[int]]) -> tuple[Placed, ...]:
    """Give GPUs of hosts to the parts, in order; a server or a tensor group is on one host.

    Those larger than a host have whole hosts.

    Args:
      hosts: name → ids of its GPUs.

    Raises:
      UserError: there are too few, with the arithmetic.
    """
    free = {host: list(ids) for host, ids in hosts.items()}
    largest, placed = max(map(len, free.values()), default=0), []
    taken: list[tuple[str, int]] = []

    def too_few(part: Part, each: int, index: int) -> UserError:
        there = ", ".join(f"{h}: {len(ids)}" for h, ids in hosts.items()) or "none"
        return UserError(
            f"allocation_mode={allocation} needs {allocation.gpus} GPUs; {part} has "
            f"{part.gpus // each} × {each}, of which {index} found {each} together, and there are "
            f"{there}; use fewer, or more hosts"
        )

    for part in allocation.parts:
        sharing = allocation.parts if allocation.shared else (part,)
        each = lcm(*(p.each for p in sharing))  # those on the same GPUs cut them each in its way
        if part is sharing[0]:
            taken = []
            for index in range(part.gpus // each):
                need = each
                while need:
                    least = min(need, largest)
                    host = next((h for h, ids in free.items() if len(ids) >= max(least, 1)), "")
                    if not host or (need > largest and need % largest):
                        raise too_few(part, each, index)
                    taken += [(host, gpu) for gpu in free[host][:least]]
                    free[host] = free[host][least:]
                    need -= least
        cut = [tuple(taken[i : i + part.each]) for i in range(0, part.gpus, part.each)]
        together = [len({host for host, _ in group}) == 1 for group in cut]
        if part.each <= largest and not all(together):
            raise too_few(part, part.each, sum(together))
        groups = [tuple(taken)] if part.trains else cut
        placed += [Placed(part, i, group) for i, group in enumerate(groups)]
    return tuple(placed)
