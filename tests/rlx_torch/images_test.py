"""Models that see images: packed rows are single samples, updates are plain torch's."""

import copy
import functools
import io
import socket
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoConfig, AutoModelForImageTextToText

from rlx.base import Group, Trajectory, UserError
from rlx.config import check, default
from rlx.model import directory
from rlx.model.tensors import write_directory
from rlx.train import packing
from rlx_torch import packed_model, sharding, vision
from rlx_torch.update import TorchUpdate
from tests.rlx_torch.update_test import options, weights

PIL = pytest.importorskip("PIL.Image")

IMAGE = 5  # the placeholder
TEXT = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0,
    "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
SIGLIP = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 32, "patch_size": 8,
}  # fmt: skip
IDEFICS = {
    "text_config": {"model_type": "llama", **TEXT}, "vision_config": SIGLIP, "scale_factor": 2,
}  # fmt: skip
QWEN = {
    "text_config": {**TEXT, "rope_parameters": MROPE}, "vision_start_token_id": 3,
    "vision_end_token_id": 4, "video_token_id": 6,
}  # fmt: skip
KINDS = {
    "idefics3": IDEFICS,
    "smolvlm": IDEFICS,
    "gemma3": {
        "text_config": {**TEXT, "sliding_window": 8, "query_pre_attn_scalar": 8,
                        "layer_types": ["sliding_attention", "full_attention"] * 1
                        + ["sliding_attention"]},
        "vision_config": {"model_type": "siglip_vision_model", **SIGLIP},
        "mm_tokens_per_image": 4,
    },
    "qwen2_vl": QWEN | {
        "vision_config": {"depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2,
                          "mlp_ratio": 2, "patch_size": 4},
    },
    "qwen2_5_vl": QWEN | {
        "vision_config": {"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2,
                          "out_hidden_size": 32, "patch_size": 4, "window_size": 16,
                          "fullatt_block_indexes": [1]},
    },
    "qwen3_vl": QWEN | {
        "vision_config": {"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2,
                          "out_hidden_size": 32, "patch_size": 4, "num_position_embeddings": 16,
                          "deepstack_visual_indexes": [0, 1]},
    },
}  # fmt: skip


def processor(kind):
    """The image processor of a kind by Pillow, small."""
    if kind in ("idefics3", "smolvlm"):
        from transformers import Idefics3ImageProcessorPil

        side = {"longest_edge": 32}
        return Idefics3ImageProcessorPil(do_image_splitting=False, size=side, max_image_size=side)
    if kind == "gemma3":
        from transformers import Gemma3ImageProcessorPil

        return Gemma3ImageProcessorPil(size={"height": 32, "width": 32})
    from transformers import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil(patch_size=4, min_pixels=64, max_pixels=1024)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Returns a directory of a random model of a kind, and the model, by transformers' own code."""
    found = {}

    def make(kind):
        if kind not in found:
            torch.manual_seed(0)
            config = AutoConfig.for_model(kind, **KINDS[kind], image_token_id=IMAGE)
            model = AutoModelForImageTextToText.from_config(
                config, dtype=torch.float32, attn_implementation="eager"
            ).eval()
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(torch.randn_like(p) * p.abs().mean().clamp(min=0.02))
            path = tmp_path_factory.mktemp(kind)
            model.save_pretrained(path)
            processor(kind).save_pretrained(path)
            found[kind] = path, model
        return found[kind]

    return make


def pictures():
    noise = np.random.default_rng(0)
    found = {}
    for name, size in {"a": (16, 32), "b": (32, 16), "c": (24, 24)}.items():
        with io.BytesIO() as file:
            PIL.fromarray(noise.integers(0, 255, (*size, 3), np.uint8)).save(file, "png")
            found[name] = file.getvalue()
    return found


PICTURES = pictures()


def trajectory(kind, names, seed, chosen=IMAGE):
    """A prompt with images, then sampled tokens, one of which is by chance the placeholder."""
    sampled = 6
    chance = np.random.default_rng(seed)
    tokens = [*chance.integers(8, 60, 3)]
    for name in names:
        picture = PIL.open(io.BytesIO(PICTURES[name]))
        count = number(processor(kind)(images=[picture], return_tensors="pt"), kind)
        tokens += [3, *[IMAGE] * count, 4, *chance.integers(8, 60, 2)]
    answer = chance.integers(8, 60, sampled)
    answer[1] = chosen
    mask = np.repeat([False, True], [len(tokens), sampled])
    return Trajectory(
        tokens=np.array([*tokens, *answer], np.int32), loss_mask=mask,
        versions=np.where(mask, 0, -1).astype(np.int32),
        behaviour_logprobs=np.zeros(len(mask), np.float32), reward=float(seed % 2),
        images=tuple(names), stop_reason="stop", trajectory_id=str(seed),
    )  # fmt: skip


def number(inputs, kind):
    """How many placeholders an image has."""
    if kind == "gemma3":
        return 4
    if "image_grid_thw" in inputs:
        return int(inputs["image_grid_thw"].prod()) // 4
    return 4 * inputs["pixel_values"].shape[1]


NAMED = (("a",), (), ("b", "a"), ("c",), ("a",))


def batch(kind, chosen=IMAGE):
    parts = [trajectory(kind, names, i, chosen) for i, names in enumerate(NAMED)]
    return [Group(0, parts[:3]), Group(1, parts[3:])]


def alone(model, kind, t):
    """Log-probabilities of a single sample, by the model's own forward pass on pixels."""
    holders = (t.tokens == IMAGE) & (t.versions < 0)
    base, ids = model.model, torch.from_numpy(t.tokens)[None].long()
    given = {}
    if t.images:
        found = [
            processor(kind)(images=[PIL.open(io.BytesIO(PICTURES[n]))], return_tensors="pt")
            for n in t.images
        ]
        join = 1 if kind in ("idefics3", "smolvlm") else 0
        given = {
            key: torch.cat([torch.as_tensor(x[key]) for x in found], join)
            for key in ("pixel_values", "pixel_attention_mask", "image_grid_thw") if key in found[0]
        }  # fmt: skip
        types = torch.from_numpy(holders)[None].int()
        if kind == "gemma3":
            given["token_type_ids"] = types
        elif "image_grid_thw" in given:
            given["mm_token_type_ids"] = types
    # The model's own code takes any placeholder for an image: the one that was sampled becomes
    # another word, and gets its embedding back.
    chosen = torch.from_numpy(t.tokens == IMAGE)[None] & ~torch.from_numpy(holders)
    table = model.get_input_embeddings()
    right = table(torch.tensor(IMAGE))
    hook = table.register_forward_hook(
        lambda _, __, out: torch.where(chosen[..., None], right, out)
    )
    states = base(input_ids=ids.masked_fill(chosen, 7), **given, use_cache=False).last_hidden_state
    hook.remove()
    logits = model.get_output_embeddings()(states)[0]
    found = torch.log_softmax(logits / 0.8, -1)[:-1]
    return found.gather(1, ids[0, 1:, None])[:, 0]


def packed(groups, rows=(64, 128)):
    flat = packing.flatten(groups)
    plan = packing.plan(flat.sizes, rows[-1], rows)
    return flat, packing.microbatches(flat, np.arange(flat.num_sequences), plan)


def read(name):
    return PICTURES[name]


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_logprobs_are_those_of_each_sample_alone(kind, frozen, made):
    path, own = made(kind)
    model = packed_model.load(path, "cpu", "float32")
    images = vision.Images(path, model.config, read, frozen)
    groups = batch(kind)
    flat, parts = packed(groups)
    got = np.zeros(len(flat.tokens["tokens"]), np.float32)
    for part in parts:
        whole = {k: x for k, x in part.items() if k != "loss_mask"}
        given = packed_model.put(whole, "cpu", images)
        found = packed_model.logprobs(model, given, temperature=0.8, chunk=16)[0]
        inside = part["flat_index"] < len(got)
        got[part["flat_index"][inside]] = found.detach().numpy()[inside]
    trajectories = [t for g in groups for t in g.trajectories]
    for t, start in zip(trajectories, flat.starts, strict=True):
        want = alone(own, kind, t).detach()
        np.testing.assert_allclose(got[start + 1 : start + len(t.tokens)], want, atol=1e-4)


def trainer(path, preset="sft", **more):
    given = options(preset, **{"optimizer.clip_norm": 0.0, "train.row_buckets": (64,), **more})
    update = TorchUpdate(directory.load_config(path), given, path)
    update.images = read
    return update


@pytest.mark.parametrize("how", ["frozen", pytest.param("trained", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_an_update_is_that_of_plain_torch(kind, how, made, monkeypatch):
    """Of images and text in several microbatches; a frozen tower sees each image once."""
    path, own = made(kind)
    groups = batch(kind, chosen=9)
    update = trainer(path, **{"train.vision": how, "train.max_tokens_per_microbatch": 64})
    state = update.init()
    kind_of, seen = type(state.policy.model.model), []
    features = kind_of.get_image_features

    @functools.wraps(features)
    def counted(*given, **more):
        seen.append(1)
        return features(*given, **more)

    monkeypatch.setattr(kind_of, "get_image_features", counted)
    before = weights(update, state)
    state, metrics = update.update(state, groups)
    assert metrics["n_microbatches"] > 1
    if how == "frozen":
        assert len(seen) == len(PICTURES)
        update.update(update.init(), groups)
        assert len(seen) == len(PICTURES)
    monkeypatch.undo()

    plain = copy.deepcopy(own)
    if how == "frozen":
        vision.freeze(plain)
    trajectories = [t for g in groups for t in g.trajectories]
    losses = [-alone(plain, kind, t)[torch.from_numpy(t.loss_mask[1:])].sum() for t in trajectories]
    (sum(losses) / sum(t.loss_mask.sum() for t in trajectories)).backward()
    with torch.no_grad():
        for p in plain.parameters():
            p.sub_(0.1 * p.grad) if p.grad is not None else None
    wanted = {k: x.numpy() for k, x in packed_model.hf_tensors(plain, plain.state_dict()).items()}
    after = weights(update, state)
    moved = {name: np.abs(wanted[name] - x).max() for name, x in before.items()}
    for name, x in after.items():
        np.testing.assert_allclose(x, wanted[name], atol=1e-5, err_msg=name)
    names = set(packed_model.hf_tensors(plain, vision.tower(plain)))
    assert max(moved.values()) > 1e-3
    assert names
    if how == "trained":
        assert max(moved[n] for n in moved if any(n.endswith(t) for t in names)) > 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_is_the_file_it_came_from(kind, made, tmp_path):
    path, own = made(kind)
    update = trainer(path)
    state = update.init()
    write_directory(tmp_path / "hf", update.model, update.weights(state), source=path)
    one, two = (load_file(p / "model.safetensors") for p in (path, tmp_path / "hf"))
    assert {k: (x.shape, x.tobytes()) for k, x in one.items()} == {
        k: (x.shape, x.tobytes()) for k, x in two.items()
    }
    again = AutoModelForImageTextToText.from_pretrained(
        tmp_path / "hf", attn_implementation="eager"
    ).eval()
    t = trajectory(kind, ("a",), 0)
    assert torch.equal(alone(again, kind, t), alone(own, kind, t))
    assert vision.Images(tmp_path / "hf", own.config, bytes, frozen=True).processor


@pytest.mark.parametrize("how", ["frozen", "trained"])
def test_adapters_are_where_the_tower_is_trained_or_not(how, made):
    path, _ = made("idefics3")
    more = {"lora.rank": 2, "lora.targets": ("q", "v"), "train.vision": how}
    update = trainer(path, **more)
    state = update.init()
    before = weights(update, state)
    state, metrics = update.update(state, batch("idefics3"))
    assert metrics["grad_norm"] > 0
    adapters = update.weights(state, adapters=True).arrays()
    assert any(".text_model." in name for name in adapters)
    assert any(".vision_model." in name for name in adapters) == (how == "trained")
    after = weights(update, state)
    changed = {name for name, x in after.items() if not np.array_equal(x, before[name])}
    assert all(name.endswith(("q_proj.weight", "v_proj.weight")) for name in changed)
    assert changed
    moments = update._count_bytes()
    assert moments == 4 * sum(p.numel() for p in state.policy.model.parameters() if p.requires_grad)


def test_a_state_comes_back_without_the_frozen_tower(made, tmp_path):
    path, _ = made("qwen2_5_vl")
    more = {
        "algorithm.kl_placement": "loss", "algorithm.kl_coefficient": 0.1,
        "reference.mode": "ema", "reference.decay": 0.5, "optimizer.name": "adamw",
    }  # fmt: skip
    update = trainer(path, "ppo", **more)
    state, metrics = update.update(update.init(), batch("qwen2_5_vl"))
    assert metrics["grad_norm"] > 0
    assert metrics["critic_grad_norm"] > 0
    update.save(tmp_path / "state", state).result()
    again = update.restore(tmp_path / "state")
    for part in ("policy", "critic", "reference"):
        tree = again.tree()[part]
        names = tree if part == "reference" else tree["model"]
        assert names
        assert not any("visual" in name for name in names), part
    (state, one), (again, two) = (update.update(s, batch("qwen2_5_vl")) for s in (state, again))
    assert one["actor_loss"] == two["actor_loss"]
    for name, x in weights(update, state).items():
        np.testing.assert_array_equal(x, weights(update, again)[name], err_msg=name)


def test_what_cannot_be_is_one_line(made, tmp_path):
    path, _ = made("gemma3")
    with pytest.raises(UserError, match=r"share_prefixes=on and models that see images .*; set it"):
        trainer(path, **{"train.share_prefixes": "on"})
    config = default()
    config.model.path, config.train.vision = str(path), "trained"
    with pytest.raises(UserError, match=r"train\.vision works only with trainer=torch"):
        check(config)
    model = directory.load_config(path)
    with pytest.raises(UserError, match=r"trainer=torch with fleet.engine=vllm"):
        model.require_ours("trainer=jax")
    update, groups = trainer(path), batch("gemma3")
    short = replace(groups[0].trajectories[0], images=("a", "b"))
    with pytest.raises(UserError, match=r"has 4 placeholders .* its 2 images have 8 features; ren"):
        update.update(update.init(), [Group(0, [short])])
    del update.images
    update = TorchUpdate(model, options("sft"), path)
    with pytest.raises(UserError, match=r"has the image [abc], and no directory of images"):
        update.update(update.init(), groups)
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    with pytest.raises(UserError, match=r"has no image processor .*preprocessor_config.json"):
        _ = vision.Images(tmp_path, None, bytes, frozen=True).processor
    with torch.device("meta"):
        shapes = packed_model.empty(path)
    with pytest.raises(UserError, match="sees images, whose tower is not cut by heads; use only"):
        sharding.check_plan(shapes)


def share(rank, port, root, kind, how):
    torch.set_num_threads(1)
    sharding.join(f"127.0.0.1:{port}", rank, 2, 300)
    update = trainer(root / "model", **{"train.mesh": "fsdp:2", "train.vision": how})
    state, metrics = update.update(update.init(), batch(kind)[:1])
    found = {**weights(update, state), "norm": np.array(metrics["grad_norm"])}
    if not rank:
        np.savez(root / "two.npz", **found)
    sharding.leave()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "how"), [("qwen3_vl", "frozen"), ("gemma3", "trained")])
def test_two_processes_do_what_one_does(kind, how, made, tmp_path):
    """Processes have other images, and one of them may have none."""
    path, _ = made(kind)
    (tmp_path / "model").symlink_to(path)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(share, (port, tmp_path, kind, how), nprocs=2)
    update = trainer(path, **{"train.vision": how})
    state, metrics = update.update(update.init(), batch(kind)[:1])
    found = np.load(tmp_path / "two.npz")
    np.testing.assert_allclose(found["norm"], metrics["grad_norm"], rtol=1e-5)
    for name, x in weights(update, state).items():
        np.testing.assert_allclose(found[name], x, atol=1e-5, err_msg=name)
