"""Data sheets of GPUs, for XLA to compile for one that is not here, and for rooflines."""

import re
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path

from rlx.base import UserError, unknown

LARGEST_SHARE = 0.92  # of a GPU's memory that JAX can take
_SHEETS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def peak_flops(kind: str, dtype: str) -> float:
    """Return the FLOP/s of a GPU by its data sheet, float32 as TF32; 0: unknown."""
    flops = next((peak for name, peak in _SHEETS["peaks"].items() if name in kind), 0.0)
    return flops / 2 if dtype == "float32" else flops


@dataclass(frozen=True)
class Card:
    """A GPU."""

    kind: str  # device kind in the words of its driver
    capability: str  # compute capability, such as "9.0"
    cores: int  # streaming multiprocessors
    shared: int  # their shared memory, bytes
    lanes: int  # their float32 units
    clock: float  # GHz
    memory: int  # bytes
    cache: int  # bytes
    bandwidth: float  # of the memory, bytes/s
    link: float  # to the other GPUs of a host, bytes/s in one direction
    network: float = 50e9  # to other hosts, likewise
    peak: float = 0.0  # dense FLOP/s, where no data sheet has them

    @property
    def flops(self) -> float:
        """Dense peak in bfloat16, FLOP/s."""
        return self.peak or peak_flops(self.kind, "bfloat16")

    def target(self) -> str:
        """Return the card as text of XLA's GpuTargetConfigProto."""
        template = Path(__file__).with_name("gpu_target.txt").read_text(encoding="utf-8")
        major, minor = self.capability.split(".")
        extra = {"major": major, "minor": minor, "optin": self.shared - 1024}
        return template % (vars(self) | extra)


CARDS = {name: Card(**sheet) for name, sheet in _SHEETS["cards"].items()}
# For a run on CPUs, which has measured its products. Its own seconds replace the rest.
CPU = Card("CPU", "0.0", 1, 0, 0, 1.0, 1 << 34, 0, 1e10, 1e10, 1e10, 5e10)


def card_of(kind: str) -> Card | None:
    """Return the card whose name is a part of `kind`, a driver's name of a GPU; None: unknown."""
    card = next((card for name, card in CARDS.items() if name.upper() in kind), None)
    match = re.search(r"(\d+)GB", kind)  # some cards are sold with half of the memory
    return replace(card, memory=min(card.memory, int(match[1]) << 30)) if card and match else card


def parse(text: str) -> tuple[Card, int, int]:
    """Return the card, the number of hosts and of GPUs on each (8) of `h100:16`, `h100:2x4`."""
    name, _, count = text.partition(":")
    if name not in CARDS:
        raise unknown("GPU of --compile-for", name, CARDS)
    hosts, times, per_host = (count or "1").partition("x")
    counts = (hosts, per_host) if times else (hosts,)
    if not all(number.isdigit() and int(number) for number in counts):
        raise UserError(f"--compile-for={text}: not a number of GPUs; give h100:16 or h100:2x8")
    if times:
        return CARDS[name], int(hosts), int(per_host)
    total = int(hosts)
    if total > 8 and total % 8:
        problem = f"--compile-for={text}: {total} GPUs do not fill hosts of 8"
        raise UserError(f"{problem}; give HOSTSxGPUS, such as h100:3x4")
    return CARDS[name], max(total // 8, 1), min(total, 8)
