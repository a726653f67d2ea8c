"""The squared error of a layer without an activation, as a quadratic function of its weights.

The rise of the error depends on the input rows only through sums of products, so the effect of a
changed weight is known without running the layer.
"""

from dataclasses import dataclass

import torch

SWEEPS = 20  # most sweeps over the inputs; most layers need fewer than ten


@dataclass(frozen=True)
class Quadratic:
    """The mean squared error of a layer's outputs, as a function of its weights.

    Attributes:
        weights: the FP32 weights, [groups, channels of a group, inputs].
        products: products of two inputs, [groups, inputs, inputs], summed over the rows and divided
            by the number of all outputs.
        slope: half the gradient of the error at `weights`, in the shape of `weights`. With inputs
            from rounded layers, the slope is generally not 0.
    """

    weights: torch.Tensor
    products: torch.Tensor
    slope: torch.Tensor

    def rise(self, weights: torch.Tensor) -> torch.Tensor:
        """Return the increase of each channel's error with changed weights.

        The shape is [..., groups, channels of a group].

        Args:
            weights: [..., groups, channels of a group, inputs].
        """
        change = weights - self.weights
        return (change * (change @ self.products + 2 * self.slope)).sum(dim=-1)

    def descend(
        self, lower: torch.Tensor, step: torch.Tensor, starts: torch.Tensor
    ) -> torch.Tensor:
        """Return the best choice of levels that coordinate descent finds: 0 for lower, 1 for upper.

        From each start, weights move to their other level if that lowers the error, until no weight
        moves or `SWEEPS` sweeps have passed. The best result is taken for each output channel
        separately, because the channels' errors are independent.

        Args:
            lower: the weights of the lower levels, [output channels, ...].
            step: the weights of the upper levels minus `lower`.
            starts: initial choices, [starts, output channels, ...].
        """
        shape = self.weights.shape
        lower = lower.reshape(shape)
        step = step.reshape(shape)
        ups = starts.reshape(-1, *shape)
        slope = (lower + step * ups - self.weights) @ self.products + self.slope
        for _ in range(SWEEPS):
            before = ups
            ups = ups.clone()
            for index in range(ups.shape[3]):
                # Move a weight if the quadratic error falls, and update the slope of the others
                moves = step[..., index] * (1 - 2 * ups[..., index])
                curve = self.products[:, None, index, index]
                rises = moves * (2 * slope[..., index] + moves * curve)
                better = (rises < 0).nonzero().unbind(1)
                slope[better] += moves[better][:, None] * self.products[better[1], index]
                ups[(*better, index)] = 1 - ups[(*better, index)]
            if torch.equal(ups, before):
                break

        # Take the best start for each channel
        best = self.rise(lower + step * ups).argmin(dim=0)
        return ups.take_along_dim(best[None, ..., None], dim=0).reshape(starts.shape[1:])
