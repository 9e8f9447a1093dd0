"""The gate between engine and trainer: what it lets pass, what it stops, and what it says."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlx import consistency
from rlx.base import UserError
from rlx.consistency import CAUSES, Case, Policy, Tolerance, compare, diagnose, score
from rlx.fleet.engine import Sampling
from rlx.fleet.sample import Completion
from rlx.model import hf
from rlx.model.config import Rope


@pytest.fixture(scope="module")
def model(tiny_model_dir):
    return hf.load(tiny_model_dir)


@pytest.fixture(scope="module")
def earlier(model):
    return jax.tree.map(lambda x: 0.6 * x, model[1])


def samples(seed=0, count=4):
    """Prompts and arbitrary completions: a logprob can be wrong of any token."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(3, 99, 8).astype(np.int32) for _ in range(count)]
    return prompts, [rng.integers(3, 99, 20 + i).astype(np.int32) for i in range(count)]


def completions(tokens, logprobs, version=0):
    return [
        Completion(t, lp.astype(np.float32), np.full(len(t), version, np.int32), "length")
        for t, lp in zip(tokens, logprobs, strict=True)
    ]


def test_compare_finds_where_and_how_much():
    trainer = [np.array([-1.0, -2.0]), np.array([-3.0, -4.0, -5.0])]
    engine = [np.array([-1.0, -2.0]), np.array([-3.0, -4.5, np.nan])]
    report = compare(engine, trainer, Tolerance(max=0.1, mean=0.1))
    assert (report.tokens, report.bad, report.max) == (5, 2, 0.5)
    assert report.mean == pytest.approx(0.5 / 4), "what is not finite has no size"
    assert report.first_bad == (1, 1, -4.5, -4.0)
    assert not report.ok
    assert "position 1 of sample 1" in str(report)
    assert compare(trainer, trainer).ok
    spread = compare([np.full(9, -1.05)], [np.full(9, -1.0)], Tolerance(max=0.1, mean=0.01))
    assert not spread.bad
    assert not spread.ok, "many small differences are one large"


def test_score_is_the_decoders_and_pads_nothing_into_it(model):
    prompts, tokens = samples()
    policy = Policy(model[1], model[0], temperature=0.7)
    together = score(policy, prompts, tokens)
    for i, (prompt, completion) in enumerate(zip(prompts, tokens, strict=True)):
        (alone,) = score(policy, [prompt], [completion])
        np.testing.assert_allclose(together[i], alone, atol=1e-5)
        assert len(alone) == len(completion)
    # top-p of everything renormalises nothing.
    whole = score(dataclasses.replace(policy, top_p=1 - 1e-12), prompts, tokens)
    np.testing.assert_allclose(whole[0], together[0], atol=1e-5)


def mistakes(model, earlier):
    """What an engine may do → (the policy it is, words of the cause it is recognised by)."""
    config, params = model
    right = Policy(params, config, 0.7)
    untied = dataclasses.replace(config, tie_embeddings=False)
    return {
        "temperature": (dataclasses.replace(right, temperature=1.0), "temperature"),
        "stale": (dataclasses.replace(right, params=earlier), "stale weights"),
        "head": (
            dataclasses.replace(
                right, config=untied, params={**params, "lm_head": earlier["embed"]}
            ),
            "tied embeddings",
        ),
        "rope": (
            dataclasses.replace(right, config=dataclasses.replace(config, rope=Rope(theta=5e5))),
            "RoPE",
        ),
        "dtype": (
            dataclasses.replace(
                right, params=jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
            ),
            "dtype",
        ),
    }


@pytest.mark.parametrize("name", ["temperature", "stale", "head", "rope", "dtype"])
def test_each_mistake_is_recognised(model, earlier, name):
    prompts, tokens = samples()
    wrong, words = mistakes(model, earlier)[name]
    answers = {"server:1": completions(tokens, score(wrong, prompts, tokens))}
    case = Case(Policy(model[1], model[0], 0.7), Sampling(temperature=0.7), lambda: earlier)
    with pytest.raises(UserError) as caught:
        consistency.check(case, prompts, answers, consistency.EXACT)
    message = str(caught.value)
    assert f"likely cause: {words}" in message
    assert "server:1" in message
    assert "\n" not in message


def test_renormalised_top_p_is_recognised(model):
    prompts, tokens = samples()
    tokens = [t.copy() for t in tokens]
    case = Case(Policy(model[1], model[0], 0.7), Sampling(temperature=0.7, top_p=0.6))
    renormalised = dataclasses.replace(case.policy, top_p=0.6)
    for prompt, completion in zip(prompts, tokens, strict=True):  # tokens that top-p leaves
        for k in range(len(completion)):
            for candidate in range(3, 99):
                completion[k] = candidate
                (found,) = score(renormalised, [prompt], [completion[: k + 1]])
                if np.isfinite(found[k]):
                    break
            if k == 3:
                break
    tokens = [completion[:4] for completion in tokens]
    engine = completions(tokens, score(renormalised, prompts, tokens))
    assert diagnose(case, prompts, engine).startswith("top-p")


def test_an_unknown_mistake_is_not_given_a_name(model, earlier):
    prompts, tokens = samples()
    rng = np.random.default_rng(0)
    engine = completions(tokens, [rng.normal(-3, 1, len(t)) for t in tokens])
    case = Case(Policy(model[1], model[0], 0.7), Sampling(temperature=0.7), lambda: earlier)
    assert diagnose(case, prompts, engine) == "no known cause fits"
    assert len(CAUSES) == 6


def test_a_token_of_another_version_is_refused(model):
    prompts, tokens = samples()
    policy = Policy(model[1], model[0])
    answers = {"server:1": completions(tokens, score(policy, prompts, tokens), version=3)}
    case = Case(policy, Sampling())
    assert consistency.check(case, prompts, answers, consistency.EXACT, 3)["server:1"].ok
    with pytest.raises(UserError, match="version 3 … 3 where 4"):
        consistency.check(case, prompts, answers, consistency.EXACT, 4)


def with_another_rope(source, target):
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    config.pop("rope_theta", None)
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 500.0}
    (target / "config.json").write_text(json.dumps(config))
    return target


def serve(model):
    process = subprocess.Popen(
        [sys.executable, "-m", "rlx.serve", f"--model={model}", "--engine=jax", "--slots=8",
         "--max-model-len=96"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    return process, json.loads(process.stdout.readline())["port"]


def test_a_run_stops_before_its_first_step_when_a_server_computes_something_else(tmp_path):
    wrong = with_another_rope(Path("rlx/assets/arithmetic"), tmp_path / "wrong")
    process, port = serve(wrong)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "rlx.main", "--config=configs/arithmetic.py",
             "--config.rollout.batch_prompts=4", "--config.sampling.n_samples=4",
             "--config.sampling.max_new_tokens=32", f"--workdir={tmp_path / 'run'}",
             f"--config.fleet.addresses=('127.0.0.1:{port}',)"],
            capture_output=True, text=True, timeout=180, env={**os.environ, "COLUMNS": "400"},
        )  # fmt: skip
    finally:
        process.kill()
        process.communicate()
    assert done.returncode == 2, done.stdout + done.stderr
    assert "engine and trainer disagree on 127.0.0.1" in done.stderr
    assert "gate.enabled=False" in done.stderr
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize("engine", ["jax", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_compare_command(engine, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("1 + 1\n\n23 - 4\n")
    command = [
        sys.executable, "-m", "rlx.compare", "--model=rlx:arithmetic", f"--engine={engine}",
        f"--prompts={prompts}", "--max-new-tokens=16", "--temperature=0.7",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("2 completions")
    assert [line[:3] for line in lines[1:]] == ["ok "] * 3
    assert "engine – transformers" in done.stdout


def test_compare_command_finds_a_wrong_server(tmp_path):
    process, port = serve(with_another_rope(Path("rlx/assets/arithmetic"), tmp_path / "wrong"))
    try:
        done = subprocess.run(
            [sys.executable, "-m", "rlx.compare", "--model=rlx:arithmetic", "--count=2",
             "--max-new-tokens=16", f"--address=127.0.0.1:{port}"],
            capture_output=True, text=True, timeout=180,
        )  # fmt: skip
    finally:
        process.kill()
        process.communicate()
    assert done.returncode == 1, done.stdout + done.stderr
    assert "BAD  engine – rlx" in done.stdout
    assert "ok   rlx – transformers" in done.stdout
