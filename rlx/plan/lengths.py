"""Lengths of answers: what decides how long the last one is waited for."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from random import Random
from statistics import NormalDist

from rlx.base import UserError

_POINTS = 1000
_LEAST_CUT = 1e-3  # share cut where none is known to be: a log-normal tail always meets the limit


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution by its quantiles, ascending and evenly spaced."""

    quantiles: tuple[float, ...]

    @classmethod
    def fit(cls, mean: float, limit: int, cut: float) -> "Lengths":
        """Return a log-normal one of this mean, tokens, with a share `cut` in [0, 1) at `limit`.

        The mean includes these. UserError if no log-normal distribution has this mean and share.
        """
        normal, cut = NormalDist(), max(cut, _LEAST_CUT)
        z = normal.inv_cdf(1 - cut)

        def mean_of(sigma: float) -> float:
            below = math.exp(math.log(limit) - sigma * z + sigma**2 / 2) * normal.cdf(z - sigma)
            return below + limit * cut

        low, high = 0.0, 6.0
        if not mean_of(high) < mean < mean_of(1e-6):
            raise UserError(
                f"no answers of {mean:g} tokens on average have {cut:.1%} at the limit of {limit}; "
                f"give a mean between {mean_of(high):.0f} and {mean_of(1e-6):.0f}, or another share"
            )
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if mean_of(middle) > mean else (low, middle)
        center = math.log(limit) - low * z
        shares = [(i + 0.5) / _POINTS for i in range(_POINTS)]
        found = (math.exp(center + low * normal.inv_cdf(share)) for share in shares)
        return cls(tuple(min(max(one, 1.0), float(limit)) for one in found))

    @classmethod
    def measured(cls, lengths: Iterable[float]) -> "Lengths":
        """Return the distribution of lengths that were seen, at least one."""
        return cls(tuple(sorted(float(n) for n in lengths)))

    @property
    def mean(self) -> float:
        """Mean, tokens."""
        return sum(self.quantiles) / len(self.quantiles)

    def draw(self, random: Random) -> float:
        """Return one length, tokens."""
        return self.quantiles[int(random.random() * len(self.quantiles))]
