"""SFT, reward models and DPO through the whole loop, on a tiny model and six rows."""

import itertools
import json
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import rlx
from rlx.base import UserError
from rlx.config import check, default
from rlx.model import decoder, hf
from rlx.run import export, inputs, replay_run
from rlx.run.saves import Saves
from rlx.train import checkpoint
from rlx.train.step_metrics import Metrics
from rlx.train.update import JaxUpdate

ROWS = [
    {"question": f"{i} + {i} =", "answer": str(2 * i), "completion": f"it is {2 * i}",
     "chosen": f"it is {2 * i}", "rejected": f"it may be {2 * i + 1}?"}
    for i in range(6)
]  # fmt: skip


@pytest.fixture
def config(tiny_model_dir, tmp_path):
    """config(preset): of a run without servers, four rows a batch."""
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in ROWS))

    def make(preset: str, steps: int = 2):
        c = default()
        c.total_steps = steps
        c.model.path, c.model.compute_dtype = str(tiny_model_dir), "float32"
        c.algorithm.preset = preset
        c.data.train = c.data.eval = str(data)
        c.data.max_prompt_tokens = 64
        c.sampling.max_new_tokens = 24
        c.rollout.batch_prompts = 4
        c.optimizer.learning_rate = 1e-3
        c.train.max_tokens_per_microbatch = 512
        c.train.row_buckets = (128,)
        c.fleet.num_servers = 0
        c.eval.every_steps = 2
        c.eval.num_questions = 3
        c.observe.writers = ()
        return c

    return make


def run(config, workdir: Path) -> list[dict]:
    """The records of a run that must end well."""
    assert rlx.run(config, workdir).complete
    return records(workdir / "metrics.jsonl")


def records(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def weights(workdir: Path) -> bytes:
    return (workdir / "hf" / hf.WEIGHTS).read_bytes()


@pytest.fixture
def later(monkeypatch):
    """later(n): an event that is set when the trainer is given its n-th batch, counted from 1."""
    begun = [Event() for _ in range(9)]
    given = itertools.count(1)
    update = JaxUpdate.update

    def counted(self, state, groups):
        begun[next(given)].set()
        return update(self, state, groups)

    monkeypatch.setattr(JaxUpdate, "update", counted)
    return lambda step: begun[step]


def test_a_step_is_read_when_the_next_one_has_been_given_to_the_device(
    config, later, monkeypatch, tmp_path
):
    c = config("sft", steps=4)
    c.eval.every_steps = c.checkpoint.first_step = 0
    wanted = run(c, tmp_path / "as it is")
    number, update = itertools.count(1), JaxUpdate.update

    def slow(self, state, groups):
        step = next(number)
        state, metrics = update(self, state, groups)

        def compute():
            assert step == 4 or later(4 + step + 1).wait(100), "the loop waited for the device"
            return dict(metrics)

        return state, Metrics(compute)

    monkeypatch.setattr(JaxUpdate, "update", slow)
    got = run(c, tmp_path / "slow")
    told = (
        "step",
        "epoch",
        "sft_loss",
        "grad_norm",
        "n_valid_tokens",
        "learning_rate",
        "row_length",
    )
    assert [[r[name] for name in told] for r in got] == [[r[name] for name in told] for r in wanted]
    assert weights(tmp_path / "slow") == weights(tmp_path / "as it is")


@pytest.mark.parametrize(
    ("preset", "trainer"),
    [("sft", "jax"), ("dpo", "jax"), ("reward_model", "jax"), ("sft", "torch")],
)
def test_two_starts_of_a_run_are_replayed_bit_for_bit(config, preset, trainer, tmp_path):
    """The second start has other settings: its schedule is longer."""
    if trainer == "torch":
        pytest.importorskip("torch")
    for steps in (2, 4):
        c = config(preset, steps)
        c.trainer, c.optimizer.schedule = trainer, "cosine"
        run(c, tmp_path / "run")
    said, recorded = [], replay_run.Recorded(tmp_path / "run")
    plan = replay_run.plan(recorded)
    assert replay_run.replay(recorded, plan, {}, said.append), said
    assert "the metrics of 4 steps and the weights of 2 versions are bitwise those" in said[-1]
    changed = {"optimizer.learning_rate": 2e-3}
    assert not replay_run.replay(recorded, plan, changed, said.append)
    assert re.search(r"step [12] differs: .*learning_rate .* → .*", said[3]), said
    assert said[-1] == "optimizer.learning_rate is 0.002"


def test_training_goes_on_while_a_checkpoint_is_written(config, later, monkeypatch, tmp_path):
    c = config("sft", steps=3)
    c.checkpoint.first_step, c.checkpoint.every_steps, c.checkpoint.keep = 0, 1, 9
    number, save = itertools.count(1), JaxUpdate.save
    thread = ThreadPoolExecutor(1)

    def slow(self, path, state):
        step, written = next(number), save(self, path, state)

        def finish():
            assert step == 3 or later(step + 1).wait(100), "training waited for the disk"
            written.result()

        return thread.submit(finish)

    monkeypatch.setattr(JaxUpdate, "save", slow)
    with thread:
        run(c, tmp_path / "run")
    found = checkpoint.checkpoints(tmp_path / "run" / "checkpoints")
    assert [checkpoint.read_host(path)["step"] for path in found] == [1, 2, 3]


def test_a_run_evaluates_and_exports_by_epoch_also_after_a_resume(config, tmp_path):
    """Six rows, four a batch: a pass is complete after steps 2, 3 and 5."""
    c = config("sft", steps=4)
    c.eval.every_steps, c.eval.every_epochs, c.export.every_epochs = 0, 1, 1
    run(c, tmp_path)
    c.total_steps, c.export.keep = 5, 2
    run(c, tmp_path)
    evaluated = [record["step"] for record in records(tmp_path / "eval.jsonl")]
    assert evaluated == [0, 2, 3, 4, 5]  # 4 was the last
    assert sorted(os.listdir(tmp_path / "exports")) == [
        "epoch2epochstep0globalstep3",
        "epoch3epochstep0globalstep5",
    ]
    last = tmp_path / "exports" / "epoch3epochstep0globalstep5"
    assert (last / hf.WEIGHTS).read_bytes() == weights(tmp_path)


def test_an_export_that_was_cut_off_is_made_of_the_checkpoint_that_it_belongs_to(
    config, tmp_path, monkeypatch
):
    c = config("sft", steps=5)
    c.checkpoint.first_step, c.checkpoint.every_steps, c.export.every_steps = 0, 2, 2

    def fail(self, state, now):
        raise RuntimeError(f"killed at step {now.step}")

    with monkeypatch.context() as patched:
        patched.setattr(Saves, "export", fail)
        with pytest.raises(RuntimeError, match="killed at step 2"):
            rlx.run(c, tmp_path)
    run(c, tmp_path)
    assert sorted(os.listdir(tmp_path / "exports")) == [
        "epoch1epochstep0globalstep2", "epoch2epochstep1globalstep4",
    ]  # fmt: skip


def test_sft_without_servers_stopped_and_resumed_is_the_run_that_was_not(config, tmp_path, capsys):
    steps = run(config("sft", steps=4), tmp_path / "whole")
    assert [step["epoch"] for step in steps] == [0, 1, 1, 2], "six rows, four a batch"
    assert [step["n_prompts"] for step in steps] == [4] * 4
    assert steps[-1]["sft_loss"] < steps[0]["sft_loss"]
    assert all(step["failed"] == step["dropped"] == 0 for step in steps)
    assert not {"task_reward", "staleness_mean", "publish_seconds"} & steps[0].keys()
    answers = [ROWS[index]["completion"] for index in order(4)]
    assert steps[0]["n_valid_tokens"] == sum(len(text) + 1 for text in answers), "and end tokens"

    scores = records(tmp_path / "whole" / "eval.jsonl")
    assert [(s["step"], s["version"], s["num_questions"]) for s in scores] == [
        (0, 0, 3), (2, 2, 3), (4, 4, 3),
    ]  # fmt: skip
    losses = [score["held_out_sft_loss"] for score in scores]
    assert losses == sorted(losses, reverse=True)
    assert "greedy_acc" not in scores[0]
    shown = capsys.readouterr().out
    assert f"held_out_sft_loss {losses[0]:.2f}"[:-1] in shown
    assert "reward" not in shown
    assert not (tmp_path / "whole" / "gate.jsonl").exists()
    page = (tmp_path / "whole" / "report.html").read_text()
    assert "Held-out loss" in page
    assert "Task reward" not in page

    halves = [config("sft", steps=2), config("sft", steps=4)]
    for half in halves:
        half.eval.num_questions = 0  # evaluating changes nothing
    first, second = (run(half, tmp_path / "halves") for half in halves)
    assert second[:2] == first
    assert [step["sft_loss"] for step in second] == [step["sft_loss"] for step in steps]
    assert weights(tmp_path / "halves") == weights(tmp_path / "whole")


def order(count: int) -> list[int]:
    """The first rows that a run of seed 0 is given."""
    from rlx.rollout.data import Cursor

    cursor = Cursor(list(range(6)), seed=0)
    return [cursor.next()[1] for _ in range(count)]


@pytest.fixture
def reward_model(config, tmp_path):
    run(config("reward_model"), tmp_path / "rm")
    return tmp_path / "rm"


@pytest.mark.torch
def test_a_reward_model_is_what_transformers_calls_a_sequence_classifier(reward_model, tmp_path):
    import torch
    import transformers

    scores = records(reward_model / "eval.jsonl")
    assert scores[0]["held_out_pair_margin"] == 0, "a head of zeros prefers nothing"
    assert scores[0]["held_out_pair_loss"] == pytest.approx(np.log(2))
    assert scores[-1]["held_out_pair_loss"] < scores[0]["held_out_pair_loss"]

    model, params = hf.load(reward_model / "hf")
    assert model.value_head
    tokenizer = transformers.AutoTokenizer.from_pretrained(reward_model / "hf")
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(
        reward_model / "hf", dtype=torch.float32
    )
    assert type(theirs).__name__ == "Qwen2ForSequenceClassification"
    assert theirs.config.num_labels == 1
    margins = []
    for row in ROWS[:3]:
        pair = []
        for answer in (row["chosen"], row["rejected"]):
            chat = [{"role": "user", "content": row["question"]}]
            text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
            ids = tokenizer(text + answer + "<|im_end|>", return_tensors="np")["input_ids"]
            places = jnp.arange(ids.shape[1])[None]
            batch = {"tokens": ids, "positions": places, "segment_ids": jnp.ones_like(places)}
            ours = float(decoder.values(params, model, batch)[0, -1])
            with torch.no_grad():
                found = theirs(torch.tensor(ids)).logits
            assert found.shape == (1, 1)
            assert abs(float(found) - ours) < 1e-5
            pair.append(ours)
        margins.append(pair[0] - pair[1])
    assert np.ptp(margins) > 0
    assert np.mean(margins) == pytest.approx(scores[-1]["held_out_pair_margin"], abs=1e-5)

    export.checkpoint_to_hf(checkpoint.find(str(reward_model)), tmp_path / "converted", "", "")
    for name in (hf.WEIGHTS, "config.json"):
        converted, exported = (d / name for d in (tmp_path / "converted", reward_model / "hf"))
        assert converted.read_bytes() == exported.read_bytes(), name

    with pytest.raises(UserError, match=r"is a reward model.*give a Qwen2ForCausalLM directory"):
        inputs.prepare(refused(reward_model))


def refused(workdir: Path):
    """The config of SFT from the directory that a reward model was exported to."""
    config = default()
    config.model.path = str(workdir / "hf")
    config.algorithm.preset = "sft"
    config.data.kind = "arithmetic"
    config.data.max_prompt_tokens, config.sampling.max_new_tokens = 64, 64
    return config


def test_dpo_begins_at_its_reference_and_prefers_what_it_is_shown(config, tmp_path):
    steps = run(config("dpo", steps=3), tmp_path)
    assert steps[0]["pair_loss"] == pytest.approx(np.log(2))
    scores = records(tmp_path / "eval.jsonl")
    assert scores[0]["held_out_pair_margin"] == pytest.approx(0, abs=1e-6)
    assert scores[-1]["held_out_pair_margin"] > 0
    samples = records(next((tmp_path / "rollouts").glob("*.jsonl")))
    assert {sample["reward"] for sample in samples} == {0.0, 1.0}


def test_sft_with_a_server_records_loss_and_greedy_accuracy(config, tmp_path):
    c = config("sft", steps=3)
    c.fleet.num_servers = 1
    c.fleet.slots = 4
    c.gate.every_steps = 1
    steps = run(c, tmp_path)
    scores = records(tmp_path / "eval.jsonl")
    assert [(s["step"], s["version"]) for s in scores] == [(0, 0), (2, 2), (3, 3)]
    for score in scores:
        assert 0 <= score["greedy_acc"] <= 1
        assert score["version_end"] == score["version"], "answered by the weights of its step"
    losses = [score["held_out_sft_loss"] for score in scores]
    assert losses == sorted(losses, reverse=True)
    assert [(r["step"], r["ok"]) for r in records(tmp_path / "gate.jsonl")] == [
        (0, True), (1, True), (2, True),
    ]  # fmt: skip
    assert steps[-1]["publish_seconds"] > 0


@pytest.mark.parametrize("preset", ["sft", "dpo"])
def test_a_token_that_the_model_has_no_embedding_of_is_refused_with_its_row(
    config, preset, tiny_model_dir, tmp_path
):
    transformers = pytest.importorskip("transformers")
    c = config(preset)
    wide = shutil.copytree(tiny_model_dir, tmp_path / "wide")
    tokenizer = transformers.AutoTokenizer.from_pretrained(wide)
    tokenizer.add_tokens([f"extra{i}" for i in range(40)])
    tokenizer.save_pretrained(wide)
    c.model.path = str(wide)
    inputs.prepare(c)  # no row has such a token
    rows = [*ROWS[:5], {**ROWS[5], "completion": "extra39", "rejected": "extra39"}]
    Path(c.data.train).write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match=r"of row 6 of .* has token 138 .* 128 embeddings"):
        inputs.prepare(c)


@pytest.mark.parametrize(
    ("preset", "why"), [("sft", "sft_loss is nan"), ("dpo", "pair_loss is na")]
)
def test_a_run_that_is_never_a_number_ends_in_error_and_exports_nothing(
    config, preset, why, tiny_model_dir, tmp_path
):
    c = config(preset)
    broken = shutil.copytree(tiny_model_dir, tmp_path / "broken")
    c.model.path, c.eval.num_questions = str(broken), 0
    tensors = load_file(broken / hf.WEIGHTS)
    tensors["model.norm.weight"] *= np.nan
    save_file(tensors, broken / hf.WEIGHTS, {"format": "pt"})
    with pytest.raises(UserError, match=f"the last 2 steps, up to 2, taught nothing: {why}"):
        rlx.run(c, tmp_path / "run")
    assert not (tmp_path / "run" / "hf").exists()


@pytest.mark.parametrize(
    ("preset", "given"), [("sft", ["completion"]), ("dpo", ["chosen", "rejected"])]
)
@pytest.mark.parametrize("repeated", [False, True])
def test_conversations_give_the_groups_of_their_texts(config, preset, given, repeated):
    c = config(preset)
    wanted = inputs.prepare(c).held_out
    rows = []
    for row in ROWS:
        asked = [{"role": "user", "content": [{"type": "text", "text": row["question"]}]}]
        answers = {key: [{"role": "assistant", "content": row[key]}] for key in given}
        if repeated:
            answers = {key: [*asked, *answer] for key, answer in answers.items()}
        rows.append({"question": asked, **answers})
    Path(c.data.train).write_text(json.dumps(rows))
    for group, other in zip(inputs.prepare(c).held_out, wanted, strict=True):
        for one, two in zip(group.trajectories, other.trajectories, strict=True):
            assert one.tokens.tolist() == two.tokens.tolist()
            assert one.loss_mask.tolist() == two.loss_mask.tolist()
            assert one.completion == two.completion


@pytest.mark.parametrize(
    ("preset", "changes", "words"),
    [
        ("reward_model", {"fleet.num_servers": 1}, ["reward model", "fleet.num_servers=0"]),
        ("reward_model", {"fleet.addresses": ("127.0.0.1:1",)}, ["generates nothing"]),
        ("grpo", {}, ["fleet.num_servers=0", "grpo", "rollouts"]),
        ("sft", {"sampling.temperature": 0.5}, ["sampling.temperature=0.5", "set it to 1"]),
        ("sft", {"data.completion_key": "solution"}, ["rows.jsonl:1", "data.completion_key"]),
        ("dpo", {"data.rejected_key": "worse"}, ["rows.jsonl:1", "data.rejected_key"]),
        ("dpo", {"data.rejected_key": "chosen"}, ["both 'chosen'"]),
        ("sft", {"sampling.max_new_tokens": 5}, ["completion of row 1", "8 tokens", "is 5"]),
        (
            "ipo",
            {"data.max_prompt_tokens": 40, "train.max_tokens_per_microbatch": 70},
            ["chosen and rejected of row 1", "is 70 and they must share one"],
        ),
    ],
)
def test_what_cannot_be_trained_is_one_sentence(config, preset, changes, words):
    c = config(preset)
    for key, value in changes.items():
        part, name = key.split(".")
        c[part][name] = value
    check(c)
    with pytest.raises(UserError) as error:
        inputs.prepare(c)
    for word in words:
        assert word in str(error.value)
    assert "\n" not in str(error.value)
