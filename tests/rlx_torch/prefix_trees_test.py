"""The trainer in PyTorch with trees: its plain update, and an oracle of each trajectory alone."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn.attention import flex_attention
from transformers import AutoModelForCausalLM

from rlx.algorithms.presets import PRESETS
from rlx.base import UserError
from rlx.config import default
from rlx.model import hf
from rlx.train.train_options import TrainOptions
from rlx.train.update import JaxUpdate
from rlx_torch import attention, packed_model
from rlx_torch.attention import Trees, over_trees, segments, tree_error
from rlx_torch.update import TorchUpdate
from tests.train.prefix_trees_test import PACKED, branching, of_a_kind


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


_SLOW = ("ppo", "dpo")


@pytest.mark.parametrize(
    "preset",
    [pytest.param(each, marks=pytest.mark.slow) if each in _SLOW else each for each in CASES],
)
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


def test_a_trajectory_without_a_trained_token_may_have_a_row_of_its_own(tiny_model_dir):
    groups = branching(count=2, samples=1)
    (bare,) = groups[1].trajectories
    bare = replace(bare, loss_mask=np.zeros_like(bare.loss_mask), versions=0 * bare.versions - 1)
    groups[1] = replace(groups[1], trajectories=(bare,))
    longest = max(len(g.trajectories[0].tokens) for g in groups)
    rows = {"train.max_tokens_per_microbatch": longest, "train.row_buckets": (longest,)}
    (want, plain, _), (got, metrics, _) = (
        updated(of_torch(options("sft", share, **rows)), tiny_model_dir, groups, steps=1)
        for share in ("off", "on")
    )
    assert metrics["n_microbatches"] == 2
    assert metrics["sft_loss"] == pytest.approx(plain["sft_loss"], rel=1e-5)
    for name, tensor in want.items():
        np.testing.assert_allclose(got[name], tensor, atol=1e-5, err_msg=name)


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


@pytest.fixture
def flex_on_cpu(monkeypatch):
    """FlexAttention as PyTorch's reference computes it, with all pairs at one time."""
    monkeypatch.setattr(
        attention, "_compiled_flex_attention", lambda: flex_attention.flex_attention
    )
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")  # Dynamo looks at it
        yield


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_over_trees_is_that_over_each_path(softcap, window, dtype, flex_on_cpu):
    """Two trees of one row: 0-1-2 and 0-1-3-4 by positions, and one of three tokens."""
    ends, positions = np.array([5, 5, 3, 5, 5, 8, 7, 8]), np.array([0, 1, 2, 2, 3, 0, 1, 1])
    paths = ([0, 1, 2], [0, 1, 3, 4], [5, 6], [5, 7])
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, 4, 8, 16, generator=generator).to(dtype)
    k, v = (torch.randn(1, 2, 8, 16, generator=generator).to(dtype) for _ in range(2))
    trees = Trees.of(ends, positions, "cpu")
    found = segments(
        torch.nn.Identity(), q, k, v, None, blocks=trees, sliding_window=window, softcap=softcap
    )[0][0]  # fmt: skip
    if softcap is None:
        by_mask = over_trees(q, k, v, trees, window, None)[0]
        assert torch.allclose(by_mask, found, atol=1e-5 if dtype is torch.float32 else 3e-2)
    for path in paths:
        keys, values = (x[0, :, path].double().repeat_interleave(2, 0) for x in (k, v))
        scores = q[0, :, path].double() @ keys.transpose(-1, -2) / 4
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        behind = torch.arange(len(path))[:, None] - torch.arange(len(path))
        hidden = (behind < 0) | (behind >= (window or len(path)))
        want = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1) @ values
        near = 1e-5 if dtype is torch.float32 else 3e-2
        assert torch.allclose(found[path].double(), want.transpose(0, 1), atol=near)


def test_flex_attention_is_that_by_masks_forward_and_backward(monkeypatch, flex_on_cpu):
    assert tree_error(4, 2, 16, "cpu", torch.float32) < 1e-5
    monkeypatch.setattr(Trees, "block_mask", lambda self, window: self._block_mask(100))
    assert tree_error(4, 2, 16, "cpu", torch.float32) > 0.02, "a window that masks do not have"


@pytest.mark.parametrize("window", [None, 40])
def test_blocks_are_skipped_that_see_nothing_and_whole_where_all_is_seen(window):
    """Three trees in blocks of 128, against the mask of every pair."""
    rng, positions, ends = np.random.default_rng(0), [], []
    for prompt in (300, 20, 400):
        sizes, begin = rng.integers(50, 300, 4), len(ends)
        stop = begin + prompt + sizes.sum()
        positions += [*range(prompt), *(prompt + i for size in sizes for i in range(size))]
        leaves = begin + prompt + np.cumsum(sizes)
        ends += [*np.repeat([stop, *leaves], [prompt, *sizes])]
    trees = Trees.of(np.array(ends), np.array(positions), "cpu")
    at, number = torch.arange(len(ends)), -(-len(ends) // 128)
    every = torch.zeros(number * 128, number * 128, dtype=torch.bool)
    every[: len(ends), : len(ends)] = (at[:, None] >= at) & (at[:, None] < trees.ends)
    if window:
        near = trees.positions[:, None] - trees.positions < window
        every[: len(ends), : len(ends)] &= near
    wanted = every.unflatten(0, (-1, 128)).unflatten(2, (-1, 128)).transpose(1, 2).flatten(2)
    mask = trees.block_mask(window)
    assert mask is trees.block_mask(window)

    def listed(counts, order):
        found = torch.zeros(number, number, dtype=torch.bool)
        for row, count in enumerate(counts[0, 0]):
            found[row, order[0, 0, row, :count].long()] = True
        return found

    some = listed(mask.kv_num_blocks, mask.kv_indices)
    whole = listed(mask.full_kv_num_blocks, mask.full_kv_indices)
    assert not (some & whole).any()
    assert not (wanted.any(-1) & ~some & ~whole).any(), "a pair is skipped"
    assert not (whole & ~wanted.all(-1)).any(), "a pair of a whole block is not seen"
    assert number < (some | whole).sum() < number * (number + 1) / 2
    if window is None:
        assert whole.any()
        assert torch.equal(some | whole, wanted.any(-1))


@pytest.mark.parametrize("remat", ["none", "full"])
def test_an_update_by_flex_attention_is_the_update_of_plain_rows(
    remat, tiny_model_dir, monkeypatch, flex_on_cpu
):
    """As on a GPU in half precision, in float32."""
    groups, more = branching(count=8), {"model.remat": remat}
    want, plain, scores = updated(of_torch(options("gspo", "off", **more)), tiny_model_dir, groups)
    calls = []

    def counted(*given):
        calls.append(given)
        return over_trees(*given)

    for module in (attention, packed_model):
        monkeypatch.setattr(module, "kernel", lambda *_: "rlx_varlen")
    monkeypatch.setattr(attention, "over_trees", counted)
    got, metrics, found = updated(
        of_torch(options("gspo", "on", **more)), tiny_model_dir, groups
    )  # fmt: skip
    assert calls
    for name, tensor in want.items():
        np.testing.assert_allclose(got[name], tensor, atol=2e-5, err_msg=name)
    for one, other in zip(found, scores, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)
    for name in set(metrics) - PACKED:
        assert metrics[name] == pytest.approx(plain[name], rel=1e-3, abs=1e-5), name


@pytest.mark.parametrize(
    ("kernel", "error", "words"),
    [
        ("flash_attention_3", 0.0, "flash_attention_3 has no trees"),
        ("rlx_varlen", 0.3, "FlexAttention's attention over trees is wrong by 30.0%"),
    ],
)
def test_kernels_without_trees_are_refused_by_name(
    kernel, error, words, tiny_model_dir, monkeypatch
):
    monkeypatch.setattr(attention, "kernel", lambda *_: kernel)
    monkeypatch.setattr(attention, "tree_error", lambda *_: error)
    for share in ("auto", "off"):
        assert of_torch(options("gspo", share))(tiny_model_dir)._prefix_mode == "off"
    with pytest.raises(UserError, match=words):
        of_torch(options("gspo", "on"))(tiny_model_dir)
