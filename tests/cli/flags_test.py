"""A wrong command line ends in one line that says got, wanted and remedy."""

import pytest

from rlx.base import UserError
from rlx.cli import flags
from rlx.config import check

CONFIG = "--config=configs/gsm8k.py"


def parsed(*arguments):
    config, _ = flags.parse(["rlx.main", *arguments], workdir="directory")
    check(config)
    return config


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["--config=FILE", "rlx:arithmetic"]),
        (["--config"], ["--config=FILE"]),
        ([CONFIG, "--config.zzz=1"], ["'zzz'", "rlx/config.py", "sampling, "]),
        ([CONFIG, "--config.fleet.qqqqqqqq=1"], ["fleet.slots", "fleet.engine"]),
        (["--config=rlx:gsm8"], ["no config rlx:gsm8; did you mean rlx:gsm8k?"]),
        (["--config=rlx:cluster/math_7b_n5"], ["did you mean rlx:cluster/math_7b_n4?"]),
        (["--config=rlx:zzzzzzzz"], ["rlx:zzzzzzzz; they are the files in", "configs"]),
        (["--config=rlx:arithmetic:argument"], ["get_config() takes 0"]),
        (["--config=configs/gsm8.py"], ["no config file configs/gsm8.py", "configs/gsm8k.py"]),
        ([CONFIG, "--config.samplng.n_samples=3"], ["'samplng.n_samples'", "'sampling.n_samples'"]),
        ([CONFIG, "--config.sampling.n_sampels=3"], ["'sampling.n_samples'"]),
        ([CONFIG, "--config.sampling.n_samples=x"], ["n_samples=x"]),
        ([CONFIG, "--config.sampling.n_samples"], ["no value"]),
        ([CONFIG, "--config.sampling.n_samples=0"], ["sampling.n_samples=0", "1 or more"]),
        ([CONFIG, "--config.fleet.engine=vlm"], ["'vlm'", "'vllm'"]),
        ([CONFIG, "--config.sampling.temperature=0"], ["temperature=0", "above 0"]),
        ([CONFIG, "--config.train.max_tokens_per_microbatch=100"], ["=100", "1536", "raise it"]),
        ([CONFIG, "--config.model.dtype=bfloat16"], ["lora.rank", "model.compute_dtype=bfloat16"]),
        ([CONFIG, "--config.train.minibatches=65"], ["minibatches=65", "batch_prompts=64"]),
        (
            [CONFIG, "--config.trainer=torch", "--config.model.dtype=bfloat16"],
            ["model.dtype='bfloat16'", "trainer=jax"],
        ),
        ([CONFIG, "--config.trainer=torhc"], ["'torhc'", "'torch'"]),
        ([CONFIG, "--config.fleet.max_model_len=1535"], ["=1535", "1536", "raise it"]),
        (
            [CONFIG, "--config.fleet.max_model_len=1536", "--config.eval.max_new_tokens=1025"],
            ["=1536", "1537", "set it to 0"],
        ),
        ([CONFIG, "--config.checkpoint.keep=0"], ["checkpoint.keep=0", "1 or more"]),
        ([CONFIG, "--config.reward.timeout_seconds=0"], ["timeout_seconds=0", "above 0"]),
        ([CONFIG, "--config.fleet.threads=-1"], ["fleet.threads=-1", "0 or more"]),
        ([CONFIG, "--config.eval.max_new_tokens=-1"], ["max_new_tokens=-1", "0 or more"]),
        ([CONFIG, "--workdri=x"], ["workdri", "workdir"]),
        ([CONFIG, "stray"], ["'stray'"]),
        ([CONFIG + ":argument"], ["get_config() takes 0"]),
    ],
)
def test_a_wrong_command_line_is_one_line_with_the_remedy(arguments, words):
    with pytest.raises(UserError) as error:
        parsed(*arguments)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500
    for word in words:
        assert word in str(error.value)


def test_a_context_just_long_enough_is_accepted():
    assert parsed(CONFIG, "--config.fleet.max_model_len=1536").fleet.max_model_len == 1536


def test_overrides_arrive_with_their_types():
    config = parsed(
        CONFIG, "--config.optimizer.learning_rate=1e-3", "--config.sampling.stop=('a', 'b')",
        "--config.algorithm.clip_low=0.3", "--config.data.shuffle=false",
    )  # fmt: skip
    assert config.optimizer.learning_rate == 1e-3
    assert config.sampling.stop == ("a", "b")
    assert config.algorithm.clip_low == 0.3
    assert config.data.shuffle is False


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("def get_config():\n    return 1 / 0", "config.py:2: ZeroDivisionError: division by zero"),
        ("x = 1\nimport nowhere", "config.py:2: ModuleNotFoundError: No module named 'nowhere'"),
        ("def get_config(:", "config.py:1: SyntaxError: invalid syntax"),
        ("def get_config():\n    c = {}\n    c.x = 1", "config.py:3: AttributeError:"),
        ("def get_config():\n    pass", "config.py returns None; let it return a ConfigDict"),
        ("def get_config():\n    return int('a')", "config.py:2: ValueError:"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_config_is_told_with_its_line(body, words, tmp_path):
    file = tmp_path / "config.py"
    file.write_text(body)
    with pytest.raises(UserError) as error:
        flags.parse(["rlx.main", f"--config={file}"])
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_config_may_stand_behind_a_space():
    config, _ = flags.parse(["rlx.main", "--config", "configs/gsm8k.py", "--config.seed=3"])
    assert config.seed == 3


def test_a_config_that_comes_with_rlx_is_found_from_any_directory(tmp_path, monkeypatch):
    """Also by a config of one's own, which may import those of rlx and has its own first."""
    monkeypatch.chdir(tmp_path)
    assert parsed("--config=rlx:arithmetic", "--config.seed=3").model.path == "rlx:arithmetic"
    config, _ = flags.parse(["rlx.main", "--config", "rlx:cluster/math_7b_n4"])
    assert config.scheduler.nodes == 4
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/mine.py").write_text(
        "from configs import arithmetic, own\n\n\ndef get_config():\n"
        "    c = arithmetic.get_config()\n    c.seed = own.SEED\n    return c\n"
    )
    (tmp_path / "configs/own.py").write_text("SEED = 7\n")
    assert parsed("--config=configs/mine.py").seed == 7


def test_names_with_commas_between_are_several():
    config = parsed(
        CONFIG, "--config.lora.targets=q,k", "--config.fleet.addresses=a:1,b:2",
        "--config.train.row_buckets=1536,3072", "--config.sampling.stop=a, b",
    )  # fmt: skip
    assert config.lora.targets == ("q", "k")
    assert config.fleet.addresses == ("a:1", "b:2")
    assert config.train.row_buckets == (1536, 3072)
    assert config.sampling.stop == ("a, b",)


def test_help_names_the_command(capsys):
    with pytest.raises(SystemExit):
        flags.parse(["/somewhere/rlx/evaluate.py", "--help"])
    assert "python -m rlx.evaluate --config=FILE" in capsys.readouterr().out
