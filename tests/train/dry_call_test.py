"""A user's mistakes are found on a few tokens, and told by the user's own file and line."""

from contextlib import nullcontext

import jax
import pytest

from rlx import config as config_lib
from rlx.base import UserError
from rlx.train import dry_call
from rlx.train.train_options import TrainOptions

LOSSES = {
    "raises": ("    x = 1\n    return inputs.nonesuch, {}", "AttributeError: .*nonesuch", 4),
    "leaves": ("    raise SystemExit", "SystemExit", 3),
    "branches": ("    if inputs.target.sum() > 0:\n        pass", "TracerBoolConversion", 3),
    "is not finite": (
        "    return jnp.log(inputs.target), {}",
        "the loss of 15 of 15 tokens is not",
        2,
    ),
    "has no gradient": ("    return jnp.sqrt(0 * inputs.target), {}", "the gradient is not", 2),
    "statistic": (
        "    return inputs.target, {'odd': jnp.log(inputs.target)}",
        "the statistic 'odd' is not finite",
        2,
    ),
    "sums": ("    return inputs.target.sum(), {}", r"'loss' of float32 \[\]; wanted", 2),
}


def checked(path, name="mine", **fields):
    config = config_lib.default()
    config.algorithm.loss = f"{path}:{name}"
    for key, value in fields.items():
        config.algorithm[key] = value
    dry_call.check(TrainOptions.of(config).algorithm)


def written(directory, body):
    path = directory / "mine.py"
    path.write_text(f"import jax.numpy as jnp\ndef mine(inputs, algorithm, scale=1.0):\n{body}\n")
    return path


@pytest.mark.parametrize("what", LOSSES)
def test_a_loss_that_fails_is_one_line_with_file_and_line(what, tmp_path):
    body, words, line = LOSSES[what]
    path = written(tmp_path, body)
    with pytest.raises(UserError, match=rf"^algorithm\.loss={path}:mine.*{words}") as raised:
        checked(path)
    assert str(raised.value).endswith(f"({path}, line {line})")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "preset", ["grpo", "gspo", "ppo", "reinforce_pp_baseline", "m2po", "m2po_areal"]
)
def test_a_good_loss_passes_in_every_surrounding(preset, tmp_path):
    path = written(tmp_path, "    return -scale * inputs.advantage * inputs.target, {}")
    fields = {"m2po": {"proximal": "behaviour"}, "m2po_areal": {"proximal": "recompute"}}
    checked(path, preset=preset, loss_kwargs='{"scale": 2}', **fields.get(preset, {}))
    assert jax.config.jax_default_device is None


IN_TORCH = {
    "of torch": ("    import torch\n    return torch.relu(inputs.target), {}", ""),
    "of either": ("    return inputs.ops.sigmoid(inputs.target) * inputs.advantage, {}", ""),
    "of jax": ("    return jnp.abs(inputs.target), {}", "TypeError"),
    "is not finite": ("    return inputs.target.log(), {}", "the loss of 15 of 15 tokens is not"),
    "has no gradient": ("    return (0 * inputs.target).sqrt(), {}", "the gradient is not"),
}


@pytest.mark.torch
@pytest.mark.parametrize("what", IN_TORCH)
def test_with_the_trainer_in_torch_it_is_given_tensors(what, tmp_path):
    body, words = IN_TORCH[what]
    path, config = written(tmp_path, body), config_lib.default()
    config.algorithm.loss = f"{path}:mine"
    with pytest.raises(UserError, match=words) if words else nullcontext():
        dry_call.check(TrainOptions.of(config).algorithm, "torch")


@pytest.mark.torch
def test_an_advantage_of_torch_is_tried_in_torch(tmp_path):
    path, config = tmp_path / "mine.py", config_lib.default()
    path.write_text(
        "import torch\n"
        "def mine(inputs, algorithm):\n"
        "    return torch.where(inputs.mask, inputs.kl_rewards + 1, 0.0)\n"
    )
    config.algorithm.advantage = f"{path}:mine"
    dry_call.check(TrainOptions.of(config).algorithm, "torch")
    with pytest.raises(UserError, match="TypeError"):
        dry_call.check(TrainOptions.of(config).algorithm)


def test_arguments_that_a_loss_does_not_take_are_named(tmp_path):
    path = written(tmp_path, "    return inputs.target, {}")
    with pytest.raises(UserError, match=rf"'scal' .*\({path}, line 2\)"):
        checked(path, loss_kwargs='{"scal": 2}')


def test_a_signature_that_is_not_a_losss_is_told_with_one_place(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def mine(inputs):\n    return inputs.target, {}\n")
    with pytest.raises(UserError, match=rf"TypeError: .* \({path}, line 1\)$") as raised:
        checked(path)
    assert str(raised.value).count(", line ") == 1


def test_a_misspelt_function_suggests_the_nearest(tmp_path):
    path = written(tmp_path, "    return inputs.target, {}")
    with pytest.raises(UserError, match="did you mean 'mine'"):
        checked(path, "mime")


ADVANTAGES = {
    "not finite": ("    return jnp.log(inputs.kl_rewards - 1)", "of 15 of 15 tokens is not", 2),
    "of trajectories": ("    return inputs.rewards", r"'advantage' of float32 \[4\]; wanted", 2),
    "fails": ("    return inputs.nonesuch", "AttributeError", 3),
}


@pytest.mark.parametrize("what", ADVANTAGES)
def test_an_advantage_that_fails_is_one_line_with_file_and_line(what, tmp_path):
    body, words, line = ADVANTAGES[what]
    path = written(tmp_path, body)
    config = config_lib.default()
    config.algorithm.advantage = f"{path}:mine"
    with pytest.raises(UserError, match=rf"^algorithm\.advantage={path}:mine.*{words}") as raised:
        dry_call.check(TrainOptions.of(config).algorithm)
    assert str(raised.value).endswith(f"({path}, line {line})")
