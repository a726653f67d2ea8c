"""Fake quantization in torch: rounds floats to the values that the levels of a grid stand for.

The gradient of rounding, which is zero almost everywhere, is replaced by 1 (straight-through:
Bengio et al., "Estimating or Propagating Gradients Through Stochastic Neurons for Conditional
Computation", 2013).
"""

from typing import Any

import torch
from torch import nn

from resnet8ptq.calibration.statistics import Range
from resnet8ptq.precision.grid import ActivationScheme, WeightScheme


class FakeQuantize(nn.Module):  # type: ignore[misc]
    """Rounds activations to the levels of a learned range.

    The module learns the logarithm of each end's growth factor, so one learning rate fits ranges of
    any size (Jain et al., "Trained Quantization Thresholds for Accurate and Efficient Fixed-Point
    Inference of Deep Neural Networks", MLSys 2020). No end crosses zero, so zero stays a level.

    Attributes:
        drop: probability that a value is not rounded, see `corrections.reconstruction`.
    """

    drop = 0.0

    def __init__(self, initial: Range, scheme: ActivationScheme) -> None:
        super().__init__()
        low = min(initial[0], 0.0)
        high = max(initial[1], 0.0)
        if high - low < 2**8 * torch.finfo(torch.float32).tiny:  # its steps would underflow
            low = 0.0
            high = 1.0
        self.scheme = scheme
        self.register_buffer("initial", torch.tensor([low, high]))  # [2]
        self.log_growth = nn.Parameter(torch.zeros(2))

    def ends(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both ends of the range as differentiable tensors."""
        low, high = self.initial * self.log_growth.exp()
        if self.scheme.symmetric:
            high = torch.maximum(-low, high)
            low = -high
        return low, high

    def range(self) -> Range:
        """Return both ends of the range as numbers."""
        low, high = self.ends()
        return float(low.detach()), float(high.detach())

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return each value rounded to a level of the range; with `drop`, some stay exact."""
        rounded = Round.apply(values, *self.ends(), self.scheme.steps)
        if not self.drop:
            return rounded
        return drop_rounding(rounded, values, self.drop)


def drop_rounding(rounded: torch.Tensor, exact: torch.Tensor, probability: float) -> torch.Tensor:
    """Return rounded values; each is replaced by its exact value with this probability.

    Integer tensors, such as tokens, are returned unrounded.
    """
    if not exact.is_floating_point():
        return exact
    # A mask of 1 and 0 takes half the time of torch.where with a comparison (torch 2.13)
    kept = torch.rand_like(exact).add_(probability).floor_()
    return rounded.lerp(exact, kept)


class Round(torch.autograd.Function):  # type: ignore[misc]
    """Rounds to `steps + 1` levels, with gradients for the values and both ends of the range.

    The gradients of the ends follow Esser et al., "Learned Step Size Quantization", ICLR 2020.
    Within the range, d(rounded)/d(scale) is the rounding error in steps. Beyond the range, the
    rounded value counts as the end of the range, which then has the gradient 1.
    """

    @staticmethod
    def forward(
        ctx: Any, values: torch.Tensor, low: torch.Tensor, high: torch.Tensor, steps: int
    ) -> torch.Tensor:
        """Return the nearest level of each value."""
        # Compute in place where possible, because memory traffic takes much of a training step.
        scale = (high - low) / steps
        zero_point = float(torch.round(-low / scale))
        levels = torch.div(values, scale).round_()
        rounded = levels.clamp_(-zero_point, steps - zero_point).mul_(scale)
        ctx.save_for_backward(values, rounded)
        ctx.ends = float(low), float(high)
        return rounded

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of values, low and high; None for steps."""
        values, rounded = ctx.saved_tensors
        low, high = ctx.ends
        inside = values.clamp(low, high) == values
        within = gradient * inside
        scaled = (within * (rounded - values)).sum() / (high - low)

        # Split the gradients of clipped values between both ends
        beyond = gradient.sum() - within.sum()
        above = beyond
        if low < 0:  # otherwise no values lie below the range
            above = (gradient * (values > high)).sum()
        return within, beyond - above - scaled, above + scaled, None


class FakeQuantizeWeight(nn.Module):  # type: ignore[misc]
    """Rounds weights [out, ...] to the grid of their current range."""

    def __init__(self, scheme: WeightScheme) -> None:
        super().__init__()
        self.scheme = scheme

    def forward(self, weights: torch.Tensor) -> torch.Tensor:
        """Return the rounded weights; their gradient passes to the weights unchanged."""
        array = weights.detach().cpu().numpy()
        grid = self.scheme.grid(array, axis=0)
        rounded = torch.from_numpy(grid.round(array)).to(weights.device)
        return weights + (rounded - weights).detach()


class FakeQuantizeNarrowWeight(nn.Module):  # type: ignore[misc]
    """Rounds weights [out, ...] to few levels with a learned step (Esser et al., see `Round`).

    The module learns the logarithm of the step's growth factor, as `FakeQuantize` does for ends.
    The step is limited so that the largest absolute weight gets the last level. `WeightScheme.grid`
    then derives the same step from the rounded weights.
    """

    def __init__(self, scheme: WeightScheme, weights: torch.Tensor) -> None:
        super().__init__()
        self.highest = scheme.levels[1]
        # The axes that share a step; torch takes none as all
        self.dims = tuple(range(1, weights.ndim)) if scheme.per_channel else ()
        step = scheme.grid(weights.detach().numpy(), axis=0).scale
        self.register_buffer("initial", torch.from_numpy(step))  # [out, 1, ..] or [1, 1, ..]
        self.log_growth = nn.Parameter(torch.zeros_like(self.initial))

    def forward(self, weights: torch.Tensor) -> torch.Tensor:
        """Return the rounded weights, with gradients for the weights and the step."""
        largest = weights.detach().abs().amax(self.dims, keepdim=True) / self.highest
        bound = largest.clamp(min=torch.finfo(torch.float32).tiny)  # zeros accept any step
        step = torch.minimum(self.initial * self.log_growth.exp(), bound)
        levels = (weights / step).clamp(-self.highest, self.highest)
        return (levels + (levels.round() - levels).detach()) * step
