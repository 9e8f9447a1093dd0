"""`python -m rlx.compare --model=DIR --engine=vllm`: an engine's logprobs beside rlx's and HF's.

Starts one local server (or asks the one at --address), has it complete prompts, scores its tokens
with rlx's decoder and, where torch is installed, with transformers. Exit status 1: they differ.
"""

import argparse
import asyncio
import os
import tempfile

from rlx.cli import command
from rlx.fleet import wire
from rlx.fleet.client import Fleet
from rlx.fleet.requests import Sampling
from rlx.fleet.tls import client_tls
from rlx.launch.local import LocalServers


def parser() -> argparse.ArgumentParser:
    """The flags."""
    p = argparse.ArgumentParser("rlx.compare", description=__doc__, allow_abbrev=False)
    p.add_argument("--model", required=True, help="HF directory or hub name")
    p.add_argument("--engine", default="vllm", choices=("jax", "vllm"))
    p.add_argument("--address", default="", help="host:port of a running server of this model")
    p.add_argument("--tls", default="", help="of --address: ca.pem, or ca.pem,cert.pem,key.pem")
    p.add_argument("--prompts", default="", help=".jsonl with `question`, or text, a prompt a line")
    p.add_argument("--count", type=int, default=16, help="prompts at most")
    p.add_argument("--max-new-tokens", type=int, default=64)
    p.add_argument("--temperature", type=float, default=1.0)
    p.add_argument("--top-p", type=float, default=1.0)
    p.add_argument("--top-k", type=int, default=0, help="0: off")
    p.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"), help="engine's")
    p.add_argument("--trainer-dtype", default="float32", choices=("float32", "bfloat16"),
                   help="of rlx and transformers")  # fmt: skip
    p.add_argument("--max-delta", type=float, default=0.0, help="nats; 0: by the dtypes")
    p.add_argument("--mean-delta", type=float, default=0.0, help="nats; 0: by the dtypes")
    return p


def main() -> int:
    """Prints a table; returns 0 when every pair agrees."""
    a = parser().parse_args()
    from rlx.mismatch import compare_table, measure
    from rlx.model import hf
    from rlx.run import inputs

    directory = hf.resolve(a.model, "--model")
    prompts = inputs.read_prompts(a.prompts, inputs.load_tokenizer(directory), a.count)
    sampling = Sampling(a.temperature, a.top_p, a.top_k, a.max_new_tokens, seed=0)
    if a.address:
        tls = client_tls(*[*a.tls.split(","), "", ""][:3])
        fleet = Fleet((a.address,), token=wire.take_token(os.environ), tls=tls)
        completions = asyncio.run(_ask(fleet, prompts, sampling))
    else:
        longest = max(map(len, prompts)) + a.max_new_tokens
        options = {"engine": a.engine, "dtype": a.dtype, "max_model_len": longest, "slots": 16}
        with (
            tempfile.TemporaryDirectory() as workdir,
            LocalServers(directory, workdir=workdir, **options) as servers,
        ):
            completions = asyncio.run(_ask(servers.fleet(), prompts, sampling))
    exact = a.dtype == a.trainer_dtype == "float32"
    tolerance = measure.tolerance(exact, a.max_delta, a.mean_delta)
    case = compare_table.case_of(
        directory, prompts, completions, sampling, tolerance, a.trainer_dtype
    )
    found = compare_table.reports(case, directory)
    command.say(compare_table.table(case, found, a.dtype))
    return 0 if all(report.ok for report in found.values()) else 1


async def _ask(fleet: Fleet, prompts, sampling: Sampling):
    try:
        await fleet.connect()
        return next(iter((await fleet.probe(prompts, sampling)).values()))
    finally:
        await fleet.close()


if __name__ == "__main__":
    command.run(main)
