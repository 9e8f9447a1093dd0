"""Bytes of Tinker's binary messages ⇄ numpy arrays, by the schema of the client's own package."""

import importlib.util
import runpy
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from rlx.agents.dialects import ApiError
from rlx.base import UserError, install
from rlx.fleet.sample import Completion
from rlx.tinker.target_rows import TargetDatum

_FLOAT32 = 1  # of the schema's DType
_DTYPES = {_FLOAT32: np.float32, 2: np.int64, 3: np.int32}


@cache
def schema() -> Any:
    """Return the client's module of messages; UserError if the client is not installed."""
    if not (client := importlib.util.find_spec("tinker")) or not client.origin:
        raise UserError(f"the messages of Tinker's API need its client; {install('tinker')}")
    # Not `import tinker.proto`, which would import torch.
    file = Path(client.origin).parent / "proto/tinker_public_pb2.py"
    return SimpleNamespace(**runpy.run_path(str(file), run_name="tinker_public_pb2"))


def request_of(body: bytes) -> dict[str, Any]:
    """Return a request's fields and, in `message`, all of it; ApiError (400) for other bytes."""
    try:
        message = schema().ForwardBackwardRequest.FromString(body)
    except DecodeError:
        raise ApiError(400, "the body is not a ForwardBackwardRequest; use `tinker`") from None
    return {"model_id": message.model_id, "seq_id": message.seq_id, "message": message}


def options_of(message: Any) -> dict[str, Any]:
    """Return the loss's options: name → number or text."""
    items = message.loss_fn_config_v2.items()
    return {k: v.number if v.HasField("number") else v.text for k, v in items}


def data_of(message: Any) -> list[TargetDatum]:
    """Return the data of a request; UserError for images, sound or a malformed tensor."""
    data = []
    for index, datum in enumerate(message.data):
        if any(chunk.WhichOneof("chunk") != "encoded_text" for chunk in datum.model_input):
            raise UserError(f"datum {index} has images or sound, which cannot be read; give text")
        tokens = b"".join(chunk.encoded_text.tokens for chunk in datum.model_input)
        try:
            inputs = {name: _array(tensor) for name, tensor in datum.loss_fn_inputs.items()}
            targets = inputs.pop("target_tokens").astype(np.int32)
            numbers = {name: values.astype(np.float32) for name, values in inputs.items()}
            data.append(TargetDatum(np.frombuffer(tokens, np.int32), targets, numbers))
        except (KeyError, ValueError, IndexError) as error:
            what = f"datum {index} lacks or garbles a tensor: {error!r}"
            raise UserError(f"{what}; resend it") from None
    return data


def _array(tensor: Any) -> np.ndarray:
    dtype, shape, sparse = _DTYPES[tensor.dtype], tuple(tensor.shape), tensor.sparse_csr
    if not tensor.HasField("sparse_csr"):
        return np.frombuffer(tensor.dense, dtype).reshape(shape or -1)
    dense = np.zeros(shape, dtype)
    ends, columns = (np.frombuffer(x, np.int64) for x in (sparse.crow_indices, sparse.col_indices))
    rows = np.repeat(np.arange(len(ends) - 1), np.diff(ends))
    dense[rows, columns] = np.frombuffer(sparse.values, dtype)
    return dense


def losses_reply(logprobs: Sequence[np.ndarray], losses: Sequence[np.ndarray]) -> bytes:
    """Return a ForwardBackwardOutput with a record for each datum; arrays are float32."""
    reply = schema().ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    reply.metrics["loss:sum"] = sum(float(x.sum(dtype=np.float64)) for x in losses)
    for pair in zip(logprobs, losses, strict=True):
        record = reply.loss_fn_outputs.add(num_datums=1)
        for name, x in zip(("logprobs", "elementwise_loss"), pair, strict=True):
            field, ends = record.fields[name], np.array([0, x.nbytes], np.int64)
            field.data, field.offsets, field.dtype = x.tobytes(), ends.tobytes(), _FLOAT32
            field.trailing_shape.extend(x.shape[1:])
    return reply.SerializeToString()


def sample_reply(completions: Sequence[Completion], prompt: np.ndarray | None, top: int) -> bytes:
    """Return a SampleResponse with `top` likely tokens; `prompt` has logprobs, NaN if unknown."""
    reply = schema().SampleResponse(prompt_logprobs=None if prompt is None else prompt.tobytes())
    for c in completions:
        stop = int(c.stop_reason == "length")  # the schema's StopReason
        tokens, logprobs = c.tokens.tobytes(), c.logprobs.tobytes()
        sequence = reply.sequences.add(stop_reason=stop, tokens=tokens, logprobs=logprobs)
        if top and c.top_tokens is not None and c.top_logprobs is not None:
            likely = sequence.topk_sampled_logprobs
            likely.token_ids, likely.k, likely.length = c.top_tokens.tobytes(), top, len(c.tokens)
            likely.logprobs = c.top_logprobs.tobytes()
    return reply.SerializeToString()
