"""`auto` becomes bfloat16 where it is native and pays, is decided once, and is kept."""

import json
import os
import time

import pytest

from configs import arithmetic
from rlx.doctor import machine
from rlx.doctor.gpu_cards import peak_flops
from rlx.doctor.machine import Devices
from rlx.model import hf
from rlx.run import auto_values, config_checks, jax_trainer
from rlx.run.auto_values import Precision, choose_dtype, decide_dtypes
from rlx.train.train_options import TrainOptions

HOPPER = Devices("gpu", "NVIDIA H100 80GB HBM3", 4, capability="9.0")
BOTH = {"compute_dtype": "bfloat16", "publish_dtype": "bfloat16"}


@pytest.fixture
def config():
    return arithmetic.get_config()


@pytest.fixture
def model():
    return hf.load_config(hf.resolve("rlx:arithmetic"))


@pytest.fixture
def cpu(monkeypatch):
    """cpu(flags, float32=, bfloat16=): a processor with products of so many seconds' work."""
    asked = []

    def make(flags, **seconds):
        def product(shape, dtype):
            asked.append((dtype, shape))
            return lambda: dtype

        monkeypatch.setattr(auto_values, "_timed", lambda run: seconds[run()])
        monkeypatch.setattr(machine, "cpu_flags", lambda: f"flags : fpu {flags}")
        monkeypatch.setattr(jax_trainer, "product", product)
        return asked

    return make


@pytest.mark.parametrize(
    ("native", "float32", "bfloat16", "wanted"),
    [
        (True, 1.5, 1.0, "bfloat16"),
        (True, 1.49, 1.0, "float32"),
        (False, 9.0, 1.0, "float32"),
        (True, 0.0, 0.0, "bfloat16"),  # a GPU, which nothing measures
        (False, 0.0, 0.0, "float32"),
    ],
)
def test_bfloat16_has_to_be_native_and_half_as_fast_again(native, float32, bfloat16, wanted):
    assert choose_dtype(native, float32, bfloat16) == wanted


def test_a_cpu_is_measured_at_the_runs_shapes(config, model, cpu):
    asked = cpu("amx_bf16", float32=0.008, bfloat16=0.002)
    found = decide_dtypes(config, model, Devices())
    assert found.dtypes == BOTH
    times = "products in bfloat16 are 4.0 times as fast as in float32"
    assert found.message == f"model.compute_dtype=auto is bfloat16: {times}"
    tokens, *widths = asked[0][1]
    assert widths == [model.model_dim, model.mlp_dim]
    assert 16 < tokens <= config.train.max_tokens_per_microbatch
    flops = 2 * tokens * model.model_dim * model.mlp_dim
    assert found.peak == pytest.approx(flops / 0.002 * len(os.sched_getaffinity(0)))
    assert decide_dtypes(config, model, Devices(count=2), processes=2).peak == 2 * found.peak


@pytest.mark.parametrize(
    ("flags", "seconds", "words", "measured"),
    [
        ("avx512_bf16", 0.003, "products in bfloat16 are 1.0 times", ["float32", "bfloat16"]),
        ("avx2", 0.0, "bfloat16 is not native here", ["float32"]),
    ],
)
def test_a_cpu_where_it_does_not_pay_stays_in_float32(
    flags, seconds, words, measured, config, model, cpu
):
    asked = cpu(flags, float32=0.003, bfloat16=seconds)
    found = decide_dtypes(config, model, Devices())
    assert found.dtypes == {"compute_dtype": "float32", "publish_dtype": "float32"}
    assert words in found.message
    assert [dtype for dtype, _ in asked] == measured


def test_seconds_in_which_others_compute_do_not_count():
    def run():  # a busy machine's clock would lie
        time.sleep(0.05)
        end = time.process_time() + 0.02
        while time.process_time() < end:
            pass

    assert 0.02 <= auto_values._timed(run) < 0.04


def test_gpus_are_not_measured_and_old_ones_compute_in_float32(config, model, cpu):
    asked = cpu("")
    found = decide_dtypes(config, model, HOPPER)
    assert (found.dtypes, found.devices, found.peak) == (BOTH, 4, 4 * 989e12)
    old = decide_dtypes(config, model, Devices("gpu", "Tesla T4", capability="7.5"))
    assert (old.dtypes["compute_dtype"], old.peak) == ("float32", 0.0)
    assert peak_flops("NVIDIA A100-SXM4-40GB", "float32") == 156e12
    assert peak_flops("NVIDIA H200", "bfloat16") == 989e12
    assert [peak_flops(f"NVIDIA {c}", "bfloat16") for c in ("L4", "L40")] == [121e12, 181e12]
    assert asked == []


def test_a_named_dtype_and_that_of_a_begun_run_are_kept(config, model, cpu):
    asked = cpu("amx_bf16", float32=0.001, bfloat16=0.002)
    kept = decide_dtypes(config, model, Devices(), "bfloat16")
    assert (kept.dtypes, kept.message) == (
        BOTH, "model.compute_dtype=auto is bfloat16: as the run began",
    )  # fmt: skip
    config.model.compute_dtype = "bfloat16"
    config.model.publish_dtype = "float32"
    named = decide_dtypes(config, model, Devices(), "float32")
    assert named.dtypes == {"compute_dtype": "bfloat16", "publish_dtype": "float32"}
    assert named.message == ""
    assert [dtype for dtype, _ in asked] == ["bfloat16"] * 2


def test_speed_counts_tokens_by_device_and_flops_by_the_peak():
    metrics = {"n_tokens": 6000, "model_flops": 3e12}
    assert Precision(BOTH, "", 4, 5e12).speed(metrics, 1.5) == {
        "update_seconds": 1.5, "tokens_per_second_per_device": 1000.0, "mfu": 0.4
    }  # fmt: skip
    assert "mfu" not in Precision(BOTH, "", 4, 0.0).speed(metrics, 1.5)


@pytest.mark.parametrize("trainer", ["jax", "torch"])
def test_a_real_product_is_timed_in_both_dtypes(trainer, config, model, monkeypatch):
    if trainer == "torch":
        pytest.importorskip("torch")
    config.trainer = trainer
    monkeypatch.setattr(machine, "cpu_flags", lambda: "amx_bf16")
    found = decide_dtypes(config, model, Devices())
    assert "times as fast" in found.message
    assert 1e8 < found.peak < 1e14


def test_the_doctor_names_the_dtype_and_counts_memory_by_it(config, tmp_path):
    rows = {row.name: row for row in config_checks.check(config, tmp_path, HOPPER)}
    assert rows["dtype"].result == "model.compute_dtype=auto is bfloat16: bfloat16 is native here"
    config.model.compute_dtype = config.model.publish_dtype = "float32"
    other = {row.name: row for row in config_checks.check(config, tmp_path, HOPPER)}
    assert "dtype" not in other
    assert rows["trainer"].result != other["trainer"].result


def test_processes_compute_in_what_process_0_has_decided(config, tiny_model_dir):
    """Their own config still has `auto`."""
    options = TrainOptions.of(config)
    assert options.compute_dtype == "float32"
    update = jax_trainer.make(options, 192, str(tiny_model_dir), **BOTH)
    assert update._options.compute_dtype == update._options.publish_dtype == "bfloat16"
    tensors = update.weights(update.init()).tensors
    assert {tensor.dtype.name for tensor in tensors.values()} == {"bfloat16"}


def test_a_run_keeps_what_it_began_with_until_a_flag_says_otherwise(
    tiny_model_dir, tmp_path, monkeypatch
):
    import rlx

    def start(steps, **keys):
        c = arithmetic.get_config()
        c.total_steps, c.model.path, c.algorithm.preset = steps, str(tiny_model_dir), "sft"
        c.data.kind, c.data.train = "jsonl", str(data)
        c.fleet.num_servers, c.eval.num_questions, c.observe.writers = 0, 0, ()
        c.rollout.batch_prompts, c.checkpoint.first_step = 2, 1
        c.model.update(keys)
        assert rlx.run(c, workdir).complete
        steps = [json.loads(x) for x in (workdir / "metrics.jsonl").read_text().splitlines()]
        begun = [json.loads(x) for x in (workdir / "starts.jsonl").read_text().splitlines()]
        return steps[-1], [x for x in begun if "start" in x][-1]

    data, workdir = tmp_path / "rows.jsonl", tmp_path / "run"
    data.write_text('{"question": "1 + 1 =", "completion": "it is 2"}\n' * 4)
    monkeypatch.setattr(machine, "cpu_flags", lambda: "amx_bf16")
    monkeypatch.setattr(auto_values, "GAIN", 0.0)
    record, first = start(1)
    assert first["config"]["model"]["compute_dtype"] == "bfloat16"
    assert "auto is bfloat16: products in bfloat16 are" in first["environment"]["precision"]
    assert "model.compute_dtype=auto is bfloat16" in (workdir / "console.log").read_text()
    assert "model.compute_dtype=auto is bfloat16" in (workdir / "report.html").read_text()
    assert json.loads((workdir / "config.json").read_text())["model"]["publish_dtype"] == "bfloat16"
    peak = first["environment"]["peak_flops"]
    assert record["mfu"] == pytest.approx(record["model_flops"] / record["update_seconds"] / peak)
    assert 0 < record["update_seconds"] <= record["elapsed_seconds"]
    assert record["tokens_per_second_per_device"] == pytest.approx(
        record["n_tokens"] / record["update_seconds"]
    )
    monkeypatch.setattr(machine, "cpu_flags", lambda: "fpu")  # another machine
    _, second = start(2)
    assert second["environment"]["precision"].endswith("auto is bfloat16: as the run began")
    assert not [text for text in second["changed"] if "dtype" in text]
    _, third = start(3, compute_dtype="float32")
    assert "model.compute_dtype bfloat16 → float32" in third["changed"]
