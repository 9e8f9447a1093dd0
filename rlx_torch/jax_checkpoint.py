"""The state in a checkpoint of the trainer in JAX, as the one in PyTorch names and lays it out.

    params.layers.q[i], [in, out]    policy.model.model.layers.i.self_attn.q_proj.weight, [out, in]
    opt_state.0.mu.layers.q[i]       policy.moments.model.layers.….weight.exp_avg; nu: exp_avg_sq
    updates, opt_state.0.count       policy.updates, policy.moments.….weight.step
    params.layers.q_lora_a[i]        policy.model.model.layers.….q_proj.lora_A.default.weight
    reference.…, critic.params.…     reference.…, critic.model.…
    step, kl_coefficient             step, kl_coefficient

Read by tensorstore, one tensor at a time, without JAX.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rlx.base import UserError
from rlx.model import lora_config
from rlx.model import params as parameters
from rlx.model.lora_config import PREFIX, LoraConfig
from rlx.model.model_config import ModelConfig
from rlx.model.params import Row
from rlx.train.optimizer_options import MOMENTS


class _Place(NamedTuple):
    """Where one tensor is: leaf of the state, index in a stacked one, whether it is transposed.

    `more` are those of which HF's files have the rows below it, in one tensor with it.
    """

    leaf: str
    at: tuple[int, ...] = ()
    transposed: bool = False
    more: tuple["_Place", ...] = ()


class JaxCheckpoint(Mapping[str, Any]):
    """Tensors and numbers of a checkpoint by their names in the other trainer's; each access reads.

    Args:
      path: of the checkpoint. model: of what is trained, or has the adapters that are.
      lora: of these adapters.

    Raises:
      UserError: it is of another model, or of other adapters.
    """

    def __init__(self, path: Path, model: ModelConfig, lora: LoraConfig | None = None):
        import tensorstore

        self._open = tensorstore.open
        self._base = f"file://{Path(path).absolute()}/state/"
        found = json.loads((path / "state" / "_METADATA").read_text())["tree_metadata"].values()
        self._leaves = {leaf["key_metadata"][0]["key"] for leaf in found}
        self._places: dict[str, _Place] = {"step": _Place("step")}
        self._places["kl_coefficient"] = _Place("kl_coefficient")
        rows = lora_config.table(model, lora) if lora else parameters.table(model)
        self._add_learned("policy", "", rows)
        if "critic.updates" in self._leaves:
            valued = parameters.table(dataclasses.replace(model, value_head=True))
            self._add_learned("critic", "critic.", valued)
        if any(name.startswith("reference.") for name in self._leaves):
            self._add("reference.{}", "reference.", rows)
        known = {each.leaf for place in self._places.values() for each in (place, *place.more)}
        if strange := {name for name in self._leaves - known if not name.endswith(".count")}:
            raise UserError(
                f"checkpoint {path} has {min(strange)}, which a state of this model and config has "
                "not; give those that it was made with"
            )
        self._places = {n: place for n, place in self._places.items() if place.leaf in self._leaves}

    def _add_learned(self, name: str, prefix: str, rows: tuple[Row, ...]) -> None:
        self._places[f"{name}.updates"] = _Place(f"{prefix}updates")
        names = self._add(f"{name}.model.{{}}", f"{prefix}params.", rows)
        moments = [leaf.partition(".mu.") for leaf in self._leaves if leaf.startswith(prefix)]
        of_adam = {stem for stem, mu, _ in moments if mu and stem.startswith(f"{prefix}opt_state.")}
        for stem in of_adam:
            for ours, theirs in MOMENTS.items():
                self._add(f"{name}.moments.{{}}.{theirs}", f"{stem}.{ours}.", rows)
            for hf_name in names:
                self._places[f"{name}.moments.{hf_name}.step"] = _Place(f"{stem}.count")

    def _add(self, template: str, prefix: str, rows: tuple[Row, ...]) -> list[str]:
        """Add the tensors of one pytree of parameters, or of moments; return their names."""
        names = []
        for row in rows:
            for at, name in zip(row.places, row.names, strict=True):
                if name.startswith(PREFIX):  # as PEFT's files have it
                    name = name.removeprefix(PREFIX).replace(".weight", ".default.weight")
                place = _Place(prefix + ".".join(row.path), at, row.transposed)
                if row.begin:
                    first = self._places[template.format(name)]
                    place = first._replace(more=(*first.more, place))
                self._places[template.format(name)] = place
                names.append(name)
        return names

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's shape, without reading it."""
        place = self._places[name]
        shape = tuple(self._part(place).shape)
        rows = (self._part(each).shape[0] for each in place.more)
        return (shape[0] + sum(rows), *shape[1:]) if place.more else shape

    def _part(self, place: _Place) -> Any:
        store = {"driver": "ocdbt", "base": self._base, "path": f"{place.leaf}/"}
        found = self._open({"driver": "zarr", "kvstore": store}, read=True).result()
        found = found[place.at] if place.at else found
        return found.T if place.transposed else found

    def __getitem__(self, name: str) -> np.ndarray:
        place = self._places[name]
        parts = [self._part(each).read().result() for each in (place, *place.more)]
        found = np.asarray(parts[0] if len(parts) == 1 else np.concatenate(parts), order="C")
        return found.astype(np.float32) if name.endswith(".step") else found

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)
