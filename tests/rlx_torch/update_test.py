"""The trainer in PyTorch does what the one in JAX does, and its state comes back bit for bit."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import optax
import pytest
import torch

from experiments.bench import train_step_workers as workers
from rlx.algorithms.presets import PRESETS
from rlx.base import Group, UserError
from rlx.config import default
from rlx.model import hf
from rlx.model import params as parameters
from rlx.run.export import Export
from rlx.train.learner import make_optimizer as make_jax_optimizer
from rlx.train.train_options import OptimizerOptions, TrainOptions
from rlx.train.update import JaxUpdate
from rlx_torch.optimizers import make_optimizer, step_offloaded
from rlx_torch.update import TorchUpdate
from tests.fixtures import rounding
from tests.train.prefix_trees_test import of_a_kind


def options(preset="grpo", **overrides):
    config = default()
    config.algorithm.preset = preset
    config.sampling.temperature = 0.8
    config.update_from_flattened_dict(
        {
            "train.max_tokens_per_microbatch": 128,
            "train.row_buckets": (64, 128),
            "optimizer.name": "sgd",
            "optimizer.learning_rate": 0.1,
            "critic.learning_rate": 0.1,
            **overrides,
        }
    )
    return TrainOptions.of(config)


def groups(samples=4, seed=3):
    lengths = np.random.default_rng(seed).integers([4, 3], [12, 30], (16, 2))
    return workers.make_groups(lengths, vocab=128, samples=samples)


def weights(trainer, state):
    return trainer.weights(state).arrays()


def trained(trainer, steps, samples=4):
    state, metrics = trainer.init(), {}
    for step in range(steps):
        state, metrics = trainer.update(state, groups(samples, seed=step))
    return state, dict(metrics)


CASES = {
    "grpo": {"algorithm.entropy_coefficient": 0.05, "train.minibatches": 2},
    "ppo": {
        "train.minibatches": 2, "algorithm.kl_placement": "loss", "algorithm.kl_target": 0.02,
        "algorithm.kl_coefficient": 0.1, "algorithm.kl_horizon": 100, "reference.mode": "ema",
        "reference.decay": 0.75,
    },
    "sft": {},
    "reward_model": {},
    "dpo": {"optimizer.name": "adamw", "optimizer.eps": 1e-3, "optimizer.weight_decay": 0.1},
}  # fmt: skip
OTHERS = {  # of the presets that are not in CASES, what is not their default
    "rloo": {
        "algorithm.kl_placement": "loss", "algorithm.kl_coefficient": 0.1, "reference.mode": "copy",
        "reference.every_steps": 1,
    },
    "dapo": {"algorithm.overlong_filter": True, "train.minibatches": 2},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("preset", sorted(set(PRESETS) - set(CASES)))
def test_one_update_of_every_preset_is_that_of_jax(preset, tiny_model_dir):
    # One length of rows: each is compiled for itself.
    own = options(preset, **{"train.row_buckets": (64,)}, **OTHERS.get(preset, {}))
    model, params = hf.load(tiny_model_dir)
    batch = of_a_kind(groups(2 if own.algorithm.data == "pairs" else 4), own.algorithm)
    held_out = of_a_kind(groups(2 if own.algorithm.data == "pairs" else 4, 9), own.algorithm)
    found = []
    for trainer in (
        JaxUpdate(model, own, source=lambda _: hf.load(tiny_model_dir)[1]),
        TorchUpdate(model, own, tiny_model_dir),
    ):
        state = trainer.init()
        losses = trainer.evaluate(state, held_out)
        state, metrics = trainer.update(state, batch)
        found.append((weights(trainer, state), dict(metrics), losses))
    (one, want, before), (two, got, again) = found
    assert again == pytest.approx(before, rel=1e-3, abs=1e-5)
    assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-3)
    moved = 0.0
    for name, tensor in hf.to_hf(params, model).items():
        apart = np.abs(one[name] - two[name]).max()
        assert apart <= 1e-5 * max(np.abs(one[name]).max(), 1.0), f"{name}: {apart:.1e} apart"
        moved = max(moved, np.abs(one[name] - tensor).max())
    assert moved > 1e-5, "nothing was learned"


@pytest.mark.parametrize("preset", CASES)
def test_updates_are_those_of_jax(preset, tiny_model_dir):
    """Two updates, in microbatches: the same weights, to float32's rounding, and statistics."""
    own = options(preset, **CASES[preset])
    model, params = hf.load(tiny_model_dir)
    samples = 2 if own.algorithm.data == "pairs" else 4
    jax_update = JaxUpdate(model, own, source=lambda _: hf.load(tiny_model_dir)[1])
    torch_update = TorchUpdate(model, own, tiny_model_dir)
    assert jax_update.state_bytes == pytest.approx(torch_update.state_bytes, rel=0.01)
    (state, want), (other, got) = (trained(t, 2, samples) for t in (jax_update, torch_update))
    assert set(got) == set(want)
    for name in set(want) - {"row_length", "pad_ratio"}:
        if isinstance(want[name], (int, float)):
            assert got[name] == pytest.approx(want[name], rel=1e-3, abs=1e-5), name
    before = hf.to_hf(params, model)
    one, two = weights(jax_update, state), weights(torch_update, other)
    assert set(one) == set(two)
    for name, tensor in one.items():
        apart = np.abs(tensor - two[name]).max()
        assert apart <= 1e-5 * max(np.abs(tensor).max(), 1.0), f"{name}: {apart:.1e} apart"
    moved = max(np.abs(one[name] - x).max() for name, x in before.items() if name in one)
    assert moved > 1e-3, "nothing was learned"


def test_bfloat16_moves_the_policy_as_its_roundings_do(tmp_path, tiny_model_dir):
    """Three batches: what rounding the matrices alone does, times `OF_A_LAYER`.

    Of a loss without bounds: a token at the bound of its weight is in or out by its last bit.
    """
    model, params = hf.load(tiny_model_dir)
    coarse = tmp_path / "coarse"
    hf.save(coarse, model, rounding.rounded(params), source=tiny_model_dir)
    moves = []
    for path, dtype in (
        (tiny_model_dir, "float32"), (coarse, "float32"), (tiny_model_dir, "bfloat16"),
    ):  # fmt: skip
        trainer = TorchUpdate(model, options("sft", **{"model.compute_dtype": dtype}), path)
        begun = weights(trainer, trainer.init())
        state, _ = trained(trainer, 3)
        moves.append({k: x - begun[k] for k, x in weights(trainer, state).items()})
    exact, matrices, found = moves
    inherent = rounding.apart(matrices, exact)
    assert 1e-4 < rounding.apart(found, exact) <= rounding.OF_A_LAYER * inherent


@pytest.mark.parametrize(
    ("preset", "overrides"),
    [
        ("grpo", {}), ("grpo", {"model.publish_dtype": "bfloat16"}), ("reward_model", {}),
        ("grpo", {"lora.rank": 4}),
    ],
)  # fmt: skip
def test_exported_directories_are_those_of_jax_byte_for_byte(
    preset, overrides, tiny_model_dir, tmp_path
):
    """hf/, of adapters merged into it too, and adapter/, whose files have one order of tensors."""
    own, (model, _) = options(preset, **overrides), hf.load(tiny_model_dir)
    jax_update = JaxUpdate(model, own, source=lambda _: hf.load(tiny_model_dir)[1])
    trainer = TorchUpdate(model, own, tiny_model_dir)
    state = trainer.init()
    if own.lora:
        adapters_of_jax(jax_update, state)
    found = []
    for update, of in ((jax_update, jax_update.init()), (trainer, state)):
        made = tmp_path / update.__class__.__name__
        made.mkdir()
        with ThreadPoolExecutor(1) as pool:
            export = Export(own, "path", update, tiny_model_dir, tiny_model_dir)
            saved = export.save(made, of, pool.submit, pool.submit(lambda: None))
        for each in saved:
            each.result()
        files = (path for path in made.rglob("*") if path.is_file())
        found.append({str(path.relative_to(made)): path.read_bytes() for path in files})
    one, two = found
    wanted = {f"hf/{name}" for name in ("config.json", "model.safetensors", "tokenizer.json")}
    if own.lora:
        wanted |= {"adapter/adapter_config.json", "adapter/adapter_model.safetensors"}
    assert wanted <= one.keys()
    assert one.keys() == two.keys()
    assert [name for name in one if one[name] != two[name]] == []


def test_weights_are_of_the_moment_that_they_were_asked_for(tiny_model_dir):
    """A publish is under way while the next update changes the state in place."""
    trainer = TorchUpdate(hf.load_config(tiny_model_dir), options(), tiny_model_dir)
    state = trainer.init()
    asked = trainer.weights(state).arrays()
    before = {name: tensor.copy() for name, tensor in asked.items()}
    trainer.update(state, groups())
    for name, tensor in before.items():
        np.testing.assert_array_equal(asked[name], tensor)


@pytest.mark.parametrize("warmup", [0, 2])
def test_a_state_comes_back_and_goes_on_bit_for_bit(warmup, tmp_path, tiny_model_dir):
    """Also one whose policy has made no update yet."""
    own = {**CASES["ppo"], "optimizer.name": "adamw", "critic.warmup_steps": warmup}
    own = options("ppo", **own, total_steps=9)
    trainer = TorchUpdate(hf.load_config(tiny_model_dir), own, tiny_model_dir)
    state, _ = trained(trainer, 1)
    writing = trainer.save(tmp_path / "state", state)
    state, want = trainer.update(state, groups(seed=1))  # while it is written
    writing.result()
    again = trainer.restore(tmp_path / "state")
    again, got = trainer.update(again, groups(seed=1))
    assert dict(got) == dict(want)
    one, two = weights(trainer, state), weights(trainer, again)
    for name, tensor in one.items():
        np.testing.assert_array_equal(tensor, two[name], err_msg=name)


def test_a_state_of_another_model_is_one_line(tmp_path, tiny_model_dir):
    model = hf.load_config(tiny_model_dir)
    trainer = TorchUpdate(model, options(), tiny_model_dir)
    trainer.save(tmp_path / "own", trainer.init()).result()
    other = TorchUpdate(model, options("ppo"), tiny_model_dir)
    with pytest.raises(UserError, match=r"has policy.moments.\S+ as nothing|critic\S+ as nothing"):
        other.restore(tmp_path / "own")
    with pytest.raises(UserError, match="was not written by trainer=torch"):
        other.restore(tmp_path)


def test_a_save_that_fails_says_what_the_system_said(tmp_path, tiny_model_dir):
    """So that a full disk is known as one."""
    trainer = TorchUpdate(hf.load_config(tiny_model_dir), options(), tiny_model_dir)
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        trainer.save(tmp_path / "file" / "state", trainer.init()).result()


def test_a_batch_without_a_trained_token_leaves_all_as_it_was(tiny_model_dir):
    own = options("ppo", **CASES["ppo"], **{"algorithm.overlong_filter": True})
    trainer = TorchUpdate(hf.load_config(tiny_model_dir), own, tiny_model_dir)
    state, batch = trainer.init(), groups()
    cut = [
        replace(g, trajectories=tuple(replace(t, stop_reason="length") for t in g.trajectories))
        for g in batch
    ]
    before = weights(trainer, state)
    state, metrics = trainer.update(state, cut)
    assert metrics["n_valid_tokens"] == 0
    assert metrics["kl_coefficient"] == state.kl_coefficient == pytest.approx(0.1)
    for name, tensor in weights(trainer, state).items():
        np.testing.assert_array_equal(tensor, before[name])


def test_a_reward_model_goes_on_from_its_head(tmp_path, tiny_model_dir):
    params, model = parameters.with_value_head(*hf.load(tiny_model_dir)[::-1])
    params["value_head"] = params["value_head"] + np.arange(model.model_dim, dtype=np.float32)
    hf.save(tmp_path / "reward", model, params)
    trainer = TorchUpdate(model, options("reward_model"), tmp_path / "reward")
    want = hf.to_hf(params, model)
    for name, tensor in weights(trainer, trainer.init()).items():
        np.testing.assert_array_equal(tensor, want[name], err_msg=name)


def test_a_gradient_that_is_not_finite_changes_nothing(tiny_model_dir):
    trainer = TorchUpdate(hf.load_config(tiny_model_dir), options(), tiny_model_dir)
    state = trainer.init()
    with torch.no_grad():
        state.policy.model.base_model.norm.weight[0] = torch.nan
    before = weights(trainer, state)
    state, metrics = trainer.update(state, groups())
    assert metrics["skipped_updates"] == 1
    for name, tensor in weights(trainer, state).items():
        np.testing.assert_array_equal(tensor, before[name])


def test_tokens_see_their_own_segment_alone(tiny_model_dir):
    """Of a batch in one microbatch, and of each trajectory by itself."""
    one = TorchUpdate(hf.load_config(tiny_model_dir), options(), tiny_model_dir)
    state, batch = one.init(), groups()
    together = one.logprobs(state, batch)
    apart = [one.logprobs(state, [Group(0, (t,))])[0] for g in batch for t in g.trajectories]
    for a, b in zip(together, apart, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)


def test_weights_cast_once_an_update_train_by_all_its_microbatches(tiny_model_dir):
    found = []
    for budget in (4096, 128):
        given = options(**{
            "model.compute_dtype": "bfloat16", "train.max_tokens_per_microbatch": budget,
            "train.row_buckets": (64, 128, budget), "model.remat": "full",
        })  # fmt: skip
        trainer = TorchUpdate(hf.load_config(tiny_model_dir), given, tiny_model_dir)
        begun = weights(trainer, trainer.init())
        state, metrics = trained(trainer, 1)
        moved = {k: x - begun[k] for k, x in weights(trainer, state).items()}
        found.append((moved, metrics["n_microbatches"]))
    (whole, one), (parts, several) = found
    assert one == 1 < several
    for name, change in whole.items():
        error = np.linalg.norm(change - parts[name]) / np.linalg.norm(change)
        assert error < 0.05, f"{name}: {error}"


@pytest.mark.parametrize("rule", ["lion", "sgd"])
def test_lion_and_sgd_are_those_of_optax(rule):
    """Alone, of the same gradients: of a model's, the sign of rounded zeros is anyone's."""
    own = OptimizerOptions(rule, 0.1, b1=0.8, b2=0.9, weight_decay=0.5)
    noise = np.random.default_rng(0).normal(size=(4, 3, 3)).astype(np.float32)
    first = {"w": noise[0], "a_norm": noise[0, 0]}
    theirs = make_jax_optimizer(own, 9)
    params, state = first, theirs.init(first)
    ours = [torch.nn.Parameter(torch.from_numpy(x.copy())) for x in first.values()]
    optimizer = make_optimizer(ours, own)
    for group in optimizer.param_groups:
        group["lr"] = own.learning_rate
    for part in noise[1:]:
        gradients = {"w": part, "a_norm": part[1]}
        updates, state = theirs.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        for p, gradient in zip(ours, gradients.values(), strict=True):
            p.grad = torch.from_numpy(gradient.copy())
        optimizer.step()
    moments = optax.tree.get(state, "mu")
    for p, name in zip(ours, first, strict=True):
        np.testing.assert_allclose(p.detach(), params[name], atol=1e-6, err_msg=name)
        if moments:
            np.testing.assert_allclose(optimizer.state[p]["exp_avg"], moments[name], atol=1e-6)
            assert optimizer.state[p]["step"] == 3


def test_offloaded_moments_come_back_from_every_step():
    torch.manual_seed(0)
    stepped = []
    for step in (torch.optim.AdamW.step, step_offloaded):
        params = [torch.nn.Parameter(torch.arange(n, dtype=torch.float32)) for n in (3, 4, 5)]
        two = [{"params": params[:2], "weight_decay": 0.1}, {"params": params[2:]}]
        optimizer = torch.optim.AdamW(two, lr=0.1, weight_decay=0.0)
        for p in params:
            moments = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[p] = {"step": torch.zeros(()), **moments}
        for scale in (1.0, 2.0):
            for p in params:
                p.grad = scale * torch.sin(p.detach())
            step(optimizer)
        assert [len(group["params"]) for group in optimizer.param_groups] == [2, 1]
        stepped.append([*params, *(optimizer.state[p]["exp_avg_sq"] for p in params)])
    for one, other in zip(*stepped, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_offloading_asks_for_a_gpu(tiny_model_dir):
    given = options(**{"train.offload_optimizer": True})
    with pytest.raises(UserError, match="needs a single process with a GPU, got 1 × cpu"):
        TorchUpdate(hf.load_config(tiny_model_dir), given, tiny_model_dir)


def test_the_trainer_needs_no_jax():
    program = "import sys, rlx_torch.update; print('jax' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == ["False", "True"], done.stderr


LORA = {"lora.rank": 4, "lora.targets": ("q", "v", "down"), "algorithm.kl_placement": "loss",
        "algorithm.kl_coefficient": 0.1}  # fmt: skip


def adapters_of_jax(trainer, state):
    """Gives a torch state the adapters that JAX's begins with."""
    tensors = trainer.weights(trainer.init(), adapters=True).arrays()
    with torch.no_grad():
        for name, p in state.policy.model.named_parameters():
            if p.requires_grad:
                stored = tensors.pop(f"base_model.model.{name.replace('.default', '')}")
                p.copy_(torch.from_numpy(np.array(stored)))
    assert not tensors, "PEFT's names are the same"
    return state


def test_adapters_are_trained_as_those_of_jax(tiny_model_dir, tmp_path):
    own = options("grpo", **LORA)
    model, _ = hf.load(tiny_model_dir)
    jax_update = JaxUpdate(model, own, source=lambda _: hf.load(tiny_model_dir)[1])
    trainer = TorchUpdate(model, own, tiny_model_dir)
    other = adapters_of_jax(jax_update, trainer.init())
    state, want = jax_update.update(jax_update.init(), groups())
    other, got = trainer.update(other, groups())
    state, want = jax_update.update(state, groups(seed=1))
    other, got = trainer.update(other, groups(seed=1))
    for name in ("actor_loss", "reference_kl", "grad_norm"):
        assert got[name] == pytest.approx(want[name], rel=1e-3, abs=1e-5), name
    for adapters in (True, False):
        one = jax_update.weights(state, adapters=adapters).arrays()
        two = trainer.weights(other, adapters=adapters).arrays()
        assert set(one) == set(two)
        for name, tensor in one.items():
            apart = np.abs(tensor - two[name]).max()
            assert apart <= 1e-5 * max(np.abs(tensor).max(), 1.0), f"{name}: {apart:.1e} apart"
    assert trainer.state_bytes == pytest.approx(jax_update.state_bytes, rel=0.01)
    trainer.save(tmp_path / "state", other).result()
    again = trainer.restore(tmp_path / "state")
    assert "q_proj.base_layer.weight" not in str(again.tree()["policy"]["model"].keys())
    one, two = weights(trainer, other), weights(trainer, again)
    for name, tensor in one.items():
        np.testing.assert_array_equal(tensor, two[name], err_msg=name)
