"""Data sheets of GPUs, for XLA to compile for one that is not here, and for rooflines."""

import re
from dataclasses import dataclass, replace
from typing import Any

from rlx.base import UserError, unknown

LARGEST_SHARE = 0.92  # of a GPU's memory that JAX can take
# By a part of a GPU's name, first match: dense bfloat16 FLOP/s by its data sheet.
PEAKS = {
    "H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "H800": 989e12, "H20": 148e12,
    "A100": 312e12, "A800": 312e12, "B200": 2250e12, "L40S": 362e12, "L4": 121e12, "4090": 165e12,
    "3090": 71e12,
}  # fmt: skip


def peak_flops(kind: str, dtype: str) -> float:
    """Return the FLOP/s of a GPU by its data sheet, float32 as TF32; 0: unknown."""
    found = next((peak for name, peak in PEAKS.items() if name in kind), 0.0)
    return found / 2 if dtype == "float32" else found


@dataclass(frozen=True)
class Card:
    """A GPU."""

    kind: str  # device kind in the words of its driver
    capability: tuple[int, int]  # compute capability
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
        major, minor = self.capability
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: {self.shared}
  shared_memory_per_block_optin: {self.shared - 1024}
  core_count: {self.cores} fpus_per_core: {self.lanes} clock_rate_ghz: {self.clock}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {self.bandwidth:.0f} l2_cache_size: {self.cache}
  device_memory_size: {self.memory}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "{self.kind}"
"""


_HOPPER: dict[str, Any] = {
    "capability": (9, 0), "shared": 233472, "lanes": 128, "clock": 1.98, "cache": 50 << 20,
}  # fmt: skip
CARDS = {
    "a100": Card("NVIDIA A100-SXM4-80GB", (8, 0), 108, 167936, 64, 1.41, 85_100_068_864, 40 << 20,
                 2.039e12, 300e9),
    "h100": Card("NVIDIA H100 80GB HBM3", cores=132, memory=84_942_979_072, bandwidth=3.352e12,
                 link=450e9, **_HOPPER),
    "h200": Card("NVIDIA H200 141GB HBM3e", cores=132, memory=151_397_597_184, bandwidth=4.8e12,
                 link=450e9, **_HOPPER),
    "h800": Card("NVIDIA H800", cores=132, memory=84_942_979_072, bandwidth=3.352e12, link=200e9,
                 **_HOPPER),
    "h20": Card("NVIDIA H20", cores=78, memory=102_625_181_696, bandwidth=4.0e12, link=450e9,
                **_HOPPER),
    "b200": Card("NVIDIA B200", (10, 0), 148, 233472, 128, 1.965, 191_514_411_008, 132_644_864,
                 7.672e12, 900e9),
}  # fmt: skip
# For a run on CPUs, which has measured its products. Its own seconds replace the rest.
CPU = Card("CPU", (0, 0), 1, 0, 0, 1.0, 1 << 34, 0, 1e10, 1e10, 1e10, 5e10)


def named(kind: str) -> Card | None:
    """Return the card by a part of a GPU's name in the words of its driver; None: unknown."""
    card = next((card for name, card in CARDS.items() if name.upper() in kind), None)
    own = re.search(r"(\d+)GB", kind)  # some cards are sold with half of the memory
    return replace(card, memory=min(card.memory, int(own[1]) << 30)) if card and own else card


def parse(text: str) -> tuple[Card, int, int]:
    """Return the card, the number of hosts and of GPUs on each, of `h100:16` or `h100:2x4`.

    Without "x" a host has 8 GPUs.
    """
    name, _, count = text.partition(":")
    if name not in CARDS:
        raise unknown("GPU of --compile-for", name, CARDS)
    hosts, times, each = (count or "1").partition("x")
    if not hosts.isdigit() or (times and not each.isdigit()) or not int(hosts):
        raise UserError(f"--compile-for={text}: not a number of GPUs; give h100:16 or h100:2x8")
    if times:
        return CARDS[name], int(hosts), int(each)
    total = int(hosts)
    if total > 8 and total % 8:
        raise UserError(
            f"--compile-for={text}: {total} GPUs do not fill hosts of 8; "
            "give HOSTSxGPUS, such as h100:3x4"
        )
    return CARDS[name], max(total // 8, 1), min(total, 8)
