"""An allocation decides a run's keys, and which GPUs its servers and its trainer see."""

import json
import os
import re
import sys

import pytest

from configs import arithmetic
from rlx.base import UserError
from rlx.doctor import gpu_cards, machine, packages
from rlx.doctor.machine import Devices
from rlx.engines import options
from rlx.evaluation.sample_files import QuestionOptions
from rlx.launch import allocation
from rlx.launch.local import CpuPlan, LocalServers
from rlx.run import allocate, loop, plan_run, score_models
from rlx.run.room_options import RunOptions
from rlx.run.run_checks import findings

DEALS = "jax:d2+jax:f4t2"


def config_of(text: str, **changes):
    config = arithmetic.get_config()
    config.update_from_flattened_dict({"allocation_mode": text, **changes})
    return config


def test_it_sets_servers_trainer_and_mesh():
    config = allocate.apply_allocation(config_of("vllm:d2+jax:f4t2"))
    assert (config.fleet.engine, config.fleet.num_servers) == ("vllm", 2)
    assert (config.trainer, config.train.mesh) == ("jax", "fsdp:4,tensor:2")
    assert (
        allocate.apply_allocation(config).to_dict() == config.to_dict()
    )  # once more changes nothing


@pytest.mark.parametrize(
    ("text", "changes", "words"),
    [
        (DEALS, {"train.mesh": "fsdp:8"}, "train.mesh='fsdp:8' contradicts"),
        (DEALS, {"fleet.addresses": ("a:1",)}, "fleet.addresses names running ones"),
        ("jax:d2", {}, "has no trainer; add one, such as jax:d2"),
    ],
)
def test_what_contradicts_it_is_one_line(text, changes, words):
    with pytest.raises(UserError, match=words):
        allocate.apply_allocation(config_of(text, **changes))


def test_each_process_of_a_trainer_in_torch_sees_the_gpus_of_all(monkeypatch):
    """It takes the one of its own place, which it is told when it joins."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    config = allocate.apply_allocation(config_of("jax:d1+torch:f2"))
    assert (config.cluster.processes, config.train.mesh) == (2, "fsdp:2")
    with pytest.raises(UserError, match=r"cluster.processes=3 contradicts"):
        allocate.apply_allocation(config_of("jax:d1+torch:f2", **{"cluster.processes": 3}))
    for number in range(2):
        config.cluster.update(coordinator="127.0.0.1:1", process=number)
        with allocate.gpu_environment(config) as servers:
            assert (servers, os.environ["CUDA_VISIBLE_DEVICES"]) == ((("4",),), "5,6")


def test_servers_and_trainer_see_gpus_of_their_own(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,6,5,4,3,2,1,0,GPU-9,GPU-8")
    shares = allocate.share(config_of(DEALS), allocate.gpus())
    assert shares.servers == (("7",), ("6",))
    assert shares.trainer == ("5", "4", "3", "2", "1", "0", "GPU-9", "GPU-8")
    with allocate.gpu_environment(config_of(DEALS)) as servers:
        assert servers == shares.servers
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ",".join(shares.trainer)
    assert os.environ["CUDA_VISIBLE_DEVICES"].startswith("7,6,5")
    # Two real processes, which say what they see and end.
    says = "import os; print(os.environ['CUDA_VISIBLE_DEVICES'], os.environ['JAX_PLATFORMS'])"
    cores = tuple(sorted(os.sched_getaffinity(0)))
    servers = LocalServers(
        tmp_path, workdir=tmp_path, num_servers=2, plan=CpuPlan(cores, (cores, cores)),
        gpus=shares.servers, command=(sys.executable, "-c", says),
    )  # fmt: skip
    with servers, pytest.raises(UserError, match="ended at start"):
        servers.wait()
    logs = [(tmp_path / "logs" / f"server-{i}.log").read_text() for i in range(2)]
    assert any(logs)  # the first that ends may stop the other one before it says anything
    for log, gpu in zip(logs, "76", strict=True):
        assert not log or log.startswith(f"{gpu} cuda")


def test_what_shares_gpus_shares_their_memory(monkeypatch):
    """A server of two GPUs, and a trainer on the same two."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.8")
    config = allocate.apply_allocation(config_of("vllm[gen]:t2|jax[train]:f2"))
    assert (config.fleet.tensor_parallel, config.fleet.gpu_memory) == (2, 0.4)
    given = RunOptions.of(config).servers
    flags = options.parser().parse_args(
        ["--model=m"]
        + [f"--{name.replace('_', '-')}={given[name]}"
           for name in ("engine", "tensor_parallel", "gpu_memory")]
    )  # fmt: skip
    assert (flags.engine, flags.tensor_parallel, flags.gpu_memory) == ("vllm", 2, 0.4)
    with allocate.gpu_environment(config) as servers:
        assert servers == (("5", "6"),)
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "5,6"
        assert os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.5"
    assert os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.8"
    given = config_of("vllm[gen]:t2|jax[train]:f2", **{"fleet.gpu_memory": 0.3})
    assert allocate.apply_allocation(given).fleet.gpu_memory == 0.3


@pytest.mark.parametrize(
    ("config", "given", "share"),
    [
        (config_of("vllm:d1+jax:f1"), "", "0.9"),
        (config_of("", **{"fleet.addresses": ("h:1",)}), "", "0.9"),
        (config_of("vllm:d1+jax:f1"), "0.8", "0.8"),
        (config_of(""), "", None),
    ],
)
def test_a_trainer_takes_the_memory_of_gpus_that_are_its_own(monkeypatch, config, given, share):
    name = "XLA_PYTHON_CLIENT_MEM_FRACTION"
    monkeypatch.setenv(name, given) if given else monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6")
    with allocate.gpu_environment(allocate.apply_allocation(config)):
        assert os.environ.get(name) == share
    assert os.environ.get(name, "") == given


def test_servers_of_an_evaluation_have_gpus_of_their_own(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4")
    monkeypatch.setattr(score_models, "servers_of", lambda *_, **options: options["gpus"])
    config = allocate.apply_allocation(config_of("vllm:d2+eval"), trains=False)
    model = score_models._Model(
        config, RunOptions.of(config), QuestionOptions(), tmp_path, tmp_path
    )
    assert model.servers(None) == (("3",), ("4",))


def test_a_trainer_is_dealt_its_gpus_before_anything_looks_for_devices(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")

    def prepare(config):  # compiles a user's own loss, the first thing that does
        raise UserError(os.environ["CUDA_VISIBLE_DEVICES"])

    monkeypatch.setattr(loop, "prepare", prepare)
    with pytest.raises(UserError, match=r"^2$"):
        loop.run(config_of("jax:d2+jax:f1"), tmp_path)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "0,1,2"
    assert allocate.gpus({"CUDA_VISIBLE_DEVICES": "-1"}) == ()  # as users hide them


@pytest.mark.parametrize(
    ("text", "changes", "processes", "words"),
    [
        (DEALS, {}, 2, "of 1 process, and this one has 2;"),
        ("jax:d2+torch:f2", {"trainer": "torch"}, 1, "of 2 processes, and this one has 1;"),
        (DEALS, {"teacher.path": "t", "teacher.engine": "vllm"}, 1, "no GPU for the teacher"),
        ("jax:d2+jax:f9", {}, 1, "needs 11 GPUs"),
    ],
)
def test_what_cannot_be_dealt_is_one_line(text, changes, processes, words):
    with pytest.raises(UserError, match=words):
        allocate.share(config_of(text, **changes), tuple("0123456789"), processes)
    assert allocate.share(config_of(text, **changes), ()) is None  # no GPU


def test_a_dry_run_shows_who_has_which_gpus(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(machine, "devices", Devices)  # JAX in another process, which takes seconds
    monkeypatch.setattr(packages, "check", lambda **_: iter(()))
    config = config_of("jax:d2+jax:f1")
    rows = {row.name: row for row in findings(config, tmp_path)}
    assert rows["allocation"].result == (
        "jax:d2+jax:f1; server 0: GPU 0; server 1: GPU 1; trainer: GPU 2"
    )
    assert rows["mesh"].level == "ok"
    assert "JAX_PLATFORMS" not in os.environ, "it is this check's own"
    config.cluster.processes = 2
    found = findings(config, tmp_path)
    row = next(row for row in found if row.level != "ok" and row.name == "allocation")
    assert "this one has 2" in row.result


@pytest.fixture
def eight_h100(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    monkeypatch.setattr(machine, "gpu_kind", lambda: "NVIDIA H100 80GB HBM3")


def test_auto_takes_the_fastest_plan_for_the_gpus_here_and_keeps_it(
    eight_h100, monkeypatch, tmp_path, capsys
):
    config = allocate.apply_allocation(config_of("auto"), workdir=tmp_path)
    parsed = allocation.parse(config.allocation_mode)
    assert parsed.gpus == 8
    assert config.fleet.num_servers == parsed.parts[0].sizes.get("d", 1)
    said = capsys.readouterr().out
    assert f"allocation_mode=auto: {parsed}, " in said
    assert "next vllm:d" in said
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["allocation"] == str(parsed)
    assert plan["seconds"]["step"] == pytest.approx(
        plan["seconds"]["train"] + plan["seconds"]["wait"]
    )
    (tmp_path / "config.json").write_text(json.dumps({"allocation_mode": "vllm:d1+jax:f2"}))
    monkeypatch.setattr(machine, "gpu_kind", lambda: "another one")  # it is not asked again
    kept = allocate.apply_allocation(config_of("auto"), workdir=tmp_path)
    assert (kept.allocation_mode, kept.train.mesh) == ("vllm:d1+jax:f2", "fsdp:2")


def test_auto_without_gpus_is_the_default(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    config = allocate.apply_allocation(config_of("auto"))
    assert config.to_dict() == config_of("").to_dict()


@pytest.mark.parametrize(
    ("kind", "changes", "words"),
    [
        ("NVIDIA T4", {}, "'NVIDIA T4' is unknown; set it, such as vllm:d7.jax:f1"),
        ("", {"scheduler.type": "slurm", "scheduler.gpus_per_node": 4}, "rlx plan --gpus=4 --gpu="),
        ("NVIDIA H100", {"fleet.num_servers": 3}, "num_servers=3 contradicts allocation_mode=vllm"),
    ],
)
def test_auto_that_cannot_be_is_one_line(eight_h100, monkeypatch, kind, changes, words):
    monkeypatch.setattr(machine, "gpu_kind", lambda: kind)
    with pytest.raises(UserError, match=words) as error:
        allocate.apply_allocation(config_of("auto", **changes))
    assert "\n" not in str(error.value)


def test_a_card_with_half_of_the_memory_is_known():
    assert gpu_cards.card_of("NVIDIA A100-SXM4-40GB").memory == 40 << 30
    assert gpu_cards.card_of("NVIDIA H100 80GB HBM3") == gpu_cards.CARDS["h100"]
    assert gpu_cards.card_of("NVIDIA T4") is None


def test_nvidia_smi_names_the_gpus(tmp_path, monkeypatch):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho NVIDIA H20; echo NVIDIA H20\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert machine.gpu_kind() == "NVIDIA H20"
    smi.write_text("#!/bin/sh\nexit 9\n")
    assert machine.gpu_kind() == ""


@pytest.mark.parametrize(
    ("mode", "changes", "level", "words"),
    [
        ("vllm:d1+jax:f7", {}, "warning", "trainer idle [3-9].*set allocation_mode=vllm:d.* of"),
        (
            "vllm:d7+jax:f1",
            {"sampling.max_new_tokens": 32},
            "warning",
            "servers idle [3-9].*set allocation_mode=vllm",
        ),
        (
            "vllm:d4+jax:f4",
            {"rollout.max_staleness": 0},
            "warning",
            "no split avoids it: raise rollout.max_staleness",
        ),
        ("vllm:d1+eval", {}, None, ""),
    ],
)
def test_the_doctor_names_a_split_that_waits_less(mode, changes, level, words):
    trains = "eval" not in mode
    changes = {"rollout.max_staleness": 2, **changes}
    config = allocate.apply_allocation(config_of(mode, **changes), trains)
    row = plan_run.judge_idle(config, "")
    assert (row and row.level) == level
    if row:
        assert re.search(words, f"{row.result} {row.remedy}")
