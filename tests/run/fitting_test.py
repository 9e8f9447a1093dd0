"""The choice of recomputation and microbatches: how it is made, and that a resumed run keeps it."""

import json
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from configs import arithmetic
from rlx.config import default
from rlx.doctor import memory
from rlx.doctor.machine import Devices
from rlx.model import hf
from rlx.run import auto_values, jax_trainer
from rlx.run.room_options import sizes_of
from rlx.train import device_programs
from rlx.train.train_options import TrainOptions

KINDS = ("none", "dots", "attention", "full")
REMAT, TOKENS = auto_values.REMAT, auto_values.TOKENS
GB = 10**9


@pytest.fixture(scope="module")
def model():
    return hf.load_config(hf.resolve("rlx:arithmetic"))


def left_open(**values):
    c = default()
    c.model.remat, c.train.max_tokens_per_microbatch = "auto", 0
    c.data.max_prompt_tokens, c.sampling.max_new_tokens = 1024, 5120
    c.update_from_flattened_dict({key.replace("__", "."): value for key, value in values.items()})
    return c


@pytest.mark.parametrize(
    ("limit", "wanted"),
    [
        (100, ("none", 4)),
        (25, ("none", 2)),
        (19, ("none", 1)),
        (9, ("dots", 1)),
        (7, ("attention", 1)),
        (4, ("full", 1)),
        (1, ("full", 1)),  # nothing fits: the run's own error of memory says what to do
    ],
)
def test_the_least_recomputation_then_the_largest_microbatch_that_fits(limit, wanted):
    plans = {"none": 12, "dots": 8, "attention": 6, "full": 3}
    fits = {(kind, tokens): plans[kind] * tokens <= limit for kind in KINDS for tokens in (1, 2, 4)}
    assert auto_values.choose(KINDS, (1, 2, 4), lambda *one: fits[one]) == wanted


def test_on_a_gpu_the_plans_of_candidates_decide_and_no_more_are_compiled(model):
    asked = []

    def planned(sizes):
        kind, tokens = sizes.train.remat, sizes.train.token_budget
        asked.append((kind, tokens))
        plans = {"none": 12, "dots": 9, "up": 7, "attention": 5, "full": 1}
        return plans[kind] * tokens / 6144 * GB

    config = left_open()
    gpu = Devices("gpu", "H100", 1, 12 * GB)
    found = auto_values.decide_microbatches(config, sizes_of(config, model), gpu, planned)
    assert found.keys == {REMAT: "dots", TOKENS: 6144}
    larger = [("dots", 49_152), ("dots", 24_576), ("dots", 12_288)]
    assert asked == [("none", 6144), ("dots", 6144), *larger]
    assert found.message == (
        "model.remat=auto is dots and train.max_tokens_per_microbatch=0 is 6144: a step needs "
        "9.0 GB of 11 GB"
    )
    asked.clear()
    named = left_open(train__max_tokens_per_microbatch=8192)
    found = auto_values.decide_microbatches(named, sizes_of(named, model), gpu, planned)
    assert found.keys == {REMAT: "up"}
    assert asked == [("none", 8192), ("dots", 8192), ("up", 8192)]
    named.model.remat = "full"
    assert auto_values.decide_microbatches(named, sizes_of(named, model), gpu, planned) == ({}, "")


def test_a_microbatch_holds_a_minibatch_at_most(model):
    config = left_open(rollout__batch_prompts=1, sampling__n_samples=3)
    found = auto_values.decide_microbatches(
        config, sizes_of(config, model), Devices("gpu", "H100", 1, GB), lambda _: 0
    )
    assert found.keys[TOKENS] == 24_576, "the first that holds 3 × 6,144"


def test_without_a_limit_of_memory_the_values_are_the_defaults(model):
    config, usual = left_open(sampling__max_new_tokens=1024), default()
    found = auto_values.decide_microbatches(config, sizes_of(config, model), Devices(), pytest.fail)
    assert found.keys == {REMAT: usual.model.remat, TOKENS: usual.train.max_tokens_per_microbatch}
    config = left_open()
    assert TrainOptions.of(config).token_budget == 6144, "a row of the longest trajectory"
    config.train.mesh = "context:4"
    assert TrainOptions.of(config).row_budget == 16_384


def test_a_plan_is_what_xla_needs_with_all_of_the_state(model):
    """A microbatch's program has no moments among its arguments, and they are in memory too."""
    config = left_open(sampling__max_new_tokens=256, data__max_prompt_tokens=256)
    sizes = sizes_of(config, model)
    state = sum(memory.state(sizes).values())
    small, large = (
        replace(sizes, train=replace(sizes.train, token_budget=tokens)) for tokens in (512, 1024)
    )
    [_, programs] = jax_trainer.programs(small, jax.devices()[:1])
    found = {name: (program, beside) for name, program, beside in programs}
    program, beside = found["microbatch"]
    assert beside == pytest.approx(state * 2 / 3, rel=0.01)
    assert found["update"][1] == 0
    own = device_programs.planned_bytes(program.compile().memory_analysis())
    assert jax_trainer.planned(small) == pytest.approx(own + beside, rel=0.02)
    assert jax_trainer.planned(large) > jax_trainer.planned(small)


def test_a_resumed_run_keeps_the_choice_that_it_began_with(tiny_model_dir, tmp_path, monkeypatch):
    import rlx

    data, workdir = tmp_path / "rows.jsonl", tmp_path / "run"
    data.write_text('{"question": "1 + 1 =", "completion": "it is 2"}\n' * 4)

    def start(steps, directory: Path, room: int):
        """Run on a CPU of `room` bytes, as on a GPU; return the last step and start."""
        found = Devices("gpu", "none", 1, room, "7.0")
        monkeypatch.setattr(jax_trainer, "devices", lambda: found)
        c = arithmetic.get_config()
        c.total_steps, c.model.path, c.algorithm.preset = steps, str(tiny_model_dir), "sft"
        c.data.kind, c.data.train = "jsonl", str(data)
        c.fleet.num_servers, c.eval.num_questions, c.observe.writers = 0, 0, ()
        c.rollout.batch_prompts, c.checkpoint.first_step = 2, 1
        c.model.remat, c.train.max_tokens_per_microbatch = "auto", 0
        assert rlx.run(c, directory).complete
        steps = [json.loads(x) for x in (directory / "metrics.jsonl").read_text().splitlines()]
        starts = [json.loads(x) for x in (directory / "starts.jsonl").read_text().splitlines()]
        return steps[-1], [x for x in starts if "start" in x][-1]

    _, first = start(1, workdir, room := 1000)
    assert first["config"]["model"]["remat"] == "full"
    assert "model.remat=auto is full" in (workdir / "console.log").read_text()
    resumed, second = start(2, workdir, 10**12)
    assert second["environment"]["memory"].endswith("as the run began")
    assert second["config"]["model"] == first["config"]["model"]
    assert second["changed"] == ["total_steps 1 → 2"]
    whole, fresh = start(2, tmp_path / "whole", room)
    assert fresh["config"]["train"] == second["config"]["train"]
    assert resumed["grad_norm"] == whole["grad_norm"]
