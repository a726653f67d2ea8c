"""Compares the matched tensors of a quantized file with FP32, and explains the noisiest layers.

Both networks run on the same samples, one by one. Each matched tensor has two SQNRs. The first
compares it with FP32, with all errors so far. The second is that of its layer alone: FP32 computes
the tensor from the file's values of the matched tensors before it. `findings` looks for faults in
all measurements.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from resnet8ptq.backends.file.contents import Inner
from resnet8ptq.backends.file.matching import Match
from resnet8ptq.backends.file.predictor import MatchedNetwork
from resnet8ptq.backends.file.reading import Admitted
from resnet8ptq.core.console import track
from resnet8ptq.core.records import feed
from resnet8ptq.data.dataset import Split
from resnet8ptq.exploration.tensors import alignment
from resnet8ptq.exploration.tensors.alignment import Fingerprint
from resnet8ptq.exploration.tensors.explaining import LayerExplanation, explain, find_least_db
from resnet8ptq.exploration.tensors.spread import Array, Levels, Noise, Spread
from resnet8ptq.graph.layers import FUSED, weight_layers
from resnet8ptq.graph.links import Links, input_names
from resnet8ptq.graph.qdq import RoundedActivation, RoundedWeight
from resnet8ptq.graph.session import cut_at, expose, open_session
from resnet8ptq.graph.weights import (
    biased_output,
    find_added_bias,
    read_bias,
    read_initializer,
    read_weights,
)
from resnet8ptq.models.model import Fp32Model

Run = Callable[[NDArray[Any]], Sequence[Array]]  # from one sample to the values of tensors

SAMPLES = 16
MATCHED = 4  # samples for fingerprints and explanations
LOST_DB = 10.0  # the noise has a tenth of the signal's power
SOUND_DB = 20.0  # least SQNR of a sound layer alone; 8 bits leave about 30 dB
JOINING = ("Concat", "Add")
EXPLAINED = 4  # largest number of noisy layers, and of layers with other biases, to explain
OTHER_BIAS = 0.01  # share of the largest bias; rounding to int32 changes far less
OFF_LEVELS = 2  # levels; rounding alone shifts an integer kernel by one level


@dataclass(frozen=True)
class Weight:
    """The weights of a layer in FP32 and in the file, as a whole and by output channel."""

    rounded: RoundedWeight
    spread: Spread
    channels: tuple[Spread, ...]

    @classmethod
    def of(cls, name: str, node: str, values: Array, rounded: Array, dtype: str) -> "Weight":
        """Measure weights [channels, ...] of FP32 and of the file."""
        scales = 1 if _has_one_step(rounded) else len(rounded)
        channels = tuple(map(Spread.of, values, rounded))
        weight = RoundedWeight(name, node, values, rounded=rounded, scales=scales, dtype=dtype)
        return cls(weight, Spread.of(values, rounded), channels)


def _has_one_step(rounded: Array) -> bool:
    """Return whether all values are multiples of the smallest difference between two of them."""
    levels = np.unique(rounded.astype(np.float64))
    gaps = np.diff(levels)
    gaps = gaps[gaps > 1e-6 * np.abs(levels).max(initial=0)]  # smaller ones are float rounding
    steps = levels / gaps.min(initial=np.inf)
    return bool(np.abs(steps - np.rint(steps)).max() < 0.02)


@dataclass
class ComparedTensor:
    """A tensor in FP32 and in the file.

    Attributes:
        name: the name in FP32.
        operator: the operator that computes the tensor; empty for an input.
        inner: the tensor in the file.
        layer: name of the node that computes the tensor; if this is a Relu or Clip, name of the
            node before it, if any; empty for an input.
        nodes: names of the producer, the layer and the readers; if all stay in float, the tensor is
            not rounded.
        weight: the weights of the layer; if it is an Add of a bias, those of the layer before it;
            None if they are not known.
        biases: the biases of the layer [channels], in FP32 and in the file; None if they are not
            known.
        so_far: noise of the file's values against those of FP32.
        own: noise of the file's values against those that FP32 computes from the file's tensors
            before this one.
        kernels: noise of the runtime's kernels against the file's definition, with all errors so
            far.
        off: the number of values, of `count`, where kernels and definition differ by more than
            `OFF_LEVELS` levels.
        most_off: the largest difference of kernels and definition, in levels.
        spread: FP32's values, with the noise of rounding them to the file's levels.
        clipped: the part of the noise in `spread` from values beyond the range by more than half a
            step; `beyond` counts such values.
        parts: for a Concat or Add with several matched inputs, the values of each of these by name,
            with the noise of rounding them with this tensor's step.
        channels: the ends of each channel [4, channels]. The first two rows are the lowest and the
            highest value that FP32 computes from the file's tensors before this one. The last two
            are those in the file. Empty without channels, or if their number differs between
            samples.
        explanation: the cause of the layer's own error; None if it was not analysed.
    """

    name: str
    operator: str
    inner: Inner
    layer: str = ""
    nodes: tuple[str, ...] = ()
    weight: Weight | None = None
    biases: tuple[Array, Array] | None = None
    so_far: Noise = field(default_factory=Noise)
    own: Noise = field(default_factory=Noise)
    kernels: Noise = field(default_factory=Noise)
    off: int = 0
    most_off: float = 0.0
    spread: Spread = field(default_factory=Spread)
    clipped: float = 0.0
    beyond: int = 0
    count: int = 0
    parts: dict[str, Spread] = field(default_factory=dict)
    channels: Array = field(default_factory=lambda: np.empty((4, 0), np.float32))
    explanation: LayerExplanation | None = None

    @property
    def sqnr_db(self) -> float:
        """SQNR of the file against FP32 in dB, with all errors so far."""
        return self.so_far.sqnr_db

    @property
    def own_db(self) -> float:
        """SQNR of this layer alone in dB."""
        return self.own.sqnr_db

    @property
    def weights_db(self) -> float | None:
        """SQNR of the layer's weights in dB; None if they are not known."""
        return None if self.weight is None else self.weight.spread.sqnr_db

    @property
    def levels(self) -> Levels | None:
        """The range and the step in the file.

        None if the file does not round the tensor with one known scale.
        """
        low = self.inner.low
        high = self.inner.high
        step = self.inner.step
        if low is None or high is None or not step:
            return None
        return Levels(low, high, step)

    @property
    def limit(self) -> float:
        """The largest magnitude in the range of `levels`; 0 without `levels`."""
        levels = self.levels
        return 0.0 if levels is None else max(-levels.low, levels.high)

    @property
    def rounded(self) -> RoundedActivation | None:
        """The rounding to apply in the FP32 network; None without `levels`."""
        levels = self.levels
        if levels is None:
            return None
        return RoundedActivation(
            name=self.name,
            dequantized=self.inner.name,
            layer=self.layer,
            nodes=self.nodes,
            scale=levels.step,
            low=levels.low,
            high=levels.high,
        )

    @property
    def beyond_share(self) -> float:
        """The fraction of the values that `beyond` counts."""
        return self.beyond / max(self.count, 1)

    @property
    def off_share(self) -> float:
        """The fraction of the values that `off` counts."""
        return self.off / max(self.count, 1)

    @property
    def is_faulty(self) -> bool:
        """Whether the layer alone is too noisy, or has a certain fault, which may cost little."""
        return self.own_db < SOUND_DB or self.has_certain_fault

    @property
    def has_certain_fault(self) -> bool:
        """Whether the explanation is a certain fault, see `LayerExplanation`."""
        return self.explanation is not None and self.explanation.certain

    def describe(self) -> str:
        """Return the operator and the name; `input` and the name for an input."""
        return f"{self.operator} {self.name}" if self.operator else f"input {self.name}"

    def add(self, fp32: Array, file: Array, alone: Array) -> None:
        """Add the values of a sample in FP32 and in the file.

        Args:
            alone: the values that FP32 computes from the file's tensors before this one.
        """
        self.so_far.add(fp32, file)
        self.own.add(alone, file)
        self.count += fp32.size

        # The noise of rounding alone, and the part of it from values beyond the range
        levels = self.levels
        rounded = fp32 if levels is None else levels.round(fp32)
        self.spread.add(fp32, rounded)
        if levels is not None:
            half = levels.step / 2
            outside = (fp32 < levels.low - half) | (fp32 > levels.high + half)
            self.beyond += int(np.count_nonzero(outside))
            self.clipped += float(np.square((rounded - fp32)[outside], dtype=np.float64).sum())
        self._add_channels(alone, file)

    def _add_channels(self, alone: Array, file: Array) -> None:
        """Add the ends of the channels of a sample to `channels`."""
        if alone.ndim < 2 or not alone.size:
            return
        is_image = alone.ndim == 4 or "Conv" in self.operator
        axis = 1 if is_image else alone.ndim - 1  # the axis of the channels

        # Lowest and highest value of each channel; even rows are lowest
        others = tuple(other for other in range(alone.ndim) if other != axis)
        ends = np.stack([alone.min(others), alone.max(others), file.min(others), file.max(others)])
        if self.count == alone.size:  # the first sample
            self.channels = ends
        elif self.channels.shape == ends.shape:
            self.channels[::2] = np.minimum(self.channels[::2], ends[::2])
            self.channels[1::2] = np.maximum(self.channels[1::2], ends[1::2])
        else:  # texts differ in length, so the axis counts tokens
            self.channels = ends[:, :0]

    def add_kernel(self, defined: Array, kernel: Array) -> None:
        """Add the values of a sample: as the file defines them, and as the kernels compute them."""
        self.kernels.add(defined, kernel)
        levels = self.levels
        if levels:
            differences = np.abs(kernel - defined) / levels.step
            self.off += int(np.count_nonzero(differences > OFF_LEVELS + 0.5))
            self.most_off = max(self.most_off, float(differences.max(initial=0)))

    def add_part(self, name: str, fp32: Array) -> None:
        """Add the values of one input of the Concat or Add that makes this tensor."""
        levels = self.levels
        if levels:
            rounded = np.rint(fp32 / levels.step) * np.float32(levels.step)
            self.parts.setdefault(name, Spread()).add(fp32, rounded)


@dataclass(frozen=True)
class TensorComparison:
    """The matched tensors, in the order of execution.

    Attributes:
        network: the FP32 network.
        costliest: the tensor with the lowest SQNR alone, up to the first lost tensor.
        times: the time of the file's nodes in ms, by name; empty if not measured.
        operators: the operator of each float tensor that FP32 computes.
    """

    network: onnx.ModelProto
    tensors: tuple[ComparedTensor, ...]
    costliest: ComparedTensor
    operators: Mapping[str, str]
    samples: int
    times: Mapping[str, float] = field(default_factory=dict)

    @property
    def unmatched(self) -> int:
        """The number of float tensors that FP32 computes and that have no match in the file."""
        computed = [tensor for tensor in self.tensors if tensor.operator]
        return len(self.operators) - len(computed)

    @property
    def first_lost(self) -> ComparedTensor | None:
        """The first tensor with `sqnr_db` below `LOST_DB`; None if there is none."""
        for tensor in self.tensors:
            if tensor.sqnr_db < LOST_DB:
                return tensor
        return None

    @property
    def doubtful(self) -> set[str]:
        """The names of tensors and weights whose match may be wrong.

        After the first lost tensor, values are far from FP32, so only equal names are sure.
        """
        names: set[str] = set()
        first = self.first_lost
        is_lost = False
        for tensor in self.tensors:
            if is_lost and tensor.inner.name != tensor.name:
                names.add(tensor.name)
                if tensor.weight is not None:
                    names.add(tensor.weight.rounded.name)
            is_lost = is_lost or tensor is first
        return names

    @property
    def faulty(self) -> ComparedTensor | None:
        """The costliest layer if it is faulty; else the noisiest with a certain fault, or None."""
        if self.costliest.is_faulty:
            return self.costliest

        # A layer after the first lost tensor, or one whose fault costs little
        certain = [tensor for tensor in self.tensors if tensor.has_certain_fault]
        return min(certain, key=lambda tensor: tensor.own_db, default=None)

    @property
    def weights(self) -> list[Weight]:
        """The weights of the layers, as far as they are known, each once."""
        by_node = {}
        for tensor in self.tensors:
            if tensor.weight is not None:
                by_node[tensor.weight.rounded.node] = tensor.weight
        return [*by_node.values()]

    def describe(self) -> str:
        """Return a sentence about the faulty layer, or about the costliest if none is faulty."""
        worst = self.faulty or self.costliest
        measured = f"{worst.own_db:.1f} dB alone, {worst.sqnr_db:.1f} dB with what came before"
        if not worst.is_faulty:
            return f"no layer is faulty; {worst.describe()} costs most: {measured}"

        verb = "costs most" if worst is self.costliest else "is faulty"
        sentence = f"{worst.describe()} {verb}: {measured}"
        if worst.explanation is not None:
            sentence += f"; {worst.explanation.words}"
        lost = self.first_lost
        if lost is not None and lost is not worst:
            sentence += f"; {lost.name} is the first below {LOST_DB:g} dB"
        return sentence


def compare_tensors(
    fp32: onnx.ModelProto,
    inner: Sequence[Inner],
    run: Run,
    split: Split,
    threads: int,
    run_kernels: Run | None = None,
) -> TensorComparison | None:
    """Compare a file's tensors with those of FP32; None if no tensor is matched.

    Args:
        inner: the tensors that `run` returns.
        run: returns the file's tensors for one sample, where possible as the file defines them, see
            `contents.Tensors`.
        split: the samples; both networks run on at most `SAMPLES` of them, evenly spaced.
        run_kernels: returns the tensors as the runtime's kernels compute them; None if the runtime
            does not give them.
    """
    # Match the tensors by a few samples
    exact = _Fp32(fp32, threads)
    split = split.spaced(SAMPLES)
    first = split.take(np.arange(min(MATCHED, len(split))))
    matched = _match(exact, inner, run, batches=list(first.batches(1)))
    if not matched:
        return None
    pairs = []
    for name, index, axes in matched:
        pairs.append(_Pair(exact.describe(name, inner[index]), index, axes))

    # Measure each pair, sample by sample
    exact.keep([pair.compared.name for pair in pairs])
    joins = exact.find_joins()
    for batch in track(split.batches(1, padded=False), "Comparing tensors"):
        beside = _run_beside(exact, run, pairs, batch)
        kernels = None if run_kernels is None else run_kernels(batch)
        for pair, arrays in zip(pairs, beside, strict=True):
            pair.compared.add(*arrays)
            if kernels is not None:
                kernel = alignment.arrange(kernels[pair.index], pair.axes, arrays[0].shape)
                pair.compared.add_kernel(arrays[1], kernel)
        for number, parts in joins.items():
            for part in parts:
                pairs[number].compared.add_part(pairs[part].compared.name, beside[part][0])

    # Explain the worst layers
    worst = _find_costliest(pairs)
    _explain(exact, run, pairs, worst=worst, batches=list(first.batches(1)))
    compared = tuple(pair.compared for pair in pairs)
    return TensorComparison(
        fp32,
        tensors=compared,
        costliest=compared[worst],
        operators=exact.operators,
        samples=len(split),
    )


def _explain(
    exact: "_Fp32",
    run: Run,
    pairs: Sequence["_Pair"],
    worst: int,
    batches: Sequence[NDArray[Any]],
) -> None:
    """Explain the costliest layer, the noisiest below `SOUND_DB`, and some with unlike biases.

    Unlike biases are those of `_has_other_bias`.

    Args:
        worst: the index of the costliest layer.
    """
    # Choose the layers, the noisiest first
    order = sorted(range(len(pairs)), key=lambda number: pairs[number].compared.own_db)
    faulty = []
    biased = []
    for number in order:
        compared = pairs[number].compared
        if compared.own_db < SOUND_DB:
            faulty.append(number)
        if _has_other_bias(compared):
            biased.append(number)
    explained = [worst, *faulty[: EXPLAINED - 1], *biased[:EXPLAINED]]

    # Join the values of samples of one length
    runs = [_run_beside(exact, run, pairs, batch) for batch in batches]
    for number in dict.fromkeys(explained):
        wanted: list[Array] = []
        got: list[Array] = []
        own: list[Array] = []
        for tensors in runs:
            fp32, file, alone = tensors[number]
            if not wanted or alone.shape == wanted[0].shape:
                wanted.append(alone)
                got.append(file)
                own.append(fp32)

        # Explain the outputs by the weights, if they are known
        compared = pairs[number].compared
        weights = None
        dtype = ""
        if compared.weight is not None:
            rounded = compared.weight.rounded
            weights = (rounded.values, rounded.rounded)
            dtype = rounded.dtype
        compared.explanation = explain(
            exact=np.concatenate(wanted),
            actual=np.concatenate(got),
            levels=compared.levels,
            weights=weights,
            biases=compared.biases,
            fp32=np.concatenate(own),
            least_db=find_least_db(dtype),
        )


def _has_other_bias(compared: ComparedTensor) -> bool:
    """Return whether the file's biases differ from FP32's by more than rounding."""
    if compared.biases is None:
        return False
    ours, theirs = compared.biases
    return not np.allclose(theirs, ours, rtol=0, atol=OTHER_BIAS * np.abs(ours).max(initial=0))


def compare_file(
    network: Fp32Model, admitted: Admitted, inputs: Match, split: Split, threads: int
) -> TensorComparison | None:
    """Compare the tensors of an admitted file with those of FP32; see `compare_tensors`.

    Args:
        inputs: the file's inputs for those of the network, see `match_inputs`.

    Raises:
        UnsupportedError: the format does not give its inner tensors.
    """
    tensors = admitted.open_tensors(threads)
    run = MatchedNetwork(tensors.run, admitted.contents, inputs, outputs={})
    kernels = None
    if tensors.run_kernels is not None:
        kernels = replace(run, run=tensors.run_kernels)
    return compare_tensors(
        onnx.load(network.onnx_path),
        tensors.inner,
        run,
        split=split,
        threads=threads,
        run_kernels=kernels,
    )


def _run_beside(
    exact: "_Fp32", run: Run, pairs: Sequence["_Pair"], batch: NDArray[Any]
) -> list[tuple[Array, Array, Array]]:
    """Return each tensor of a sample three times: in FP32, in the file, and by its layer alone."""
    wanted = exact.run(batch)
    values = run(batch)
    file = []
    for pair, array in zip(pairs, wanted, strict=True):
        file.append(alignment.arrange(values[pair.index], pair.axes, array.shape))
    alone = exact.run_alone(batch, file)
    return list(zip(wanted, file, alone, strict=True))


@dataclass(frozen=True)
class _Pair:
    """A matched tensor.

    Attributes:
        index: the index among the file's tensors.
        axes: the transposition of the file's tensor, see `alignment.find_axes`.
    """

    compared: ComparedTensor
    index: int
    axes: tuple[int, ...]


def _find_costliest(pairs: Sequence[_Pair]) -> int:
    """Return the index of the pair whose layer alone has the lowest SQNR, `own_db`.

    The last candidate is the first tensor below `LOST_DB`. After that tensor, values are so far
    from FP32's that a match by values may be wrong.
    """
    candidates = []
    for number, pair in enumerate(pairs):
        candidates.append(number)
        if pair.compared.sqnr_db < LOST_DB:
            break
    return min(candidates, key=lambda number: pairs[number].compared.own_db)


def _match(
    exact: "_Fp32", inner: Sequence[Inner], run: Run, batches: Sequence[NDArray[Any]]
) -> list[tuple[str, int, tuple[int, ...]]]:
    """Return each matched tensor's name in FP32, index in the file, and transposition."""
    theirs = []
    ours = []
    for batch in batches:
        theirs.append(run(batch))
        ours.append(exact.run(batch))

    # Fingerprints of all samples propose pairs; the values of the first sample decide
    names = [tensor.name for tensor in inner]
    fp32 = list(map(Fingerprint.of, exact.names, zip(*ours, strict=True)))
    file = list(map(Fingerprint.of, names, zip(*theirs, strict=True)))
    of_fp32 = ours[0]
    of_file = theirs[0]

    def measure(row: int, column: int) -> float:
        return alignment.find_nearness(of_fp32[row], of_file[column])

    # A pair may move behind an activation: order the pairs again
    pairs = alignment.match(fp32, file, measure)
    rows = {row for row, _ in pairs}
    behind = []
    for row, column in pairs:
        behind.append((exact.behind_activation(row, rows, inner[column]), column))
    matched = []
    for row, column in sorted(behind):
        axes = alignment.find_axes(of_fp32[row], of_file[column])
        if axes is not None:
            matched.append((exact.names[row], column, axes))
    return matched


def _number(names: Sequence[str]) -> dict[str, int]:
    """Return the index of each name."""
    return {name: index for index, name in enumerate(names)}


def _float_names(values: Sequence[Any]) -> list[str]:
    """Return the names of a session's float inputs or outputs."""
    return [value.name for value in values if value.type == "tensor(float)"]


class _Fp32:
    """The FP32 network: its tensors, and each layer alone.

    Attributes:
        names: the float tensors that `run` returns: first all, inputs before others; after `keep`,
            those that were named.
        operators: the operator of each float tensor that a node computes.
    """

    def __init__(self, proto: onnx.ModelProto, threads: int) -> None:
        self._proto = proto
        self._threads = threads
        self._links = Links(proto.graph)
        self._layers = {node.name: name for name, node in weight_layers(proto.graph).items()}
        self._inputs = input_names(proto.graph)
        made = self._links.producers
        session = self._open(expose(proto, [*made]))
        floats = _float_names(session.get_outputs())
        self.operators = {name: made[name].op_type for name in floats}
        self.names = [*_float_names(session.get_inputs()), *floats]
        self._index = _number(self.names)
        self._made = floats
        self._session = session
        self._alone = session  # until `keep` cuts the graph

    def behind_activation(self, row: int, taken: Collection[int], inner: Inner) -> int:
        """Return the index of a tensor, or of the activation after it that the file has fused.

        A quantizer may remove a ReLU if the range of the tensor starts at 0; the tensor keeps the
        layer's name. A range without negative values therefore belongs to the activation.

        Args:
            taken: indices of the tensors that have a match.
        """
        reader = self._links.only_reader(self.names[row])
        if inner.low is None or inner.low < 0 or reader is None or reader.op_type not in FUSED:
            return row
        index = self._index.get(reader.output[0], row)
        return row if index in taken else index

    def describe(self, name: str, inner: Inner) -> ComparedTensor:
        """Return a tensor with its nodes, weights and biases, without measurements."""
        # The tensor stays in float if its producer, its layer and its readers do
        producer = self._links.producers.get(name)
        layer = self._layer_of(name)
        layer_name = "" if layer is None else layer.name
        readers = self._links.readers(name)
        weighted = self._find_weighted(layer)
        nodes: dict[str, None] = {}  # an ordered set
        for node in (producer, layer, *readers):
            if node is not None:
                nodes[node.name] = None
        return ComparedTensor(
            name=name,
            operator=self.operators.get(name, ""),
            inner=inner,
            layer=layer_name,
            nodes=tuple(nodes),
            weight=self._weight_of(weighted, inner),
            biases=self._biases_of(weighted, inner),
        )

    def _weight_of(self, node: onnx.NodeProto | None, inner: Inner) -> Weight | None:
        """Return the weights of a layer; None if it has none, or the file gives none that fit."""
        if node is None or node.name not in self._layers or inner.weights is None:
            return None
        values = read_weights(self._links, node)
        axes = alignment.find_axes(values, inner.weights)
        if axes is None:
            return None
        rounded = alignment.arrange(inner.weights, axes, values.shape)
        name = self._layers[node.name]
        dtype = inner.weight_dtype
        return Weight.of(name, node=node.name, values=values, rounded=rounded, dtype=dtype)

    def _biases_of(self, node: onnx.NodeProto | None, inner: Inner) -> tuple[Array, Array] | None:
        """Return the biases of a layer in FP32 and in the file.

        None if one of them is not known, or if their numbers of channels differ.
        """
        if node is None or node.name not in self._layers or inner.bias is None:
            return None
        if not self._links.constants.keys() >= {*node.input[1:]}:
            return None

        # The bias of a MatMul is a constant of the Add after it
        ours = read_bias(self._links, node)
        if node.op_type == "MatMul":
            added = find_added_bias(self._links, node)
            if added is None:
                return None
            add, index = added
            ours = read_initializer(self._links, add.input[index])
        if ours.shape != inner.bias.shape:
            return None
        return ours, inner.bias

    def _layer_of(self, name: str) -> onnx.NodeProto | None:
        """Return the node that computes a tensor; if it is a Relu or Clip, the node before it.

        Returns a Relu or Clip itself if it reads an input of the network, and None for an input.
        """
        node = self._links.producers.get(name)
        if node is not None and node.op_type in FUSED:
            return self._links.producers.get(node.input[0], node)
        return node

    def _find_weighted(self, node: onnx.NodeProto | None) -> onnx.NodeProto | None:
        """Return the layer before an Add of its bias, which a file may fuse; else the node."""
        if node is None or node.op_type != "Add":
            return node
        for name in node.input:
            product = self._links.producers.get(name)
            if product is None or product.name not in self._layers:
                continue
            if biased_output(self._links, product) == node.output[0]:
                return product
        return node

    def find_joins(self) -> dict[int, list[int]]:
        """Return the inputs of each output of a Concat or Add, as indices into `names`.

        Outputs with fewer than two different inputs in `names` are left out. The output of a Relu
        or Clip after the node counts, too.
        """
        joins = {}
        for name, index in self._index.items():
            node = self._layer_of(name)
            if node is None or node.op_type not in JOINING:
                continue
            parts = []
            for part in dict.fromkeys(node.input):  # x + x has one part
                if part in self._index:
                    parts.append(self._index[part])
            if len(parts) > 1:
                joins[index] = parts
        return joins

    def keep(self, names: Sequence[str]) -> None:
        """Restrict later runs to these tensors, and load the layers between them."""
        self.names = [*names]
        self._index = _number(names)
        self._made = [name for name in names if name not in self._inputs]
        self._alone = self._open(cut_at(self._proto, self._made))

    def run(self, batch: NDArray[Any]) -> list[Array]:
        """Return the tensors of `names` for a sample."""
        feeds: dict[str, Array] = feed(batch, self._inputs)
        return self._in_order(feeds, self._session.run(self._made, feeds))

    def run_alone(self, batch: NDArray[Any], values: Sequence[Array]) -> list[Array]:
        """Return the tensors of `names`, each computed from `values` of the tensors before it.

        Inputs of the network are returned as they are in `batch`.

        Args:
            values: values of the tensors, in the order of `names`.
        """
        feeds: dict[str, Array] = feed(batch, self._inputs)
        known = {**feeds, **dict(zip(self.names, values, strict=True))}
        cut_feeds = {port.name: known[port.name] for port in self._alone.get_inputs()}
        return self._in_order(feeds, self._alone.run(None, cut_feeds))

    def _in_order(self, feeds: Mapping[str, Array], made: Sequence[Array]) -> list[Array]:
        """Return inputs and computed tensors in the order of `names`."""
        values = {**feeds, **dict(zip(self._made, made, strict=True))}
        return [values[name] for name in self.names]

    def _open(self, proto: onnx.ModelProto) -> Any:
        content = proto.SerializeToString()
        return open_session(content, self._threads, optimized=False, arena=False)
