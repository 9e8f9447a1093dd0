"""Random ragged batches, in the oracle's layout and in the implementation's."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

FLAT, SEQUENCES = 256, 16  # one shape for all cases: each algorithm compiles once
ROWS, WIDTH = 8, 64


def _load(name):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


oracles_module = _load("oracles")


@pytest.fixture(scope="session")
def oracles():
    """The float64 oracles, written from the papers."""
    return oracles_module


class Cases:
    """Makes batches and lays them out; one object so that tests take one fixture."""

    flat_size, sequences = FLAT, SEQUENCES

    def random(self, seed, *, count=None, binary=False, empty=True, singles=True):
        """A ragged batch: partial groups, groups of one, observation tokens, empty masks."""
        rng = np.random.default_rng(seed)
        count = count or int(rng.integers(1, 13))
        group_ids = rng.choice(1000, 5, replace=False)
        groups = rng.choice(group_ids[: int(rng.integers(1, 6))], count)
        if not singles:
            groups = np.arange(count) % max(count // 2, 1)
        return [self._rollout(rng, int(g), binary, empty) for g in groups]

    def pairs(self, seed):
        """Up to six groups of two rollouts, each with something to train on."""
        rng = np.random.default_rng(seed)
        return [
            self._rollout(rng, group, False, False)
            for group in range(int(rng.integers(1, 7)))
            for _ in range(2)
        ]

    def _rollout(self, rng, group, binary, empty):
        length = int(rng.integers(2, 21))
        mask = rng.random(length) < rng.choice([0.5, 0.9])
        if not empty or rng.random() > 0.1:
            mask[rng.integers(1, length)] = True
        elif empty:
            mask[:] = False
        mask[0] = False  # a prompt token, which is never sampled

        def f32(x):  # both sides start from the same float32 numbers
            return np.asarray(x, np.float32).astype(np.float64)

        behaviour = f32(-rng.exponential(1.0, length))
        proximal = f32(behaviour + rng.normal(0, 0.5, length))
        return oracles_module.Rollout(
            mask=mask,
            reward=float(rng.integers(0, 2)) if binary else float(f32(rng.normal(0, 2))),
            group=group,
            truncated=bool(rng.random() < 0.4),
            target=f32(proximal + rng.normal(0, 0.3, length)),
            proximal=proximal,
            behaviour=behaviour,
            reference=f32(proximal + rng.normal(0, 0.7, length)),
            values=f32(rng.normal(0, 1, length)),
            entropy=f32(rng.exponential(1.0, length)),
            versions=np.where(mask, rng.integers(3, 8, length), -1),
            bootstrap=float(f32(rng.normal())),
            advantages=f32(rng.normal(0, 1, length)),
            agent=int(rng.integers(0, 3)),
            turns=np.cumsum(rng.random(length) < 0.15),
            returns=f32(rng.normal(0, 1, length)),
            current_values=f32(rng.normal(0, 1, length)),
        )

    def flat(self, batch, *optional):
        """The flat batch of `advantages`, with the named optional arrays."""
        names = {
            "proximal_logprobs": "proximal",
            "reference_logprobs": "reference",
            "values": "values",
        }
        out = {
            "loss_mask": self.join([r.mask for r in batch], bool),
            "behaviour_logprobs": self.join([r.behaviour for r in batch]),
            "sequence_ids": self.join(
                [np.full(len(r.mask), i) for i, r in enumerate(batch)], np.int32, SEQUENCES
            ),
            "rewards": self.per_sequence([r.reward for r in batch], np.float32),
            "group_ids": self.per_sequence([r.group for r in batch], np.int32, 5000),
            "truncated": self.per_sequence([r.truncated for r in batch], bool),
            "cut": self.per_sequence([r.truncated for r in batch], bool),
            "valid": self.per_sequence([True] * len(batch), bool),
            "agent_ids": self.per_sequence([r.agent for r in batch], np.int32),
            "turn_ids": self.join([r.turns for r in batch], np.int32),
        }
        for name in optional:
            if name == "bootstrap_values":
                out[name] = self.per_sequence([r.bootstrap for r in batch], np.float32)
            else:
                out[name] = self.join([getattr(r, names[name]) for r in batch])
        return out

    def join(self, parts, dtype=np.float32, pad=0):
        joined = np.concatenate(parts)
        out = np.full(FLAT, pad, dtype)
        out[: len(joined)] = joined
        return out

    def per_sequence(self, values, dtype, pad=0):
        out = np.full(SEQUENCES, pad, dtype)
        out[: len(values)] = values
        return out

    def split(self, joined, batch):
        """The parts of a flat array that belong to each rollout."""
        joined = np.asarray(joined)
        ends = np.cumsum([len(r.mask) for r in batch])
        assert not np.any(joined[ends[-1] :]), "padding must stay 0"
        return np.split(joined[: ends[-1]], ends[:-1])

    def packed(self, batch, *optional, order=None, unit=1):
        """[ROWS, WIDTH] rows, sequences in `order` in the first row with room; and their places.

        Of `unit` neighbours in the order all go to the same row.
        """
        fields = {
            "target": "target", "entropy": "entropy", "behaviour_logprobs": "behaviour",
            "advantages": "advantages", "proximal_logprobs": "proximal",
            "reference_logprobs": "reference", "values": "values", "returns": "returns",
            "current_values": "current_values",
        }  # fmt: skip
        always = ("target", "entropy", "behaviour_logprobs", "advantages")
        rows = {name: np.zeros((ROWS, WIDTH), np.float32) for name in (*always, *optional)}
        rows["loss_mask"] = np.zeros((ROWS, WIDTH), bool)
        rows["segment_ids"] = np.zeros((ROWS, WIDTH), np.int32)
        rows["sequence_ids"] = np.full((ROWS, WIDTH), SEQUENCES, np.int32)
        rows["versions"] = np.full((ROWS, WIDTH), -1, np.int32)
        used, segments, places = np.zeros(ROWS, int), np.zeros(ROWS, int), [None] * len(batch)
        order = list(order if order is not None else range(len(batch)))
        for n, i in enumerate(order):
            rollout, size = batch[i], len(batch[i].mask)
            if n % unit == 0:
                whole = sum(len(batch[j].mask) for j in order[n : n + unit])
                row = int(np.flatnonzero(used + whole <= WIDTH)[0])
            segments[row] += 1
            place = (row, slice(used[row], used[row] + size))
            for name in (*always, *optional):
                rows[name][place] = getattr(rollout, fields[name])
            rows["loss_mask"][place] = rollout.mask
            rows["versions"][place] = rollout.versions
            rows["segment_ids"][place] = segments[row]
            rows["sequence_ids"][place] = i
            used[row] += size
            places[i] = place
        return rows, places


@pytest.fixture(scope="session")
def cases():
    return Cases()
