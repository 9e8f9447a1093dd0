"""Groups of trajectories as files: arrays in .npz, the rest in .json. No pickle."""

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlx.base import Group, Trajectory

FORMAT = 2
_PER_TOKEN = {
    "tokens": np.int32,
    "loss_mask": np.bool_,
    "behaviour_logprobs": np.float32,
    "versions": np.int32,
}
_OPTIONAL = {"turn_ids": np.int32, "reference_logprobs": np.float32}  # of some trajectories


def write_groups(stem: Path, groups: Sequence[Group]) -> None:
    """Write groups to `{stem}.npz` and `{stem}.json`; TypeError for a row that is not JSON."""
    arrays, text = _disassemble(groups)
    with open(f"{stem}.npz", "wb") as file:
        np.savez(file, allow_pickle=False, **arrays)
    Path(f"{stem}.json").write_text(text, encoding="utf-8")


def dumps(groups: Sequence[Group]) -> bytes:
    """Return groups as bytes, for `loads`; TypeError for a row that is not JSON."""
    arrays, text = _disassemble(groups)
    file = io.BytesIO()
    np.savez(file, allow_pickle=False, text=np.frombuffer(text.encode(), np.uint8), **arrays)
    return file.getvalue()


def loads(data: bytes) -> list[Group]:
    """Return the groups in bytes of `dumps`, bit for bit."""
    with np.load(io.BytesIO(data), allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    return _assemble(arrays, json.loads(arrays.pop("text").tobytes()))


def _disassemble(groups: Sequence[Group]) -> tuple[dict[str, np.ndarray], str]:
    """Return the concatenated arrays of all trajectories, and the rest as JSON."""
    trajectories = [t for g in groups for t in g.trajectories]
    arrays = {
        name: np.concatenate(
            [np.zeros(0, dtype), *(np.asarray(getattr(t, name), dtype) for t in trajectories)]
        )
        for name, dtype in _PER_TOKEN.items()
    }
    for name, dtype in _OPTIONAL.items():
        there = [v for t in trajectories if (v := getattr(t, name)) is not None]
        arrays[name] = np.concatenate([np.zeros(0, dtype), *there]).astype(dtype)
    arrays["sizes"] = np.array([len(t.tokens) for t in trajectories], np.int64)
    described = {"format": FORMAT, "groups": [_describe_group(g) for g in groups]}
    return arrays, json.dumps(described)  # escapes lone surrogates, which are no UTF-8


def _describe_group(group: Group) -> dict:
    return {
        "group_id": int(group.group_id),
        "row": dict(group.row),
        "trajectories": [
            {
                "reward": float(t.reward),
                "baseline": float(t.baseline),
                "stop_reason": t.stop_reason,
                "trajectory_id": t.trajectory_id,
                "has": [name for name in _OPTIONAL if getattr(t, name) is not None],
                "agent": t.agent,
                "prompt": t.prompt,
                "completion": t.completion,
                "info": {key: float(value) for key, value in t.info.items()},
                "turn_rewards": list(t.turn_rewards),
                "said": [list(span) for span in t.said],
            }
            for t in group.trajectories
        ],
    }


def read_groups(stem: Path) -> list[Group]:
    """Return the groups of `write_groups(stem, groups)`; ValueError for another format version."""
    described = json.loads(Path(f"{stem}.json").read_text(encoding="utf-8"))
    if described["format"] != FORMAT:
        raise ValueError(f"{stem}.json has format {described['format']}, want {FORMAT}")
    with np.load(f"{stem}.npz", allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    return _assemble(arrays, described)


def _assemble(arrays: dict[str, np.ndarray], described: Mapping[str, Any]) -> list[Group]:
    ends = np.cumsum(arrays.pop("sizes"))
    optional = {name: arrays.pop(name) for name in _OPTIONAL}
    taken = dict.fromkeys(_OPTIONAL, 0)
    groups, index = [], 0
    for group in described["groups"]:
        trajectories = []
        for fields in group["trajectories"]:
            start, end = (ends[index - 1] if index else 0), ends[index]
            own: dict[str, Any] = {name: values[start:end] for name, values in arrays.items()}
            own["turn_rewards"] = tuple(fields.pop("turn_rewards", ()))
            own["said"] = tuple(map(tuple, fields.pop("said", ())))
            for name in fields.pop("has"):
                own[name] = optional[name][taken[name] : taken[name] + end - start]
                taken[name] += end - start
            trajectories.append(Trajectory(**own, **fields))
            index += 1
        groups.append(Group(group["group_id"], tuple(trajectories), group["row"]))
    return groups
