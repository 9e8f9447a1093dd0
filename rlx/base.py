"""The nouns every room shares. Imports neither JAX nor torch and does no I/O."""

import hashlib
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np


class UserError(Exception):
    """A mistake the user can mend: one line with got, wanted and remedy.

    Commands print it as `error: …` without a traceback and exit with status 2.
    """


@contextmanager
def explained(problem: str, remedy: str) -> Iterator[None]:
    """Turn an error of the system, or text that is not UTF-8, into UserError with its reason."""
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{problem}: {reason}; {remedy}") from error


def nearest(name: str, choices: Iterable[str], most: int | None = None) -> str:
    """Return the choice that `name` begins, if there is one, or misspells; "" if there is none.

    `most` mistakes are allowed; None: two of five characters.
    """
    word, words = _plain(name), {choice: _plain(choice) for choice in sorted(choices)}
    starts = [choice for choice, plain in words.items() if plain.startswith(word)]
    if len(word) >= 3 and len(starts) == 1:
        return starts[0]
    near = list[tuple[int, str]]()
    for choice, plain in words.items():
        limit = max(len(word), len(plain)) * 2 // 5 if most is None else most
        if abs(len(word) - len(plain)) <= limit and (n := _mistakes(word, plain)) <= limit:
            near.append((n, choice))
    return min(near, default=(0, ""))[1]


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")


def _mistakes(a: str, b: str) -> int:
    """Return how many characters are added, left out, replaced, or swapped with the next one."""
    before, last = list[int](), list(range(len(b) + 1))
    for i, x in enumerate(a):
        row = [i + 1]
        for j, y in enumerate(b):
            row.append(min(last[j] + (x != y), last[j + 1] + 1, row[j] + 1))
            if i and j and (x, a[i - 1]) == (b[j - 1], y):
                row[-1] = min(row[-1], before[j - 1] + 1)
        before, last = last, row
    return last[-1]


def unknown(kind: str, name: str, choices: Iterable[str]) -> UserError:
    """Return the error for a name that is not among `choices`, suggesting the nearest."""
    names = sorted(choices)
    section, _, last = name.rpartition(".")
    siblings = {o.removeprefix(f"{section}."): o for o in names if o.startswith(f"{section}.")}
    if near := nearest(last if siblings else name, siblings or names):
        return UserError(f"unknown {kind} {name!r}; did you mean {siblings.get(near, near)!r}?")
    if len(siblings) > 20:
        return UserError(f"unknown {kind} {name!r}; `rlx keys {section}` lists all {len(siblings)}")
    names = list(siblings.values()) or names
    if len(names) > 30:  # those of a config, of no known section
        sections = ", ".join(sorted({other.partition(".")[0] for other in names if "." in other}))
        hint = f"`rlx keys` lists all, under {sections}"
        return UserError(f"unknown {kind} {name!r}; {hint}")
    return UserError(f"unknown {kind} {name!r}; choose one of {', '.join(names)}")


def leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of all that a config, or its JSON, has."""
    for key in tree:
        if hasattr(value := tree[key], "keys"):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def refuse(rules: Iterable[tuple[object, str]]) -> None:
    """Raise UserError with the message of the first rule that is broken: (is broken, message)."""
    for broken, message in rules:
        if broken:
            raise UserError(message)


def install(extra: str) -> str:
    """Return the command that installs an extra, from a clone or a wheel: rlx is on no index."""
    source = "'FILE.whl" if "-packages/" in __file__ else "-e '."
    return f"pip install {source}[{extra}]'"


@contextmanager
def packages_of(extra: str, problem: str) -> Iterator[None]:
    """Turn a failed import into UserError: the problem, its reason, how to install the extra."""
    try:
        yield
    except ImportError as error:
        raise UserError(f"{problem} ({error}); {install(extra)}") from None


def seed_of(data: bytes) -> int:
    """Return a sampling seed in [0, 2³¹), a hash of `data`."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=4).digest(), "big") >> 1


def place(function: Any) -> str:
    """Return `(FILE, line N)` of a function's beginning; empty where Python does not know it."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"({code.co_filename}, line {code.co_firstlineno})" if code else ""


class RewardParts(float):
    """A reward with its parts by name, which become metrics: `reward/NAME`, else `info/NAME`."""

    parts: Mapping[str, float]

    def __new__(cls, reward: float, parts: Mapping[str, float]) -> "RewardParts":
        value = super().__new__(cls, reward)
        value.parts = dict(parts)
        return value


class Unavailable(UserError):
    """A mistake that holds for every row, such as no live server: a run cannot skip it."""


class DiskFull(UserError):
    """The disk is full; files that were there before are unchanged."""


class PromptTokens(list[int]):
    """Token ids, with the names of the images whose placeholders are among them, in order."""

    def __init__(self, ids: Iterable[int] = (), images: Sequence[str] = ()):
        super().__init__(ids)
        self.images = tuple(images)


def with_images(tokens: Any, images: Sequence[str]) -> Any:
    """Return tokens as PromptTokens with the names of their images; unchanged without any."""
    return PromptTokens(map(int, tokens), images) if images else tokens


def images_of(*parts: Any) -> tuple[str, ...]:
    """Return the names of the images in token sequences, which only PromptTokens have."""
    return tuple(name for part in parts for name in getattr(part, "images", ()))


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """The tokens of one rollout: prompt, completion, and any observations between."""

    tokens: np.ndarray  # [T] int32
    loss_mask: np.ndarray  # [T] bool; true where the token was sampled and is trained on
    # [T] float32, nats, ≤ 0; 0 where not sampled. Of the tempered distribution:
    # log softmax(logits / temperature), over the kept tokens where there are any.
    behaviour_logprobs: np.ndarray
    versions: np.ndarray  # [T] int32; policy version that produced each, −1 where not sampled
    reward: float  # before any shaping; finite
    stop_reason: str  # `stop` (end token or stop string) or `length` (budget exhausted)
    trajectory_id: str  # unique in the run, `"{group_id}.{sample}"`
    turn_ids: np.ndarray | None = None  # [T] int32; each token's turn, 0 for a single-turn workflow
    # [T] float32, nats; log-probabilities under a teacher, 0 where not sampled.
    reference_logprobs: np.ndarray | None = None
    agent: str = ""  # who acted, for statistics per agent; one nameless agent by default
    prompt: str = ""  # prompt, completion: the texts, for transcripts and reports only
    completion: str = ""
    info: Mapping[str, float] = field(default_factory=dict)  # averaged into metrics: `info_means`
    # The return of each turn, in the order of `turn_ids`, for that turn's tokens; (): every token
    # has `reward`.
    turn_rewards: tuple[float, ...] = ()
    said: tuple[tuple[int, int], ...] = ()  # each turn's begin and end in `completion`; (): all
    baseline: float = 0.0  # subtracted from reward and turns' returns, before any shaping
    # [T] int32, [M] uint8; bytes of each token's set and codes of the sets that tokens were drawn
    # from (`rlx.model.kept_tokens`); None: from the whole vocabulary.
    kept_sizes: np.ndarray | None = None
    kept: np.ndarray | None = None
    # Names in the run's `ImageStore`, in the order of their placeholders among the tokens that were
    # not sampled. These are expanded as the model's processor does it.
    images: tuple[str, ...] = ()

    @property
    def run_id(self) -> str:
        """The id of the sample, `"{group_id}.{sample}"`, that this is all or a part of."""
        return ".".join(self.trajectory_id.split(".")[:2])

    @property
    def run_reward(self) -> float:
        """The environment's reward of the whole sample, without discount or baseline."""
        return float(self.info.get("run_reward", self.reward))

    @property
    def num_trained(self) -> int:
        """Return the number of tokens that the loss sees."""
        return int(self.loss_mask.sum())

    @property
    def truncated(self) -> bool:
        """True when the token budget, not the policy, ended the trajectory."""
        return self.stop_reason == "length"

    @property
    def oldest_version(self) -> int:
        """The smallest policy version among the sampled tokens; −1 when there are none."""
        sampled = self.versions[self.versions >= 0]
        return int(sampled.min()) if sampled.size else -1


def info_means(trajectories: Iterable[Trajectory]) -> dict[str, float]:
    """Return the means of trajectories' own scalars, each over those runs that have it.

    A name with a section keeps it (`reward/brevity`), the others are put under `info/`.
    """
    scalars: dict[str, dict[str, list[float]]] = {}
    for t in trajectories:
        for name, value in t.info.items():
            runs = scalars.setdefault(name if "/" in name else f"info/{name}", {})
            runs.setdefault(t.run_id, []).append(float(value))
    return {n: float(np.mean([*map(np.mean, runs.values())])) for n, runs in scalars.items()}


def joined_masks(parts: Sequence[Any]) -> dict[str, Any]:
    """Return `kept_sizes` and `kept` of trajectories, completions or chunks as one; {}: none."""
    masked = [part.kept_sizes is not None and len(part.kept_sizes) > 0 for part in parts]
    if not any(masked):
        return {}
    pairs = list(zip(parts, masked, strict=True))
    sizes = [part.kept_sizes if mask else np.zeros(len(part.tokens)) for part, mask in pairs]
    data = b"".join(bytes(part.kept) for part, mask in pairs if mask)
    return {
        "kept_sizes": np.concatenate(sizes).astype(np.int32), "kept": np.frombuffer(data, np.uint8)
    }  # fmt: skip


def malformed(trajectory: Trajectory) -> str | None:
    """Return why a trajectory's arrays cannot be trained on, or None where they can."""
    t = trajectory
    arrays = (t.tokens, t.loss_mask, t.behaviour_logprobs, t.versions)
    optional = (t.turn_ids, t.reference_logprobs, t.kept_sizes)
    shapes = {len(array) for array in (*arrays, *optional) if array is not None}
    if len(shapes) != 1 or 0 in shapes:
        return f"per-token arrays have lengths {sorted(shapes)}; want one length of at least 1"
    if t.kept_sizes is not None and (t.kept is None or t.kept_sizes.sum() != len(t.kept)):
        return "its kept_sizes do not add up to its kept bytes"
    if t.loss_mask[0]:
        return "its first token is trained on; want a prompt of at least 1 token before it"
    if t.turn_rewards and (turns := len(turn_starts(t))) != len(t.turn_rewards):
        return f"it has {len(t.turn_rewards)} turn_rewards, turn_ids tell {turns} turns"
    return None


def turn_starts(trajectory: Trajectory) -> np.ndarray:
    """Return where turns with rewards of their own begin, [turns] int; [0] where there are none."""
    turns = trajectory.turn_ids if trajectory.turn_rewards else None
    return np.array([0]) if turns is None else np.flatnonzero(np.diff(turns, prepend=turns[0] - 1))


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The trajectories of one prompt. `group_id` is the order of first admission, from 0."""

    group_id: int
    trajectories: tuple[Trajectory, ...]
    row: Mapping[str, Any] = field(default_factory=dict)

    @property
    def oldest_version(self) -> int:
        """The smallest policy version in the group; −1 when nothing was sampled."""
        oldest = [t.oldest_version for t in self.trajectories if t.oldest_version >= 0]
        return min(oldest, default=-1)
