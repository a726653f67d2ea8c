"""AdaRound: rounds each weight up or down to minimize the error of the layer's output.

Nagel et al., "Up or Down? Adaptive Rounding for Post-Training Quantization", ICML 2020.
"""

import copy
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnx
import torch
from numpy.typing import NDArray

from resnet8ptq.core import cache, memory
from resnet8ptq.core.console import track
from resnet8ptq.core.deadline import Deadline, TimeUpError
from resnet8ptq.corrections import bias_correction, layers
from resnet8ptq.corrections.layers import CorrectionSettings
from resnet8ptq.corrections.quadratic import Quadratic
from resnet8ptq.corrections.walk import Walk
from resnet8ptq.graph.layers import attribute
from resnet8ptq.graph.links import Links
from resnet8ptq.graph.weights import Array, read_bias, read_weights, write_weights
from resnet8ptq.precision.grid import WeightScheme
from resnet8ptq.precision.plan import Plan
from resnet8ptq.simulation.device import find_device

SAMPLES = 16_000  # most rows for a layer, rounded up to equally many of each sample
BATCH = 512  # rows
LEARNING_RATE = 0.1
STRETCH = (-0.1, 1.1)  # gamma and zeta of the rectified sigmoid, equation 23
BETA = (20.0, 2.0)  # exponent of the regularizer (equation 24) at start and end of the annealing
WARM_UP = 0.2  # share of the iterations, at the start, without the regularizer
_TOLERANCE = 1e-3  # tolerance in levels
FEW = 64  # inputs of a group; up to this number, descent replaces learning, see `learn_levels`
STARTS = 64  # random starts of the descent, besides the nearest levels
REGULARIZER = 10.0  # weight of the regularizer, relative to the error of nearest rounding

Number = TypeVar("Number", np.int64, np.float64)


@dataclass(frozen=True)
class Problem:
    """The rounding of one layer: rows of its inputs and the outputs to reproduce."""

    inputs: torch.Tensor  # inputs [n, groups, inputs], in the network with rounded layers
    targets: torch.Tensor  # FP32's outputs [n, groups, channels of a group], after a following ReLU
    bias: torch.Tensor  # [groups, 1, channels of a group]
    relu: bool

    def to(self, device: torch.device) -> "Problem":
        """Return the problem with its tensors on a device."""
        return Problem(
            inputs=self.inputs.to(device),
            targets=self.targets.to(device),
            bias=self.bias.to(device),
            relu=self.relu,
        )

    def error(
        self, weights: torch.Tensor, rows: torch.Tensor | slice = slice(None)
    ) -> torch.Tensor:
        """Return the mean squared error of the outputs.

        Args:
            weights: [output channels, ...].
            rows: the rows to compare; by default all.
        """
        outputs = self._outputs(weights, rows)
        if self.relu:
            outputs = outputs.relu()
        targets = self.targets[rows].transpose(0, 1)
        return outputs.sub(targets).square().mean()

    def quadratic(self, weights: torch.Tensor) -> Quadratic:
        """Return the error as a quadratic function of the weights.

        Args:
            weights: the FP32 weights [output channels, ...] of a layer without ReLU.
        """
        inputs = self.inputs.transpose(0, 1)
        targets = self.targets.transpose(0, 1)
        excess = self._outputs(weights) - targets
        products = inputs.mT @ inputs / targets.numel()
        slope = excess.mT @ inputs / targets.numel()
        return Quadratic(weights.reshape(slope.shape), products, slope)

    def _outputs(
        self, weights: torch.Tensor, rows: torch.Tensor | slice = slice(None)
    ) -> torch.Tensor:
        """Return the outputs before a ReLU, [groups, rows, channels of a group]."""
        matrix = _matrix(weights, len(self.bias))
        return torch.baddbmm(self.bias, self.inputs[rows].transpose(0, 1), matrix)


def learn_rounding(
    proto: onnx.ModelProto,
    setting: CorrectionSettings,
    iterations: int,
    seed: int,
    correct_biases: bool = False,
) -> onnx.ModelProto:
    """Return the network with weights that nearest rounding maps to the learned levels.

    Layers are learned in order: the inputs of a layer come from the network with rounded earlier
    layers, and its targets from the FP32 network (equation 25). The cache keeps each
    learned layer. Layers that are not learned before the deadline keep their weights; otherwise the
    result is reproducible with the same seed, batch size, device, threads and memory limit.

    Layers in float are not learned, and later layers see them in float. If a search chooses nodes
    to exclude (`setting.searches`), their layers are learned too, so that the search learns once;
    the returned network keeps their weights.

    With `correct_biases`, a layer's bias is corrected before the next layer is learned; see
    `bias_correction.has_bias`.
    Learned layers compensate for the mean error of earlier layers; a correction of all biases
    afterwards would add that error again, with the opposite sign.
    """
    torch.set_num_threads(setting.runtime.threads)
    result = copy.deepcopy(proto)
    simulated = copy.deepcopy(proto)

    # A search for layers in float learns those too
    every = setting.selection
    if setting.searches:
        every = replace(every, nodes_to_exclude=())
    twins = layers.find_plain_layers(simulated.graph, every)
    kept = layers.find_plain_layers(simulated.graph, setting.selection)
    nodes = layers.find_plain_layers(result.graph, every)

    # Learn layer by layer
    exact = setting.walk(proto)
    walks = (exact, exact.through(simulated))
    graph = proto.SerializeToString(deterministic=True)
    before = hashlib.sha256(graph + bytes([correct_biases])).hexdigest()
    for index, (name, node) in enumerate(nodes.items()):
        # Each layer has its own generator, because a layer from the cache draws nothing
        random = np.random.default_rng([seed, index])
        label = _label(name, index, len(twins))
        scheme = setting.weights.scheme(name)
        weights = read_weights(proto.graph, node)
        learn = partial(
            _learn_layer,
            proto,
            walks,
            node,
            setting=setting,
            scheme=scheme,
            iterations=iterations,
            random=random,
            label=label,
        )
        made_of: cache.Key = {
            "layer": name,
            "scheme": repr(scheme),
            "before": before,
            "iterations": iterations,
            "seed": seed,
            "index": index,
        }
        try:
            levels = _keep(setting, made_of, learn)
        except TimeUpError:
            setting.runtime.deadline.cut(f"learned rounding: {index} of {len(twins)} layers")
            return result

        # Later layers see this one rounded, so their cache keys depend on its levels
        before = hashlib.sha256(before.encode() + name.encode() + levels.tobytes()).hexdigest()
        rounded = on_levels(weights, levels, scheme)
        if name in kept:
            write_weights(result.graph, node, rounded)
        # Write them only once, because protobuf keeps replaced weights in memory.
        write_weights(simulated.graph, twins[name], scheme.grid(rounded, 0).round(rounded))

        # Correct the bias in both networks
        if correct_biases and bias_correction.has_bias(proto.graph, node):
            find_error = partial(
                bias_correction.find_error, proto.graph, walks, node, f"{label}: bias"
            )
            error = _keep(setting, {**made_of, "before": before}, find_error)
            bias_correction.shift_bias(simulated.graph, twins[name], error)
            if name in kept:
                bias_correction.shift_bias(result.graph, node, error)
    return result


def _learn_layer(
    proto: onnx.ModelProto,
    walks: Sequence[Walk],
    node: onnx.NodeProto,
    setting: CorrectionSettings,
    scheme: WeightScheme,
    iterations: int,
    random: np.random.Generator,
    label: str,
) -> NDArray[np.int64]:
    deadline = setting.runtime.deadline
    deadline.check()
    problem = _pose(proto, walks, node, setting=setting, random=random, label=label)
    weights = read_weights(proto.graph, node)
    return learn_levels(
        problem,
        weights,
        scheme,
        iterations=iterations,
        random=random,
        label=label,
        deadline=deadline,
    )


def _keep(
    setting: CorrectionSettings, made_of: cache.Key, find: Callable[[], NDArray[Number]]
) -> NDArray[Number]:
    """Return the array that `find` returns, such as a layer's levels, from the cache if possible.

    Args:
        made_of: the facts about the layer for the cache key. The function adds the samples, the
            code and versions, and what sets the order of sums, such as batch size and threads.
    """
    # Another order of sums may give other levels
    runtime = setting.runtime
    key: cache.Key = {
        **made_of,
        "images": setting.samples.digest,
        "batch_size": setting.calib.batch_size,
        "threads": runtime.threads,
        "device": find_device(runtime.device).type,
        "memory": memory.step(),
        **cache.made_with(__name__),
    }

    def make(folder: Path) -> None:
        np.save(folder / "values.npy", find())

    folder = cache.entry(runtime.cache_root, kind="learned_layers", key=key, make=make)
    values: NDArray[Number] = np.load(folder / "values.npy")
    return values


def learn_apart(
    proto: onnx.ModelProto,
    setting: CorrectionSettings,
    widths: Sequence[int],
    iterations: int,
    seed: int,
) -> dict[tuple[str, int], Array]:
    """Return the learned weights of each layer, by name and bits, with all other layers in float.

    Nearest rounding maps the returned weights to the learned levels. If the deadline ends the
    learning, the remaining layers and bits are missing.

    Args:
        widths: the numbers of bits.
    """
    # All layers stay in float, so both walks go through the same network
    torch.set_num_threads(setting.runtime.threads)
    walk = setting.walk(proto)
    learned: dict[tuple[str, int], Array] = {}
    walks = (walk, walk.through(proto))
    nodes = layers.find_plain_layers(proto.graph, setting.selection)
    for index, (name, node) in enumerate(nodes.items()):
        # Each layer has its own generator, as in `learn_rounding`
        random = np.random.default_rng([seed, index])
        weights = read_weights(proto.graph, node)
        label = _label(name, index, len(nodes))
        problem = _pose(proto, walks, node, setting=setting, random=random, label=label)

        # Solve the same problem for each width, because posing it takes long
        for bits in widths:
            scheme = Plan(setting.weights.default, {name: bits}).scheme(name)
            narrow = f"{label}: {bits} bits"
            deadline = setting.runtime.deadline
            try:
                levels = learn_levels(
                    problem,
                    weights,
                    scheme,
                    iterations=iterations,
                    random=random,
                    label=narrow,
                    deadline=deadline,
                )
            except TimeUpError:
                deadline.cut(f"learned rounding, to rank: {index} of {len(nodes)} layers")
                return learned
            learned[name, bits] = on_levels(weights, levels, scheme)
    return learned


def _label(name: str, index: int, count: int) -> str:
    return f"AdaRound {index + 1} of {count}: {name}"


def _pose(
    fp32: onnx.ModelProto,
    walks: Sequence[Walk],
    node: onnx.NodeProto,
    setting: CorrectionSettings,
    random: np.random.Generator,
    label: str,
) -> Problem:
    """Return a layer's problem: rows at the same positions in the FP32 and the rounded network.

    Args:
        walks: through the FP32 and the rounded network.
    """
    # Find the number of rows by the bytes of a row's inputs or outputs
    weights = read_weights(fp32.graph, node)
    groups = int(attribute(node, "group", 1))
    width = weights[0].size
    largest = max(weights[0].nbytes * groups, weights.nbytes // width)
    most = min(SAMPLES, memory.fitting(largest, memory.step()))
    per_image = -(-most // len(setting.samples))  # positions of each sample

    # Draw the same rows from both networks
    drawn: list[Array] = []  # rows of both networks [n, groups, width], filled in place
    done = 0
    label = f"{label}: inputs"
    batches = []
    for walk in walks:
        walk.to(node, label)
        shown = None  # one progress bar for both
        if walk is walks[0]:
            shown = label
        batches.append(walk.run([node.input[0]], shown))
    for tensors in zip(*batches, strict=True):
        samples = tensors[0][0]
        keys = random.random((len(samples), count_positions(samples, node, weights)))
        positions = keys.argsort(axis=1)[:, :per_image]  # drawn without replacement
        if not drawn:
            shape = (len(setting.samples) * positions.shape[1], groups, width)
            drawn = [np.empty(shape, np.float32) for _ in walks]
        for rows, [inputs] in zip(drawn, tensors, strict=True):
            windows = sample_windows(inputs, node, weights, positions)
            rows[done : done + positions.size] = windows
        done += positions.size

    # The targets are FP32's outputs, after a following ReLU
    bias = torch.from_numpy(read_bias(fp32.graph, node).reshape(groups, 1, -1))
    reader = Links(fp32.graph).only_reader(node.output[0])
    relu = reader is not None and reader.op_type == "Relu"
    exact, rounded = map(torch.from_numpy, drawn)
    matrices = torch.from_numpy(weights)
    targets = torch.baddbmm(bias, exact.transpose(0, 1), _matrix(matrices, groups))
    if relu:
        targets = targets.relu()
    targets = targets.transpose(0, 1).contiguous()
    problem = Problem(rounded, targets, bias, relu=relu)
    return problem.to(find_device(setting.runtime.device))


def _matrix(weights: torch.Tensor, groups: int) -> torch.Tensor:
    """Return weights [output channels, ...] as [groups, inputs, channels of a group]."""
    return weights.reshape(groups, len(weights) // groups, -1).transpose(1, 2).contiguous()


@dataclass(frozen=True)
class Choices:
    """The lower and the upper level of each weight [output channels, ...].

    Attributes:
        floor: the lower level minus the zero_point.
        step: the upper level minus the lower; 0 if the level is fixed.
        fraction: distance of the weight from the level below it, in levels.
    """

    scale: torch.Tensor
    floor: torch.Tensor
    step: torch.Tensor
    fraction: torch.Tensor

    def to(self, device: torch.device) -> "Choices":
        """Return the choices with their tensors on a device."""
        return Choices(
            scale=self.scale.to(device),
            floor=self.floor.to(device),
            step=self.step.to(device),
            fraction=self.fraction.to(device),
        )

    def weights(self, up: torch.Tensor) -> torch.Tensor:
        """Return the weights; `up` is 0 for the lower level, 1 for the upper, or between."""
        return self.scale * (self.floor + self.step * up)

    def levels(self, up: torch.Tensor) -> NDArray[np.int64]:
        """Return the levels minus the zero_point."""
        return (self.floor + self.step * up).cpu().numpy().astype(np.int64)

    def nearest(self) -> torch.Tensor:
        """Return 1 for each weight that is nearest to its upper level, 0 for the others."""
        return (self.fraction >= 0.5).float()

    def start(self) -> torch.Tensor:
        """Return the initial values, which `rectify` maps to the fractions."""
        gamma, zeta = STRETCH
        return ((self.fraction - gamma) / (zeta - gamma)).logit()


def find_choices(weights: Array, scheme: WeightScheme) -> Choices:
    """Return the two levels around each weight [output channels, ...] on its scheme's grid.

    The weights of `find_kept` have one level. Without clipping, other weights do not get the first
    or the last level, so they may have one level, too.
    """
    grid = scheme.grid(weights, 0)
    kept = find_kept(weights, scheme)
    nearest = grid.quantize(weights)

    # Without clipping, no weight may move to the first or the last level
    floor = np.floor(weights / grid.scale)
    edge = 0 if scheme.clips else 1  # see `find_kept`
    lowest = grid.lowest + edge - grid.zero_point
    highest = grid.highest - edge - grid.zero_point
    low = np.where(kept, nearest - grid.zero_point, np.clip(floor, lowest, highest))
    high = np.where(kept, low, np.clip(floor + 1, lowest, highest))
    fraction = np.clip(weights / grid.scale - floor, 0, 1)
    return Choices(
        scale=_to_torch(grid.scale),
        floor=_to_torch(low),
        step=_to_torch(high - low),
        fraction=_to_torch(fraction),
    )


def _to_torch(array: NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.float32))


def rectify(value: torch.Tensor) -> torch.Tensor:
    """Return the stretched sigmoid, clipped to [0, 1]: equation 23."""
    gamma, zeta = STRETCH
    return (value.sigmoid() * (zeta - gamma) + gamma).clamp(0, 1)


def regularize(shares: Sequence[torch.Tensor], done: float) -> torch.Tensor:
    """Return the penalty for values between 0 and 1; 0 during the warm-up.

    The penalty is that of equation 24, averaged over each layer, summed over the layers and
    multiplied by `REGULARIZER`.

    Args:
        shares: the values of each layer.
        done: the fraction of the iterations that are done.
    """
    progress = (done - WARM_UP) / (1 - WARM_UP)
    if progress < 0:
        return torch.zeros(())
    annealed = (1 + np.cos(np.pi * progress)) / 2  # falls from 1 to 0
    beta = BETA[1] + (BETA[0] - BETA[1]) * annealed
    means = []
    for share in shares:
        distance = (2 * share - 1).abs()  # distance from the middle; 1 at a level
        means.append((1 - distance.pow(beta)).mean())
    return REGULARIZER * torch.stack(means).sum()


def learn_levels(
    problem: Problem,
    weights: Array,
    scheme: WeightScheme,
    iterations: int,
    random: np.random.Generator,
    label: str,
    deadline: Deadline,
) -> NDArray[np.int64]:
    """Return the levels of the weights [output channels, ...] that reproduce the layer's output.

    Coordinate descent replaces learning in grouped layers without a ReLU after them, and with at
    most `FEW` inputs in a group. If the result has no smaller error than the nearest levels, these
    are returned.

    Raises:
        TimeUpError: an iteration of learning begins after the deadline.
    """
    grid = scheme.grid(weights, 0)
    device = problem.inputs.device
    choices = find_choices(weights, scheme).to(device)
    nearest = grid.quantize(weights)
    groups, inputs = problem.inputs.shape[1:]
    if groups > 1 and inputs <= FEW and not problem.relu:
        up = _descend(
            problem, weights=torch.from_numpy(weights).to(device), choices=choices, random=random
        )
    else:
        up = _learn(problem, choices, iterations, random=random, label=label, deadline=deadline)

    # Keep the better levels
    levels = choices.levels(up) + grid.zero_point
    learned = problem.error(torch.from_numpy(grid.dequantize(levels)).to(device))
    rounded = problem.error(torch.from_numpy(grid.dequantize(nearest)).to(device))
    return levels if learned < rounded else nearest


def _learn(
    problem: Problem,
    choices: Choices,
    iterations: int,
    random: np.random.Generator,
    label: str,
    deadline: Deadline,
) -> torch.Tensor:
    """Return 1 for each weight to round up, 0 for the others."""
    value = choices.start().requires_grad_()
    optimizer = torch.optim.Adam([value], lr=LEARNING_RATE)
    # Divide by the error of nearest rounding, so that one regularizer fits layers of any scale.
    nearest = problem.error(choices.weights(choices.nearest()))
    unit = nearest.clamp(min=torch.finfo(nearest.dtype).tiny)

    # Learn on random rows
    rows = len(problem.inputs)
    for i in track(range(iterations), label, "iterations"):
        deadline.check()
        batch = torch.from_numpy(random.integers(rows, size=min(BATCH, rows))).to(value.device)
        share = rectify(value)
        loss = problem.error(choices.weights(share), batch) / unit
        loss = loss + regularize([share], i / iterations)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return (value.detach() >= 0).float()  # true where h >= 1/2


def _descend(
    problem: Problem, weights: torch.Tensor, choices: Choices, random: np.random.Generator
) -> torch.Tensor:
    """Return 1 for each weight to round up and 0 for the others, by coordinate descent.

    Coordinate descent starts from the nearest levels, and from levels drawn with the weights'
    fractions as probabilities. For depthwise kernels of 3 x 3, its error was within 1% of the
    smallest error of all 2^9 choices.
    """
    fraction = choices.fraction.cpu().numpy()
    drawn = (random.random((STARTS, *fraction.shape)) < fraction).astype(np.float32)
    nearest = choices.nearest()
    starts = torch.cat([nearest[None], torch.from_numpy(drawn).to(nearest.device)])
    lower = choices.weights(torch.zeros(()))
    step = choices.scale * choices.step
    return problem.quadratic(weights).descend(lower, step, starts)


def find_kept(weights: Array, scheme: WeightScheme) -> NDArray[np.bool_]:
    """Return a mask of the weights [output channels, ...] that keep their nearest level.

    Without clipping, weights at the ends of the range are kept, because they define the grid.
    Weights whose nearest level is the first or the last are kept, too. In some schemes, such as
    symmetric uint8, the value of such a level lies outside the range, so a weight there would
    change the grid. With clipping, the weights at the ends of the range and beyond are kept,
    because their level is the outermost.
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


def on_levels(weights: Array, levels: NDArray[np.int64], scheme: WeightScheme) -> Array:
    """Return weights from which the run's backend derives the same grid and these levels.

    Each weight gets the value of its level; without clipping, the weights of `find_kept` keep their
    own value instead, which preserves the range.
    """
    kept = find_kept(weights, scheme) & (not scheme.clips)
    return np.where(kept, weights, scheme.grid(weights, 0).dequantize(levels))


# The functions below turn a layer into a matrix product of input windows, one for each output
# position.


def count_positions(inputs: Array, node: onnx.NodeProto, weights: Array) -> int:
    """Return the number of output positions for one sample."""
    return int(np.prod(_windows(inputs, node, weights)[1]))


def sample_windows(
    inputs: Array, node: onnx.NodeProto, weights: Array, positions: NDArray[np.int64]
) -> Array:
    """Return the input windows of output `positions` as rows [samples * drawn, groups, inputs].

    Args:
        weights: [output channels, ...].
        positions: [samples, drawn], flat indices into one sample's output.
    """
    windows, shape = _windows(inputs, node, weights)
    samples = np.arange(len(windows))[:, None]
    index: Any = (samples, slice(None), *np.unravel_index(positions, shape))
    rows = windows[index]  # [samples, drawn, channels, *kernel]
    groups = int(attribute(node, "group", 1))
    return rows.reshape(positions.size, groups, -1)


def _windows(inputs: Array, node: onnx.NodeProto, weights: Array) -> tuple[Array, tuple[int, ...]]:
    """Return a view [samples, channels, *positions, *kernel], and the shape of the positions.

    A matrix product has no kernel axes. Its positions are all but the last axis of a sample, as one
    axis.
    """
    if node.op_type != "Conv":
        rows = inputs.reshape(len(inputs), -1, inputs.shape[-1])
        return rows.transpose(0, 2, 1), (rows.shape[1],)
    kernel = weights.shape[2:]
    rank = len(kernel)

    # Take windows of the padded input, at the layer's strides
    strides = tuple(attribute(node, "strides", [1] * rank))
    dilations = tuple(attribute(node, "dilations", [1] * rank))
    extent = tuple((k - 1) * d + 1 for k, d in zip(kernel, dilations, strict=True))
    pads = attribute(node, "pads", [0] * 2 * rank)  # conversion has replaced auto_pad
    padded = np.pad(inputs, [(0, 0), (0, 0), *zip(pads[:rank], pads[rank:], strict=True)])
    view = np.lib.stride_tricks.sliding_window_view(padded, extent, axis=tuple(range(2, 2 + rank)))
    steps: list[Any] = [...]  # the last axes hold the positions, then the kernel
    for step in (*strides, *dilations):
        steps.append(slice(None, None, step))
    view = view[tuple(steps)]
    return view, view.shape[2 : 2 + rank]
