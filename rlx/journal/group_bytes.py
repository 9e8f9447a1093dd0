"""Groups of trajectories as bytes: one object of JSON, then their arrays. No pickle."""

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from rlx.base import Group, Trajectory

_ARRAYS = {
    "tokens": np.int32,
    "loss_mask": np.bool_,
    "behaviour_logprobs": np.float32,
    "versions": np.int32,
    "turn_ids": np.int32,  # None in some trajectories, like the next one
    "reference_logprobs": np.float32,
    "kept_sizes": np.int32,
    "kept": np.uint8,  # as many as the sum of `kept_sizes`
}
_OTHERS = [field.name for field in fields(Trajectory) if field.name not in _ARRAYS]


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
    arrays = io.BytesIO(data)
    return [
        Group(
            group["group_id"],
            tuple(_trajectory(own, arrays) for own in group["trajectories"]),
            group["row"],
        )
        for group in json.loads(arrays.readline())
    ]


def _describe(group: Group) -> dict[str, Any]:
    trajectories = [
        {name: getattr(t, name) for name in _OTHERS}
        | {
            "reward": float(t.reward),
            "baseline": float(t.baseline),
            "info": {key: float(value) for key, value in t.info.items()},
            "size": len(t.tokens),
            "arrays": [name for name in _ARRAYS if getattr(t, name) is not None],
        }
        for t in group.trajectories
    ]
    return {"group_id": int(group.group_id), "row": {**group.row}, "trajectories": trajectories}


def _trajectory(own: Mapping[str, Any], arrays: io.BytesIO) -> Trajectory:
    found = {name: own[name] for name in _OTHERS if name in own}  # older rlx had fewer
    for name in own["arrays"]:
        count = int(found["kept_sizes"].sum()) if name == "kept" else own["size"]
        data = arrays.read(count * np.dtype(_ARRAYS[name]).itemsize)
        found[name] = np.frombuffer(data, _ARRAYS[name], count)
    found["turn_rewards"] = tuple(own["turn_rewards"])
    found["said"] = tuple(map(tuple, own["said"]))
    found["images"] = tuple(own.get("images", ()))
    return Trajectory(**found)
