"""The interface between the pipeline and a framework: `Quantizer`, its artifact and predictor.

The module also holds functions and accepted settings that quantizers share.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import NoReturn, Protocol, TypeVar

import numpy as np
import onnx
from numpy.typing import NDArray

from resnet8ptq.calibration.activations import Activations
from resnet8ptq.calibration.statistics import Range
from resnet8ptq.config.limits import FLOAT_BITS
from resnet8ptq.config.schema import (
    CORRECTIONS,
    WEIGHT_ONLY,
    BackendConfig,
    QuantizationConfig,
)
from resnet8ptq.core.descriptor import find_backends
from resnet8ptq.core.errors import QuantizationError, UnsupportedError, errors_as
from resnet8ptq.core.machine import Runtime
from resnet8ptq.data.dataset import Split
from resnet8ptq.graph.layers import find_stacks, weight_layers
from resnet8ptq.models.model import Fp32Model
from resnet8ptq.precision.decisions import Decisions
from resnet8ptq.precision.grid import WeightScheme
from resnet8ptq.precision.plan import Plan, Selection

Options = TypeVar("Options", bound=BackendConfig)

# Maps network inputs [n, ...] to each output [n, ...].
Predict = Callable[[NDArray[np.float32]], Sequence[NDArray[np.float32]]]
Nodes = Mapping[str, Mapping[str, int]]  # number of nodes, by provider and operator
# For each key of a setting, the accepted values and the reason why others are refused
Takes = Mapping[str, tuple[Sequence[object], str]]


def _backends_with(step: str) -> str:
    """Return the setting `backend=` with the backends whose `descriptor.Search` has this step."""
    names = [name for name, backend in find_backends().items() if getattr(backend.search, step)]
    return f"backend={' | '.join(names)}"


def without_corrections(reason: str) -> Takes:
    """Return `Takes` that refuse every correction with this reason."""
    return {f"corrections.{name}": ([False], reason) for name in CORRECTIONS}


_ALONE = (
    f"weights alone are quantized by {_backends_with('weights_alone')} method=weight_only "
    "dtype=w8 weight_only.block_size=null"
)
_DTYPES = ("int8", "uint8", "u8s8", "w4a8", "w8a16")  # a new dtype is added by name
# Settings for quantized weights and activations; each framework narrows them further.
WITH_ACTIVATIONS: Takes = {
    "method": (["static", "dynamic", "qat"], f"mixed needs {_backends_with('mixed')}; {_ALONE}"),
    "dtype.name": (
        ["fp32", *_DTYPES],
        f"expected {' | '.join(_DTYPES)}; {_ALONE}",
    ),
}
# The settings that every framework accepts with 16-bit activations.
WITH_16_BITS: Takes = {
    "method": (["static"], "dtype=w8a16 is static"),
    "calib.name": (
        ["minmax", "moving_average", "percentile"],
        "the method chooses ranges for 8 bits; dtype=w8a16 takes minmax | moving_average | "
        "percentile",
    ),
}
# The methods of dtype=fp16, which needs no training and no activation ranges.
_HALF: Takes = {
    "method": (["static", "weight_only"], "dtype=fp16 stores weights alone in fewer bits"),
}
LARGEST_HALF = 65504.0  # the largest value of float16
_FLOAT = "with method=weight_only activations are float"
# The settings that method=weight_only accepts.
WEIGHTS_ALONE: Takes = {
    "dtype.name": (WEIGHT_ONLY, f"method=weight_only takes dtype={' | '.join(WEIGHT_ONLY)}"),
    "reduce_range": ([None, False], "method=weight_only takes all bits"),
    "precision.plan": ([None], "method=weight_only takes the bits of dtype for all layers"),
    "format": ([None], f"has no meaning: {_FLOAT}"),
    "symmetric.activations": ([None], f"has no meaning: {_FLOAT}"),
    "float_output": ([False], f"has no meaning: {_FLOAT}"),
    **without_corrections("a correction has other scales than method=weight_only"),
}
# The settings that weight_only.block_size=null accepts: one scale for each output channel.
_BY_CHANNEL: Takes = {
    "dtype.name": (["w8"], "weights below 8 bits alone take blocks; try dtype=w8"),
    "weight_only.block_size": (
        [None],
        f"only {_backends_with('weights_in_blocks')} has scales for blocks; try "
        "weight_only.block_size=null",
    ),
    "weight_only.algorithm": (["rtn"], "weight_only.block_size=null rounds to nearest"),
    "weight_only.int8_products": ([False], "weight_only.block_size=null computes in float"),
    "symmetric.weights": ([None, True], "weight_only.block_size=null has no zero points"),
    "precision.placement": ([None], f"has no meaning: {_FLOAT}"),
}


@dataclass(frozen=True)
class Resolved:
    """The dtypes, bits and execution that a framework uses for the settings.

    The defaults are those of dtype=fp32.

    Attributes:
        weight_dtype, activation_dtype: several dtypes are joined by `, `.
        execution: `integer` if the artifact is meant for integer kernels, `simulated` if rounded
            values are computed in float. It begins with `weights only` if only the weights have
            fewer bits, and is `float` for dtype=fp32 and for 16-bit float files of other programs.
            `Quantizer.count_kernels` later counts the kernels that actually run.
        weight_bits, activation_bits: bits of a value, the most if layers differ; 7 with a reduced
            range. None for float32, or if the backend does not report them.
        weight_scheme, activation_scheme: `symmetric` or `affine`; None if not reported.
        file_format: the format of the artifact; None for dtype=fp32, and for `format=auto` until
            `Quantizer.fit` has chosen.
        engine: torch's integer engine, or `openvino`, followed by its float type unless that is
            float32; None otherwise.
    """

    weight_dtype: str = "float32"
    activation_dtype: str = "float32"
    execution: str = "float"
    weight_bits: int | None = None
    activation_bits: int | None = None
    weight_scheme: str | None = None
    activation_scheme: str | None = None
    file_format: str | None = None
    engine: str | None = None

    def to_params(self) -> dict[str, str]:
        """Return the values that are not None, as MLflow params; no name equals a config key."""
        params = {}
        for key, value in vars(self).items():
            if value is not None:
                params[key] = str(value)
        return params


@dataclass(frozen=True)
class Artifact:
    """A model file, ready to deploy.

    Attributes:
        quantized_layers: number of quantized layers. If weights alone have fewer bits than
            float32, number of layers with such weights; 0 for dtype=fp32.
        ranges: activation ranges of the file, by ONNX tensor name if the backend knows it, else by
            the name in the framework's own graph; may be empty.
        details: further MLflow params from the framework.
    """

    path: Path
    quantized_layers: int = 0
    ranges: dict[str, Range] = field(default_factory=dict)
    details: dict[str, str] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """Size of the file on disk."""
        return self.path.stat().st_size


@dataclass(frozen=True)
class Predictor:
    """A loaded artifact.

    Attributes:
        predict: returns each output [n, ...], in the network's order, for network inputs [n, ...].
        open_logits: loads a copy that ends before the final softmax. It returns None without a
            softmax, for files that cannot be cut, and if a target runs the file.
        time_ms: returns the milliseconds of a batch, measured on the target; None if this machine
            measures.
        find_nodes: returns the number of nodes that ran a batch, by ONNX Runtime's execution
            provider and operator; None if `Quantizer.count_kernels` counts the kernels.
    """

    predict: Predict
    open_logits: Callable[[], Predict | None]
    time_ms: Callable[[NDArray[np.float32]], float] | None = None
    find_nodes: Callable[[NDArray[np.float32]], Nodes] | None = None

    def logits(self, batch: NDArray[np.float32]) -> NDArray[np.float32] | None:
        """Return the final softmax's input [n, ...], dequantized.

        Returns None if `open_logits` does. Logarithms of 8-bit probabilities would be too coarse,
        because these probabilities have steps of about 1/256.
        """
        if self._to_logits is None:
            return None
        return self._to_logits(batch)[0]

    @cached_property
    def _to_logits(self) -> Predict | None:
        return self.open_logits()


@dataclass(frozen=True)
class NodeTime:
    """The time of one node of a loaded artifact, in the graph after the framework's optimization.

    Attributes:
        operator: the framework's name for the operator.
        kind: `integer` for nodes that compute on 8-bit tensors, `conversion` for nodes that only
            change the type or the layout of a tensor, `unfused` for float nodes that were meant for
            an integer kernel, `float` or `other`.
        ms: milliseconds for a batch, see `to_nodes`.
    """

    name: str
    operator: str
    kind: str
    ms: float


class Profiler(Protocol):
    """A loaded artifact that times its nodes."""

    def predict(self, batch: NDArray[np.float32]) -> Sequence[NDArray[np.float32]]:
        """Run a batch; see `Predictor`."""

    def nodes(self, runs: int) -> list[NodeTime]:
        """Return the nodes with their times in the last `runs` batches.

        Callers call this once, after the last batch.
        """


Key = tuple[str, str, str]  # name, operator and kind of a node


def to_nodes(times: Sequence[Mapping[Key, float]]) -> list[NodeTime]:
    """Return the nodes in the order of `times`, each with its mean time over the middle runs.

    The shortest quarter and the longest quarter of a node's times are left out, each rounded down.

    Args:
        times: for each run, the times of its nodes in ms, in execution order. A node that a run
            lacks counts as 0 ms there.
    """
    keys = [*dict.fromkeys(itertools.chain.from_iterable(times))]
    rows = []
    for run in times:
        rows.append([run.get(key, 0.0) for key in keys])
    table = np.array(rows)  # [runs, nodes]
    table.sort(axis=0)
    cut = len(times) // 4
    middle = table[cut : len(times) - cut].mean(axis=0)
    return [NodeTime(*key, ms) for key, ms in zip(keys, middle.tolist(), strict=True)]


@dataclass(frozen=True)
class Quantizer(ABC):
    """Quantizes with one framework, by the settings of one run, and runs the file."""

    config: QuantizationConfig
    runtime: Runtime

    @property
    def asked(self) -> Decisions:
        """The decisions that the settings contain."""
        return Decisions.of(self.config)

    def plan(self, decisions: Decisions | None = None) -> Plan:
        """Return the scheme of each layer's weights, without `reduce_range`.

        Args:
            decisions: by default, those that the settings contain.
        """
        return Plan.of(decisions or self.asked, WeightScheme.of(self.config))

    def select(self, decisions: Decisions) -> Selection:
        """Return the selection of the nodes to quantize."""
        return Selection.of(self.config, decisions)

    def activations(
        self, model: Fp32Model, decisions: Decisions, calibration: Split
    ) -> Activations:
        """Return the activation ranges; ranges of the decisions take precedence."""
        return Activations(
            model.onnx_path,
            calibration,
            self.config.calib,
            runtime=self.runtime,
            preset=decisions.ranges,
        )

    @property
    def widths(self) -> tuple[int, ...]:
        """The weight bits that the framework's files can hold.

        `FLOAT_BITS` is among them if layers can stay in float.
        """
        return (8, FLOAT_BITS)

    @property
    def runs_torch(self) -> bool:
        """Whether FP32 runs in torch, or in a file that torch exports.

        Loading then compares torch's module with ONNX Runtime.
        """
        return False

    @property
    def level_pools(self) -> tuple[str, ...]:
        """The ONNX operators of the average pools whose output shares the scale of the input.

        In the simulation, the outputs of other average pools have calibrated scales.
        """
        return ()

    @abstractmethod
    def resolve(self, decisions: Decisions | None = None) -> Resolved:
        """Return the dtypes, bits and execution that the framework uses.

        The pipeline also calls this before any work, to refuse settings early.

        Args:
            decisions: by default, those that the settings contain.

        Raises:
            UnsupportedError: the framework does not support the settings or decisions.
            ConfigError: the file of `backend.path` is missing or refused.
        """

    def fit(self, model: Fp32Model) -> dict[str, object]:
        """Return the values of settings that depend on the network, by key.

        The pipeline calls this as soon as the network is loaded.

        Raises:
            UnsupportedError: the framework cannot quantize this network with these settings.
            QuantizationError: the settings leave no node to quantize.
            ConfigError: a setting names an unknown layer, node or operator, or the file of
                `backend.path` does not match the network.
        """
        return {}

    @abstractmethod
    def quantize(
        self, model: Fp32Model, decisions: Decisions, calibration: Split, folder: Path
    ) -> Artifact:
        """Write the quantized model into `folder`; for dtype=fp32, the network without rounding.

        Args:
            model: the network; quantizers read its ONNX file; TFLite's may read its source.
            decisions: bits, layers in float and ranges; a quantizer must not read these from the
                settings.
            calibration: samples that determine the activation ranges.
            folder: an existing folder; the artifact is the only file written there.

        Raises:
            QuantizationError: the framework failed, or quantized nothing.
            UnsupportedError: the framework cannot quantize this network.
            ConfigError: a setting names an unknown layer, node or operator.
            ModelError: the framework's own converter cannot read the network's source.
        """

    def verify(self, artifact: Artifact, model: Fp32Model, calibration: Split) -> dict[str, str]:
        """Compare the outputs of a file's kernels with its definition; return MLflow params.

        By default, nothing is compared. The pipeline calls this once, on the final file of a run.

        Args:
            artifact: the result of `quantize`.
            model, calibration: the arguments of `quantize`.

        Raises:
            QuantizationError: the file is invalid.
            UnsupportedError: the framework cannot run the file, or returns outputs of other shapes.
        """
        return {}

    @abstractmethod
    def load(self, path: Path, threads: int) -> Predictor:
        """Load an artifact from disk, to run on `threads` threads."""

    @abstractmethod
    def count_kernels(self, path: Path) -> tuple[int, int]:
        """Return the numbers of layers, such as convolutions, that run on integers and in float.

        A runtime may compute a layer in float although the file has it on integers.
        """

    @abstractmethod
    def profile(self, path: Path, threads: int) -> AbstractContextManager[Profiler]:
        """Load an artifact, as `load` does, to time its nodes.

        Raises:
            UnsupportedError: the framework cannot time this file's nodes; raised before loading.
        """


@contextmanager
def running(backend: str) -> Iterator[None]:
    """Raise a library's error in the block, which runs a valid file, as `UnsupportedError`."""
    why = f"backend={backend}: the framework cannot run its quantized file"
    with errors_as(UnsupportedError, why, "try another backend, dtype or format"):
        yield


def run_once(
    quantizer: Quantizer, artifact: Artifact, calibration: Split, read: Callable[[Path], object]
) -> dict[str, str]:
    """Read a file, and run one sample if there is one; return an empty dict.

    This is a step of `Quantizer.verify`.

    Args:
        read: reads a file, and raises an error if the file is invalid.

    Raises:
        QuantizationError: the file is invalid.
        UnsupportedError: the framework cannot run the valid file that its quantizer wrote.
    """
    with errors_as(QuantizationError, f"{artifact.path}: the quantizer wrote an invalid file"):
        read(artifact.path)
    with running(quantizer.config.backend.name):
        predictor = quantizer.load(artifact.path, quantizer.runtime.threads)
        count = min(1, len(calibration))  # none if all ranges are preset
        for batch in calibration.take(np.arange(count)).batches(1):
            predictor.predict(batch)
    return {}


def refuse_empty(framework: str, graph: onnx.GraphProto, advice: str = "") -> NoReturn:
    """Raise the error for a framework that quantized no layer of the network.

    Args:
        framework: name of the framework, for the message.
        graph: the FP32 network.
        advice: text at the end of the message of `QuantizationError`, such as a mend.

    Raises:
        UnsupportedError: `find_stacks` lists every layer; most frameworks have no integer kernel
            for such products.
        QuantizationError: any other reason.
    """
    stacks = find_stacks(graph)
    layers = weight_layers(graph).values()
    if stacks and all(node.name in stacks for node in layers):
        raise UnsupportedError(
            f"{framework} has no integer kernel for products of several constant matrices: "
            f"{', '.join(stacks)[:200]}; try backend=onnx"
        )
    raise QuantizationError(f"{framework} quantized nothing{advice}")


def describe_execution(meant: str, on_integers: int, in_float: int) -> str:
    """Return how an artifact is executed.

    >>> describe_execution("integer", 3, 6)
    'mixed, 6 of 9 layers in float'

    Args:
        meant: see `Resolved.execution`.
        on_integers, in_float: see `Quantizer.count_kernels`.
    """
    if meant != "integer" or not in_float:
        return meant
    kind = "mixed" if on_integers else "float"
    return f"{kind}, {in_float} of {on_integers + in_float} layers in float"


def options_of(config: QuantizationConfig, kind: type[Options]) -> Options:
    """Return the backend's options if they are of this kind; otherwise the kind's defaults."""
    return config.backend if isinstance(config.backend, kind) else kind()


def refuse_others(config: QuantizationConfig, takes: Takes) -> None:
    """Raise `UnsupportedError`, with the reason, for the first value that `takes` refuses."""
    for key, (values, reason) in takes.items():
        value = attrgetter(key)(config)
        if value not in values:
            shown = str(value).lower() if isinstance(value, bool) else value
            raise UnsupportedError(f"{key.removesuffix('.name')}={shown}: {reason}")


def resolve_stored(config: QuantizationConfig, file_format: str | None) -> Resolved:
    """Return the types and the execution of weights that are stored in fewer bits than float32.

    The weights are 16-bit floats (dtype=fp16), or 8-bit integers with a scale for each output
    channel (method=weight_only). The file's operators take float32: on a CPU without float16
    arithmetic, operators in float16 would be slower.

    Args:
        file_format: see `Resolved`.

    Raises:
        UnsupportedError: a setting does not apply to such weights.
    """
    if config.dtype.name != "fp16":
        refuse_others(config, WEIGHTS_ALONE)
        refuse_others(config, _BY_CHANNEL)
        return Resolved(
            weight_dtype="int8",
            weight_scheme="symmetric",
            weight_bits=8,
            execution="weights only, float activations",
            file_format=file_format,
        )

    # float16 needs no scales, so only the method and the excluded nodes matter
    if config.nodes_to_exclude == "auto":
        raise UnsupportedError("nodes_to_exclude=auto: dtype=fp16 takes a list of names")
    refuse_others(config, _HALF)
    return Resolved(
        weight_dtype="float16",
        weight_bits=16,
        execution="weights only, float activations",
        file_format=file_format,
    )


def check_same(whole: Predict, small: Predict, batches: Iterable[NDArray[np.float32]]) -> None:
    """Raise `QuantizationError` if a file and its slim copy return different values for a batch."""
    for batch in batches:
        for one, other in zip(whole(batch), small(batch), strict=True):
            if not np.array_equal(one, other, equal_nan=True):
                raise QuantizationError("slim: the slimmed file predicts differently")
