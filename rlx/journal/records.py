"""Records of a journal ⇄ bytes: pure functions, which no damage to the bytes can mislead.

    "rlxj" | bytes of the payload | CRC-32 | number | payload: [kind, fields] as JSON, \\n, group
           |        4             |   4    |   8    |  the CRC-32 covers number and payload

Kinds are `start`, `admit`, `tokens`, `group`, `reject`, `fail`, `skip`, `state`, `take`, `weights`,
`evaluation` and `concurrency`. Readers ignore kinds that they do not know. A group of kind `tokens`
holds what several unfinished samples got, as one trajectory.
"""

import json
import struct
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from rlx.base import Group
from rlx.journal import group_bytes

_HEAD = struct.Struct("<4sIIQ")
_MAGIC = b"rlxj"
_LEVEL = 1  # of zlib: half the bytes of versions, masks and texts for little time


class Record(NamedTuple):
    """One event of a run."""

    number: int  # position among all records of the run, from 0; ascending
    kind: str
    fields: Mapping[str, Any]
    packed: bytes  # the compressed group of kinds `group` and `tokens`, else b""
    begin: int  # offset of its first byte in the scanned data
    end: int  # offset behind its last byte

    def group(self) -> Group:
        """Return the group of a record that has one."""
        return group_bytes.loads(zlib.decompress(self.packed))[0]


def encode(number: int, kind: str, fields: Mapping[str, Any], packed: bytes = b"") -> bytes:
    """Return a record's bytes; TypeError for fields that are not JSON."""
    payload = json.dumps([kind, fields]).encode() + b"\n" + packed
    return _HEAD.pack(_MAGIC, len(payload), _checksum(number, payload), number) + payload


def pack(group: Group) -> bytes:
    """Return a group's compressed bytes; TypeError for a row that is not JSON."""
    return zlib.compress(group_bytes.dumps([group]), _LEVEL)


def scan(data: bytes) -> Iterator[Record]:
    """Yield the records in `data` up to its end or the first damaged one."""
    begin = 0
    while begin + _HEAD.size <= len(data):
        magic, size, checksum, number = _HEAD.unpack_from(data, begin)
        end = begin + _HEAD.size + size
        payload = data[begin + _HEAD.size : end]
        if magic != _MAGIC or len(payload) != size or checksum != _checksum(number, payload):
            return
        text, _, packed = payload.partition(b"\n")
        kind, fields = json.loads(text)
        yield Record(number, kind, fields, packed, begin, end)
        begin = end


def _checksum(number: int, payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(number.to_bytes(8, "little")))
