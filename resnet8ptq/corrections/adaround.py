"""AdaRound: weights are rounded up or down as it suits the layer's output, not to the nearest.

Nagel et al., "Up or Down? Adaptive Rounding for Post-Training Quantization", ICML 2020.
"""

import copy
from dataclasses import dataclass

import numpy as np
import onnx
import torch
from numpy.typing import NDArray

from resnet8ptq import environment
from resnet8ptq.config import RunConfig
from resnet8ptq.corrections import layers
from resnet8ptq.corrections.layers import Array
from resnet8ptq.corrections.windows import count_positions, sample_windows
from resnet8ptq.data import Split
from resnet8ptq.grid import WeightScheme
from resnet8ptq.terminal import track

SAMPLES = 32_000  # rows that a layer learns from, drawn from all images alike
BATCH = 1024  # rows
LEARNING_RATE = 0.01
STRETCH = (-0.1, 1.1)  # gamma and zeta of the rectified sigmoid, equation 23
BETA = (20.0, 2.0)  # of the regularizer, equation 24; annealed from the one to the other
WARM_UP = 0.2  # share of the iterations without regularizer
REGULARIZER = 0.1  # its weight, beside an error of 1 for nearest rounding


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
        """Return the mean squared error of the outputs; weights [groups, inputs, channels]."""
        outputs = torch.baddbmm(self.bias, self.inputs[:, rows], weights)
        return (outputs.relu() if self.relu else outputs).sub(self.targets[:, rows]).square().mean()


def round_weights(proto: onnx.ModelProto, config: RunConfig, images: Split) -> onnx.ModelProto:
    """Return the network with weights that nearest rounding takes to the learned levels.

    Layer by layer: the inputs of a layer come from the network whose earlier layers are rounded,
    its target from the FP32 network (equation 25). Grouped convolutions are rounded like others.
    Reproducible by `seed`, on the same number of threads.
    """
    torch.set_num_threads(environment.threads(config.threads))
    result, simulated = copy.deepcopy(proto), copy.deepcopy(proto)
    scheme = layers.weight_scheme(config)
    nodes, twins = layers.find(result.graph, config), layers.find(simulated.graph, config)
    for index, (name, node) in enumerate(nodes.items()):
        random = np.random.default_rng([config.seed, index])
        weights = layers.read_weights(proto.graph, node)
        problem = _pose(proto, simulated, node, config, images, random, name)
        levels = learn_levels(
            problem, weights, scheme, config.corrections.adaround_iterations, random, name
        )
        placed = place(weights, levels, scheme)
        layers.write_weights(result.graph, node, placed)
        rounded = layers.round_to_nearest(placed, scheme)
        layers.write_weights(simulated.graph, twins[name], rounded)
    return result


def _pose(
    fp32: onnx.ModelProto,
    simulated: onnx.ModelProto,
    node: onnx.NodeProto,
    config: RunConfig,
    images: Split,
    random: np.random.Generator,
    name: str,
) -> Problem:
    """Draw rows of inputs at the same positions in both networks."""
    weights = layers.read_weights(fp32.graph, node)
    label = f"AdaRound: {name}: inputs"
    each = -(-SAMPLES // len(images))  # positions of an image
    exact_rows, rows = [], []
    pairs = zip(
        layers.run(fp32, [node.input[0]], config, images, label),
        layers.run(simulated, [node.input[0]], config, images, label),
        strict=True,
    )
    for (exact,), (inputs,) in pairs:
        there = count_positions(exact, node, weights)
        drawn = random.random((len(exact), there)).argsort(axis=1)[:, :each]  # without replacement
        exact_rows.append(sample_windows(exact, node, weights, drawn))
        rows.append(sample_windows(inputs, node, weights, drawn))
    groups = exact_rows[0].shape[0]
    bias = torch.from_numpy(layers.read_bias(fp32.graph, node).reshape(groups, 1, -1))
    readers = [other for other in fp32.graph.node if node.output[0] in other.input]
    relu = len(readers) == 1 and readers[0].op_type == "Relu"
    targets = torch.baddbmm(
        bias, torch.from_numpy(np.concatenate(exact_rows, 1)), _matrix(weights, groups)
    )
    inputs = torch.from_numpy(np.concatenate(rows, 1))
    return Problem(inputs, targets.relu() if relu else targets, bias, relu)


def _matrix(weights: Array, groups: int) -> torch.Tensor:
    """Turn [output channels, ...] into [groups, inputs, channels of a group]."""
    by_group = weights.reshape(groups, weights.shape[0] // groups, -1)
    return torch.from_numpy(np.ascontiguousarray(by_group.transpose(0, 2, 1)))


def _as_weights(matrix: NDArray[np.int64], shape: tuple[int, ...]) -> NDArray[np.int64]:
    return matrix.transpose(0, 2, 1).reshape(shape)


def learn_levels(
    problem: Problem,
    weights: Array,
    scheme: WeightScheme,
    iterations: int,
    random: np.random.Generator,
    name: str,
) -> NDArray[np.int64]:
    """Return the levels of the weights [output channels, ...] that reproduce the layer's output.

    The nearest levels where nothing better is found.
    """
    grid = scheme.grid(weights, 0)
    groups = problem.inputs.shape[0]
    nearest = grid.quantize(weights)
    scale = _matrix(np.array(np.broadcast_to(grid.scale, weights.shape)), groups)
    offset = np.broadcast_to(grid.zero_point, weights.shape)
    lower = np.floor(weights / grid.scale) + offset
    # Levels of zero_point + 0, as floats, so that weights = scale * level.
    low = np.clip(lower, grid.lowest + 1, grid.highest - 1)
    high = np.clip(lower + 1, grid.lowest + 1, grid.highest - 1)
    kept = find_kept(weights, scheme)
    low, high = np.where(kept, nearest, low), np.where(kept, nearest, high)
    floor, step = (
        _matrix((values).astype(np.float32), groups) for values in (low - offset, high - low)
    )
    fraction = _matrix((weights / grid.scale - np.floor(weights / grid.scale)), groups)

    up = _learn(problem, scale, floor, step, fraction, iterations, random, name)
    levels = _as_weights((floor + step * up).numpy().astype(np.int64), weights.shape) + offset
    learned, rounded = (
        problem.error(_matrix(grid.dequantize(found), groups)) for found in (levels, nearest)
    )
    return levels if learned < rounded else nearest


def _learn(
    problem: Problem,
    scale: torch.Tensor,
    floor: torch.Tensor,
    step: torch.Tensor,
    fraction: torch.Tensor,
    iterations: int,
    random: np.random.Generator,
    name: str,
) -> torch.Tensor:
    """Return 1 for each weight to round up, 0 for the others."""
    gamma, zeta = STRETCH
    start = ((fraction - gamma) / (zeta - gamma)).logit()  # h(V) is the fraction that is rounded
    value = start.clone().requires_grad_()
    optimizer = torch.optim.Adam([value], lr=LEARNING_RATE)
    nearest = floor + step * (fraction >= 0.5)
    # Relative to nearest rounding, one weight of the regularizer serves layers of any scale.
    unit = problem.error(scale * nearest).clamp(min=torch.finfo(torch.float32).tiny)
    rows = problem.inputs.shape[1]
    for i in track(range(iterations), f"AdaRound: {name}", "iterations"):
        batch = torch.from_numpy(random.integers(rows, size=min(BATCH, rows)))
        h = (value.sigmoid() * (zeta - gamma) + gamma).clamp(0, 1)
        loss = problem.error(scale * (floor + step * h), batch) / unit
        progress = (i / iterations - WARM_UP) / (1 - WARM_UP)
        if progress >= 0:
            beta = BETA[1] + (BETA[0] - BETA[1]) * (1 + np.cos(np.pi * progress)) / 2
            loss = loss + REGULARIZER * (1 - (2 * h - 1).abs().pow(beta)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return (value.detach() >= start.new_tensor(0)).float()


def find_kept(weights: Array, scheme: WeightScheme) -> NDArray[np.bool_]:
    """Return which weights [output channels, ...] keep their value.

    Those at the ends of the range, which the grid is made from, and those whose nearest level is
    an outermost one: beyond it there is none, and in some schemes (uint8, symmetric) its value lies
    outside the range, so that a weight moved there would make another grid.
    """
    grid = scheme.grid(weights, 0)
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

    Weights that keep their level (`find_kept`) keep their value too, and with it the range.
    """
    return np.where(find_kept(weights, scheme), weights, scheme.grid(weights, 0).dequantize(levels))
