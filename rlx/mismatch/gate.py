"""The gate of a run: checks that servers' tokens score the same in the trainer before an update.

    executor's thread   probe: a few prompts on every live server, with training's sampling
    trainer's thread    check: the trainer's scores of these tokens ─▶ a record or an error

A server that joins or restarts gets no other requests before it passes. One that fails is refused
while another passes.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rlx.base import Group, UserError
from rlx.fleet.client import Fleet
from rlx.fleet.requests import Sampling
from rlx.fleet.sample import Completion
from rlx.mismatch.diagnose import Explanation, MismatchCase, advice, diagnose
from rlx.mismatch.measure import Comparison, EngineSample, Tolerance, TrainerScorer
from rlx.rollout.workflows import trajectory
from rlx.system.threads import LoopThread
from rlx.train.contract import State, Update

POLL_SECONDS = 0.2  # how often a waiting trainer checks for Ctrl-C
PRIORITY = 1 << 20  # above training's, so that a probe does not wait for free slots


@dataclass(eq=False)
class Gate:
    """Sends prompts to the servers and compares their answers with the trainer."""

    fleet: Fleet
    loop: LoopThread  # of the fleet
    prompts: Sequence[Sequence[int]]  # tokens; PromptTokens where there are images
    sampling: Sampling  # of training, with the gate's own budget
    scorer: TrainerScorer  # rows must have room for the longest prompt and completion
    tolerance: Tolerance
    seed: int  # a probe's seed is this plus its version
    earlier: Mapping[str, Path]  # name → HF directory, if any, of weights a server may still have
    dtype: str  # in which `earlier` weights are loaded
    write: Callable[[dict[str, Any]], None]  # takes a line of gate.jsonl
    say: Callable[[str], None]  # takes a line for the user
    _passed: frozenset[tuple[str, str]] = frozenset()  # items of `Fleet.instances`
    _refused: frozenset[tuple[str, str]] = frozenset()
    _asked: Future[tuple] | None = None

    @property
    def newcomers(self) -> bool:
        """Whether some live server has not been checked since it started."""
        return bool(self.fleet.instances.items() - self._passed - self._refused)

    @property
    def asked(self) -> bool:
        """Whether a check is under way."""
        return self._asked is not None

    def ask(self, version: int, publish: Future | None) -> None:
        """Begin to probe every live server, once `publish` has brought them `version`."""
        self._asked = self.loop.submit(self._probe(version, publish))

    async def _probe(
        self, version: int, publish: Future | None
    ) -> tuple[int, Mapping[str, str], Mapping[str, Sequence[Completion]], float]:
        """Return version, then address → instance and → completions by servers, and seconds."""
        if publish:
            await asyncio.wrap_future(publish)
        start, instances = time.monotonic(), self.fleet.instances
        if not self._passed:  # at the first check all get requests; a failure ends the run
            await self.fleet.admit(instances.items())
        sampling = replace(self.sampling, seed=(self.seed + version) % (1 << 31))
        try:
            answers = await self.fleet.probe(self.prompts, sampling, priority=PRIORITY)
        except ValueError as error:
            raise UserError(f"a server refuses config.sampling: {error}") from error
        answered = {address: instances.get(address, "") for address in answers}
        return version, answered, answers, time.monotonic() - start

    def verdict(self, update: Update, state: State, stopping: Callable[[], bool]) -> None:
        """Wait for the answers and record the check; return without it once `stopping` is true.

        `state` has the weights of the version that `ask` was for. Servers that pass get requests.
        UserError if a known server disagrees, or all do.
        """
        assert self._asked is not None, "ask comes first"
        while wait([self._asked], POLL_SECONDS).not_done:
            if stopping():
                return
        future, self._asked = self._asked, None
        version, instances, answers, seconds = future.result()
        start, servers, wrong = time.monotonic(), {}, {}
        cases = [self._case(result, version) for result in answers.values()]
        groups = [  # the servers' answers, for the trainer to score
            Group(k, tuple(trajectory(s.prompt, s.completion, 0.0, f"{k}.{i}")
                           for i, s in enumerate(case.samples)))
            for k, case in enumerate(cases)
        ]  # fmt: skip
        scores, params = iter(update.logprobs(state, groups)), None
        weights, model = update.weights, self.scorer.model
        for address, case in zip(answers, cases, strict=True):
            trainer_scores = [next(scores)[len(sample.prompt) :] for sample in case.samples]
            result, causes = case.compare(trainer_scores), []
            if result.tokens and not result.ok and not model.foreign:
                from rlx.model import hf

                params = params or hf.from_hf(weights(state).arrays(), model, self.dtype)
                causes = diagnose(replace(case, params=params), result)
            servers[address] = _server_record(result, causes)
            if not result.ok:
                wrong[address] = _error(address, version, result, causes)
        checked = frozenset(instances.items())
        bad = frozenset(pair for pair in checked if pair[0] in wrong)
        good = checked - bad
        known = self._passed or checked  # at the first check no server is a newcomer
        errors = [wrong[address] for address, _ in sorted(bad & known if good else bad)]
        self._passed, self._refused = self._passed | good, self._refused | bad
        record = {
            "step": version, "ok": not wrong,
            "mean_delta": max(each["mean_delta"] for each in servers.values()),
            "max_delta": max(each["max_delta"] for each in servers.values()),
            "tokens": sum(each["tokens"] for each in servers.values()),
            "limits": asdict(self.tolerance), "probe_seconds": seconds,
            "score_seconds": time.monotonic() - start, "servers": servers,
        }  # fmt: skip
        self.write(record)
        if errors:
            raise errors[0]
        self.loop.run(self.fleet.admit(self._passed))
        for name, why in wrong.items():
            self.say(f"{name} gets no requests: {why}")
        if not wrong:
            self.say(_sentence(record))

    def _case(self, completions: Sequence[Completion], version: int) -> MismatchCase:
        def load(path: Path) -> Any:
            from rlx.model import hf

            return hf.load(path, self.dtype)[1]

        paths = {name: path for name, path in self.earlier.items() if version and path.exists()}
        earlier = {name: partial(load, path) for name, path in paths.items()}
        samples = [EngineSample(p, c) for p, c in zip(self.prompts, completions, strict=True)]
        options: Any = {"earlier": earlier, "version": version}
        return MismatchCase(self.scorer, {}, samples, self.tolerance, **options)


def _sentence(record: Mapping[str, Any]) -> str:
    """Return the terminal's line for a passed check."""
    servers = len(record["servers"])
    return (
        f"gate: {record['tokens']} tokens of {servers} server{'s' * (servers != 1)}, version "
        f"{record['step']}: engine and trainer agree, |Δ| mean {record['mean_delta']:.1e}, max "
        f"{record['max_delta']:.1e}"  # less than 110 columns, at which terminals may cut it
    )


def _server_record(delta: Comparison, causes: Sequence[Explanation]) -> dict[str, Any]:
    return {
        "mean_delta": delta.mean, "max_delta": delta.max, "tokens": delta.tokens, "bad": delta.bad,
        "non_finite": delta.non_finite,
        "first_bad": delta.first_bad and asdict(delta.first_bad),
        "causes": [
            {"cause": each.cause, "words": each.words, "exact": each.exact,
             "mean_delta": each.report.mean, "max_delta": each.report.max}
            for each in causes
        ],
    }  # fmt: skip


def _error(address: str, version: int, delta: Comparison, causes: list[Explanation]) -> UserError:
    if not delta.tokens:
        problem = f"{address} acknowledged version {version} and stamps its tokens with another"
        return UserError(f"gate: {problem}; is another trainer using it? Restart it")
    problem = f"gate: engine {address} and trainer disagree on version {version}; {delta}"
    remedy = "gate.jsonl has the numbers, gate.enabled=False continues regardless"
    return UserError(f"{problem}; {advice(causes)}; {remedy}")
