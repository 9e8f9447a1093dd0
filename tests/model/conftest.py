"""Random models of transformers, the oracle of this room."""

import jax.numpy as jnp
import numpy as np
import pytest

COMMON = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}
# name → (transformers config class, what differs from COMMON)
MODELS = {
    "qwen2": ("Qwen2Config", {}),
    "qwen2-tied-yarn": ("Qwen2Config", {"tie_word_embeddings": True, "rope_parameters": YARN}),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "qwen3-tied-yarn": (
        "Qwen3Config",
        {
            "head_dim": 10,
            "tie_word_embeddings": True,
            "rope_parameters": YARN
            | {"truncate": False, "beta_fast": 8.0, "attention_factor": 1.3},
        },
    ),
    "qwen3-bias": ("Qwen3Config", {"head_dim": 8, "attention_bias": True}),
    "llama": ("LlamaConfig", {"num_key_value_heads": 4}),
    "llama-tied-llama3": ("LlamaConfig", {"tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "llama-linear-bias": ("LlamaConfig", {"attention_bias": True, "rope_parameters": LINEAR}),
}


@pytest.fixture(scope="session", params=sorted(MODELS))
def oracle(request, tmp_path_factory):
    """(transformers model in float32, the HF directory it was saved in)."""
    return make_oracle(request.param, tmp_path_factory)


@pytest.fixture(scope="session", params=["qwen2", "qwen3-tied-yarn", "llama-tied-llama3"])
def few(request, tmp_path_factory):
    """As `oracle`, for the slower comparisons: one model of each architecture."""
    return make_oracle(request.param, tmp_path_factory)


@pytest.fixture(scope="session")
def one(tmp_path_factory):
    """As `oracle`, for what does not depend on the architecture."""
    return make_oracle("qwen2", tmp_path_factory)


def make_oracle(name, tmp_path_factory):
    import torch
    import transformers

    kind, changes = MODELS[name]
    torch.set_num_threads(1)  # tiny matrices: more threads only wait for each other
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**(COMMON | changes))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    with torch.no_grad():  # biases and norm scales start at 0 and 1: a bug there would not show
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    path = tmp_path_factory.mktemp(name)
    model.save_pretrained(path)
    return model, path


@pytest.fixture
def rows():
    """A batch of two rows: three segments and padding; one segment that fills its row."""
    rng = np.random.default_rng(0)
    lengths = [[20, 9, 12], [48]]
    batch = {name: np.zeros((2, 48), np.int32) for name in ("tokens", "positions", "segment_ids")}
    for row, segments in enumerate(lengths):
        start = 0
        for index, length in enumerate(segments):
            span = slice(start, start + length)
            batch["tokens"][row, span] = rng.integers(0, 97, length)
            batch["positions"][row, span] = np.arange(length)
            batch["segment_ids"][row, span] = index + 1
            start += length
    return {name: jnp.asarray(array) for name, array in batch.items()}


# A smaller one, of which many are made: each kind in each dtype.
SMALL = {
    "vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6,
    "max_position_embeddings": 64, "initializer_range": 0.3,
}  # fmt: skip


def _make_small(architecture="Qwen3", tied=False, dtype="float32"):
    """A random model of transformers; scales and biases, 1 and 0 at first, are random too."""
    import torch
    import transformers

    torch.set_num_threads(1)
    torch.manual_seed(0)
    options = {**SMALL, "tie_word_embeddings": tied}
    if architecture == "Qwen2":
        del options["head_dim"]  # its class in transformers has none
    config = getattr(transformers, f"{architecture}Config")(**options)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


@pytest.fixture(scope="session")
def make_small():
    """make_small(architecture, tied, dtype) → a random model of transformers."""
    return _make_small


@pytest.fixture(scope="session")
def small_dir(tmp_path_factory):
    """A small Qwen3 in one file, written by transformers. Read only."""
    path = tmp_path_factory.mktemp("small") / "model"
    _make_small().save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def sharded_dir(tmp_path_factory):
    """The same model in several files with an index. Read only."""
    path = tmp_path_factory.mktemp("small") / "sharded"
    _make_small().save_pretrained(path, max_shard_size="8KB")
    return path
