"""AReaL's YAML files, of both generations and of the first releases, as configs of rlx."""

import ast
import datetime
import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import rlx
from docs import from_areal
from rlx.algorithms.presets import resolve
from rlx.areal import areal_keys, areal_yaml
from rlx.base import UserError
from rlx.config import check, default
from rlx.launch.local import LocalServers
from rlx.model import hf
from rlx.run import flags as command_line
from rlx.run.allocate import apply_allocation
from rlx.run.flags import leaves
from rlx.run.inputs import prepare

FILES = Path(__file__).parent / "recipes"
_NO_STD = "actor.reward_norm.std_level=null"
_SPEC = "{gpu: 1, env_vars: {TASK_QUEUE_ENABLE: '2', HCCL_CONNECT_TIMEOUT: '7200'}}"
_CRITIC = (
    "critic={is_critic: true, path: '${actor.path}', init_from_scratch: false, eps_clip: 0.5, "
    "disable_dropout: true, dtype: '${actor.dtype}', optimizer: '${actor.optimizer}', "
    "mb_spec: {max_tokens_per_mb: 10240}, ppo_n_minibatches: '${actor.ppo_n_minibatches}', "
    "scheduling_strategy: {type: colocation, target: actor}, "
    "scheduling_spec: '${actor.scheduling_spec}'}"
)
RECIPES: dict[str, tuple[str, ...]] = {  # overrides of grpo.yaml, or of a file of that name
    "grpo": (), "eval": (), "sft": (), "first_release": ("exp_ctrl.benchmark_steps=5",),
    "drgrpo": (_NO_STD,),
    "gspo": ("actor.importance_sampling_level=sequence",),
    "dapo_dynamic_bs": (
        "dynamic_bs=true", "allocation_mode=sglang:d4+fsdp:d4", "actor.eps_clip=0.2",
        "actor.eps_clip_higher=0.28", "actor.overlong_reward_penalty=true",
        "actor.overlong_tokens=512", "actor.overlong_penalty_factor=1.0"),
    "liteppo": ("actor.reward_norm.std_level=batch", "actor.adv_norm=null"),
    "m2po": ("actor.eps_clip=0.0", "actor.m2_threshold=0.04"),
    "ppo": ("actor.reward_norm=null", _CRITIC),
    "reinforce": ("actor.kl_ctl=0.001", "actor.kl_estimator=k1", "actor.reward_norm=null"),
    "reinforce_baseline": ("actor.kl_ctl=0.001", "actor.kl_estimator=k2", _NO_STD),
    "rloo": (_NO_STD, "actor.reward_norm.mean_leave1out=true"),
    "sapo": (
        "actor.recompute_logprob=false", "actor.use_decoupled_loss=false",
        "actor.use_sapo_loss=true", "actor.sapo_tau_pos=1.0", "actor.sapo_tau_neg=1.05"),
    "lora": (
        "allocation_mode=vllm:d4p1t1+d4p1t1", "gconfig.lora_name=lora-sums",
        "rollout.use_lora=true", "actor.use_lora=${rollout.use_lora}", "actor.peft_type=lora",
        "actor.lora_rank=16", "actor.lora_alpha=16", "actor.target_modules=all-linear"),
    "megatron": (
        "allocation_mode=sglang:d4p1t1+megatron:d2p2t1",
        "actor.megatron={bridge_type: megatron-bridge, fp8_config: {mode: hybrid, recipe: "
        "blockwise, param: true}, ddp: {fp8_param_gather: true}}"),
    "npu": (
        "allocation_mode=vllm:d4p1t1+d4p1t1", "vllm.gpu_memory_utilization=0.8",
        "vllm.enforce_eager=true", f"actor.scheduling_spec=[{_SPEC}]"),
    "cpu": (
        "allocation_mode=", "cluster.n_gpus_per_node=0", "rollout.backend=vllm:d1p1t1",
        "actor.backend=fsdp:d1p1t1", "actor.rejection_sampling={metric: ratio, upper: 5.0}",
        "actor.attn_impl=sdpa", "actor.temperature=${gconfig.temperature}",
        "ref.backend=${actor.backend}", "train_dataset.batch_size=16",
        "valid_dataset.batch_size=16"),
}  # fmt: skip
NOW = datetime.datetime(2026, 3, 1, 12, 30)
EMBEDDED = (  # overrides by which a recipe runs here
    "model.path=rlx:arithmetic", "model.compute_dtype=float32", "model.publish_dtype=float32",
    "model.remat=none", "data.kind=arithmetic", "data.train=", "data.eval=",
    "data.max_prompt_tokens=64", "data.system_prompt=", "reward.name=arithmetic",
    "sampling.max_new_tokens=16", "sampling.n_samples=2", "rollout.batch_prompts=4",
    "rollout.max_concurrent_rollouts=8", "total_steps=2", "train.row_buckets=(128,)",
    "train.max_tokens_per_microbatch=1024", "eval.num_questions=2", "allocation_mode=",
    "scheduler.type=local", "fleet.gpu_memory=0.0", "observe.writers=()",
)  # fmt: skip


def file_of(name):
    own = FILES / f"{name}.yaml"
    return own if own.exists() else FILES / "grpo.yaml"


def text_of(name):
    """The config of a recipe as text, and what it has not."""
    return areal_yaml.convert(str(file_of(name)), RECIPES[name])


def config_of(text):
    space = {}
    exec(compile(text, "mine.py", "exec"), space)
    return space["get_config"]()


def made(tmp_path, text, *overrides):
    """(config, lines) of a file with this text."""
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    made, lost = areal_yaml.convert(str(path), overrides)
    return config_of(made), lost


def parsed(name, *overrides):
    file = f"{file_of(name)}:{shlex.join(RECIPES[name])}"
    flags = [f"--config.{override}" for override in overrides]
    return command_line.parse(["rlx.main", f"--config={file}", *flags], workdir="")[0]


def embedded(name):
    """A recipe on the model that comes with rlx; what SFT trains on is longer."""
    return parsed(name, *EMBEDDED, *(["sampling.max_new_tokens=64"] if name == "sft" else []))


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_the_same_config_as_text_and_as_it_is(name, capsys):
    text, lost = text_of(name)
    config = config_of(text)
    assert dict(leaves(config)) == dict(leaves(parsed(name)))
    assert [line.split(": ", 1)[1] for line in capsys.readouterr().err.splitlines()] == lost
    assert max(map(len, ast.unparse(ast.parse(text)).splitlines())) < 120
    trains = name != "eval"
    check(apply_allocation(config, trains=trains), trains=trains)
    resolve(config.algorithm, config.sampling.max_new_tokens, config.sampling.n_samples)
    assert "openai/gsm8k:main" in (config.data.train or config.data.eval) or name == "first_release"


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "eval"])
def test_a_recipe_passes_all_that_is_tried_before_a_run(name, monkeypatch):
    monkeypatch.setattr("rlx.run.dataset_rows.TRAIN_PROBLEMS", 50)
    config = embedded(name)
    check(config)
    found = prepare(config)
    assert found.algorithm.data == ("demonstrations" if name == "sft" else "rollouts")


# recipe → keys of the config that make it what it is
MEANT = {
    "grpo": {"algorithm.reward_mean": "group", "algorithm.reward_std": "group",
             "algorithm.advantage_mean": "batch", "algorithm.advantage_std": "batch",
             "algorithm.decoupled": True, "algorithm.weight_upper": 5.0,
             "algorithm.clip_low": 0.4, "algorithm.clip_high": 0.4, "algorithm.reward_scale": 10.0,
             "algorithm.reward_bias": -0.5, "algorithm.reduction": "token_mean",
             "total_steps": 10 * (7473 // 256), "optimizer.eps": 1e-8, "rollout.max_staleness": 2,
             "model.remat": "full", "train.minibatches": 1, "checkpoint.recover_mode": "off",
             "export.every_epochs": 1, "eval.every_epochs": 1, "observe.writers": (),
             "allocation_mode": "vllm:d4+jax:f4", "fleet.gpu_memory": 0.8},
    "drgrpo": {"algorithm.reward_std": "none"},
    "gspo": {"algorithm.ratio_level": "sequence"},
    "dapo_dynamic_bs": {"algorithm.clip_high": 0.28, "algorithm.overlong_buffer": 512.0,
                        "algorithm.overlong_limit": 1024},
    "liteppo": {"algorithm.reward_std": "batch", "algorithm.advantage_std": "none"},
    "m2po": {"algorithm.second_moment": 0.04, "algorithm.clip_high": 0.0},
    "ppo": {"algorithm.preset": "ppo", "algorithm.lam": 1.0, "algorithm.reward_mean": "none",
            "critic.learning_rate": 1.7e-5, "algorithm.value_clip": 0.5},
    "reinforce": {"algorithm.kl_placement": "reward", "algorithm.kl_coefficient": 0.001},
    "reinforce_baseline": {"algorithm.kl_estimator": "k2"},
    "rloo": {"algorithm.leave_one_out": True},
    "sapo": {"algorithm.loss": "sapo", "algorithm.decoupled": False,
             "algorithm.proximal": "behaviour"},
    "lora": {"lora.rank": 16, "lora.alpha": 16.0, "fleet.publish": "adapter"},
    "megatron": {"allocation_mode": "vllm:d4+jax:f4"},
    "npu": {"fleet.slots": 256, "fleet.gpu_memory": 0.8},
    "cpu": {"allocation_mode": "vllm:d1+jax:f1", "rollout.batch_prompts": 16},
    "eval": {"sampling.n_samples": 8, "data.eval": "openai/gsm8k:main:test"},
    "sft": {"algorithm.preset": "sft", "fleet.num_servers": 0, "data.completion_key": "answer",
            "optimizer.schedule": "cosine", "observe.writers": ("wandb",)},
    "first_release": {
        "total_steps": 5, "rollout.batch_prompts": 512, "sampling.n_samples": 16,
        "sampling.max_new_tokens": 27648, "train.max_tokens_per_microbatch": 30720,
        "algorithm.reward_scale": 5.0, "algorithm.advantage_mean": "batch", "scheduler.type": "ray",
        "algorithm.critic": False, "optimizer.b2": 0.95, "optimizer.weight_decay": 0.05,
        "checkpoint.first_step": 2, "checkpoint.every_seconds": 600.0, "rollout.max_staleness": 0,
        "export.every_epochs": 1, "scheduler.nodes": 2, "scheduler.retries": 10},
}  # fmt: skip


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_means_here_what_it_does_there(name):
    config = config_of(text_of(name)[0])
    given, wanted = dict(leaves(config)), MEANT[name]
    algorithm = resolve(config.algorithm, config.sampling.max_new_tokens, config.sampling.n_samples)
    given |= {key: getattr(algorithm, key.removeprefix("algorithm.")) for key in wanted
              if key.startswith("algorithm.") and key != "algorithm.preset"}  # fmt: skip
    assert {key: given[key] for key in wanted} == wanted


def test_no_recipe_has_a_key_that_is_not_read():
    found = {name: [line for line in text_of(name)[1] if "not read" in line] for name in RECIPES}
    assert {name: lines for name, lines in found.items() if lines} == {}


RL = "train_dataset: {path: openai/gsm8k, type: rl, batch_size: 8}\nactor: {path: m}\n"


def algorithm_of(config):
    return resolve(config.algorithm, config.sampling.max_new_tokens, config.sampling.n_samples)


def test_what_a_file_leaves_out_is_as_in_areals_code_not_as_in_its_examples(tmp_path):
    config, _ = made(tmp_path, RL)
    algorithm = algorithm_of(config)
    assert config.optimizer.learning_rate == 1e-3
    assert (config.train.minibatches, config.sampling.max_new_tokens) == (4, 16384)
    assert (config.rollout.max_staleness, config.rollout.max_concurrent_rollouts) == (0, 8)
    assert {algorithm.reward_mean, algorithm.reward_std, algorithm.advantage_mean} == {"none"}
    assert algorithm.kl_placement == "none", "kl_ctl is 0.1, and there is no ref"
    assert (algorithm.decoupled, algorithm.proximal) == (False, "behaviour")
    assert config.checkpoint.recover_mode == "off"
    assert not any(config.checkpoint[f"every_{unit}"] for unit in ("epochs", "steps", "seconds"))
    assert not config.checkpoint.first_step


@pytest.mark.parametrize(
    ("overrides", "wanted", "words"),
    [
        (["actor.use_decoupled_loss=true"], {"decoupled": False, "proximal": "recompute"},
         "w = 1"),
        (["actor.use_decoupled_loss=true", "actor.m2_threshold=0.04"],
         {"decoupled": True, "weight_action": "none"}, "M2PO"),
        (["actor.use_decoupled_loss=true", "actor.rejection_sampling.action=clamp",
          "actor.rejection_sampling.upper=2"],
         {"weight_action": "truncate", "weight_upper": 2.0, "weight_level": "token"}, ""),
        (["actor.use_decoupled_loss=true", "actor.rejection_sampling.level=sequence",
          "actor.rejection_sampling.metric=kl_k3", "actor.rejection_sampling.upper=0.5"],
         {"weight_level": "sequence", "weight_statistic": "k3", "weight_aggregate": "mean"}, ""),
        (["actor.use_decoupled_loss=true", "actor.behav_imp_weight_cap=null"],
         {"decoupled": True, "weight_upper": float("inf")}, ""),
        (["actor.use_decoupled_loss=true", "actor.behave_imp_weight_cap=3",
          "actor.behave_imp_weight_mode=sequence_truncate"],
         {"weight_action": "truncate", "weight_level": "sequence", "weight_upper": 3.0}, ""),
        (["actor.use_decoupled_loss=true", "actor.rejection_sampling={}",
          "actor.prox_logp_method=loglinear"], {"proximal": "loglinear"}, ""),
        (["actor.adv_norm={}"], {"advantage_mean": "batch", "advantage_std": "batch"}, ""),
        (["actor.adv_norm.std_level=null"], {"advantage_mean": "batch", "advantage_std": "none"},
         ""),
        (["ref.path=m"], {"kl_placement": "reward", "kl_coefficient": 0.1, "kl_estimator": "k1"},
         ""),
        (["ref.path=other"], {"kl_placement": "reward"}, "ref.path = 'other'"),
        (["ref=null"], {"kl_placement": "none"}, ""),
        (["actor.mask_no_eos_with_zero=true"], {"overlong_filter": False}, "trained on"),
        (["teacher.path=big"], {"kl_anchor": "teacher", "kl_placement": "loss",
                                "kl_coefficient": 0.005}, ""),
        (["actor.overlong_tokens=9"], {"overlong_buffer": 0.0}, ""),
        (["actor.overlong_tokens=9", "actor.overlong_reward_penalty=true"],
         {"overlong_buffer": 9.0, "overlong_limit": 1024}, ""),
    ],
)  # fmt: skip
def test_a_loss_of_areals_is_that_one_here(overrides, wanted, words, tmp_path):
    config, lost = made(tmp_path, RL, *overrides)
    algorithm = algorithm_of(config)
    assert {key: getattr(algorithm, key) for key in wanted} == wanted
    assert words in "\n".join(lost)


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        (["total_train_steps=7"], {"total_steps": 7}),
        (["total_train_epochs=2"], {"total_steps": 2 * 934}),
        (["total_train_epochs=null", "total_train_steps=2000"], {"total_steps": 2000}),
        (["train_dataset.batch_size=0"], {"rollout.batch_prompts": 0}),  # check refuses it
        (["actor.optimizer.warmup_steps_proportion=0.5", "total_train_steps=10"],
         {"optimizer.warmup_steps": 5 * 4}),
        (["rollout.backend=vllm:d2t2", "actor.backend=fsdp:d4"],
         {"allocation_mode": "vllm:d2t2+jax:f4"}),
        (["rollout.backend=vllm:d4", "actor.backend=fsdp:d4", "rollout.scheduling_strategy.type="
          "colocation", "rollout.scheduling_strategy.target=actor"],
         {"allocation_mode": "vllm:d4|jax:f4", "fleet.gpu_memory": 0.0}),
        (["actor.backend=fsdp"], {"allocation_mode": ""}),
        (["recover.mode=on", "recover.freq_steps=5"],
         {"checkpoint.recover_mode": "auto", "checkpoint.every_steps": 5}),
        (["recover.mode=off", "recover.freq_steps=5"], {"checkpoint.every_steps": 0}),
        (["stats_logger.tensorboard.path=x", "stats_logger.trackio.mode=local"],
         {"observe.writers": ("tensorboard", "trackio")}),
        (["actor.use_lora=true", "actor.target_modules=[q_proj,linear_fc1]"],
         {"lora.targets": ("q_proj", "gate", "up"), "lora.rank": 32, "lora.alpha": 16.0}),
        (["actor.weight_update_mode=disk", "scheduler.type=slurm"], {"fleet.publish": "path"}),
        (["scheduler.type=slurm"], {"fleet.publish": "stream", "scheduler.gpus_per_node": 8}),
        (["gconfig.stop=END", "gconfig.top_k=50"],
         {"sampling.stop": ("END",), "sampling.top_k": 50}),
        (["gconfig.top_k=-1"], {"sampling.top_k": 0}),
        (["allocation_mode=null", "rollout.backend=null"], {"allocation_mode": ""}),
        (["eval_gconfig.max_new_tokens=99"], {"eval.max_new_tokens": 99}),
        (["workflow=agents.mine.Solver", "rollout.openai.turn_discount=0.9",
          "rollout.openai.mode=subproc"],
         {"rollout.workflow": "agents.mine:Solver", "agents.turn_discount": 0.9,
          "agents.export": "individual", "reward.workers": 4}),
        (["rollout.agent.mode=online"], {"rollout.workflow": "online"}),
        (["train_dataset.type=dpo", "actor.loss_type=ipo", "actor.beta=0.2"],
         {"algorithm.preset": "ipo", "algorithm.pair_beta": 0.2}),
        (["gconfig.max_new_tokens=40000"], {"train.max_tokens_per_microbatch": 41024}),
        (["actor.dtype=fp32", "actor.init_from_scratch=true"],
         {"model.compute_dtype": "float32", "model.random_init": True}),
    ],
)  # fmt: skip
def test_what_stands_around_the_loss_is_as_there(overrides, wanted, tmp_path):
    given = dict(leaves(made(tmp_path, RL, *overrides)[0]))
    assert {key: given[key] for key in wanted} == wanted


def test_epochs_are_counted_from_the_rows_of_a_file(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"q": "1 + 1"}) * 0 + "".join(f'{{"q": {n}}}\n' for n in range(21)))
    config, lost = made(tmp_path, RL, f"train_dataset.path={rows}", "total_train_epochs=3")
    assert (config.total_steps, config.data.train) == (3 * (21 // 8), str(rows))
    assert any("3 × ⌊21 rows / 8⌋" in line for line in lost)
    rows.unlink()
    with pytest.raises(UserError, match=r"number of rows.*give total_train_steps"):
        made(tmp_path, RL, f"train_dataset.path={rows}")
    config, _ = made(tmp_path, RL, f"train_dataset.path={rows}", "total_train_steps=4")
    assert config.total_steps == 4


def test_values_are_interpolated(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "a:\n  b: 1e-5\n  c: ${a.b}\n  d: x${.b}y${now:%Y}\n"
        "  e: ${oc.env:HERE}-${oc.env:NOT,else}\n  f:\n    g: ${..c}\n"
        "    h: [1, '${a.${k}}']\nk: b\nlist: ${a.f}\n"
        "root: ${cluster.fileroot}\n"
    )
    found = areal_yaml.load(path, ["new.deep=[1, '${k}']", "+a.b=2.5"], NOW, {"HERE": "here"})
    assert found == {
        "a.b": 2.5, "a.c": 2.5, "a.d": "x2.5y2026", "a.e": "here-else", "a.f.g": 2.5,
        "a.f.h": [1, 2.5], "k": "b", "list.g": 2.5, "list.h": [1, 2.5], "new.deep": [1, "b"],
        "root": "/tmp/areal/",
    }  # fmt: skip
    assert isinstance(areal_yaml.load(path, [], NOW, {"HERE": ""})["a.b"], float)


def test_an_override_changes_its_own_block_and_no_more_of_it(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("actor: &all {norm: {mean: group, std: group}}\ncritic: *all\n")
    found = areal_yaml.load(path, ["actor.norm={std: batch}", "actor.norm.eps=1"], NOW, {})
    assert found == {"actor.norm.mean": "group", "actor.norm.std": "batch", "actor.norm.eps": 1,
                     "critic.norm.mean": "group", "critic.norm.std": "group"}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "overrides", "words"),
    [
        ("a: ${b.c}\nb: {d: 1}", [], "a has ${b.c}, which names nothing"),
        ("a: ${b}\nb: ${a}", [], "circle"),
        ("a: ${oc.env:NOT_THERE}", [], "names nothing"),
        ("a: [1", [], "is no YAML"),
        ("- 1", [], "no whole config"),
        ("defaults: [base]\na: 1", [], "`defaults`"),
        (RL, ["eps_clip"], "'eps_clip' overrides nothing"),
        (RL, ["actor.eps_clp=0.3"], "'actor.eps_clp' in mine.yaml; did you mean 'actor.eps_clip'"),
        (RL, ["actor.eps_clip=high"], "actor.eps_clip = 'high': want one like AReaL's own, 0.2"),
        (RL, ["seed=true"], "seed = True: want one like AReaL's own, 1"),
        (RL, ["allocation_mode=3"], "allocation_mode = 3: want one like AReaL's own, ''"),
        (RL, ["recover.mode=[a]"], "recover.mode = ['a']: want one like AReaL's own, 'disabled'"),
        (RL, ["gconfig.stop=3"], "gconfig.stop = 3: sampling.stop takes tuple"),
        (RL, ["gconfig.max_new_tokens=.inf"], "new_tokens = inf"),
        (RL, ["actor.mb_spec.max_tokens_per_mb=x"], "train.max_tokens_per_microbatch takes int"),
        (RL, ["actor.scheduling_spec=[3]"], "actor.scheduling_spec = [3]: want a list of blocks"),
        (RL + "actor: {path: n}", [], "no YAML ('actor' twice in"),
        ("a: &a {b: *a}", [], "mine.yaml has an alias for what it stands in"),
        ("a: " + "[" * 2000, [], "is no YAML"),
        ("a: !!int b", [], "is no YAML"),
        ("a: 2026-02-31", [], "is no YAML"),
        ("a: !!timestamp b", [], "is no YAML"),
        (RL, ["gconfig.n_samples=2.5"], "sampling.n_samples takes int"),
        (RL, ["actor.optimizer.lr=.nan"], "optimizer.lr = nan: optimizer.learning_rate takes a n"),
        (RL, ["train_dataset.path=null"], "needs the number of rows in train_dataset.path"),
        (RL, ["train_dataset.type=rlhf"], "'rlhf' is none of rl, sft, rw, dpo"),
        (RL, ["allocation_mode=sglang:d4+fsdp:q2"], "cannot read the sizes 'q2' of 'fsdp:q2'"),
        (RL, ["allocation_mode=vllm:d1p2+fsdp:d2"], "'d1p2' of 'vllm:d1p2'; give each of d, t at"),
    ],
)
def test_what_cannot_be_read_is_one_line(text, overrides, words, tmp_path):
    with pytest.raises(UserError) as error:
        made(tmp_path, text, *overrides)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_block_may_set_again_what_it_merges(tmp_path):
    text = RL + "a: &a {group_size: 4}\ngconfig: {<<: *a, n_samples: 3}\nb: {<<: *a, group_size: 2}"
    assert made(tmp_path, text)[0].sampling.n_samples == 3


def test_nothing_of_a_file_is_dropped_in_silence(tmp_path):
    overrides = (
        "tir.max_turns=3", "gconfig.greedy=true", "actor.optimizer.min_lr_ratio=0.1",
        "actor.archon.ac_mode=full", "rollout.queue_size=5", "sglang.attention_backend=fa3",
        "vllm.enforce_eager=true", "actor.offload=true", "saver.mode=async", "dynamic_bs=true",
        "gconfig.max_tokens=2048", "actor.temperature=0.7", "cluster.n_nodes=2",
        "rollout.consumer_batch_size=16", "critic.init_from_scratch=true",
    )  # fmt: skip
    path = tmp_path / "mine.yaml"
    path.write_text(RL + "allocation_mode: sglang:d1+fsdp:d1\n")
    text, lost = areal_yaml.convert(str(path), overrides)
    names = [override.partition("=")[0] for override in overrides]
    quiet = ["rollout.queue_size", "vllm.enforce_eager"]  # WORKDIR has it; another engine's
    assert [name for name in names if not any(x.startswith(f"{name} = ") for x in lost)] == quiet
    assert all(name in text for name in names)
    assert "tir.max_turns = 3: no key of AReaL, not read" in lost


def test_a_config_holds_no_secret_and_no_code_of_the_file(tmp_path):
    secret, code = "sk-0123456789", "x\n    raise SystemExit('run')  #"
    path = tmp_path / 'mi"""ne.yaml'
    more = {"stats_logger": {"wandb": {"wandb_api_key": secret}}, "rollout": {"agent": {
        "mode": "online", "admin_api_key": secret}}, "actor.scheduling_spec": [
        {"env_vars": {"HF_TOKEN": secret}, "additional_bash_cmds": [f"export A_KEY={secret}"]}],
        "launcher.trainer_env_vars": f"WANDB_API_KEY={secret},A=1", code: 1, "tokenizer_path": code,
        f"sglang.{code}": None}  # fmt: skip
    path.write_text(RL + "\n".join(f"{json.dumps(k)}: {json.dumps(v)}" for k, v in more.items()))
    text, lost = areal_yaml.convert(str(path), ["seed=3", f"actor.path={json.dumps(code)}"])
    assert secret not in text + "".join(lost)
    config = config_of(text)
    assert (config.seed, config.model.path) == (3, code)


def test_the_command_prints_a_config_and_says_what_it_has_not(tmp_path, capsys, monkeypatch):
    from rlx.areal import __main__ as areal

    monkeypatch.setattr(
        sys, "argv", ["rlx.areal", str(FILES / "grpo.yaml"), *RECIPES["npu"], "seed=5"]
    )
    areal.main()
    out, err = capsys.readouterr()
    assert config_of(out).seed == 5
    assert "vllm.enforce_eager = True: the engine's own flags" in err.splitlines()
    monkeypatch.setattr(sys, "argv", ["rlx.areal", "seed=5"])
    with pytest.raises(UserError, match=r"FILE\.yaml"):
        areal.main()


def test_a_run_of_a_yaml_file_is_named_after_it(tmp_path):
    """With AReaL's overrides behind a colon, and rlx's as flags."""
    path = tmp_path / "mine.yml"
    shutil.copy(FILES / "eval.yaml", path)
    given = f"--config={path}:gconfig.n_samples=3 seed=9"
    config, values = command_line.parse(["rlx.main", given, "--config.seed=8"], workdir="")
    assert (config.sampling.n_samples, config.seed) == (3, 8)
    given = f"--config={path}:tokenizer_path='a b' actor.path='c d'"
    config, _ = command_line.parse(["rlx.main", given], workdir="")
    assert config.model.path == "c d"
    with pytest.raises(UserError, match=r"No closing quotation.*quote as a shell would"):
        command_line.parse(["rlx.main", f"{given}'"], workdir="")
    assert Path(values.config.partition(":")[0]).stem == "mine"
    with pytest.raises(UserError, match="cannot read"):
        command_line.parse(["rlx.main", "--config", str(tmp_path / "none.yaml")], workdir="")


def test_no_command_imports_the_importer_before_it_is_given_a_yaml():
    commands = "import rlx.main, rlx.doctor.__main__, rlx.evaluate, rlx.debug_workflow, sys"
    code = f"{commands}; assert 'rlx.areal.areal_keys' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_rows_set_keys_that_there_are_each_with_a_type_that_fits():
    usual = dict(leaves(default()))
    assert {row.to for row in areal_keys.ROWS} <= set(usual)
    assert {kind for row in areal_keys.ROWS for kind in [type(row.default)]} <= {
        int, float, str, bool, list, type(None)}  # fmt: skip


def test_the_page_is_the_one_that_the_rows_make():
    assert from_areal.PAGE.read_text() == from_areal.page(), "run python docs/from_areal.py"


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """One server, for every run, which gives it its weights."""
    workdir, options = tmp_path_factory.mktemp("server"), {"slots": 8, "max_model_len": 96}
    with LocalServers(hf.resolve("rlx:arithmetic"), workdir=workdir, **options) as servers:
        servers.wait()
        yield servers


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in RECIPES if name != "eval"])
def test_a_recipe_runs_for_two_steps(name, servers, tmp_path, monkeypatch):
    monkeypatch.setattr("rlx.run.dataset_rows.TRAIN_PROBLEMS", 50)
    monkeypatch.setenv("RLX_FLEET_TOKEN", servers.token)
    config = embedded(name)
    config.fleet.addresses = () if name == "sft" else tuple(servers.wait())
    if config.fleet.publish == "path":  # of the directories of the server's own run alone
        config.fleet.publish = "stream"
    assert rlx.run(config, tmp_path / name).complete
    lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


def test_a_yaml_of_rlxs_own_keys_is_not_read_as_areals(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("model: {path: x}\ntotal_steps: 3\noptimizer: {learning_rate: 1e-5}\n")
    with pytest.raises(
        UserError, match=r"has keys of rlx .model.path, optimizer.learning_rate, to"
    ):
        areal_yaml.convert(str(file), ())
