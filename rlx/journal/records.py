"""Records of a journal, and groups ⇄ bytes: pure functions that no damage to the bytes misleads.

    "rlxj" | bytes of the payload | CRC-32 | number | payload: [kind, fields] as JSON, \\n, group
           |        4             |   4    |   8    |  the CRC-32 covers number and payload

Kinds are `start`, `admit`, `tokens`, `group`, `reject`, `fail`, `skip`, `state`, `take`, `weights`,
`evaluation` and `concurrency`. Readers ignore kinds that they do not know. A group of kind `tokens`
holds what several unfinished samples got, as one trajectory. Groups are one object of JSON, then
their arrays; no pickle.
"""

import io
import json
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np

from rlx.base import Group, Trajectory

_HEAD = struct.Struct("<4sIIQ")
_MAGIC = b"rlxj"
_LEVEL = 1  # of zlib: half the bytes of versions, masks and texts for little time
_ARRAYS = {  # some are None in some trajectories; `kept` has as many as the sum of `kept_sizes`
    "tokens": np.int32, "loss_mask": np.bool_, "behaviour_logprobs": np.float32,
    "versions": np.int32, "turn_ids": np.int32, "reference_logprobs": np.float32,
    "kept_sizes": np.int32, "kept": np.uint8,
}  # fmt: skip
_OTHERS = [field.name for field in fields(Trajectory) if field.name not in _ARRAYS]


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
        return loads(zlib.decompress(self.packed))[0]


def encode(number: int, kind: str, fields: Mapping[str, Any], packed: bytes = b"") -> bytes:
    """Return a record's bytes; TypeError for fields that are not JSON."""
    payload = json.dumps([kind, fields]).encode() + b"\n" + packed
    return _HEAD.pack(_MAGIC, len(payload), _checksum(number, payload), number) + payload


def pack(group: Group) -> bytes:
    """Return a group's compressed bytes; TypeError for a row that is not JSON."""
    return zlib.compress(dumps([group]), _LEVEL)


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


def dumps(groups: Sequence[Group]) -> bytes:
    """Return groups as bytes, for `loads`; TypeError for a row that is not JSON."""
    text = json.dumps([_describe(group) for group in groups])  # escapes lone surrogates
    arrays = [
        np.ascontiguousarray(value, dtype).tobytes()
        for group in groups
        for trajectory in group.trajectories
        for name, dtype in _ARRAYS.items()
        if (value := getattr(trajectory, name)) is not None
    ]
    return b"\n".join([text.encode(), b"".join(arrays)])


def loads(data: bytes) -> list[Group]:
    """Return the groups in bytes of `dumps`, bit for bit; their arrays are read-only."""
    arrays, groups = io.BytesIO(data), []
    for group in json.loads(arrays.readline()):
        trajectories = tuple(_trajectory(entry, arrays) for entry in group["trajectories"])
        groups.append(Group(group["group_id"], trajectories, group["row"]))
    return groups


def _describe(group: Group) -> dict[str, Any]:
    trajectories = []
    for t in group.trajectories:
        entry = {name: getattr(t, name) for name in _OTHERS}
        entry |= {"reward": float(t.reward), "baseline": float(t.baseline), "size": len(t.tokens)}
        entry["info"] = {key: float(value) for key, value in t.info.items()}
        entry["turn_rewards"] = [*map(float, t.turn_rewards)]  # a workflow's may be numpy's
        entry["said"] = [[*map(int, span)] for span in t.said]
        entry["arrays"] = [name for name in _ARRAYS if getattr(t, name) is not None]
        trajectories.append(entry)
    return {"group_id": int(group.group_id), "row": {**group.row}, "trajectories": trajectories}


def _trajectory(entry: Mapping[str, Any], arrays: io.BytesIO) -> Trajectory:
    values = {name: entry[name] for name in _OTHERS if name in entry}  # older rlx had fewer
    for name in entry["arrays"]:
        count = int(values["kept_sizes"].sum()) if name == "kept" else entry["size"]
        data = arrays.read(count * np.dtype(_ARRAYS[name]).itemsize)
        values[name] = np.frombuffer(data, _ARRAYS[name], count)
    values["turn_rewards"] = tuple(entry["turn_rewards"])
    values["said"] = tuple(map(tuple, entry["said"]))
    values["images"] = tuple(entry.get("images", ()))
    return Trajectory(**values)
