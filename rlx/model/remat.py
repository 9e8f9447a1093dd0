"""Rematerialisation: parts of a layer that are kept for the backward pass, which recomputes others.

Floats kept for each token and layer, and products computed again (2 FLOPs a weight; a token attends
to T/2 others on average):

    remat      kept besides the input (D)                            computed again
    none       every intermediate: about 7 D + 4 q + 2 kv + 3 F      nothing
    dots       q + 2 kv, attention's q, o's D, gate and up's 2 F     nothing but what is elementwise
    up         q + 2 kv, attention's q, up's F                       o's 2 q D, gate's 2 D F
    attention  q + 2 kv, attention's q                               o's 2 q D, gate and up's 4 D F
    full       nothing                         these, 2 D (q + 2 kv), and attention's 2 q T

D model width, q and kv the width of all query and key heads, F MLP width. Attention's output comes
with a float32 log-normaliser a head (for cuDNN, a head and segment bucket).
"""

from collections.abc import Callable
from typing import Any

KEPT: dict[str, tuple[str, ...]] = {  # remat → names of results in the decoder and attention
    "dots": ("qkv", "attention", "o", "gate", "up"),
    "up": ("qkv", "attention", "up"),
    "attention": ("qkv", "attention"),
    "full": (),
}
UNROLLED = ("none", "dots")  # on a GPU, layers are not in a loop, which would copy what they keep


def policy(remat: str) -> Callable[..., Any]:
    """Return JAX's checkpoint policy for a key of KEPT."""
    import jax

    from rlx.model.packed_attention import KERNEL

    by_name = jax.checkpoint_policies.save_only_these_names(*KEPT[remat])

    def kernel(primitive: Any, *_: Any, **__: Any) -> bool:  # results inside it have no names
        return "attention" in KEPT[remat] and primitive.name == KERNEL

    return jax.checkpoint_policies.save_from_both_policies(by_name, kernel)
