"""Measures each tensor of the quantized graph beside the FP32 graph.

Powers are summed batch by batch, so no activation is kept.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from resnet8ptq.core.console import track
from resnet8ptq.core.records import feed, names_of, unpack
from resnet8ptq.data.dataset import Split
from resnet8ptq.graph import qdq
from resnet8ptq.graph.qdq import RoundedActivation, RoundedWeight
from resnet8ptq.graph.session import cut_at, end_at_logits, expose, fit, open_session

Array = NDArray[np.float32]

SAMPLES = 32
AT_ONCE = 2**20  # values: the measurements make several copies of them
BULK = 0.99  # of the values that are not zero: what is beyond is an outlier, or the tail
OFF_LEVELS = 2  # rounding alone puts an integer kernel one level beside float arithmetic
_OCTAVES = 512  # of float32's magnitudes, with room on both sides
_MIDDLE = _OCTAVES // 2


@dataclass
class Noise:
    """Powers of a signal and of its noise, summed over values."""

    signal: float = 0.0
    noise: float = 0.0

    def add(self, exact: Array, noisy: Array) -> None:
        """Add exact values and the same values with noise."""
        signal = exact.ravel().astype(np.float64)
        error = noisy.ravel() - signal
        self.signal += float(np.dot(signal, signal))
        self.noise += float(np.dot(error, error))

    @property
    def sqnr_db(self) -> float:
        """Signal-to-quantization-noise ratio in dB; infinite without noise."""
        return to_db(self.signal, self.noise)


def to_db(signal: float, noise: float) -> float:
    """Return 10 * log10(signal / noise); infinite without noise, minus infinite without signal."""
    if noise <= 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf


@dataclass
class Spread:
    """Histogram of nonzero values by magnitude; each bin is an octave [2**(n-1), 2**n)."""

    counts: NDArray[np.float64] = field(default_factory=lambda: np.zeros(_OCTAVES))
    signal: NDArray[np.float64] = field(default_factory=lambda: np.zeros(_OCTAVES))
    noise: NDArray[np.float64] = field(default_factory=lambda: np.zeros(_OCTAVES))
    low: float = math.inf
    high: float = -math.inf

    @classmethod
    def of(cls, values: Array, rounded: Array) -> "Spread":
        """Return the histogram of `values`, with the noise of their rounded values."""
        spread = cls()
        spread.add(values, rounded)
        return spread

    def add(self, values: Array, rounded: Array) -> None:
        """Add exact values and their rounded values."""
        values, rounded = values.ravel(), rounded.ravel()
        self.low = min(self.low, float(values.min(initial=math.inf)))
        self.high = max(self.high, float(values.max(initial=-math.inf)))
        kept = values != 0
        values, errors = values[kept], (rounded - values)[kept]
        octaves = np.frexp(values)[1] + _MIDDLE
        for sums, weights in (
            (self.counts, None),
            (self.signal, values * values),
            (self.noise, errors * errors),
        ):
            sums += np.bincount(octaves, weights, _OCTAVES)

    @property
    def peak(self) -> float:
        """The largest magnitude."""
        return max(abs(self.low), abs(self.high)) if self.counts.any() else 0.0

    @property
    def reach(self) -> float:
        """The smallest power of two above 99% of the values, with at least one value beyond.

        0 if no value lies below it.
        """
        octave = self._last
        return math.ldexp(1.0, octave - _MIDDLE) if octave >= 0 else 0.0

    @property
    def bulk_db(self) -> float:
        """SQNR of the values below `reach`."""
        bulk = slice(self._last + 1)
        return to_db(float(self.signal[bulk].sum()), float(self.noise[bulk].sum()))

    @property
    def peaks(self) -> float:
        """The ratio of `peak` to `reach`; 0 if `reach` is 0."""
        return self.peak / self.reach if self.reach else 0.0

    @property
    def _last(self) -> int:
        total = self.counts.sum()
        least = min(BULK * total, total - 1)  # where there are few, the largest may be the outlier
        below = np.cumsum(self.counts)
        return int(np.searchsorted(below, least)) if least > 0 else -1


@dataclass(frozen=True)
class Weight:
    """Measurements of the weights of a quantized layer.

    Attributes:
        name, node, dtype, scales: see `RoundedWeight`.
        channels: measurements of each output channel.
    """

    name: str
    node: str
    dtype: str
    scales: int
    sqnr_db: float
    spread: Spread
    channels: tuple[Spread, ...]

    @classmethod
    def of(cls, weight: RoundedWeight) -> "Weight":
        """Measure the weights of a layer."""
        noise = Noise()
        noise.add(weight.values, weight.rounded)
        channels = tuple(map(Spread.of, weight.values, weight.rounded))
        whole = Spread.of(weight.values, weight.rounded)
        return cls(
            weight.name, weight.node, weight.dtype, weight.scales, noise.sqnr_db, whole, channels
        )


@dataclass
class Activation:
    """Measurements of a tensor that is rounded while the network runs.

    Attributes:
        tensor: its name, its range, its producer and its consumers.
        network: noise of the quantized network's values against FP32's.
        layer: the same if only the producing layer is quantized, with FP32's values as inputs.
        rounding: noise of the nearest levels against FP32's values.
        clipped: the part of that noise from values beyond the range; `beyond` counts such values.
        kernels: noise of the integer kernels against float arithmetic on the same integer inputs.
        off: number of values, of `count`, where both differ by more than `OFF_LEVELS` levels.
        most_off: the largest difference in levels.
        parts: for a Concat or Add, by the name of each input: noise of rounding it with this
            tensor's scale.
    """

    tensor: RoundedActivation
    network: Noise = field(default_factory=Noise)
    layer: Noise = field(default_factory=Noise)
    spread: Spread = field(default_factory=Spread)
    clipped: float = 0.0
    beyond: int = 0
    kernels: Noise = field(default_factory=Noise)
    off: int = 0
    most_off: float = 0.0
    count: int = 0
    parts: dict[str, Noise] = field(default_factory=dict)

    def add(self, fp32: Array, network: Array) -> None:
        """Add values of FP32, and of the quantized network."""
        tensor, rounded = self.tensor, self.tensor.round(fp32)
        self.network.add(fp32, network)
        self.spread.add(fp32, rounded)
        half = tensor.scale / 2
        outside = (fp32 < tensor.low - half) | (fp32 > tensor.high + half)
        self.beyond += int(np.count_nonzero(outside))
        self.clipped += float(((rounded - fp32)[outside] ** 2).sum())
        self.count += fp32.size

    def add_kernel(self, network: Array, kernel: Array) -> None:
        """Add values of the quantized network, and of the layer in float for the same inputs."""
        self.kernels.add(kernel, network)
        levels = np.abs(network - kernel) / self.tensor.scale
        self.off += int(np.count_nonzero(levels > OFF_LEVELS + 0.5))
        self.most_off = max(self.most_off, float(levels.max(initial=0)))

    def add_part(self, name: str, fp32: Array) -> None:
        """Add values of one input of the Concat or Add that makes this tensor."""
        scale = self.tensor.scale
        self.parts.setdefault(name, Noise()).add(fp32, np.rint(fp32 / scale) * scale)

    @property
    def beyond_share(self) -> float:
        """The fraction of the values beyond the range."""
        return self.beyond / self.count

    @property
    def off_share(self) -> float:
        """The fraction of the values that `off` counts."""
        return self.off / self.count

    @property
    def rounding_db(self) -> float:
        """SQNR of rounding FP32's values to the nearest levels."""
        return to_db(float(self.spread.signal.sum()), float(self.spread.noise.sum()))


@dataclass(frozen=True)
class TensorMeasurements:
    """The measurements of all tensors of a network, in graph order.

    Attributes:
        arithmetic: noise of the first output, computed from the QDQ graph in float arithmetic,
            against FP32; of the logits if the network ends in a softmax.
        kernels: noise of the executed kernels against that float arithmetic.
        fed: the magnitudes of the network's input over the held-out samples.
        calibrated: the same over the calibration samples.
        samples: number of held-out samples.
    """

    weights: tuple[Weight, ...]
    activations: tuple[Activation, ...]
    arithmetic: Noise
    kernels: Noise
    fed: Spread
    calibrated: Spread
    samples: int


def measure(
    fp32: onnx.ModelProto,
    quantized: onnx.ModelProto,
    calibration: Split,
    held_out: Split,
    threads: int,
) -> TensorMeasurements:
    """Run both graphs on some of the held-out samples.

    Args:
        quantized: the quantized network in QDQ format.
        calibration: the calibration samples; their values are read, but the network does not run on
            them.
    """
    weights = qdq.rounded_weights(fp32.graph, quantized.graph)
    tensors = qdq.rounded_activations(fp32.graph, quantized.graph)
    activations = [Activation(tensor) for tensor in tensors]
    joined = qdq.joined(fp32.graph, tensors)
    split, arithmetic, kernels, fed = held_out.spaced(SAMPLES), Noise(), Noise(), Spread()
    beside = _Sessions(fp32, quantized, tensors, threads)
    (sample,) = split.take(np.arange(1)).batches(1)
    at_once = fit([beside.fp32, beside.quantized], sample)
    for batch in track(split.batches(at_once, padded=False), "Measuring tensors"):
        _add_batch(activations, joined, beside, batch)
        ends = beside.outputs(batch)
        arithmetic.add(ends[0], ends[1])
        kernels.add(ends[1], ends[2])
        for floats in _float_values(batch):
            fed.add(floats, floats)
    calibrated = Spread()
    for batch in calibration.spaced(8 * SAMPLES).batches(SAMPLES):
        for floats in _float_values(batch):
            calibrated.add(floats, floats)
    measured = tuple(map(Weight.of, weights)), tuple(activations)
    return TensorMeasurements(*measured, arithmetic, kernels, fed, calibrated, len(split))


def _add_batch(
    activations: Sequence[Activation],
    joined: Mapping[int, Sequence[int]],
    beside: "_Sessions",
    batch: Array,
) -> None:
    """Add a batch to the measurements; at most two of its four sets of tensors are in memory."""
    wanted = beside.fp32(batch)
    layers = [activation.layer for activation in activations]
    _add(Noise.add, layers, wanted, beside.layers(batch, wanted))
    for number, parts in joined.items():
        for part in parts:
            name = activations[part].tensor.name
            for [values] in _blocks(wanted[part]):
                activations[number].add_part(name, values)
    noisy = beside.quantized(batch)
    _add(Activation.add, activations, wanted, noisy)
    del wanted
    _add(Activation.add_kernel, activations, noisy, beside.layers(batch, noisy))


def _add(method: Callable[..., None], owners: Sequence[object], *sets: Sequence[Array]) -> None:
    """Call a method of each owner with its tensors from the sets."""
    for owner, *tensors in zip(owners, *sets, strict=True):
        for values in _blocks(*tensors):
            method(owner, *values)


def _float_values(batch: Array) -> Iterator[Array]:
    """Yield a batch's values in parts; of records, only float fields: tokens have no range."""
    fields = unpack(batch).values() if names_of(batch.dtype) else [batch]
    for values in fields:
        if values is batch or values.dtype.kind == "f":
            yield from (block for [block] in _blocks(values))


def _blocks(*tensors: Array) -> Iterator[list[Array]]:
    """Yield the values of tensors of one shape in aligned parts of `AT_ONCE`."""
    flat = [tensor.ravel() for tensor in tensors]
    for start in range(0, flat[0].size, AT_ONCE):
        yield [values[start : start + AT_ONCE] for values in flat]


class _Sessions:
    """The compared sessions; each returns the tensors in the same order."""

    def __init__(
        self,
        fp32: onnx.ModelProto,
        quantized: onnx.ModelProto,
        tensors: Sequence[RoundedActivation],
        threads: int,
    ) -> None:
        self._inputs = [value.name for value in fp32.graph.input]
        self._names = [tensor.name for tensor in tensors]
        self._dequantized = [tensor.dequantized for tensor in tensors]
        made = [name for name in self._names if name not in self._inputs]

        def open_(proto: onnx.ModelProto, optimized: bool = True) -> Any:
            content = proto.SerializeToString()
            return open_session(content, threads, optimized=optimized, arena=False)

        self._fp32 = open_(expose(fp32, made))
        # What is behind DequantizeLinear may be asked for without undoing integer kernels, but for
        # some of those with int8 activations: so the outputs are compared by themselves as well.
        self._quantized = open_(expose(quantized, self._dequantized))
        self._layers = open_(cut_at(quantized, self._dequantized), optimized=False)
        ends = [copy.deepcopy(proto) for proto in (fp32, quantized)]
        for proto in ends:
            end_at_logits(proto)
        self._ends = [open_(ends[0]), open_(ends[1], optimized=False), open_(ends[1])]

    def fp32(self, batch: Array) -> list[Array]:
        """Return the values of FP32."""
        feeds = self._feed(batch)
        made = iter(self._fp32.run(None, feeds))
        return [feeds[name] if name in feeds else next(made) for name in self._names]

    def quantized(self, batch: Array) -> list[Array]:
        """Return the values of the quantized network, on integer kernels."""
        return self._quantized.run(None, self._feed(batch))

    def layers(self, batch: Array, inputs: Sequence[Array]) -> list[Array]:
        """Return the outputs of each layer for these inputs, in float arithmetic."""
        feeds = self._feed(batch) | dict(zip(self._dequantized, inputs, strict=True))
        return self._layers.run(None, feeds)

    def outputs(self, batch: Array) -> list[Array]:
        """Return the first output of FP32, of QDQ in float arithmetic, and of the kernels."""
        return [session.run(None, self._feed(batch))[0] for session in self._ends]

    def _feed(self, batch: Array) -> dict[str, Array]:
        return feed(batch, self._inputs)
