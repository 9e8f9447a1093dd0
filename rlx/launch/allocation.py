"""Read how many GPUs servers and trainer have, and assign them GPUs of hosts.

    vllm:d4t2+jax:f8t2            four servers of two GPUs each, and a trainer of 16: 24 GPUs
    vllm[gen]:d4|jax[train]:f4    servers and trainer on the same four; names are free
    vllm:d4+eval                  servers only

Letters: d copies (servers; a trainer's replicas), f fsdp, t tensor, c context, e experts (inside
f). An absent letter counts 1. `rlx.areal.areal_allocation` translates AReaL's strings.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import lcm, prod

from rlx.base import UserError

LETTERS = {"vllm": "dt", "jax": "dftce", "torch": "dftc"}  # of vLLM's servers, or of a trainer
SHARED_MEMORY = 0.4  # share of a GPU's memory for a server that shares the GPU with the trainer
Gpus = tuple[tuple[str, int], ...]  # of (host, id there)
AXES = {"f": "fsdp", "d": "replica", "e": "expert", "t": "tensor", "c": "context"}  # of train.mesh


@dataclass(frozen=True)
class Part:
    """Servers, or the trainer."""

    backend: str  # vllm | jax | torch
    trains: bool  # whether it is the trainer
    sizes: Mapping[str, int]  # letter → its size, if above 1
    name: str = ""

    @property
    def gpus(self) -> int:
        return prod(n for x, n in self.sizes.items() if x != "e")

    @property
    def each(self) -> int:
        """Number of GPUs that must share a host if they fit."""
        return self.sizes.get("t", 1)

    def __str__(self) -> str:
        first = "f" if self.trains else "d"  # is always written
        letters = [x for x in "dftce" if x in self.sizes or x == first]
        dims = "".join(f"{x}{self.sizes.get(x, 1)}" for x in letters)
        return f"{self.backend}{f'[{self.name}]' if self.name else ''}:{dims}"


@dataclass(frozen=True)
class Allocation:
    """Parts in written order: at most one of servers and one trainer."""

    parts: tuple[Part, ...]
    shared: bool = False  # whether both use the same GPUs
    evaluates: bool = False  # whether nothing is trained

    @property
    def gpus(self) -> int:
        """Number of GPUs of all parts; shared ones count once."""
        return self.parts[0].gpus if self.shared else sum(part.gpus for part in self.parts)

    def __str__(self) -> str:
        return ("|" if self.shared else "+").join(map(str, self.parts)) + "+eval" * self.evaluates


def parse(text: str) -> Allocation:
    """Parse an allocation; raise UserError if it is malformed or contradicts itself."""
    both, plus, last = text.rpartition("+")
    evaluates = bool(plus) and last.strip() == "eval"
    parts: list[Part] = []
    for piece in re.split(r"[+|]", both if evaluates else text):
        parts.append(_part(piece.strip(), served=any(not part.trains for part in parts)))
    if len(parts) > len({part.trains for part in parts}):
        problem = f"allocation_mode={text!r} has too many parts"
        remedy = "keep one kind of server and one trainer, which includes critic and reference"
        raise UserError(f"{problem}; {remedy}")
    shared = "|" in text
    if shared and parts[0].gpus != parts[1].gpus:
        problem = f"{parts[0]} has {parts[0].gpus} GPUs and {parts[1]} {parts[1].gpus}"
        remedy = "give both the same number, or write + for |"
        raise UserError(f"allocation_mode={text!r}: {problem}; {remedy}")
    return Allocation(tuple(parts), shared, evaluates)


def _part(text: str, served: bool) -> Part:
    match = re.fullmatch(r"(\w+)(?:\[(\w+)\])?:(.*)", text)
    if not match or match[1] not in LETTERS:
        problem = f"allocation_mode: {text!r} is not ENGINE:SIZES, such as vllm:d4t2"
        remedy = f"the engines are {', '.join(LETTERS)}, and `rlx areal` translates AReaL's"
        raise UserError(f"{problem}; {remedy}")
    backend, name, dims = match.groups(default="")
    # JAX serves and trains: the second part, or one with a trainer's letters, is the trainer.
    trains = backend == "torch" or (backend == "jax" and (served or bool(re.search("[fc]", dims))))
    sizes = read_sizes(text, dims, LETTERS[backend] if trains else "dt")
    if sizes.get("f", 1) % sizes.get("e", 1):
        problem = f"allocation_mode: e{sizes['e']} of {text!r} is inside f and does not divide it"
        raise UserError(f"{problem}; give e that divides f")
    return Part(backend, trains, sizes, name)


def read_sizes(part: str, dims: str, letters: str) -> dict[str, int]:
    """Return the sizes above 1 in `dims`, such as d4t2; UserError, with `part`, if invalid."""
    sizes = dict(re.findall(r"([a-z])([1-9]\d*)", dims))
    complete = "".join(letter + number for letter, number in sizes.items()) == dims
    if not sizes or not complete or not sizes.keys() <= set(letters):
        remedy = f"give each of {', '.join(letters)} at most once, with a number from 1"
        problem = f"allocation_mode: cannot read the sizes {dims!r} of {part!r}"
        raise UserError(f"{problem}; {remedy}, such as d4t2")
    return {letter: int(number) for letter, number in sizes.items() if number != "1"}


def settings(allocation: Allocation) -> dict[str, str | int]:
    """Return the config keys that an allocation sets, and their values."""
    values: dict[str, str | int] = {"fleet.num_servers": 0}
    for part in allocation.parts:
        if not part.trains:
            values |= {"fleet.engine": part.backend, "fleet.num_servers": part.sizes.get("d", 1)}
            values |= {"fleet.tensor_parallel": part.each}
            continue
        mesh = {**part.sizes, "f": part.sizes.get("f", 1) // part.sizes.get("e", 1)}
        axes = [f"{AXES[x]}:{mesh[x]}" for x in "dfetc" if x in part.sizes and mesh[x] > 1]
        values |= {"trainer": part.backend, "train.mesh": ",".join(axes) or "fsdp:1"}
        if part.backend == "torch" and part.gpus > 1:  # one process per GPU
            values["cluster.processes"] = part.gpus
    return values


def place(allocation: Allocation, hosts: Mapping[str, Sequence[int]]) -> list[tuple[Part, Gpus]]:
    """Return the GPUs of each server, and of the trainer; UserError if there are too few.

    The parts get those of hosts (name → ids) in order.
    """
    free = {host: list(ids) for host, ids in hosts.items()}
    largest = max(map(len, free.values()), default=0)  # larger parts get whole hosts
    placed, gpus = list[tuple[Part, Gpus]](), list[tuple[str, int]]()

    def too_few(part: Part, each: int, index: int) -> UserError:
        counts = ", ".join(f"{h}: {len(ids)}" for h, ids in hosts.items()) or "no host"
        return UserError(
            f"allocation_mode={allocation} needs {allocation.gpus} GPUs; {part} takes "
            f"{part.gpus // each} groups of {each} that share a host, and {index} of them fit on "
            f"{counts}; use fewer GPUs, or more hosts"
        )

    for part in allocation.parts:
        sharing = allocation.parts if allocation.shared else (part,)
        each = lcm(*(p.each for p in sharing))  # parts on the same GPUs group them differently
        if part is sharing[0]:
            gpus = []
            for index in range(part.gpus // each):
                need = each
                while need:
                    least = min(need, largest)
                    host = next((h for h, ids in free.items() if len(ids) >= max(least, 1)), "")
                    if not host or (need > largest and need % largest):
                        raise too_few(part, each, index)
                    gpus += [(host, gpu) for gpu in free[host][:least]]
                    free[host] = free[host][least:]
                    need -= least
        cut = [tuple(gpus[i : i + part.each]) for i in range(0, part.gpus, part.each)]
        fits = [len({host for host, _ in group}) == 1 for group in cut]
        if part.each <= largest and not all(fits):
            raise too_few(part, part.each, sum(fits))
        placed += [(part, group) for group in ([tuple(gpus)] if part.trains else cut)]
    return placed
