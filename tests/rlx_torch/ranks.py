"""Run by sharding_test: trainers of two and of four processes do what one does.

    python ranks.py DIRECTORY

Four processes are forked once, for what they import takes longest. They are alone first, then two
pairs at a time, then all together, then alone again.
"""

import os
import socket
import sys
import threading
import time
import traceback
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
import torch.distributed.checkpoint  # before the fork
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3Config

from experiments.bench import train_step_workers as workers
from rlx.config import default
from rlx.model.directory import load_config
from rlx.train.train_options import TrainOptions
from rlx_torch import sharding
from rlx_torch.update import TorchUpdate

MB = 1 << 20
SMALL = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    "initializer_range": 0.1,
}  # fmt: skip
LARGE = {**SMALL, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8}
MODELS = {
    "untied": Qwen3Config(**SMALL, head_dim=16, tie_word_embeddings=False),
    "tied": Qwen2Config(**SMALL, tie_word_embeddings=True),
    "large": Qwen2Config(**{**LARGE, "vocab_size": 8192}, tie_word_embeddings=False),
}
SGD = {"optimizer.name": "sgd", "optimizer.learning_rate": 0.1, "critic.learning_rate": 0.1}
CASES = {  # preset → its model, and what differs
    "ppo": ("untied", {
        "train.minibatches": 2, "algorithm.kl_placement": "loss", "algorithm.kl_target": 0.02,
        "algorithm.kl_coefficient": 0.1, "algorithm.kl_horizon": 100, "reference.mode": "ema",
        "reference.decay": 0.75, "optimizer.learning_rate": 1e-3, "optimizer.eps": 1e-3,
        "model.remat": "full",
    }),
    "grpo": ("tied", {**SGD, "algorithm.entropy_coefficient": 0.05}),
    "sft": ("untied", {**SGD, "optimizer.clip_norm": 0.05}),
    "rloo": ("untied", {
        "lora.rank": 4, "algorithm.kl_placement": "loss", "algorithm.kl_coefficient": 0.1,
        "reference.mode": "copy", "reference.every_steps": 2, "optimizer.learning_rate": 1e-2,
        "optimizer.eps": 1e-3,
    }),
}  # fmt: skip
PACKED = {"n_microbatches", "pad_ratio", "row_length"}  # which differ with the processes
SAVED = ("ppo", "rloo")
UPDATES = 2


def trainer(root, case, mesh="", **more):
    config, (model, own) = default(), CASES[case]
    config.algorithm.preset = case
    config.sampling.temperature = 0.8
    config.update_from_flattened_dict(
        {
            "train.max_tokens_per_microbatch": 128, "train.row_buckets": (64, 128),
            "train.mesh": mesh, **own, **more,
        }
    )  # fmt: skip
    path = root / model
    return TorchUpdate(load_config(path), TrainOptions.of(config), path)


def groups(seed):
    lengths = np.random.default_rng(seed).integers([4, 3], [12, 30], (16, 2))
    return workers.make_groups(lengths, vocab=128, samples=4)


def scored(update):
    """What the trainer of a run gives after some updates, by name; and its state."""
    state, metrics = update.init(), {}
    for step in range(UPDATES):
        state, metrics = update.update(state, groups(step))
    found = {f"metric {k}": v for k, v in metrics.items() if isinstance(v, (int, float))}
    found |= {f"held out {k}": v for k, v in update.evaluate(state, groups(7)).items()}
    found["logprobs"] = np.concatenate(update.logprobs(state, groups(8)[:1]))  # fewer than rows
    if any(".lora_" in name for name in state.tree()["policy"]["model"]):
        found |= update.weights(state, adapters=True).arrays()
    return {**found, **update.weights(state).arrays()}, state


def same(root, case, mesh):
    wanted = np.load(root / f"{case}.npz")
    found, state = scored(trainer(root, case, mesh))
    assert found.keys() == set(wanted.files), found.keys() ^ set(wanted.files)
    for name, want in wanted.items():
        if name.split()[-1] in PACKED:
            continue
        exact = " " in name
        np.testing.assert_allclose(
            found[name], want, rtol=1e-3 if exact else 1e-5, atol=1e-5,
            err_msg=f"{case} on {mesh}: {name}",
        )  # fmt: skip
    return state


def half(root, mesh):
    """Products in bfloat16: near what float32 gives, and parameters and gradients stay float32."""
    update = trainer(root, "ppo", mesh, **{"model.compute_dtype": "bfloat16"})
    state = update.init()
    before = np.concatenate(update.logprobs(state, groups(8)))
    whole = trainer(root, "ppo", mesh)
    wanted = np.concatenate(whole.logprobs(whole.init(), groups(8)))
    assert 0 < np.abs(before - wanted).max() < 0.2
    assert np.abs(before - wanted).mean() < 0.02
    state, metrics = update.update(state, groups(0))
    assert metrics["skipped_updates"] == metrics["critic_skipped_updates"] == 0
    assert {p.dtype for p in state.policy.model.parameters()} == {torch.float32}
    assert {p.grad.dtype for p in state.policy.model.parameters()} == {torch.float32}


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def copied(root, mesh, source, target):
    """Restore checkpoints, save them again, and train on while they are written."""
    for case in SAVED:
        update = trainer(root, case, mesh)
        state = update.restore(root / case / source)
        writing = update.save(root / case / target, state)
        update.update(state, groups(9))
        writing.result(300)


def leaves(tree, name=""):
    if isinstance(tree, dict):
        return {k: v for key, x in tree.items() for k, v in leaves(x, f"{name}.{key}").items()}
    return {name: tree}


def unchanged(root, source, targets):
    """What went from mesh to mesh is, bit for bit, what one process has saved."""
    for case, target in product(SAVED, targets):
        update = trainer(root, case)
        want = leaves(update.restore(root / case / source).tree())
        assert any("exp_avg_sq" in name for name in want), "no moments"
        assert any(name.startswith(".reference.") for name in want), "no reference"
        got = leaves(update.restore(root / case / target).tree())
        assert got.keys() == want.keys()
        for name, leaf in want.items():
            assert torch.equal(torch.as_tensor(got[name]), torch.as_tensor(leaf)), (target, name)


def skipped(root, mesh, rank):
    """A number that is not finite, on one process, changes nothing on any."""
    update = trainer(root, "ppo", mesh)
    state = update.init()
    with torch.no_grad():
        if rank:
            state.policy.model.base_model.layers[1].mlp.up_proj.weight.to_local()[0] = torch.nan
    before = update.weights(state).arrays()
    state, metrics = update.update(state, groups(0))
    assert metrics["skipped_updates"] == 2
    assert metrics["critic_skipped_updates"] == 0
    for name, tensor in update.weights(state).arrays().items():
        np.testing.assert_array_equal(tensor, before[name], err_msg=name)


def own_memory():
    """Bytes that this process has for itself, the pages of files not counted."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) << 10


def loaded_by_slices(root, mesh):
    """No process ever has more of a model than its part and a slice."""
    ranks, before, most, done = sharding.Ranks(mesh), own_memory(), [0], threading.Event()

    def watch():
        while not done.wait(0.001):
            most[0] = max(most[0], own_memory() - before)

    watching = threading.Thread(target=watch)
    watching.start()
    model = ranks.load(root / "large", "float32", False, False)
    done.set()
    watching.join()
    sizes = [p.to_local().nbytes for p in model.parameters()]
    whole = sum(p.numel() * 4 for p in model.parameters())
    print(f"whole {whole / MB:.0f} MB, own {sum(sizes) / MB:.0f}, peak {most[0] / MB:.0f}")
    assert sum(sizes) < 0.51 * whole
    assert most[0] < sum(sizes) + 2 * max(sizes) + 16 * MB < 0.8 * whole


def act(me, root, ports, together):
    torch.set_num_threads(1)
    case = dict(enumerate(CASES)).get(me)
    if case:
        found, state = scored(update := trainer(root, case))
        np.savez(root / f"{case}.npz", **found)
        if case in SAVED:
            update.save(root / case / "one", state).result()
    pair, place = divmod(me, 2)
    if not place:
        ports[pair] = free_port()
    together.wait()

    sharding.join(f"127.0.0.1:{ports[pair]}", place, 2, 300)
    mesh = ("fsdp:2", "fsdp:1,tensor:2")[pair]
    if not pair:
        loaded_by_slices(root, mesh)
        skipped(root, mesh, place)
    for case in CASES:
        same(root, case, mesh)
    half(root, mesh)
    copied(root, ("fsdp:2", "replica:2")[pair], "one", f"two {pair}")
    sharding.leave()
    if not me:
        ports[2] = free_port()
    together.wait()

    sharding.join(f"127.0.0.1:{ports[2]}", me, 4, 300)
    same(root, "ppo", "replica:2,fsdp:2")
    copied(root, "fsdp:2,tensor:2", "two 0", "four")
    sharding.leave()
    if not me:
        unchanged(root, "one", ["two 0", "two 1", "four"])


def run(me, *given):
    try:
        act(me, *given)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def main(root):
    torch.set_num_threads(1)  # no threads of OpenMP, which do not survive a fork
    for name, config in MODELS.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.save_pretrained(root / name)
    context = get_context("fork")
    together, ports = context.Barrier(4), context.Array("i", 3)
    processes = [context.Process(target=run, args=(me, root, ports, together)) for me in range(4)]
    for process in processes:
        process.start()
    while any(process.is_alive() for process in processes):
        if any(process.exitcode for process in processes):
            for process in processes:
                process.kill()
            sys.exit(1)
        time.sleep(0.1)
    sys.exit(max(abs(process.exitcode) for process in processes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
