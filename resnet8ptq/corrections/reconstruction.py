"""Block-wise reconstruction: rounding and activation ranges are learned for a block's output.

Li et al., "BRECQ: Pushing the Limit of Post-Training Quantization by Block Reconstruction", ICLR
2021: layers that depend on each other, such as those of a residual block, are rounded together, for
the least squared error of what the block returns. Wei et al., "QDrop: Randomly Dropping
Quantization for Extremely Low-bit Post-Training Quantization", ICLR 2022: activations are rounded
meanwhile, each one with probability 1/2. Rounding is learned as in AdaRound, ranges as in QAT.
"""

import contextlib
import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch import nn
from torch.nn.utils import parametrize

from resnet8ptq.calibration.activations import Activations
from resnet8ptq.calibration.statistics import Range
from resnet8ptq.core import memory
from resnet8ptq.core.console import track
from resnet8ptq.corrections import adaround, layers
from resnet8ptq.corrections.adaround import Choices
from resnet8ptq.corrections.layers import Setting
from resnet8ptq.graph.logits import end_at_logits
from resnet8ptq.graph.session import expose, group, open_runner
from resnet8ptq.graph.torch_module import to_torch_module
from resnet8ptq.graph.weights import read_weights, write_weights
from resnet8ptq.precision.selection import find_float_nodes
from resnet8ptq.simulation.fake_quantization import FakeQuantize, drop_rounding
from resnet8ptq.simulation.network import find_layer, quantize_activations

BATCH = 32, 4  # images run at once: at most, and at least
AT_ONCE = 2**21  # bytes of the largest tensor that a block takes or returns, of images run at once
DROP = 0.5  # probability that an activation stays in float; of the block's inputs, too
RATE = 0.1  # of Adam, for the rounding
RANGE_RATE = 3e-3  # for the logarithms of the ranges
LEARNING = 32  # tensors of the largest size that a step of learning holds of each image

Values = dict[str, torch.Tensor]  # by the name of the traced node that makes them


class LearnedRounding(nn.Module):  # type: ignore[misc]
    """Weights [output channels, ...] between two levels each; rounded when it does not train."""

    def __init__(self, choices: Choices) -> None:
        super().__init__()
        self.choices = choices
        self.value = nn.Parameter(choices.start())

    def share(self) -> torch.Tensor:
        """Return how far each weight lies from the lower level to the upper, 0 to 1."""
        return adaround.rectify(self.value)

    def forward(self, weights: torch.Tensor) -> torch.Tensor:
        """Return the weights; what they were is part of the choices."""
        share = self.share()
        return self.choices.weights(share if self.training else (share >= 0.5).float())


@dataclass(frozen=True)
class Block:
    """Part of a traced graph.

    Attributes:
        nodes: in their order.
        outputs: names of the nodes that are read behind it.
        roundings: of the weights of its layers, by short name.
        quantizers: of its activations; none that a block before has too, which has settled it.
    """

    nodes: list[Any]
    outputs: list[str]
    roundings: dict[str, LearnedRounding]
    quantizers: list[FakeQuantize]


def reconstruct(
    path: Path, setting: Setting, iterations: int, seed: int
) -> tuple[onnx.ModelProto, dict[str, Range]]:
    """Return the network with weights that nearest rounding takes to the learned levels.

    Block by block: a block's inputs come from the network whose earlier blocks are quantized, its
    targets from the FP32 network. What is learned is taken only where the block's error is less.
    Reproducible by `seed`, on the same number of threads.

    Args:
        path: of the FP32 network; calibration finds the ranges that learning begins with.
        iterations: for each block.

    Returns:
        The network, and the learned range of each activation, by ONNX tensor name.

    Raises:
        UnsupportedError: onnx2torch gives a layer no weights.
        ModelError: onnx2torch does not know an operator.
    """
    torch.set_num_threads(setting.runtime.threads)
    proto, cut = onnx.load(path), onnx.load(path)
    end_at_logits(cut)
    exact, simulated = (to_torch_module(cut, path) for _ in range(2))
    chosen = layers.find(proto.graph, setting.selection)
    roundings = {}
    for name, node in chosen.items():
        choices = adaround.find_choices(
            read_weights(proto.graph, node), setting.weights.scheme(name)
        )
        roundings[name] = LearnedRounding(choices)
        layer = find_layer(simulated, node)
        parametrize.register_parametrization(layer, "weight", roundings[name])
    skipped = find_float_nodes(proto.graph, setting.selection)
    calibrated = Activations(path, setting.images, setting.calib, setting.runtime)
    quantizers = quantize_activations(
        simulated,
        cut.graph,
        skipped,
        calibrated.find_around(skipped),
        setting.activations,
        setting.float_output,
    )
    for value in (simulated.parameters(), exact.parameters()):
        for parameter in value:
            parameter.requires_grad_(False)
    simulated.eval()
    entrance = quantizers.get(cut.graph.input[0].name)
    images = torch.from_numpy(_few_enough(cut, setting))
    first = next(node.name for node in exact.graph.nodes if node.op == "placeholder")
    targets: Values = {first: images}
    inputs: Values = {first: images if entrance is None else entrance(images).detach()}
    with _seeded(seed):
        blocks = _blocks(simulated, roundings)
        for index, block in enumerate(blocks):
            wanted = _run(exact, block, targets)
            if block.roundings:
                place = f"{index + 1} of {len(blocks)}"
                label = f"Reconstruction {place}: {', '.join(block.roundings)}"
                problem = _Problem(simulated, block, inputs, targets, wanted)
                problem.learn(iterations, np.random.default_rng([seed, index]), label)
            inputs = _keep(block, _run(simulated, block, inputs), inputs)
            targets = _keep(block, wanted, targets)
    result = copy.deepcopy(proto)
    for name, node in layers.find(result.graph, setting.selection).items():
        weights, scheme = read_weights(proto.graph, node), setting.weights.scheme(name)
        levels = roundings[name].choices.levels((roundings[name].share() >= 0.5).float())
        placed = adaround.place(weights, levels + scheme.grid(weights, 0).zero_point, scheme)
        write_weights(result.graph, node, placed)
    return result, {name: quantizer.range() for name, quantizer in quantizers.items()}


@dataclass(frozen=True)
class _Problem:
    """One block's rounding and ranges.

    Attributes:
        inputs: behind blocks that are quantized.
        exact: the same of the FP32 network.
        targets: its outputs.
    """

    module: Any
    block: Block
    inputs: Values
    exact: Values
    targets: Values

    def learn(self, iterations: int, random: np.random.Generator, label: str) -> None:
        """Leave the better of the learned and the nearest rounding in the block."""
        roundings, quantizers = self.block.roundings.values(), self.block.quantizers
        parts: list[Any] = [*roundings, *quantizers]
        nearest = [_state(part) for part in parts]
        before = self.error()
        unit = max(before, torch.finfo(torch.float32).tiny)
        ends = [quantizer.log_growth for quantizer in quantizers]
        shares = [rounding.value for rounding in roundings]
        for value in (*shares, *ends):
            value.requires_grad_(True)
        optimizer = torch.optim.Adam(
            [{"params": shares, "lr": RATE}, {"params": ends, "lr": RANGE_RATE}]
        )
        count = len(next(iter(self.targets.values())))
        size = min(count, _at_once([*self.inputs.values(), *self.targets.values()]))
        self._train(True)
        for i in track(range(iterations), label, "iterations"):
            rows = torch.from_numpy(random.integers(count, size=size))
            loss = self._loss(rows) / unit
            penalty = adaround.regularize([r.share() for r in roundings], i / iterations)
            optimizer.zero_grad()
            (loss + penalty).backward()
            optimizer.step()
        self._train(False)
        for value in (*shares, *ends):
            value.requires_grad_(False)
        if not self.error() < before:
            for part, state in zip(parts, nearest, strict=True):
                part.load_state_dict(state)

    def error(self) -> float:
        """Return the mean squared error of the block's outputs, over all images."""
        made = _run(self.module, self.block, self.inputs)
        errors = [
            made[name].sub_(wanted).square_().mean()  # in place, since they are large
            for name, wanted in self.targets.items()
        ]
        return float(torch.stack(errors).sum())

    def _loss(self, rows: torch.Tensor) -> torch.Tensor:
        given = {}
        for name, values in self.inputs.items():
            given[name] = drop_rounding(values[rows], self.exact[name][rows], DROP)
        made = _call(self.module, self.block.nodes, given)
        errors = [
            (made[name] - wanted[rows]).square().mean() for name, wanted in self.targets.items()
        ]
        return torch.stack(errors).sum()

    def _train(self, training: bool) -> None:
        for rounding in self.block.roundings.values():
            rounding.train(training)
        for quantizer in self.block.quantizers:
            quantizer.drop = DROP if training else 0.0


def _state(module: Any) -> dict[str, Any]:
    return {name: value.clone() for name, value in module.state_dict().items()}


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def _few_enough(proto: onnx.ModelProto, setting: Setting) -> Any:
    """Return images [n, ...]: as many as keep each tensor of all of them within a step's budget."""
    (sample,) = setting.images.take(np.arange(1)).batches(1)
    names, largest = [name for node in proto.graph.node for name in node.output if name], 0
    for part in group(proto, names):
        tensors = open_runner(expose(proto, part), setting.runtime.threads, arena=False)(sample)
        largest = max(largest, sample.nbytes, *(tensor.nbytes for tensor in tensors))
    count = min(len(setting.images), max(BATCH[1], memory.fitting(largest, memory.step())))
    every = np.linspace(0, len(setting.images) - 1, count).round().astype(np.int64)
    return setting.images.inputs(every)


def _blocks(module: Any, roundings: Mapping[str, LearnedRounding]) -> list[Block]:
    """Part a traced graph where one tensor alone is read behind.

    What has no layers goes with what follows. Two layers in a row are one block: a depthwise
    convolution and the one behind it.
    """
    nodes = [node for node in module.graph.nodes if node.op == "call_module"]
    place = {node: i for i, node in enumerate(module.graph.nodes)}
    last = {node: max((place[user] for user in node.users), default=-1) for node in nodes}
    owners = {id(rounding): name for name, rounding in roundings.items()}

    def names(part: list[Any]) -> list[str]:
        found = (owners.get(id(m)) for n in part for m in module.get_submodule(n.target).modules())
        return [name for name in found if name is not None]

    parts: list[list[Any]] = [[]]
    live: set[Any] = set()
    for node in nodes:
        parts[-1].append(node)
        live = {other for other in live | {node} if last[other] > place[node]}
        if len(live) == 1 and not _is_fused(module, node):
            parts.append([])
    joined: list[list[Any]] = []
    pending: list[Any] = []
    for part in parts:
        pending += part
        if not names(part):
            continue
        if joined and len(names(pending)) == 1 == len(names(joined[-1])):
            joined[-1] += pending
        else:
            joined.append(pending)
        pending = []
    if pending:
        joined = [*joined[:-1], joined[-1] + pending] if joined else [pending]
    blocks: list[Block] = []
    for part in joined:
        settled = {quantizer for block in blocks for quantizer in block.quantizers}
        blocks.append(_make(module, part, last, place, roundings, names(part), settled))
    return blocks


def _is_fused(module: Any, node: Any) -> bool:
    """Tell whether what follows is a Relu or Clip, which belongs to this node."""
    kinds = (nn.ReLU, nn.ReLU6, nn.Hardtanh)
    followers = [user for user in node.users if user.op == "call_module"]
    return len(followers) == 1 and any(
        isinstance(part, kinds) for part in module.get_submodule(followers[0].target).modules()
    )


def _make(
    module: Any,
    nodes: list[Any],
    last: Mapping[Any, int],
    place: Mapping[Any, int],
    roundings: Mapping[str, LearnedRounding],
    names: list[str],
    settled: set[FakeQuantize],
) -> Block:
    end = place[nodes[-1]]
    parts = [part for node in nodes for part in module.get_submodule(node.target).modules()]
    found = [part for part in parts if isinstance(part, FakeQuantize) and part not in settled]
    return Block(
        nodes,
        [node.name for node in nodes if last[node] > end],
        {name: roundings[name] for name in names},
        list(dict.fromkeys(found)),
    )


def _call(module: Any, nodes: list[Any], given: Values) -> Values:
    """Run nodes on tensors [n, ...]; return those and what the nodes make."""
    values = dict(given)

    def look_up(node: Any) -> Any:
        if node.op == "get_attr":
            found = module
            for part in node.target.split("."):
                found = getattr(found, part)
            return found
        return values[node.name]

    for node in nodes:
        args = torch.fx.node.map_arg(node.args, look_up)
        kwargs = torch.fx.node.map_arg(node.kwargs, look_up)
        values[node.name] = module.get_submodule(node.target)(*args, **kwargs)
    return values


def _at_once(tensors: list[torch.Tensor]) -> int:
    """Return how many images to run at once through a block; tensors [n, ...] around it."""
    largest = max(tensor[0].nbytes for tensor in tensors)
    least = min(BATCH[1], memory.fitting(LEARNING * largest, memory.budget()))
    return max(least, min(BATCH[0], AT_ONCE // largest))


def _run(module: Any, block: Block, given: Values) -> Values:
    """Return the block's outputs for all images, some at once."""
    made: Values = {}
    count, size = len(next(iter(given.values()))), _at_once([*given.values()])
    with torch.no_grad():
        for start in range(0, count, size):
            part = {name: values[start : start + size] for name, values in given.items()}
            values = _call(module, block.nodes, part)
            for name in block.outputs:
                if name not in made:
                    made[name] = _room(values[name], count)
                made[name][start : start + size] = values[name]
    return made


def _room(values: torch.Tensor, count: int) -> torch.Tensor:
    """Return an empty tensor for `count` images: parts that are joined at the end are held twice.

    In the order of the axes in memory that joining would keep, by which sums are taken.
    """
    plain = values.ndim != 4 or values.is_contiguous()
    last = not plain and values.is_contiguous(memory_format=torch.channels_last)
    order = torch.channels_last if last else torch.contiguous_format
    return torch.empty((count, *values.shape[1:]), dtype=values.dtype, memory_format=order)


def _keep(block: Block, made: Values, before: Values) -> Values:
    """Return what blocks behind this one read."""
    return made if len(made) == 1 else {**before, **made}
