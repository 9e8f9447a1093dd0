"""Run by buckets_test: the bytes of an export on a mesh of 8 devices, the memory of one on one."""

import dataclasses
import json
import os
import re
import tempfile
from pathlib import Path

import jax

from rlx.fleet import publish
from rlx.model import lora, sharding
from rlx.model import params as parameters
from rlx.model.buckets import Merge, export
from rlx.model.model_config import ModelConfig

CONFIG = ModelConfig(
    "Qwen2ForCausalLM", vocab_size=64, num_layers=3, model_dim=32, mlp_dim=64, num_heads=4,
    num_kv_heads=2, head_dim=8, tie_embeddings=False, attention_bias=True,
)  # fmt: skip
TARGETS = lora.LoraConfig(4, 8.0)


def main():
    if jax.device_count() == 8:
        print(json.dumps(on_a_mesh()))
    else:
        print(json.dumps(memory()))


def raw(buckets):
    return [(name, x.tobytes()) for name, x in buckets.arrays().items()]


def on_a_mesh():
    mesh, rows = sharding.make_mesh("fsdp:4,tensor:2"), parameters.table(CONFIG)
    params = parameters.init(CONFIG, jax.random.key(0))
    adapters = jax.tree.map(
        lambda x: jax.random.normal(jax.random.key(1), x.shape),
        parameters.shapes(CONFIG, rows=lora.table(CONFIG, TARGETS)),
    )
    cut = jax.device_put(params, sharding.named_shardings(CONFIG, mesh))
    cut_adapters = jax.device_put(
        adapters, sharding.named_shardings(CONFIG, mesh, lora.table(CONFIG, TARGETS))
    )
    assert not cut["layers"]["q"].is_fully_replicated
    equal = [
        raw(export(params, rows, dtype)) == raw(export(cut, rows, dtype, mesh=mesh, size=size))
        for dtype in ("bfloat16", "float32")
        for size in (1, 20_000, 1 << 30)
    ]
    one = export(params, rows, "bfloat16", merge=Merge(adapters, TARGETS))
    several = export(cut, rows, "bfloat16", merge=Merge(cut_adapters, TARGETS), mesh=mesh, size=1)
    return {"equal": all(equal), "merged equal": raw(one) == raw(several)}


def memory():
    """Publish a model of many buckets by path; how far does it raise this process's memory?"""
    config = dataclasses.replace(
        CONFIG, vocab_size=4096, num_layers=32, model_dim=512, mlp_dim=2048, head_dim=128
    )
    rows, bucket = parameters.table(config), 8 << 20
    params = jax.block_until_ready(parameters.init(config, jax.random.key(0)))
    with tempfile.TemporaryDirectory() as directory:
        # Programs are compiled, and their memory is taken, before it is measured.
        publish.stage(1, export(params, rows, "bfloat16", size=bucket), "path", directory).close()
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM from here
        before = status("VmRSS")
        staged = publish.stage(2, export(params, rows, "bfloat16", size=bucket), "path", directory)
        size = os.path.getsize(staged.path)
        staged.close()
    return {"peak": status("VmHWM") - before, "bucket": bucket, "model": size}


def status(name):
    text = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(rf"{name}:\s+(\d+) kB", text)[1])


if __name__ == "__main__":
    main()
