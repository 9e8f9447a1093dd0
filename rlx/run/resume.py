"""Start a run in its directory, or resume its last checkpoint.

A directory with a complete checkpoint is resumed. Without one, the records of the same config are
removed and the run starts again. A run of another config is never changed.
"""

import json
import math
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from rlx.algorithms.algorithm import Algorithm
from rlx.base import Group, UserError, leaves, refuse
from rlx.journal.history import Recovered
from rlx.observe.environment import SAME
from rlx.observe.metrics import RECORDS, STARTS, forget
from rlx.observe.writers import BOARD_ID
from rlx.run.inputs import INITIAL
from rlx.run.room_options import as_json
from rlx.system import atomic_directory
from rlx.system.jsonl import has_step, read_json, read_jsonl, read_last, sweep, write_atomically
from rlx.train import checkpoint
from rlx.train.train_options import OptimizerOptions, rate_at

# Keys that may change while the run stays the same.
_FREE = (
    "total_steps", "checkpoint.", "cluster.", "eval.", "export.", "gate.", "observe.", "online.",
    "scheduler.", "fleet.publish_dir",
)  # fmt: skip

_DIRECTORIES = (  # in a workdir
    "adapter", "checkpoints", "code", "exports", "hf", INITIAL, "logs", "rollouts", "sessions",
    "tensorboard",
)  # fmt: skip


def prepare_workdir(config: ConfigDict, workdir: Path) -> list[str]:
    """Write config.json into the locked `workdir`; return messages. UserError for another run."""
    directories, files = ([workdir / name for name in names] for names in (_DIRECTORIES, RECORDS))
    wrong = [f"{path} is a file, not a directory" for path in directories if path.is_file()]
    wrong += [f"{path} is a directory, not a file" for path in files if path.is_dir()]
    if wrong:
        raise UserError(f"{wrong[0]}; move it away, or give another --workdir")
    for name in ("hf", "adapter", INITIAL):
        atomic_directory.sweep(workdir / name)
    for directory in (workdir, workdir / "rollouts"):
        sweep(directory)
    new = as_json(config)
    before = read_json(workdir / "config.json")
    changed = [text for text in differences(before, new) if not text.startswith(_FREE)]
    checkpoints = checkpoint.checkpoints(workdir / "checkpoints")
    off = config.checkpoint.recover_mode == "off"
    messages, resumed = list[str](), bool(checkpoints) and not off
    another_run = (changed or not before) and (workdir / "metrics.jsonl").exists()
    refuse((
        (off and any(checkpoint.verify(path) is None for path in checkpoints),
         f"{workdir} holds another run, with a checkpoint to resume, and "
         "checkpoint.recover_mode=off; remove that to resume it, or give a fresh --workdir"),
        (another_run and not resumed,
         f"{workdir} holds another run ({(changed or ['of an unknown config'])[0]}) and no "
         "checkpoint to resume; give a fresh --workdir, or its config to start again"),
    ))  # fmt: skip
    if not resumed and (checkpoints or any((workdir / name).exists() for name in RECORDS)):
        step = read_last(workdir / "metrics.jsonl").get("step", 0)
        forget(workdir, 0)
        shutil.rmtree(workdir / "tensorboard", ignore_errors=True)
        for name in (*RECORDS, "skipped.jsonl", "timeline.json", "report.html", BOARD_ID):
            (workdir / name).unlink(missing_ok=True)
        reason = f"the last attempt ended after step {step} without a checkpoint"
        messages.append(f"starting again: {reason}")
        for path in checkpoints:  # all are damaged
            messages.append(f"{path} is damaged and is kept as {checkpoint.set_aside(path).name}")
    if not resumed and (off or changed or not before):
        shutil.rmtree(workdir / "journal", ignore_errors=True)
    if not (resumed and before):  # a resumed run keeps the config of its first steps
        text = json.dumps(new, indent=2, sort_keys=True)
        write_atomically(workdir / "config.json", text.encode())
    return messages


def finished_steps(config: ConfigDict, workdir: Path) -> int:
    """Return the steps of a complete run in `workdir`; 0 if there is none."""
    *_, last = {}, *read_jsonl(workdir / STARTS)
    done = last["step"] if last.get("ended") == "finished" and has_step(last) else 0
    steps = map(checkpoint.step_of, checkpoint.checkpoints(workdir / "checkpoints"))
    auto = config.checkpoint.recover_mode == "auto"
    return done if auto and done >= config.total_steps and done in steps else 0


def usable(groups: Iterable[Group], algorithm: Algorithm, most: int) -> list[Group]:
    """Return the groups of earlier starts that can be trained on, in microbatches of `most` tokens.

    Settings may have changed since they were made.
    """
    size = {"demonstrations": 1, "pairs": 2}.get(algorithm.data)
    needed = ["reference_logprobs"] * (algorithm.kl_anchor == "teacher")
    needed += ["turn_ids"] * (algorithm.peers == "turn")

    def fits(group: Group) -> bool:
        ts = group.trajectories
        sampled = group.oldest_version >= 0 or any(t.behaviour_logprobs.any() for t in ts)
        complete = all(getattr(t, name) is not None for t in ts for name in needed)
        empty = not any(t.loss_mask.any() for t in ts)
        kind = sampled or empty if size is None else not sampled and len(ts) == size
        lengths = [len(t.tokens) for t in ts]
        longest = sum(lengths) if size == 2 else max(lengths)  # a pair shares a row
        return complete and kind and longest <= most

    return list(filter(fits, groups))


def continuation(recovery: Recovered, last: Mapping[str, Any], counts: Mapping[str, int]) -> str:
    """Return the steps and prompts that a run repeats, and the samples that it continues.

    `last` is the record of the last step after the checkpoint; `counts` are from `Unfinished`.
    """
    host, groups = recovery.host, len(recovery.groups)
    step, steps = host["step"], max(0, last.get("step", host["step"]) - host["step"])
    prompts = len(host["pending"]) - counts["prompts"]
    if steps and isinstance(admitted := last.get("admitted"), int):
        prompts += max(0, admitted - host["admitted"])
    more = f"; the journal had {groups} finished group{'s' * (groups != 1)}" * bool(groups)
    if counts["samples"]:
        more += f"; continued: {counts['tokens']} tokens of {counts['samples']} samples"
    if counts["repeated_tokens"]:
        more += f"; {counts['repeated_tokens']} tokens are made again"
    repeated = f"repeated: {steps} step{'s' * (steps != 1)}, {prompts} prompt{'s' * (prompts != 1)}"
    if not (steps or prompts or counts["repeated_tokens"]):
        repeated = "nothing is repeated"
    return f"resuming after step {step}; {repeated}{more}"


def setting_changes(before: Mapping[str, Any], now: Mapping[str, Any], step: int) -> Iterator[str]:
    """Yield messages about settings and learning rates that change after `step`."""
    if changed := list(differences(before, now)):
        yield f"settings change after step {step}: {'; '.join(changed)}"
        waited = before["critic"]["warmup_steps"]  # steps without an update of the policy
        done = max(0, step - waited) * before["train"]["minibatches"]
        last, same, new = _rate(before, done - 1), _rate(before, done), _rate(now, done)
        if not math.isclose(same, new, rel_tol=0.01):
            yield f"learning rate {last:.3g} at the last update, {new:.3g} at the next"


def _rate(config: Mapping[str, Any], update: int) -> float:
    steps = config["total_steps"] - config["critic"]["warmup_steps"]
    updates = steps * config["train"]["minibatches"]
    return float(rate_at(OptimizerOptions(**config["optimizer"]), updates, update, np))


def machine_warning(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Return a warning if a run resumes on another machine or layout; else ""."""
    changed = "; ".join(t for t in differences(before, now) if t.split(" ")[0] in SAME)
    what = "another machine or layout, so results will differ in the last bits"
    return f"{what}: {changed}" * bool(changed)


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yield `key old → new` for each key with different values."""
    new = dict(leaves(now))
    for key, old in leaves(before):
        if key in new and old != new[key]:
            yield f"{key} {old} → {new[key]}"
