"""Lossless binary patches between two weight files of the same size.

A step at an RL learning rate leaves most bf16 weights unchanged and moves the others by one unit in
the last place. A delta stores which 16-bit words of the file changed, as gaps between them, and the
integer differences. A float32 is two words, and the upper one rarely changes.

    file  = magic, format, words of a block, bytes of the files · blocks in order
    block = number of changes, gaps, signs (a bit each), magnitudes − 1 (low bytes, high bytes)

Gaps of 255 and more take several bytes. Streams are Huffman-coded where that makes them smaller.
All numbers are little-endian.
"""

import itertools
import os
import struct
import zlib
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np

BLOCK = 1 << 20  # words
MAX_BLOCK = 1 << 24  # largest that a reader accepts
_WORD = 2  # bytes
_MAGIC, _FORMAT = b"rlxdelta", 2
_HEAD = struct.Struct("<8sIIQ")  # magic, format, block size, file size
_CHANGES = struct.Struct("<II")  # number of changes, bytes of gaps
_STREAM = struct.Struct("<BI")  # 1 if deflated, bytes stored
_SAMPLE = 16 << 10  # bytes deflated first; the rest follows if they shrink enough
_WORTH = 0.97  # × the plain size

Path = str | os.PathLike


def encode(base: Path, new: Path, out: Path, limit: int) -> tuple[int, int] | None:
    """Write the patch from `base` to `new` to `out`; ValueError unless their sizes are the same.

    `out` exists, and is overwritten in place to keep its lock. Returns (bytes, CRC-32) of the
    patch; None if it would exceed `limit` bytes.
    """
    with open(base, "rb", buffering=0) as old, open(new, "rb", buffering=0) as now:
        size = os.fstat(now.fileno()).st_size
        if os.fstat(old.fileno()).st_size != size:
            raise ValueError("the two files have different sizes")
        head = _HEAD.pack(_MAGIC, _FORMAT, BLOCK, size)
        num_bytes = crc = 0
        with open(out, "r+b", buffering=1 << 20) as file:
            file.truncate(0)
            for data in itertools.chain([head], _blocks(old, now, size)):
                num_bytes += len(data)
                if num_bytes > limit:
                    return None
                file.write(data)
                crc = zlib.crc32(data, crc)
    return num_bytes, crc


def apply(base: Path, delta: Path, out: Path) -> int:
    """Write `base` with `delta` applied to the existing file `out`; return the result's CRC-32.

    The caller must compare the CRC-32: a delta can be applied to any base of its size.
    ValueError if it is damaged, or for a base of another size.
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


def _words(file: BinaryIO, count: int, buffer: bytearray) -> np.ndarray:
    """Read the next `count` bytes into `buffer`; return its words, the last one padded by 0."""
    words = -(-count // _WORD)
    buffer[count : words * _WORD] = bytes(words * _WORD - count)
    view, filled = memoryview(buffer)[:count], 0
    while filled < count:
        num_bytes = file.readinto(view[filled:])  # type: ignore[attr-defined]
        if not num_bytes:
            raise ValueError("the file is shorter than it was")
        filled += num_bytes
    return np.frombuffer(buffer, "<u2", words)


def _write(file: BinaryIO, data: memoryview) -> None:
    while data:
        data = data[file.write(data) :]


# Encoding.


def _blocks(old: BinaryIO, new: BinaryIO, size: int) -> Iterator[bytes]:
    """Yield the encoded blocks of the patch between two files of `size` bytes."""
    buffers = bytearray(_WORD * BLOCK), bytearray(_WORD * BLOCK)
    for start in range(0, size, _WORD * BLOCK):
        count = min(_WORD * BLOCK, size - start)
        yield _block(_words(old, count, buffers[0]), _words(new, count, buffers[1]))


def _block(before: np.ndarray, after: np.ndarray) -> bytes:
    positions = np.flatnonzero(before != after)
    if not positions.size:
        return _CHANGES.pack(0, 0)
    gaps = _gaps(positions)
    change = (after[positions] - before[positions]).view("<i2")
    negative = change < 0
    magnitude = np.where(negative, ~change, change - 1).view(np.uint8).reshape(-1, _WORD)
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
    """Encode [n] increasing positions as [≥ n] uint8: words skipped before each; 255: continued."""
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
    compressor = zlib.compressobj(1, zlib.DEFLATED, -15, 9, strategy)
    return compressor.compress(data) + compressor.flush()


# Applying.


class _Reader:
    """Reader of a delta that never reads past the end."""

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
            raise ValueError(f"the delta is damaged: {len(data)} values instead of {count}")
        return np.frombuffer(data, np.uint8)

    def end(self) -> None:
        if self._left:
            raise ValueError(f"{self._left} bytes follow the delta")


def _applied(delta: _Reader, old: BinaryIO, size: int) -> Iterator[memoryview]:
    """Yield the new file's bytes in order; each part overwrites the one before."""
    magic, number, block, new_size = delta.unpack(_HEAD)
    if (magic, number) != (_MAGIC, _FORMAT) or not 0 < block <= MAX_BLOCK:
        raise ValueError("not a delta, or another format")
    if new_size != size:
        raise ValueError(f"the delta is for a file of {new_size} bytes, not {size}")
    buffer = bytearray(min(_WORD * block, size + 1))
    for start in range(0, size, _WORD * block):
        count = min(_WORD * block, size - start)
        _change(delta, _words(old, count, buffer))
        yield memoryview(buffer)[:count]
    delta.end()


def _change(delta: _Reader, values: np.ndarray) -> None:
    """Apply the next block to `values`, [≤ block] uint16, in place."""
    count, gap_bytes = delta.unpack(_CHANGES)
    if count > values.size or not count <= gap_bytes <= count + values.size // 255:
        raise ValueError(f"the delta is damaged: {count} changes of {values.size} words")
    if not count:
        if gap_bytes:
            raise ValueError("the delta is damaged: gaps without a change")
        return
    positions = _positions(delta.stream(gap_bytes), count, values.size)
    negative = np.unpackbits(delta.stream(-(-count // 8)), count=count).view(bool)
    planes = [delta.stream(count) for _ in range(_WORD)]
    magnitude = np.stack(planes, axis=1).view(values.dtype).reshape(-1)
    values[positions] += np.where(negative, ~magnitude, magnitude + 1).astype(values.dtype)


def _positions(gaps: np.ndarray, count: int, size: int) -> np.ndarray:
    """Invert `_gaps`: return [count] increasing positions, all below `size`."""
    ends = gaps != 255
    positions = np.cumsum(gaps + ends.astype(np.int64))[ends] - 1
    if not ends[-1] or positions.size != count or positions[-1] >= size:
        raise ValueError("the delta is damaged: its positions leave the block")
    return positions
