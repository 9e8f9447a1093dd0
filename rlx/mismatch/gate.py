"""The gate of a run: no update before the servers' own tokens score the same in the trainer.

probe (executor's thread): a few prompts on every live server, with training's sampling
check (trainer's thread):  the trainer's scores of these tokens ─▶ a record, or what is wrong
"""

import asyncio
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from rlx.base import UserError
from rlx.fleet.client import Fleet
from rlx.fleet.sample import Completion
from rlx.mismatch import measure
from rlx.mismatch.diagnose import Case, Finding, advice, diagnose
from rlx.mismatch.measure import Report, Sample, Scorer
from rlx.model import hf
from rlx.model.params import Params
from rlx.rollout.executor import Executor
from rlx.run.inputs import Inputs, training_sampling

POLL_SECONDS = 0.2  # how long a waiting trainer is deaf to Ctrl-C
PRIORITY = 1 << 20  # above whatever training asks for: a probe does not wait for free slots


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """What the servers answered: address → a completion a prompt."""

    version: int
    answers: Mapping[str, Sequence[Completion]]
    seconds: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """`record` is a line of gate.jsonl; `error`, where there is one, has to end the run."""

    record: dict[str, Any]
    error: UserError | None


class Gate:
    """Asks the servers and compares their answers with the trainer.

    Args:
      config, inputs: of the run; the prompts are training rows, evenly spread.
      first, saved: HF directories of the run's first weights and of its last checkpoint, which need
        not exist: what a server may still have.
    """

    def __init__(self, config: ConfigDict, inputs: Inputs, first: Path, saved: Path):
        rows, count = inputs.train_rows, min(config.gate.prompts, len(inputs.train_rows))
        chosen = [rows[i * len(rows) // count] for i in range(count)]
        self._prompts = [np.array(inputs.workflow.prompt_ids(row), np.int32) for row in chosen]
        training = training_sampling(config)
        budget = min(config.gate.max_new_tokens, training.max_new_tokens)
        least = min(training.min_new_tokens, budget)
        self._sampling = dataclasses.replace(
            training, max_new_tokens=budget, min_new_tokens=least, stop=()
        )
        self._scorer = Scorer(
            inputs.model_config,
            temperature=training.temperature,
            row_length=measure.row_length(max(map(len, self._prompts)) + budget),
            compute_dtype=config.model.compute_dtype,
            chunk=config.model.logprob_chunk,
        )
        exact = config.model.compute_dtype == config.model.publish_dtype == "float32"
        self._tolerance = measure.tolerance(exact, config.gate.max_delta, config.gate.mean_delta)
        self._seed, self._dtype = config.seed, config.model.dtype
        self._earlier = {"the run's first weights": first, "the last checkpoint": saved}
        self._asked: Future[Probe] | None = None
        self._checked: frozenset[str] = frozenset()

    def newcomers(self, fleet: Fleet) -> frozenset[str]:
        """Return the addresses of live servers that no check has heard yet."""
        return fleet.live - self._checked

    def ask(self, executor: Executor, fleet: Fleet, version: int, publish: Future | None) -> None:
        """Begins to ask every live server, once `publish` has brought them `version`.

        They must get no other until `verdict` has them.
        """
        self._asked = executor.submit(self.probe(fleet, version, publish))

    @property
    def asked(self) -> bool:
        """Whether a check is under way."""
        return self._asked is not None

    def verdict(self, params: Params, stopping: Callable[[], bool]) -> Verdict | None:
        """Waits for the answers, and ends the check; None when `stopping` says so first.

        Args:
          params: the weights of the version that `ask` was for.
        """
        assert self._asked is not None, "ask comes first"
        while not self._asked.done():
            if stopping():
                return None
            wait([self._asked], POLL_SECONDS)
        asked, self._asked = self._asked, None
        return self.check(asked.result(), params)

    async def probe(self, fleet: Fleet, version: int, publish: Future | None = None) -> Probe:
        """One completion of each prompt from every live server."""
        if publish:
            await asyncio.wrap_future(publish)
        begun = time.monotonic()
        sampling = dataclasses.replace(self._sampling, seed=(self._seed + version) % (1 << 31))
        answers = await fleet.probe(self._prompts, sampling, priority=PRIORITY)
        return Probe(version, answers, time.monotonic() - begun)

    def check(self, probe: Probe, params: Params) -> Verdict:
        """Compares the answers with the scores by `params`, the weights of `probe.version`."""
        begun, servers, errors = time.monotonic(), {}, []
        self._checked |= frozenset(probe.answers)
        for address, completions in probe.answers.items():
            case = self._case(completions, probe.version, params)
            report = case.compare(case.score())
            findings = [] if report.ok or not report.tokens else diagnose(case, report)
            servers[address] = server_record(report, findings)
            if not report.ok:
                errors.append(_error(address, probe.version, report, findings))
        record = {
            "step": probe.version,
            "ok": not errors,
            "mean_delta": max(each["mean_delta"] for each in servers.values()),
            "max_delta": max(each["max_delta"] for each in servers.values()),
            "tokens": sum(each["tokens"] for each in servers.values()),
            "limits": dataclasses.asdict(self._tolerance),
            "probe_seconds": probe.seconds,
            "score_seconds": time.monotonic() - begun,
            "servers": servers,
        }
        return Verdict(record, errors[0] if errors else None)

    def _case(self, completions: Sequence[Completion], version: int, params: Params) -> Case:
        earlier = {
            name: lambda path=path: hf.load(path, self._dtype)[1]
            for name, path in self._earlier.items()
            if version and path.exists()
        }
        return Case(
            self._scorer,
            params,
            [Sample(p, c) for p, c in zip(self._prompts, completions, strict=True)],
            self._tolerance,
            top_p=self._sampling.top_p,
            top_k=self._sampling.top_k,
            earlier=earlier,
            version=version,
        )


def server_record(report: Report, findings: Sequence[Finding]) -> dict[str, Any]:
    """One server of a record."""
    return {
        "mean_delta": report.mean,
        "max_delta": report.max,
        "tokens": report.tokens,
        "bad": report.bad,
        "non_finite": report.non_finite,
        "first_bad": report.first_bad and dataclasses.asdict(report.first_bad),
        "causes": [
            {"cause": each.cause, "words": each.words, "exact": each.exact,
             "mean_delta": each.report.mean, "max_delta": each.report.max}
            for each in findings
        ],
    }  # fmt: skip


def sentence(record: Mapping[str, Any]) -> str:
    """What the user reads of a check that was passed."""
    servers = len(record["servers"])
    return (
        f"gate: {record['tokens']} tokens of {servers} server{'s' * (servers != 1)}, version "
        f"{record['step']}, score the same in the trainer: |Δ logprob| mean "
        f"{record['mean_delta']:.1e}, max {record['max_delta']:.1e}"
    )


def _error(address: str, version: int, report: Report, findings: Sequence[Finding]) -> UserError:
    if not report.tokens:
        return UserError(
            f"gate: {address} acknowledged version {version} and stamps its tokens with another; "
            "is another trainer using it? Restart it"
        )
    return UserError(
        f"gate: engine {address} and trainer disagree on version {version}: {report}; "
        f"{advice(findings)}; gate.jsonl has the numbers, gate.enabled=False goes on regardless"
    )
