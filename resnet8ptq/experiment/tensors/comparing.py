"""Measures each tensor of a quantized file beside FP32's, and finds the layer that costs most.

Both networks run on the same samples, one by one. For each matched tensor there are two numbers:
the SQNR of the file against FP32, with all errors so far, and the SQNR of the layer alone, which
FP32 computes from the file's own values of the tensors before it.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
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
from resnet8ptq.experiment.diagnosis.measuring import Noise, to_db
from resnet8ptq.experiment.tensors import alignment
from resnet8ptq.experiment.tensors.alignment import Fingerprint
from resnet8ptq.experiment.tensors.explaining import Levels, explain, power
from resnet8ptq.graph.layers import FUSED, weight_layers
from resnet8ptq.graph.links import Links
from resnet8ptq.graph.session import cut_at, expose, open_session
from resnet8ptq.graph.weights import read_weights
from resnet8ptq.models.model import Fp32Model

Array = NDArray[np.float32]
Run = Callable[[NDArray[Any]], Sequence[Array]]  # from one sample to the values of tensors

SAMPLES = 16
MATCHED = 4  # samples of the fingerprints, and of the explanation
LOST_DB = 10.0  # the noise has a tenth of the signal's power
CUT = 1.5  # times the range in the file: a tensor whose values reach further is cut
SOUND_DB = 20.0  # of a layer alone: 8 bits leave about 30 dB


@dataclass
class Compared:
    """A tensor in FP32 and in the file.

    Attributes:
        name, operator: its name in FP32, and the operator that computes it; an input has none.
        inner: the tensor in the file.
        low, high: the values that FP32 reaches.
        weights_db: SQNR of the layer's weights in dB; None if they are not known.
        network: noise of the file's values against FP32's.
        layer: noise against the values that FP32 computes from the file's tensors before it.
    """

    name: str
    operator: str
    inner: Inner
    low: float = np.inf
    high: float = -np.inf
    weights_db: float | None = None
    network: Noise = field(default_factory=Noise)
    layer: Noise = field(default_factory=Noise)

    @property
    def sqnr_db(self) -> float:
        """SQNR of the file against FP32 in dB, with all errors so far."""
        return self.network.sqnr_db

    @property
    def own_db(self) -> float:
        """SQNR of this layer alone in dB."""
        return self.layer.sqnr_db

    @property
    def levels(self) -> Levels | None:
        """The range and the step in the file; None if the file does not round the tensor."""
        low, high, step = self.inner.low, self.inner.high, self.inner.step
        if low is None or high is None or not step:
            return None
        return Levels(low, high, step)

    @property
    def reach(self) -> float:
        """How many times as far as the file's range FP32 reaches; 0 without a range."""
        levels = self.levels
        if levels is None:
            return 0.0
        above = self.high / levels.high if levels.high > 0 else 0.0
        below = self.low / levels.low if levels.low < 0 else 0.0
        return max(above, below)

    def add(self, fp32: Array, file: Array, alone: Array) -> None:
        """Add the values of a sample; `alone`: what FP32 computes from the file's tensors."""
        self.low, self.high = min(self.low, float(fp32.min())), max(self.high, float(fp32.max()))
        fp32, file, alone = map(np.nan_to_num, (fp32, file, alone))  # a mask holds infinities
        self.network.add(fp32, file)
        self.layer.add(alone, file)


@dataclass(frozen=True)
class TensorComparison:
    """The matched tensors, in the order of execution.

    Attributes:
        explanation: of the error of `costliest`, in words.
        unmatched: number of FP32's tensors without a match in the file.
    """

    tensors: tuple[Compared, ...]
    costliest: Compared
    explanation: str
    unmatched: int
    samples: int

    @property
    def first_lost(self) -> Compared | None:
        """The first tensor below `LOST_DB`; None if there is none."""
        return next((tensor for tensor in self.tensors if tensor.sqnr_db < LOST_DB), None)

    @property
    def cut(self) -> list[Compared]:
        """The tensors whose range in the file is too small for FP32's values, the worst first."""
        tensors = [tensor for tensor in self.tensors if tensor.reach > CUT]
        return sorted(tensors, key=lambda tensor: -tensor.reach)

    def describe(self) -> str:
        """Return the finding in one sentence."""
        worst = self.costliest
        made = f"{worst.operator} {worst.name}" if worst.operator else f"input {worst.name}"
        measured = f"{worst.own_db:.1f} dB alone, {worst.sqnr_db:.1f} dB with what came before"
        if worst.own_db >= SOUND_DB:
            return f"no layer is faulty; {made} costs most: {measured}"
        lost = self.first_lost
        where = "" if lost in (None, worst) else f"; {lost.name} is the first below {LOST_DB:g} dB"
        return f"{made} costs most: {measured}; {self.explanation}{where}"


def compare(
    fp32: onnx.ModelProto, inner: Sequence[Inner], run: Run, split: Split, threads: int
) -> TensorComparison | None:
    """Compare a file's tensors with FP32's; None if no tensor is matched.

    Args:
        inner: the tensors that `run` returns.
        run: from network inputs of one sample to the file's tensors.
        split: samples that both run.
    """
    exact = _Fp32(fp32, threads)
    split = split.spaced(SAMPLES)
    first = split.take(np.arange(min(MATCHED, len(split))))
    matched = _match(exact, inner, run, list(first.batches(1)))
    if not matched:
        return None
    pairs = [
        _Pair(Compared(name, exact.operators.get(name, ""), inner[index]), index, axes)
        for name, index, axes in matched
    ]
    exact.keep([pair.compared.name for pair in pairs])
    for pair in pairs:
        if both := exact.weights_beside(pair.compared):
            pair.compared.weights_db = to_db(power(both[0]), power(both[1] - both[0]))
    for batch in track(split.batches(1, padded=False), "Comparing tensors"):
        for pair, arrays in zip(pairs, _run_beside(exact, run, pairs, batch), strict=True):
            pair.compared.add(*arrays)
    worst = pairs.index(_find_costliest(pairs))
    kept = [_run_beside(exact, run, pairs, batch)[worst] for batch in first.batches(1)]
    explanation = explain(
        exact=np.concatenate([alone for _, _, alone in kept]),
        actual=np.concatenate([file for _, file, _ in kept]),
        levels=pairs[worst].compared.levels,
        weights=exact.weights_beside(pairs[worst].compared),
    )
    compared = tuple(pair.compared for pair in pairs)
    unmatched = len(exact.operators) - sum(bool(tensor.operator) for tensor in compared)
    return TensorComparison(compared, compared[worst], explanation, unmatched, len(split))


def compare_file(
    network: Fp32Model, admitted: Admitted, inputs: Match, split: Split, threads: int
) -> TensorComparison | None:
    """Compare the tensors of an admitted file with those of the FP32 network; see `compare`.

    Args:
        inputs: matches the file's inputs to the network's, see `matching`.

    Raises:
        UnsupportedError: the format does not give its inner tensors.
    """
    tensors = admitted.open_tensors(threads)
    run = MatchedNetwork(tensors.run, admitted.contents, inputs, {})
    return compare(onnx.load(network.onnx_path), tensors.inner, run, split, threads)


def _run_beside(
    exact: "_Fp32", run: Run, pairs: Sequence["_Pair"], batch: NDArray[Any]
) -> list[tuple[Array, Array, Array]]:
    """Return each tensor of a sample: in FP32, in the file, and of the layer alone."""
    wanted, values = exact.run(batch), run(batch)
    file = [
        alignment.arrange(values[pair.index], pair.axes, array.shape)
        for pair, array in zip(pairs, wanted, strict=True)
    ]
    return list(zip(wanted, file, exact.run_alone(batch, file), strict=True))


@dataclass(frozen=True)
class _Pair:
    """A matched tensor: its measurements, its index in the file, and its axes there."""

    compared: Compared
    index: int
    axes: tuple[int, ...]


def _find_costliest(pairs: Sequence[_Pair]) -> _Pair:
    """Return the layer with the lowest SQNR alone, of those up to the first lost tensor.

    Behind that tensor, values are so far from FP32's that a match by values may be wrong.
    """
    lost = [number for number, pair in enumerate(pairs) if pair.compared.sqnr_db < LOST_DB]
    candidates = pairs[: lost[0] + 1] if lost else pairs
    return min(candidates, key=lambda pair: pair.compared.own_db)


def _match(
    exact: "_Fp32", inner: Sequence[Inner], run: Run, batches: Sequence[NDArray[Any]]
) -> list[tuple[str, int, tuple[int, ...]]]:
    """Return the names of FP32's matched tensors, their index in the file, and their axes there."""
    theirs = [run(batch) for batch in batches]
    ours = [exact.run(batch) for batch in batches]
    names = [tensor.name for tensor in inner]
    fp32 = [Fingerprint.of(n, values) for n, values in _by_tensor(exact.names, ours)]
    file = [Fingerprint.of(n, values) for n, values in _by_tensor(names, theirs)]
    of_fp32, of_file = ours[0], theirs[0]

    def measure(row: int, column: int) -> float:
        return alignment.find_nearness(of_fp32[row], of_file[column])

    matched = []
    pairs = alignment.match(fp32, file, measure)
    rows = {row for row, _ in pairs}
    for row, column in pairs:
        row = exact.behind_activation(row, rows, inner[column])
        axes = alignment.find_axes(of_fp32[row], of_file[column])
        if axes is not None:
            matched.append((exact.names[row], column, axes))
    return matched


def _by_tensor(
    names: Sequence[str], samples: Sequence[Sequence[Array]]
) -> Iterator[tuple[str, list[Array]]]:
    for index, name in enumerate(names):
        yield name, [values[index] for values in samples]


class _Fp32:
    """The FP32 network: its tensors, and each layer alone.

    Attributes:
        names: the tensors that `run` returns, the inputs first.
        operators: the operator of each tensor that a node computes.
    """

    def __init__(self, proto: onnx.ModelProto, threads: int) -> None:
        self._proto, self._threads = proto, threads
        self._links = Links(proto.graph)
        self._layers = {node.name for node in weight_layers(proto.graph).values()}
        self._inputs = [value.name for value in proto.graph.input]
        made = self._links.producers
        session = self._open(expose(proto, [*made]))
        floats = [value.name for value in session.get_outputs() if value.type == "tensor(float)"]
        inputs = [value.name for value in session.get_inputs() if value.type == "tensor(float)"]
        self.operators = {name: made[name].op_type for name in floats}
        self.names = [*inputs, *floats]
        self._index = {name: index for index, name in enumerate(self.names)}
        self._made = floats
        self._session = session
        self._alone = session  # until `keep` cuts the graph

    def behind_activation(self, row: int, taken: Collection[int], inner: Inner) -> int:
        """Return the index of a tensor, or of its activation if the file's values end at 0.

        A quantizer leaves out a ReLU whose zeros its range makes, and keeps the layer's name.

        Args:
            taken: indices of the tensors that have a match.
        """
        reader = self._links.only_reader(self.names[row])
        if inner.low is None or inner.low < 0 or reader is None or reader.op_type not in FUSED:
            return row
        index = self._index.get(reader.output[0], row)
        return row if index in taken else index

    def weights_beside(self, compared: Compared) -> tuple[Array, Array] | None:
        """Return the weights [channels, ...] of a tensor's layer in FP32 and in the file.

        None if the tensor has no layer, or the file's reader does not give them.
        """
        node, theirs = self._layer_of(compared.name), compared.inner.weights
        if node is None or theirs is None:
            return None
        ours = read_weights(self._links, node)
        axes = alignment.find_axes(ours, theirs)
        return None if axes is None else (ours, alignment.arrange(theirs, axes, ours.shape))

    def _layer_of(self, name: str) -> onnx.NodeProto | None:
        """Return the layer that computes a tensor, also through a fused activation."""
        node = self._links.producers.get(name)
        if node is not None and node.op_type in FUSED:
            node = self._links.producers.get(node.input[0])
        return node if node is not None and node.name in self._layers else None

    def keep(self, names: Sequence[str]) -> None:
        """Return only these tensors from now on, and open the layers between them."""
        self.names = [*names]
        self._made = [name for name in names if name not in self._inputs]
        self._alone = self._open(cut_at(self._proto, self._made))

    def run(self, batch: NDArray[Any]) -> list[Array]:
        """Return the tensors for a sample."""
        feeds: dict[str, Array] = feed(batch, self._inputs)
        made = dict(zip(self._made, self._session.run(self._made, feeds), strict=True))
        values = {**feeds, **made}
        return [values[name] for name in self.names]

    def run_alone(self, batch: NDArray[Any], values: Sequence[Array]) -> list[Array]:
        """Return what each layer computes from other values of the tensors before it."""
        feeds: dict[str, Array] = feed(batch, self._inputs)
        given = {**feeds, **dict(zip(self.names, values, strict=True))}
        taken = {value.name: given[value.name] for value in self._alone.get_inputs()}
        made = dict(zip(self._made, self._alone.run(None, taken), strict=True))
        alone = {**feeds, **made}
        return [alone[name] for name in self.names]

    def _open(self, proto: onnx.ModelProto) -> Any:
        content = proto.SerializeToString()
        return open_session(content, self._threads, optimized=False, arena=False)
