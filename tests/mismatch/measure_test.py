"""Comparing two scorings, and the trainer's own, against plain definitions and transformers."""

import dataclasses
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from rlx.fleet.requests import Sampling
from rlx.fleet.sample import Completion
from rlx.mismatch import compare_table, measure
from rlx.mismatch.diagnose import MismatchCase
from rlx.mismatch.measure import (
    EXACT,
    ROUNDED,
    EngineSample,
    TokenPlace,
    Tolerance,
    TrainerScorer,
    compare,
)
from rlx.model import decoder, hf, kept_tokens
from tests.fixtures.model import make_oracle

LOOSE = Tolerance(max=0.1, mean=0.1)


def samples(count=3):
    """Arbitrary tokens: a scorer has to get any right."""
    rng = np.random.default_rng(0)
    draw = lambda n: rng.integers(3, 99, n).astype(np.int32)  # noqa: E731
    blank = [np.zeros(20 + 5 * i) for i in range(count)]
    done = [Completion(draw(len(b)), b, b.astype(np.int32), "length") for b in blank]
    return [EngineSample(draw(8 - i), each) for i, each in enumerate(done)]


def test_compare_finds_how_much_and_where():
    trainer = [np.array([-1.0, -2.0]), np.array([-3.0, -4.0, -5.0])]
    engine = [np.array([-1.0, -2.0]), np.array([-3.0, -4.5, np.nan])]
    report = compare(engine, trainer, LOOSE, tokens=[np.array([7, 8]), np.array([9, 10, 11])])
    assert (report.tokens, report.bad, report.non_finite, report.max) == (5, 2, 1, 0.5)
    assert report.mean == pytest.approx(0.5 / 4), "what is not finite has no size"
    assert report.first_bad == TokenPlace(1, 1, 10, -4.5, -4.0)
    assert not report.ok
    assert "position 1 of sample 1 (token 10: -4.5 against -4)" in str(report)
    assert compare(trainer, trainer).ok


def test_many_small_differences_are_one_large():
    report = compare([np.full(9, -1.05)], [np.full(9, -1.0)], Tolerance(max=0.1, mean=0.01))
    assert not report.bad
    assert not report.ok
    assert report.first_bad == TokenPlace(0, 0, -1, -1.05, -1.0)


def test_what_is_not_finite_is_bad_on_either_side_and_on_both():
    for value in (np.nan, -np.inf):
        for pair in ([value, -1.0], [-1.0, value], [value, value]):
            report = compare([np.array(pair[:1])], [np.array(pair[1:])], LOOSE)
            assert (report.bad, report.non_finite, report.mean) == (1, 1, 0.0)
            assert not report.ok


def test_only_counted_tokens_are_compared():
    engine, trainer = [np.array([0.0, -9.0, -1.0])], [np.array([0.0, -1.0, -1.0])]
    counted = [np.array([True, False, True])]
    assert compare(engine, trainer, counted=counted).ok
    nothing = compare(engine, trainer, counted=[np.zeros(3, bool)])
    assert nothing.tokens == 0
    assert not nothing.ok, "nothing compared is nothing proved"
    with pytest.raises(ValueError, match="different completions"):
        compare(engine, [np.zeros(2)])


def test_limits_follow_the_dtypes_and_can_be_given():
    assert measure.tolerance(exact=True) is not ROUNDED
    assert measure.tolerance(exact=True) == EXACT
    assert measure.tolerance(exact=False) == ROUNDED
    assert measure.tolerance(exact=True, max=0.3) == Tolerance(max=0.3, mean=EXACT.mean)


@pytest.mark.torch
def test_the_scorer_agrees_with_transformers_whatever_the_padding(tiny_model_dir):
    config, params = hf.load(tiny_model_dir)
    theirs = measure.transformers_logprobs(tiny_model_dir, samples(), 0.7, "float32")
    for length in (64, 128):
        ours = TrainerScorer(config, 0.7, length).logprobs(params, samples())
        assert [len(each) for each in ours] == [20, 25, 30]
        report = compare(ours, theirs)
        assert report.ok, report
        assert report.max < 1e-5
    rounded = TrainerScorer(config, 0.7, 64, "bfloat16").logprobs(params, samples())
    assert EXACT.mean < compare(rounded, theirs).mean < ROUNDED.mean


def test_logits_are_what_logprobs_are_made_of(tiny_model_dir):
    config, params = hf.load(tiny_model_dir)
    scorer = TrainerScorer(config, 0.7, 64)
    tokens = np.concatenate([s.completion.tokens for s in samples()])
    flat = measure.tempered(scorer.logits(params, samples()), tokens, 0.7)
    np.testing.assert_allclose(flat, np.concatenate(scorer.logprobs(params, samples())), atol=1e-5)


def test_scores_of_masked_samples_are_over_the_kept_tokens(tiny_model_dir):
    """Each token has the two likeliest tokens and itself; the second sample has no masks."""
    config, params = hf.load(tiny_model_dir)
    scorer, masked, wanted = TrainerScorer(config, 0.7, 64), [], []
    for i, sample in enumerate(samples()):
        done, z = sample.completion, scorer.logits(params, [sample]) / 0.7
        if i != 1:
            keep = z >= np.sort(z)[:, -2:-1]
            keep[np.arange(len(z)), done.tokens] = True
            bits = np.packbits(keep, axis=1, bitorder="little")
            codes, sizes = kept_tokens.compress(bits, config.vocab_size)
            sizes, codes = np.array(sizes, np.int32), np.frombuffer(codes, np.uint8)
            z, done = (
                np.where(keep, z, -np.inf),
                dataclasses.replace(done, kept=codes, kept_sizes=sizes),
            )
        masked.append(EngineSample(sample.prompt, done))
        picked = z[np.arange(len(z)), done.tokens]
        wanted.append(picked - np.log(np.exp(z).sum(1)))
    found = scorer.logprobs(params, masked)
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)
    tokens = np.concatenate([s.completion.tokens for s in masked])
    flat = measure.tempered(scorer.logits(params, masked), tokens, 0.7)
    np.testing.assert_allclose(flat, np.concatenate(wanted), atol=1e-5)


@pytest.mark.parametrize(("top_p", "top_k"), [(0.5, 0), (1.0, 4), (0.7, 4), (1.0, 0), (0.01, 0)])
def test_restricted_logprobs_are_those_of_the_definition(top_p, top_k):
    rng = np.random.default_rng(1)
    logits, tokens = rng.normal(0, 2, (50, 16)), rng.integers(0, 16, 50)
    found = measure.restricted(logits, tokens, 0.8, top_p, top_k)
    for row, token, value in zip(logits / 0.8, tokens, found, strict=True):
        order = list(np.argsort(-row))[: top_k or None]
        chances = np.exp(row[order]) / np.exp(row[order]).sum()
        kept = next(
            k for k in range(1, 17) if chances[:k].sum() >= top_p - 1e-12 or k == len(order)
        )
        if token in order[:kept]:
            chance = chances[order.index(token)] / chances[:kept].sum()
            assert value == pytest.approx(np.log(chance), abs=1e-9)
        else:
            assert value == -np.inf


def test_one_shape_compiles_one_program(tiny_model_dir):
    config, params = hf.load(tiny_model_dir)
    scorer = dataclasses.replace(TrainerScorer(config, 0.7, 192), chunk=77)  # used nowhere else
    before = decoder.row_logprobs._cache_size()
    for cut in (0, 3, 6):
        shorter = [EngineSample(s.prompt[: 8 - cut], s.completion) for s in samples()]
        scorer.logprobs(params, shorter)
        scorer.logprobs({**params, "embed": params["embed"] + jnp.float32(0.1)}, shorter)
    assert decoder.row_logprobs._cache_size() == before + 1


def test_a_table_without_transformers_says_why():
    scorer = SimpleNamespace(temperature=1.0, compute_dtype="float32")
    case = MismatchCase(scorer, {}, samples(), EXACT)
    same = compare([np.zeros(1)], [np.zeros(1)], EXACT)
    told = compare_table.table(case, {"engine – rlx": same}, "float32")
    assert "torch is not installed; pip install -e '.[witnesses]'" in told
    both = {"engine – rlx": same, "engine – transformers": same}
    assert "not installed" not in compare_table.table(case, both, "float32")


@pytest.mark.torch
def test_longrope_of_a_comparison_is_that_of_its_servers_context(tmp_path_factory):
    """Which compare.py starts for the longest prompt and answer; the original context is 24."""
    _, path = make_oracle("phi3-long", tmp_path_factory)
    done = Completion(np.ones(2, np.int32), np.zeros(2, np.float32), np.zeros(2, np.int32), "stop")
    samples = [EngineSample(np.ones(20, np.int32), done)]
    for new_tokens, long in ((4, False), (5, True)):
        sampling = Sampling(max_new_tokens=new_tokens)
        case = compare_table.case_of(path, samples, sampling, "float32", "float32")
        assert case.scorer.model.rope.long == long
