from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StopReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RUNNING: _ClassVar[StopReason]
    STOP: _ClassVar[StopReason]
    LENGTH: _ClassVar[StopReason]
    ABORT: _ClassVar[StopReason]

class KvPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SERVER_DEFAULT: _ClassVar[KvPolicy]
    KEEP: _ClassVar[KvPolicy]
    RECOMPUTE: _ClassVar[KvPolicy]
    ABORT_AND_RESEND: _ClassVar[KvPolicy]

class Freed(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NOTHING: _ClassVar[Freed]
    CACHE: _ClassVar[Freed]
    CACHE_AND_WEIGHTS: _ClassVar[Freed]
RUNNING: StopReason
STOP: StopReason
LENGTH: StopReason
ABORT: StopReason
SERVER_DEFAULT: KvPolicy
KEEP: KvPolicy
RECOMPUTE: KvPolicy
ABORT_AND_RESEND: KvPolicy
NOTHING: Freed
CACHE: Freed
CACHE_AND_WEIGHTS: Freed

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "max_new_tokens", "min_new_tokens", "stop", "stop_token_ids", "seed", "guide", "top_logprobs", "unscored", "return_masks", "adapter")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    GUIDE_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    UNSCORED_FIELD_NUMBER: _ClassVar[int]
    RETURN_MASKS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int
    min_new_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    seed: int
    guide: str
    top_logprobs: int
    unscored: bool
    return_masks: bool
    adapter: str
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., max_new_tokens: _Optional[int] = ..., min_new_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., seed: _Optional[int] = ..., guide: _Optional[str] = ..., top_logprobs: _Optional[int] = ..., unscored: _Optional[bool] = ..., return_masks: _Optional[bool] = ..., adapter: _Optional[str] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "prompt_tokens", "sampling", "n", "first_index", "prefix_len", "priority", "instance", "unwatched", "images")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    PREFIX_LEN_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    UNWATCHED_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    prompt_tokens: _containers.RepeatedScalarFieldContainer[int]
    sampling: Sampling
    n: int
    first_index: int
    prefix_len: int
    priority: int
    instance: str
    unwatched: bool
    images: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, request_id: _Optional[str] = ..., prompt_tokens: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., n: _Optional[int] = ..., first_index: _Optional[int] = ..., prefix_len: _Optional[int] = ..., priority: _Optional[int] = ..., instance: _Optional[str] = ..., unwatched: _Optional[bool] = ..., images: _Optional[_Iterable[str]] = ...) -> None: ...

class GenerateReply(_message.Message):
    __slots__ = ("index", "count", "stop_reason", "tokens", "logprobs", "versions", "top_tokens", "top_logprobs", "kept", "kept_sizes")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    KEPT_SIZES_FIELD_NUMBER: _ClassVar[int]
    index: _containers.RepeatedScalarFieldContainer[int]
    count: _containers.RepeatedScalarFieldContainer[int]
    stop_reason: _containers.RepeatedScalarFieldContainer[StopReason]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    versions: _containers.RepeatedScalarFieldContainer[int]
    top_tokens: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    kept: bytes
    kept_sizes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, index: _Optional[_Iterable[int]] = ..., count: _Optional[_Iterable[int]] = ..., stop_reason: _Optional[_Iterable[_Union[StopReason, str]]] = ..., tokens: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., versions: _Optional[_Iterable[int]] = ..., top_tokens: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ..., kept: _Optional[bytes] = ..., kept_sizes: _Optional[_Iterable[int]] = ...) -> None: ...

class ScoreRequest(_message.Message):
    __slots__ = ("tokens", "first", "temperature", "instance", "adapter", "images")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    first: int
    temperature: float
    instance: str
    adapter: str
    images: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, tokens: _Optional[_Iterable[int]] = ..., first: _Optional[int] = ..., temperature: _Optional[float] = ..., instance: _Optional[str] = ..., adapter: _Optional[str] = ..., images: _Optional[_Iterable[str]] = ...) -> None: ...

class ImageFile(_message.Message):
    __slots__ = ("name", "data")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    name: str
    data: bytes
    def __init__(self, name: _Optional[str] = ..., data: _Optional[bytes] = ...) -> None: ...

class AddImageReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ScoreReply(_message.Message):
    __slots__ = ("logprobs", "version", "values")
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    version: int
    values: bool
    def __init__(self, logprobs: _Optional[_Iterable[float]] = ..., version: _Optional[int] = ..., values: _Optional[bool] = ...) -> None: ...

class PublishHeader(_message.Message):
    __slots__ = ("version", "path", "num_bytes", "crc32", "kv", "keep", "delta", "adapter", "relay", "cast")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    CRC32_FIELD_NUMBER: _ClassVar[int]
    KV_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    RELAY_FIELD_NUMBER: _ClassVar[int]
    CAST_FIELD_NUMBER: _ClassVar[int]
    version: int
    path: str
    num_bytes: int
    crc32: int
    kv: KvPolicy
    keep: bool
    delta: PublishDelta
    adapter: PublishAdapter
    relay: PublishRelay
    cast: PublishCast
    def __init__(self, version: _Optional[int] = ..., path: _Optional[str] = ..., num_bytes: _Optional[int] = ..., crc32: _Optional[int] = ..., kv: _Optional[_Union[KvPolicy, str]] = ..., keep: _Optional[bool] = ..., delta: _Optional[_Union[PublishDelta, _Mapping]] = ..., adapter: _Optional[_Union[PublishAdapter, _Mapping]] = ..., relay: _Optional[_Union[PublishRelay, _Mapping]] = ..., cast: _Optional[_Union[PublishCast, _Mapping]] = ...) -> None: ...

class PublishCast(_message.Message):
    __slots__ = ("backend", "host", "port", "place", "head")
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    PLACE_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    backend: str
    host: str
    port: int
    place: int
    head: bytes
    def __init__(self, backend: _Optional[str] = ..., host: _Optional[str] = ..., port: _Optional[int] = ..., place: _Optional[int] = ..., head: _Optional[bytes] = ...) -> None: ...

class PublishRelay(_message.Message):
    __slots__ = ("to", "below", "fanout", "ca", "kept")
    TO_FIELD_NUMBER: _ClassVar[int]
    BELOW_FIELD_NUMBER: _ClassVar[int]
    FANOUT_FIELD_NUMBER: _ClassVar[int]
    CA_FIELD_NUMBER: _ClassVar[int]
    KEPT_FIELD_NUMBER: _ClassVar[int]
    to: RelayServer
    below: _containers.RepeatedCompositeFieldContainer[RelayServer]
    fanout: int
    ca: bytes
    kept: bool
    def __init__(self, to: _Optional[_Union[RelayServer, _Mapping]] = ..., below: _Optional[_Iterable[_Union[RelayServer, _Mapping]]] = ..., fanout: _Optional[int] = ..., ca: _Optional[bytes] = ..., kept: _Optional[bool] = ...) -> None: ...

class RelayServer(_message.Message):
    __slots__ = ("address", "instance", "version", "crc32")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CRC32_FIELD_NUMBER: _ClassVar[int]
    address: str
    instance: str
    version: int
    crc32: int
    def __init__(self, address: _Optional[str] = ..., instance: _Optional[str] = ..., version: _Optional[int] = ..., crc32: _Optional[int] = ...) -> None: ...

class PublishDelta(_message.Message):
    __slots__ = ("base_version", "base_crc32", "num_bytes", "crc32")
    BASE_VERSION_FIELD_NUMBER: _ClassVar[int]
    BASE_CRC32_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    CRC32_FIELD_NUMBER: _ClassVar[int]
    base_version: int
    base_crc32: int
    num_bytes: int
    crc32: int
    def __init__(self, base_version: _Optional[int] = ..., base_crc32: _Optional[int] = ..., num_bytes: _Optional[int] = ..., crc32: _Optional[int] = ...) -> None: ...

class PublishAdapter(_message.Message):
    __slots__ = ("base", "scale", "dtype")
    BASE_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    base: bytes
    scale: float
    dtype: str
    def __init__(self, base: _Optional[bytes] = ..., scale: _Optional[float] = ..., dtype: _Optional[str] = ...) -> None: ...

class PublishChunk(_message.Message):
    __slots__ = ("offset", "data", "crc32")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CRC32_FIELD_NUMBER: _ClassVar[int]
    offset: int
    data: bytes
    crc32: int
    def __init__(self, offset: _Optional[int] = ..., data: _Optional[bytes] = ..., crc32: _Optional[int] = ...) -> None: ...

class PublishRequest(_message.Message):
    __slots__ = ("header", "chunk")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    header: PublishHeader
    chunk: PublishChunk
    def __init__(self, header: _Optional[_Union[PublishHeader, _Mapping]] = ..., chunk: _Optional[_Union[PublishChunk, _Mapping]] = ...) -> None: ...

class PublishReply(_message.Message):
    __slots__ = ("version", "paused_ns", "replaced_version", "replaced_crc32", "relayed")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PAUSED_NS_FIELD_NUMBER: _ClassVar[int]
    REPLACED_VERSION_FIELD_NUMBER: _ClassVar[int]
    REPLACED_CRC32_FIELD_NUMBER: _ClassVar[int]
    RELAYED_FIELD_NUMBER: _ClassVar[int]
    version: int
    paused_ns: int
    replaced_version: int
    replaced_crc32: int
    relayed: _containers.RepeatedCompositeFieldContainer[Relayed]
    def __init__(self, version: _Optional[int] = ..., paused_ns: _Optional[int] = ..., replaced_version: _Optional[int] = ..., replaced_crc32: _Optional[int] = ..., relayed: _Optional[_Iterable[_Union[Relayed, _Mapping]]] = ...) -> None: ...

class Relayed(_message.Message):
    __slots__ = ("address", "error", "reply")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    REPLY_FIELD_NUMBER: _ClassVar[int]
    address: str
    error: str
    reply: PublishReply
    def __init__(self, address: _Optional[str] = ..., error: _Optional[str] = ..., reply: _Optional[_Union[PublishReply, _Mapping]] = ...) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ("lease_seconds", "freed")
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FREED_FIELD_NUMBER: _ClassVar[int]
    lease_seconds: float
    freed: Freed
    def __init__(self, lease_seconds: _Optional[float] = ..., freed: _Optional[_Union[Freed, str]] = ...) -> None: ...

class PauseReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ("drain_spans",)
    DRAIN_SPANS_FIELD_NUMBER: _ClassVar[int]
    drain_spans: bool
    def __init__(self, drain_spans: _Optional[bool] = ...) -> None: ...

class Span(_message.Message):
    __slots__ = ("name", "start_ns", "end_ns")
    NAME_FIELD_NUMBER: _ClassVar[int]
    START_NS_FIELD_NUMBER: _ClassVar[int]
    END_NS_FIELD_NUMBER: _ClassVar[int]
    name: str
    start_ns: int
    end_ns: int
    def __init__(self, name: _Optional[str] = ..., start_ns: _Optional[int] = ..., end_ns: _Optional[int] = ...) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("version", "running", "queued", "slots", "max_model_len", "tokens_generated", "paused", "spans", "monotonic_ns", "instance", "pid", "weights_crc32", "metrics_port")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    TOKENS_GENERATED_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    MONOTONIC_NS_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_CRC32_FIELD_NUMBER: _ClassVar[int]
    METRICS_PORT_FIELD_NUMBER: _ClassVar[int]
    version: int
    running: int
    queued: int
    slots: int
    max_model_len: int
    tokens_generated: int
    paused: bool
    spans: _containers.RepeatedCompositeFieldContainer[Span]
    monotonic_ns: int
    instance: str
    pid: int
    weights_crc32: int
    metrics_port: int
    def __init__(self, version: _Optional[int] = ..., running: _Optional[int] = ..., queued: _Optional[int] = ..., slots: _Optional[int] = ..., max_model_len: _Optional[int] = ..., tokens_generated: _Optional[int] = ..., paused: _Optional[bool] = ..., spans: _Optional[_Iterable[_Union[Span, _Mapping]]] = ..., monotonic_ns: _Optional[int] = ..., instance: _Optional[str] = ..., pid: _Optional[int] = ..., weights_crc32: _Optional[int] = ..., metrics_port: _Optional[int] = ...) -> None: ...
