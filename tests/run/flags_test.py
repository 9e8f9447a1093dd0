"""A wrong command line ends in one line that says got, wanted and remedy."""

import sys

import pytest

from rlx import keys
from rlx.base import UserError
from rlx.cli import key_names
from rlx.config import check, default, leaves
from rlx.run import flags

CONFIG = "--config=configs/gsm8k.py"
BODY = "from rlx.config import default\ndef get_config():\n    c = default()\n    c."


def parsed(*arguments):
    config, _ = flags.parse(["rlx.main", *arguments], workdir="directory")
    check(config)
    return config


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["--config=FILE", "rlx:arithmetic"]),
        (["--config"], ["--config=FILE"]),
        ([CONFIG, "--config.zzz=1"], ["'zzz'", "`rlx keys`", "sampling, "]),
        ([CONFIG, "--config.fleet.qqqqqqqq=1"], ["`rlx keys fleet` lists all"]),
        (["--config=rlx:gsm8"], ["no config rlx:gsm8; did you mean rlx:gsm8k?"]),
        (["--config=rlx:cluster:math_7b_n5"], ["'math_7b_n5'; did you mean 'math_7b_n4'?"]),
        (["--config=rlx:zzzzzzzz"], ["rlx:zzzzzzzz; `rlx configs` lists them"]),
        (["--config=rlx:arithmetic:argument"], ["get_config() takes 0"]),
        (["--config=configs/gsm8.py"], ["no config file configs/gsm8.py", "configs/gsm8k.py"]),
        ([CONFIG, "--config.samplng.n_samples=3"], ["'samplng.n_samples'", "'sampling.n_samples'"]),
        ([CONFIG, "--config.sampling.n_sampels=3"], ["'sampling.n_samples'"]),
        ([CONFIG, "--config.sampling.n_samples=x"], ["n_samples=x"]),
        ([CONFIG, "--config.sampling.n_samples"], ["no value"]),
        ([CONFIG, "--config.sampling.n_samples=0"], ["sampling.n_samples=0", "in [1, 65536]"]),
        ([CONFIG, f"--config.reward.workers={10**20}"], ["reward.workers=1e+20 must be in [1, 65"]),
        ([CONFIG, "--config.fleet.engine=vlm"], ["'vlm'", "'vllm'"]),
        ([CONFIG, "--config.sampling.temperature=0"], ["temperature=0", "above 0"]),
        ([CONFIG, "--config.train.max_tokens_per_microbatch=100"], ["=100", "1536", "raise it"]),
        ([CONFIG, "--config.model.dtype=bfloat16"], ["lora.rank", "model.compute_dtype=bfloat16"]),
        ([CONFIG, "--config.train.minibatches=65"], ["minibatches=65", "batch_prompts=64"]),
        (
            [CONFIG, "--config.trainer=torch", "--config.model.dtype=bfloat16"],
            ["model.dtype='bfloat16'", "trainer=jax"],
        ),
        ([CONFIG, "--config.fleet.max_model_len=1535"], ["=1535", "1536", "raise it"]),
        (
            [CONFIG, "--config.fleet.max_model_len=1536", "--config.eval.max_new_tokens=1025"],
            ["=1536", "1537", "set it to 0"],
        ),
        ([CONFIG, "--workdri=x"], ["workdri", "workdir"]),
        ([CONFIG, "stray"], ["'stray'"]),
        (["--config=arithmetic"], ["did you mean rlx:arithmetic?"]),
        (["--config=nowhere/arithmetic.py"], ["did you mean rlx:arithmetic?"]),
        (["--config=configs"], ["--config=configs is a directory", ".py"]),
        (["configs/mine.py"], ["no --config=FILE given; try --config=configs/mine.py"]),
        (["arithmetic"], ["no --config=FILE given; try --config=rlx:arithmetic"]),
        ([CONFIG, "--learning_rate=1"], ["--learning_rate", "--config.optimizer.learning_rate=…?"]),
        ([CONFIG, "--learning-rate", "1"], ["did you mean --config.optimizer.learning_rate=…?"]),
        ([CONFIG, "--lr=1"], ["did you mean --config.optimizer.learning_rate=…?"]),
        ([CONFIG, "--output_dir=x"], ["did you mean --workdir?"]),
        ([CONFIG, "--model=gpt2"], ["did you mean --config.model.path=…?"]),
        ([CONFIG, "--seed=3"], ["did you mean --config.seed=…?"]),
        ([CONFIG, "--optimizer.learning_rate=1"], ["--config.optimizer.learning_rate=…?"]),
        ([CONFIG, "actor.optimizer.lr=1"], ["did you mean --config.optimizer.learning_rate=…?"]),
        ([CONFIG, "--gradient_checkpointing"], ["gradient_checkpointing"]),
        ([CONFIG, "--config.optimizer.lr=1"], ["did you mean 'optimizer.learning_rate'?"]),
        ([CONFIG, "--config.optimiser.lr=1"], ["did you mean 'optimizer.learning_rate'?"]),
        ([CONFIG, "--config.rollout.n_samples=1"], ["did you mean 'sampling.n_samples'?"]),
        ([CONFIG, "--config.rollout.n=1"], ["did you mean 'sampling.n_samples'?"]),
        ([CONFIG, "--config.num_generations=1"], ["did you mean 'sampling.n_samples'?"]),
        ([CONFIG, "--config.optimizer.zzz=1"], ["choose one of optimizer.b1, optimizer.b2, "]),
        ([CONFIG, "--config.model.name=a"], ["choose one of ", "model.path"]),
        ([CONFIG, "--config.total_steps", "3"], ["has no value; write --config.total_steps=VALUE"]),
        ([CONFIG, "--config.total_steps=1.5"], ["=1.5 is not a whole number; give one like"]),
        ([CONFIG, "--config.total_steps="], ["total_steps= is not a whole number"]),
        (
            [CONFIG, "--config.eval.sets=(('a', 'b.jsonl'))"],
            ["eval.sets has 'a'; write pairs, as (('a', 'a.jsonl'),) with a last comma"],
        ),
        (
            [CONFIG, "--config.rollout.max_concurrent_rollouts=most"],
            ["=most is not a whole number"],
        ),
        ([CONFIG, "--config.rollout.batch_prompts=auto"], ["=auto is not a whole number"]),
        ([CONFIG, "--config.optimizer.learning_rate=high"], ["=high is not a number"]),
        ([CONFIG, "--config.data.shuffle=maybe"], ["=maybe is not True or False"]),
        ([CONFIG + ":dap"], ["unknown variant 'dap'; did you mean 'dapo'?"]),
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


def test_a_number_that_may_follow_the_run_is_also_set_by_auto():
    config = parsed(CONFIG, "--config.rollout.max_concurrent_rollouts=auto")
    assert config.rollout.max_concurrent_rollouts == 0


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
        ("x = 1", "config.py has no function get_config; define get_config()"),
        ("get_config = 3", "config.py has no function get_config; define get_config()"),
        (f"{BODY}optimizer.learning_rte = 1",
         "config.py:4: unknown config key 'optimizer.learning_rte'; did you mean 'optimizer.lear"),
        (f"{BODY}optimizer.lr = 1", "config.py:4: unknown config key 'optimizer.lr'; did you "),
        (f"{BODY}optimiser.lr = 1", "did you mean 'optimizer.learning_rate'?"),
        (f"{BODY}lr = 1", "config.py:4: unknown config key 'lr'; did you mean 'optimizer.learning"),
        (f"{BODY}__getitem__('optimizer')['lr'] = 1", "did you mean 'optimizer.learning_rate'?"),
        (f"{BODY}update(optimizer=dict(lr=3))", "config.py:4: unknown config key 'lr'; did you"),
        (f"{BODY}total_steps = 1.5", "config.py:4: total_steps=1.5 is of type float; give int"),
        (f"{BODY}optimizer.learning_rate = 'a'", "config.py:4: learning_rate=a is of type str; "),
        (f"{BODY}optimizer = 3", "config.py:4: optimizer=3 is of type int; give ConfigDict"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_config_is_told_with_its_line(body, words, tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "config_config", raising=False)  # the library loads into it
    file = tmp_path / "config.py"
    file.write_text(body)
    with pytest.raises(UserError) as error:
        flags.parse(["rlx.main", f"--config={file}"])
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_config_may_stand_behind_a_space():
    config, _ = flags.parse(["rlx.main", "--config", "configs/gsm8k.py", "--config.seed=3"])
    assert config.seed == 3


@pytest.mark.parametrize(("given", "on"), [("", True), ("=true", True), ("=false", False)])
def test_a_switch_may_have_a_value(given, on):
    argv = ["rlx.main", "--config=rlx:arithmetic", f"--dry-run{given}"]
    assert flags.parse(argv, switches={"dry_run": "help"})[1].dry_run is on
    with pytest.raises(UserError, match="'no' is not true or false"):
        flags.parse([*argv[:2], "--dry_run=no"], switches={"dry_run": "help"})


def test_a_config_that_comes_with_rlx_is_found_from_any_directory(tmp_path, monkeypatch):
    """Also by a config of one's own, which may import those of rlx and has its own first."""
    monkeypatch.chdir(tmp_path)
    assert parsed("--config=rlx:arithmetic", "--config.seed=3").model.path == "rlx:arithmetic"
    config, _ = flags.parse(["rlx.main", "--config", "rlx:cluster:math_7b_n4"])
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


def test_every_name_of_other_packages_leads_to_a_key_or_flag_that_there_is():
    known = dict(leaves(default()))
    names = key_names.elsewhere(known)
    assert set(names.values()) <= known.keys() | {"--workdir", "--dry_run"}
    assert len(names) > 100
    for name, key in {
        "num_generations": "sampling.n_samples", "beta": "algorithm.kl_coefficient",
        "actor.optim.lr": "optimizer.learning_rate", "lr": "optimizer.learning_rate",
        "epsilon_high": "algorithm.clip_high", "loss_type": "algorithm.reduction",
        "output_dir": "--workdir", "save_steps": "checkpoint.every_steps",
    }.items():  # fmt: skip
        assert names[name] == key, name
    for key in known:
        assert key_names.nearest_key(key, known) == key


def test_help_leads_to_the_keys_and_names_a_command_that_is_a_directory(capsys):
    with pytest.raises(SystemExit):
        flags.parse(["/somewhere/rlx/doctor/__main__.py", "--help"])
    out = capsys.readouterr().out
    assert "python -m rlx.doctor --config=FILE" in out
    assert "`rlx keys` lists every KEY, `rlx configs` each rlx:NAME" in out


def test_each_key_is_described_in_a_line():
    lines = keys.key_lines()
    assert lines.keys() == dict(leaves(default())).keys()
    assert lines["optimizer.b1"] == (
        "optimizer.b1=0.9  (in [0, 1))  share of the first moment kept at each update"
    )
    assert "(in [0, 1])" in lines["algorithm.clip_low"]
    assert "sampling.top_p=1.0  (in (0, 1])  share" in lines["sampling.top_p"]
    assert not [line for line in lines.values() if "\n" in line or line.endswith("  ")]


def test_a_workdir_that_is_a_file_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--workdir=.*/file is a file; give a directory"):
        parsed(CONFIG, f"--workdir={tmp_path / 'file'}")
    parsed(CONFIG, f"--workdir={tmp_path / 'new'}")
