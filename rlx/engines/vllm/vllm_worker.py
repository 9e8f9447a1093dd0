"""Extension of vLLM's worker, in the EngineCore process: exchanges weights between two steps.

    stage  ─▶ thread: read or receive, check, pack while decoding ─▶ staged? ─▶ exchange

vLLM's own reload accepts files with missing tensors, and a failure leaves the engine without
weights. On a CPU it does not update a tied head, because linear weights are in packed copies. Here
weights are exchanged only after all are read, checked and packed.
"""

import faulthandler
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers import linear
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.sample.sampler import Sampler

from rlx.engines.vllm.vllm_cast import receive
from rlx.fleet.cast import buckets
from rlx.fleet.rollout_pb2 import PublishCast
from rlx.system.process_settings import end_with_parent

Tensors = dict[str, torch.Tensor]
_EXPERTS = {"w13_weight": ("gate_proj", "up_proj"), "w2_weight": ("down_proj",)}
_ROWS = 256  # tokens of a prompt with logits at a time


class TemperedSampler(Sampler):
    """Sampler whose logprobs are log softmax(logits / temperature), whole vocabulary, float32.

    vLLM has them only before the temperature, or after top-p, top-k and the minimum length. If a
    step's draws are truncated, a row's logprobs end with the log of the probability that was kept.
    Its ids end with −1 and the kept tokens as 32-bit words, lowest bit first. Where a guide forbids
    tokens, their logits are −inf already.
    """

    guided = False  # whether a row of this step has a guide

    _temperature: torch.Tensor | None = None
    _kept: torch.Tensor | None = None  # [rows, V] bool, of this step

    def forward(self, logits, sampling_metadata, *args: Any, **kwargs: Any):
        with self.at(sampling_metadata.temperature):
            return super().forward(logits, sampling_metadata, *args, **kwargs)

    @contextmanager
    def at(self, temperature: torch.Tensor | None) -> Iterator[None]:
        """Set the temperature [rows] or [1] of logprobs for the block; None and 0 mean 1."""
        self._temperature = temperature
        try:
            yield
        finally:
            self._temperature = None

    def sample(self, logits, sampling_metadata, *args: Any, **kwargs: Any):
        metadata, drawer, self._kept = sampling_metadata, self.topk_topp_sampler, None
        full = not (self.guided or truncates(metadata))
        if metadata.all_greedy or metadata.max_num_logprobs is None or full:
            return super().sample(logits, metadata, *args, **kwargs)
        plain, mode = drawer.forward, drawer.logprobs_mode
        if logits.device.type != "cpu":  # FlashInfer does not return what it kept
            drawer.forward = drawer.forward_native
        drawer.logprobs_mode = "processed_logits"
        try:
            sampled, processed = super().sample(logits, metadata, *args, **kwargs)
        finally:
            drawer.forward, drawer.logprobs_mode = plain, mode
        assert processed is not None  # by the mode
        self._kept = processed > -torch.inf
        return sampled, None

    def gather_logprobs(self, logprobs, *args: Any, **kwargs: Any):  # type: ignore[override]
        table = super().gather_logprobs(logprobs, *args, **kwargs)
        kept, self._kept = self._kept, None
        if kept is None:
            return table
        mass = logprobs.masked_fill(~kept, -torch.inf).logsumexp(-1, keepdim=True)
        bits = torch.nn.functional.pad(kept, (0, -kept.shape[1] % 32)).unflatten(1, (-1, 32))
        words = (bits.int() << torch.arange(32, device=bits.device, dtype=torch.int32)).sum(-1)
        ids = table.logprob_token_ids
        more = torch.cat([ids, torch.full_like(ids[:, :1], -1), words.to(ids.dtype)], 1)
        return table._replace(logprob_token_ids=more, logprobs=torch.cat([table.logprobs, mass], 1))

    def compute_logprobs(self, logits):  # type: ignore[override]
        temperature = self._temperature
        if temperature is not None and len(temperature) in (1, len(logits)):
            greedy = temperature < 1e-5
            logits = logits.float() / torch.where(greedy, 1.0, temperature)[:, None]
        return logits.log_softmax(dim=-1, dtype=torch.float32)


def truncates(metadata: Any) -> bool:
    """Return whether top-p, top-k or a minimum length excludes tokens of a step, by metadata."""
    limits = (getattr(each, "min_toks", None) for each in metadata.logitsprocs.non_argmax_invariant)
    return metadata.top_p is not None or metadata.top_k is not None or any(limits)


def _sample_tokens(runner: Any, plain: Callable, grammar_output: Any) -> Any:
    """Replace the runner's method `plain`: note whether the step has guides."""
    runner.sampler.guided = grammar_output is not None
    return plain(grammar_output)


def prompt_logprobs(
    runner: Any, plain: Callable, hidden_states: torch.Tensor, num_tokens: dict[str, int]
) -> dict[str, Any]:
    """Replace the runner's method `plain`: return prompts' logprobs at their temperatures."""
    # vLLM has no temperature for prompts. It makes all logits of a prompt at once, twice 2.5 GB for
    # 4096 tokens and a vocabulary of 152k; here `plain` gets `_ROWS` tokens at a time.
    results: dict[str, Any] = {}
    pending = runner.num_prompt_logprobs
    try:
        for name in [name for name in pending if name in num_tokens]:
            request = runner.requests[name]
            done, count = request.num_computed_tokens, num_tokens[name]
            unfinished = runner.num_prompt_logprobs = {name: pending[name]}
            temperature = torch.tensor([request.sampling_params.temperature], device=runner.device)
            with runner.sampler.at(temperature):
                for start in range(0, count, _ROWS):
                    request.num_computed_tokens = done + start
                    part = {name: min(_ROWS, count - start)}
                    results |= plain(hidden_states[start:], part)
            request.num_computed_tokens = done
            if not unfinished:  # `plain` has reached the prompt's end
                del pending[name]
    finally:
        runner.num_prompt_logprobs = pending
    return results


def shrink_adapted(
    plain: Callable, x: torch.Tensor, weights: torch.Tensor, out: torch.Tensor,
    indices: torch.Tensor, scaling: float = 1.0,
) -> None:  # fmt: skip
    """Replace vLLM's product with A on a CPU, which gives tokens without an adapter the last."""
    plain(x, weights, out, indices, scaling)
    out[: len(indices)][indices < 0] = 0.0


class TensorParallelExecutor(MultiprocExecutor):
    """vLLM's executor of several workers, whose EngineCore ends with its server."""

    def _init_executor(self) -> None:
        end_with_parent(os.getppid())  # EngineCore; workers do so in `rlx_setup`
        super()._init_executor()


class RolloutWorker:
    """Mixin of vLLM's worker (`worker_extension_cls`), called by `collective_rpc`."""

    device: torch.device
    model_runner: Any

    def rlx_setup(self, path: str, ignored: list[str]) -> None:
        """End this process with its parent; record the tensors that an update must have.

        `path` names the safetensors files of the current weights, joined by newlines. Tensors whose
        names end like `ignored` are left out, here and in updates.
        """
        end_with_parent(os.getppid())
        faulthandler.register(signal.SIGUSR1)  # where it hangs, its stacks are asked for
        self._ignored = tuple(ignored)
        self._spec = {name: tuple(t.shape) for name, t in self._read(path).items()}
        self._staged: Callable[[], None] | None = None
        self._staging: threading.Thread | None = None
        self._refusal: str | None = None
        self._copies: torch.cuda.Stream | None = None
        runner = self.model_runner
        runner.sampler.__class__ = TemperedSampler
        runner._get_prompt_logprobs_dict = partial(
            prompt_logprobs, runner, runner._get_prompt_logprobs_dict
        )
        runner.sample_tokens = partial(_sample_tokens, runner, runner.sample_tokens)
        if self.device.type == "cpu":
            sources_of(self.model_runner.model, self._spec)  # refuse an unknown model now
            if runner.lora_config:
                from vllm.lora.ops.torch_ops import lora_ops
                from vllm.lora.punica_wrapper import punica_cpu

                modules: tuple[Any, ...] = (lora_ops, punica_cpu)
                for module in modules:
                    module.bgmv_shrink = partial(shrink_adapted, module.bgmv_shrink)

    def rlx_stage(self, source: str | bytes) -> None:
        """Start a thread that gets, checks and packs weights from a path or a PublishCast."""
        self._refusal = self._staged = None

        def stage() -> None:
            try:
                self._staged = self._prepare(source)
            except Exception as error:
                self._refusal = str(error) or type(error).__name__

        self._staging = threading.Thread(target=stage, name="rlx-stage", daemon=True)
        self._staging.start()

    def rlx_staged(self) -> str | None:
        """Return None while `rlx_stage` runs, then the reason for a refusal, "" if accepted."""
        assert self._staging
        return None if self._staging.is_alive() else self._refusal or ""

    def rlx_exchange(self) -> None:
        """Replace the weights by the staged ones."""
        exchange, self._staged = self._staged, None
        assert exchange
        exchange()

    def _prepare(self, source: str | bytes) -> Callable[[], None]:
        """Get, check and pack weights; return what exchanges them, or raise ValueError."""
        dtype, move = self.model_runner.dtype, lambda tensor: tensor
        if isinstance(source, str):
            tensors = self._read(source)
            check(tensors, self._spec)
        else:
            cast = PublishCast.FromString(source)
            entries = [entry for bucket in buckets(cast.head) for entry in bucket]
            check_shapes({entry.name: entry.shape for entry in entries}, self._spec)
            if self.device.type != "cpu":
                torch.cuda.set_device(self.device)  # a new thread has GPU 0
                move = self._mover(sum(math.prod(entry.shape) for entry in entries), dtype)
            tensors = receive(cast, self.device, move)
            check(tensors, self._spec)
        if self.device.type == "cpu":
            with torch.inference_mode():
                return stage_packed(self.model_runner.model, tensors, dtype)
        ready = self._on_gpu(tensors, dtype) if isinstance(source, str) else tensors
        return lambda: self.model_runner.reload_weights(weights_iterator=iter(ready.items()))

    def _read(self, path: str) -> Tensors:
        return {k: t for k, t in read(path).items() if not k.endswith(self._ignored)}

    def _on_gpu(self, tensors: Tensors, dtype: torch.dtype) -> Tensors:
        """Copy tensors of files by `_mover`."""
        torch.cuda.set_device(self.device)
        move = self._mover(sum(t.numel() for t in tensors.values()), dtype)
        # A stream of their own: decode steps on the other one go on.
        self._copies = self._copies or torch.cuda.Stream(self.device)
        with torch.cuda.stream(self._copies):
            ready = {name: move(t) for name, t in tensors.items()}
        self._copies.synchronize()
        return ready

    def _mover(self, count: int, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return a copier to the GPU if it has room for `count` numbers, else to pinned memory."""
        # The allocator keeps the memory of the last exchange, which the driver counts as used.
        cache = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        free = torch.cuda.mem_get_info(self.device)[0] + cache
        room = count * dtype.itemsize < free // 2
        if not room or get_tensor_model_parallel_world_size() > 1:  # several slice the tensors
            return lambda tensor: tensor.to("cpu", dtype).pin_memory()
        return lambda tensor: tensor.to(self.device, dtype)


def read(path: str) -> Tensors:
    """Return HF name → tensor, memory-mapped, of files, a path a line; ValueError if unreadable."""
    tensors: Tensors = {}
    for part in path.split("\n"):
        try:
            with safe_open(part, "pt") as file:
                tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{part} is not a readable safetensors file: {error}") from error
    return tensors


def check_shapes(shapes: dict[str, tuple[int, ...]], spec: dict[str, tuple[int, ...]]) -> None:
    """Raise ValueError if a tensor is missing, extra or misshapen."""
    for name, shape in spec.items():
        if name not in shapes:
            raise ValueError(f"tensor {name} is missing; publish every tensor of the model")
        if shapes[name] != shape:
            raise ValueError(f"tensor {name} has shape {shapes[name]}, the model's is {shape}")
    if extra := next((name for name in shapes if name not in spec), ""):
        raise ValueError(f"tensor {extra} is not part of the model; leave it out")


def check(tensors: Tensors, spec: dict[str, tuple[int, ...]]) -> None:
    """Raise ValueError as `check_shapes`, or if a tensor is not finite."""
    check_shapes({name: tuple(tensor.shape) for name, tensor in tensors.items()}, spec)
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise ValueError(f"tensor {name} is {tensor.dtype}; weights are floating point")
        # One pass, much faster than a sum; NaN becomes both minimum and maximum.
        if not torch.stack(torch.aminmax(tensor)).isfinite().all():
            raise ValueError(f"tensor {name} is not finite; the training step has diverged")


def sources_of(model: torch.nn.Module, spec: dict[str, Any]) -> dict[str, list[str]]:
    """Return vLLM's parameter → HF tensors to join on axis 0; ValueError if either is missing."""
    fused, spec = getattr(model, "packed_modules_mapping", {}), renamed(model, spec)
    sources: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        hf_name = name.replace(".base_layer.", ".")  # with adapters, which are no parameters
        owner, _, leaf = hf_name.rpartition(".")
        prefix, _, module = owner.rpartition(".")
        hf_name = hf_name.replace(".experts.gate.", ".gate.")  # two modules share a router
        parts = [f"{prefix}.{part}.{leaf}" for part in fused.get(module, ())] or [hf_name]
        if leaf in _EXPERTS:  # one parameter for all experts of a layer
            numbers = range(len(parameter))
            parts = [f"{prefix}.{i}.{part}.weight" for i in numbers for part in _EXPERTS[leaf]]
        if not all(part in spec for part in parts):
            tied = [other for other in spec if other.endswith("embed_tokens.weight")]
            if name.endswith("lm_head.weight") and tied:
                parts = tied
            else:
                raise ValueError(f"vLLM's parameter {name} has no tensor in the checkpoint")
        sources[name] = parts
    unused = set(spec) - {part for parts in sources.values() for part in parts}
    if unused:
        raise ValueError(f"tensor {min(unused)} has no parameter in vLLM's model")
    return sources


def renamed(model: torch.nn.Module, tensors: dict[str, Any]) -> dict[str, Any]:
    """Return tensors by vLLM's own names, which differ from HF's in models with images."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    return mapper.get_rename_mapper().apply_dict(tensors) if mapper else tensors


def stage_packed(
    model: torch.nn.Module, tensors: Tensors, dtype: torch.dtype
) -> Callable[[], None]:
    """Pack `tensors` for a CPU; return a function that exchanges the weights."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    sources, tensors = sources_of(model, tensors), renamed(model, tensors)
    joined: dict[str, torch.Tensor] = {}
    steps: list[Callable[[], None]] = []
    for owner, module in model.named_modules(remove_duplicate=False):
        new = SimpleNamespace()
        for leaf, parameter in module.named_parameters(recurse=False):
            name = f"{owner}.{leaf}"
            key = "\n".join(sources[name])
            if key not in joined:
                parts = own_slices(module, leaf, [tensors[part] for part in sources[name]])
                joined[key] = _joined(parts, parameter, dtype)
            setattr(new, leaf, joined[key])
        if hasattr(new, "w13_weight"):
            _pack_experts(module, new)
        if hasattr(module, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(new, remove_weight=False)  # type: ignore[arg-type]
        steps.append(lambda module=module, new=new: _exchange(module, new))  # type: ignore[misc]

    def exchange() -> None:
        for step in steps:
            step()

    return exchange


def own_slices(module: torch.nn.Module, leaf: str, parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return this worker's slices of `parts`.

    `module` is a layer of vLLM, with `tp_size` and `tp_rank`; `leaf` is its weight, bias or a name
    in `_EXPERTS`.
    """
    owner = getattr(module, "moe_config", module)
    size, rank = getattr(owner, "tp_size", 1), getattr(owner, "tp_rank", 0)
    if size == 1:
        return parts
    if leaf in _EXPERTS:  # along the inner dimension
        return [t.chunk(size, dim=int(leaf == "w2_weight"))[rank] for t in parts]
    if isinstance(module, VocabParallelEmbedding):
        rows = module.shard_indices
        return [t[rows.org_vocab_start_index : rows.org_vocab_end_index] for t in parts]
    if isinstance(module, linear.RowParallelLinear):
        return [t.chunk(size, dim=1)[rank] if leaf == "weight" else t for t in parts]
    if isinstance(module, linear.QKVParallelLinear):  # workers may share key/value heads
        copies = module.num_kv_head_replicas
        kv = (size // copies, rank // copies)
        return [t.chunk(n)[i] for t, (n, i) in zip(parts, ((size, rank), kv, kv), strict=True)]
    if isinstance(module, linear.ColumnParallelLinear):
        return [t.chunk(size)[rank] for t in parts]
    return parts


def _pack_experts(module: Any, new: SimpleNamespace) -> None:
    """Pack the matrices of a layer's experts as vLLM does after loading them."""
    packed = torch.nn.Module()
    for leaf in _EXPERTS:
        matrices = getattr(new, leaf).unflatten(0, (len(getattr(module, leaf)), -1))
        packed.register_parameter(leaf, torch.nn.Parameter(matrices, requires_grad=False))
    module.quant_method.moe_kernel.fused_experts.process_weights_after_loading(packed)
    for leaf in _EXPERTS:
        setattr(new, leaf, getattr(packed, leaf).data)


def _joined(parts: list[torch.Tensor], parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Join copies of `parts`; add zero rows where vLLM pads the vocabulary."""
    joined = torch.cat([part.to(dtype) for part in parts])
    missing = len(parameter) - len(joined) if parameter.numel() else 0
    if missing > 0:
        joined = torch.cat([joined, joined.new_zeros(missing, *joined.shape[1:])])
    return joined


def _exchange(module: torch.nn.Module, new: SimpleNamespace) -> None:
    for leaf, parameter in module.named_parameters(recurse=False):
        if parameter.numel():  # empty if there is only the packed copy
            parameter.data = getattr(new, leaf)
    if hasattr(new, "cpu_linear"):
        module.cpu_linear = new.cpu_linear  # type: ignore[assignment]
