"""AReaL's keys: what each is where a file has none, and what means the same here.

The rows are in areal_keys.yaml; here is what becomes of values that do not stay as they are, by
all that the file, `f`, has. docs/from_areal.md is written from the rows.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from rlx.areal import areal_allocation
from rlx.base import UserError
from rlx.config import default
from rlx.model.lora_config import LORA_TARGETS
from rlx.rollout import data

NOTHING = object()  # as a value: no key is set, and nothing is lost
LOST = object()  # no key is set, and something is lost
COUNTED = {"openai/gsm8k": 7473}  # rows for training of sets on the hub
_FILTER = "actor.rejection_sampling"


class ArealLoader(yaml.SafeLoader):
    """YAML as AReaL has it: 1e-5 is a number, and a key stands once in a block."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        """Return a block without those that it merges; YAMLError for a key that stands twice."""
        node = super().compose_mapping_node(anchor)
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for key in keys[1:]:
            if key.value in [other.value for other in keys[: keys.index(key)]]:
                raise yaml.MarkedYAMLError(None, None, f"{key.value!r} twice", key.start_mark)
        return node


_FLOAT = re.compile(r"[-+]?\d[\d_]*(\.[\d_]*)?[eE][-+]?\d+")
ArealLoader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, [*"-+0123456789"])
TABLE: dict[str, Any] = yaml.load(Path(__file__).with_suffix(".yaml").read_text(), ArealLoader)


class ArealRow(NamedTuple):
    """A key of AReaL's, its default, and the key here that it sets."""

    key: str
    default: Any
    to: str
    says: str = ""
    value: Any = None  # name in VALUES, table of values ("*": any other), [constant], None as it is
    when: str = ""  # one of `ArealFile.facts` that must hold, or `not` one

    def __call__(self, f: "ArealFile") -> Any:
        """Return the value here, NOTHING or LOST."""
        v = f[self.key]
        _, negated, fact = self.when.rpartition("not ")
        if fact and (fact in f.facts) == bool(negated):
            return NOTHING
        if isinstance(self.value, dict):
            return self.value.get(v, self.value.get("*", v))
        if isinstance(self.value, list):
            return self.value[0]
        return VALUES[self.value](v, f) if self.value else self.default if v is None else v


ROWS = [ArealRow(key, *row) for key, row in TABLE["plain"].items()]
ROWS += [ArealRow(**row) for row in TABLE["rows"]]
DEFAULTS: dict[str, Any] = {row.key: row.default for row in ROWS} | TABLE["read"]


class ArealFile:
    """The values of a file.

    Attributes:
      given: dotted key, as the newest release calls it → value. names: → the key as written.
      facts: what holds of it. prompt, answer: most tokens of each.
      notes: key → what whoever uses the config must know, found on the way.
    """

    def __init__(self, values: Mapping[str, Any], names: Mapping[str, str],
                 first: Mapping[str, Any] | None = None):  # fmt: skip
        self.given, self.names, self._defaults = values, names, DEFAULTS | dict(first or {})
        self.notes: dict[str, str] = {}
        rl, allocated = self["train_dataset.type"] == "rl", self["allocation_mode"] or ""
        roles = (("rollout", "actor"), ("actor", "rollout"))
        together = any(self[f"{role}.scheduling_strategy.target"] == other for role, other in roles)
        sglang = "sglang" in f"{allocated}{self['rollout.backend']}"
        gsm8k = "gsm8k" in f"{self['train_dataset.path']}{self['valid_dataset.path']}"
        facts = {
            "rl": rl, "gsm8k": rl and gsm8k, "sft gsm8k": not rl and gsm8k, "first": bool(first),
            "data": "train_dataset" in self, "local": self["scheduler.type"] in (None, "local"),
            "sglang": sglang, "vllm": not sglang, "lora": self["actor.use_lora"],
            "together": together or "|" in allocated.replace("|ffn", ""),
            "agents": "rollout.agent" in self or "workflow" in self,
            "kl": "ref" in self and self["actor.kl_ctl"],
            "recovers": self["recover.mode"] not in ("disabled", "off", False),  # YAML's off
            "overlong": self["actor.overlong_reward_penalty"], "filter": _FILTER in self,
            "critic": "critic" in self, "teacher": "teacher" in self,
            "subproc": self["rollout.agent.mode"] == "subproc",
        }  # fmt: skip
        self.facts = {name for name, holds in facts.items() if holds}
        self.prompt: int = self["train_dataset.max_length"] or default().data.max_prompt_tokens
        self.answer: int = self["gconfig.max_new_tokens"] if rl else self.prompt

    def __getitem__(self, key: str) -> Any:
        return self.given[key] if key in self.given else self._defaults[key]

    def __contains__(self, block: str) -> bool:
        """Whether a block, or a key, is there and not null."""
        is_set = self.given.get(block) is not None
        return is_set or any(key.startswith(f"{block}.") for key in self.given)

    def source(self, block: str) -> str:
        """Return a data set's name as data.train has it."""
        path, split = self[f"{block}.path"] or "", self[f"{block}.split"]
        path = "openai/gsm8k" if path == "gsm8k" else path
        if Path(path).exists() or not re.fullmatch(r"[\w-][\w.-]*/[\w-]+", path):
            return path
        return f"{path}:main:{split}" if "gsm8k" in path else f"{path}:{split}"

    def rows(self) -> int:
        """Return how many rows there are to train on; UserError where they cannot be read."""
        path, split = self["train_dataset.path"], self["train_dataset.split"]
        count = COUNTED.get(path) if split == "train" else None
        return count or len(data.load(self.source("train_dataset"), "", ""))


def _steps(epochs: int, f: ArealFile) -> Any:
    most, batch = f["total_train_steps"], f["train_dataset.batch_size"] or 1
    if "data" not in f.facts or not epochs:
        return most or NOTHING
    try:
        rows = f.rows()
    except UserError as error:
        if most:
            return most
        what = f"total_train_epochs={epochs} needs the number of rows in train_dataset.path"
        raise UserError(f"{what} ({error}); or give total_train_steps") from None
    words = f"{epochs} × ⌊{rows} rows / {batch}⌋ steps, with rows that are too long"
    f.notes["total_train_epochs"] = words
    return min(max(epochs * (rows // batch), 1), most or 10**9)


def _warmup(share: float, f: ArealFile) -> int:
    steps = _steps(f["total_train_epochs"], f)
    updates = f["actor.ppo_n_minibatches"] if "rl" in f.facts else 1
    return 0 if steps is NOTHING else int(share * steps) * updates


def _preset(kind: str, f: ArealFile) -> str:
    if kind not in (kinds := ("rl", "sft", "rw", "dpo")):
        raise UserError(f"train_dataset.type={kind!r} is none of {', '.join(kinds)}")
    presets = {"rl": "ppo" if "critic" in f.facts else "grpo", "rw": "reward_model"}
    return f["actor.loss_type"] if f["actor.loss_type"] == "ipo" else presets.get(kind, kind)


def _decoupled(enabled: bool, f: ArealFile) -> bool:
    if enabled and "filter" not in f.facts:
        f.notes[_FILTER] = "null: no filter, no weight (w = 1), as there; before, upper=5 was usual"
        if f["actor.m2_threshold"]:
            f.notes[_FILTER] += ". M2PO has the weight here all the same, without a bound"
            return True
    return enabled and "filter" in f.facts


def _allocation(text: str, f: ArealFile) -> Any:
    if text in ("manual", "heuristic") or (not text and f["allocation_mode"]):
        return LOST if text else NOTHING
    parts = [part for role in ("rollout", "actor") if ":" in (part := f[f"{role}.backend"] or "")]
    text = text or ("|" if "together" in f.facts else "+").join(parts)
    if not text:
        return NOTHING
    text, changes = areal_allocation.translate(text)
    if changes:
        f.notes["allocation_mode"] = "; ".join(changes)
    return text


def _targets(value: list[str] | str, f: ArealFile) -> Any:
    names = [value] if isinstance(value, str) else value
    targets = [target for name in names for target in TABLE["targets"].get(name, (name,))]
    return tuple(dict.fromkeys(targets)) or LORA_TARGETS


def _writers(path: Any, f: ArealFile) -> tuple[str, ...]:
    on = {name: f[f"stats_logger.{name}.mode"] != "disabled" for name in ("wandb", "trackio")}
    return tuple(name for name, enabled in ({"tensorboard": bool(path)} | on).items() if enabled)


def _workflow(path: str, f: ArealFile) -> Any:
    if not path or path.endswith(("._OnlineAgent", ".RLVRWorkflow")):
        return NOTHING
    return LOST if path.startswith("areal.") else ":".join(path.rsplit(".", 1))


VALUES: dict[str, Callable[[Any, ArealFile], Any]] = {
    "adv_level": lambda v, f: (v or "none") if "actor.adv_norm" in f else "none",
    "allocation": _allocation,
    "answer": lambda v, f: f.answer,
    "backend": lambda v, f: _allocation("", f),
    "batch": lambda v, f: v or f["train_dataset.batch_size"],
    "buckets": lambda v, f: NOTHING if f.prompt + f.answer <= 32768 else (
        *default().train.row_buckets, f.prompt + f.answer),
    "consumed": lambda v, f: NOTHING if f.given.get("rollout.consumer_batch_size") in (
        None, f["train_dataset.batch_size"]) else LOST,
    "decoupled": _decoupled,
    "eps_clip": lambda v, f: f["actor.eps_clip"] if v is None else v,
    "first_step": lambda v, f: 2 if {"recovers", "first"} <= f.facts else 0,
    "given": lambda v, f: v or NOTHING,
    "nodes": lambda v, f: LOST if (f.given.get("cluster.n_nodes") or 1) > 1 else NOTHING,
    "online": lambda v, f: v if v == "online" else NOTHING,
    "preset": _preset,
    "prompt": lambda v, f: f.prompt,
    "proximal": lambda v, f: (
        "loglinear" if v and f["actor.prox_logp_method"] == "loglinear" else
        "recompute" if v or f["actor.recompute_logprob"] else "behaviour"),
    "publish": lambda v, f: "path" if v == "disk" or "local" in f.facts else "stream",
    "recover": lambda v, f: v or 0 if "recovers" in f.facts else 0,
    "reward_level": lambda v, f: (v or "none") if "actor.reward_norm" in f else "none",
    "share": lambda v, f: LOST if "together" in f.facts else v,
    "steps": _steps,
    "stops": lambda v, f: (v,) if isinstance(v, str) else tuple(v or ()),
    "targets": _targets,
    "temperature": lambda v, f: NOTHING if v == f["gconfig.temperature"] else LOST,
    "tokens": lambda v, f: max(int(v or 0) % 10**12, f.prompt + f.answer),
    "top_k": lambda v, f: v if 0 < v < 10**6 else 0,
    "train": lambda v, f: f.source("train_dataset"),
    "valid": lambda v, f: f.source("valid_dataset") if v else "",
    "warmup": _warmup,
    "workflow": _workflow,
    "writers": _writers,
}  # fmt: skip
