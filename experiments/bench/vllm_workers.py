"""Shared parts of the vLLM benchmarks: models, and vLLM used as in its own documentation.

    python -m experiments.bench.vllm_workers offline|evaluate|reload --model=DIR …

A rival runs in its own process on the server's core. It has VllmEngine's settings
(rlx/engines/vllm/vllm_engine.py): eager, one process for EngineCore and worker, blocks of 32, whole
prefills. It takes one JSON line of work at a time, and uses no CPU between them.
"""

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rlx.system.process_settings import end_with_parent

ENVIRONMENT = {
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
}
BLOCK = 32
# rlx:arithmetic, SmolLM2, and random weights of 25M parameters and of Qwen2.5-0.5B's shape
MODELS = ("tiny", "25m", "135m", "0.5b")


@contextlib.contextmanager
def model_dir(name: str, scratch: Path) -> Iterator[Path]:
    """Return the HF directory of one of MODELS; make a random one in `scratch` if missing.

    Random ones have the arithmetic tokenizer, whose ids are in their vocabulary.
    """
    from rlx.model.directory import resolve

    if name in (own := {"tiny": "rlx:arithmetic", "135m": "rlx:smollm2"}):
        yield Path(resolve(own[name]))
        return
    path = scratch / f"random-{name}"
    if not path.exists():
        # A separate process, so that its memory is freed.
        done = subprocess.run(
            [sys.executable, "-m", "experiments.bench.vllm_workers", "make",
             f"--model={path}", f"--shape={name}"]
        )  # fmt: skip
        assert done.returncode == 0
    yield path


def make(path: str, shape: str) -> None:
    """Write random bfloat16 weights of a shape of `train_step_workers.MODELS`."""
    import dataclasses

    import jax

    from experiments.bench.train_step_workers import MODELS
    from rlx.model import hf, params

    config = dataclasses.replace(MODELS[shape], eos_token_ids=(272,))
    weights = params.init(config, jax.random.key(0), "bfloat16")
    hf.save(path, config, weights, "bfloat16", source=hf.resolve("rlx:arithmetic"))


def kv_bytes(path: Path, tokens: int, dtype: str) -> int:
    """Return the bytes of a KV cache for `tokens` tokens, as VllmEngine calculates it."""
    from rlx.engines.vllm.vllm_start import kv_bytes
    from rlx.model.directory import load_config

    return kv_bytes(load_config(path), tokens, dtype)


class Rival:
    """One of this file's programs in a process on `core` (or several: "0,1", a thread for each)."""

    def __init__(
        self, program: str, model: Path, core: int | str, log: Path,
        python: str = sys.executable, **options: Any,
    ):  # fmt: skip
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        self._log = open(log, "ab")  # noqa: SIM115
        self._process = subprocess.Popen(
            ["taskset", "-c", str(core), python, "-m", "experiments.bench.vllm_workers",
             program, f"--model={model}",
             f"--parent-pid={os.getpid()}", *flags],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
            env={**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": str(len(str(core).split(",")))},
        )  # fmt: skip

    @property
    def pid(self) -> int:
        return self._process.pid

    def ask(self, work: Any = None) -> Any:
        """Return its answer to `work`; without work wait until it is ready."""
        assert self._process.stdin
        assert self._process.stdout
        if work is not None:
            self._process.stdin.write(json.dumps(work) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the rival ended; see {self._log.name}")
        return json.loads(line)

    def __enter__(self) -> "Rival":
        return self

    def __exit__(self, *_: Any) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


def _wire():
    """Return (answer, lines of work); stdout has only answers, output of vLLM goes to stderr."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(value: Any) -> None:
        out.write(json.dumps(value) + "\n")
        out.flush()

    return answer, (json.loads(line) for line in iter(sys.stdin.readline, ""))


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "model": args.model,
        "dtype": args.dtype,
        "max_model_len": args.max_model_len,
        "max_num_seqs": args.slots,
        "enforce_eager": True,
        "kv_cache_memory_bytes": kv_bytes(
            Path(args.model), args.slots * args.max_model_len, args.dtype
        ),
        "block_size": BLOCK,
        "distributed_executor_backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor",
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(args.max_model_len, 2048),
        "enable_prefix_caching": True,
        "disable_log_stats": True,
    }


def offline(args: argparse.Namespace) -> None:
    """Serve LLM.generate.

    Work: [[prompt ids, new tokens, seed or null], …]; answers tokens, seconds.
    """
    from vllm import LLM, SamplingParams

    answer, works = _wire()
    llm = LLM(**_settings(args))
    answer("ready")
    for work in works:
        prompts = [{"prompt_token_ids": ids} for ids, _, _ in work]
        params = [
            SamplingParams(
                temperature=1.0, max_tokens=n, min_tokens=n, seed=seed, logprobs=0,
                detokenize=False, stop_token_ids=args.stop,
            )
            for _, n, seed in work
        ]  # fmt: skip
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        assert all(output.outputs[0].logprobs for output in outputs)
        answer([tokens, seconds])


def evaluate(args: argparse.Namespace) -> None:
    """Serve LLM.generate as an evaluation script calls it, with texts and natural ends.

    Work: [[prompt ids, n, temperature, top_p, seed, most new tokens], …]; answers tokens, seconds.
    """
    from vllm import LLM, SamplingParams

    answer, works = _wire()
    llm = LLM(**_settings(args))
    answer("ready")
    for work in works:
        prompts = [{"prompt_token_ids": ids} for ids, *_ in work]
        params = [
            SamplingParams(
                n=n, temperature=temperature, top_p=top_p, seed=seed, max_tokens=most,
                stop_token_ids=args.stop,
            )
            for _, n, temperature, top_p, seed, most in work
        ]  # fmt: skip
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        tokens = sum(len(each.token_ids) for output in outputs for each in output.outputs)
        answer([tokens, seconds])


async def reload(args: argparse.Namespace) -> None:
    """Serve pause_generation(keep) → reload_weights → resume_generation, with requests in flight.

    Work: [path of an HF directory, clear_cache]; answers ms from pause to resume, the longest
    time between two tokens of a request around it, and ms to the first token after it.
    """
    answer, works = _wire()
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**_settings(args)))
    room = args.max_model_len - args.prompt
    params = SamplingParams(
        temperature=1.0, max_tokens=room, min_tokens=room, seed=0, logprobs=0, detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )  # fmt: skip
    arrivals: list[list[float]] = [[] for _ in range(args.requests)]

    async def keep_busy(index: int) -> None:
        serial = 0
        while True:
            prompt = {"prompt_token_ids": [(7 * index + k) % 200 for k in range(args.prompt)]}
            async for _ in llm.generate(prompt, params, f"{index}-{serial}"):
                arrivals[index].append(time.perf_counter())
            serial += 1

    async def settle() -> None:  # until every request has had recent tokens
        counts = [len(times) + 2 for times in arrivals]
        while any(len(t) < n for t, n in zip(arrivals, counts, strict=True)):
            await asyncio.sleep(0.01)

    tasks = [asyncio.create_task(keep_busy(index)) for index in range(args.requests)]
    await settle()
    answer("ready")
    loop = asyncio.get_running_loop()
    while (work := await loop.run_in_executor(None, next, works, None)) is not None:
        path, clear_cache = work
        await settle()
        begun = [len(times) - 1 for times in arrivals]
        start = time.perf_counter()
        await llm.pause_generation(mode="keep", clear_cache=clear_cache)
        await llm.collective_rpc("reload_weights", kwargs={"weights_path": path})
        await llm.resume_generation()
        end = time.perf_counter()
        await settle()
        gaps = [
            max(b - a for a, b in zip(times[k:], times[k + 1 :], strict=False))
            for times, k in zip(arrivals, begun, strict=True)
        ]
        first = min(t for times in arrivals for t in times if t > end)
        answer([1e3 * (end - start), 1e3 * max(gaps), 1e3 * (first - start)])
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    llm.shutdown()


def main(argv: Sequence[str] | None = None) -> None:
    p = argparse.ArgumentParser(allow_abbrev=False)
    p.add_argument("program", choices=("offline", "evaluate", "reload", "make"))
    p.add_argument("--model", required=True)
    p.add_argument("--shape", default="0.5b", help="of the weights to make")
    p.add_argument("--dtype", default="float32")
    p.add_argument("--max-model-len", type=int, default=512)
    p.add_argument("--slots", type=int, default=64)
    p.add_argument("--stop", type=json.loads, default=[])
    p.add_argument("--requests", type=int, default=8)
    p.add_argument("--prompt", type=int, default=32)
    p.add_argument("--parent-pid", type=int, default=0)
    args = p.parse_args(argv)
    if args.parent_pid:
        end_with_parent(args.parent_pid)
    if args.program == "make":
        make(args.model, args.shape)
    elif args.program == "offline":
        offline(args)
    elif args.program == "evaluate":
        evaluate(args)
    else:
        asyncio.run(reload(args))


if __name__ == "__main__":
    main()
