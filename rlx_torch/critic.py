"""The value loss in torch: as `rlx.algorithms.critic`."""

from collections.abc import Mapping

import torch
from torch import Tensor

from rlx.algorithms.algorithm import Algorithm
from rlx_torch.segments import same_shape


def value_loss(
    values_BT: Tensor, batch: Mapping[str, Tensor], algorithm: Algorithm
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return Σ ½·max((V − R)², (clip(V, V_b ± ε_v) − R)²) over trained tokens, and stats as sums.

    Args:
      values_BT: [B, T] float32, V of the state in which token t was chosen; differentiated.
      batch: all [B, T]: loss_mask bool; values (V_b) and returns float32.
      algorithm: `value_clip` is ε_v; 0 is no clip.
    """
    mask = batch["loss_mask"]
    same_shape(values_BT, mask, batch["values"], batch["returns"])
    value = torch.where(mask, values_BT.float(), 0.0)
    target = torch.where(mask, batch["returns"], 0.0)
    plain = (value - target) ** 2
    square, clipped = plain, torch.zeros_like(mask)
    if algorithm.value_clip:
        before = torch.where(mask, batch["values"], 0.0)
        held = value.clamp(before - algorithm.value_clip, before + algorithm.value_clip)
        square = torch.maximum(plain, (held - target) ** 2)
        clipped = square > plain
    loss = 0.5 * square.sum()
    stats = {
        "value_loss": loss,
        "value": value,
        "value_error": plain,
        "value_clip_ratio": clipped & mask,
    }
    return loss, {name: x.detach().sum(dtype=torch.float32) for name, x in stats.items()}
