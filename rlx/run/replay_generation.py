"""Make the samples of a replayed run again with the JAX engine, and compare them bit for bit.

journal: prompts, tokens, versions ─▶ recordings ─┐
weights of each version, as replayed ─────────────┴▶ Regenerator ─▶ the same tokens?
"""

import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rlx.agents.named_workflow import RLVR_NAME
from rlx.base import Group, UserError
from rlx.engines.jax.regenerate import Recording, Regenerator
from rlx.fleet import adapter
from rlx.fleet.publish import write_weights
from rlx.fleet.requests import Request, Sampling
from rlx.fleet.sample import Completion
from rlx.rollout.executor import group_seed
from rlx.run.replay_run import Plan, Recorded, elsewhere
from rlx.run.room_options import RunOptions
from rlx.train.contract import State, Update
from rlx.train.train_options import lora_of

ROUNDING = {"float32": 1e-4, "bfloat16": 0.5}  # nats between logprobs of two machines, at most
_SEARCHED = 3  # samples of a step that differ, before no prefill is looked for


class Compared(NamedTuple):
    """A sample that was made again."""

    recording: Recording
    completion: Completion
    same: int  # tokens before the first that differs
    gaps: np.ndarray  # [same], |Δ logprob| of these tokens, nats

    @property
    def differs(self) -> bool:
        """Whether a token differs, or one of the two ended before the other."""
        return self.same < max(len(self.completion.tokens), len(self.recording.completion.tokens))

    def __str__(self) -> str:
        at, size = self.same, len(self.recording.completion.tokens)
        recorded, new = (
            f"{c.tokens[at]} (version {c.versions[at]}, logprob {c.logprobs[at]:.7g})"
            if at < len(c.tokens) else "no token"
            for c in (self.recording.completion, self.completion)
        )  # fmt: skip
        where = f"sample {self.recording.request.request_id} differs at token {at} of {size}"
        return f"{where}: recorded {recorded}, made {new}"


class Generation:
    """Compares the samples of a run with what the engine makes; UserError if it cannot."""

    def __init__(self, recorded: Recorded, plan: Plan, most: int, say: Callable[[str], None]):
        config = recorded.config(plan.last)
        for section, name, only in (("fleet", "engine", "jax"), ("rollout", "workflow", RLVR_NAME)):
            if (value := config[section][name]) != only:
                what = f"{section}.{name}={value}: --generation makes samples again for {only} only"
                raise UserError(f"{what}; leave it out")
        # `most` samples of a step are made again; `say` takes a line for the user.
        self._recorded, self._plan, self._most, self._say = recorded, plan, most, say
        self._files = tempfile.TemporaryDirectory(prefix="rlx-replay-")
        self._weights = dict[int, str]()  # version → safetensors file, or HF directory
        self._options: Mapping[str, Any] = {}  # of `_engine`
        self._engine: Regenerator
        self._bound = self._furthest = 0.0  # |Δ logprob| that is allowed, and the largest, nats
        self._elsewhere = ""  # how this machine differs from the run's; "": logprobs are equal
        self._counts = Counter[str]()

    def after(self, step: int, update: Update, state: State) -> bool:
        """Compare a step's samples, and keep the weights after it; return whether all are equal."""
        same = step < self._plan.first or self._compare(step, update.devices)
        self._keep(step, update, state)
        return same

    def end(self) -> str:
        """Remove the weights; return a line for the user."""
        self._files.cleanup()
        if self._options:
            self._engine.end()
        far = f"{self._furthest:.1g} nats at most ({self._elsewhere})"
        how = far if self._elsewhere else "bit for bit"
        return f"made again: {_counts_text(self._counts)}; logprobs compared {how}"

    def _keep(self, version: int, update: Update, state: State) -> None:
        """Keep a version's weights as its servers loaded them, and remove those too old."""
        config = self._recorded.config(version + 1)
        model, lora = self._recorded.model(config), lora_of(config.lora)
        path, parts = (Path(self._files.name, f"{name}.safetensors") for name in (version, "lora"))
        self._weights[version] = str(path)
        if version == 0 and not (config.fleet.addresses or config.fleet.join):
            self._weights[0] = str(model)  # local servers begin with it
        elif lora and config.fleet.publish == "adapter":
            write_weights(update.weights(state, adapters=True), parts)
            dtype = RunOptions.of(config).servers["dtype"]
            adapter.Base(model).write(parts, lora.scale, dtype, path)
        else:
            write_weights(update.weights(state), path)
        for old in [v for v in self._weights if v < version - config.rollout.max_staleness]:
            del self._weights[old]
            Path(self._files.name, f"{old}.safetensors").unlink(missing_ok=True)

    def _compare(self, step: int, devices: str) -> bool:
        """Compare and report the samples of a step; return whether all are as recorded."""
        samples, run_env = self._begin(step), self._recorded.start(step).get("environment", {})
        # The bits of a server depend on its own number of threads.
        threads = run_env.get("server_cores", run_env.get("compute_threads"))
        self._elsewhere = elsewhere({**run_env, "compute_threads": threads}, devices)
        self._bound = ROUNDING[self._options["dtype"]] if self._elsewhere else 0.0
        usable = [r for r in samples if min(r.completion.versions) in self._weights]
        results = list[Compared]()
        for result in self._again(usable[: self._most]):
            search = sum(r.differs for r in results) < _SEARCHED
            results.append(self._explained(result) if search else result)
        counts = count(results)
        counts["samples begun before the first weights of this replay"] = len(samples) - len(usable)
        self._counts += counts
        self._furthest = max([self._furthest, *(r.gaps.max(initial=0.0) for r in results)])
        wrong = [str(r) for r in results if r.differs]
        self._say("; ".join([f"step {step}: {_counts_text(counts)}", *wrong[:1]]))
        return not wrong

    def _begin(self, step: int) -> list[Recording]:
        """Return the samples of a step, after the engine has the options of its servers."""
        recorded, config = self._recorded, self._recorded.config(step)
        run, samples = RunOptions.of(config), list[Recording]()
        names = "slots", "max_model_len", "decode_steps", "dtype"
        options = {**{n: run.servers[n] for n in names}, "kv": config.fleet.kv_on_update}
        if options != self._options:
            self._engine = Regenerator(str(recorded.model(config)), **options)
            self._options = options
        for group in recorded.groups(step):
            attempt = recorded.batches.attempts.get(group.group_id, 0)
            seed = group_seed(config.seed, group.group_id, attempt)
            samples += recordings(group, replace(run.sampling, seed=seed))
        return samples

    def _again(self, samples: Sequence[Recording]) -> list[Compared]:
        completions = self._engine.make(samples, self._weights.__getitem__)
        return [
            compare_samples(*pair, self._bound) for pair in zip(samples, completions, strict=True)
        ]

    def _explained(self, result: Compared) -> Compared:
        """Find the prefills that explain a difference."""
        # A server that continues a sample computes its cache from its tokens, with other last bits.
        # The journal does not have the decode call, so each is tried, the latest first.
        while result.differs:
            prefills = result.recording.prefills
            first = result.same // result.recording.stride(self._options["decode_steps"])
            calls = [call for call in range(first, 0, -1) if call not in prefills]
            tries = [replace(result.recording, prefills=prefills | {call}) for call in calls]
            again = self._again(tries[: self._options["slots"]])
            best = max(again, key=lambda each: each.same, default=result)
            if best.same <= result.same:
                break
            result = best
        return result


def recordings(group: Group, sampling: Sampling) -> list[Recording]:
    """Return the samples of a group of single turns, which one request with `sampling` made."""
    samples = []
    for index, t in enumerate(group.trajectories):
        first = int(np.argmax(t.versions >= 0))
        request = Request(t.trajectory_id, t.tokens[:first], sampling, first_index=index)
        ids, logprobs, versions = t.tokens[first:], t.behaviour_logprobs[first:], t.versions[first:]
        samples.append(Recording(request, Completion(ids, logprobs, versions, t.stop_reason)))
    return samples


def compare_samples(recording: Recording, completion: Completion, bound: float) -> Compared:
    """Compare tokens, versions, and logprobs, which may differ by `bound` nats."""
    size = min(len(completion.tokens), len(recording.completion.tokens))
    gaps = np.abs(completion.logprobs[:size] - recording.completion.logprobs[:size])
    differs = completion.tokens[:size] != recording.completion.tokens[:size]
    differs |= (completion.versions[:size] != recording.completion.versions[:size]) | (gaps > bound)
    same = int(differs.argmax()) if differs.any() else size
    return Compared(recording, completion, same, gaps[:same])


def count(results: Sequence[Compared]) -> Counter[str]:
    """Return the numbers of a step by what they count."""
    return Counter({
        "samples": len(results),
        "tokens": sum(len(r.recording.completion.tokens) for r in results),
        "as recorded": sum(r.same for r in results),
        "samples with several versions": sum(
            len({*r.recording.completion.versions}) > 1 for r in results
        ),
        "samples continued after a prefill": sum(bool(r.recording.prefills) for r in results),
        "logprobs with other last bits": sum(np.count_nonzero(r.gaps) for r in results),
        "samples that differ": sum(r.differs for r in results),
    })  # fmt: skip


def _counts_text(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {what}" for what, number in counts.items() if number)
