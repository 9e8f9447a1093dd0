"""Lossless binary patches between two weight files of one model; numpy and zlib only.

A step at an RL learning rate leaves most bf16 weights as they were and moves the others by one
unit in the last place. So a delta holds, block by block, where elements changed (the gaps between
them) and by how much (the difference of their bit patterns as integers), and nothing of the rest:

    file  = magic, format, block size, file size, [segment] · blocks of every segment, in order
    block = number of changes, gaps, signs (a bit each), magnitudes − 1 (a plane per byte)

A segment is a run of elements of one width, across tensors; gaps of 255 and more take several
bytes. Streams are Huffman-coded where that makes them smaller. All numbers are little-endian.
"""

import itertools
import json
import os
import struct
import zlib
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np

BLOCK = 1 << 20  # elements
MAX_BLOCK = 1 << 24  # that a reader takes
_WIDTHS = {"BF16": 2, "F16": 2, "I16": 2, "U16": 2, "F32": 4, "I32": 4, "U32": 4,
           "F64": 8, "I64": 8, "U64": 8}  # fmt: skip
_MAGIC, _FORMAT = b"rlxdelta", 1
_HEAD = struct.Struct("<8sIIQI")  # magic, format, block, bytes of the files, segments
_SEGMENT = struct.Struct("<QQI")  # first byte, elements, bytes of an element
_CHANGES = struct.Struct("<II")  # changed elements, bytes of their gaps
_STREAM = struct.Struct("<BI")  # whether deflated, bytes stored
_SAMPLE = 16 << 10  # bytes that decide whether a stream is deflated
_WORTH = 0.97  # of the plain size

Path = str | os.PathLike
Segment = tuple[int, int, int]  # first byte, elements, bytes of an element


def encode(base: Path, new: Path, out: Path, limit: int) -> tuple[int, int] | None:
    """Write to `out` the patch from `base` to `new`.

    Args:
      base, new: safetensors files with the same header: names, dtypes, shapes, order.
      out: an existing file, overwritten in place, so a lock on it stays.
      limit: bytes that the patch may have.

    Returns:
      (bytes, CRC-32) of the patch; None when it would exceed `limit`.

    Raises:
      ValueError: the files have different headers or sizes, or are not safetensors.
    """
    with open(base, "rb", buffering=0) as old, open(new, "rb", buffering=0) as now:
        size = os.fstat(now.fileno()).st_size
        header = _header(now, size)
        if os.fstat(old.fileno()).st_size != size or _read(old, len(header)) != header:
            raise ValueError("the two files hold different tensors")
        segments = _segments(header, size)
        head = _HEAD.pack(_MAGIC, _FORMAT, BLOCK, size, len(segments))
        parts = [head, *(_SEGMENT.pack(*segment) for segment in segments)]
        num_bytes = crc = 0
        with open(out, "r+b", buffering=1 << 20) as file:
            file.truncate(0)
            for data in itertools.chain(parts, _blocks(old, now, segments)):
                num_bytes += len(data)
                if num_bytes > limit:
                    return None
                file.write(data)
                crc = zlib.crc32(data, crc)
    return num_bytes, crc


def apply(base: Path, delta: Path, out: Path) -> int:
    """Write to `out` the file `base` with `delta` applied.

    The caller must compare the CRC-32: a delta can be applied to any base of its size.

    Args:
      out: an existing file, overwritten in place.

    Returns:
      CRC-32 of the result.

    Raises:
      ValueError: `delta` is damaged, or `base` has another size than it is for.
    """
    with (
        open(base, "rb", buffering=0) as old,
        open(delta, "rb") as file,
        open(out, "r+b", buffering=0) as new,
    ):
        new.truncate(0)
        crc = 0
        for part in _applied(_Reader(file), old, os.fstat(old.fileno()).st_size):
            crc = zlib.crc32(part, crc)
            _write(new, part)
        return crc


# The files.


def _header(file: BinaryIO, size: int) -> bytes:
    """Return the first bytes of a safetensors file, up to its data."""
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > size - 8:
        raise ValueError("not a safetensors file")
    return length.to_bytes(8, "little") + bytes(_read(file, length))


def _segments(header: bytes, size: int) -> list[Segment]:
    """Return the runs of elements of one width, which cover all bytes behind the header."""
    try:
        entries = json.loads(header[8:])
        tensors = sorted(
            (*entry["data_offsets"], _WIDTHS.get(entry["dtype"], 1))
            for name, entry in entries.items()
            if name != "__metadata__"
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"not a safetensors file: {error}") from error
    segments: list[Segment] = []
    position = 0
    for start, end, width in tensors:
        if start != position or end < start or (end - start) % width:
            raise ValueError(f"tensors do not fill the file: one at byte {start} of the data")
        position = end
        if start == end:
            continue
        first, count, before = segments[-1] if segments else (0, 0, 0)
        if before == width:
            segments[-1] = (first, count + (end - start) // width, width)
        else:
            segments.append((len(header) + start, (end - start) // width, width))
    if len(header) + position != size:
        raise ValueError("tensors do not fill the file")
    return segments


def _read(file: BinaryIO, count: int, buffer: bytearray | None = None) -> memoryview:
    """Return the next `count` bytes, in `buffer` if there is one."""
    view = memoryview(buffer if buffer is not None else bytearray(count))[:count]
    filled = 0
    while filled < count:
        got = file.readinto(view[filled:])  # type: ignore[attr-defined]
        if not got:
            raise ValueError("the file is shorter than it was")
        filled += got
    return view


def _write(file: BinaryIO, data: memoryview) -> None:
    while data:
        data = data[file.write(data) :]


# Encoding.


def _blocks(old: BinaryIO, new: BinaryIO, segments: list[Segment]) -> Iterator[bytes]:
    """Yield the encoded blocks; both files are read from the first segment on."""
    widest = max((width for _, _, width in segments), default=0)
    buffers = bytearray(widest * BLOCK), bytearray(widest * BLOCK)
    for _, count, width in segments:
        for first in range(0, count, BLOCK):
            length = width * min(BLOCK, count - first)
            yield _block(_read(old, length, buffers[0]), _read(new, length, buffers[1]), width)


def _block(old: memoryview, new: memoryview, width: int) -> bytes:
    before, after = np.frombuffer(old, f"<u{width}"), np.frombuffer(new, f"<u{width}")
    positions = np.flatnonzero(before != after)
    if not positions.size:
        return _CHANGES.pack(0, 0)
    gaps = _gaps(positions)
    change = (after[positions] - before[positions]).view(f"<i{width}")
    negative = change < 0
    magnitude = np.where(negative, ~change, change - 1).view(np.uint8).reshape(-1, width)
    planes = [np.ascontiguousarray(plane) for plane in magnitude.T]
    return b"".join(
        (
            _CHANGES.pack(positions.size, gaps.size),
            _stream(gaps, zlib.Z_HUFFMAN_ONLY),
            _stream(np.packbits(negative), zlib.Z_HUFFMAN_ONLY),
            *(_stream(plane, zlib.Z_RLE) for plane in planes),
        )
    )


def _gaps(positions: np.ndarray) -> np.ndarray:
    """Encode [n] increasing positions as [≥ n] uint8: elements skipped before each; 255: go on."""
    gaps = np.diff(positions, prepend=-1) - 1
    wide = np.flatnonzero(gaps >= 255)
    more, gaps[wide] = np.divmod(gaps[wide], 255)
    return np.insert(gaps.astype(np.uint8), np.repeat(wide, more), 255)


def _stream(values: np.ndarray, strategy: int) -> bytes:
    data = values.data
    packed = _deflated(data[:_SAMPLE], strategy)
    if len(packed) < _WORTH * min(len(data), _SAMPLE):
        packed = _deflated(data, strategy) if len(data) > _SAMPLE else packed
        return _STREAM.pack(1, len(packed)) + packed
    return _STREAM.pack(0, len(data)) + bytes(data)


def _deflated(data: memoryview, strategy: int) -> bytes:
    made = zlib.compressobj(1, zlib.DEFLATED, -15, 9, strategy)
    return made.compress(data) + made.flush()


# Applying.


class _Reader:
    """Reader of the delta's bytes, in order, that never reads past the end."""

    def __init__(self, file: BinaryIO):
        self._file, self._left = file, os.fstat(file.fileno()).st_size

    def take(self, count: int) -> bytes:
        if count > self._left:
            raise ValueError(f"the delta ends {count - self._left} bytes too early")
        self._left -= count
        data = self._file.read(count)
        if len(data) != count:
            raise ValueError("the delta is shorter than it was")
        return data

    def unpack(self, fields: struct.Struct) -> tuple:
        return fields.unpack(self.take(fields.size))

    def stream(self, count: int) -> np.ndarray:
        """Return the next stream, [count] uint8; never inflates to more."""
        packed, stored = self.unpack(_STREAM)
        data = self.take(stored)
        if packed == 1:
            inflate = zlib.decompressobj(-15)
            try:
                data = inflate.decompress(data, count + 1)
            except zlib.error as error:
                raise ValueError(f"the delta is damaged: {error}") from error
            if not inflate.eof or inflate.unused_data:
                raise ValueError("the delta is damaged: a stream does not end where it should")
        if packed > 1 or len(data) != count:
            raise ValueError(f"the delta is damaged: {len(data)} values where {count} belong")
        return np.frombuffer(data, np.uint8)

    def end(self) -> None:
        if self._left:
            raise ValueError(f"{self._left} bytes follow the delta")


def _applied(delta: _Reader, old: BinaryIO, size: int) -> Iterator[memoryview]:
    """Yield the new file's bytes in order; a part is overwritten by the next one."""
    magic, number, block, wanted, count = delta.unpack(_HEAD)
    if (magic, number) != (_MAGIC, _FORMAT) or not 0 < block <= MAX_BLOCK:
        raise ValueError("not a delta, or one of another format")
    if wanted != size:
        raise ValueError(f"the delta is for a file of {wanted} bytes, not {size}")
    segments = list(_SEGMENT.iter_unpack(delta.take(_SEGMENT.size * count)))
    buffer = bytearray(min(8 * block, max(size, 1)))
    position = 0
    for start, elements, width in segments:
        if width not in (1, 2, 4, 8) or not position <= start <= start + elements * width <= size:
            raise ValueError("the delta is damaged: a segment lies outside the file")
        yield from _copied(old, start - position, buffer)
        for first in range(0, elements, block):
            here = min(block, elements - first)
            data = _read(old, here * width, buffer)
            _change(delta, np.frombuffer(data, f"<u{width}"))
            yield data
        position = start + elements * width
    delta.end()
    yield from _copied(old, size - position, buffer)


def _copied(file: BinaryIO, count: int, buffer: bytearray) -> Iterator[memoryview]:
    while count:
        part = _read(file, min(count, len(buffer)), buffer)
        yield part
        count -= len(part)


def _change(delta: _Reader, values: np.ndarray) -> None:
    """Apply the next block to `values`, [≤ block] unsigned, in place."""
    count, gap_bytes = delta.unpack(_CHANGES)
    if count > values.size or not count <= gap_bytes <= count + values.size // 255:
        raise ValueError(f"the delta is damaged: {count} changes of {values.size} elements")
    if not count:
        if gap_bytes:
            raise ValueError("the delta is damaged: gaps without a change")
        return
    positions = _positions(delta.stream(gap_bytes), count, values.size)
    negative = np.unpackbits(delta.stream(-(-count // 8)), count=count).view(bool)
    planes = [delta.stream(count) for _ in range(values.itemsize)]
    magnitude = np.stack(planes, axis=1).view(values.dtype).reshape(-1)
    values[positions] += np.where(negative, ~magnitude, magnitude + 1).astype(values.dtype)


def _positions(gaps: np.ndarray, count: int, size: int) -> np.ndarray:
    """Invert `_gaps`: return [count] increasing positions, all below `size`."""
    ends = gaps != 255
    positions = np.cumsum(gaps + ends.astype(np.int64))[ends] - 1
    if not ends[-1] or positions.size != count or positions[-1] >= size:
        raise ValueError("the delta is damaged: its positions leave the block")
    return positions
