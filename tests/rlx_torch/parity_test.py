"""One update in torch and one in JAX from the same weights and trajectories: the same weights."""

import jax
import numpy as np
import pytest
import torch

from experiments.bench import train_step_workers as workers
from rlx.algorithms import presets
from rlx.config import default
from rlx.model import hf
from rlx.train.train_options import TrainOptions
from rlx.train.update import JaxUpdate
from rlx_torch import model as torch_model
from rlx_torch import train


def make_run():
    config = default()
    config.train.max_tokens_per_microbatch = 128
    config.train.row_buckets = (64, 128)
    config.optimizer.learning_rate = 1e-2
    config.optimizer.eps = 1e-4  # at 1e-8 Adam's first step is the gradient's sign, noise and all
    config.sampling.temperature = 0.8
    config.algorithm.entropy_coefficient = 0.05  # its gradient is the model's own business
    lengths = np.random.default_rng(3).integers([4, 3], [12, 30], (16, 2))
    groups = workers.make_groups(lengths, vocab=128)
    return config, groups


def test_one_update_gives_the_same_weights(tiny_model_dir):
    torch.set_num_threads(1)
    config, groups = make_run()
    model_config, params = hf.load(tiny_model_dir)
    update = JaxUpdate(model_config, TrainOptions.of(config))
    state, metrics = update.update(update.init(params), groups)

    model = torch_model.load(tiny_model_dir)
    algorithm = presets.resolve(config.algorithm, config.sampling.max_new_tokens)
    batch = {name: torch.from_numpy(x) for name, x in workers.padded(groups).items()}
    stats = train.train_step(
        model, train.make_optimizer(model, config.optimizer), batch, 16.0, algorithm,
        temperature=config.sampling.temperature, clip_norm=config.optimizer.clip_norm,
    )  # fmt: skip

    assert stats["grad_norm"] == pytest.approx(float(metrics["grad_norm"]), rel=1e-4)
    entropy = stats["entropy"] / stats["n_valid_tokens"]
    assert entropy == pytest.approx(float(metrics["entropy"]), rel=1e-4)
    start, got = (
        hf.to_hf(params, model_config),
        hf.to_hf(jax.device_get(state.params), model_config),
    )
    for name, tensor in model.named_parameters():
        moved = np.abs(got[name] - start[name]).max()
        assert moved > 0
        apart = np.abs(got[name] - tensor.detach().numpy()).max()
        assert apart <= 1e-3 * moved, f"{name} moved {moved:.1e}, the two differ by {apart:.1e}"


def test_packed_rows_equal_padded_rows(tiny_model_dir):
    torch.set_num_threads(1)
    model = torch_model.load(tiny_model_dir)
    tokens = torch.arange(24)[None] % 97
    apart = {"tokens": tokens.reshape(2, 12), "positions": torch.arange(12).expand(2, 12)}
    packed = {"tokens": tokens, "positions": torch.arange(12).repeat(2)[None]}
    apart["segment_ids"] = torch.ones(2, 12, dtype=torch.int64)
    packed["segment_ids"] = torch.tensor([[1] * 12 + [2] * 12])
    with torch.no_grad():
        for one, two in zip(
            torch_model.logprobs(model, apart), torch_model.logprobs(model, packed), strict=True
        ):
            torch.testing.assert_close(one.reshape(-1), two.reshape(-1), atol=1e-5, rtol=1e-5)
