"""Groups of trajectories as bytes: one object of JSON, then their arrays. No pickle."""

import json
from collections.abc import Generator, Mapping, Sequence
from typing import Any, cast

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
    text, _, arrays = data.partition(b"\n")
    parts = _cut(arrays)
    next(parts)
    return [
        Group(
            group["group_id"],
            tuple(_trajectory(fields, parts) for fields in group["trajectories"]),
            group["row"],
        )
        for group in json.loads(text)
    ]


def _cut(data: bytes) -> Generator[Any, tuple[Any, int], None]:
    """Yield arrays in order; the caller sends the dtype and length of the next one."""
    place, array = 0, cast(Any, None)
    while True:
        dtype, size = yield array
        array = np.frombuffer(data, dtype, size, place)
        place += array.nbytes


def _describe(group: Group) -> dict[str, Any]:
    return {
        "group_id": int(group.group_id),
        "row": dict(group.row),
        "trajectories": [
            {
                "reward": float(t.reward),
                "baseline": float(t.baseline),
                "stop_reason": t.stop_reason,
                "trajectory_id": t.trajectory_id,
                "agent": t.agent,
                "prompt": t.prompt,
                "completion": t.completion,
                "info": {key: float(value) for key, value in t.info.items()},
                "turn_rewards": list(t.turn_rewards),
                "said": [list(span) for span in t.said],
                "size": len(t.tokens),
                "arrays": [name for name in _ARRAYS if getattr(t, name) is not None],
            }
            for t in group.trajectories
        ],
    }


def _trajectory(fields: Mapping[str, Any], parts: Any) -> Trajectory:
    own = dict(fields)
    size, names = own.pop("size"), own.pop("arrays")
    for name in names:
        count = int(own["kept_sizes"].sum()) if name == "kept" else size
        own[name] = parts.send((_ARRAYS[name], count))
    own["turn_rewards"] = tuple(own["turn_rewards"])
    own["said"] = tuple(map(tuple, own["said"]))
    return Trajectory(**own)
