"""Every file in configs/ is a run that could start, and every preset has one."""

import ast
import asyncio
import json
import math
import sys
from pathlib import Path

import jax
import pytest
from jinja2 import Environment

from configs.data import calculator_solutions, word_problems
from rlx.algorithms.presets import PRESETS
from rlx.config import check
from rlx.configs import variants
from rlx.doctor import memory
from rlx.doctor.machine import Devices
from rlx.launch.allocation import parse, place
from rlx.model import hf
from rlx.model import params as parameters
from rlx.model.mesh import mesh_axes, num_row_shards
from rlx.model.model_config import ModelConfig
from rlx.rollout.tools import Calculator
from rlx.run import config_checks, flags, scheduler
from rlx.run.allocate import OWN_MEMORY, apply_allocation
from rlx.run.inputs import prepare
from rlx.run.room_options import sizes_of
from rlx.train.learner import make_optimizer
from rlx.train.train_options import TrainOptions

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "configs").glob("*.py"))
CLUSTER, GSM8K = ROOT / "configs/cluster.py", ROOT / "configs/gsm8k.py"
NAMES = [f"{path}:{name}".rstrip(":") for path in FILES for name in variants(path)
         if name or path != CLUSTER]  # fmt: skip
RL = [row.name for row in PRESETS.values()
      if row.data == "rollouts" and row.kl_anchor == "reference"]  # fmt: skip
OTHERS = [name for name in PRESETS if name not in RL]
SMALL = ModelConfig(
    "Qwen2ForCausalLM", vocab_size=32, num_layers=1, model_dim=8, mlp_dim=16, num_heads=2,
    num_kv_heads=1, head_dim=4,
)  # fmt: skip


def qwen2(layers, width, heads, kv_heads, mlp, vocabulary=152_064):
    return ModelConfig(
        "Qwen2ForCausalLM", vocab_size=vocabulary, num_layers=layers, model_dim=width, mlp_dim=mlp,
        num_heads=heads, num_kv_heads=kv_heads, head_dim=128, attention_bias=True,
    )  # fmt: skip


# of configs/math_*.py: the model's config.json, its billions of parameters, the trainer's GPUs
LARGE = {
    "math_1_5b": (qwen2(28, 1536, 12, 2, 8960, 151_936), 1.78, 4),
    "math_7b": (qwen2(28, 3584, 28, 4, 18_944), 7.62, 16),
    "math_14b": (qwen2(48, 5120, 40, 8, 13_824), 14.77, 32),
    "math_32b": (qwen2(64, 5120, 40, 8, 27_648), 32.76, 64),
}


def load(path):
    """The config as the command line would have it."""
    return flags.parse(["rlx.main", f"--config={path}"])[0]


@pytest.mark.parametrize("name", NAMES, ids=lambda name: Path(name).name)
def test_a_config_passes_every_check(name):
    config = load(name)
    check(config)
    options = TrainOptions.of(config)
    assert options.algorithm.name == config.algorithm.preset
    optimizer = make_optimizer(options.optimizer, options.policy_updates)
    assert optimizer.init({"w": jax.numpy.zeros(2)})


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_config_has_command_hardware_time_and_expectation(path):
    first, rest = ast.get_docstring(ast.parse(path.read_text())).split("\n\n", 1)
    assert "\n" not in first
    assert f"--config={path.relative_to(ROOT)}" in rest.splitlines()[0]
    assert all(variants(path).values())
    assert [line.split(":")[0] for line in rest.splitlines() if line[:1].strip()] == [
        "Command",
        "Hardware",
        "Time",
        "Expect",
    ]


@pytest.mark.parametrize("name", LARGE)
def test_a_step_of_a_large_model_fits_the_gpus_that_its_config_names(name):
    """Only shapes are computed. The bound may pass what JAX takes, and XLA's plan may not."""
    config, (model, billions, gpus) = load(ROOT / "configs" / f"{name}.py"), LARGE[name]
    assert parameters.count(model) / 1e9 == pytest.approx(billions, abs=0.005)
    axes = mesh_axes(config.train.mesh, gpus)
    assert math.prod(axes.values()) == gpus
    pieces = memory.trainer(sizes_of(config, model), Devices("gpu", "H100", gpus, 80 * 10**9))
    print(f"{name}: {sum(pieces.values()) / 1e9:.0f} GB: {memory.sizes_text(pieces)}")
    assert sum(pieces.values()) < 80 * 2**30
    row = next(x for x in (ROOT / "docs" / "scale.md").read_text().splitlines() if f"[{name}]" in x)
    *_, told, mesh, remat, tokens, planned, most, _ = map(str.strip, row.split("|"))
    train = config.train
    assert (int(told), mesh) == (gpus, f"`{train.mesh}`")
    assert (remat, tokens) == (config.model.remat, f"{train.max_tokens_per_microbatch:,}")
    assert sum(pieces.values()) / 1e9 == pytest.approx(float(most), abs=1), "docs/scale.md"
    assert 0.7 * float(most) < float(planned) < min(float(most), OWN_MEMORY * 80), "docs/scale.md"
    assert model.num_heads % axes["tensor"] == model.num_kv_heads % axes["tensor"] == 0
    trajectories = config.rollout.batch_prompts // config.train.minibatches
    assert trajectories * config.sampling.n_samples >= 2 * num_row_shards(axes)


@pytest.mark.parametrize("variant", [name for name in variants(CLUSTER) if name])
def test_a_config_of_a_cluster_fills_its_nodes(variant, tmp_path):
    """Servers and a trainer that fits; each named after its nodes, as 7b_n4; its dry run."""
    config = apply_allocation(load(f"{CLUSTER}:{variant}"))
    cluster, (name, nodes) = config.scheduler, variant.rsplit("_n", 1)
    hosts = {f"n{i}": range(cluster.gpus_per_node) for i in range(cluster.nodes)}
    allocation = parse(config.allocation_mode)
    assert (int(nodes), allocation.gpus) == (cluster.nodes, 8 * cluster.nodes)
    *servers, (_, trainer) = place(allocation, hosts)
    assert len(servers) == config.fleet.num_servers
    assert all(len({host for host, _ in gpus}) == 1 for _, gpus in servers)
    model, billions, _ = LARGE[name]
    assert billions * 2e9 / config.fleet.tensor_parallel < 0.5 * 80e9, "weights of a server"
    assert model.num_heads % config.fleet.tensor_parallel == 0
    gpus = len(trainer)
    assert math.prod(mesh_axes(config.train.mesh, gpus).values()) == gpus
    pieces = memory.trainer(sizes_of(config, model), Devices("gpu", "H100", gpus, 80 * 10**9))
    assert sum(pieces.values()) < 80 * 2**30, memory.sizes_text(pieces)
    config.model.path = "rlx:arithmetic"  # nothing is downloaded
    assert scheduler.launch(config, tmp_path, [f"--config={CLUSTER}:{variant}"], dry_run=True) == 0
    script = (tmp_path / "slurm" / "dry-run" / "job.sh").read_text()
    assert f"#SBATCH --nodes={nodes}\n" in script
    assert f"--tensor-parallel={config.fleet.tensor_parallel}" in script


@pytest.mark.parametrize("name", RL)
def test_an_rl_preset_has_a_config_for_gsm8k(name):
    config = load(f"{GSM8K}:{name}")
    assert config.algorithm.preset == name
    assert config.data.train.startswith("openai/gsm8k")


def test_a_small_real_model_fits_one_gpu_beside_its_server(tmp_path, monkeypatch):
    """And its dry run finds no problem, with rows that are here and a model that comes with rlx."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    config, gpu = load(ROOT / "configs" / "gsm8k_smollm2.py"), Devices("gpu", "H100", 1, 80 * 10**9)
    smollm2 = ModelConfig(
        "LlamaForCausalLM", vocab_size=49_152, num_layers=30, model_dim=576, mlp_dim=1536,
        num_heads=9, num_kv_heads=3, head_dim=64, tie_embeddings=True, max_position=8192,
    )  # fmt: skip
    assert parameters.count(smollm2) == 134_515_008
    taken = sum(memory.trainer(sizes_of(config, smollm2), gpu).values()) / gpu.memory
    assert taken < 0.9 - config.fleet.gpu_memory, f"the trainer takes {taken:.2f} of the GPU"
    rows = [json.dumps({"question": f"{i} + 1?", "answer": f"#### {i + 1}"}) for i in range(300)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    config.data.train = config.data.eval = str(tmp_path / "rows.jsonl")
    config.model.path, config.data.max_prompt_tokens = "rlx:arithmetic", 128
    config.fleet.engine = "jax"  # vLLM may be missing here
    found = list(config_checks.check(config, tmp_path / "run", gpu))
    assert {row.name for row in found} >= {"rows", "batch", "trainer"}
    assert not [row for row in found if row.level == "problem"]


@pytest.mark.parametrize("name", OTHERS)
def test_another_trainer_has_a_config_that_the_model_that_comes_with_rlx_can_run(name, monkeypatch):
    path = ROOT / "configs" / f"arithmetic_{name}.py"
    config = load(path)
    assert config.algorithm.preset == name
    if config.teacher.path:
        workdir = Path(config.teacher.path).parent
        made = f"--config=configs/arithmetic.py --workdir={workdir}"
        assert made in ast.get_docstring(ast.parse(path.read_text())), "how to make the teacher"
        config.teacher.path = config.model.path
    monkeypatch.setattr("rlx.run.dataset_rows.TRAIN_PROBLEMS", 200)
    inputs = prepare(config)
    assert inputs.model_dir == hf.resolve("rlx:arithmetic")
    assert bool(inputs.held_out) == (inputs.algorithm.data != "rollouts")


def test_a_config_finds_its_neighbours_wherever_it_lies(tmp_path):
    place = tmp_path / "configs"
    place.mkdir()
    (place / "a_base.py").write_text(
        "from rlx.config import default\n\n\ndef get_config():\n    return default()\n"
    )
    (place / "a_run.py").write_text(
        "from configs import a_base\n\n\ndef get_config():\n    c = a_base.get_config()\n"
        "    c.seed = 7\n    return c\n"
    )
    before = list(sys.path)
    assert load(place / "a_run.py").seed == 7
    assert sys.path == before


def test_solutions_with_a_calculator_compute_and_tell_of_it_as_the_template_does(monkeypatch):
    monkeypatch.setattr(calculator_solutions, "NUM_PROBLEMS", 200)
    answers = {row["question"]: row["answer"] for row in word_problems.problems(0, "train", 200)}
    rows, calls, tools = list(calculator_solutions.rows()), 0, Calculator()
    for row in rows:
        system, user, *turns = row["question"]
        for said, told in zip(turns[::2], turns[1::2], strict=True):
            call = said["content"].partition("<tool_call>")[2].removesuffix("</tool_call>")
            assert asyncio.run(tools.run(**json.loads(call)["arguments"])) == told["content"]
            calls += 1
        if not row["completion"].endswith("</tool_call>"):
            assert row["completion"].endswith(f" {answers.pop(user['content'])}.")
    assert not answers
    assert calls > 100
    template = (ROOT / "configs/data/smollm2_tools.jinja").read_text()
    listed = [{"type": "function", "function": vars(Calculator)}]
    ask = {"role": "user", "content": "?"}
    render = Environment().from_string(template).render
    assert render(messages=[system, ask]) == render(messages=[ask], tools=listed)
