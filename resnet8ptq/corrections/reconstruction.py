"""Block-wise reconstruction: learns rounding and activation ranges to reproduce a block's output.

Li et al., "BRECQ: Pushing the Limit of Post-Training Quantization by Block Reconstruction", ICLR
2021: layers that depend on each other, such as those of a residual block, are rounded together. The
loss here is the squared error of the block's output, without BRECQ's factors from gradients.

Wei et al., "QDrop: Randomly Dropping Quantization for Extremely Low-bit Post-Training
Quantization", ICLR 2022: during learning, each value of an activation is rounded with probability
1/2. Rounding is learned as in AdaRound, ranges as in QAT.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
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
from resnet8ptq.core.deadline import Deadline
from resnet8ptq.core.errors import UnsupportedError
from resnet8ptq.corrections import adaround, layers
from resnet8ptq.corrections.adaround import Choices
from resnet8ptq.corrections.layers import CorrectionSettings
from resnet8ptq.graph.links import Links
from resnet8ptq.graph.session import end_at_logits, expose, group_by_memory, open_runner
from resnet8ptq.graph.torch_module import to_torch_module
from resnet8ptq.graph.weights import read_weights, write_weights
from resnet8ptq.precision.plan import find_float_nodes
from resnet8ptq.simulation.device import find_device
from resnet8ptq.simulation.fake_quantization import FakeQuantize, drop_rounding
from resnet8ptq.simulation.network import find_layer, quantize_activations

# The largest and the smallest number of samples at once
LARGEST_BATCH = 32
SMALLEST_BATCH = 4
AT_ONCE = 2**21  # bytes of a block's largest input or output for the samples at once
DROP = 0.5  # probability that an activation stays in float; also for the block's inputs
RATE = 0.1  # learning rate of the rounding
RANGE_RATE = 3e-3  # learning rate of the logarithms of the ranges
LEARNING = 32  # tensors of the largest size that a learning step holds for each sample
KEPT = 7  # tensors that a step holds for each output of a block's nodes; measured on YOLOX-nano

Values = dict[str, torch.Tensor]  # values by the name of the traced node that computes them


class LearnedRounding(nn.Module):  # type: ignore[misc]
    """Learned weights [output channels, ...] between two levels; rounded outside of training."""

    def __init__(self, choices: Choices) -> None:
        super().__init__()
        self.choices = choices
        self.value = nn.Parameter(choices.start())

    def share(self) -> torch.Tensor:
        """Return the position of each weight between its levels, 0 (lower) to 1 (upper)."""
        return adaround.rectify(self.value)

    def forward(self, weights: torch.Tensor) -> torch.Tensor:
        """Return the weights by `share`; the argument is not used."""
        share = self.share()
        if not self.training:
            share = (share >= 0.5).float()
        return self.choices.weights(share)


@dataclass(frozen=True)
class Block:
    """A part of a traced graph.

    Attributes:
        nodes: the nodes that call modules, in execution order.
        outputs: names of the nodes whose values later blocks or the network's output need.
        roundings: the learned rounding of the weights of the block's layers, by short name.
        quantizers: the learned ranges of the block's activations that no earlier block learns.
        kept: bytes that a learning step holds for each sample.
    """

    nodes: list[Any]
    outputs: list[str]
    roundings: dict[str, LearnedRounding]
    quantizers: list[FakeQuantize]
    kept: int = 0


def reconstruct(
    path: Path, setting: CorrectionSettings, iterations: int, seed: int
) -> tuple[onnx.ModelProto, dict[str, Range]]:
    """Return the network with weights that nearest rounding maps to the learned levels.

    Blocks are learned in order: the inputs of a block come from the network with quantized earlier
    blocks, and its targets from the FP32 network. A block keeps nearest rounding and its calibrated
    ranges if learning does not reduce its error, or does not begin before the deadline. The result
    is reproducible with the same seed, batch size, device, threads and memory limit, unless the
    deadline ends the learning.

    The function also returns the range of each quantized activation, by ONNX tensor name.

    Args:
        path: the network's file.
        iterations: number of learning steps for each block.

    Raises:
        UnsupportedError: the network cannot be converted to torch, a layer has no weights to learn
            there, or learning from one sample exceeds the memory budget.
        ConfigError: `device` is `cuda`, and torch sees no GPU; see also `find_plain_layers`.
        QuantizationError: see `find_plain_layers` and `Activations.find_ranges`.
    """
    # Load the network twice as torch modules
    torch.set_num_threads(setting.runtime.threads)
    proto = onnx.load(path)
    cut = onnx.load(path)
    links = Links(proto.graph)
    end_at_logits(cut)
    exact = to_torch_module(cut)
    simulated = to_torch_module(cut)
    device = find_device(setting.runtime.device)

    # Simulate rounded weights
    roundings = {}
    for name, node in layers.find_plain_layers(proto.graph, setting.selection).items():
        weights = read_weights(links, node)
        scheme = setting.weights.scheme(name)
        roundings[name] = LearnedRounding(adaround.find_choices(weights, scheme).to(device))
        layer = find_layer(simulated, node)
        parametrize.register_parametrization(layer, "weight", roundings[name])

    # Simulate rounded activations, with calibrated ranges at first
    skipped = find_float_nodes(proto.graph, setting.selection)
    activations = Activations(
        path, calibration=setting.samples, calib=setting.calib, runtime=setting.runtime
    )
    ranges = activations.find_around(skipped)
    quantizers = quantize_activations(
        simulated,
        cut.graph,
        skipped,
        ranges=ranges,
        scheme=setting.activations,
        float_output=setting.float_output,
    )
    for module in (simulated, exact, *quantizers.values()):
        module.requires_grad_(False)
        module.to(device)
    simulated.eval()

    # Learn block by block
    samples = torch.from_numpy(_samples(cut, setting)).to(device)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        input_quantizer = quantizers.get(cut.graph.input[0].name)
        _learn(
            exact,
            simulated,
            roundings,
            input_quantizer=input_quantizer,
            samples=samples,
            iterations=iterations,
            seed=seed,
            deadline=setting.runtime.deadline,
        )

    # Write weights that nearest rounding maps to the learned levels
    for name, node in layers.find_plain_layers(proto.graph, setting.selection).items():
        weights = read_weights(links, node)
        scheme = setting.weights.scheme(name)
        levels = roundings[name].choices.levels((roundings[name].share() >= 0.5).float())
        levels = levels + scheme.grid(weights, 0).zero_point
        write_weights(links, node, adaround.on_levels(weights, levels, scheme))
    learned = {name: quantizer.range() for name, quantizer in quantizers.items()}
    return proto, learned


def _learn(
    exact: Any,
    simulated: Any,
    roundings: Mapping[str, LearnedRounding],
    input_quantizer: FakeQuantize | None,
    samples: torch.Tensor,
    iterations: int,
    seed: int,
    deadline: Deadline,
) -> None:
    """Learn the rounding and the ranges of `simulated` block by block, to reproduce `exact`.

    Args:
        input_quantizer: rounds the network's input; None if the input stays in float.
        samples: the network's inputs [n, ...].
    """
    # Both networks start from the samples
    placeholders = [node.name for node in exact.graph.nodes if node.op == "placeholder"]
    first = placeholders[0]
    originals: Values = {first: samples}
    inputs: Values = {first: samples}
    if input_quantizer:
        inputs[first] = input_quantizer(samples).detach()

    # Learn each block between the tensors of the blocks before it
    blocks = _measure(exact, _blocks(simulated, roundings), {first: samples[:1]})
    readers = [index for index, block in enumerate(blocks) if _reads(block, first)]
    for index, block in enumerate(blocks):
        targets = _run(exact, block, originals)
        if block.roundings:
            label = f"Reconstruction {index + 1} of {len(blocks)}: {', '.join(block.roundings)}"
            problem = _Problem(simulated, block, inputs, exact=originals, targets=targets)
            problem.learn(
                iterations,
                random=np.random.default_rng([seed, index]),
                label=label,
                deadline=deadline,
            )
        if deadline.is_over:
            deadline.cut(f"learned blocks: about {index} of {len(blocks)}")
            return
        # The next block's inputs come from quantized blocks, its targets from exact ones
        is_read = index < max(readers, default=-1)  # a later block reads the network's input, too
        named = [first] if is_read else []
        inputs = _keep(_run(simulated, block, inputs), inputs, named)
        originals = _keep(targets, originals, named)


@dataclass(frozen=True)
class _Problem:
    """One block's rounding and ranges.

    Attributes:
        inputs: the block's inputs after quantized blocks.
        exact: the same inputs in the FP32 network.
        targets: the block's outputs in the FP32 network.
    """

    module: Any
    block: Block
    inputs: Values
    exact: Values
    targets: Values

    def learn(
        self, iterations: int, random: np.random.Generator, label: str, deadline: Deadline
    ) -> None:
        """Learn for `iterations` or until the deadline; undo it if the error is not smaller."""
        # Keep the state of nearest rounding
        roundings = self.block.roundings.values()
        quantizers = self.block.quantizers
        parts: list[Any] = [*roundings, *quantizers]
        nearest = [copy.deepcopy(part.state_dict()) for part in parts]
        before = self.error()
        unit = max(before, torch.finfo(torch.float32).tiny)

        # Learn the rounding and the ends of the ranges
        ends = [quantizer.log_growth for quantizer in quantizers]
        shares = [rounding.value for rounding in roundings]
        for value in (*shares, *ends):
            value.requires_grad_(True)
        learned = [{"params": shares, "lr": RATE}, {"params": ends, "lr": RANGE_RATE}]
        optimizer = torch.optim.Adam(learned)

        # Learn on random samples
        count = len(next(iter(self.targets.values())))
        tensors = [*self.inputs.values(), *self.targets.values()]
        size = min(count, _at_once(tensors, self.block.kept))
        self._train(True)
        for i in track(range(iterations), label, "iterations"):
            if deadline.is_over:
                break
            rows = torch.from_numpy(random.integers(count, size=size))
            loss = self._loss(rows) / unit
            penalty = adaround.regularize([r.share() for r in roundings], i / iterations)
            optimizer.zero_grad()
            (loss + penalty).backward()
            optimizer.step()
        self._train(False)
        for value in (*shares, *ends):
            value.requires_grad_(False)

        # Return to nearest rounding if nothing was gained; an error of NaN is no gain
        if not self.error() < before:
            for part, state in zip(parts, nearest, strict=True):
                part.load_state_dict(state)

    def error(self) -> float:
        """Return the sum of the mean squared errors of the block's outputs, over all samples."""
        outputs = _run(self.module, self.block, self.inputs)
        errors = []
        for name, target in self.targets.items():
            # Compute in place, because the outputs are large.
            errors.append(outputs[name].sub_(target).square_().mean())
        return float(torch.stack(errors).sum())

    def _loss(self, rows: torch.Tensor) -> torch.Tensor:
        inputs = {}
        for name, values in self.inputs.items():
            inputs[name] = drop_rounding(values[rows], self.exact[name][rows], DROP)
        outputs = _call(self.module, self.block.nodes, inputs)
        errors = []
        for name, target in self.targets.items():
            difference = outputs[name] - target[rows]
            errors.append(difference.square().mean())
        return torch.stack(errors).sum()

    def _train(self, training: bool) -> None:
        for rounding in self.block.roundings.values():
            rounding.train(training)
        for quantizer in self.block.quantizers:
            quantizer.drop = DROP if training else 0.0


def _samples(proto: onnx.ModelProto, setting: CorrectionSettings) -> Any:
    """Return the samples [n, ...]; fewer if one tensor for all would exceed a step's memory.

    Raises:
        UnsupportedError: learning from one sample exceeds the memory budget.
    """
    # Find the largest tensor of a sample
    (sample,) = setting.samples.take(np.arange(1)).batches(1)
    names: list[str] = []
    for node in proto.graph.node:
        names += filter(None, node.output)
    largest = 0
    for part in group_by_memory(proto, names):
        run = open_runner(expose(proto, part), setting.runtime.threads, arena=False)
        for tensor in (sample, *run(sample)):
            largest = max(largest, tensor.nbytes)
    _check(LEARNING * largest)

    # Choose evenly spaced samples
    count = min(len(setting.samples), memory.fitting(largest, memory.step()))
    chosen = np.linspace(0, len(setting.samples) - 1, count).round().astype(np.int64)
    return setting.samples.inputs(chosen)


def _measure(module: Any, blocks: list[Block], inputs: Values) -> list[Block]:
    """Return the blocks with `kept` set: the bytes that learning keeps for one sample.

    Raises:
        UnsupportedError: learning from one sample exceeds the memory budget.
    """
    # Run all blocks on one sample
    nodes: list[Any] = []
    for block in blocks:
        nodes += block.nodes
    with torch.no_grad():
        values = _call(module, nodes, inputs)

    # Sum the bytes of each block's outputs
    measured = []
    for block in blocks:
        kept = 0
        for node in block.nodes:
            value = values[node.name]
            if torch.is_tensor(value):
                kept += KEPT * value.nbytes
        measured.append(replace(block, kept=kept))
    largest = max((block.kept for block in measured), default=0)
    _check(largest)
    return measured


def _check(needed: int) -> None:
    """Raise `UnsupportedError` if learning from one sample exceeds the memory budget."""
    if needed > memory.budget():
        raise UnsupportedError(
            f"corrections.reconstruction: got {needed / 1e6:.0f} MB to learn from one sample, "
            f"expected at most {memory.budget() / 1e6:.0f} MB within memory_gb; try "
            "a larger memory_gb, or corrections.adaround=true"
        )


# A function takes one of several outputs, such as of a Split; modules are the other operators.
_CALLS = ("call_module", "call_function")


def _blocks(module: Any, roundings: Mapping[str, LearnedRounding]) -> list[Block]:
    """Return the blocks of a traced graph, made of the parts of `_cut` by `_join_parts`.

    Two adjacent parts of one layer each become one block, as a depthwise convolution and the
    convolution after it do.
    """
    index = {node: number for number, node in enumerate(module.graph.nodes)}
    last = {}  # the last reader of each node
    for node in module.graph.nodes:
        if node.op in _CALLS:
            last[node] = max((index[user] for user in node.users), default=-1)

    # Find the layers of a part by the learned rounding among its modules
    owners = {id(rounding): name for name, rounding in roundings.items()}

    def modules_of(part: list[Any]) -> list[Any]:
        modules: list[Any] = []
        for node in part:
            if node.op == "call_module":
                modules += module.get_submodule(node.target).modules()
        return modules

    def names(part: list[Any]) -> list[str]:
        layer_names = []
        for own in modules_of(part):
            if id(own) in owners:
                layer_names.append(owners[id(own)])
        return layer_names

    # A range is learned by the first block that has it
    learned: set[Any] = set()
    blocks: list[Block] = []
    for part in _join_parts(_cut(module, index, last), names):
        quantizers = []
        own_roundings = {}
        for own in modules_of(part):
            if isinstance(own, FakeQuantize) and own not in learned:
                quantizers.append(own)
                learned.add(own)
            if id(own) in owners:
                name = owners[id(own)]
                own_roundings[name] = roundings[name]
        outputs = [node.name for node in part if last[node] > index[part[-1]]]
        blocks.append(Block(part, outputs, roundings=own_roundings, quantizers=quantizers))
    return blocks


def _cut(module: Any, index: Mapping[Any, int], last: Mapping[Any, int]) -> list[list[Any]]:
    """Return the sequences of nodes between the points where a single tensor is live.

    The network's input does not count. A layer and its fused activation stay together, and so do an
    operator with several outputs and the functions that take one of them.

    Args:
        index: the position of each node.
        last: the nodes of `_CALLS`, with the position of their last reader.
    """
    parts: list[list[Any]] = [[]]
    live: set[Any] = set()
    for node in last:
        parts[-1].append(node)
        live = {other for other in live | {node} if last[other] > index[node]}
        if len(live) != 1 or _is_fused(module, node):
            continue
        [tensor] = live
        has_several = any(user.op == "call_function" for user in tensor.users)
        if not has_several:
            parts.append([])
    return parts


def _join_parts(
    parts: Sequence[list[Any]], names: Callable[[list[Any]], list[str]]
) -> list[list[Any]]:
    """Return the parts, joined so that each has layers, and two of one layer each form a pair.

    A part without layers joins the next one; at the end, it joins the last one.

    Args:
        names: returns the layers of a part.
    """
    joined: list[list[Any]] = []
    pending: list[Any] = []
    for part in parts:
        pending += part
        if not names(part):
            continue
        is_single = len(names(pending)) == 1
        if is_single and joined and len(names(joined[-1])) == 1:
            joined[-1] += pending
        else:
            joined.append(pending)
        pending = []

    # The remaining nodes at the end have no layer
    if pending and joined:
        joined[-1] += pending
    elif pending:
        joined.append(pending)
    return joined


def _is_fused(module: Any, node: Any) -> bool:
    """Return whether the only follower of a node is a Relu or Clip, which is fused with it."""
    kinds = (nn.ReLU, nn.ReLU6, nn.Hardtanh)
    followers = [user for user in node.users if user.op == "call_module"]
    if len(followers) != 1:
        return False
    follower = module.get_submodule(followers[0].target)
    return any(isinstance(part, kinds) for part in follower.modules())


def _call(module: Any, nodes: list[Any], inputs: Values) -> Values:
    """Run nodes on tensors [n, ...]; return the inputs and the outputs of all nodes."""
    values = dict(inputs)

    def look_up(node: Any) -> Any:
        if node.op == "get_attr":  # the node is a constant
            return attrgetter(node.target)(module)
        return values[node.name]

    for node in nodes:
        args = torch.fx.node.map_arg(node.args, look_up)
        kwargs = torch.fx.node.map_arg(node.kwargs, look_up)
        call = module.get_submodule(node.target) if node.op == "call_module" else node.target
        values[node.name] = call(*args, **kwargs)
    return values


def _at_once(tensors: list[torch.Tensor], kept: int) -> int:
    """Return the batch size for a block's inputs and outputs [n, ...]; for `kept` see `Block`."""
    largest = max(tensor[0].nbytes for tensor in tensors)
    least = min(SMALLEST_BATCH, memory.fitting(LEARNING * largest, memory.budget()))
    wanted = max(least, min(LARGEST_BATCH, AT_ONCE // largest))
    return min(wanted, memory.fitting(kept, memory.budget()))


def _run(module: Any, block: Block, inputs: Values) -> Values:
    """Return the block's outputs for all samples, in batches."""
    outputs: Values = {}
    count = len(next(iter(inputs.values())))
    size = _at_once([*inputs.values()], block.kept)
    with torch.no_grad():
        for start in range(0, count, size):
            part = {name: values[start : start + size] for name, values in inputs.items()}
            values = _call(module, block.nodes, part)
            for name in block.outputs:
                if name not in outputs:
                    outputs[name] = _empty(values[name], count)
                outputs[name][start : start + size] = values[name]
    return outputs


def _empty(values: torch.Tensor, count: int) -> torch.Tensor:
    """Return an empty tensor for `count` samples like those of `values`.

    Filling it needs half the memory of a concatenation. The tensor has the memory format that a
    concatenation would have, because the format determines the order of sums.
    """
    order = torch.contiguous_format
    is_plain = values.ndim != 4 or values.is_contiguous()
    if not is_plain and values.is_contiguous(memory_format=torch.channels_last):
        order = torch.channels_last
    return torch.empty(
        (count, *values.shape[1:]), dtype=values.dtype, device=values.device, memory_format=order
    )


def _reads(block: Block, name: str) -> bool:
    """Return whether a node of a block reads a tensor."""
    read: set[str] = set()
    for node in block.nodes:
        read.update(source.name for source in node.all_input_nodes)
    return name in read


def _keep(outputs: Values, before: Values, named: Sequence[str]) -> Values:
    """Return the tensors that later blocks may read: a block's outputs and earlier tensors.

    A block with a single output ends where no other computed tensor is live. Of the earlier
    tensors, later blocks then read only those in `named`.
    """
    if len(outputs) == 1:
        return {**{name: before[name] for name in named}, **outputs}
    return {**before, **outputs}
