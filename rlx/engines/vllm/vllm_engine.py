"""The vLLM engine: AsyncLLM in this process, its EngineCore in another.

    generate ─▶ EngineCore ─▶ one message a step ─▶ _take: token, logprob, version ─▶ samples
        ▲                                                                               │
        └── chunks, every `_FLUSH_SECONDS` or when one of its samples ends ◀────────────┘
    load: stage while decoding (vllm_worker.py) ─▶ pause(keep) ─▶ exchange ─▶ resume

EngineCore labels each step's outputs with the version of its weights. The outputs of our requests
are taken before vLLM's detokenizer.
"""

import asyncio
import contextlib
import copy
import hashlib
import math
import os
import shutil
import tempfile
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rlx.base import UserError
from rlx.cli.user_code import words
from rlx.engines.engine import NO_WEIGHTS, EngineOptions, EngineStopped, MissingImage
from rlx.engines.model_engine import ModelEngine
from rlx.engines.stop_strings import StopStrings
from rlx.engines.vllm.vllm_images import PreparedImage, image_inputs, placed_input
from rlx.engines.vllm.vllm_start import on_cpu, start_llm
from rlx.fleet.requests import TRY_OUT, Chunk, EngineStatus, Request, ScoreRequest, Scores
from rlx.fleet.scratch import make_private
from rlx.model import kept_tokens
from rlx.model.directory import IGNORED
from rlx.model.tensors import shards
from rlx.system.process_supervisor import ask_for_stacks, descendants

_FLUSH_SECONDS = 0.05  # interval of chunks
_UNWATCHED = 10  # × _FLUSH_SECONDS is the interval of unwatched requests
_STAGE_POLL_SECONDS = 0.005
_GAP_NS = 200_000_000  # longest between steps of one span
_MOST_IMAGE_BYTES = 4 << 30  # of prepared images
_SCORE_ATTEMPTS = 16  # an update may abort each


class VllmEngine(ModelEngine):
    """An `Engine` (rlx.engines.engine) on vLLM.

    Args:
      model_path, slots, max_model_len, clock: as ModelEngine. On a CPU the KV cache holds `slots`
        full sequences, at most 4 GiB; on a GPU vLLM chooses. Sequences that do not fit wait.
      hang_seconds: time without an answer after which EngineCore counts as dead; must exceed the
        longest prefill, as it answers between steps.
      options: further ones of `start_llm`.
    """

    def __init__(
        self, model_path: str, *, slots: int = EngineOptions.slots, max_model_len: int = 0,
        hang_seconds: float = 60.0, clock: Callable[[], int] = time.monotonic_ns, **options: Any,
    ):  # fmt: skip
        super().__init__(model_path, slots, max_model_len, clock)
        if self._config.value_head:
            raise UserError(f"{model_path} is a reward model; serve it with --engine=jax")
        self._slots, self._hang_seconds = slots, hang_seconds
        self._preparing = asyncio.Lock()
        self._options = {"slots": slots, "max_model_len": self._max_model_len, **options}
        self._samples: dict[str, _Sample] = {}
        self._serial = 0  # of the last request
        self._adapters: dict[tuple[str, int], int] = {}  # directory and time of change → number
        self._busy = (0, 0)  # start and last step of the current span, ns
        self._flushing, self._flushes = False, 0
        self._changing = asyncio.Lock()
        self._asleep = 0  # level of `pause`; 1 once new weights have come
        self._watcher: asyncio.Task | None = None
        self._cpu = on_cpu()
        self._images: OrderedDict[str, PreparedImage] = OrderedDict()
        self._image_bytes = 0  # of these
        self.llm: Any = None  # vLLM's AsyncLLM, once started
        self._private: tuple[str, int] | None = None  # its temporary files, and their lock

    async def start(self) -> None:
        # vLLM leaves its sockets behind. Their paths may have 107 characters, 36 of them vLLM's.
        short = len(parent := tempfile.gettempdir()) < 50
        self._private = directory, _ = make_private(parent if short else "/tmp")
        # Not in a thread: EngineCore ends with the thread that starts it.
        self.llm = start_llm(self.model_path, self._config, directory, **self._options)
        self._process_others = self.llm.output_processor.process_outputs
        self._fail_others = self.llm.output_processor.propagate_error
        self.llm.output_processor.process_outputs = self._take
        self.llm.output_processor.propagate_error = self._fail
        self.llm._run_output_handler()
        self._tasks = await self.llm.get_supported_tasks()
        try:
            files = "\n".join(map(str, shards(self.model_path)))
            twice = self._config.tie_embeddings and not self._config.foreign  # see check_names
            await self._call_workers("rlx_setup", files, [*IGNORED, *["lm_head.weight"] * twice])
        except Exception as error:
            self.llm.shutdown()
            raise UserError(f"vLLM cannot serve {self.model_path}: {words(error, 500)}") from error
        await self.llm.update_weight_version("0")
        await self._try_out()
        self._watcher = asyncio.create_task(self._watch())

    async def _try_out(self) -> None:
        """Generate one token: some models fail only then."""
        try:
            async for _ in self.generate(TRY_OUT):
                pass
        except (EngineStopped, ValueError) as error:
            await self.close()
            raise UserError(
                f"vLLM cannot serve {self.model_path}: it failed at the first token; see the lines "
                "above for the reason"
            ) from error
        self._generated = 0

    async def add_image(self, name: str, data: bytes) -> None:
        renderer = self.llm.renderer
        if renderer.mm_processor is None:
            raise ValueError("the server's model takes no images; leave them out")
        async with self._preparing:
            if name not in self._images:
                self._images[name] = await asyncio.to_thread(image_inputs, renderer, data)
                self._image_bytes += self._images[name].num_bytes
        while len(self._images) > 1 and self._image_bytes > _MOST_IMAGE_BYTES:
            self._image_bytes -= self._images.popitem(last=False)[1].num_bytes

    async def generate(self, request: Request) -> AsyncIterator[Chunk]:
        self._check_request(request)
        self._check_alive()
        wake = asyncio.Event()
        core_request = self._core_request(request)
        samples = [
            _Sample(index, self._for_sample(core_request, request, index), wake, request.unwatched)
            for index in range(request.first_index, request.first_index + request.n)
        ]
        sampling = request.sampling
        if sampling.return_masks and not sampling.unscored and sampling.temperature > 0:
            for sample in samples:
                sample.vocab = self._config.vocab_size
        if stop_strings := await self._stop_strings(request):
            for sample in samples:
                sample.stops = stop_strings()
        try:
            for sample in samples:
                await self._admit(sample)
            left = len(samples)
            while left:
                await wake.wait()
                wake.clear()
                for sample in samples:
                    if chunk := sample.drain():
                        left -= chunk.stop_reason is not None
                        yield chunk
                if left:
                    self._check_alive()
        finally:
            await self._drop(samples)

    async def score(self, request: ScoreRequest) -> Scores:
        self._check_score(request)
        core_request = self._core_score(request)
        for _ in range(_SCORE_ATTEMPTS):
            self._check_alive()
            sample = _ScoredPrompt(core_request)
            try:
                await self._admit(sample)
                while not sample.ended:
                    await sample.wake.wait()
                    sample.wake.clear()
                    if not sample.ended:
                        self._check_alive()
            finally:
                await self._drop([sample])
            if sample.stop_reason != "abort":
                logprobs = np.array(sample.logprobs, np.float32)
                return Scores(logprobs[request.first - 1 :], sample.versions[0])
        raise RuntimeError(f"EngineCore aborted the sequence {_SCORE_ATTEMPTS} times")

    async def pause(self, level: int = 0) -> None:
        """See Engine.pause; level 1 moves the weights to the host's memory."""
        async with self._changing:
            if level and not self._asleep:  # EngineCore computes kept requests again
                await self._await_core(self.llm.sleep(level, mode="keep"))
                self._asleep = level
            elif not level:
                core = self.llm.engine_core
                await self._await_core(core.pause_scheduler_async("keep", clear_cache=False))
            self._paused = True

    async def resume(self) -> None:
        async with self._changing:
            if self._asleep > 1:
                raise ValueError(NO_WEIGHTS)
            if self._asleep:
                await self._wake(None)
                self._asleep = 0
            else:
                await self._await_core(self.llm.engine_core.resume_scheduler_async())
            self._paused = False

    async def _wake(self, tags: list[str] | None) -> None:
        """Take back memory that was freed, all for None; then EngineCore continues by itself."""
        try:
            await self._await_core(self.llm.wake_up(tags))
        except BaseException as error:  # it may have a part
            self._fail(error)
            raise

    @property
    def casts(self) -> str:
        """Backend of the casts that `load` takes; "" with several workers, which take none."""
        # Decode steps of several workers have a group of their own.
        workers = self._options.get("tensor_parallel", 1)
        return "" if workers > 1 else "gloo" if self._cpu else "nccl"

    async def load(self, path: str | bytes, version: int, kv: str = "keep") -> int:
        if self.llm.vllm_config.lora_config:
            raise ValueError("a server with enable_lora keeps its weights; name adapters instead")
        async with self._changing:
            start = self._clock()
            if self._asleep:
                await self._wake(["weights"])
            await self._call_workers("rlx_stage", path)
            while None in (refusals := await self._call_workers("rlx_staged")):
                await asyncio.sleep(_STAGE_POLL_SECONDS)
            if refusal := next(filter(None, refusals), ""):  # before any worker exchanged
                raise ValueError(refusal)
            stopped = self._clock()
            self._spans.append(("stage weights", start, stopped))
            core, clear = self.llm.engine_core, kv == "recompute"
            await self._await_core(core.pause_scheduler_async("keep", clear_cache=clear))
            try:
                await self._call_workers("rlx_exchange")
                await self._await_core(self.llm.update_weight_version(str(version)))
                self._version, self._loads = version, self._loads + 1
                self._asleep = min(self._asleep, 1)
                if kv == "abort":
                    samples = list(self._samples.values())
                    await self._abort(samples)
                    for sample in samples:
                        sample.end("abort")
                elif kv == "keep":  # cached prefixes have the old weights
                    waiting = [sample for sample in self._samples.values() if not sample.started]
                    await self._abort(waiting)
                    for sample in waiting:
                        if not sample.ended:
                            await self._admit(sample)
            except BaseException as error:  # weights may be mixed
                self._fail(error)
                raise
            if not self._paused:
                await self._await_core(core.resume_scheduler_async())
            end = self._clock()
            self._spans.append(("swap weights", stopped, end))
            return end - stopped

    def status(self) -> EngineStatus:
        self._end_span()
        running = sum(sample.started for sample in self._samples.values())
        return self._status(running=running, queued=len(self._samples) - running, slots=self._slots)

    async def close(self) -> None:
        if self._watcher:
            self._watcher.cancel()
        for sample in self._samples.values():
            sample.end("abort")
        self._samples.clear()
        if self.llm:
            if self.llm.output_handler:  # it would report the end as a failure
                self.llm.output_handler.cancel()
            # Without a grace period: it has nothing to finish, or hangs.
            await asyncio.to_thread(self.llm.shutdown, timeout=0.0)
        if self._private:
            (directory, lock), self._private = self._private, None
            shutil.rmtree(directory, ignore_errors=True)
            os.close(lock)

    # Requests.

    def _core_request(self, request: Request) -> Any:
        """Return vLLM's EngineCoreRequest for `request`; ValueError if vLLM does not take it."""
        from vllm.sampling_params import StructuredOutputsParams

        sampling, room = request.sampling, self._max_model_len - len(request.prompt_tokens)
        longest = min(sampling.max_new_tokens - request.prefix_len, room)
        guide = StructuredOutputsParams(json=sampling.guide) if sampling.guide else None
        return self._processed(
            request.request_id, request.prompt_tokens, request.images, sampling.adapter,
            priority=-request.priority,  # vLLM serves the lowest first
            temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k,
            max_tokens=longest,
            min_tokens=min(max(sampling.min_new_tokens - request.prefix_len, 0), longest),
            stop_token_ids=list(self._stop_tokens(sampling)),
            logprobs=None if sampling.unscored else sampling.top_logprobs,
            structured_outputs=guide,
        )  # fmt: skip

    def _core_score(self, request: ScoreRequest) -> Any:
        # vLLM samples at least one token. So the last token is not in the prompt and is the only
        # one allowed; its logprob is not affected. Prompts with logprobs use no cached prefix.
        return self._processed(
            "score", request.tokens[:-1], request.images, request.adapter, priority=0,
            temperature=request.temperature, max_tokens=1, logprobs=0, prompt_logprobs=0,
            allowed_token_ids=[int(request.tokens[-1])],
        )  # fmt: skip

    def _lora(self, path: str) -> Any:
        """Return vLLM's request for an adapter, None for "". vLLM keeps the last ones used."""
        from vllm.lora.request import LoRARequest

        try:
            changed = (Path(path) / "adapter_model.safetensors").stat().st_mtime_ns if path else 0
        except OSError as error:
            raise ValueError(f"adapter={path} cannot be read here: {error.strerror}") from None
        number = self._adapters.setdefault((path, changed), len(self._adapters) + 1)
        return LoRARequest(f"{path}@{changed}", number, path) if path else None

    def _processed(
        self, name: str, prompt: np.ndarray, images: Sequence[str], adapter: str, *,
        priority: int, **sampling: Any,
    ) -> Any:  # fmt: skip
        from vllm import SamplingParams
        from vllm.exceptions import VLLMValidationError
        from vllm.sampling_params import RequestOutputKind

        try:
            params = SamplingParams(
                detokenize=False, output_kind=RequestOutputKind.DELTA, **sampling
            )
            return self.llm.input_processor.process_inputs(
                name, self._input(prompt, images), params, priority=priority,
                supported_tasks=self._tasks, lora_request=self._lora(adapter),
            )  # fmt: skip
        except (VLLMValidationError, ValueError, TypeError, OverflowError) as error:
            parameter = getattr(error, "parameter", None)
            parameter = parameter or ("guide" if sampling.get("structured_outputs") else "")
            field = f"{parameter}: " if parameter else ""
            raise ValueError(f"{field}vLLM does not take the request: {error}") from error

    def _input(self, prompt: np.ndarray, images: Sequence[str]) -> Any:
        from vllm.inputs.engine import tokens_input

        if not images:
            return tokens_input(prompt.tolist())
        missing = [name for name in images if name not in self._images]
        if missing:
            raise MissingImage(f"image {missing[0]} is not here; add it first")
        limit = self.llm.model_config.multimodal_config.get_limit_per_prompt("image")
        if len(images) > limit:
            raise ValueError(
                f"the prompt has {len(images)} images, the engine takes {limit}; leave some out or "
                "raise limit_mm_per_prompt in fleet.engine_args"
            )
        for name in images:
            self._images.move_to_end(name)
        return placed_input(prompt, images, [self._images[name] for name in images])

    def _for_sample(self, core_request: Any, request: Request, index: int) -> Any:
        clone = copy.copy(core_request)
        sampling = request.sampling
        # A GPU draws requests with seeds one by one, and its logits depend on the batch anyway.
        if sampling.seed is not None and sampling.temperature > 0 and self._cpu:
            clone.sampling_params = clone.sampling_params.clone()
            clone.sampling_params.seed = _mix(sampling.seed, index, request.prefix_len)
        return clone

    async def _admit(self, sample: "_Sample") -> None:
        """Send `sample` to EngineCore under a new id; it shares prefixes of these weights only."""
        self._serial += 1
        request = sample.core_request = copy.copy(sample.core_request)
        request.request_id = f"rlx-{self._serial}"
        request.cache_salt = str(self._loads)
        if request.mm_features:  # an image's features depend on the weights, too
            request.mm_features = [
                replace(image, identifier=f"{image.mm_hash}-{self._loads}")
                for image in request.mm_features
            ]
        self._samples[request.request_id] = sample
        await self._await_core(self.llm.engine_core.add_request_async(request))

    async def _drop(self, samples: "Sequence[_Sample]") -> None:
        """Abort samples that are not read any more, even while `load` holds them."""
        left = [sample for sample in samples if not sample.ended]
        for sample in left:
            sample.ended = True
        await self._abort(left)

    async def _abort(self, samples: "list[_Sample]") -> None:
        ids = [sample.core_request.request_id for sample in samples]
        ids = [name for name in ids if self._samples.pop(name, None)]
        if ids and not self._failure:
            with contextlib.suppress(EngineStopped):
                await self._await_core(self.llm.engine_core.abort_requests_async(ids))

    # Tokens.

    def _take(
        self, outputs: list, timestamp: float | None = None, stats: Any = None, **kwargs: Any
    ) -> Any:
        """Replace vLLM's `process_outputs`: take our requests' outputs, pass on the others."""
        others, aborted, any_ours = [], [], False
        version = int(label) if (label := kwargs.get("weight_version") or "").isdigit() else 0
        for output in outputs:
            sample = self._samples.get(output.request_id)
            if sample is None:
                others.append(output)
                continue
            any_ours = True
            self._generated += sample.add(output, version)
            if sample.ended:
                del self._samples[output.request_id]
                if output.finish_reason is None:  # EngineCore does not know stop strings
                    aborted.append(output.request_id)
        if any_ours:
            now, (start, end) = self._clock(), self._busy
            if now - end > _GAP_NS:
                self._end_span()
                start = now
            self._busy = (start, now)
            if not self._flushing:
                self._flushing = True
                asyncio.get_running_loop().call_later(_FLUSH_SECONDS, self._flush)
        processed = self._process_others(others, timestamp, stats, **kwargs)
        processed.reqs_to_abort.extend(aborted)
        return processed

    def _flush(self) -> None:
        self._flushing, self._flushes = False, self._flushes + 1
        every = self._flushes % _UNWATCHED == 0
        for sample in self._samples.values():
            if sample.new.tokens and (every or not sample.unwatched):
                sample.wake.set()

    def _end_span(self) -> None:
        start, end = self._busy
        if end > start:
            self._spans.append(("decode", start, end))
            self._busy = (end, end)

    # Failures of EngineCore.

    async def _watch(self) -> None:
        """Fail the engine if EngineCore dies or hangs."""
        while not self._failure:
            await asyncio.sleep(min(1.0, self._hang_seconds / 4))
            try:
                async with asyncio.timeout(self._hang_seconds):
                    await self.llm.is_paused()
            except TimeoutError:
                ask_for_stacks(descendants(os.getpid()))
                self._fail(
                    RuntimeError(f"EngineCore hangs, no answer for {self._hang_seconds:g} s")
                )
            except Exception as error:
                self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Replace vLLM's `propagate_error`: end every stream after its tokens so far."""
        self._failure = self._failure or error
        for sample in self._samples.values():
            sample.wake.set()
        self._fail_others(error)

    async def _call_workers(self, method: str, *args: Any) -> list:
        """Call a method of RolloutWorker on all workers; return their results."""
        return await self._await_core(self.llm.collective_rpc(method, args=args))

    async def _await_core(self, call: Any) -> Any:
        """Await a call to EngineCore; raise EngineStopped if it has died or hangs."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            self._check_alive()
        except EngineStopped:
            call.close()
            raise
        task = asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait({task}, timeout=0.2))[0]:
                self._check_alive()
            return task.result()
        except EngineDeadError as error:
            self._fail(error)
            raise self._stopped() from error
        finally:
            task.cancel()


class _Sample:
    """A sample in EngineCore, and its tokens that `generate` has not taken yet."""

    def __init__(self, index: int, core_request: Any, wake: asyncio.Event, unwatched: bool = False):
        self.core_request, self.wake, self.unwatched = core_request, wake, unwatched
        self.new: Any = Chunk(index)  # its fields are lists
        self.started = self.ended = False
        self.stop_reason: str | None = None
        self.stops: StopStrings | None = None
        self.vocab = 0  # above 0: the tokens drawn from are wanted
        self.masks: list[np.ndarray] = []  # of the new tokens, [tokens, bytes of bits] each

    def add(self, output: Any, version: int) -> int:
        """Add the tokens of one step; return how many."""
        tokens = output.new_token_ids
        reason = str(output.finish_reason) if output.finish_reason is not None else None
        if tokens:
            self.started = True
            if self.stops and (count := self.stops(tokens)) is not None:
                tokens, reason = tokens[:count], "stop"
            count = len(tokens)
            self.new.tokens.extend(tokens)
            self.new.versions.extend([version] * count)
            # The sampled token, then the most likely: the most that any request of the step wants.
            step, most = output.new_logprobs, self.core_request.sampling_params.logprobs
            nothing = [math.nan] * count
            if self.vocab:
                step = self._unmasked(step, count)
            self.new.logprobs.extend(nothing if most is None else step.logprobs[:count, 0].tolist())
            if most:
                ids, values = (array[:count, 1 : 1 + most].flatten().tolist()
                               for array in (step.logprob_token_ids, step.logprobs))  # fmt: skip
                self.new.top_tokens.extend(ids)
                self.new.top_logprobs.extend(values)
        if reason:
            self.end(reason if reason in ("stop", "length") else "abort")
        return len(tokens)

    def _unmasked(self, step: Any, count: int) -> Any:
        """Keep the masks in a step's logprobs, see TemperedSampler; return these renormalised."""
        logprobs, ids = step.logprobs, step.logprob_token_ids[:count]
        if ids.shape[1] == logprobs.shape[1]:  # no request of the step has a truncated distribution
            # As wide as the words of the other steps.
            self.masks.append(np.full((count, -(-self.vocab // 32) * 4), 255, np.uint8))
            return step
        words = np.ascontiguousarray(ids[:, logprobs.shape[1] :], np.int32)
        self.masks.append(words.view(np.uint8))
        return step._replace(logprobs=np.minimum(logprobs[:, :-1] - logprobs[:, -1:], 0))

    def end(self, reason: str) -> None:
        self.stop_reason, self.ended = reason, True
        self.wake.set()

    def drain(self) -> Chunk | None:
        """Return the tokens since the last call, None if there are none."""
        if not self.new.tokens and self.stop_reason is None:
            return None
        chunk = replace(self.new, stop_reason=self.stop_reason)
        if self.masks:
            data, sizes = kept_tokens.compress(np.concatenate(self.masks), self.vocab)
            chunk = replace(chunk, kept=data, kept_sizes=sizes)
        self.new, self.stop_reason, self.masks = Chunk(chunk.index), None, []
        return chunk


class _ScoredPrompt(_Sample):
    """A score request: logprobs of the prompt and of the token after it."""

    def __init__(self, core_request: Any):
        super().__init__(0, core_request, asyncio.Event())
        self.logprobs, self.versions = list[float](), list[int]()

    def add(self, output: Any, version: int) -> int:
        """Add logprobs, which come with the last output; return 0, as none is generated."""
        if output.new_prompt_logprobs_tensors is not None:
            self.logprobs = output.new_prompt_logprobs_tensors.logprobs[:, 0].tolist()
        if output.new_token_ids:
            self.started = True
            self.logprobs.append(float(output.new_logprobs.logprobs[0, 0]))
            self.versions.append(version)
        if output.finish_reason is not None:
            self.end("length" if self.versions else "abort")
        return 0


def _mix(seed: int, index: int, position: int) -> int:
    """Return a seed for (sample, position), so that a continuation does not repeat draws."""
    text = f"{seed} {index} {position}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=7).digest(), "little")
