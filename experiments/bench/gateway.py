"""Compare the gateway with vLLM's own OpenAI server, `vllm serve` with the same options.

    python -m experiments.bench.gateway                 # 32 at once, rounds in turns
    python -m experiments.bench.gateway --sessions=1000 # open 1000 sessions at once, only rlx

One side is `rlx.gateway` in front of `rlx.serve --engine=vllm`. The same client sends both sides
the same requests: `--at-once` concurrent chat completions with exactly `--tokens` tokens each,
greedy, complete or (`--stream`) streamed. Rounds take turns, and the waiting side uses no CPU. The
table has medians and spread over rounds. `cpu` is the work of gateway, server and EngineCore, ms
per call. Other work on the machine changes it less than latencies.
"""

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import aiohttp
import numpy as np
import psutil

from rlx.engines.vllm.vllm_start import kv_bytes, on_cpu
from rlx.fleet import wire
from rlx.launch.local import LocalServers
from rlx.model.directory import load_config, resolve

TALK = [{"role": "user", "content": "What is 3 + 4?"}]


async def calls(url: str, model: str, keys: list[str], count: int, at_once: int, body: dict):
    """Return (seconds of each call, total seconds) of `count` calls, `at_once` concurrent."""
    numbers, seconds = iter(range(count)), []
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:

        async def one() -> None:
            for number in numbers:
                talk = [{"role": "user", "content": f"What is {number} + 4?"}]
                sent = {**body, "model": model, "messages": talk}
                headers = {"Authorization": f"Bearer {keys[number % len(keys)]}"}
                start = time.perf_counter()
                async with http.post(f"{url}/chat/completions", json=sent, headers=headers) as got:
                    answer = await got.read()
                    assert got.status == 200, answer
                seconds.append(time.perf_counter() - start)

        start = time.perf_counter()
        await asyncio.gather(*(one() for _ in range(at_once)))
        return seconds, time.perf_counter() - start


@contextlib.contextmanager
def gateway(model: Path, address: str, token: str, keys: list[str], folder: str):
    """Yield (base_url, process) of the gateway's command."""
    (Path(folder) / "keys").write_text("\n".join(keys))
    command = [sys.executable, "-m", "rlx.gateway", f"--model={model}", f"--servers={address}",
               "--port=0", f"--keys={folder}/keys"]  # fmt: skip
    environment = {**os.environ, wire.TOKEN_VARIABLE: token}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        try:
            yield json.loads(process.stdout.readline())["base_url"], psutil.Process(process.pid)
        finally:
            process.terminate()


@contextlib.contextmanager
def vllm_serve(model: Path, slots: int, folder: str):
    """Yield (base_url, process) of `vllm serve` with the key `bench`, once it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server",
               f"--model={model}", "--host=127.0.0.1", f"--port={port}", "--api-key=bench",
               "--max-model-len=128",
               f"--max-num-seqs={slots}", "--dtype=float32", "--disable-log-stats"]  # fmt: skip
    environment = dict(os.environ)
    if on_cpu():  # as in vllm_start
        config = load_config(model)
        memory = kv_bytes(config, slots * 128, "float32")
        command += ["--enforce-eager", f"--kv-cache-memory-bytes={memory}", "--block-size=32",
                    "--no-enable-chunked-prefill", "--max-num-batched-tokens=2048"]  # fmt: skip
        environment |= {"TORCH_COMPILE_DISABLE": "1", "GLOO_SOCKET_IFNAME": "lo",
                        "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    with (
        open(Path(folder) / "vllm.log", "wb") as log,
        subprocess.Popen(command, stdout=log, stderr=log, env=environment) as process,
    ):
        try:
            while True:
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(f"{url}/health")
                    break
                assert process.poll() is None, Path(folder, "vllm.log").read_text()[-2000:]
                time.sleep(0.5)
            yield f"{url}/v1", psutil.Process(process.pid)
        finally:
            process.terminate()


def with_core(server: psutil.Process) -> list[psutil.Process]:
    """Return a server and its EngineCore, the largest process that it started."""
    return [server, max(server.children(recursive=True), key=lambda p: p.memory_info().rss)]


def cpu_seconds(processes: list[psutil.Process]) -> np.ndarray:
    """Return the CPU time of each process so far."""
    return np.array([sum(process.cpu_times()[:2]) for process in processes])


async def compare(urls: dict[str, tuple[str, str, list[str]]], processes: dict, args) -> None:
    """Print the table of both."""
    body = {"max_tokens": args.tokens, "min_tokens": args.tokens, "temperature": 0}
    body |= {"stream": True} if args.stream else {}
    rounds = []
    for round_ in range(-1, args.rounds):
        row = {}
        for side in list(urls)[:: 1 if round_ % 2 else -1]:
            before = cpu_seconds(processes[side])
            seconds, total = await calls(*urls[side], args.calls, args.at_once, body)
            cpu = (cpu_seconds(processes[side]) - before) / args.calls
            rate = args.calls * args.tokens / total
            row[side] = (statistics.median(seconds) * 1e3, rate, *(cpu * 1e3))
        rounds += [row] * (round_ >= 0)
    print(f"{'':10}{'p50 ms':>10}{'tokens/s':>10}   cpu ms: gateway, server, EngineCore")
    for side in urls:
        p50, rate, *cpu = map(statistics.median, zip(*(r[side] for r in rounds), strict=True))
        cells = "".join(f"{ms:10.2f}" for ms in ([0.0] * (3 - len(cpu)) + cpu))
        print(f"{side:10}{p50:10.1f}{rate:10.0f}{'':6}{cells}")
    over = sorted(r["gateway"][0] - r["vllm"][0] for r in rounds)
    share = sorted(r["gateway"][1] / r["vllm"][1] for r in rounds)
    print(f"overhead p50 {statistics.median(over):.1f} ms ({over[0]:.1f} … {over[-1]:.1f})")
    print(f"share of tokens/s {statistics.median(share):.3f} ({share[0]:.3f} … {share[-1]:.3f})")


async def hold(url: str, keys: list[str], process, args) -> None:
    """Print the results of many sessions that are asked at once, each by a stream."""
    body = {"max_tokens": args.tokens, "temperature": 0, "stream": True}
    before = process.memory_info().rss
    _, total = await calls(url, "m", keys, len(keys), len(keys), body)
    grown = (process.memory_info().rss - before) / 2**20
    print(f"{len(keys)} sessions at once: all answered in {total:.1f} s, +{grown:.0f} MB")


def main() -> None:
    """Run one of the two comparisons."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="rlx:arithmetic")
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument("--calls", type=int, default=320, help="of each side in a round")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--sessions", type=int, default=0)
    args = parser.parse_args()
    model = resolve(args.model, "--model")
    keys = [f"sk-{k}" for k in range(args.sessions or 1)]
    options = {"slots": args.slots, "max_model_len": 128, "token": "bench"}
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalServers(model, workdir=folder, engine="vllm", **options) as servers,
    ):
        (address,) = servers.wait()
        with gateway(model, address, "bench", keys, folder) as (url, process):
            if args.sessions:
                return asyncio.run(hold(url, keys, process, args))
            (server,) = (p for p in psutil.Process().children() if "rlx.serve" in p.cmdline())
            with vllm_serve(model, args.slots, folder) as (own, rival):
                urls = {"vllm": (own, str(model), ["bench"]), "gateway": (url, "m", keys)}
                processes = {"vllm": with_core(rival), "gateway": [process, *with_core(server)]}
                asyncio.run(compare(urls, processes, args))


if __name__ == "__main__":
    main()
