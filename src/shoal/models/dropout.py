"""Dropout whose mask follows from the key of the step, so that stacked and single clients give the same results."""

from __future__ import annotations

from torch import Tensor, nn

from shoal.rng import uniform


class KeyedDropout(nn.Module):
    """Dropout with probability `p`. Without a key, as in evaluation, it is the identity.

    Parameters
    ----------
    p
        The probability that a value becomes 0.
    stream
        A number that is different for each dropout layer of a network.
    """

    def __init__(self, p: float, stream: int) -> None:
        super().__init__()
        self.p, self.stream = p, stream

    def forward(self, x: Tensor, key: Tensor | None = None) -> Tensor:
        """Returns the inputs, with random zeros if there is a key."""
        if key is None or self.p == 0:
            return x
        keep = uniform(key, tuple(x.shape), self.stream) >= self.p
        return x * keep / (1 - self.p)
