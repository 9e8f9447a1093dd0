"""Compare peak memory of a 0.5B-shape train step with chunked cross-entropy and with full logits.

    python -m experiments.bench.memory [--tokens=2048] [--chunk=256] [--remat=full]
    python -m experiments.bench.memory --run     # also run each and read its peak resident memory
    python -m experiments.bench.memory --run --variants=torch

Qwen2.5-0.5B's shape (24 layers, 896 wide, vocabulary 151,936, tied), GRPO loss, AdamW, fp32. Each
row is a process of its own. `planned` is the compiler's plan of the whole step: arguments
(parameters and two moments, 5.9 GB), results not written over them, and temporaries. `resident` is
the process's peak while it runs one step, with initialisation; it needs --run. `naive` is
log_softmax over all logits with JAX's own derivative. `torch` is one update of trainer=torch on the
same number of tokens, with a transformers model of that shape; it has no plan.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

GB = 1e9


def naive_logprobs(params, config, batch, *, x, temperature, chunk, layout):
    """Return log-probabilities and entropies from all logits at once."""
    import jax
    import jax.numpy as jnp

    from rlx.model import decoder

    log_p = jax.nn.log_softmax(decoder.unembed(params, config, x[:, :-1]) / temperature)
    picked = jnp.take_along_axis(log_p, batch["tokens"][:, 1:, None], axis=-1)[..., 0]
    entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
    pad = partial(jnp.pad, pad_width=((0, 0), (1, 0)))
    return pad(picked), pad(entropy)


def worker(options: dict) -> dict:
    """Compile the step of one variant, and run it if asked; return bytes."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from experiments.bench.train_step_workers import MODELS
    from rlx.algorithms import presets
    from rlx.config import default
    from rlx.model import decoder, params
    from rlx.train.train_options import OptimizerOptions, TrainOptions
    from rlx.train.update import JaxUpdate

    config, length = default(), options["row"]
    if options["variant"] == "naive":
        decoder.logprobs = naive_logprobs
    model = MODELS[options["model"]]
    chunk = options["chunk"] if options["variant"] == "chunked" else options["tokens"]
    algorithm = presets.resolve(config.algorithm, config.sampling.max_new_tokens)
    clipped = OptimizerOptions(clip_norm=1.0)
    own = TrainOptions(algorithm, clipped, remat=options["remat"], chunk=chunk)
    trainer = JaxUpdate(model, own)
    shape = (options["tokens"] // length, length)
    batch = {name: np.ones(shape, np.float32) for name in ("advantages", "loss_weights")}
    batch["behaviour_logprobs"] = np.full(shape, -np.log(model.vocab_size), np.float32)
    batch["loss_mask"] = np.ones(shape, bool)
    batch["positions"] = np.broadcast_to(np.arange(length, dtype=np.int32), shape)
    for name in ("tokens", "segment_ids", "versions"):
        batch[name] = np.ones(shape, np.int32)

    def make(key):
        return trainer.first_state(params.init(model, key))

    key = jax.random.key(0)
    arguments = (jax.eval_shape(make, key), None, batch, jnp.float32(shape[0]), jnp.bool_(False))
    compiled = jax.jit(trainer.learner.step, donate_argnums=0).lower(*arguments).compile()
    m = compiled.memory_analysis()
    planned = {
        "arguments": m.argument_size_in_bytes,
        "results": m.output_size_in_bytes - m.alias_size_in_bytes,
        "temporaries": m.temp_size_in_bytes,
    }
    out = {"planned": sum(planned.values()), **planned}
    if options["run"]:
        state = jax.jit(make)(key)
        jax.block_until_ready(compiled(state, *arguments[1:]))
        out["resident"] = peak()
    return out


def torch_worker(options: dict) -> dict:
    """Make one update of trainer=torch in one microbatch; return the process's peak, bytes."""
    from experiments.bench.plain_torch import init
    from experiments.bench.train_step_workers import MODELS, make_config, make_groups
    from rlx.train.train_options import TrainOptions
    from rlx_torch.update import TorchUpdate

    model, tokens, length = MODELS[options["model"]], options["tokens"], options["row"]
    shape = {"budget": tokens, "row_buckets": (length,), "compute_dtype": "float32"}
    with tempfile.TemporaryDirectory() as directory:
        init(model).save_pretrained(directory)
        update = TorchUpdate(model, TrainOptions.of(make_config(options | shape)), Path(directory))
        state = update.init()
    update.update(state, make_groups([(1, length - 1)] * (tokens // length), model.vocab_size))
    return {"arguments": update.state_bytes, "resident": peak()}


def peak() -> int:
    """Return the peak memory of this process, bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def cell(row: dict, column: str) -> str:
    """Return a cell of the table, GB, or a dash."""
    return f"{row[column] / GB:13.2f}" if column in row else f"{'-':>13}"


VARIANTS = {"chunked": worker, "whole": worker, "naive": worker, "torch": torch_worker}


def main() -> None:
    """Print a table, one row per variant, GB."""
    if len(sys.argv) == 3 and sys.argv[1] == "--worker":
        options = json.loads(sys.argv[2])
        print(json.dumps(VARIANTS[options["variant"]](options)))
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="0.5b")
    parser.add_argument("--tokens", type=int, default=2048, help="a microbatch's")
    parser.add_argument("--row", type=int, default=512, help="tokens a row")
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--remat", default="full", help="none | dots | attention | full")
    parser.add_argument("--run", action="store_true")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    a = parser.parse_args()
    print(f"# python -m experiments.bench.memory {' '.join(sys.argv[1:])}")
    columns = ("planned", "arguments", "results", "temporaries", *(["resident"] * a.run))
    print(f"{'GB':10}" + "".join(f"{name:>13}" for name in columns), flush=True)
    for variant in a.variants.split(","):
        if variant == "torch" and not a.run:
            continue
        options = json.dumps({**vars(a), "variant": variant})
        command = [sys.executable, "-m", "experiments.bench.memory", "--worker", options]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        row = json.loads(done.stdout.splitlines()[-1])
        print(f"{variant:10}" + "".join(cell(row, c) for c in columns), flush=True)


if __name__ == "__main__":
    main()
