"""Data of requests: what is refused, and that packed rows give back each datum's own."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlx.base import UserError
from rlx.model.directory import load_config, resolve
from rlx.tinker import binary_messages
from rlx.tinker.target_rows import NO_TARGET, TargetDatum, pack

MODEL = load_config(resolve("rlx:arithmetic"))


def datum(size, width=0, **inputs):
    shape = (size, width) if width else (size,)
    targets = np.arange(np.prod(shape), dtype=np.int32).reshape(shape) % MODEL.vocab_size
    tokens = np.arange(size, dtype=np.int32) % MODEL.vocab_size
    return TargetDatum(
        tokens, targets, {k: np.full(shape, v, np.float32) for k, v in inputs.items()}
    )


@given(st.lists(st.tuples(st.integers(1, 40), st.sampled_from([0, 1, 3])), min_size=1, max_size=9))
def test_each_datum_gets_back_its_own(sizes):
    data = [datum(*each, weights=index + 1) for index, each in enumerate(sizes)]
    rows = pack(data, "cross_entropy", {}, MODEL, 64)
    assert all(batch["tokens"].size <= 64 for batch in rows.batches)
    for name in ("targets", "weights"):
        found = rows.of_data([batch[name] for batch in rows.batches])
        for one, given_ in zip(found, data, strict=True):
            own = given_.targets if name == "targets" else given_.inputs["weights"]
            np.testing.assert_array_equal(one, own)
    for batch in rows.batches:
        used = batch["segment_ids"] > 0
        assert (batch["targets"][~used] == NO_TARGET).all()
        for segment, position in zip(
            batch["segment_ids"][used], batch["positions"][used], strict=True
        ):
            assert segment >= 1
            assert position >= 0
    assert sum((b["segment_ids"] > 0).sum() for b in rows.batches) == sum(n for n, _ in sizes)


def test_options_fill_what_a_datum_does_not_give():
    rows = pack(
        [datum(3, logprobs=-1.0, advantages=1.0, clip_low_threshold=0.5)], "ppo",
        {"clip_high_threshold": 1.5}, MODEL, 64,
    )  # fmt: skip
    (low,), (high,) = (
        rows.of_data([b[f"clip_{end}_threshold"] for b in rows.batches]) for end in ("low", "high")
    )
    assert (low.tolist(), high.tolist()) == ([0.5] * 3, [1.5] * 3)


@pytest.mark.parametrize(
    ("data", "loss", "options", "why"),
    [
        ([datum(3, weights=1)], "cross_entropi", {}, "did you mean 'cross_entropy'"),
        ([datum(3, weights=1)], "dro", {}, "unknown loss_fn 'dro'"),
        ([], "cross_entropy", {}, "no data"),
        ([datum(0)], "cross_entropy", {}, "0 tokens"),
        ([datum(MODEL.max_position + 1)], "cross_entropy", {}, f"takes 1 to {MODEL.max_position}"),
        ([datum(3, advantages=1)], "ppo", {}, "missing logprobs"),
        ([datum(3, mask=1)], "cross_entropy", {}, "unknown or missing mask"),
        ([datum(3, weights=np.nan)], "cross_entropy", {}, "not finite"),
        ([datum(3)], "cross_entropy", {"beta": 1.0}, "no beta=1.0"),
        ([datum(3, logprobs=0, advantages=0)], "ppo", {"clip_low_threshold": "x"}, "threshold='x'"),
        ([TargetDatum(np.array([1]), np.array([10**6]), {})], "cross_entropy", {}, "vocabulary"),
        ([TargetDatum(np.array([-1]), np.array([1]), {})], "cross_entropy", {}, "vocabulary"),
        ([TargetDatum(np.array([1]), np.array([1, 2]), {})], "cross_entropy", {}, r"shape \(2,\)"),
    ],
)
def test_a_request_that_cannot_be_computed_is_refused_in_one_line(data, loss, options, why):
    with pytest.raises(UserError, match=why) as refused:
        pack(data, loss, options, MODEL, 64)
    assert "\n" not in str(refused.value)


def schema():
    pytest.importorskip("tinker", reason="tinker is not installed")
    return binary_messages.schema()


def test_sparse_tensors_are_read():
    message = schema().ForwardBackwardRequest()
    one = message.data.add()
    one.model_input.add().encoded_text.tokens = np.array([5, 6], np.int32).tobytes()
    target = one.loss_fn_inputs["target_tokens"]
    target.dtype = schema().DTYPE_INT64
    target.shape.extend([2, 3])
    target.sparse_csr.values = np.array([7, 8], np.int64).tobytes()
    target.sparse_csr.crow_indices = np.array([0, 1, 2], np.int64).tobytes()
    target.sparse_csr.col_indices = np.array([2, 0], np.int64).tobytes()
    (found,) = binary_messages.data_of(message)
    assert found.targets.tolist() == [[0, 0, 7], [8, 0, 0]]


def test_images_are_refused():
    message = schema().ForwardBackwardRequest()
    message.data.add().model_input.add().image.SetInParent()
    with pytest.raises(UserError, match="images or sound"):
        binary_messages.data_of(message)
