"""`python -m rlx.compare --model=DIR --engine=vllm`: an engine's logprobs beside rlx's and HF's.

Starts one local server (or asks the one at --address), has it complete prompts, scores its tokens
with rlx's decoder and, where torch is installed, with transformers. Exit status 1: they differ.
"""

import argparse
import asyncio
import dataclasses
import os
import tempfile
from collections.abc import Sequence

from rlx import command
from rlx.fleet import wire
from rlx.fleet.client import Fleet
from rlx.fleet.engine import Sampling
from rlx.launch.local import LocalServers


def main() -> int:
    """Prints a table; returns 0 when every pair agrees."""
    p = argparse.ArgumentParser("rlx.compare", description=__doc__, allow_abbrev=False)
    p.add_argument("--model", required=True, help="HF directory or hub name")
    p.add_argument("--engine", default="vllm", choices=("jax", "vllm"))
    p.add_argument("--address", default="", help="host:port of a running server of this model")
    p.add_argument("--prompts", default="", help=".jsonl with `question`, or text, a prompt a line")
    p.add_argument("--count", type=int, default=16, help="prompts at most")
    p.add_argument("--max-new-tokens", type=int, default=64)
    p.add_argument("--temperature", type=float, default=1.0)
    p.add_argument("--top-p", type=float, default=1.0)
    p.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    p.add_argument("--max-delta", type=float, default=0.0, help="nats; 0: by --dtype")
    a = p.parse_args()
    from rlx import consistency
    from rlx.inputs import load_tokenizer, read_prompts
    from rlx.model import hf

    directory = hf.resolve(a.model, "--model")
    tokenizer = load_tokenizer(directory)
    prompts = read_prompts(a.prompts, tokenizer, a.count)
    sampling = Sampling(
        temperature=a.temperature, top_p=a.top_p, max_new_tokens=a.max_new_tokens, seed=0
    )
    if a.address:
        completions = asyncio.run(_ask((a.address,), prompts, sampling))
    else:
        longest = max(map(len, prompts)) + a.max_new_tokens + 1
        with (
            tempfile.TemporaryDirectory() as workdir,
            LocalServers(
                directory, workdir=workdir, engine=a.engine, dtype=a.dtype, max_model_len=longest
            ) as servers,
        ):
            completions = asyncio.run(_ask(servers.wait(), prompts, sampling))
    tolerance = consistency.EXACT if a.dtype == "float32" else consistency.ROUNDED
    if a.max_delta:
        tolerance = dataclasses.replace(tolerance, max=a.max_delta, mean=a.max_delta)
    table, ok = consistency.table(directory, a.dtype, prompts, completions, sampling, tolerance)
    print(table, flush=True)
    return 0 if ok else 1


async def _ask(addresses: Sequence[str], prompts, sampling: Sampling):
    fleet = Fleet(addresses, token=os.environ.get(wire.TOKEN_VARIABLE))
    try:
        await fleet.connect()
        (completions,) = (await fleet.probe(prompts, sampling)).values()
        return completions
    finally:
        await fleet.close()


if __name__ == "__main__":
    command.run(main)
