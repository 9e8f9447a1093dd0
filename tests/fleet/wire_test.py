"""Messages keep what they carry, and what is out of range is named."""

import dataclasses
import re
import subprocess
import sys
from pathlib import Path

import grpc
import numpy as np
import pytest
from google.protobuf import descriptor_pb2
from hypothesis import given
from hypothesis import strategies as st

import rlx
from rlx.fleet import rollout_pb2 as pb
from rlx.fleet import wire
from rlx.fleet.requests import Chunk, Request, Sampling, ScoreRequest, Scores

ROOT = Path(rlx.__file__).parent.parent
INT32 = st.integers(0, 2**31 - 1)


@st.composite
def requests(draw):
    prompt = draw(st.lists(INT32, min_size=1, max_size=20))
    most = draw(st.integers(1, 1000))
    sampling = Sampling(
        temperature=draw(st.floats(0, 10)),
        top_p=draw(st.floats(0, 1, exclude_min=True)),
        top_k=draw(st.integers(0, 1000)),
        max_new_tokens=most,
        min_new_tokens=draw(st.integers(0, most)),
        stop=tuple(draw(st.lists(st.text(min_size=1), max_size=3))),
        stop_token_ids=tuple(draw(st.lists(INT32, max_size=3))),
        seed=draw(st.none() | st.integers(0, 2**63 - 1)),
        unscored=draw(st.booleans()),
    )
    return Request(
        request_id=draw(st.text()),
        prompt_tokens=np.asarray(prompt, np.int32),
        sampling=sampling,
        n=draw(st.integers(1, wire.MAX_SAMPLES)),
        first_index=draw(INT32),
        prefix_len=draw(st.integers(0, min(len(prompt), most) - 1)),
        priority=draw(st.integers(-5, 5)),
        unwatched=draw(st.booleans()),
    )


@given(requests())
def test_request_survives_the_wire(request_):
    message = pb.GenerateRequest.FromString(wire.request_message(request_).SerializeToString())
    back = wire.request_from(message)
    np.testing.assert_array_equal(back.prompt_tokens, request_.prompt_tokens)
    assert back.prompt_tokens.dtype == np.int32
    for field in dataclasses.fields(Request):
        if field.name != "prompt_tokens":
            assert getattr(back, field.name) == getattr(request_, field.name), field.name


@given(st.lists(INT32, min_size=2, max_size=20), st.data())
def test_scores_survive_the_wire(tokens, data):
    first = data.draw(st.integers(1, len(tokens) - 1))
    temperature = data.draw(st.floats(0.01, 100))
    asked = ScoreRequest(np.array(tokens, np.int32), first, temperature)
    sent = wire.score_message(asked).SerializeToString()
    back = wire.score_from(pb.ScoreRequest.FromString(sent))
    np.testing.assert_array_equal(back.tokens, asked.tokens)
    assert (back.tokens.dtype, back.first, back.temperature) == (np.int32, first, temperature)
    wanted = np.random.default_rng(first).normal(size=len(tokens) - first).astype(np.float32)
    answer = wire.score_reply(Scores(wanted, 7)).SerializeToString()
    scores = wire.scores_from(pb.ScoreReply.FromString(answer), asked)
    np.testing.assert_array_equal(scores.logprobs, wanted)
    assert (scores.logprobs.dtype, scores.version) == (np.float32, 7)


CHUNKS = lambda masked: st.builds(  # noqa: E731
    lambda index, rows, reason: Chunk(
        index,
        [r[0] for r in rows],
        [r[1] for r in rows],
        [r[2] for r in rows],
        reason,
        [t for r in rows for t in (r[0], 7)],
        [p for r in rows for p in (r[1], -2.0)],
        [r[0] % 3 for r in rows] if masked else [],
        b"".join(bytes([i] * (r[0] % 3)) for i, r in enumerate(rows)) if masked else b"",
    ),
    INT32,
    st.lists(
        st.tuples(INT32, st.floats(-100, 0, width=32), st.integers(-1, 2**31 - 1)), max_size=9
    ),
    st.sampled_from([None, "stop", "length", "abort"]),
)


@given(st.booleans().flatmap(lambda masked: st.lists(CHUNKS(masked), max_size=6)))
def test_chunks_of_several_samples_survive_one_message(chunks):
    reply = pb.GenerateReply.FromString(wire.reply_message(chunks).SerializeToString())
    back = wire.chunks_from(reply)
    assert len(back) == len(chunks)
    for chunk, got in zip(chunks, back, strict=True):
        assert (got.index, got.stop_reason) == (chunk.index, chunk.stop_reason)
        dtypes = got.tokens.dtype, got.logprobs.dtype, got.versions.dtype
        assert dtypes == (np.int32, np.float32, np.int32)
        assert got.tokens.tolist() == chunk.tokens
        assert got.logprobs.tolist() == chunk.logprobs
        assert got.versions.tolist() == chunk.versions
        assert got.top_tokens.tolist() == chunk.top_tokens
        assert got.top_logprobs.tolist() == chunk.top_logprobs
        assert (list(got.kept_sizes), got.kept) == (chunk.kept_sizes, chunk.kept)


def test_reply_with_lengths_that_disagree_is_refused():
    reply = wire.reply_message([Chunk(0, [1, 2], [-1.0, -1.0], [0, 0])])
    reply.tokens.append(3)
    with pytest.raises(ValueError, match="lengths"):
        wire.chunks_from(reply)
    reply = wire.reply_message([Chunk(0, [1, 2], [-1.0, -1.0], [0, 0], None, [5], [-1.0])])
    with pytest.raises(ValueError, match="lengths"):
        wire.chunks_from(reply)
    for sizes, kept in (([1], b"a"), ([1, 1], b"a"), ([-1, 2], b"a"), ([], b"a")):
        chunk = Chunk(0, [1, 2], [-1.0, -1.0], [0, 0], kept_sizes=sizes, kept=kept)
        with pytest.raises(ValueError, match="lengths"):
            wire.chunks_from(wire.reply_message([chunk]))


def good_message(**changes):
    message = wire.request_message(Request("r", np.arange(1, 5, dtype=np.int32), Sampling()))
    for name, value in changes.items():
        target = message.sampling if hasattr(message.sampling, name) else message
        if isinstance(value, list):
            del getattr(target, name)[:]
            getattr(target, name).extend(value)
        else:
            setattr(target, name, value)
    return message


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_p": float("nan")},
        {"top_k": -1},
        {"max_new_tokens": 0},
        {"min_new_tokens": 257},
        {"min_new_tokens": -1},
        {"stop": [""]},
        {"stop": ["x"] * 257},
        {"stop_token_ids": [1] * 257},
        {"seed": -1},
        {"n": 0},
        {"n": -3},
        {"n": wire.MAX_SAMPLES + 1},
        {"first_index": -1},
        {"prompt_tokens": []},
        {"prefix_len": 4},
        {"prefix_len": -1},
        {"prefix_len": 2, "max_new_tokens": 2},
    ],
    ids=str,
)
def test_out_of_range_is_named(change):
    wire.request_from(good_message())
    with pytest.raises(ValueError, match=f"^{next(iter(change))}="):
        wire.request_from(good_message(**change))


@pytest.mark.parametrize(
    ("details", "text"),
    [
        ("", "UNAVAILABLE"),
        ("Socket closed", "UNAVAILABLE: Socket closed"),
        ("two\nlines", "UNAVAILABLE: two lines"),
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Failed to "
            "connect to remote host: Connection refused",
            "UNAVAILABLE: Connection refused",
        ),
    ],
)
def test_errors_are_one_short_line(details, text):
    none = grpc.aio.Metadata()
    error = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, none, none, details=details)
    assert wire.describe(error) == text


def test_stubs_are_those_of_the_proto(tmp_path):
    """A stub that lags behind the proto would drop new fields without a word."""
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", f"-I{ROOT}", f"--grpc_python_out={tmp_path}",
         f"--descriptor_set_out={tmp_path}/set", "rlx/fleet/rollout.proto"],
        check=True, cwd=ROOT,
    )  # fmt: skip
    files = descriptor_pb2.FileDescriptorSet.FromString((tmp_path / "set").read_bytes())
    fresh = files.file[0]
    committed = descriptor_pb2.FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(committed)
    _without_json_names(fresh)
    _without_json_names(committed)
    assert fresh == committed, (
        "rollout_pb2.py is stale: run the command at the top of rollout.proto"
    )
    ours = (ROOT / "rlx/fleet/rollout_pb2_grpc.py").read_text()
    theirs = (tmp_path / "rlx/fleet/rollout_pb2_grpc.py").read_text()
    assert _without_version(ours) == _without_version(theirs), "rollout_pb2_grpc.py is stale"


def _without_json_names(file):
    for message in file.message_type:
        for field in message.field:
            field.ClearField("json_name")


def _without_version(text):
    return re.sub(r"GRPC_GENERATED_VERSION = .*", "", text)
