"""Format numbers and series as short text, and make any text safe for a terminal."""

import itertools
import math
import re
import unicodedata
from collections.abc import Sequence

BARS = "▁▂▃▄▅▆▇█"
_DECIMALS = ((1, 10), (2, 1.995), (3, 0.0995), (4, 0.00995), (5, 0))  # (digits, from this size)
_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ud800-\udfff\ufeff]"
)
_COLOURS = re.compile(r"\x1b\[[0-9;:]*m")


def duration(seconds: float | None) -> str:
    """Return `0.42 s`, `12 s`, `3:07`, `2:03:07`; `–` when unknown."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    if seconds < 9.995:
        return f"{max(seconds, 0):.2f} s"
    total = round(seconds)
    if total < 60:
        return f"{total} s"
    minutes, rest = divmod(total, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def number(value: float | None) -> str:
    """Return three or four significant digits: `0.0412`, `51.9`, `12,345`, `3.2M`; `–` if none."""
    if value is None or not math.isfinite(value):
        return "–"
    size = abs(value)
    if size >= 999_950:
        power = min(int(math.log10(size) / 3), 4)
        scaled = value / 1000**power
        if abs(scaled) >= 999.95 and power < 4:
            power, scaled = power + 1, scaled / 1000
        return f"{scaled:.{1 if abs(scaled) < 99.95 else 0}f}{'_kMGT'[power]}"
    if float(value).is_integer() or size >= 1000:
        return f"{value:,.0f}"
    if size < 5e-4:
        return f"{value:.1e}".replace("e-0", "e-")
    return f"{value:.{next(d for d, least in _DECIMALS if size >= least)}f}"


def size(num_bytes: float) -> str:
    """Return `512 kB`, `34 MB`, `1.6 GB`, `24 GB`: decimal units."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= 0.9995 * unit:
            value = num_bytes / unit
            return f"{value:.0f} {name}" if value >= 9.95 else f"{value:.1f} {name}"
    return f"{num_bytes:.0f} B"


def resample(values: Sequence[float], count: int) -> list[float]:
    """Return at most `count` values: means of equal consecutive parts of `values`."""
    if count <= 0 or len(values) <= count:
        return list(values)[: max(count, 0)]
    edges = [round(i * len(values) / count) for i in range(count + 1)]
    parts = [values[a:b] for a, b in itertools.pairwise(edges)]
    return [sum(part) / len(part) for part in parts]


def sparkline(values: Sequence[float | None], width: int) -> str:
    """Return the finite values as a line of at most `width` bars, lowest to highest."""
    points = resample([v for v in values if v is not None and math.isfinite(v)], width)
    if not points:
        return ""
    low, high = min(points), max(points)
    if high <= low:
        return BARS[0] * len(points)
    return "".join(BARS[round((p - low) / (high - low) * (len(BARS) - 1))] for p in points)


def divide_cells(parts: Sequence[float], width: int) -> list[int]:
    """Return `width` cells divided in proportion to `parts`, by largest remainders."""
    total = sum(parts)
    if total <= 0:
        return [0] * len(parts)
    exact = [part / total * width for part in parts]
    cells = [int(value) for value in exact]
    by_rest = sorted(range(len(parts)), key=lambda i: cells[i] - exact[i])
    for i in by_rest[: width - sum(cells)]:
        cells[i] += 1
    return cells


def aligned(rows: Sequence[Sequence[str]], texts: int | None = None) -> list[str]:
    """Return rows of cells as lines with columns, all but the first `texts` aligned right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    texts = len(widths) if texts is None else texts
    aligns = [str.ljust] * texts + [str.rjust] * (len(widths) - texts)
    padded = [[a(c, w) for a, c, w in zip(aligns, row, widths, strict=True)] for row in rows]
    return ["  ".join(row).rstrip() for row in padded]


def plain(text: str) -> str:
    """Return `text` made safe for a terminal: colours dropped, control characters written out.

    Model outputs, rows, users' exceptions, names of directories and logs of servers reach the
    terminal; `ESC [2J` in one of them would clear it.
    """
    return visible(_COLOURS.sub("", text))


def visible(text: str) -> str:
    """Return `text` with control, zero-width and direction characters written as ⟨U+202E⟩."""
    return _HIDDEN.sub(lambda m: f"⟨{_character_name(m.group())}⟩", text.replace("\r\n", "\n"))


def _character_name(character: str) -> str:
    short = {"\x1b": "ESC", "\x07": "BEL", "\x00": "NUL", "\r": "CR"}.get(character)
    if short or unicodedata.category(character) == "Cc":
        return short or f"0x{ord(character):02x}"
    return f"U+{ord(character):04X}"
