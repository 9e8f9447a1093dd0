"""Odd and broken HF directories: what is read all the same, and what is refused by name."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rlx.base import UserError
from rlx.model import hf

SIDE = "model.layers.1.mlp.up_proj.weight"  # any one tensor


@pytest.fixture
def copy(small_dir, tmp_path) -> Path:
    """A small directory to be damaged."""
    return shutil.copytree(small_dir, tmp_path / "copy")


def rewrite(path: Path, change) -> None:
    """Lets `change` edit the tensors of a directory in place."""
    tensors = load_file(path / hf.WEIGHTS)
    change(tensors)
    save_file(tensors, path / hf.WEIGHTS, metadata={"format": "pt"})


def reconfigure(path: Path, **changes) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_a_tied_matrix_stored_twice_is_read_while_both_agree(copy):
    reconfigure(copy, tie_word_embeddings=True)
    rewrite(copy, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].copy()}))
    assert "lm_head" not in hf.load(copy)[1]
    hf.check(copy)


def test_leftovers_of_old_exporters_are_passed_over(copy):
    inverse = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(3, np.float32)}
    rewrite(copy, lambda tensors: tensors.update(inverse))
    hf.load(copy)


@pytest.mark.parametrize(
    ("config", "generation", "wanted"), [(5, [7, 5], (5, 7)), (None, 9, (9,)), ([3], None, (3,))]
)
def test_end_tokens_of_both_files_count_once(config, generation, wanted, copy):
    reconfigure(copy, eos_token_id=config)
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert hf.load_config(copy).eos_token_ids == wanted


# Faults: one line that names what is wrong, the same from headers alone as from the whole read.


def remove(path):
    rewrite(path, lambda tensors: tensors.pop(SIDE))


def add(path):
    rewrite(path, lambda tensors: tensors.update({"model.bogus": np.zeros(2, np.float32)}))


def reshape(path):
    rewrite(path, lambda tensors: tensors.update({SIDE: tensors[SIDE][:-1]}))


def transpose(path):
    rewrite(path, lambda t: t.update({SIDE: np.ascontiguousarray(t[SIDE].T)}))


def untie(path):
    reconfigure(path, tie_word_embeddings=True)


def cut(path):
    file = path / hf.WEIGHTS
    file.write_bytes(file.read_bytes()[:-100])


def cut_short(path):
    file = path / hf.WEIGHTS
    file.write_bytes(file.read_bytes()[:100])


def text(path):
    (path / hf.WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\n")


def lose(name):
    def damage(path):
        (path / name).unlink()

    return damage


def write(name, content: bytes):
    def damage(path):
        (path / name).write_bytes(content)

    return damage


FAULTS = {
    "missing tensor": (remove, [SIDE, "1 tensor is missing"]),
    "extra tensor": (add, ["'model.bogus'", "Qwen3ForCausalLM"]),
    "mis-shaped tensor": (reshape, [SIDE, "(23, 16)", "(24, 16)"]),
    "transposed tensor": (transpose, [SIDE, "(16, 24)", "(24, 16)"]),
    "tied but different": (untie, ["'lm_head.weight' differs", "tie_word_embeddings"]),
    "too few layers": (
        lambda path: reconfigure(path, num_hidden_layers=1),
        ["model.layers.1.", "num_hidden_layers"],
    ),
    "end cut off": (cut, [hf.WEIGHTS, "not a whole safetensors file"]),
    "header cut off": (cut_short, [hf.WEIGHTS, "not a whole safetensors file"]),
    "empty weights": (write(hf.WEIGHTS, b""), [hf.WEIGHTS, "not a whole safetensors file"]),
    "pointer instead of weights": (text, [hf.WEIGHTS, "not a whole safetensors file"]),
    "no weights": (lose(hf.WEIGHTS), [hf.WEIGHTS, hf.INDEX]),
    "no config": (lose("config.json"), ["config.json is missing"]),
    "config is not JSON": (write("config.json", b'{\n"a": }'), ["config.json", "line 2"]),
    "config is not text": (write("config.json", b"\xff\xfe"), ["config.json", "not JSON"]),
    "config is a list": (write("config.json", b"[]"), ["config.json", "object"]),
    "generation config is not JSON": (
        write("generation_config.json", b"{"),
        ["generation_config.json", "line 1"],
    ),
}


def messages(path) -> list[str]:
    """What `load` and `check` say of a directory that they refuse."""
    found = []
    for read in (hf.load, hf.check):
        with pytest.raises(UserError) as error:
            read(path)
        found.append(str(error.value))
    return found


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_one_line_that_names_it(fault, copy):
    damage, words = FAULTS[fault]
    damage(copy)
    whole, headers = messages(copy)
    assert headers == whole
    assert "\n" not in whole
    for word in words:
        assert word in whole


def test_another_architecture_is_for_transformers_alone(copy):
    reconfigure(copy, architectures=["GPT2LMHeadModel"])
    hf.check(copy)  # what its tensors should be called is not known here
    with pytest.raises(UserError, match=r"'GPT2LMHeadModel'.*Qwen3ForCausalLM.*trainer=torch"):
        hf.load(copy)


def lose_shard(path):
    victim = sorted(path.glob("*.safetensors"))[1]
    victim.unlink()
    return [victim.name, "missing"]


def cut_shard(path):
    victim = sorted(path.glob("*.safetensors"))[1]
    victim.write_bytes(victim.read_bytes()[:-1])
    return [victim.name, "not a whole safetensors file"]


def forget_shard(path):
    """An index that leaves out one file, as a download of another revision's index does."""
    index = json.loads((path / hf.INDEX).read_text())
    victim = sorted(path.glob("*.safetensors"))[1].name
    lost = sorted(name for name, file in index["weight_map"].items() if file == victim)
    index["weight_map"] = {n: f for n, f in index["weight_map"].items() if f != victim}
    (path / hf.INDEX).write_text(json.dumps(index))
    return [f"'{lost[0]}'", f"{len(lost)} tensors are missing"]


def break_index(path):
    (path / hf.INDEX).write_text("{}x")
    return [hf.INDEX, "not JSON"]


def empty_index(path):
    (path / hf.INDEX).write_text("{}")
    return [hf.INDEX, "weight_map"]


@pytest.mark.parametrize("damage", [lose_shard, cut_shard, forget_shard, break_index, empty_index])
def test_a_fault_of_a_sharded_directory_is_named(damage, sharded_dir, tmp_path):
    path = shutil.copytree(sharded_dir, tmp_path / "sharded")
    words = damage(path)
    whole, headers = messages(path)
    assert headers == whole
    assert "\n" not in whole
    for word in words:
        assert word in whole
