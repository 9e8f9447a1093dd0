"""The value loss of PPO's critic, as sums on packed rows."""

from collections.abc import Mapping

from rlx.algorithms.algorithm import Algorithm
from rlx.algorithms.array_ops import Array, ops_of, same_shape


def value_loss(
    values_BT: Array, batch: Mapping[str, Array], algorithm: Algorithm
) -> tuple[Array, dict[str, Array]]:
    """Return the value loss over trained tokens as a sum, and stats as sums.

        ½·max((V − R)², (clip(V, V_b ± value_clip) − R)²)

    The clip is PPO's for values: as in the authors' code, not in 1707.06347 itself.

    Args:
      values_BT: [B, T] float32, V of the state in which token t was chosen; differentiated.
      batch: all [B, T]: loss_mask bool; values (V_b, from before the batch's first update) and
        returns float32.
      algorithm: `value_clip` is ε_v; 0 is no clip.

    Returns:
      The summed loss, float32 scalar, and stats as sums: value_loss, value (mean V), value_error
      (V − R, squared), value_clip_ratio.
    """
    mask, ops = batch["loss_mask"], ops_of(values_BT)
    lib = ops.lib
    same_shape(values_BT, mask, batch["values"], batch["returns"])
    value = lib.where(mask, ops.float32(values_BT), 0.0)
    target = lib.where(mask, batch["returns"], 0.0)
    plain = (value - target) ** 2
    square, clipped = plain, lib.zeros_like(mask)
    if algorithm.value_clip:
        before = lib.where(mask, batch["values"], 0.0)
        held = lib.clip(value, before - algorithm.value_clip, before + algorithm.value_clip)
        square = lib.maximum(plain, (held - target) ** 2)
        clipped = square > plain
    loss = 0.5 * lib.sum(square)
    stats = {
        "value_loss": loss,
        "value": value,
        "value_error": plain,
        "value_clip_ratio": clipped & mask,
    }
    return loss, ops.totals(stats)
