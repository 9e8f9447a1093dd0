"""Show five biases of asynchronous runs on toys, each with the cause and without.

    python experiments/2026-12-bias/toys.py     # a minute on one core; writes toys.json

`without` is what rlx does; for `discard` it is rlx's own admission and buffer.
"""

import heapq
import json
from collections import deque
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from rlx.base import Group, Trajectory
from rlx.rollout import buffer as buffers
from rlx.rollout import staleness
from rlx.rollout.staleness import Limits

HERE = Path(__file__).parent
SECONDS = {"easy": 1.0, "hard": 12.0}  # of an answer, times a log-normal factor
LIMITS = Limits(batch_prompts=8, max_staleness=2, concurrency=32, total_steps=400)
TRAIN_SECONDS = 2.0


class Discarding:
    """Starts prompts whenever a slot is free, and drops answers that became too old."""

    def __init__(self):
        self.running, self.version, self.dropped = 0, 0, 0
        self._finished = deque()

    def room(self) -> int:
        return LIMITS.concurrency - self.running

    def start(self) -> int:
        self.running += 1
        return self.version

    def finish(self, number: int, version: int) -> None:
        self.running -= 1
        self._finished.append((number, version))

    def batch(self) -> list[int]:
        """Return the prompts of the next batch, [] if there are too few."""
        fresh = [x for x in self._finished if self.version - x[1] <= LIMITS.max_staleness]
        self.dropped += len(self._finished) - len(fresh)
        self._finished = deque(fresh)
        if len(fresh) < LIMITS.batch_prompts:
            return []
        return [self._finished.popleft()[0] for _ in range(LIMITS.batch_prompts)]

    def publish(self) -> None:
        self.version += 1


class Admitting:
    """Starts a prompt only if its answer cannot become too old: rlx's state machines."""

    def __init__(self):
        self._state, self._buffer, self.dropped = staleness.Staleness(), buffers.Buffer(), 0

    def room(self) -> int:
        return staleness.capacity(self._state, LIMITS)

    def start(self) -> int:
        self._state = staleness.admit(self._state, LIMITS)
        self._buffer = buffers.admit(self._buffer, self._state.version)
        return self._state.version

    def finish(self, number: int, version: int) -> None:
        column = np.array([version, version], np.int32)
        mask, zeros = np.array([False, True]), np.zeros(2, np.float32)
        one = Trajectory(column, mask, zeros, column, 0.0, "stop", str(number))
        self._state = staleness.end(self._state, "accepted")
        self._buffer = buffers.finish(self._buffer, version, Group(number, (one,)))

    def batch(self) -> list[int]:
        step = self._state.consumed
        if not buffers.ready(self._buffer, step, LIMITS):
            return []
        self._buffer, taken = buffers.take(self._buffer, step, LIMITS)
        self._state = staleness.consume(self._state, LIMITS)
        return [group.group_id for group in taken]

    def publish(self) -> None:
        self._state = staleness.publish(self._state, self._state.consumed)


def discard(side, seed: int) -> dict[str, float]:
    """Train on prompts that need short or long answers; each kind has its own success."""
    rng, logits = np.random.default_rng(seed), {"easy": -2.0, "hard": -2.0}
    kinds, live, clock, trained, publishes = [], [], 0.0, [], float("inf")
    while len(trained) < LIMITS.total_steps * LIMITS.batch_prompts:
        for _ in range(side.room()):
            kinds.append(("easy", "hard")[rng.integers(2)])
            ends = clock + SECONDS[kinds[-1]] * rng.lognormal(0, 0.4)
            heapq.heappush(live, (ends, len(kinds) - 1, side.start()))
        if publishes == float("inf") and (batch := side.batch()):
            publishes = clock + TRAIN_SECONDS
            for number in batch:
                trained.append(kinds[number])
                success = 1 / (1 + np.exp(-logits[kinds[number]]))
                logits[kinds[number]] += 0.05 * success * (1 - success)  # expected REINFORCE
            continue
        if live and live[0][0] < publishes:
            clock, number, version = heapq.heappop(live)
            side.finish(number, version)
        else:
            clock, publishes = publishes, float("inf")
            side.publish()
    success = {kind: 1 / (1 + np.exp(-value)) for kind, value in logits.items()}
    return {
        "share of long answers in training": trained.count("hard") / len(trained),
        "success on short ones": success["easy"],
        "success on long ones": success["hard"],
        "answers dropped": side.dropped / len(kinds),
        "seconds a step": clock / LIMITS.total_steps,
    }


def survivors(drop: float, seed: int, groups: int = 100_000, size: int = 8) -> dict[str, float]:
    """Compute GRPO's advantages where a share of the wrong answers fails and leaves its group."""
    rng = np.random.default_rng(seed)
    right = rng.random((groups, size)) < 0.4
    stays = right | (rng.random((groups, size)) >= drop)
    count = np.maximum(stays.sum(1, keepdims=True), 1)
    mean = (right & stays).sum(1, keepdims=True) / count
    deviation = np.sqrt(((right - mean) ** 2 * stays).sum(1, keepdims=True) / count)
    advantage = np.where(stays & (deviation > 0), (right - mean) / np.maximum(deviation, 1e-9), 0)
    return {
        "reported reward (0.4 is right)": float(right[stays].mean()),
        "advantage of a right answer": float(advantage[right].mean()),
        "groups that teach nothing": float((deviation[:, 0] == 0).mean()),
    }


def old_prefix(size: float, seed: int, width: int = 32, vocab: int = 64) -> dict[str, float]:
    """Serve new weights over keys and values of old ones: one layer of attention, random."""
    rng, gaps = np.random.default_rng(seed), []
    for _ in range(200):
        old = rng.normal(0, width**-0.5, (4, width, width))
        new = old + size * rng.normal(0, width**-0.5, old.shape)
        embed, tokens = rng.normal(0, 1, (vocab, width)), rng.integers(0, vocab, 33)
        x = embed[tokens]

        def logprobs(prefix, x=x, new=new, embed=embed):
            keys = np.concatenate([x[:-1] @ prefix[1], x[-1:] @ new[1]])
            values = np.concatenate([x[:-1] @ prefix[2], x[-1:] @ new[2]])
            scores = (x[-1] @ new[0]) @ keys.T / width**0.5
            weights = np.exp(scores - scores.max())
            mixed = (weights / weights.sum()) @ values @ new[3]
            logits = (x[-1] + mixed) @ embed.T / width**0.5
            return logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()

        served, wanted = logprobs(old), logprobs(new)
        gaps.append(np.sum(np.exp(served) * (served - wanted)))
    return {"KL from the version that tokens carry, nats": float(np.mean(gaps))}


def retokenised(seed: int) -> dict[str, float]:
    """Encode sampled texts again: byte-pair tokens of rlx's own docs, drawn by frequency."""
    text = [path.read_text() for path in sorted((HERE.parents[1] / "docs").glob("*.md"))]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=2000, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(text, trainer)
    counts = np.bincount(tokenizer.encode("\n".join(text)).ids, minlength=2000) + 0.01
    logp, rng = np.log(counts / counts.sum()), np.random.default_rng(seed)
    changed, ratios = 0, []
    for _ in range(2000):
        ids = rng.choice(2000, 30, p=counts / counts.sum())
        again = tokenizer.encode(tokenizer.decode(ids.tolist())).ids
        changed += again != ids.tolist()
        ratios.append(abs(logp[again].sum() - logp[ids].sum()))
    return {
        "answers of 30 tokens that change": changed / 2000,
        "error of an answer's log-probability, nats": float(np.mean(ratios)),
    }


def truncated(renormalise: bool, seed: int, vocab: int = 64) -> dict[str, float]:
    """Sample with top-p 0.9, update the policy a little; exact sums over the vocabulary."""
    rng, weights, angles = np.random.default_rng(seed), [], []
    for _ in range(10_000):
        z, reward = rng.normal(0, 1.5, vocab), rng.normal(0, 1, vocab)
        after = z + rng.normal(0, 0.3, vocab)
        before, p = (np.exp(x) / np.exp(x).sum() for x in (z, after))
        order = np.argsort(-before)
        kept = order[: max(2, np.searchsorted(np.cumsum(before[order]), 0.9) + 1)]
        inside = np.isin(np.arange(vocab), kept)
        drawn = np.where(inside, before, 0) / before[kept].sum()
        new = np.where(inside, p, 0) / p[kept].sum()
        ratio = np.where(inside, new / np.maximum(drawn, 1e-12) if renormalise else p / before, 0)
        weights.append(drawn @ ratio)
        value = reward - new @ reward

        def gradient(share, policy, value=value):
            return share * value - policy * (share @ value)

        wanted, got = gradient(new, new), gradient(drawn * ratio, new if renormalise else p)
        angles.append(wanted @ got / np.linalg.norm(wanted) / np.linalg.norm(got))
    return {
        "mean importance weight (1 is right)": float(np.mean(weights)),
        "its deviation between tokens": float(np.std(weights)),
        "the same for answers of 200 tokens": float(np.std(np.reshape(weights, (-1, 200)).prod(1))),
        "cosine with the true gradient": float(np.mean(angles)),
    }


def main() -> None:
    """Run all toys with three seeds, print their means, write all numbers."""
    sides = {
        "discard": (lambda s: discard(Discarding(), s), lambda s: discard(Admitting(), s)),
        "survivors": (lambda s: survivors(0.6, s), lambda s: survivors(0.0, s)),
        "old prefix": (lambda s: old_prefix(0.3, s), lambda s: old_prefix(0.0, s)),
        "retokenised": (retokenised, lambda s: dict.fromkeys(retokenised(s), 0.0)),
        "truncated": (lambda s: truncated(False, s), lambda s: truncated(True, s)),
    }
    found = {}
    for name, (with_it, without) in sides.items():
        runs = [[side(seed) for seed in range(3)] for side in (with_it, without)]
        found[name] = {
            what: [[round(run[what], 4) for run in side] for side in runs] for what in runs[0][0]
        }
        for what, (ours, theirs) in found[name].items():
            print(f"| {name} | {what} | {np.mean(ours):.3g} | {np.mean(theirs):.3g} |", flush=True)
    (HERE / "toys.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
