"""Engines that are really wrong, one mistake each: the diagnosis names it and no other.

The engine is the real one, on a directory or with weights that it should not have; the trainer is
what it should be.
"""

import asyncio
import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from rlx.engines.jax.jax_engine import JaxEngine
from rlx.fleet.requests import Request, Sampling
from rlx.fleet.sample import Completion
from rlx.mismatch import measure
from rlx.mismatch.diagnose import CAUSES, MismatchCase, advice, diagnose
from rlx.mismatch.measure import EXACT, ROUNDED, EngineSample, TrainerScorer
from rlx.model import hf
from rlx.model.rope import Rope

TEMPERATURE, NEW_TOKENS = 0.7, 40
PROMPTS = [np.array(p, np.int32) for p in ([3, 17, 44, 9], [5, 6, 7], [90, 80, 70, 60, 50], [11])]


@pytest.fixture(scope="module")
def first(tiny_model_dir):
    """(config, weights the run began with)"""
    return hf.load(tiny_model_dir)


@pytest.fixture(scope="module")
def trained(first):
    """The weights of now."""
    keys = iter(jax.random.split(jax.random.key(1), 99))
    return jax.tree.map(
        lambda leaf: leaf + 0.03 * jax.random.normal(next(keys), leaf.shape), first[1]
    )


@pytest.fixture(scope="module")
def now(first, trained, tmp_path_factory):
    """The HF directory of the weights of now."""
    path = tmp_path_factory.mktemp("now") / "model"
    hf.save(path, first[0], trained)
    return path


def answers(path, dtype="float32", load=None, **sampling):
    """What an engine on `path` answers; `load` is published to it as version 1."""
    drawn = Sampling(**{"temperature": TEMPERATURE, "seed": 3, "max_new_tokens": NEW_TOKENS,
                        "min_new_tokens": NEW_TOKENS, **sampling})  # fmt: skip

    async def one(engine, prompt):
        parts = [chunk async for chunk in engine.generate(Request("r", prompt, drawn))]
        return Completion(
            np.array([x for part in parts for x in part.tokens], np.int32),
            np.array([x for part in parts for x in part.logprobs], np.float32),
            np.array([x for part in parts for x in part.versions], np.int32),
            "length",
        )

    async def main():
        engine = JaxEngine(str(path), slots=4, max_model_len=64, decode_steps=8, dtype=dtype)
        await engine.start()
        try:
            if load is not None:
                await engine.load(str(load), 1)
            return [await one(engine, prompt) for prompt in PROMPTS]
        finally:
            await engine.close()

    return asyncio.run(main())


def case(first, params, completions, tolerance=EXACT, **options):
    samples = [EngineSample(p, c) for p, c in zip(PROMPTS, completions, strict=True)]
    scorer = TrainerScorer(first[0], TEMPERATURE, 64)
    options = {"earlier": {"the run's first weights": lambda: first[1]}, **options}
    return MismatchCase(scorer, params, samples, tolerance, **options)


def found(wrong):
    """The report and the explanations of a case."""
    report = wrong.compare(wrong.score())
    return report, diagnose(wrong, report)


@pytest.fixture(scope="module")
def right(now):
    return answers(now)


def test_an_engine_that_is_the_trainers_policy_passes(first, trained, right):
    report = case(first, trained, right).compare(case(first, trained, right).score())
    assert report.ok, report
    assert report.max < 2e-5


def test_logprobs_without_the_temperature(first, trained, now):
    report, explanations = found(case(first, trained, answers(now, temperature=1.0)))
    assert not report.ok
    assert explanations[0].cause == "temperature"
    assert "logprobs are at 1, the trainer's at 0.7" in explanations[0].words
    assert explanations[0].exact
    assert len({finding.cause for finding in explanations}) == 1


def test_a_temperature_ignored_where_it_is_one_is_no_mistake(first, trained, right):
    fine = case(first, trained, right)
    assert fine.compare(fine.score()).ok


def with_rope(source, target, **rope):
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    config.pop("rope_theta", None)
    config["rope_parameters"] = {"rope_type": "default", **rope}
    (target / "config.json").write_text(json.dumps(config))
    return target


def test_another_rope_base(first, trained, now, tmp_path):
    wrong = with_rope(now, tmp_path / "wrong", rope_theta=1e6)
    report, explanations = found(case(first, trained, answers(wrong)))
    assert not report.ok
    assert [finding.cause for finding in explanations] == ["RoPE base"]
    assert "the engine has base 1e+06, the trainer 10000 (default)" in explanations[0].words


def test_one_rope_base_where_the_model_has_two(first, trained, now):
    """The engine has Gemma 3's second base nowhere; its windows are longer than what is scored."""
    layers = first[0].num_layers
    two = dataclasses.replace(
        first[0], local_rope=Rope(theta=100.0), windows=(64,) * (layers - 1) + (0,)
    )
    _, explanations = found(case((two, first[1]), trained, answers(now)))
    assert [finding.cause for finding in explanations] == ["RoPE base"]
    assert "one RoPE, the trainer base 100 in layers with a window" in explanations[0].words


def test_a_rope_scaling_that_was_dropped(first, trained, now):
    linear = dataclasses.replace(first[0].rope, kind="linear", factor=4.0)
    scaled = dataclasses.replace(first[0], rope=linear)
    _, explanations = found(case((scaled, first[1]), trained, answers(now)))
    assert [finding.cause for finding in explanations] == ["RoPE base"]
    assert "no linear scaling" in explanations[0].words


def test_a_head_that_an_update_did_not_reach(first, trained, tmp_path):
    untied = dataclasses.replace(first[0], tie_embeddings=False)
    mixed = {**trained, "lm_head": first[1]["embed"]}
    hf.save(tmp_path / "mixed", untied, mixed)
    report, explanations = found(case(first, trained, answers(tmp_path / "mixed")))
    assert not report.ok
    assert [finding.cause for finding in explanations] == ["tied embeddings"]
    assert "head is still that of the run's first weights" in explanations[0].words


def test_a_head_that_is_tied_though_it_should_not_be(first, trained, right):
    config = dataclasses.replace(first[0], tie_embeddings=False)
    other = jax.random.normal(jax.random.key(5), trained["embed"].shape) * 0.1
    wrong = case((config, first[1]), {**trained, "lm_head": other}, right, earlier={})
    _, explanations = found(wrong)
    assert [finding.cause for finding in explanations] == ["tied embeddings"]


def test_stale_weights_under_a_new_version(first, trained, tiny_model_dir, now):
    completions = answers(now, load=tiny_model_dir / "model.safetensors")
    assert {int(v) for c in completions for v in c.versions} == {1}
    report, explanations = found(case(first, trained, completions, version=1))
    assert not report.ok
    assert [finding.cause for finding in explanations] == ["stale weights"]
    assert "restart the servers" in advice(explanations)


def test_weights_rounded_to_bfloat16(first, trained, now, tmp_path):
    tensors = hf.to_hf(trained, first[0], "bfloat16")
    save_file({k: v.astype(np.float32) for k, v in tensors.items()}, tmp_path / "rounded")
    report, explanations = found(case(first, trained, answers(now, load=tmp_path / "rounded")))
    assert not report.ok
    assert [finding.cause for finding in explanations] == ["dtype"]
    assert "weights are rounded to bfloat16" in explanations[0].words


def test_an_engine_that_computes_in_bfloat16(first, trained, now):
    completions = answers(now, dtype="bfloat16")
    report, explanations = found(case(first, trained, completions))
    assert not report.ok
    assert explanations[0].cause == "dtype"
    assert "the engine computes in bfloat16, the trainer in float32" in explanations[0].words
    loose = case(first, trained, completions, ROUNDED)
    assert loose.compare(loose.score()).ok, "where it is wanted, it passes"


def test_logprobs_renormalised_by_top_p(first, trained, now):
    completions = answers(now, top_p=0.6, top_k=20)
    honest = case(first, trained, completions, top_p=0.6, top_k=20)
    assert honest.compare(honest.score()).ok, "top-p restricts the draw, not the logprob"
    flat = measure.restricted(honest.logits, honest.tokens, TEMPERATURE, 0.6, 20)
    wrong = [
        dataclasses.replace(c, logprobs=r.astype(np.float32))
        for c, r in zip(completions, honest.split(flat), strict=True)
    ]
    report, explanations = found(case(first, trained, wrong, top_p=0.6, top_k=20))
    assert not report.ok
    assert [finding.cause for finding in explanations] == ["top-p"]


def test_what_nobody_knows_is_not_given_a_name(first, trained, right):
    rng = np.random.default_rng(0)
    noisy = [
        dataclasses.replace(c, logprobs=-rng.exponential(2.0, len(c.tokens)).astype(np.float32))
        for c in right
    ]
    report, explanations = found(case(first, trained, noisy))
    assert not report.ok
    assert explanations == []
    assert advice(explanations) == "no known cause fits"


def test_every_cause_has_its_test():
    assert set(CAUSES) == {
        "temperature", "top-p", "RoPE base", "tied embeddings", "stale weights", "dtype"
    }  # fmt: skip
