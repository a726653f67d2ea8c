"""AdaRound: each weight is rounded up or down for the least error of the layer's output.

Nagel et al., "Up or Down? Adaptive Rounding for Post-Training Quantization", ICML 2020.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import torch
from numpy.typing import NDArray

from resnet8ptq.core import memory
from resnet8ptq.core.console import track
from resnet8ptq.corrections import layers
from resnet8ptq.corrections.layers import Setting
from resnet8ptq.corrections.walk import Walk
from resnet8ptq.corrections.windows import count_positions, sample_windows
from resnet8ptq.graph.layers import attribute, consumers
from resnet8ptq.graph.weights import Array, read_bias, read_weights, write_weights
from resnet8ptq.precision.grid import WeightScheme
from resnet8ptq.precision.plan import Plan

SAMPLES = 16_000  # rows that a layer learns from, or a step's budget, drawn from all images alike
BATCH = 512  # rows
LEARNING_RATE = 0.1
STRETCH = (-0.1, 1.1)  # gamma and zeta of the rectified sigmoid, equation 23
BETA = (20.0, 2.0)  # of the regularizer, equation 24; annealed from the one to the other
WARM_UP = 0.2  # share of the iterations without regularizer
_TOLERANCE = 1e-3  # levels
REGULARIZER = 10.0  # its weight, beside an error of 1 for nearest rounding


@dataclass(frozen=True)
class Problem:
    """One layer's rounding: rows [groups, n, inputs], outputs [groups, n, channels of a group]."""

    inputs: torch.Tensor  # behind layers that are already rounded
    targets: torch.Tensor  # of the FP32 network, behind the ReLU where one follows
    bias: torch.Tensor  # [groups, 1, channels of a group]
    relu: bool

    def error(
        self, weights: torch.Tensor, rows: torch.Tensor | slice = slice(None)
    ) -> torch.Tensor:
        """Return the mean squared error of the outputs; weights [output channels, ...]."""
        matrix = _matrix(weights, len(self.inputs))
        outputs = torch.baddbmm(self.bias, self.inputs[:, rows], matrix)
        return (outputs.relu() if self.relu else outputs).sub(self.targets[:, rows]).square().mean()


def round_weights(
    proto: onnx.ModelProto, setting: Setting, iterations: int, seed: int
) -> onnx.ModelProto:
    """Return the network with weights that nearest rounding takes to the learned levels.

    Layer by layer: the inputs of a layer come from the network whose earlier layers are rounded,
    its target from the FP32 network (equation 25). Grouped convolutions are rounded like others.
    Reproducible by `seed`, on the same number of threads.
    """
    torch.set_num_threads(setting.runtime.threads)
    result, simulated = copy.deepcopy(proto), copy.deepcopy(proto)
    twins = layers.find(simulated.graph, setting.selection)
    exact = setting.walk(proto)
    walks = exact, exact.beside(simulated)
    for index, (name, node) in enumerate(layers.find(result.graph, setting.selection).items()):
        random, label = np.random.default_rng([seed, index]), _label(name, index, len(twins))
        scheme, weights = setting.weights.scheme(name), read_weights(proto.graph, node)
        problem = _pose(proto, walks, node, setting, random, label)
        levels = learn_levels(problem, weights, scheme, iterations, random, label)
        placed = place(weights, levels, scheme)
        write_weights(result.graph, node, placed)
        write_weights(simulated.graph, twins[name], placed)
        layers.round_weights(simulated.graph, twins[name], scheme)
    return result


def learn_apart(
    proto: onnx.ModelProto, setting: Setting, widths: Sequence[int], iterations: int, seed: int
) -> dict[tuple[str, int], Array]:
    """Return the weights of each layer, by name and bits, with all other layers in float.

    Nearest rounding takes them to the learned levels.
    """
    torch.set_num_threads(setting.runtime.threads)
    walk, found = setting.walk(proto), {}
    walks, nodes = (walk, walk.beside(proto)), layers.find(proto.graph, setting.selection)
    for index, (name, node) in enumerate(nodes.items()):
        random, weights = np.random.default_rng([seed, index]), read_weights(proto.graph, node)
        label = _label(name, index, len(nodes))
        problem = _pose(proto, walks, node, setting, random, label)
        for bits in widths:
            scheme = Plan(setting.weights.default, {name: bits}).scheme(name)
            narrow = f"{label}: {bits} bits"
            levels = learn_levels(problem, weights, scheme, iterations, random, narrow)
            found[name, bits] = place(weights, levels, scheme)
    return found


def _label(name: str, index: int, count: int) -> str:
    return f"AdaRound {index + 1} of {count}: {name}"


def _pose(
    fp32: onnx.ModelProto,
    walks: Sequence[Walk],
    node: onnx.NodeProto,
    setting: Setting,
    random: np.random.Generator,
    label: str,
) -> Problem:
    """Draw rows of inputs at the same positions in both networks: FP32's and the rounded one."""
    weights = read_weights(fp32.graph, node)
    groups, width = int(attribute(node, "group", 1)), weights[0].size
    most = min(SAMPLES, memory.fitting(weights[0].nbytes * groups, memory.step()))
    each = -(-most // len(setting.images))  # positions of an image
    found: list[Array] = []  # of both networks [groups, n, width]; in place, since they are large
    done = 0
    label = f"{label}: inputs"
    for walk in walks:
        walk.to(node, label)
    batches = (walk.run([node.input[0]], label if walk is walks[0] else None) for walk in walks)
    for tensors in zip(*batches, strict=True):
        images = tensors[0][0]
        there = count_positions(images, node, weights)
        drawn = random.random((len(images), there)).argsort(axis=1)[:, :each]  # without replacement
        if not found:
            shape = groups, len(setting.images) * drawn.shape[1], width
            found = [np.empty(shape, np.float32) for _ in walks]
        for rows, [inputs] in zip(found, tensors, strict=True):
            rows[:, done : done + drawn.size] = sample_windows(inputs, node, weights, drawn)
        done += drawn.size
    bias = torch.from_numpy(read_bias(fp32.graph, node).reshape(groups, 1, -1))
    relu = [reader.op_type for reader in consumers(fp32.graph, node.output[0])] == ["Relu"]
    exact, rounded = map(torch.from_numpy, found)
    targets = torch.baddbmm(bias, exact, _matrix(torch.from_numpy(weights), groups))
    return Problem(rounded, targets.relu() if relu else targets, bias, relu)


def _matrix(weights: torch.Tensor, groups: int) -> torch.Tensor:
    """Turn [output channels, ...] into [groups, inputs, channels of a group]."""
    return weights.reshape(groups, len(weights) // groups, -1).transpose(1, 2).contiguous()


@dataclass(frozen=True)
class Choices:
    """Between a lower and an upper level of each weight [output channels, ...].

    Attributes:
        floor: the lower level, counted from the zero_point.
        step: from the lower level to the upper; 0 where the level is settled.
        fraction: how far the weight lies above the lower level.
    """

    scale: torch.Tensor
    floor: torch.Tensor
    step: torch.Tensor
    fraction: torch.Tensor

    def weights(self, up: torch.Tensor) -> torch.Tensor:
        """Return the weights; `up` is 0 for the lower level, 1 for the upper."""
        return self.scale * (self.floor + self.step * up)

    def levels(self, up: torch.Tensor) -> NDArray[np.int64]:
        """Return the levels, counted from the zero_point."""
        return (self.floor + self.step * up).numpy().astype(np.int64)

    def start(self) -> torch.Tensor:
        """Return values that `rectify` takes to the fractions."""
        gamma, zeta = STRETCH
        return ((self.fraction - gamma) / (zeta - gamma)).logit()


def find_choices(weights: Array, scheme: WeightScheme) -> Choices:
    """Return the two levels around each weight [output channels, ...] on its scheme's grid."""
    grid, kept = scheme.grid(weights, 0), find_kept(weights, scheme)
    nearest = grid.quantize(weights)
    floor = np.floor(weights / grid.scale)
    edge = 0 if scheme.clips else 1  # see `find_kept`
    inner = grid.lowest + edge - grid.zero_point, grid.highest - edge - grid.zero_point
    low = np.where(kept, nearest - grid.zero_point, np.clip(floor, *inner))
    high = np.where(kept, low, np.clip(floor + 1, *inner))
    fraction = np.clip(weights / grid.scale - floor, 0, 1)
    arrays = (grid.scale, low, high - low, fraction)
    return Choices(*(torch.from_numpy(array.astype(np.float32)) for array in arrays))


def rectify(value: torch.Tensor) -> torch.Tensor:
    """Return the stretched sigmoid, cut to 0 to 1: equation 23."""
    gamma, zeta = STRETCH
    return (value.sigmoid() * (zeta - gamma) + gamma).clamp(0, 1)


def regularize(shares: Sequence[torch.Tensor], done: float) -> torch.Tensor:
    """Return what drives each share to 0 or 1, equation 24; `done` of the iterations, 0 to 1."""
    progress = (done - WARM_UP) / (1 - WARM_UP)
    if progress < 0:
        return torch.zeros(())
    beta = BETA[1] + (BETA[0] - BETA[1]) * (1 + np.cos(np.pi * progress)) / 2
    means = [(1 - (2 * share - 1).abs().pow(beta)).mean() for share in shares]
    return REGULARIZER * torch.stack(means).sum()


def learn_levels(
    problem: Problem,
    weights: Array,
    scheme: WeightScheme,
    iterations: int,
    random: np.random.Generator,
    label: str,
) -> NDArray[np.int64]:
    """Return the levels of the weights [output channels, ...] that reproduce the layer's output.

    The nearest levels where nothing better is found.
    """
    grid, choices = scheme.grid(weights, 0), find_choices(weights, scheme)
    nearest = grid.quantize(weights)
    up = _learn(problem, choices, iterations, random, label)
    levels = choices.levels(up) + grid.zero_point
    learned, rounded = (
        problem.error(torch.from_numpy(grid.dequantize(each))) for each in (levels, nearest)
    )
    return levels if learned < rounded else nearest


def _learn(
    problem: Problem, choices: Choices, iterations: int, random: np.random.Generator, label: str
) -> torch.Tensor:
    """Return 1 for each weight to round up, 0 for the others."""
    value = choices.start().requires_grad_()
    optimizer = torch.optim.Adam([value], lr=LEARNING_RATE)
    # Relative to nearest rounding, one weight of the regularizer serves layers of any scale.
    nearest = problem.error(choices.weights((choices.fraction >= 0.5).float()))
    unit = nearest.clamp(min=torch.finfo(nearest.dtype).tiny)
    rows = problem.inputs.shape[1]
    for i in track(range(iterations), label, "iterations"):
        batch = torch.from_numpy(random.integers(rows, size=min(BATCH, rows)))
        share = rectify(value)
        loss = problem.error(choices.weights(share), batch) / unit
        loss = loss + regularize([share], i / iterations)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return (value.detach() >= 0).float()  # h >= 1/2


def find_kept(weights: Array, scheme: WeightScheme) -> NDArray[np.bool_]:
    """Return which weights [output channels, ...] keep their value.

    Those at the ends of the range, which the grid is made from, and those whose nearest level is
    an outermost one: no level lies beyond it, and in some schemes (uint8, symmetric) its value lies
    outside the range, so that a weight moved there would make another grid. Where a scheme clips,
    those beyond the range, one of which at least gives the grid its outermost level.
    """
    grid = scheme.grid(weights, 0)
    if scheme.clips:
        return np.abs(weights / grid.scale) > grid.highest - _TOLERANCE
    axes = tuple(range(1, weights.ndim)) if scheme.per_channel else None
    size = np.abs(weights)
    if scheme.symmetric:
        ends = size == size.max(axis=axes, keepdims=True)
    else:
        ends = weights == weights.min(axis=axes, keepdims=True)
        ends |= weights == weights.max(axis=axes, keepdims=True)
    return ends | np.isin(grid.quantize(weights), (grid.lowest, grid.highest))


def place(weights: Array, levels: NDArray[np.int64], scheme: WeightScheme) -> Array:
    """Return weights on the grid, from which every backend finds the same grid and `levels` again.

    Weights that keep their level (`find_kept`) keep their value too, and with it the range; but
    where a scheme clips they get their level's, and with it the share that is clipped.
    """
    kept = find_kept(weights, scheme) & (not scheme.clips)
    return np.where(kept, weights, scheme.grid(weights, 0).dequantize(levels))
