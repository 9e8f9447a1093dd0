"""Longrope, whose factors depend on a context; other kinds are compared in decoder_test.py."""

import jax
import numpy as np
import torch

from rlx.model import hf
from tests.fixtures.model import logits_of_rows, make_oracle


def test_longrope_is_that_of_transformers_on_both_sides_of_the_original_context(tmp_path_factory):
    model, path = make_oracle("phi3-long", tmp_path_factory)
    config, params = hf.load(path)
    tokens = np.random.default_rng(1).integers(0, 97, (1, 25)).astype(np.int32)

    logits = jax.jit(logits_of_rows, static_argnums=1)
    for length, other in ((24, 25), (25, 24)):
        with torch.no_grad():
            wanted = model(torch.tensor(tokens[:, :length])).logits.numpy()
        got, wrong = (logits(params, config.within(n), tokens[:, :length]) for n in (length, other))
        assert np.abs(got - wanted).max() <= 1e-4
        assert np.abs(wrong - wanted).max() > 0.1
