"""A tokenizer, a fleet without servers, and a workflow without rewards."""

import asyncio
import random

import numpy as np
import pytest

from rlx.base import Group
from rlx.fleet.sample import Completion
from rlx.rollout.workflows import trajectory

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer():
    """A real transformers tokenizer with a chat template: one token a byte, four specials."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    specials = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    found = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>")
    found.add_special_tokens({"additional_special_tokens": specials[1:]})
    found.chat_template = TEMPLATE
    return found


class FakeFleet:
    """Draws completions as a function of (seed, sample index, version); no processes, no wire.

    `hold` makes requests wait for `release`; otherwise each takes a few random turns of the loop.
    """

    def __init__(self, seed=0, turns=5):
        self.version = 0
        self.random = random.Random(seed)
        self.turns = turns
        self.calls = []  # (prompt, sampling, n, priority)
        self.in_flight = self.most_in_flight = 0
        self.hold = False

    async def generate(self, prompt_tokens, sampling, n, *, session=None, priority=0):
        self.calls.append((list(prompt_tokens), sampling, n, priority))
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        started = self.version
        try:
            for _ in range(self.random.randint(0, self.turns)):
                await asyncio.sleep(0)
            while self.hold:
                await asyncio.sleep(1e-4 * self.in_flight)
        finally:
            self.in_flight -= 1
        return [self.completion(sampling, i, started) for i in range(n)]

    def completion(self, sampling, index, started):
        draw = random.Random(f"{sampling.seed} {index} {started}")
        tokens = [draw.randrange(48, 58) for _ in range(draw.randint(1, 6))]
        versions = [started] * (len(tokens) - 1) + [self.version]
        return Completion(
            tokens=np.array(tokens, np.int32),
            logprobs=np.full(len(tokens), -1.5, np.float32),
            versions=np.array(versions, np.int32),
            stop_reason="stop",
        )


class FakeWorkflow:
    """Groups straight from the fleet; `misbehave(group_id, attempt)` may raise or give rewards."""

    def __init__(self, n=2, misbehave=None):
        self.n = n
        self.misbehave = misbehave or (lambda group_id, attempt: None)
        self.attempts = {}

    async def run(self, fleet, row, *, group_id, seed, sampling=None, n=None, priority=0):
        from rlx.fleet.engine import Sampling

        attempt = self.attempts[group_id] = self.attempts.get(group_id, -1) + 1
        drawn = sampling or Sampling(seed=seed)
        completions = await fleet.generate([1, 2, 3], drawn, n or self.n, priority=priority)
        rewards = self.misbehave(group_id, attempt)
        if rewards is None:
            rewards = [float(c.tokens[0] % 2) for c in completions]
        prompt = np.array([1, 2, 3], np.int32)
        return Group(
            group_id,
            tuple(
                trajectory(prompt, c, rewards[i], f"{group_id}.{i}", row["question"])
                for i, c in enumerate(completions)
            ),
            row,
        )

    def drain_spans(self):
        return []


@pytest.fixture
def fake_fleet():
    return FakeFleet


@pytest.fixture
def fake_workflow():
    return FakeWorkflow
