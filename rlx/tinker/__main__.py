"""`python -m rlx.tinker --model=DIR --port=8400`: the API of Tinker, for its own client.

It trains LoRA adapters of one base model for many clients, and samples from them by servers that it
starts, or by running ones (--servers). Once it answers it prints one JSON line with its base_url.
SIGTERM or SIGINT ends it.
"""

import asyncio
from pathlib import Path
from typing import Any

from rlx.base import UserError
from rlx.cli import command
from rlx.doctor import failures
from rlx.fleet import adapter
from rlx.fleet.client import Fleet
from rlx.model.directory import at_hand, resolve
from rlx.model.tensors import num_bytes
from rlx.run import serving
from rlx.system.threads import in_thread
from rlx.tinker import binary_messages, lora_trainer
from rlx.tinker.samplers import Samplers, engine_options
from rlx.tinker.tinker_api import TinkerApi


def main() -> None:
    """Answer until a signal."""
    p = command.Parser("rlx.tinker", description=__doc__, allow_abbrev=False)
    serving.add_flags(p, port=8400)
    p.add_argument("--trainer", default="jax", choices=("jax", "torch"))
    count = command.number(0)
    p.add_argument("--adapters", type=count, default=0, help="side by side on vLLM; 0: in turns")
    p.add_argument("--budget", type=count, default=8192, help="tokens of a microbatch")
    p.add_argument("--workdir", default="rlx-tinker", help="directory of checkpoints")
    a = serving.parse(p)
    keys, tls = serving.guards(a)
    if a.adapters and a.engine != "vllm" and not a.servers:
        raise UserError(f"--adapters={a.adapters} needs vLLM; give --engine=vllm, or leave it out")
    binary_messages.schema()
    load, model = lora_trainer.trainer_class(a.trainer), resolve(a.model, "--model").absolute()
    names = tuple(dict.fromkeys((a.name or a.model, a.model, str(model))))
    tokenizer = str(model) if at_hand(a.model) else a.model
    directory = Path(a.workdir).absolute()

    async def answer(fleet: Fleet) -> None:
        try:
            base, _ = await asyncio.gather(in_thread(adapter.digest, model), fleet.connect())
            trainer: Any = await in_thread(load, model, a.dtype, fleet.context)
            samplers = Samplers(fleet, base, a.dtype, a.adapters > 0, num_bytes(model))
            api = TinkerApi(trainer, samplers, names, tokenizer, keys, directory, a.budget)
            await serving.answer(api.application, a.host, a.port, tls)
        finally:
            await fleet.close()

    with serving.fleet_of(a, model, **engine_options(a.adapters, directory)) as fleet:
        asyncio.run(answer(fleet))


if __name__ == "__main__":
    command.run(main, explain=failures.explain, teardown=False)
