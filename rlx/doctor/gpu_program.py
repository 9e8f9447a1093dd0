"""Read a GPU program that XLA compiled: its products, bytes and collectives, without a GPU.

The text is `compiled.as_text()` of an optimized, scheduled module. Loops count as often as they
run. A `Reading` says what a device computes, moves and receives; `Reading.seconds` is its roofline.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
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


Computation = Mapping[str, "Instruction"]


@dataclass(frozen=True, eq=False)
class Instruction:
    """One line of a computation."""

    name: str
    shape: str  # text of the result, such as `(bf16[4,8]{1,0}, s32[])`
    opcode: str
    operands: tuple[str, ...]  # names of the instructions it reads
    line: str  # the whole text, with attributes
    home: Computation  # in which it is
    module: Mapping[str, Computation]  # all of the program's, by name

    def attribute(self, pattern: str) -> str:
        """Return the first group of a pattern in the line; "" if it is not there."""
        match = re.search(pattern, self.line)
        return match[1] if match else ""

    @property
    def called(self) -> Computation:
        """The computation that a fusion, call or loop runs; empty for others."""
        return self.module.get(self.attribute(r"(?:body|calls|to_apply)=%?([\w.\-]+)"), {})

    @property
    def collective(self) -> str:
        """The kind of a collective; "" for another instruction."""
        if self.opcode == "async-start":
            return "reduce-scatter" if self.attribute(r"calls=[%\w.\-]*(scatter)") else ""
        return match[1] if (match := _COLLECTIVE.match(self.opcode)) else ""

    @cached_property
    def flops(self) -> float:
        """The FLOPs of its products, those inside a fusion included."""
        if self.opcode in ("fusion", "fusion-start", "async-start"):
            return sum(each.flops for each in self.called.values())
        if self.opcode == "dot" or "__cublas" in self.line:
            axes = self.attribute(r'lhs_contracting_dim(?:ension)?s"?[:=][\[{]([\d,"]*)[\]}]')
            left = _dims(self.home[self.operands[0]].shape) if self.operands else []
            return 2.0 * prod(_dims(self.shape)) * prod(left[i] for i in _numbers(axes))
        if "__cudnn$fmha" in self.line:
            *batch, rows, keys = _numbers(self.attribute(r'"dimensions": \[([\d", ]*)\]'))
            window = self.attribute(r'"sliding_window_length": ?"?(\d+)')
            visible = min(int(window or 0) or keys, keys)
            work = (2 * visible - visible**2 / rows) * rows  # twice what causal rows see
            products = 5 if "Backward" in self.line else 2
            # A causal half of 2 a product.
            return products * prod(batch) * work * _dims(self.shape)[-1]
        return 0.0

    @cached_property
    def moved(self) -> float:
        """The bytes that a kernel reads and writes; slices of arrays count by the slice."""
        inner = [*self.called.values()] if "fusion" in self.opcode else []
        users: dict[str, list[tuple[Instruction, int]]] = {}  # with the place of the operand
        for each in reversed(inner):
            for place, operand in enumerate(each.operands):
                through = users.get(each.name, []) if each.opcode == "bitcast" else [(each, place)]
                users.setdefault(operand, []).extend(through)
        parameters = {
            int(each.attribute(r"parameter\((\d+)\)") or 0): each.name
            for each in inner if each.opcode == "parameter"
        }  # fmt: skip
        total = 0.0
        for index, name in enumerate(self.operands):
            nbytes = size(self.home[name].shape) if name in self.home else 0
            readers = users.get(parameters[index], []) if index in parameters else [(self, index)]
            if readers and all(not i and r.opcode in _SLICES | _UPDATES.keys() for r, i in readers):
                nbytes = sum(size(r.shape) for r, _ in readers if r.opcode in _SLICES)
            total += nbytes
        root = next((e for e in inner if e.line.lstrip().startswith("ROOT")), self)
        outputs = [root.home[x] for x in root.operands] if root.opcode == "tuple" else [root]
        return total + sum(each.written for each in outputs)

    @property
    def written(self) -> int:
        """The bytes that it writes; of an update in place, its part."""
        if self.opcode == "bitcast" and self.operands[0] in self.home:
            return self.home[self.operands[0]].written
        new = self.operands[_UPDATES[self.opcode]] if self.opcode in _UPDATES else ""
        return size(self.home[new].shape if new in self.home else _WORKSPACE.sub(")", self.shape))

    @cached_property
    def during(self) -> "list[Instruction]":
        """The products that run between the start and the end of an asynchronous instruction."""
        if not self.opcode.endswith("-start"):
            return []
        later = iter(self.home.values())
        next(each for each in later if each is self)
        ends = (e for e in self.home.values() if self.name in e.operands)
        end = next((e for e in ends if e.opcode.endswith("-done")), None)
        return [each for each in takewhile(lambda e: e is not end, later) if each.flops]


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
        return sum(times * nbytes for (nbytes, _, _), times in self.copies.items())

    def seconds(self, card: Card, reach: "Reach") -> float:
        """Return the roofline time of the program on a card, kernel after kernel."""
        peak, bandwidth = card.flops * reach.products, card.bandwidth * reach.memory
        computing = self.attention_flops / (card.flops * reach.attention)
        for (flops, moved), times in self.products.items():
            computing += times * max(flops / peak, moved / bandwidth)
        for (nbytes, flops, moved), times in self.copies.items():
            during = max(flops / peak, moved / bandwidth)
            computing += times * max((nbytes + moved) / bandwidth - during, 0.0)
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
    out, collectives = Reading(), dict[tuple, Collective]()
    for op, times, place in _walk(parse(text), 1, "entry", iter(trips)):
        attends = "__cudnn" in op.line
        out.attention_flops += times * op.flops * attends
        if target := op.attribute(r'custom_call_target="([^"]+)"'):
            out.calls[target] = out.calls.get(target, 0) + times
        if op.collective:
            new = _read_collective(op, times, place, per_host)
            key = new.kind, new.shape, new.place, new.covered / times, new.cards
            if old := collectives.get(key):
                sums = {n: getattr(new, n) + getattr(old, n) for n in ("times", "bytes", "covered")}
                new = replace(new, **sums)
            collectives[key] = new
        elif op.opcode not in _NO_KERNEL:
            out.kernels += times
            if op.flops and not attends:
                out.products[op.flops, op.moved] += times
            elif during := op.during:
                work = sum(x.flops for x in during), sum(x.moved for x in during)
                out.copies[op.moved, *work] += times
            elif not attends:
                out.bytes += times * op.moved
    out.collectives = sorted(collectives.values(), key=lambda c: -c.bytes)
    return out


def parse(text: str) -> Computation:
    """Return the entry computation of a module."""
    module, name, entry = dict[str, dict[str, Instruction]](), "", ""
    for line in text.splitlines():
        if head := re.match(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$", line):
            name = head[2]
            module[name] = {}
            entry = name if head[1] else entry
        elif line.startswith("}"):
            name = ""
        elif name and (head := re.match(r"^\s+(?:ROOT )?%?([\w.\-]+) = ", line)):
            begin = head.end()
            end = _closing(line, begin) if line[begin] == "(" else line.index(" ", begin)
            if rest := re.match(r"\s*([\w\-]+)\(", line[end:]):
                start = end + rest.end() - 1
                operands = re.findall(r"%([\w.\-]+)(?=[,)]|$)", line[start : _closing(line, start)])
                module[name][head[1]] = Instruction(
                    head[1], line[begin:end], rest[1], tuple(operands), line, module[name], module
                )
    return module[entry]


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
    match = re.search(r"\[([\d,]*)\]", shape)
    return _numbers(match[1]) if match else []


def _walk(
    computation: Computation, times: int, place: str, trips: Iterator[int]
) -> Iterator[tuple[Instruction, int, str]]:
    """Yield every scheduled instruction with its number of runs and its place."""
    for instruction in computation.values():
        if instruction.opcode == "while":
            count = _trips(instruction, trips)
            inside = f"loop × {count}" if place == "entry" else f"{place} × {count}"
            yield from _walk(instruction.called, times * count, inside, trips)
        elif instruction.opcode == "call":
            yield from _walk(instruction.called, times, place, trips)
        else:
            yield instruction, times, place


def _trips(loop: Instruction, trips: Iterator[int]) -> int:
    """Return how often a loop runs; where that depends on data, the next one given, or a bound."""
    exact = loop.attribute(r'"known_trip_count":\{"n":"(\d+)"')
    if expected := exact or loop.attribute(r"/trips_(\d+)/"):
        return int(expected)
    if count := next(trips, 0):
        return count
    # Loops over the chunks of a batch stop early; each array that they walk has a row a chunk.
    rows = Counter(int(n) for n in re.findall(r"\w+\[(\d+),[\d,]+\]", loop.shape))
    return rows.most_common(1)[0][0] if rows else 1


def _read_collective(op: Instruction, times: int, place: str, per_host: int) -> Collective:
    kind, home, results = op.collective, op.home, re.findall(r"\w+\[[\d,]*\]", op.shape)
    operands = sum(size(home[x].shape) for x in op.operands if x in home)
    nbytes = {"reduce-scatter": operands, "all-reduce": 2 * operands}.get(kind, size(results[-1]))
    groups = _groups(op.line)
    members = max(map(len, groups), default=0)  # 0 for pairs, which send everything
    moved = nbytes * (1.0 - 1.0 / members) if members else nbytes
    # Collectives run one after the other, so those that are under way together share products.
    sharing = Counter(x for each in home.values() if each.collective for x in each.during)
    covered = sum(x.flops / sharing[x] for x in op.during)
    hosts = [Counter(device // per_host for device in group) for group in groups]
    # Devices of a host that need the same bytes receive each of them once, by all of their cards.
    same = kind not in ("all-to-all", "collective-permute")
    cards = max((max(on.values()) if same else 1 for on in hosts if len(on) > 1), default=0)
    return Collective(kind, results[-1], place, times, times * moved, times * covered, cards)


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
