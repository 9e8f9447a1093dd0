"""`python -m rlx.tinker --model=DIR --port=8400`: the API of Tinker, for its own client.

It trains LoRA adapters of one base model for many clients, and samples from them by servers that it
starts, or by running ones (--servers). Once it answers it prints one JSON line with its base_url.
SIGTERM or SIGINT ends it.
"""

import asyncio
from functools import partial
from pathlib import Path

from rlx.cli import command
from rlx.doctor import failures
from rlx.model.directory import at_hand, resolve
from rlx.run import serving
from rlx.tinker import binary_messages
from rlx.tinker.tinker_api import TinkerApi, serve, trainer_class


def main() -> None:
    """Answer until a signal."""
    p = command.Parser("rlx.tinker", description=__doc__, allow_abbrev=False)
    serving.add_flags(p, port=8400)
    p.add_argument("--trainer", default="jax", choices=("jax", "torch"))
    p.add_argument("--budget", type=int, default=8192, help="tokens of a microbatch")
    p.add_argument("--workdir", default="rlx-tinker", help="directory of checkpoints")
    a = p.parse_args()
    keys, tls = serving.guards(a)
    serving.require_guarded(a.host, bool(keys and tls))
    binary_messages.schema()
    load, model = trainer_class(a.trainer), resolve(a.model, "--model").absolute()
    make = partial(
        TinkerApi, names=tuple(dict.fromkeys((a.name or a.model, a.model, str(model)))), keys=keys,
        tokenizer=str(model) if at_hand(a.model) else a.model, directory=Path(a.workdir),
        budget=a.budget,
    )  # fmt: skip
    with serving.fleet_of(a, model, publish_dir="/dev/shm") as fleet:
        asyncio.run(serve(fleet, make, load, model, a.dtype, a.host, a.port, tls))


if __name__ == "__main__":
    command.run(main, explain=failures.explain, teardown=False)
