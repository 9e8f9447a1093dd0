"""Read a GPU program that XLA compiled: its products, bytes and collectives, without a GPU.

The text is `compiled.as_text()` of an optimized, scheduled module. Loops count as often as they
run. A `Reading` says what a device computes, moves and receives; `Reading.seconds` is its roofline.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import takewhile
from math import prod
from typing import NamedTuple

import numpy as np

from rlx.doctor.gpu_cards import Card

_WIDTHS = {
    "pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f32": 4, "s32": 4,
    "u32": 4, "f64": 8, "s64": 8, "u64": 8,
}  # fmt: skip
_COLLECTIVE = re.compile(
    r"(all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(-start)?$"
)
_NO_KERNEL = frozenset((
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "call",
    "conditional", "after-all", "partition-id", "replica-id", "copy-done", "all-gather-done",
    "all-reduce-done", "reduce-scatter-done", "collective-permute-done", "async-done",
    "async-update", "fusion-done",
))  # fmt: skip
_SLICES = frozenset(("dynamic-slice", "slice", "gather"))
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # in place → operand with the new part
_WORKSPACE = re.compile(r", [su]8\[\d+\](\{0\})?\)$")  # of a library call: not read by others
PRODUCTS = 0.65  # share of a card's peak that large products reach


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    shape: str  # text of the result, such as `(bf16[4,8]{1,0}, s32[])`
    opcode: str
    operands: tuple[str, ...]  # names of the instructions it reads
    line: str  # the whole text, with attributes

    def attribute(self, pattern: str) -> str:
        """Return the first group of a pattern in the line; "" if it is not there."""
        found = re.search(pattern, self.line)
        return found[1] if found else ""

    @property
    def called(self) -> str:
        """Name of the computation that a fusion, call or loop runs."""
        return self.attribute(r"(?:body|calls|to_apply)=%?([\w.\-]+)")


Computation = Mapping[str, Instruction]
Module = Mapping[str, Computation]


@dataclass(frozen=True)
class Collective:
    """Collectives of one kind and shape at one place of the program."""

    kind: str
    shape: str
    place: str  # entry, or the loop, such as `loop × 27`
    times: int  # runs in one call of the program
    bytes: float  # that a device sends or receives in all of them
    covered: float  # FLOPs of products that run between start and end, in all of them
    cards: int  # network cards of a host that share the bytes; 0: a group is within a host

    def seconds(self, card: Card) -> float:
        """Return the seconds that it takes."""
        return self.bytes / (min(self.cards * card.network, card.link) if self.cards else card.link)

    def waiting(self, card: Card) -> float:
        """Return the seconds that no product hides."""
        return max(self.seconds(card) - self.covered / (PRODUCTS * card.flops), 0.0)

    def hidden(self, card: Card) -> float:
        """Return the bytes that travel while products run."""
        return self.bytes * (1.0 - self.waiting(card) / self.seconds(card)) if self.bytes else 0.0


@dataclass
class Reading:
    """The work of one device in a call of the program."""

    # (FLOPs, bytes) of a matrix product → runs; those computed again count too.
    products: Counter[tuple[float, float]] = field(default_factory=Counter)
    attention_flops: float = 0.0  # of cuDNN's attention, as of one segment a row
    bytes: float = 0.0  # read and written by kernels that are no products
    # (bytes, FLOPs and bytes of the products during it) of an asynchronous copy → runs
    copies: Counter[tuple[float, float, float]] = field(default_factory=Counter)
    kernels: int = 0  # runs of any
    calls: dict[str, int] = field(default_factory=dict)  # library kernel → runs
    collectives: list[Collective] = field(default_factory=list)

    @property
    def flops(self) -> float:
        """FLOPs of all products."""
        return sum(times * flops for (flops, _), times in self.products.items())

    @property
    def moved(self) -> float:
        """Bytes that all kernels except attention read and write."""
        products = sum(times * moved for (_, moved), times in self.products.items())
        return self.bytes + self.copied + products

    @property
    def copied(self) -> float:
        """Bytes of asynchronous copies, which take the bandwidth that products leave."""
        return sum(times * own for (own, _, _), times in self.copies.items())

    def seconds(self, card: Card, reach: "Reach") -> float:
        """Return the roofline time of the program on a card, kernel after kernel."""
        peak, bandwidth = card.flops * reach.products, card.bandwidth * reach.memory
        computing = self.attention_flops / (card.flops * reach.attention)
        for (flops, moved), times in self.products.items():
            computing += times * max(flops / peak, moved / bandwidth)
        for (own, flops, moved), times in self.copies.items():
            during = max(flops / peak, moved / bandwidth)
            computing += times * max((own + moved) / bandwidth - during, 0.0)
        return computing + self.bytes / bandwidth + self.waiting(card)

    def waiting(self, card: Card) -> float:
        """Return the seconds of collectives that no product hides."""
        return sum(each.waiting(card) for each in self.collectives)


class Reach(NamedTuple):
    """Shares of a card's peak that matrix products and attention reach, and of its bandwidth."""

    products: float
    attention: float
    memory: float


def read(text: str, per_host: int = 8, trips: Iterable[int] = ()) -> Reading:
    """Return what the `text` of an optimized, scheduled module does on hosts of `per_host` devices.

    `trips` are the runs of each loop whose number depends on data, in the program's order.
    """
    computations, entry = parse(text)
    out, found = Reading(), dict[tuple, Collective]()
    for each, times, place, own in _walk(computations, entry, 1, "entry", iter(trips)):
        flops, attends = _flops(computations, own, each), "__cudnn" in each.line
        out.attention_flops += times * flops * attends
        if target := each.attribute(r'custom_call_target="([^"]+)"'):
            out.calls[target] = out.calls.get(target, 0) + times
        if kind := _collective(each):
            one = _read_collective(computations, own, each, kind, times, place, per_host)
            key = one.kind, one.shape, one.place, one.covered / times, one.cards
            if old := found.get(key):
                sums = {n: getattr(one, n) + getattr(old, n) for n in ("times", "bytes", "covered")}
                one = replace(one, **sums)
            found[key] = one
        elif each.opcode not in _NO_KERNEL:
            out.kernels += times
            moved = _moved(computations, own, each)
            if flops and not attends:
                out.products[flops, moved] += times
            elif during := _during(computations, own, each):
                work = [[f(computations, own, x) for x in during] for f in (_flops, _moved)]
                out.copies[moved, sum(work[0]), sum(work[1])] += times
            elif not attends:
                out.bytes += times * moved
    out.collectives = sorted(found.values(), key=lambda c: -c.bytes)
    return out


def parse(text: str) -> tuple[dict[str, dict[str, Instruction]], str]:
    """Return the computations of a module by name, and the name of the entry."""
    computations: dict[str, dict[str, Instruction]] = {}
    entry, name = "", ""
    for line in text.splitlines():
        if head := re.match(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$", line):
            name = head[2]
            computations[name] = {}
            entry = name if head[1] else entry
        elif line.startswith("}"):
            name = ""
        elif name and (instruction := _instruction(line)):
            computations[name][instruction.name] = instruction
    return computations, entry


def _instruction(line: str) -> Instruction | None:
    head = re.match(r"^\s+(?:ROOT )?%?([\w.\-]+) = ", line)
    if not head:
        return None
    end = _closing(line, head.end()) if line[head.end()] == "(" else line.index(" ", head.end())
    rest = re.match(r"\s*([\w\-]+)\(", line[end:])
    if not rest:
        return None
    start = end + rest.end() - 1
    operands = re.findall(r"%([\w.\-]+)(?=[,)]|$)", line[start : _closing(line, start)])
    return Instruction(head[1], line[head.end() : end], rest[1], tuple(operands), line)


def _closing(line: str, start: int) -> int:
    """Return the place after the parenthesis that closes the one at `start`."""
    depth = 0
    for place in range(start, len(line)):
        depth += {"(": 1, ")": -1}.get(line[place], 0)
        if depth == 0:
            return place + 1
    return len(line)


def size(shape: str) -> int:
    """Return the bytes of a shape or a tuple of shapes."""
    arrays = re.findall(r"(\w+)\[([\d,]*)\]", shape)
    return sum(_WIDTHS.get(dtype, 0) * prod(_numbers(dims)) for dtype, dims in arrays)


def _numbers(text: str) -> list[int]:
    return [int(x) for x in re.findall(r"\d+", text)]


def _dims(shape: str) -> list[int]:
    found = re.search(r"\[([\d,]*)\]", shape)
    return _numbers(found[1]) if found else []


def _walk(
    computations: Module, name: str, times: int, place: str, trips: Iterator[int]
) -> Iterator[tuple[Instruction, int, str, Computation]]:
    """Yield every scheduled instruction with its number of runs, its place and its computation."""
    for instruction in computations[name].values():
        if instruction.opcode == "while":
            count = _trips(instruction, trips)
            inside = f"loop × {count}" if place == "entry" else f"{place} × {count}"
            yield from _walk(computations, instruction.called, times * count, inside, trips)
        elif instruction.opcode == "call":
            yield from _walk(computations, instruction.called, times, place, trips)
        else:
            yield instruction, times, place, computations[name]


def _trips(loop: Instruction, given: Iterator[int]) -> int:
    """Return how often a loop runs; where that depends on data, the next one given, or a bound."""
    known = loop.attribute(r'"known_trip_count":\{"n":"(\d+)"')
    if expected := known or loop.attribute(r"/trips_(\d+)/"):
        return int(expected)
    if count := next(given, 0):
        return count
    # Loops over the chunks of a batch stop early; each array that they walk has a row a chunk.
    rows = Counter(int(n) for n in re.findall(r"\w+\[(\d+),[\d,]+\]", loop.shape))
    return rows.most_common(1)[0][0] if rows else 1


def _flops(computations: Module, computation: Computation, one: Instruction) -> float:
    """Return the FLOPs of an instruction's products, those inside its fusion included."""
    if one.opcode in ("fusion", "fusion-start", "async-start"):
        inner = computations.get(one.called, {})
        return sum(_flops(computations, inner, each) for each in inner.values())
    if one.opcode == "dot" or "__cublas" in one.line:
        axes = one.attribute(r'lhs_contracting_dim(?:ension)?s"?[:=][\[{]([\d,"]*)[\]}]')
        left = _dims(computation[one.operands[0]].shape) if one.operands else []
        return 2.0 * prod(_dims(one.shape)) * prod(left[i] for i in _numbers(axes))
    if "__cudnn$fmha" in one.line:
        *batch, rows, keys = _numbers(one.attribute(r'"dimensions": \[([\d", ]*)\]'))
        width, window = _dims(one.shape)[-1], one.attribute(r'"sliding_window_length": ?"?(\d+)')
        seen = min(int(window or 0) or keys, keys)
        work = (2 * seen - seen**2 / rows) * rows  # twice what causal rows see
        products = 5 if "Backward" in one.line else 2
        return products * prod(batch) * work * width  # a causal half of 2 a product
    return 0.0


def _moved(computations: Module, computation: Computation, one: Instruction) -> float:
    """Return the bytes that a kernel reads and writes; slices of arrays count by the slice."""
    inner = computations.get(one.called, {}) if "fusion" in one.opcode else {}
    users: dict[str, list[tuple[Instruction, int]]] = {}  # with the place of the operand
    for each in reversed([*inner.values()]):
        for place, operand in enumerate(each.operands):
            through = users.get(each.name, []) if each.opcode == "bitcast" else [(each, place)]
            users.setdefault(operand, []).extend(through)
    given = {
        int(each.attribute(r"parameter\((\d+)\)") or 0): each
        for each in inner.values()
        if each.opcode == "parameter"
    }
    total = 0.0
    for index, name in enumerate(one.operands):
        whole = size(computation[name].shape) if name in computation else 0
        readers = users.get(given[index].name, []) if index in given else [(one, index)]
        if readers and all(not at and r.opcode in _SLICES | _UPDATES.keys() for r, at in readers):
            whole = sum(size(r.shape) for r, _ in readers if r.opcode in _SLICES)
        total += whole
    scope = inner or computation
    root = next((e for e in inner.values() if e.line.lstrip().startswith("ROOT")), one)
    written = [scope[x] for x in root.operands] if root.opcode == "tuple" else [root]
    return total + sum(_written(scope, each) for each in written)


def _written(scope: Computation, one: Instruction) -> int:
    """Return the bytes that an instruction writes; of an update in place, its part."""
    if one.opcode == "bitcast" and one.operands[0] in scope:
        return _written(scope, scope[one.operands[0]])
    new = one.operands[_UPDATES[one.opcode]] if one.opcode in _UPDATES else ""
    return size(scope[new].shape if new in scope else _WORKSPACE.sub(")", one.shape))


def _collective(one: Instruction) -> str:
    """Return the kind of a collective; "" for another instruction."""
    if one.opcode == "async-start":
        return "reduce-scatter" if "scatter" in one.called else ""
    return found[1] if (found := _COLLECTIVE.match(one.opcode)) else ""


def _read_collective(
    computations: Module, computation: Computation, one: Instruction, kind: str, times: int,
    place: str, per_host: int,
) -> Collective:  # fmt: skip
    results = re.findall(r"\w+\[[\d,]*\]", one.shape)
    operands = sum(size(computation[x].shape) for x in one.operands if x in computation)
    whole = {"reduce-scatter": operands, "all-reduce": 2 * operands}.get(kind, size(results[-1]))
    groups = _groups(one.line)
    members = max(map(len, groups), default=0)  # 0 for pairs, which send everything
    moved = whole * (1.0 - 1.0 / members) if members else whole
    covered = _covered(computations, computation).get(one.name, 0.0)
    hosts = [Counter(device // per_host for device in group) for group in groups]
    # Devices of a host that need the same bytes receive each of them once, by all of their cards.
    same = kind not in ("all-to-all", "collective-permute")
    cards = max((max(on.values()) if same else 1 for on in hosts if len(on) > 1), default=0)
    return Collective(kind, results[-1], place, times, times * moved, times * covered, cards)


def _covered(computations: Module, computation: Computation) -> dict[str, float]:
    """Return the FLOPs of products during each asynchronous collective.

    Collectives run one after the other, so those that are under way together share them.
    """
    found: dict[str, float] = {}
    under_way: list[str] = []
    for each in computation.values():
        if each.opcode.endswith("-start") and _collective(each):
            under_way.append(each.name)
            found[each.name] = 0.0
        elif each.opcode.endswith("-done"):
            under_way = [name for name in under_way if name not in each.operands]
        elif under_way and (flops := _flops(computations, computation, each)):
            for name in under_way:
                found[name] += flops / len(under_way)
    return found


def _during(computations: Module, computation: Computation, one: Instruction) -> list[Instruction]:
    """Return the products that run between the start and the end of an asynchronous instruction."""
    if not one.opcode.endswith("-start"):
        return []
    later = iter(computation.values())
    next(each for each in later if each.name == one.name)
    ends = [e for e in computation.values() if one.name in e.operands]
    between = takewhile(lambda e: e not in ends or not e.opcode.endswith("-done"), later)
    return [each for each in between if _flops(computations, computation, each)]


def _groups(line: str) -> list[list[int]]:
    """Return the devices of each replica group, in any of the forms in which XLA writes them."""
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
    if iota:
        devices = np.arange(prod(_numbers(iota[2]))).reshape(_numbers(iota[2]))
        if iota[3]:
            devices = devices.transpose(_numbers(iota[3]))
        return devices.reshape(_numbers(iota[1])).tolist()
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", line):
        axes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
        devices = np.arange(prod(map(int, axes.values()))).reshape([*map(int, axes.values())])
        grouped = [list(axes).index(name) for name in re.findall(r"'(\w+)'", mesh[2])]
        last = range(-len(grouped), 0)
        size = prod(devices.shape[axis] for axis in grouped)
        return np.moveaxis(devices, grouped, last).reshape(-1, size).tolist()
    listed = re.search(r"replica_groups=\{(\{.*?\})\}", line)
    return [_numbers(group) for group in re.findall(r"\{([\d,]*)\}", listed[1])] if listed else []
