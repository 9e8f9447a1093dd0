"""The trainer in PyTorch with trees: its plain update, and an oracle of each trajectory alone."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rlx.algorithms.presets import PRESETS
from rlx.config import default
from rlx.model import hf
from rlx.train.train_options import TrainOptions
from rlx.train.update import JaxUpdate
from rlx_torch.attention import Trees, segments
from rlx_torch.update import TorchUpdate
from tests.rlx_torch.update_test import of_a_kind
from tests.train.prefix_trees_test import PACKED, branching


def options(preset, share, **overrides):
    config = default()
    config.algorithm.preset = preset
    config.update_from_flattened_dict(
        {
            "train.max_tokens_per_microbatch": 128,
            "train.row_buckets": (128,),
            "train.share_prefixes": share,
            "optimizer.name": "sgd",
            "optimizer.learning_rate": 1.0,
            "optimizer.clip_norm": 0.0,
            "critic.learning_rate": 1.0,
            **overrides,
        }
    )
    return TrainOptions.of(config)


def updated(make, path, groups, steps=2):
    trainer = make(path)
    state = trainer.init()
    for _ in range(steps):
        scores = trainer.logprobs(state, groups)
        state, metrics = trainer.update(state, groups)
    return trainer.weights(state).arrays(), dict(metrics), scores


def of_torch(own):
    return lambda path: TorchUpdate(hf.load(path)[0], own, path)


def of_jax(own):
    return lambda path: JaxUpdate(hf.load(path)[0], own, source=lambda _: hf.load(path)[1])


CASES = {
    "gspo": {},
    "ppo": {"algorithm.kl_placement": "loss", "algorithm.kl_coefficient": 0.1},
    "dpo": {},
    "sft": {"lora.rank": 2},
}


@pytest.mark.parametrize("preset", CASES)
def test_an_update_with_trees_is_the_update_of_plain_rows(preset, tiny_model_dir):
    """Two updates, so that a critic and adapters have weights that matter, in microbatches."""
    groups = branching(count=8, samples=2 if preset == "dpo" else 5)
    want, plain, scores = updated(
        of_torch(options(preset, "off", **CASES[preset])), tiny_model_dir, groups
    )
    # The trainers begin with other random adapters.
    for make in (of_torch,) if "lora.rank" in CASES[preset] else (of_torch, of_jax):
        got, metrics, found = updated(
            make(options(preset, "on", **CASES[preset])), tiny_model_dir, groups
        )
        for name, tensor in want.items():
            np.testing.assert_allclose(got[name], tensor, atol=2e-5, err_msg=name)
        for one, other in zip(found, scores, strict=True):
            np.testing.assert_allclose(one, other, atol=2e-5)
        for name in set(metrics) - PACKED:
            assert metrics[name] == pytest.approx(plain[name], rel=1e-3, abs=1e-5), name
        assert metrics["n_shared_tokens"] > 20
        assert metrics["n_microbatches"] > 1
    assert plain["n_shared_tokens"] == 0


@pytest.mark.parametrize("preset", sorted(set(PRESETS) - set(CASES)))
def test_every_preset_has_the_update_of_plain_rows(preset, tiny_model_dir):
    """Its loss, metrics and weights; the JAX trainer has the same losses on the same rows."""
    algorithm = options(preset, "off").algorithm
    groups = branching(count=4, samples=2 if algorithm.data == "pairs" else 5)
    groups = of_a_kind(groups, algorithm)
    found = []
    for share in ("off", "on"):
        own = options(preset, share, **{"train.max_tokens_per_microbatch": 512})
        trainer = of_torch(own)(tiny_model_dir)
        state = trainer.init()
        losses = trainer.evaluate(state, groups)
        state, metrics = trainer.update(state, groups)
        found.append((trainer.weights(state).arrays(), dict(metrics), losses))
    (want, plain, losses), (got, metrics, again) = found
    assert again == pytest.approx(losses, rel=1e-5, abs=1e-5)
    for name, tensor in want.items():
        np.testing.assert_allclose(got[name], tensor, atol=1e-5, err_msg=name)
    assert set(metrics) == set(plain)
    for name in set(metrics) - PACKED:
        assert metrics[name] == pytest.approx(plain[name], rel=1e-5, abs=1e-5), name
    assert metrics["n_shared_tokens"] > 20
    assert metrics["grad_norm"] > 1e-4


@pytest.mark.parametrize("make", [of_jax, of_torch])
def test_a_step_is_the_one_of_each_trajectory_alone_in_float64(make, tiny_model_dir):
    """Maximum likelihood, whose gradient is written in one line, from transformers' own model."""
    groups = branching(seed=4)
    got, metrics, _ = updated(make(options("sft", "on")), tiny_model_dir, groups, steps=1)
    model = AutoModelForCausalLM.from_pretrained(
        tiny_model_dir, dtype=torch.float64, attn_implementation="eager"
    )
    total, count = 0.0, 0
    for t in (t for g in groups for t in g.trajectories):
        tokens = torch.from_numpy(t.tokens).long()
        logits = model(input_ids=tokens[None], use_cache=False).logits[0, :-1]
        own = torch.log_softmax(logits, -1).gather(1, tokens[1:, None])[:, 0]
        total = total - own[torch.from_numpy(t.loss_mask[1:])].sum()
        count += t.num_trained
    (total / count).backward()
    assert metrics["n_shared_tokens"] > 100
    assert metrics["sft_loss"] == pytest.approx(total.item() / count, rel=1e-5)
    for name, parameter in model.named_parameters():
        if name in got:
            want = (parameter - parameter.grad).detach().numpy()
            np.testing.assert_allclose(got[name], want, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_over_trees_is_that_over_each_path(softcap, window, dtype):
    """Two trees of one row: 0-1-2 and 0-1-3-4 by positions, and one of three tokens."""
    ends, positions = np.array([5, 5, 3, 5, 5, 8, 7, 8]), np.array([0, 1, 2, 2, 3, 0, 1, 1])
    paths = ([0, 1, 2], [0, 1, 3, 4], [5, 6], [5, 7])
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 4, 8, 16, generator=generator).to(dtype)
    k, v = (torch.randn(1, 2, 8, 16, generator=generator).to(dtype) for _ in range(2))
    found = segments(
        torch.nn.Identity(), q, k, v, None, blocks=Trees.of(ends, positions, "cpu"),
        sliding_window=window, softcap=softcap,
    )[0][0]  # fmt: skip
    for path in paths:
        keys, values = (x[0, :, path].double().repeat_interleave(2, 0) for x in (k, v))
        scores = q[0, :, path].double() @ keys.transpose(-1, -2) / 4
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        behind = torch.arange(len(path))[:, None] - torch.arange(len(path))
        hidden = (behind < 0) | (behind >= (window or len(path)))
        want = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1) @ values
        near = 1e-5 if dtype is torch.float32 else 3e-2
        assert torch.allclose(found[path].double(), want.transpose(0, 1), atol=near)
