"""XLA's flags for training on CUDA, to set before JAX makes its backends. No JAX here.

They overlap collectives with matrix products (latency hiding), two at a time, also across the
layers of a scanned stack (pipelining). An unknown flag ends a process of XLA; VERSIONS know all
of FLAGS.
"""

from collections.abc import MutableMapping
from importlib.metadata import version
from importlib.util import find_spec

FLAGS = (
    "--xla_gpu_enable_latency_hiding_scheduler=true",
    "--xla_gpu_enable_pipelined_all_gather=true",
    "--xla_gpu_enable_pipelined_reduce_scatter=true",
    "--xla_gpu_enable_pipelined_all_reduce=true",
    "--xla_gpu_experimental_parallel_collective_overlap_limit=2",
)
VERSIONS = ("0.10.", "0.11.", "0.12.")  # of jaxlib
PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")


def add(environment: MutableMapping[str, str]) -> None:
    """Add FLAGS to XLA_FLAGS if JAX may use CUDA; flags that are set already stay."""
    platforms = environment.get("JAX_PLATFORMS") or "cuda"
    if not any(name in platforms for name in ("cuda", "gpu")) or not any(map(find_spec, PLUGINS)):
        return
    present = environment.get("XLA_FLAGS", "")
    if version("jaxlib").startswith(VERSIONS):
        missing = (flag for flag in FLAGS if flag.partition("=")[0] not in present)
        environment["XLA_FLAGS"] = " ".join(filter(None, [present, *missing]))
