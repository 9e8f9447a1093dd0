"""What of a layer is kept for the backward pass; the rest of it is computed again there.

A token's floats that a layer keeps, and its products that are computed again (2 FLOPs a weight;
the attention of a token to T/2 others on average):

    remat      kept besides the input (D)                            computed again
    none       every intermediate: about 7 D + 4 q + 2 kv + 3 F      nothing
    dots       q + 2 kv, attention's q, o's D, gate and up's 2 F     nothing but what is elementwise
    attention  q + 2 kv, attention's q                               o's 2 q D, gate and up's 4 D F
    full       nothing                         these, 2 D (q + 2 kv), and attention's 2 q T

D model width, q and kv the width of all query and key heads, F MLP width. Beside attention's
output stands a float32 log-normaliser a head (one a head and segment bucket for cuDNN).
"""

from collections.abc import Callable
from typing import Any

KEPT: dict[str, tuple[str, ...]] = {  # names that the decoder and attention give their results
    "dots": ("qkv", "attention", "o", "mlp"),
    "attention": ("qkv", "attention"),
    "full": (),
}


def policy(remat: str) -> Callable[..., Any]:
    """Return JAX's policy of a key of KEPT."""
    import jax

    from rlx.model.packed_attention import KERNEL

    named = jax.checkpoint_policies.save_only_these_names(*KEPT[remat])

    def kernel(primitive: Any, *_: Any, **__: Any) -> bool:  # has no name of ours inside
        return "attention" in KEPT[remat] and primitive.name == KERNEL

    return jax.checkpoint_policies.save_from_both_policies(named, kernel)
